//! Whether a port's counters can be read, without which nothing but the library itself says which path bytes took.
//!
//! The kernel shows `counters` and `hw_counters` of a device in the network namespace that it belongs to, and not in
//! others that share it (drivers/infiniband/core/sysfs.c, `setup_port`: `is_full_dev`). So a container with a network
//! of its own sees the port and none of its counts.

use super::host::{Host, HostDevice, SIW};
use super::report::{Check, Evidence};
use crate::counters::{CounterPort, CounterSnapshot, PortCount};

const NAME: &str = "counters";

pub(super) fn check(host: &Host<'_>, device: &HostDevice, port: u8) -> Check {
    let (sysfs, ports) = (host.root.sysfs(), [CounterPort::new(&device.name, port)]);
    let snapshot = CounterSnapshot::take(&sysfs, &ports);
    // Against itself: what can be counted, and what cannot.
    let now = snapshot.since(&snapshot);
    let both: Vec<&PortCount> = now.sent().iter().chain(now.received()).collect();
    let evidence = both.iter().map(|count| {
        let file = count.counter.as_deref().unwrap_or("counters, hw_counters");
        let said = match (&count.unknown, count.unit) {
            (Some(why), _) => why.clone(),
            (None, Some(unit)) => format!(
                "counts {}",
                if unit == crate::counters::CountUnit::Bytes { "bytes" } else { "packets" }
            ),
            (None, None) => "there".to_owned(),
        };
        Evidence::new(host.root.name(&device.port_at(port, file)), said)
    });
    let evidence: Vec<_> = evidence.collect();
    let readable = both.iter().all(|count| count.counted.is_some());
    let has = |dir: &str| host.root.exists(&device.port_at(port, dir));
    let check = if readable {
        Check::ok(NAME, "what the port sends and receives can be counted: a path can be verified")
    } else if both.iter().any(|count| count.counter.is_some()) {
        Check::warning(
            NAME,
            "the port's counters are there and have no numbers: whether a path was RDMA stays unknown",
            "update the driver; \"N/A (no PMA)\" is a device that counts elsewhere, so look for its hw_counters",
        )
    } else if device.driver.as_deref() == Some(SIW) {
        Check::unknown(NAME, "siw counts nothing: whether a path was RDMA stays unknown there")
    } else if has("counters") || has("hw_counters") {
        Check::unknown(NAME, "the port has counters, and none that is known to count its traffic")
    } else {
        Check::warning(
            NAME,
            "the port shows no counters: whether a path was RDMA stays unknown",
            "in a container with a network of its own the kernel hides them: use the host's network (`--network host`, \
             `hostNetwork: true`), or read them on the host (`landfall watch --prometheus`)",
        )
    };
    check.of_port(&device.name, port).with(evidence)
}
