//! Latency between two processes: SEND and RECV, WRITE_WITH_IMM and WRITE over a queue pair, and a `KvChannel`'s write.
//!
//! Alone, the program starts the answering process by itself. The sides exchange their queue pairs' addresses over a
//! TCP connection of their own (`exchange`), which is all that a raw queue pair needs. See `--help`.

mod args;
#[path = "../common/mod.rs"]
mod common;
mod exchange;
mod landed;
mod report;
mod rounds;

use std::future::Future;
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use args::{Args, Side};
use common::device::managed_address;
use common::peer::Peer;
use common::{Error, complain, print, program};
use exchange::{Answer, Ask, Exchange, OpKind, Plan};
use landfall::connect::cm::CmListener;
use landfall::device::Device;
use report::{Report, Way};
use rounds::{Echo, Lane};
use tokio::net::TcpListener;

fn main() -> ExitCode {
    program(args::parse(std::env::args_os().skip(1)), args::USAGE, run)
}

async fn run(args: &Args) -> Result<(), Error> {
    let side = match args.side {
        Side::Alone => None,
        Side::Listen(address) => Some((address, true)),
        Side::Connect(address) => Some((address, false)),
    };
    let device = args.device.open(side, 1)?.remove(0);
    match args.side {
        Side::Listen(address) => listen(args, &device, address).await,
        Side::Connect(address) => measure_all(args, &device, address).await,
        Side::Alone => {
            let mut line = vec!["--child".to_owned(), "--listen=127.0.0.1:0".to_owned()];
            line.extend(args.device.peer());
            let (peer, address) = Peer::start(line).await?;
            measure_all(args, &device, address).await?;
            peer.ended().await
        }
    }
}

async fn by<T>(deadline_s: u64, work: impl Future<Output = Result<T, Error>>) -> Result<T, Error> {
    match tokio::time::timeout(Duration::from_secs(deadline_s), work).await {
        Ok(done) => done,
        Err(_) => Err(format!("not done within {deadline_s} s; see --deadline").into()),
    }
}

// The measuring side.

async fn measure_all(args: &Args, device: &Device, address: SocketAddr) -> Result<(), Error> {
    let mut exchange = Exchange::dial(address).await?;
    let mut report = Report::new();
    let rounds = args.warmup.saturating_add(args.iters);
    let (spin_us, deadline_s) = (args.spin.as_micros() as u64, args.deadline.as_secs());
    let by_manager = args.device.by_manager(device);
    let usual =
        if device.capabilities().immediate { &[OpKind::Send, OpKind::Imm][..] } else { &[OpKind::Send] };
    for &op in args.ops.as_deref().unwrap_or(usual) {
        for &size in &args.sizes {
            let plan = Plan { op, size, rounds, spin_us, deadline_s, by_manager };
            let (mut times, way) = by(deadline_s, measure(device, plan, &mut exchange))
                .await
                .map_err(|why| format!("{op:?} of {size} bytes: {}", landfall::error::chain(why.as_ref())))?;
            report.add(plan, way, times.split_off(args.warmup as usize));
        }
    }
    print(&if args.json { report.json(args, device) } else { report.text(args, device) })
}

async fn measure(
    device: &Device,
    plan: Plan,
    exchange: &mut Exchange,
) -> Result<(Vec<Duration>, Way), Error> {
    if plan.op == OpKind::Kv {
        exchange.say(&Ask::Measure { plan, raw: None }).await?;
        let Answer::Kv(address) = answer(exchange).await? else { return Err(unexpected()) };
        let channel = landed::endpoint(device, plan).await?.connect(address).await?;
        let times = landed::measure(&channel, plan).await?;
        let path = channel.path();
        channel.close().await?;
        through(exchange).await?;
        return Ok((times, Way { transport: path.transport, reason: path.transport_reason }));
    }
    let lane = Lane::new(device, plan).await?;
    exchange.say(&Ask::Measure { plan, raw: Some(lane.raw(None)?) }).await?;
    let Answer::Raw(peer) = answer(exchange).await? else { return Err(unexpected()) };
    let (times, qp) = lane.measure(&peer).await?;
    let way = qp.way()?;
    through(exchange).await?;
    qp.close().await;
    Ok((times, way))
}

