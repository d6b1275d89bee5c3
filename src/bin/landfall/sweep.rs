//! `landfall sweep ADDR`: direction × descriptors × transfers in flight × queue pairs × block size, as one looks for a bottleneck by
//! hand: one table, and the best setting by name.

use std::path::PathBuf;
use std::time::Duration;

use landfall::error::chain;
use serde::Serialize;

use crate::bench::LoadArgs;
use crate::device::DeviceArgs;
use crate::measure::client::Client;
use crate::measure::load::Report;
use crate::measure::plot::{Bar, Bars};
use crate::measure::progress::Progress;
use crate::measure::talk::{About, Op, Shape};
use crate::measure::units::{bytes, digits, many, rate, show_bytes};
use crate::output::{Error, Outcome, Output, Usage};

/// More cells than that are a mistake.
const MOST_CELLS: usize = 4096;

/// Find the best setting: every combination of the lists that are given
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The server (`landfall bench serve`), as HOST:PORT
    #[arg(value_name = "ADDR")]
    address: String,
    /// Directions
    #[arg(long, value_enum, value_delimiter = ',', default_value = "write,read")]
    op: Vec<Op>,
    /// Blocks of a transfer, no two of which are neighbours
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,16")]
    descriptors: Vec<u32>,
    /// Transfers under way at once
    #[arg(long, value_name = "N", value_delimiter = ',', default_value = "1,8")]
    in_flight: Vec<u32>,
    /// Queue pairs of each rail
    #[arg(short, long, value_name = "N", value_delimiter = ',', default_value = "1,4",
          value_parser = clap::value_parser!(u16).range(1..=64))]
    qps: Vec<u16>,
    /// Bytes of a block (K, M and G are powers of 1024)
    #[arg(long, value_name = "BYTES", value_delimiter = ',', value_parser = bytes, default_value = "64K,1M")]
    size: Vec<u64>,
    #[command(flatten)]
    load: LoadArgs,
    /// Draw the results into this file, as SVG
    #[arg(long, value_name = "FILE.svg")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    device: DeviceArgs,
}

/// A combination.
#[derive(Clone, Copy, Debug, Serialize)]
struct Cell {
    op: Op,
    descriptors: u32,
    in_flight: u32,
    /// Of each rail.
    qps: u16,
    block_bytes: u64,
}

#[derive(Debug, Serialize)]
struct Row {
    #[serde(flatten)]
    cell: Cell,
    /// What carried it.
    transport: &'static str,
    landed_gb_s: f64,
    local_gb_s: Option<f64>,
    operations_per_s: f64,
    report: Report,
}

#[derive(Serialize)]
struct Document<'a> {
    command: &'static str,
    server: &'a About,
    cells: usize,
    rows: &'a [Row],
    /// The place in `rows` of the one with the most bytes landed a second.
    best: Option<usize>,
    /// The same of each direction.
    best_of: Vec<(Op, usize)>,
    /// Why there are no more rows.
    error: Option<String>,
}

pub(crate) fn run(args: &Args, output: &Output) -> Result<Outcome, Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(sweep(args, output))
}

impl Args {
    fn cells(&self) -> Vec<Cell> {
        let mut cells = Vec::new();
        for &op in &self.op {
            for &block_bytes in &self.size {
                for &descriptors in &self.descriptors {
                    for &in_flight in &self.in_flight {
                        let with = |&qps| Cell { op, descriptors, in_flight, qps, block_bytes };
                        cells.extend(self.qps.iter().map(with));
                    }
                }
            }
        }
        cells
    }

    fn shape(&self, cell: &Cell) -> Shape {
        Shape {
            op: cell.op,
            block_bytes: cell.block_bytes,
            descriptors: cell.descriptors,
            in_flight: cell.in_flight,
            both: false,
            read_by: self.load.read_by,
            memory: self.load.memory,
            spin_us: self.load.spin,
            tcp: false,
        }
    }

    /// A cell's measurement, and what is done before it.
    fn each(&self) -> Duration {
        self.load.duration + self.load.duration / 10
    }
}

