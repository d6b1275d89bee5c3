//! What the guide and `deploy` say is so: command lines are understood, messages exist, checks have their names.

use crate::program::{landfall, output, stderr, stdout};
use crate::roots::{Root, mlx5};

const KUBERNETES: &str = include_str!("../../deploy/kubernetes.yaml");
const CONTAINERFILE: &str = include_str!("../../deploy/Containerfile");
const TROUBLESHOOTING: &str = include_str!("../../src/guide/troubleshooting.md");
const DEPLOYING: &str = include_str!("../../src/guide/deploying.md");

/// The argument lists of the manifest's containers.
fn arguments() -> Vec<Vec<String>> {
    let lists = KUBERNETES.lines().filter_map(|line| line.trim().strip_prefix("args: "));
    lists.map(|list| serde_json::from_str(list).expect("a list in one line")).collect()
}

#[test]
fn the_manifests_arguments_are_understood() {
    let lists = arguments();
    let commands: Vec<&str> = lists.iter().map(|list| list[0].as_str()).collect();
    assert_eq!(commands, ["watch", "doctor", "bench"]);
    let root = mlx5();
    let with_root: Vec<&str> =
        lists[1].iter().map(String::as_str).chain(["--root", root.path().to_str().unwrap()]).collect();
    assert_eq!(output(&with_root).status.code(), Some(0), "{}", stderr(&output(&with_root)));
    // With the node's address for the variable, and a device to ask for that is not there: it ends by itself.
    let watch: Vec<String> = lists[0].iter().map(|word| word.replace("$(HOST_IP)", "127.0.0.1")).collect();
    let mut watch: Vec<&str> = watch.iter().map(String::as_str).collect();
    watch.extend(["--device", "none"]);
    let ended = output(&watch);
    assert_eq!(ended.status.code(), Some(1), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("\"none\""), "{}", stderr(&ended));
    // Here is no such device. The key is that of a Secret there.
    let keys = root.path().join("keys");
    std::fs::write(&keys, format!("workers {}\n", "5a".repeat(32))).unwrap();
    std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o400)).unwrap();
    let serve: Vec<String> = lists[2]
        .iter()
        .map(|word| {
            word.replace("$(POD_IP):7471", "127.0.0.1:0")
                .replace("/etc/landfall/keys", keys.to_str().unwrap())
        })
        .collect();
    let ended = output(&serve.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(ended.status.code(), Some(1), "{}", stderr(&ended));
    assert!(stderr(&ended).contains("erdma_0"), "{}", stderr(&ended));
}

#[test]
fn the_containers_rust_is_that_of_the_crate_and_it_has_what_the_doctor_asks_for() {
    let manifest = include_str!("../../Cargo.toml");
    let rust =
        manifest.lines().find_map(|line| line.strip_prefix("rust-version = \"")?.strip_suffix('"')).unwrap();
    assert!(CONTAINERFILE.contains(&format!("/rust:{rust}-")), "Cargo.toml has {rust}");
    for package in ["libibverbs1", "librdmacm1", "ibverbs-providers"] {
        assert!(CONTAINERFILE.contains(package) && DEPLOYING.contains(package), "{package}");
    }
}

#[test]
fn messages_of_the_troubleshooting_page_are_those_of_the_crate() {
    let sources = [
        include_str!("../../src/error.rs"),
        include_str!("../../src/connect/error.rs"),
        include_str!("../../src/device/gid.rs"),
        include_str!("../../src/kv/write.rs"),
        include_str!("../../src/kv/proto/event.rs"),
        include_str!("../../src/provider/mod.rs"),
        include_str!("../../src/provider/verbs/device.rs"),
        include_str!("../../src/provider/verbs/load.rs"),
    ];
    let (mut quoted, mut looks_like) = (0, false);
    for line in TROUBLESHOOTING.lines() {
        if line.starts_with("| it ") {
            looks_like = line.starts_with("| it looks like");
        }
        let first = line.strip_prefix("| ").and_then(|line| line.split(" | ").next()).unwrap_or_default();
        if looks_like {
            continue;
        }
        for text in first.split('`').skip(1).step_by(2) {
            assert!(sources.iter().any(|source| source.contains(text)), "no error says {text:?}");
            quoted += 1;
        }
    }
    assert!(quoted > 20, "{quoted}");
}

#[test]
fn checks_that_the_guide_names_are_checks_of_the_doctor() {
    let root = mlx5().nvidia(true);
    let erdma = crate::roots::erdma("N\n");
    let names = |root: &Root| -> Vec<String> {
        let report = output(&["doctor", "--json", "--root", root.path().to_str().unwrap()]);
        let report: serde_json::Value = serde_json::from_str(&stdout(&report)).unwrap();
        report["checks"].as_array().unwrap().iter().map(|c| c["name"].as_str().unwrap().to_owned()).collect()
    };
    let all = [names(&root), names(&erdma)].concat();
    for page in [TROUBLESHOOTING, DEPLOYING] {
        let named = page.match_indices("doctor: `").map(|(at, start)| {
            let rest = &page[at + start.len()..];
            rest.split('`').next().unwrap()
        });
        for name in named {
            assert!(all.iter().any(|check| check == name), "the doctor has no check {name:?}");
        }
    }
}

#[test]
fn options_that_the_guide_names_are_options() {
    let help = stdout(&landfall(&["doctor", "--help"]).output().unwrap());
    let guide = include_str!("../../src/guide/operating.md");
    for option in ["--device", "--bootstrap", "--gpu", "--require-rdma", "--root", "--verbose"] {
        assert!(help.contains(option) && guide.contains(option), "{option}");
    }
}
