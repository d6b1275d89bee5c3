//! Ports: whether they are up. `state` and `phys_state` are those of `Documentation/ABI/stable/sysfs-class-infiniband`.

use super::host::{Host, HostDevice};
use super::report::Check;

const NAME: &str = "port";

pub(super) fn check(host: &Host<'_>, device: &HostDevice, port: u8) -> Check {
    let read = |file: &str| host.root.read(&device.port_at(port, file));
    let (state, physical, rate) = (read("state"), read("phys_state"), read("rate"));
    let evidence = [&state, &physical, &rate].map(|seen| seen.evidence());
    let check = match state.value().map(word) {
        Some("ACTIVE" | "ACTIVE_DEFER") => {
            // The code of a lane's speed times lanes, which devices in software and in clouds make up.
            let rate = rate.value().map_or(String::new(), |rate| format!(", nominally {rate}"));
            Check::ok(NAME, format!("it is active{rate}"))
        }
        Some(other) => {
            // A host may have ports that nobody has plugged in.
            let matters = host.asked.device.is_some() || !any_active(host);
            Check::graded(
                matters,
                NAME,
                format!("it is {other}: it carries no traffic"),
                "bring its network interface up (`ip link set DEV up`), check the cable and the switch; on \
                InfiniBand, a subnet \
                 manager has to run",
            )
        }
        None => Check::unknown(NAME, "its state cannot be read"),
    };
    check.of_port(&device.name, port).with(evidence)
}

/// `ACTIVE` of `4: ACTIVE`.
fn word(state: &str) -> &str {
    state.split_once(": ").map_or(state, |(_, word)| word)
}

fn any_active(host: &Host<'_>) -> bool {
    host.devices.iter().any(|device| {
        device.ports.iter().any(|&port| {
            let state = host.root.text(&device.port_at(port, "state"));
            state.as_deref().map(word).is_some_and(|word| word.starts_with("ACTIVE"))
        })
    })
}
