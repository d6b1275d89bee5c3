//! The measuring process: writes into memory of the receiver, and takes the time.
//!
//! Each case is measured in two ways, in turn:
//! - `done`: until the completion of every WRITE, which is what the crate's futures mean. That the data is in the receiver's
//!   memory, or that anybody knows of it, is not said by that.
//! - `notified`: the last WRITE carries an immediate, and the clock stops at the receiver's answer to it.

use std::alloc::Layout;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use async_rdma::{
    LocalMr, LocalMrReadAccess, LocalMrWriteAccess, MrToken, Rdma, RemoteMr, RemoteMrReadAccess,
};
use futures::stream::{StreamExt, TryStreamExt};

use crate::cases::{CASES, Case, DEPTH};
use crate::receiver::END;
use crate::{Args, Error, builder};

/// Longer than any case takes: the receiver takes its memory back after that.
const LEASE: Duration = Duration::from_secs(3600);
/// Repetitions before those that count.
const WARM: usize = 2;

pub(crate) async fn measure(args: &Args, address: SocketAddr) -> Result<(), Error> {
    let rdma = builder(&args.device, args).connect(address).await?;
    let wanted = |case: &&Case| args.only.as_ref().is_none_or(|name| name == case.name);
    for case in CASES.iter().filter(wanted) {
        run(&rdma, case, if args.quick { case.reps.div_ceil(10) } else { case.reps }).await?;
    }
    let stop = rdma.alloc_local_mr(Layout::new::<[u8; 8]>())?;
    let mut target = rdma.request_remote_mr(Layout::new::<[u8; 8]>()).await?;
    rdma.write_with_imm(&stop, &mut target, END).await?;
    rdma.receive_write_imm().await?;
    Ok(())
}

async fn run(rdma: &Rdma, case: &Case, reps: usize) -> Result<(), Error> {
    let layout = Layout::from_size_align(case.bytes(), 4096)?;
    let mut source = rdma.alloc_local_mr(layout)?;
    let target = rdma.request_remote_mr_with_timeout(layout, LEASE).await?;
    let (token, writes) = (target.token(), case.writes());
    let (last, others) = writes.split_last().expect("a case has a WRITE");
    let (mut done, mut notified) = (Vec::new(), Vec::new());
    for round in 0..WARM + reps {
        source.as_mut_slice().fill(round as u8);
        let start = Instant::now();
        write_all(rdma, &source, token, &writes).await?;
        let end = Instant::now();
        if round >= WARM {
            done.push(end - start);
        }

        source.as_mut_slice().fill(!(round as u8));
        let number = round as u32;
        let start = Instant::now();
        write_all(rdma, &source, token, others).await?;
        let piece = source.get(last.clone()).ok_or("a piece of the source")?;
        let mut at = part(token, last);
        let (written, answer) =
            tokio::join!(rdma.write_with_imm(&piece, &mut at, number), rdma.receive_write_imm());
        let end = Instant::now();
        written?;
        if answer? != number {
            return Err("another notification was answered".into());
        }
        if round >= WARM {
            notified.push(end - start);
        }
        check(rdma, token, &writes, !(round as u8)).await?;
    }
    report(case, "done", done);
    report(case, "notified", notified);
    Ok(())
}

/// All of `writes`, a few at a time.
async fn write_all(
    rdma: &Rdma,
    source: &LocalMr,
    token: MrToken,
    writes: &[Range<usize>],
) -> Result<(), Error> {
    let each = futures::stream::iter(writes).map(|range| async move {
        let piece = source.get(range.clone()).ok_or("a piece of the source")?;
        rdma.write(&piece, &mut part(token, range)).await?;
        Ok::<_, Error>(())
    });
    each.buffer_unordered(DEPTH).try_collect().await
}

/// The receiver's memory at `range`. The crate's own slices of it cannot be written to at the same time.
fn part(token: MrToken, range: &Range<usize>) -> RemoteMr {
    RemoteMr::new(MrToken { addr: token.addr + range.start, len: range.len(), ..token })
}

/// Reads the first byte of each WRITE back.
async fn check(rdma: &Rdma, token: MrToken, writes: &[Range<usize>], byte: u8) -> Result<(), Error> {
    let mut found = rdma.alloc_local_mr(Layout::new::<[u8; 8]>())?;
    for range in [writes.first(), writes.last()].into_iter().flatten() {
        rdma.read(&mut found, &part(token, &(range.start..range.start + 8))).await?;
        if *found.as_slice() != [byte; 8] {
            return Err(format!("bytes {range:?} did not arrive").into());
        }
    }
    Ok(())
}

/// `name value unit`, as landfall's benches have it.
fn report(case: &Case, quantity: &str, mut samples: Vec<Duration>) {
    samples.sort();
    let (median, slow) = (samples[samples.len() / 2], samples[samples.len() * 99 / 100]);
    let name = format!("async-rdma.event.{}.{quantity}", case.name);
    println!("{name}_p50 {:.3} us", median.as_secs_f64() * 1e6);
    println!("{name}_p99 {:.3} us", slow.as_secs_f64() * 1e6);
    println!("{name} {:.4} GB/s", case.bytes() as f64 / median.as_secs_f64() / 1e9);
}
