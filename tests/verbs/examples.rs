//! The examples on RDMA devices, as their users run them. `cargo build --examples` builds them.

use std::process::{Command, Output};

use serde_json::Value;

use crate::harness::*;

/// Of an example on the two devices, within the deadline: the program has one of its own.
fn output(example: &str, arguments: &str) -> Output {
    output_on(&name(0), &name(1), example, arguments)
}

fn output_on(near: &str, far: &str, example: &str, arguments: &str) -> Output {
    let exe = std::env::current_exe().unwrap();
    let path = exe.ancestors().nth(2).unwrap().join("examples").join(example);
    assert!(path.exists(), "{} is missing: run cargo build --examples", path.display());
    let mut command = Command::new(path);
    command.args(["--json", "--transport", "verbs", "--device", near, "--peer-device", far]);
    command.args(arguments.split_whitespace()).output().unwrap()
}

fn report(example: &str, arguments: &str) -> Value {
    parse(output(example, arguments), arguments)
}

fn parse(out: Output, arguments: &str) -> Value {
    assert!(out.status.success(), "{arguments}: {}", String::from_utf8_lossy(&out.stderr));
    serde_json::from_slice(&out.stdout).unwrap()
}

#[test]
#[ignore = "needs RDMA devices"]
fn b5_kv_stream_lands_by_every_bootstrap_that_the_device_has() {
    let caps = device(0).capabilities().clone();
    let auto = if caps.oob { "oob" } else { "cm" };
    for (asked, way) in [("auto", auto), ("cm", "cm")] {
        let seen = report("kv_stream", &format!("--bootstrap {asked} --requests 2 --tokens 256 --layers 3"));
        assert_eq!((&seen["verified"], &seen["bootstrap"]), (&true.into(), &way.into()), "{seen}");
        let notify = if caps.immediate { "imm" } else { "send" };
        assert_eq!(seen["path"]["notify"], notify, "{seen}");
    }
    let out = output("kv_stream", "--bootstrap oob --tokens 64");
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.success(), caps.oob, "{said}");
    assert!(caps.oob || said.contains("RTS") && said.contains("RDMA_CM"), "{said}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_kv_stream_reads_whichever_way() {
    for (way, method) in [("auto", ""), ("rdma", "rdma-read"), ("remote-write", "remote-write")] {
        let seen = report("kv_stream", &format!("--read {way} --qps 2 --requests 2 --tokens 256 --layers 3"));
        assert_eq!(seen["verified"], true, "{seen}");
        assert!(seen["read"]["method"].as_str().unwrap().starts_with(method), "{seen}");
    }
}

/// Both devices at both ends, each joined to the other end of its cable.
#[test]
#[ignore = "needs RDMA devices"]
fn k10_kv_stream_has_a_rail_over_each_device() {
    let (near, far) = (format!("{},{}", name(0), name(1)), format!("{},{}", name(1), name(0)));
    for more in ["", "--read auto", "--layerwise"] {
        let arguments = format!("--requests 2 --tokens 256 --layers 3 {more}");
        let seen = parse(output_on(&near, &far, "kv_stream", &arguments), &arguments);
        let rails = seen["path"]["rails"].as_array().unwrap();
        let devices: Vec<_> = rails.iter().map(|rail| rail["device"].as_str().unwrap()).collect();
        assert_eq!((&seen["verified"], devices), (&true.into(), vec![&*name(0), &name(1)]), "{seen}");
    }
}

#[test]
#[ignore = "needs RDMA devices"]
fn k1_kv_stream_lands_layer_by_layer() {
    let seen = report("kv_stream", "--requests 2 --tokens 256 --layers 9 --page 16 --layerwise");
    assert_eq!((&seen["verified"], &seen["layerwise"]["requests"]), (&true.into(), &2.into()), "{seen}");
}

#[test]
#[ignore = "needs RDMA devices"]
fn b5_ping_pong_measures_by_every_bootstrap_that_the_device_has() {
    for bootstrap in ["auto", "cm"] {
        let arguments =
            format!("--bootstrap {bootstrap} --op send,write,kv --sizes 64,4097 --iters 20 --warmup 2");
        let seen = report("ping_pong", &arguments);
        assert_eq!(seen["results"].as_array().unwrap().len(), 3 * 2, "{seen}");
    }
}
