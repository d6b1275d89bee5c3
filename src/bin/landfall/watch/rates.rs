//! From two readings to rates, and how these are shown. No I/O.

use std::time::Duration;

use landfall::counters::{CountUnit, PortTotal, PortTotals};
use serde::Serialize;

use super::Reading;
use crate::output::{Align, Table};

/// What a port did between two readings. `None` where it does not count, or began anew.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PortRates {
    device: String,
    port: u8,
    seconds: f64,
    sent: Rate,
    received: Rate,
    /// Since the last reading.
    errors: Option<u64>,
    /// The counters of errors that grew.
    grown: Vec<Grown>,
}

/// In each unit, a second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct Rate {
    bytes: Option<f64>,
    packets: Option<f64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Grown {
    counter: String,
    by: u64,
}

impl PortRates {
    pub(super) fn between(before: &Reading, now: &Reading) -> Vec<Self> {
        let took = now.at.saturating_duration_since(before.at);
        let of = |now: &PortTotals| {
            let before = before.totals.iter().find(|before| before.port == now.port);
            Self::of(before, now, took)
        };
        now.totals.iter().map(of).collect()
    }

    fn of(before: Option<&PortTotals>, now: &PortTotals, took: Duration) -> Self {
        let rate = |now: &[PortTotal], before: &[PortTotal]| {
            let of =
                |unit| Some(total(now, unit)?.checked_sub(total(before, unit)?)? as f64 / took.as_secs_f64());
            Rate { bytes: of(CountUnit::Bytes), packets: of(CountUnit::Packets) }
        };
        let mut grown = Vec::new();
        for counter in now.counters.iter().filter(|counter| counter.error) {
            let was = before.into_iter().flat_map(|before| &before.counters);
            let mut was = was.filter(|was| (was.group, &was.name) == (counter.group, &counter.name));
            let by = was.next().map_or(0, |was| counter.value.saturating_sub(was.value));
            if by > 0 {
                grown.push(Grown { counter: format!("{}/{}", counter.group, counter.name), by });
            }
        }
        let errors = before.and(now.errors()).map(|_| grown.iter().map(|grown| grown.by).sum());
        let nothing = Rate::default();
        Self {
            device: now.port.device.clone(),
            port: now.port.port,
            seconds: took.as_secs_f64(),
            sent: before.map_or(nothing, |before| rate(&now.sent, &before.sent)),
            received: before.map_or(nothing, |before| rate(&now.received, &before.received)),
            errors,
            grown,
        }
    }
}

fn total(totals: &[PortTotal], unit: CountUnit) -> Option<u64> {
    totals.iter().find(|total| total.unit == unit).map(|total| total.total)
}

/// For a terminal.
pub(super) fn table(rates: &[PortRates]) -> String {
    let mut table = Table::new([
        ("port", Align::Left),
        ("sent B/s", Align::Right),
        ("received B/s", Align::Right),
        ("sent pkt/s", Align::Right),
        ("received pkt/s", Align::Right),
        ("errors", Align::Right),
        ("which", Align::Left),
    ]);
    for port in rates {
        let [sent, received] = [port.sent, port.received];
        let which: Vec<_> =
            port.grown.iter().map(|grown| format!("{} +{}", grown.counter, grown.by)).collect();
        table.row([
            format!("{} port {}", port.device, port.port),
            scaled(sent.bytes),
            scaled(received.bytes),
            scaled(sent.packets),
            scaled(received.packets),
            port.errors.map_or("-".to_owned(), |errors| errors.to_string()),
            which.join(" "),
        ]);
    }
    table.text(0)
}

/// For a file: a line for each port, complete in itself.
pub(super) fn lines(rates: &[PortRates]) -> String {
    let line = |port: &PortRates| {
        let mut line = format!("{} port {}:", port.device, port.port);
        for (what, rate) in [("sent", port.sent), ("received", port.received)] {
            let parts = [(rate.bytes, "B/s"), (rate.packets, "pkt/s")];
            let known: Vec<_> = parts
                .iter()
                .filter(|(rate, _)| rate.is_some())
                .map(|(rate, unit)| format!("{} {unit}", scaled(*rate)))
                .collect();
            line +=
                &format!(" {what} {}", if known.is_empty() { "unknown".to_owned() } else { known.join(" ") });
        }
        line += &format!(" errors {}", port.errors.map_or("unknown".to_owned(), |errors| errors.to_string()));
        for grown in &port.grown {
            line += &format!(" {} +{}", grown.counter, grown.by);
        }
        line + "\n"
    };
    rates.iter().map(line).collect()
}

/// Three digits and a decimal unit: rates of networks are decimal.
fn scaled(rate: Option<f64>) -> String {
    let Some(mut rate) = rate else { return "-".to_owned() };
    let mut unit = "";
    for next in ["k", "M", "G", "T"] {
        if rate < 999.5 {
            break;
        }
        (rate, unit) = (rate / 1000.0, next);
    }
    match (unit, rate) {
        ("", _) => format!("{rate:.0}"),
        (_, ..9.995) => format!("{rate:.2}{unit}"),
        (_, ..99.95) => format!("{rate:.1}{unit}"),
        _ => format!("{rate:.0}{unit}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_have_three_digits() {
        for (rate, text) in [
            (0.0, "0"),
            (999.4, "999"),
            (1000.0, "1.00k"),
            (9_996.0, "10.0k"),
            (12_345_678.0, "12.3M"),
            (999_600.0, "1.00M"),
            (23_500_000_000.0, "23.5G"),
            (1e16, "10000T"),
        ] {
            assert_eq!(scaled(Some(rate)), text, "{rate}");
        }
        assert_eq!(scaled(None), "-");
    }
}
