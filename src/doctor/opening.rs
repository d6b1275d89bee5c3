//! What the device itself says: whether this crate opens it, and the limits that matter.

use super::host::{Fabric, Host, HostDevice};
use super::report::Check;

const NAME: &str = "capabilities";

pub(super) fn check(host: &Host<'_>, device: &HostDevice) -> Vec<Check> {
    if device.fabric == Fabric::Other {
        let node_type = host.root.read(&device.at("node_type"));
        let check = Check::failure(
            NAME,
            "the device has no RC queue pairs, which this version of landfall needs (EFA has SRD)",
            "use the soft provider there meanwhile: `Device::open(\"soft\")`, over TCP",
        );
        return vec![check.of(&device.name).with([node_type.evidence()])];
    }
    #[cfg(feature = "verbs")]
    if host.root.is_host() {
        return live::check(device);
    }
    Vec::new()
}

#[cfg(feature = "verbs")]
mod live {
    use super::*;
    use crate::device::{Capabilities, Device};
    use crate::doctor::report::Evidence;

    pub(super) fn check(device: &HostDevice) -> Vec<Check> {
        let call = format!("Device::open({:?})", device.name);
        let opened = match Device::open(&device.name) {
            Ok(opened) => opened,
            Err(error) => {
                let cause =
                    std::error::Error::source(&error).map_or(String::new(), |cause| format!(": {cause}"));
                // The error has the fix; the checks before this one have the cause.
                let check = Check::failure(
                    "opens",
                    format!("it cannot be opened: {error}{cause}"),
                    "mend what failed above",
                );
                return vec![check.of(&device.name).with([Evidence::new(call, "an error")])];
            }
        };
        let (transport, gid) = (opened.transport(), opened.gid());
        let opens = Check::ok("opens", format!("it opens, as {transport} with the GID {gid}"));
        let capabilities = Check::ok(NAME, words(opened.capabilities()));
        let ok = [opens, capabilities].map(|check| check.of(&device.name));
        ok.map(|check| check.with([Evidence::new(call.clone(), "opened")])).into()
    }

    fn words(c: &Capabilities) -> String {
        format!(
            "max_qp_wr {}, max_cqe {}, max_sge {}/{}, inline {} B, max_qp_rd_atom {}, max_mr_size {} B, max_srq \
            {} (none is needed), \
             immediate {}, atomics {}, out of band {}",
            c.max_qp_wr,
            c.max_cqe,
            c.max_send_sge,
            c.max_recv_sge,
            c.max_inline,
            c.max_rd_atomic,
            c.max_mr_size,
            c.max_srq,
            yes(c.immediate),
            yes(c.atomics),
            yes(c.oob),
        )
    }

    fn yes(is: bool) -> &'static str {
        if is { "yes" } else { "no" }
    }
}
