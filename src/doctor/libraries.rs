//! libibverbs and librdmacm, and the provider of each device.
//!
//! libibverbs reads the names of providers from all files of `/etc/libibverbs.d` (lines `driver NAME`), and loads
//! `libNAME-rdmavN.so` from its own directory `libibverbs`, or by the loader's path (rdma-core,
//! libibverbs/dynamic_driver.c; `IBV_CONFIG_DIR` and `VERBS_PROVIDER_DIR` of CMakeLists.txt). A libibverbs that a
//! wheel or a container brings along without that directory finds no device at all, and says nothing.

use std::path::PathBuf;

use super::host::{Host, HostDevice};
use super::report::{Check, Evidence};
use super::root::{Root, names};

const NAME: &str = "libraries";
const PROVIDER: &str = "provider";
const CONFIG: &str = "etc/libibverbs.d";
const IBVERBS: &str = "libibverbs.so.1";
const RDMACM: &str = "librdmacm.so.1";
const PACKAGES: &str = "install rdma-core's libraries (Debian and Ubuntu: `apt-get install libibverbs1 \
    librdmacm1 ibverbs-providers`; \
    Red Hat: `dnf install libibverbs librdmacm`)";

pub(super) fn check(host: &Host<'_>) -> Vec<Check> {
    let needed = !host.devices.is_empty() || host.asked.require_rdma;
    let library = |name: &'static str, matters: bool, what: &str| {
        let (found, evidence) = found(host.root, name);
        let check = if found {
            Check::ok(NAME, format!("{name} is there"))
        } else {
            Check::graded(matters, NAME, format!("{name} is not there: {what}"), PACKAGES)
        };
        check.with([evidence])
    };
    vec![
        library(IBVERBS, needed, "no RDMA device can be opened"),
        library(RDMACM, needed && host.needs_manager(), "RDMA_CM cannot be used"),
    ]
}

/// On the host itself the loader decides. Below another root, the directories that it would look in.
fn found(root: &Root, library: &'static str) -> (bool, Evidence) {
    #[cfg(feature = "verbs")]
    if root.is_host() {
        let loaded = crate::provider::verbs::loads(library == RDMACM);
        let said = loaded.as_ref().map_or_else(ToString::to_string, |()| loaded_from(root, library));
        return (loaded.is_ok(), Evidence::new(format!("dlopen {library}"), said));
    }
    let dirs = directories(root);
    match dirs.iter().map(|dir| dir.join(library)).find(|path| path.exists()) {
        Some(path) => (true, Evidence::new(path.display().to_string(), "there")),
        None => (false, Evidence::new(library, format!("in none of {}", list(&dirs)))),
    }
}

/// Which file it is: a wheel or `LD_LIBRARY_PATH` may have brought another one than the system's (proc(5), `maps`).
#[cfg(feature = "verbs")]
fn loaded_from(root: &Root, library: &str) -> String {
    let stem = library.trim_end_matches(".1");
    let maps = root.text("proc/self/maps").unwrap_or_default();
    let path = maps
        .lines()
        .filter_map(|line| line.find('/').map(|at| &line[at..]))
        .find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with(stem)));
    path.map_or("loaded".to_owned(), |path| format!("loaded, {path}"))
}