async fn sweep(args: &Args, output: &Output) -> Result<Outcome, Error> {
    let cells = args.cells();
    if cells.len() > MOST_CELLS {
        return Err(Usage(format!("{} combinations; at most {MOST_CELLS} are measured", cells.len())).into());
    }
    for cell in &cells {
        args.shape(cell).check().map_err(Usage)?;
    }
    let client = Client::connect(&args.address, &args.device).await?;
    if !output.is_json() {
        output.print(&format!(
            "{} combinations of {:?} each: about {:.0} s and the connecting\n\n{}",
            cells.len(),
            args.load.duration,
            (args.each() * cells.len() as u32).as_secs_f64().ceil(),
            heading()
        ))?;
    }
    let mut rows = Vec::with_capacity(cells.len());
    let measured = measure(args, output, &client, &cells, &mut rows).await;
    let best = best(&rows, |_| true);
    if output.is_json() {
        let mut best_of: Vec<(Op, usize)> = Vec::new();
        for &op in &args.op {
            best_of.extend(self::best(&rows, |row| row.cell.op == op).map(|place| (op, place)));
        }
        let error = measured.as_ref().err().map(|why| chain(why.as_ref()));
        let (server, cells) = (client.about(), cells.len());
        output.document(&Document { command: "sweep", server, cells, rows: &rows, best, best_of, error })?;
    } else {
        output.print(&verdict(args, &rows))?;
    }
    if let Some(file) = &args.plot
        && !rows.is_empty()
    {
        std::fs::write(file, draw(&rows, best))
            .map_err(|why| format!("writing {}: {why}", file.display()))?;
    }
    measured?;
    client.close().await;
    Ok(Outcome::Well)
}

async fn measure(
    args: &Args,
    output: &Output,
    client: &Client,
    cells: &[Cell],
    rows: &mut Vec<Row>,
) -> Result<(), Error> {
    let mut progress = Progress::new(output, cells.len(), args.each());
    for &cell in cells {
        let shape = args.shape(&cell);
        let time = args.load.duration;
        let one = async {
            let mut measured = client.open(shape, cell.qps.into()).await?;
            measured.drive(cell.in_flight, time / 10, &progress.seen).await?;
            let (report, _) = measured.drive(cell.in_flight, time, &progress.seen).await?;
            let transport = measured.path().transport;
            measured.close().await;
            Ok((report, transport))
        };
        let (report, transport) = progress.during(&name(&cell), one).await?;
        let row = Row {
            cell,
            transport,
            landed_gb_s: report.landed_gb_s(),
            local_gb_s: report.local_gb_s(),
            operations_per_s: report.operations_per_s(),
            report,
        };
        if !output.is_json() {
            output.print(&line(&row))?;
        }
        rows.push(row);
        progress.next();
    }
    Ok(())
}

/// The place of the row with the most bytes landed a second, among those.
fn best(rows: &[Row], among: impl Fn(&Row) -> bool) -> Option<usize> {
    let rows = rows.iter().enumerate().filter(|(_, row)| among(row));
    rows.max_by(|a, b| a.1.landed_gb_s.total_cmp(&b.1.landed_gb_s)).map(|(place, _)| place)
}

fn name(cell: &Cell) -> String {
    format!(
        "{} {} × {}, {} in flight, {}",
        cell.op.name(),
        cell.descriptors,
        show_bytes(cell.block_bytes),
        cell.in_flight,
        many(cell.qps.into(), "QP")
    )
}

fn heading() -> String {
    format!(
        "{:<6} {:>10} {:>6} {:>7} {:>4} {:>12} {:>12} {:>12} {:>12} {:>12}\n\
         {:<6} {:>10} {:>6} {:>7} {:>4} {:>12} {:>12} {:>12} {:>12} {:>12}\n",
        "op",
        "block",
        "blocks",
        "in",
        "QPs",
        "landed",
        "local",
        "rate",
        "landed p50",
        "landed p99",
        "",
        "",
        "",
        "flight",
        "",
        "GB/s",
        "GB/s",
        "1/s",
        "us",
        "us",
    )
}

fn line(row: &Row) -> String {
    let Cell { op, descriptors, in_flight, qps, block_bytes } = row.cell;
    format!(
        "{:<6} {:>10} {descriptors:>6} {in_flight:>7} {qps:>4} {:>12} {:>12} {:>12} {:>12} {:>12}\n",
        op.name(),
        show_bytes(block_bytes),
        digits(row.landed_gb_s),
        row.local_gb_s.map_or("-".to_owned(), digits),
        rate(row.operations_per_s),
        digits(row.report.landed.p50_us),
        digits(row.report.landed.p99_us),
    )
}

/// The best of each direction.
fn verdict(args: &Args, rows: &[Row]) -> String {
    let mut text = String::from("\n");
    for &op in &args.op {
        if let Some(place) = best(rows, |row| row.cell.op == op) {
            let row = &rows[place];
            let method = row.report.method.as_ref().map_or(String::new(), |how| format!(", by {how}"));
            text += &format!("best {}: {} GB/s landed{method}\n", name(&row.cell), digits(row.landed_gb_s));
        }
    }
    text
}

fn draw(rows: &[Row], best: Option<usize>) -> String {
    let bar = |(place, row): (usize, &Row)| Bar {
        name: name(&row.cell),
        value: row.landed_gb_s,
        best: best == Some(place),
    };
    let bars = rows.iter().enumerate().map(bar).collect();
    let over = rows.first().map_or("nothing", |row| row.transport);
    let about = format!("over {over}, until the data has landed; the best is marked");
    Bars { title: "Bandwidth by setting".to_owned(), about, unit: "GB/s", bars }.document()
}