/// Both sides are done with a plan.
async fn through(exchange: &mut Exchange) -> Result<(), Error> {
    exchange.say(&Ask::Through).await?;
    match answer(exchange).await? {
        Answer::Through => Ok(()),
        _ => Err(unexpected()),
    }
}

async fn answer(exchange: &mut Exchange) -> Result<Answer, Error> {
    match exchange.hear().await? {
        Answer::No(why) => Err(format!("the peer refused: {why}").into()),
        answer => Ok(answer),
    }
}

fn unexpected() -> Error {
    "the peer said something that does not belong here".into()
}

// The answering side.

async fn listen(args: &Args, device: &Device, address: SocketAddr) -> Result<(), Error> {
    let listener = TcpListener::bind(address).await.map_err(|why| format!("--listen {address}: {why}"))?;
    let local = listener.local_addr()?;
    if args.child {
        print(&format!("{local}\n"))?;
    } else {
        complain(&format!("listening on {local}"));
    }
    loop {
        let (stream, _) = listener.accept().await?;
        let mut exchange = Exchange::new(stream);
        // Whoever says nothing that makes sense costs at most the patience of `hear`.
        if let Ok(first) = exchange.hear().await {
            return serve(device, first, &mut exchange).await;
        }
    }
}

async fn serve(device: &Device, first: Ask, exchange: &mut Exchange) -> Result<(), Error> {
    let mut next = Some(first);
    while let Some(ask) = next {
        let served = match ask {
            Ask::Measure { plan, raw } => by(plan.deadline_s, serve_one(device, plan, raw, exchange)).await,
            Ask::Through => Err(unexpected()),
        };
        if let Err(why) = served {
            let words = landfall::error::chain(why.as_ref());
            // The peer may be gone; the complaint is ours all the same.
            let _ = exchange.say(&Answer::No(words)).await;
            return Err(why);
        }
        next = exchange.next().await?;
    }
    Ok(())
}

async fn serve_one(
    device: &Device,
    plan: Plan,
    raw: Option<exchange::Raw>,
    exchange: &mut Exchange,
) -> Result<(), Error> {
    match (plan.op, raw) {
        (OpKind::Kv, None) => {
            let endpoint = landed::endpoint(device, plan).await?;
            let mut listener = endpoint.listen(data_address_of(device, plan, exchange).await?).await?;
            exchange.say(&Answer::Kv(listener.local_addr())).await?;
            let channel = listener.accept().await?;
            landed::serve(&channel).await?;
            is_through(exchange).await
        }
        (OpKind::Send | OpKind::Imm | OpKind::Write, Some(peer)) => {
            let lane = Lane::new(device, plan).await?;
            let manager = if plan.by_manager {
                Some(CmListener::bind(device, data_address_of(device, plan, exchange).await?).await?)
            } else {
                None
            };
            let ours = lane.raw(manager.as_ref().map(CmListener::local_addr))?;
            let echo = Echo::new(lane, &peer, manager).await?;
            exchange.say(&Answer::Raw(ours)).await?;
            let (qp, _memory) = echo.serve().await?;
            is_through(exchange).await?;
            qp.close().await;
            Ok(())
        }
        _ => Err(unexpected()),
    }
}

/// Where this side listens for one measurement.
async fn data_address_of(device: &Device, plan: Plan, exchange: &Exchange) -> Result<SocketAddr, Error> {
    Ok(match (device.is_rdma(), plan.by_manager) {
        (false, _) => (device.address(), 0).into(),
        (true, false) => (exchange.local_ip()?, 0).into(),
        (true, true) => managed_address(device).await?,
    })
}

async fn is_through(exchange: &mut Exchange) -> Result<(), Error> {
    match exchange.next().await? {
        Some(Ask::Through) => exchange.say(&Answer::Through).await,
        Some(_) => Err(unexpected()),
        None => Err("the peer has gone in the middle of a measurement".into()),
    }
}
