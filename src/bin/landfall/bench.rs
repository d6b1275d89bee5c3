//! `landfall bench serve` and `landfall bench connect ADDR`: bandwidth, latency and message rate between two processes, to the
//! landed notification and to local completion side by side.
//!
//! Each size has a data channel of its own. One transfer after the other gives latencies; several at once give bandwidth and rate.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use landfall::connect::ConnectError;
use landfall::error::chain;
use landfall::kv::PathReport;
use serde::Serialize;

use crate::device::{DeviceArgs, Side};
use crate::measure::client::Client;
use crate::measure::data::Budget;
use crate::measure::histogram::Latency;
use crate::measure::load::Report;
use crate::measure::plot::{self, Lines, Series};
use crate::measure::progress::Progress;
use crate::measure::server::Server;
use crate::measure::talk::{About, MOST_IN_FLIGHT, Memory, Op, ReadBy, Shape};
use crate::measure::units::{bytes, digits, duration, many, rate, show_bytes, some_bytes};
use crate::output::{Error, Outcome, Output, Usage};
use crate::stop::Stop;

/// Measure bandwidth, latency and message rate between two processes
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    side: SideArgs,
}

#[derive(Debug, clap::Subcommand)]
enum SideArgs {
    /// Be measured: serves `bench connect`, `sweep` and `verify`, until it is ended
    Serve(Serve),
    /// Measure against a server
    Connect(Connect),
}

#[derive(Debug, clap::Args)]
struct Serve {
    /// Where to listen; port 0 takes a free one. Data channels take a free port each, on the same address
    #[arg(default_value = "127.0.0.1:7471", value_name = "ADDR")]
    address: SocketAddr,
    /// Memory for the measurements of all clients together
    #[arg(long, value_name = "BYTES", default_value = "4G", value_parser = some_bytes)]
    limit: u64,
    /// Clients that are served at once; others are turned away
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    clients: u16,
    #[command(flatten)]
    device: DeviceArgs,
}

#[derive(Debug, clap::Args)]
struct Connect {
    /// The server, as HOST:PORT
    #[arg(value_name = "ADDR")]
    address: String,
    /// What to do with the bytes
    #[arg(long, value_enum, default_value_t = Op::Write)]
    op: Op,
    /// Sizes of a transfer, with commas (K, M and G are powers of 1024)
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = bytes, default_value = "4K,64K,1M",
          conflicts_with = "all")]
    size: Vec<u64>,
    /// Every power of two from 2 B to 8 MiB
    #[arg(long)]
    all: bool,
    /// Transfers under way at once, for bandwidth and rate [default: 16; fewer above 4 MiB]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_IN_FLIGHT)))]
    in_flight: Option<u32>,
    #[command(flatten)]
    load: LoadArgs,
    /// Both ends do it at once
    #[arg(long)]
    bidirectional: bool,
    /// Queue pairs of each rail
    #[arg(short, long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..=64))]
    qps: u16,
    /// Draw the results into this file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// What `sweep` has, too.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LoadArgs {
    /// How long each measurement takes
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = duration)]
    pub(crate) duration: Duration,
    /// Where the bytes lie, at both ends: host, or cuda[:N], memory of a GPU (the feature cuda)
    #[arg(long, value_name = "PLACE", default_value_t = Memory::Host, value_parser = Memory::here)]
    pub(crate) memory: Memory,
    /// How reads are done
    #[arg(long, value_enum, default_value_t = ReadBy::Auto)]
    pub(crate) read_by: ReadBy,
    /// How long a waiting end polls before it sleeps, in microseconds; it holds its thread for that long
    #[arg(long, value_name = "MICROS", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=1_000_000))]
    pub(crate) spin: u64,
}

/// A size, measured.
#[derive(Debug, Serialize)]
struct Row {
    op: Op,
    bytes: u64,
    qps: usize,
    bidirectional: bool,
    /// One after the other.
    latency: Report,
    in_flight: u32,
    /// Several at once: those that this end has started, and the peer.
    stream: Report,
    peer_stream: Option<Report>,
    /// Of both directions together.
    landed_gb_s: f64,
    local_gb_s: Option<f64>,
    operations_per_s: f64,
}

#[derive(Serialize)]
struct Document<'a> {
    command: &'static str,
    server: &'a About,
    rows: &'a [Row],
    /// Of the last data channel.
    path: Option<&'a PathReport>,
    /// Why there are no more rows.
    error: Option<String>,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    match &args.side {
        SideArgs::Serve(serve) => {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            runtime.block_on(self::serve(serve, *output))
        }
        // One thread, as a core of a service has it.
        SideArgs::Connect(connect) => {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(self::connect(connect, output))
        }
    }
}

