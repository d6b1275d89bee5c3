//! The counters in Prometheus' text format, version 0.0.4. No I/O. The names are documented in the guide's chapter on
//! operating.

use std::fmt::Write as _;

use landfall::counters::{CountUnit, PortTotal, PortTotals};
use landfall::device::PortInfo;

pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// What a scrape is made of.
pub(super) struct Scrape {
    /// Each port's counters, and what it says of itself.
    pub(super) ports: Vec<(PortTotals, Option<PortInfo>)>,
    /// How long reading them took, in seconds.
    pub(super) seconds: f64,
}

/// A family: its name, its type and its help, then its samples.
struct Families(String);

impl Families {
    fn family(
        &mut self,
        name: &str,
        kind: &str,
        help: &str,
        samples: impl IntoIterator<Item = (String, String)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        // A family without samples says nothing.
        if samples.peek().is_none() {
            return;
        }
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
        for (labels, value) in samples {
            let _ = writeln!(self.0, "{name}{labels} {value}");
        }
    }
}

pub(super) fn text(scrape: &Scrape) -> String {
    let mut families = Families(String::new());
    families.family(
        "landfall_build_info",
        "gauge",
        "The program's version; always 1.",
        [(labels(&[("version", env!("CARGO_PKG_VERSION"))]), "1".to_owned())],
    );
    families.family(
        "landfall_port_info",
        "gauge",
        "What the kernel says of a port; always 1.",
        scrape
            .ports
            .iter()
            .filter_map(|(totals, info)| Some((info_labels(totals, info.as_ref()?), "1".to_owned()))),
    );
    families.family(
        "landfall_port_up",
        "gauge",
        "Whether the port is ACTIVE.",
        scrape.ports.iter().filter_map(|(totals, info)| {
            let up = info.as_ref()?.state.as_deref()?.starts_with("ACTIVE");
            Some((labels(&port_labels(totals).each()), u8::from(up).to_string()))
        }),
    );
    for (name, help, unit, sent) in [
        (
            "landfall_port_sent_bytes_total",
            "Bytes that the port has sent, by its device.",
            CountUnit::Bytes,
            true,
        ),
        (
            "landfall_port_received_bytes_total",
            "Bytes that the port has received, by its device.",
            CountUnit::Bytes,
            false,
        ),
        (
            "landfall_port_sent_packets_total",
            "Packets that the port has sent, by its device.",
            CountUnit::Packets,
            true,
        ),
        (
            "landfall_port_received_packets_total",
            "Packets that the port has received, by its device.",
            CountUnit::Packets,
            false,
        ),
    ] {
        let samples = scrape.ports.iter().filter_map(|(totals, _)| {
            let of: &[PortTotal] = if sent { &totals.sent } else { &totals.received };
            let total = of.iter().find(|total| total.unit == unit)?.total;
            Some((labels(&port_labels(totals).each()), total.to_string()))
        });
        families.family(name, "counter", help, samples);
    }
    for (name, help, errors) in [
        ("landfall_port_errors_total", "A counter of the port that counts something that went wrong.", true),
        (
            "landfall_port_counter_total",
            "Any other counter of the port, as its driver has it, in its own unit.",
            false,
        ),
    ] {
        let samples = scrape.ports.iter().flat_map(|(totals, _)| {
            totals.counters.iter().filter(move |counter| counter.error == errors).map(|counter| {
                let port = port_labels(totals);
                let [device, number] = port.each();
                let all = [device, number, ("group", counter.group), ("counter", counter.name.as_str())];
                (labels(&all), counter.value.to_string())
            })
        });
        families.family(name, "counter", help, samples);
    }
    families.family(
        "landfall_read_seconds",
        "gauge",
        "How long reading all counters took.",
        [(String::new(), format!("{:.6}", scrape.seconds))],
    );
    families.0
}

struct PortLabels<'a> {
    device: &'a str,
    number: String,
}

impl PortLabels<'_> {
    fn each(&self) -> [(&'static str, &str); 2] {
        [("device", self.device), ("port", &self.number)]
    }
}

fn port_labels(totals: &PortTotals) -> PortLabels<'_> {
    PortLabels { device: &totals.port.device, number: totals.port.port.to_string() }
}

fn info_labels(totals: &PortTotals, info: &PortInfo) -> String {
    let or_nothing = |text: &Option<String>| text.clone().unwrap_or_default();
    let port = port_labels(totals);
    let [device, number] = port.each();
    labels(&[
        device,
        number,
        ("state", &or_nothing(&info.state)),
        ("physical_state", &or_nothing(&info.physical_state)),
        ("link_layer", &or_nothing(&info.link_layer)),
        ("rate", &or_nothing(&info.rate)),
    ])
}

fn labels(pairs: &[(&str, &str)]) -> String {
    let each: Vec<_> = pairs.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
    format!("{{{}}}", each.join(","))
}

/// A label's value, as the format wants it.
fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_labels_are_escaped() {
        assert_eq!(labels(&[("a", "x\"y\\z\n")]), "{a=\"x\\\"y\\\\z\\n\"}");
    }

    #[test]
    fn a_host_without_ports_still_says_who_serves() {
        let text = text(&Scrape { ports: Vec::new(), seconds: 0.25 });
        assert!(
            text.contains("landfall_build_info{version=\"")
                && text.ends_with("landfall_read_seconds 0.250000\n")
        );
        assert!(!text.contains("landfall_port"), "{text}");
    }
}
