//! eRDMA's mode: whether queue pairs can be connected out of band, or by RDMA_CM only.
//!
//! The module's parameter `compat_mode` decides when it is loaded: in standard mode (N) a queue pair that is moved to
//! RTS by hand is refused; in compat mode (Y) both ways work, and the driver holds 16 TCP ports (see `erdma_ports`).
//! It is a parameter of the vendor's module, set as `options erdma compat_mode=Y` in /etc/modprobe.d (Alibaba Cloud's
//! guides for eRDMA, and AliyunContainerService/alibabacloud-erdma-controller, internal/drivers/compat.go).

use super::host::Host;
use super::report::Check;

const NAME: &str = "erdma_mode";
/// Below the root.
pub(super) const COMPAT_MODE: &str = "sys/module/erdma/parameters/compat_mode";

const FIX: &str = "`echo 'options erdma compat_mode=Y' >> /etc/modprobe.d/erdma.conf`, then `rmmod erdma && \
    modprobe erdma \
    compat_mode=Y`, on each host; or connect by RDMA_CM (`Bootstrap::Auto` does by itself)";

pub(super) fn check(host: &Host<'_>) -> Option<Check> {
    if !host.has_driver("erdma") {
        return None;
    }
    let mode = host.root.read(COMPAT_MODE);
    let check = match mode.value() {
        Some("Y" | "1") => {
            Check::ok(NAME, "compat mode: queue pairs are connected out of band or by RDMA_CM")
        }
        Some("N" | "0") if host.asked.out_of_band => Check::failure(
            NAME,
            "standard mode: only RDMA_CM connects queue pairs, and an out-of-band bootstrap fails as it moves \
            one to RTS",
            FIX,
        ),
        Some("N" | "0") => Check::warning(
            NAME,
            "standard mode: only RDMA_CM connects queue pairs, which landfall does by itself and other programs do not",
            FIX,
        ),
        Some(_) => Check::unknown(NAME, "the driver's mode is neither Y nor N"),
        // The kernel's own erdma has no such parameter, and connects by RDMA_CM.
        None if mode.is_missing() && host.asked.out_of_band => Check::failure(
            NAME,
            "the driver has no compat mode: only RDMA_CM connects queue pairs",
            "install the vendor's driver, and load it with compat_mode=Y; or connect by RDMA_CM",
        ),
        None if mode.is_missing() => Check::warning(
            NAME,
            "the driver has no compat mode: only RDMA_CM connects queue pairs, which landfall does by itself",
            "nothing, unless other programs need an out-of-band bootstrap: then install the vendor's driver",
        ),
        None => Check::unknown(NAME, "the driver's mode cannot be read"),
    };
    Some(check.with([mode.evidence()]))
}
