//! The clock: whether reading it is cheap. landfall compares no clocks of two hosts, so that they need not agree.
//!
//! With `tsc`, `kvm-clock`, Hyper-V's page and ARM's counter a reading stays in the process (vdso(7)); with `hpet`
//! and `acpi_pm` each is a system call that reads a device, and that is in every latency. `current_clocksource` is
//! that of the kernel's kernel/time/clocksource.c.

use super::host::Host;
use super::report::Check;

const NAME: &str = "clock";
const SOURCE: &str = "sys/devices/system/clocksource/clocksource0/current_clocksource";
const CHEAP: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];

pub(super) fn check(host: &Host<'_>) -> Check {
    let source = host.root.read(SOURCE);
    let check = match source.value() {
        Some(name) if CHEAP.contains(&name) => {
            Check::ok(NAME, format!("reading the clock is cheap ({name})"))
        }
        Some(name) => Check::warning(
            NAME,
            format!("each reading of the clock is a system call ({name}), and latencies have it in them"),
            "let the kernel use the processor's counter: `clocksource=tsc` on its command line, if dmesg does \
            not say that it is unstable",
        ),
        None => Check::unknown(NAME, "the kernel's clock source cannot be read"),
    };
    check.with([source.evidence()])
}
