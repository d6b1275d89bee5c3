//! Latency: one message there, one back; half of that is told, as the perftest programs do.

use std::collections::VecDeque;
use std::time::Instant;

use crate::case::Case;
use crate::common::{Error, Samples, line};
use crate::link::Link;

/// WRITE there, seen by its last byte; WRITE back, seen by its last byte. Nothing tells the other side but the payload.
pub async fn write(case: &Case, link: &Link, initiates: bool) -> Result<(), Error> {
    let qp = link.qps.first().ok_or("no queue pair")?;
    let (last, there) = (case.bytes - 1, link.peer.slice(case.bytes, case.bytes)?);
    let here = link.memory.slice(case.bytes..)?;
    let last_byte = here.as_ptr().wrapping_add(last as usize).cast_const();
    let mut source = link.memory.slice(..case.bytes)?;
    let mut samples = Samples::default();
    let warm_up = case.iterations / 20;
    for n in 0..case.iterations + warm_up {
        // Never zero, and never twice the same.
        let mark = (n % 255) as u8 + 1;
        source.copy_in(last, &[mark])?;
        let start = Instant::now();
        if !initiates {
            await_byte(last_byte, mark);
        }
        let posted = qp.write(source, there);
        if initiates {
            await_byte(last_byte, mark);
            if n >= warm_up {
                samples.push(start.elapsed().as_secs_f64() / 2.0);
            }
        }
        let (result, back) = posted.await;
        result?;
        source = back;
    }
    print(case, &samples);
    Ok(())
}

fn await_byte(at: *const u8, expected: u8) {
    // SAFETY: the byte lies in a slice whose region the caller keeps alive. The device writes to it meanwhile, which a
    // volatile read of one byte allows for.
    // Without a pause, as the perftest programs do.
    while unsafe { at.read_volatile() } != expected {}
}

/// Receives that are posted ahead, so that posting one again is not between a message and its answer.
const AHEAD: usize = 16;

/// SEND there and back, into receives that are posted before.
pub async fn send(case: &Case, link: &Link, initiates: bool) -> Result<(), Error> {
    let qp = link.qps.first().ok_or("no queue pair")?;
    let mut source = link.memory.slice(..case.bytes)?;
    // All into the same bytes, as the perftest programs do: nobody reads them.
    let target = link.memory.slice(case.bytes..)?;
    let mut receives: VecDeque<_> = (0..AHEAD).map(|_| qp.recv(target.clone())).collect();
    let mut samples = Samples::default();
    let warm_up = case.iterations / 20;
    for n in 0..case.iterations + warm_up {
        let start = Instant::now();
        let mut sent = initiates.then(|| qp.send(source.clone()));
        let (result, buf) = receives.pop_front().ok_or("no receive is posted")?.await;
        result?;
        if initiates && n >= warm_up {
            samples.push(start.elapsed().as_secs_f64() / 2.0);
        }
        let sent = sent.take().unwrap_or_else(|| qp.send(source.clone()));
        receives.push_back(qp.recv(buf));
        let (result, back) = sent.await;
        result?;
        source = back;
    }
    print(case, &samples);
    Ok(())
}

fn print(case: &Case, samples: &Samples) {
    if samples.median().is_nan() {
        return; // The other side's clock.
    }
    line(&format!("{}.p50", case.name()), samples.median() * 1e6, "us");
    line(&format!("{}.p99", case.name()), samples.quantile(0.99) * 1e6, "us");
}
