//! `landfall watch`: what the devices' counters say, live, or as an exporter for Prometheus.

mod http;
mod prometheus;
mod rates;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use landfall::counters::{CounterPort, PortTotals, Sysfs};

use crate::output::{Error, Outcome, Output, Usage};
use crate::stop::Stop;
use rates::PortRates;

/// Watch the counters of devices: rates and errors, as a table on a terminal, as lines elsewhere
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Watch this device alone; may be given several times
    #[arg(long, value_name = "NAME")]
    device: Vec<String>,
    /// Seconds between two readings, from 0.1
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    interval: Duration,
    /// End after so many lines or tables; without it, never
    #[arg(long, value_name = "N")]
    count: Option<u64>,
    /// Serve the counters in Prometheus' text format at http://ADDR/metrics, and print nothing more. A port alone is
    /// one of the loopback address
    #[arg(long, value_name = "ADDR", value_parser = address, conflicts_with_all = ["count", "interval"])]
    prometheus: Option<SocketAddr>,
    /// Look for sys below this directory
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// What is watched.
#[derive(Clone, Debug)]
pub(crate) struct Watched {
    sysfs: Sysfs,
    /// Empty: all.
    devices: Vec<String>,
}

impl Watched {
    /// Devices come and go: they are listed anew each time.
    fn ports(&self) -> Vec<CounterPort> {
        let mut ports = self.sysfs.ports();
        ports.retain(|port| self.devices.is_empty() || self.devices.contains(&port.device));
        ports
    }

    fn read(&self) -> Reading {
        let at = Instant::now();
        Reading { at, totals: PortTotals::take(&self.sysfs, &self.ports()) }
    }
}

/// All counters at one time.
pub(crate) struct Reading {
    at: Instant,
    totals: Vec<PortTotals>,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    if !args.root.is_dir() {
        return Err(Usage(format!("--root {}: no such directory", args.root.display())).into());
    }
    let watched = Watched { sysfs: Sysfs::at(args.root.join("sys")), devices: args.device.clone() };
    let ports = watched.ports();
    if let Some(missing) = args.device.iter().find(|name| ports.iter().all(|port| port.device != **name)) {
        return Err(
            format!("the kernel has no RDMA device {missing:?}; `landfall devices` lists them").into()
        );
    }
    // An exporter waits for devices that are made later.
    if ports.is_empty() && args.prometheus.is_none() {
        return Err(
            "the kernel has no RDMA device, and so no counters; `landfall doctor` says what may be missing"
                .into(),
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let ended = runtime.block_on(async {
        let stop = Stop::watch()?;
        tokio::select! {
            ended = watch(args, watched, output) => ended,
            () = stop.told() => Ok(()),
        }
    });
    // A reading that is under way is not waited for: a device may be slow to answer.
    runtime.shutdown_background();
    ended.map(|()| Outcome::Well)
}

async fn watch(args: &Args, watched: Watched, output: &Output) -> Result<(), Error> {
    match args.prometheus {
        Some(address) => http::serve(address, watched, output).await,
        None => show(args, watched, output).await,
    }
}

async fn show(args: &Args, watched: Watched, output: &Output) -> Result<(), Error> {
    let read = || {
        let watched = watched.clone();
        tokio::task::spawn_blocking(move || watched.read())
    };
    let mut ticks = tokio::time::interval(args.interval);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    ticks.tick().await;
    let mut before = read().await?;
    let (mut drawn, mut shown) = (0, 0u64);
    while args.count.is_none_or(|count| shown < count) {
        ticks.tick().await;
        let now = read().await?;
        let rates = PortRates::between(&before, &now);
        if output.is_json() {
            output.line(&rates)?;
        } else if output.is_live() {
            let table = rates::table(&rates);
            // Over the last one; what is too wide is cut off, since a line that wraps would be two.
            let up = if drawn > 0 { format!("\x1b[{drawn}A\x1b[J") } else { String::new() };
            output.print(&format!("{up}\x1b[?7l{table}\x1b[?7h"))?;
            drawn = table.lines().count();
        } else {
            output.print(&rates::lines(&rates))?;
        }
        (before, shown) = (now, shown + 1);
    }
    Ok(())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "give a number of seconds, such as 0.5".to_owned())?;
    if !(0.1..=3600.0).contains(&seconds) {
        return Err(
            "give from 0.1 to 3600 seconds: devices are asked for their counters at most every 10 ms"
                .to_owned(),
        );
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// `ADDR:PORT`, or a port of the loopback address.
fn address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    if let Ok(port) = port.parse() {
        return Ok((Ipv4Addr::LOCALHOST, port).into());
    }
    text.parse()
        .map_err(|_| "give a port, or an address and a port: 9797, 0.0.0.0:9797, [::1]:9797".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_alone_is_one_of_the_loopback_address() {
        for text in ["9797", ":9797", "127.0.0.1:9797"] {
            assert_eq!(address(text).unwrap().to_string(), "127.0.0.1:9797", "{text}");
        }
        assert_eq!(address("[::]:80").unwrap().to_string(), "[::]:80");
        for text in ["", ":", "host:1", "1.2.3.4", "70000", "0.0.0.0"] {
            assert!(address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn intervals_have_bounds() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "3601", "1s", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