async fn serve(args: &Serve, output: Output) -> Result<Outcome, Error> {
    let setup = args.device.setup(Side::Listens(args.address))?;
    let endpoint = setup.control().await?;
    let listener = endpoint.listen(args.address).await.map_err(|why| match why {
        ConnectError::AdmissionRequired { addr } => Error::from(Usage(format!(
            "{addr} can be reached from other hosts: --psk FILE lets in whoever holds a key, --insecure anybody; or listen on a \
             loopback address"
        ))),
        other => other.into(),
    })?;
    let address = listener.local_addr();
    // Before anybody reads that it listens.
    let stop = Stop::watch()?;
    let say = move |text: &str| {
        // Nobody may be there to read it: the clients are served all the same.
        let _ = match output.is_json() {
            true => output.line(&serde_json::json!({ "event": text })),
            false => output.print(&format!("{text}\n")),
        };
    };
    match output.is_json() {
        true => output.line(&serde_json::json!({
            "listening": address, "devices": setup.names(), "transport": setup.transport()
        }))?,
        false => output.print(&format!(
            "listening on {address}, {} ({})\n",
            setup.names().join(","),
            setup.transport()
        ))?,
    }
    let server = Server { setup, budget: Budget::new(args.limit), address, say: Arc::new(say) };
    tokio::select! {
        ended = server.run(listener, args.clients.into()) => ended?,
        () = stop.told() => {}
    }
    Ok(Outcome::Well)
}

impl Connect {
    fn sizes(&self) -> Vec<u64> {
        if self.all { (1..=23).map(|power| 1 << power).collect() } else { self.size.clone() }
    }

    fn shape(&self, bytes: u64) -> Shape {
        let fits = ((64 << 20) / bytes.max(1)).clamp(2, 16) as u32;
        Shape {
            op: self.op,
            block_bytes: bytes,
            descriptors: 1,
            in_flight: self.in_flight.unwrap_or(fits),
            both: self.bidirectional,
            read_by: self.load.read_by,
            memory: self.load.memory,
            spin_us: self.load.spin,
            tcp: false,
        }
    }
}

async fn connect(args: &Connect, output: &Output) -> Result<Outcome, Error> {
    let sizes = args.sizes();
    for &size in &sizes {
        // Before anybody is bothered.
        args.shape(size).check().map_err(Usage)?;
    }
    let client = Client::connect(&args.address, &args.device).await?;
    let mut rows = Vec::new();
    let mut path = None;
    let measured = measure(args, output, &client, &sizes, &mut rows, &mut path).await;
    if output.is_json() {
        let error = measured.as_ref().err().map(|why| chain(why.as_ref()));
        let (server, path) = (client.about(), path.as_ref());
        output.document(&Document { command: "bench", server, rows: &rows, path, error })?;
    }
    if let Some(file) = &args.plot
        && !rows.is_empty()
    {
        let svg = draw(args, path.as_ref(), &rows);
        std::fs::write(file, svg).map_err(|why| format!("writing {}: {why}", file.display()))?;
    }
    measured?;
    client.close().await;
    Ok(Outcome::Well)
}

async fn measure(
    args: &Connect,
    output: &Output,
    client: &Client,
    sizes: &[u64],
    rows: &mut Vec<Row>,
    path: &mut Option<PathReport>,
) -> Result<(), Error> {
    let mut progress = Progress::new(output, sizes.len(), args.load.duration * 2);
    for &size in sizes {
        let shape = args.shape(size);
        let row = progress.during(&show_bytes(size), one(args, client, shape, &progress)).await?;
        if !output.is_json() {
            if rows.is_empty() {
                output.print(&heading(args, client.about(), &row.1))?;
            }
            output.print(&line(&row.0))?;
        }
        rows.push(row.0);
        *path = Some(row.1);
        progress.next();
    }
    Ok(())
}

