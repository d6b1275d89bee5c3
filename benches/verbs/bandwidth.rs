//! Bandwidth: on each queue pair a window of operations is kept full until all iterations are through.

use std::time::Instant;

use landfall::ring::Op as RingOp;

use crate::case::{Case, Op};
use crate::common::{Error, line};
use crate::link::Link;

pub async fn measure(case: &Case, link: &Link) -> Result<(), Error> {
    let warm_up = (case.iterations / 20).max(1);
    transfer(case, link, warm_up).await?;
    let start = Instant::now();
    transfer(case, link, case.iterations).await?;
    let elapsed = start.elapsed().as_secs_f64();
    let operations = (case.iterations * case.qps) as f64;
    line(&format!("{}.bw", case.name()), operations * case.bytes as f64 / elapsed / 1e6, "MB/s");
    line(&format!("{}.rate", case.name()), operations / elapsed / 1e3, "kop/s");
    Ok(())
}

/// `iterations` operations on each queue pair.
async fn transfer(case: &Case, link: &Link, iterations: usize) -> Result<(), Error> {
    // A quarter of the window is gathered before a queue pair gets as many new operations with one doorbell.
    let refill = case.window() / 4;
    let mut left = vec![iterations; link.qps.len()];
    let mut free = vec![case.window(); link.qps.len()];
    let mut outstanding = 0;
    loop {
        for (n, qp) in link.qps.iter().enumerate() {
            // A full window at first, and at the end whatever is left.
            if left[n] == 0 || free[n] < refill.min(left[n]) {
                continue;
            }
            let mut batch = qp.batch();
            for _ in 0..free[n].min(left[n]) {
                let buf = link.memory.slice(..case.bytes)?;
                let there = link.peer.slice(case.bytes, case.bytes)?;
                let op = match case.op {
                    Op::ReadBw => RingOp::read(buf, there),
                    _ => RingOp::write(buf, there),
                };
                if batch.push(op.user_data(n as u64)).is_err() {
                    break;
                }
                free[n] -= 1;
                left[n] -= 1;
                outstanding += 1;
            }
            batch.submit();
        }
        if outstanding == 0 {
            return Ok(());
        }
        let mut next = Some(link.cq.next().await.ok_or("the completion queue has ended")?);
        while let Some(completion) = next {
            completion.result?;
            free[completion.user_data as usize] += 1;
            outstanding -= 1;
            next = link.cq.try_next();
        }
    }
}