/// A device's provider: named to libibverbs, and there.
pub(super) fn provider(host: &Host<'_>, device: &HostDevice) -> Option<Check> {
    let root = host.root;
    let Some(name) = device.provider() else {
        let driver = device.driver.as_deref().unwrap_or("not known");
        let summary = format!("which provider drives it is not known (the kernel's driver: {driver})");
        let read = root.name(&format!("sys/class/infiniband/{}/device/driver", device.name));
        let check = Check::unknown(PROVIDER, summary).of(&device.name);
        return Some(check.with([Evidence::new(read, driver)]));
    };
    let files: Vec<String> = root.names(CONFIG);
    let named = files.iter().find(|file| {
        let text = root.text(&format!("{CONFIG}/{file}")).unwrap_or_default();
        text.lines().any(|line| named_driver(line) == Some(name))
    });
    let dirs = directories(root);
    let library = dirs.iter().find_map(|dir| provider_library(dir, name));
    let config = root.name(CONFIG);
    let mut evidence = vec![match named {
        Some(file) => Evidence::new(format!("{config}/{file}"), format!("driver {name}")),
        None if files.is_empty() => Evidence::new(&config, "not there, or empty"),
        None => Evidence::new(&config, format!("none of {} files names the driver {name}", files.len())),
    }];
    evidence.push(match &library {
        Some(path) => Evidence::new(path.display().to_string(), "there"),
        None => Evidence::new(format!("lib{name}-rdmav*.so"), format!("in none of {}", list(&dirs))),
    });
    let fix = format!(
        "install the provider (Debian and Ubuntu: `apt-get install ibverbs-providers`; Red Hat: `dnf install \
        libibverbs`; else \
         the vendor's package); if a program brings its own libibverbs, let it use the system's, which has {config}"
    );
    let check = match (named, library) {
        (Some(_), Some(_)) => Check::ok(PROVIDER, format!("libibverbs finds the provider {name}")),
        (None, _) => Check::failure(
            PROVIDER,
            format!(
                "libibverbs is not told of the provider {name}: the kernel has the device, and no program sees it"
            ),
            fix,
        ),
        (Some(_), None) => Check::failure(
            PROVIDER,
            format!(
                "the library of the provider {name} is not there: the kernel has the device, and no program sees it"
            ),
            fix,
        ),
    };
    Some(check.of(&device.name).with(evidence))
}

/// `driver NAME`, with blanks as libibverbs takes them.
fn named_driver(line: &str) -> Option<&str> {
    let mut words = line.split([' ', '\t']).filter(|word| !word.is_empty());
    (words.next() == Some("driver")).then(|| words.next()).flatten()
}

fn provider_library(dir: &std::path::Path, provider: &str) -> Option<PathBuf> {
    let stem = format!("lib{provider}-rdmav");
    [dir.join("libibverbs"), dir.to_owned()].into_iter().find_map(|dir| {
        let found = names(&dir).into_iter().find(|name| name.starts_with(&stem) && name.ends_with(".so"))?;
        Some(dir.join(found))
    })
}

/// Where the dynamic loader looks (ld.so(8)): its defaults, those of Debian's multiarch, and what `ld.so.conf` adds.
/// On the host itself `LD_LIBRARY_PATH` too.
fn directories(root: &Root) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    if root.is_host() {
        let path = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        dirs.extend(std::env::split_paths(&path).filter(|dir| dir.is_absolute()));
    }
    let mut lines = root.text("etc/ld.so.conf").unwrap_or_default();
    for file in root.names("etc/ld.so.conf.d").into_iter().filter(|file| file.ends_with(".conf")) {
        lines.push('\n');
        lines.push_str(&root.text(&format!("etc/ld.so.conf.d/{file}")).unwrap_or_default());
    }
    let absolute = lines.lines().filter_map(|line| line.trim().strip_prefix('/'));
    dirs.extend(absolute.map(|dir| root.path(dir)));
    for base in ["lib64", "usr/lib64", "lib", "usr/lib", "usr/local/lib", "usr/local/lib64"] {
        let multiarch = root.names(base).into_iter().filter(|name| name.ends_with("-linux-gnu"));
        dirs.extend(multiarch.map(|name| root.path(base).join(name)));
        dirs.push(root.path(base));
    }
    let mut seen = std::collections::BTreeSet::new();
    dirs.retain(|dir| dir.is_dir() && seen.insert(dir.canonicalize().unwrap_or_else(|_| dir.clone())));
    dirs
}

fn list(dirs: &[PathBuf]) -> String {
    match dirs {
        [] => "the loader's directories, of which there is none".to_owned(),
        _ => dirs.iter().map(|dir| dir.display().to_string()).collect::<Vec<_>>().join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_provider_is_named_as_libibverbs_reads_it() {
        assert_eq!(named_driver("driver mlx5"), Some("mlx5"));
        assert_eq!(named_driver("\t driver\t mlx5 # comment"), Some("mlx5"));
        for line in ["", "#driver mlx5", "drivers mlx5", "driver", "mlx5"] {
            assert_eq!(named_driver(line), None, "{line:?}");
        }
    }
}