/// Measures one size.
async fn one(
    args: &Connect,
    client: &Client,
    shape: Shape,
    progress: &Progress,
) -> Result<(Row, PathReport), Error> {
    let mut measured = client.open(shape, args.qps.into()).await?;
    let time = args.load.duration;
    // What is touched for the first time is no measure of what comes after.
    measured.drive(shape.in_flight, time / 10, &progress.seen).await?;
    let (latency, _) = measured.drive(1, time, &progress.seen).await?;
    let (stream, peer_stream) = measured.drive(shape.in_flight, time, &progress.seen).await?;
    let path = measured.path();
    measured.close().await;
    let both = [Some(&stream), peer_stream.as_ref()];
    let both = || both.iter().flatten();
    let row = Row {
        op: shape.op,
        bytes: shape.transfer_bytes(),
        qps: path.qps.len(),
        bidirectional: shape.both,
        in_flight: shape.in_flight,
        landed_gb_s: both().map(|r| r.landed_gb_s()).sum(),
        local_gb_s: both().map(|r| r.local_gb_s()).sum(),
        operations_per_s: both().map(|r| r.operations_per_s()).sum(),
        latency,
        stream,
        peer_stream,
    };
    Ok((row, path))
}

/// What landing is, and what local completion, by operation.
fn moments(op: Op) -> &'static str {
    match op {
        Op::Write => "landed: the peer has confirmed; local: the work requests have completed",
        Op::Read => "landed: the data is here (a read has no earlier end)",
        Op::Send => "landed: the peer's program has answered; local: the message is queued",
    }
}

fn heading(args: &Connect, server: &About, path: &PathReport) -> String {
    let ways = if args.bidirectional { ", both ways" } else { "" };
    format!(
        "{}{ways} over {} ({}), {}, notify {}; server {} ({})\n{}\n\n\
         {:>10} {:>12} {:>12} {:>12} {:>12} {:>7} {:>12} {:>12} {:>12}\n\
         {:>10} {:>12} {:>12} {:>12} {:>12} {:>7} {:>12} {:>12} {:>12}\n",
        args.op.name(),
        path.transport,
        path.device,
        many(path.qps.len(), "queue pair"),
        path.notify,
        server.devices.join(","),
        server.transport,
        moments(args.op),
        "size",
        "landed p50",
        "landed p99",
        "local p50",
        "local p99",
        "in",
        "landed",
        "local",
        "rate",
        "",
        "us",
        "us",
        "us",
        "us",
        "flight",
        "GB/s",
        "GB/s",
        "1/s",
    )
}

fn line(row: &Row) -> String {
    let local =
        |pick: fn(&Latency) -> f64| row.latency.local.as_ref().map_or("-".to_owned(), |l| digits(pick(l)));
    format!(
        "{:>10} {:>12} {:>12} {:>12} {:>12} {:>7} {:>12} {:>12} {:>12}\n",
        show_bytes(row.bytes),
        digits(row.latency.landed.p50_us),
        digits(row.latency.landed.p99_us),
        local(|l| l.p50_us),
        local(|l| l.p99_us),
        row.in_flight,
        digits(row.landed_gb_s),
        row.local_gb_s.map_or("-".to_owned(), digits),
        rate(row.operations_per_s),
    )
}

fn draw(args: &Connect, path: Option<&PathReport>, rows: &[Row]) -> String {
    let size = |row: &Row| row.bytes as f64;
    let series = |name: &str, dashed, value: &dyn Fn(&Row) -> Option<f64>| Series {
        name: name.to_owned(),
        points: rows.iter().filter_map(|row| Some((size(row), value(row)?))).collect(),
        dashed,
    };
    let drawn = |series: Vec<Series>| series.into_iter().filter(|s| !s.points.is_empty()).collect();
    let what = format!("{}{}", args.op.plural(), if args.bidirectional { " both ways" } else { "" });
    let about = format!(
        "{}, {}",
        path.map_or("over nothing".to_owned(), |path| format!("over {} ({})", path.transport, path.device)),
        many(rows.first().map_or(0, |row| row.qps), "queue pair")
    );
    let label = |bytes: f64| show_bytes(bytes as u64);
    plot::document(&[
        Lines {
            title: format!("Bandwidth of {what} by size"),
            about: about.clone(),
            x: "bytes of a transfer",
            y: "GB/s",
            label,
            log_y: false,
            series: drawn(vec![
                series("landed", false, &|row| Some(row.landed_gb_s)),
                series("local completion", true, &|row| row.local_gb_s),
            ]),
        },
        Lines {
            title: format!("Latency of {what} by size"),
            about: format!("{about}, one after the other"),
            x: "bytes of a transfer",
            y: "microseconds",
            label,
            log_y: true,
            series: drawn(vec![
                series("landed p50", false, &|row| Some(row.latency.landed.p50_us)),
                series("local p50", true, &|row| Some(row.latency.local?.p50_us)),
                series("landed p99", false, &|row| Some(row.latency.landed.p99_us)),
                series("local p99", true, &|row| Some(row.latency.local?.p99_us)),
            ]),
        },
    ])
}
