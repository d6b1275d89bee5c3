//! Memory of GPUs, by a recorded driver: what arrives, when it is told, in whose context each call is made, and who frees what when.

use std::io::{Read, Write};
use std::sync::Arc;

use super::hostile::{ends_in_error, frame, raw_peer};
use super::shm_hostile::{raw_peer as shm_peer, tiny_pieces};
use super::*;
use crate::cuda::fake::Fake;
use crate::cuda::{Cuda, GpuWays};
use crate::provider::soft::frame::{DESC, Desc, HEADER, Opcode, PREAMBLE, Preamble};
use crate::provider::soft::shm::inspect::{lends, lent_to_us, play_two_processes};

pub(super) const MIB: u64 = 1 << 20;

/// Two sides, and a driver with two GPUs.
pub(super) struct Gpus {
    pub(super) pair: Pair,
    pub(super) cuda: Arc<Cuda>,
    pub(super) fake: Arc<Fake>,
}

impl Gpus {
    fn new(profile: Profile) -> Self {
        Self::over(SoftTransport::Shm, profile)
    }

    pub(super) fn over(on: SoftTransport, profile: Profile) -> Self {
        let (cuda, fake) = Fake::new(2);
        let mut pair = Pair::new(on, profile);
        pair.meet();
        Self { pair, cuda, fake }
    }

    /// Memory of a side, of a GPU of the same number or of the host.
    pub(super) fn region(&self, a: bool, len: u64, on_gpu: bool) -> Region<Exposed> {
        let side = if a { &self.pair.a } else { &self.pair.b };
        if on_gpu { self.on(side, u32::from(!a), len) } else { side.region(len, ALL) }
    }

    /// Memory of `gpu` for `side`.
    pub(super) fn on(&self, side: &Side, gpu: u32, len: u64) -> Region<Exposed> {
        let memory = Memory::cuda_of(&self.cuda, gpu, len);
        Region::register(&side.pd, memory.map_for(&side.pd).unwrap(), ALL).unwrap()
    }

    /// `size` bytes by a SEND and by a WRITE from A to B, and by a READ back: each brings what was sent. `n` tells the data apart.
    pub(super) fn carries(
        &mut self,
        profile: Profile,
        (from, to): (&Region<Exposed>, &Region<Exposed>),
        (n, size): (u64, usize),
    ) {
        let here = [sge(from, 1, size as u64)];
        let data = pattern(size, n);
        fill(from, 1, &data);
        recv(self.pair.qb(), 5, Some(sge(to, 3, size as u64)));
        post(self.pair.qa(), 6, SendOp::Send { imm: None }, &here);
        let (a, b) = self.pair.wait(1, 1);
        assert_eq!((ids(&a), ids(&b)), (vec![(6, WcStatus::Success)], vec![(5, WcStatus::Success)]));
        assert!(contents(to, 3, size) == data, "{profile} SEND of {size}");

        let data = pattern(size, n + 100);
        fill(from, 1, &data);
        post(self.pair.qa(), 7, write_to(to, 9, None), &here);
        assert_eq!(ids(&self.pair.wait(1, 0).0), [(7, WcStatus::Success)]);
        self.pair.quiet();
        if profile.completes_at_hand_off() {
            // A completion says less there; a READ behind it says that it is there.
            post(self.pair.qa(), 8, read_from(to, 9), &[sge(from, 1, 1)]);
            self.pair.wait(1, 0);
        }
        assert!(contents(to, 9, size) == data, "{profile} WRITE of {size}");

        // The other way round: B's memory is read into A's.
        let data = pattern(size, n + 200);
        fill(to, 9, &data);
        post(self.pair.qa(), 9, read_from(to, 9), &here);
        assert_eq!(ids(&self.pair.wait(1, 0).0), [(9, WcStatus::Success)]);
        assert!(contents(from, 1, size) == data, "{profile} READ of {size}");
    }

    /// A source that is deregistered while it is being copied is waited for.
    pub(super) fn waits_for_copies(&mut self, from: Region<Exposed>, to: &Region<Exposed>) {
        self.fake.hold(true);
        post(self.pair.qa(), 3, write_to(to, 0, None), &[sge(&from, 0, MIB)]);
        self.pair.quiet();
        assert!(self.fake.queued() > 0);
        drop(from);
        assert_eq!(self.fake.queued(), 0, "its copies were waited for");
        self.fake.hold(false);
        self.pair.until("the write to end", |p| !p.a.seen.is_empty());
    }

    fn check(&self) {
        assert_eq!(self.fake.wrong(), Vec::<String>::new());
    }
}

impl Drop for Gpus {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.check();
        }
    }
}

pub(super) fn traffic(qp: &Qp) -> crate::cuda::GpuTraffic {
    qp.gpu_traffic()
}

/// Both in one process, and as if in two.
fn in_both_ways(test: impl Fn(bool)) {
    test(true);
    // Of this thread's connections from here on.
    play_two_processes();
    test(false);
}

#[test]
fn r2_every_operation_with_memory_of_a_gpu_moves_its_bytes_on_every_profile() {
    in_both_ways(|here| {
        let ways = [(true, true), (true, false), (false, true)];
        let on = if here { &[SoftTransport::Shm, SoftTransport::Tcp][..] } else { &[SoftTransport::Shm] };
        for (profile, on) in Profile::ALL.into_iter().flat_map(|p| on.iter().map(move |on| (p, *on))) {
            for (from_gpu, to_gpu) in ways {
                let mut g = Gpus::over(on, profile);
                g.fake.lag(2);
                let room = profile.capabilities().max_mr_size.min(4 << 20);
                let (from, to) = (g.region(true, room, from_gpu), g.region(false, room, to_gpu));
                for (n, size) in [1usize, 1000, 1025, 65_536, 300_000, 3 << 20].into_iter().enumerate() {
                    if size as u64 > profile.capabilities().max_msg_size.min(room / 2) {
                        continue;
                    }
                    g.carries(profile, (&from, &to), (n as u64, size));
                }
            }
        }
    });
}

#[test]
fn k1_nobody_hears_of_a_message_before_its_copy_is_over() {
    in_both_ways(|_| {
        let mut g = Gpus::new(Profile::Default);
        let (from, to) = (g.region(true, 1 << 20, true), g.region(false, 1 << 20, true));
        fill(&from, 0, &pattern(1 << 20, 4));
        g.fake.hold(true);
        recv(g.pair.qb(), 1, None);
        recv(g.pair.qb(), 2, None);
        post(g.pair.qa(), 3, write_to(&to, 0, Some(7)), &[sge(&from, 0, 1 << 20)]);
        // Nothing of a GPU, but behind it.
        post(g.pair.qa(), 4, write_to(&to, 0, Some(8)), &[]);
        g.pair.quiet();
        assert!(g.fake.count("cuEventQuery") > 0, "it is asked, and not waited for");
        g.fake.hold(false);
        let (a, b) = g.pair.wait(2, 2);
        assert_eq!((b[0].imm, b[1].imm), (Some(7), Some(8)));
        assert_eq!(ids(&a), [(3, WcStatus::Success), (4, WcStatus::Success)]);
        assert_eq!(contents(&to, 0, 1 << 20), pattern(1 << 20, 4));
    });
}

#[test]
fn k9_the_paths_of_memory_of_gpus_count_every_byte_at_both_ends() {
    in_both_ways(|here| {
        let mut g = Gpus::new(Profile::Default);
        let (from, to) = (g.region(true, 1 << 20, true), g.region(false, 1 << 20, true));
        let host = g.region(true, 1 << 20, false);
        for (n, len) in [10, 1000, 70_000, 1 << 20].into_iter().enumerate() {
            post(g.pair.qa(), n as u64, write_to(&to, 0, None), &[sge(&from, 0, len)]);
        }
        post(g.pair.qa(), 9, write_to(&to, 0, None), &[sge(&host, 0, 5000)]);
        g.pair.wait(5, 0);
        let payload = 10 + 1000 + 70_000 + (1 << 20);
        let (a, b) = (traffic(g.pair.qa()), traffic(g.pair.qb()));
        let [a_path, a_none, b_path, b_none] = match here {
            true => [a.same_process, a.ipc, b.same_process, b.ipc],
            false => [a.ipc, a.same_process, b.ipc, b.same_process],
        };
        assert_eq!((a_path.bytes_out, a_path.operations_out, a_path.bytes_in), (payload, 4, 0));
        assert_eq!((b_path.bytes_in, b_path.operations_in, b_path.bytes_out), (payload, 4, 0));
        assert_eq!((a_none, b_none, a.host), Default::default());
        assert_eq!((b.host.bytes_in, b.host.bytes_out), (5000, 0));
    });
}

/// Case 10: slices of one allocation at 64 B, 16 KiB, 128 KiB, 512 KiB and 4 MiB, to another process.
#[test]
fn k8_case_10_slices_inside_of_an_allocation_are_reached_by_one_open() {
    play_two_processes();
    let mut g = Gpus::new(Profile::Default);
    let len = 4096;
    let allocation = g.fake.foreign(0, 8 << 20, false);
    let to = g.region(false, 1 << 20, true);
    let offsets = [64, 16 << 10, 128 << 10, 512 << 10, 4 << 20];
    let slices: Vec<Region<Exposed>> = offsets
        .iter()
        .map(|offset| {
            let memory = Memory::from_cuda_of(&g.cuda, allocation + offset, len).unwrap();
            let pd = &g.pair.a.pd;
            Region::register(pd, memory.map_for(pd).unwrap(), ALL).unwrap()
        })
        .collect();
    for (n, slice) in slices.iter().enumerate() {
        fill(slice, 0, &pattern(len as usize, n as u64));
        post(g.pair.qa(), n as u64, write_to(&to, n as u64 * len, None), &[sge(slice, 0, len)]);
    }
    g.pair.wait(slices.len(), 0);
    for n in 0..slices.len() as u64 {
        assert_eq!(contents(&to, n * len, len as usize), pattern(len as usize, n), "slice {n}");
    }
    assert_eq!((g.cuda.opens(), lent_to_us(g.pair.qb())), (1, 1), "the second open is reused");
    let beyond = Memory::from_cuda_of(&g.cuda, allocation + (8 << 20) - 10, 11).unwrap_err();
    assert!(beyond.to_string().contains("their allocation has 10"), "{beyond}");
}

#[test]
fn r7_an_exporter_frees_its_memory_after_its_importers_have_closed_it() {
    play_two_processes();
    let mut g = Gpus::new(Profile::Default);
    let to = g.region(false, 4096, true);
    let from = g.region(true, 4096, true);
    post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, 4096)]);
    g.pair.wait(1, 0);
    assert_eq!(g.fake.in_use(), (2, 1));
    drop(from);
    // It is noted in a turn of the queue pair.
    let other = g.region(true, 4096, false);
    post(g.pair.qa(), 2, write_to(&to, 0, None), &[sge(&other, 0, 4096)]);
    post(g.pair.qb(), 3, read_from(&other, 0), &[]);
    let fake = g.fake.clone();
    g.pair.until("the memory to be closed and then freed", |_| fake.in_use() == (1, 0));
    g.check();
    // And when the connection ends instead.
    let from = g.region(true, 4096, true);
    g.pair.take_all();
    post(g.pair.qa(), 4, write_to(&to, 0, None), &[sge(&from, 0, 4096)]);
    g.pair.until("its completion", |p| p.a.seen.iter().any(|c| c.wr_id == 4));
    g.pair.qb = None;
    drop(from);
    g.pair.qa = None;
    g.pair.until("the memory to be freed", |_| fake.in_use() == (1, 0));
}

/// The exporter goes while the importer's GPU copies: the importer finds out in its own time.
#[test]
fn r7_an_exporter_that_ends_keeps_its_memory_until_the_importer_has_stopped_copying() {
    play_two_processes();
    let mut g = Gpus::new(Profile::Default);
    let (from, to) = (g.region(true, 1 << 20, true), g.region(false, 1 << 20, true));
    g.fake.hold(true);
    post(g.pair.qa(), 3, write_to(&to, 0, None), &[sge(&from, 0, 1 << 20)]);
    g.pair.quiet();
    assert_eq!(g.fake.queued(), 1);
    g.pair.qa = None;
    drop(from);
    std::thread::yield_now();
    assert_eq!((g.fake.in_use(), g.fake.queued()), ((2, 1), 1), "it is still being read");
    let fake = g.fake.clone();
    g.pair.until("the end of the importer, and the memory to be freed", |_| fake.in_use() == (1, 0));
    fake.hold(false);
}

#[test]
fn r7_memory_is_lent_again_while_it_is_on_its_way_back() {
    play_two_processes();
    let mut g = Gpus::new(Profile::Default);
    let to = g.region(false, 4096, true);
    let allocation = g.fake.foreign(0, 1 << 20, false);
    for round in 0..20 {
        let memory = Memory::from_cuda_of(&g.cuda, allocation + round * 4096, 4096).unwrap();
        let from = Region::register(&g.pair.a.pd, memory.map_for(&g.pair.a.pd).unwrap(), ALL).unwrap();
        fill(&from, 0, &pattern(4096, round));
        post(g.pair.qa(), round, write_to(&to, 0, None), &[sge(&from, 0, 4096)]);
        g.pair.wait(1, 0);
        assert_eq!(contents(&to, 0, 4096), pattern(4096, round), "round {round}");
        drop(from);
        // It is asked back, and that is not heard yet.
        g.pair.a.poll();
    }
    let path = traffic(g.pair.qb()).ipc;
    assert_eq!((path.bytes_in, path.operations_in), (20 * 4096, 20));
}

#[test]
fn k9_memory_that_ipc_does_not_export_is_refused_where_nothing_is_staged_and_goes_within_a_process() {
    let send = |g: &mut Gpus, pooled| {
        g.pair.qa().set_gpu_ways(GpuWays { ipc: true, staged: false });
        let at = if pooled { g.fake.foreign(0, 8192, true) } else { g.fake.mapped(0, 8192) };
        let memory = Memory::from_cuda_of(&g.cuda, at, 8192).unwrap();
        let pd = &g.pair.a.pd;
        let from = Region::register(pd, memory.map_for(pd).unwrap(), ALL).unwrap();
        let to = g.region(false, 8192, true);
        let mut chain = WrChain::default();
        chain.push(1, write_to(&to, 0, None), &[sge(&from, 0, 8192)], true, false);
        let posted = g.pair.qa().post_send(&chain);
        if posted.is_ok() {
            g.pair.wait(1, 0);
        }
        posted
    };
    let kinds = [(true, "stream-ordered"), (false, "mapped by the program")];
    for (pooled, _) in kinds {
        for on in [SoftTransport::Shm, SoftTransport::Tcp] {
            send(&mut Gpus::over(on, Profile::Default), pooled).unwrap();
        }
    }
    play_two_processes();
    for (pooled, words) in kinds {
        let refused = send(&mut Gpus::new(Profile::Default), pooled).unwrap_err();
        assert!(refused.source.to_string().contains(words), "{}", refused.source);
    }
}

#[test]
fn r10_memory_of_a_gpu_is_refused_where_it_cannot_go() {
    let (cuda, _fake) = Fake::new(1);
    let side = Side::new(SoftTransport::Shm, Profile::Default);
    let error = Memory::cuda_of(&cuda, 1, 4096).map_for(&side.pd).unwrap_err();
    assert!(error.to_string().contains("GPU 1 was asked for, this process sees 1"), "{error}");
    let host = [0u8; 64];
    let error = Memory::from_cuda_of(&cuda, host.as_ptr() as u64, 64).unwrap_err();
    assert!(error.to_string().contains("is not GPU memory"), "{error}");
}

/// Over TCP it is staged, and that is counted as what it is.
#[test]
fn k9_over_tcp_memory_of_a_gpu_is_staged_and_both_ends_count_it() {
    let mut g = Gpus::over(SoftTransport::Tcp, Profile::Default);
    let (from, to) = (g.region(true, 1 << 20, true), g.region(false, 1 << 20, true));
    fill(&from, 0, &pattern(1 << 20, 6));
    for (n, len) in [10, 1000, 70_000, 1 << 20].into_iter().enumerate() {
        post(g.pair.qa(), n as u64, write_to(&to, 0, None), &[sge(&from, 0, len)]);
    }
    g.pair.wait(4, 0);
    assert_eq!(contents(&to, 0, 1 << 20), pattern(1 << 20, 6));
    let payload = 10 + 1000 + 70_000 + (1 << 20);
    let (a, b) = (traffic(g.pair.qa()), traffic(g.pair.qb()));
    assert_eq!((a.staged.bytes_out, b.staged.bytes_in), (payload, payload));
    let others = |t: crate::cuda::GpuTraffic| (t.ipc, t.same_process, t.host);
    assert_eq!((others(a), others(b)), Default::default());
}

#[test]
fn r7_a_queue_pair_ends_with_copies_under_way_and_none_writes_after_it() {
    in_both_ways(|_| {
        for killed in [false, true] {
            let mut g = Gpus::new(Profile::Default);
            let (from, to) = (g.region(true, 1 << 20, true), g.region(false, 1 << 20, true));
            g.fake.hold(true);
            post(g.pair.qa(), 3, write_to(&to, 0, None), &[sge(&from, 0, 1 << 20)]);
            g.pair.quiet();
            if killed {
                g.pair.qb = None;
            } else {
                // Deregistered: when that returns, no GPU writes it.
                drop(to);
            }
            let copies = g.fake.queued();
            assert_eq!(copies, 0, "they were waited for");
            g.fake.hold(false);
            g.pair.until("the write to end", |p| !p.a.seen.is_empty());
        }
    });
}

/// Many small WRITEs from one GPU to the other, every second piece, backwards. How many copies and kernels it took.
fn write_pieces(g: &mut Gpus, from: &Region<Exposed>, to: &Region<Exposed>, salt: u64) -> (usize, usize) {
    let (piece, count) = PIECES;
    let data = pattern((2 * count * piece) as usize, salt);
    fill(from, 0, &data);
    let (copies, kernels) = (g.fake.count("cuMemcpyAsync"), g.fake.count("cuLaunchKernel"));
    let calls = traffic(g.pair.qb()).calls;
    let mut chain = WrChain::default();
    for n in 0..count {
        let at = (count - 1 - n) * 2 * piece;
        chain.push(n, write_to(to, n * 2 * piece, None), &[sge(from, at, piece)], true, false);
    }
    g.pair.qa().post_send(&chain).unwrap();
    g.pair.wait(count as usize, 0);
    let (copies, kernels) =
        (g.fake.count("cuMemcpyAsync") - copies, g.fake.count("cuLaunchKernel") - kernels);
    assert_eq!(traffic(g.pair.qb()).calls - calls, (copies + kernels) as u64);
    for n in 0..count {
        let at = ((count - 1 - n) * 2 * piece) as usize;
        assert_eq!(contents(to, n * 2 * piece, piece as usize), data[at..at + piece as usize], "{n}");
    }
    (copies, kernels)
}

/// Bytes and number.
const PIECES: (u64, u64) = (1152, 300);

/// Of two processes, one on each GPU; within one process, both on one.
fn pieces_of(g: &Gpus, here: bool) -> (Region<Exposed>, Region<Exposed>) {
    let room = 2 * PIECES.0 * PIECES.1;
    (g.on(&g.pair.a, 0, room), g.on(&g.pair.b, u32::from(!here), room))
}

#[test]
fn k8_many_small_pieces_are_one_gathered_copy() {
    in_both_ways(|here| {
        let mut g = Gpus::new(Profile::Default);
        let (from, to) = pieces_of(&g, here);
        let (copies, kernels) = write_pieces(&mut g, &from, &to, 5);
        assert!(kernels > 0 && copies + kernels < 40, "{copies} copies and {kernels} kernels");
    });
}

/// Within a process nobody has asked for access between the two.
#[test]
fn r9_no_kernel_reads_memory_of_another_gpu_that_was_not_opened_for_it() {
    let mut g = Gpus::new(Profile::Default);
    let (from, to) = pieces_of(&g, false);
    assert_eq!(write_pieces(&mut g, &from, &to, 5), (PIECES.1 as usize, 0));
}

#[test]
fn k8_pieces_go_one_by_one_while_the_kernel_or_its_list_cannot_be_had() {
    in_both_ways(|here| {
        let mut g = Gpus::new(Profile::Default);
        g.fake.refuse("cuModuleLoadData", usize::MAX);
        let (from, to) = pieces_of(&g, here);
        assert_eq!(write_pieces(&mut g, &from, &to, 5), (PIECES.1 as usize, 0), "no kernel");
        g.fake.refuse("cuModuleLoadData", 0);
        g.fake.refuse("cuMemAlloc", usize::MAX);
        let deadline = Instant::now() + DEADLINE;
        while g.fake.count("cuModuleLoadData") == 0 {
            // Asked for again with each, and made elsewhere.
            assert_eq!(write_pieces(&mut g, &from, &to, 6), (PIECES.1 as usize, 0), "no room for a list");
            assert!(Instant::now() < deadline, "a failure is kept");
        }
        g.fake.refuse("cuMemAlloc", 0);
        while write_pieces(&mut g, &from, &to, 7).1 == 0 {
            assert!(Instant::now() < deadline, "a failure is kept");
        }
    });
}

/// The driver takes tens of milliseconds for it.
#[test]
fn r9_the_kernel_is_made_with_a_registration_and_no_queue_pair_waits_for_it() {
    let mut g = Gpus::new(Profile::Default);
    let (from, to) = pieces_of(&g, true);
    assert_eq!(g.fake.count("cuModuleLoadData"), 1, "both on one GPU");
    assert!(write_pieces(&mut g, &from, &to, 5).1 > 0);
    // One that could not be made then is made beside the thread that moves data.
    let mut g = Gpus::new(Profile::Default);
    g.fake.refuse("cuModuleLoadData", 2);
    let (from, to) = pieces_of(&g, true);
    let deadline = Instant::now() + DEADLINE;
    while write_pieces(&mut g, &from, &to, 6).1 == 0 {
        assert!(Instant::now() < deadline, "it is not made");
    }
    assert!(!g.fake.made_modules_on(std::thread::current().id()));
}

/// Two GPUs are to copy, the first one cannot, and a request behind that is refused: neither message has arrived.
#[test]
fn k1_no_message_arrives_whose_copy_could_not_be_queued() {
    let mut g = Gpus::new(Profile::Default);
    let from = g.region(true, 8192, true);
    let to = [0, 1].map(|gpu| g.on(&g.pair.b, gpu, 4096));
    fill(&from, 0, &pattern(8192, 3));
    recv(g.pair.qb(), 1, None);
    recv(g.pair.qb(), 2, None);
    g.fake.refuse("cuMemcpyAsync", 1);
    let mut chain = WrChain::default();
    chain.push(3, write_to(&to[0], 0, Some(1)), &[sge(&from, 0, 4096)], true, false);
    chain.push(4, write_to(&to[1], 0, Some(2)), &[sge(&from, 4096, 4096)], true, false);
    chain.push(5, SendOp::Write { remote_addr: 0, rkey: 0, imm: None }, &[sge(&from, 0, 1)], true, false);
    g.pair.qa().post_send(&chain).unwrap();
    g.pair.until("both sides to end", |p| p.a.seen.len() == 3 && p.b.seen.len() == 2);
    for cqe in g.pair.a.take().iter().chain(&g.pair.b.take()) {
        assert_ne!(cqe.status, WcStatus::Success, "{cqe:?}");
    }
}

/// Two GPUs copy what one frame refers to, and one of them takes its time.
#[test]
fn r1_a_source_that_two_gpus_copy_from_is_lent_until_the_last_of_them_is_over() {
    let mut g = Gpus::new(Profile::Default);
    let from = g.region(true, 8192, true);
    let to = [0, 1].map(|gpu| g.on(&g.pair.b, gpu, 4096));
    let key = sge(&from, 0, 1).lkey;
    g.fake.hold_on(1, true);
    let mut chain = WrChain::default();
    for (n, to) in to.iter().enumerate() {
        chain.push(n as u64, write_to(to, 0, None), &[sge(&from, 4096 * n as u64, 4096)], true, false);
    }
    g.pair.qa().post_send(&chain).unwrap();
    g.pair.quiet();
    assert_eq!(g.fake.queued(), 1, "the first is over");
    assert!(lends(g.pair.qa(), key));
    g.fake.hold_on(1, false);
    g.pair.wait(2, 0);
    g.pair.until("the ring to be given back", |p| !lends(p.qa(), key));
}

/// Pieces of one byte, each a call of the driver: a turn makes a few, and not as many as it may take bytes.
#[test]
fn r9_a_table_of_tiny_pieces_for_a_gpu_takes_a_few_of_them_in_a_turn() {
    let (cuda, fake) = Fake::new(1);
    let mut side = Side::new(SoftTransport::Shm, Profile::Default);
    let (qp, peer) = shm_peer(&side);
    let memory = Memory::cuda_of(&cuda, 0, 16_384);
    let to = Region::register(&side.pd, memory.map_for(&side.pd).unwrap(), ALL).unwrap();
    let from = peer.lend(9, 8192);
    from.write(0, &pattern(8192, 5));
    recv(&qp, 1, None);
    peer.put(&tiny_pieces(&to, 4, 2));
    let (deadline, mut most) = (Instant::now() + DEADLINE, 0);
    while side.seen.is_empty() {
        let before = fake.count("cuMemcpyAsync");
        side.poll();
        most = most.max(fake.count("cuMemcpyAsync") - before);
        assert!(Instant::now() < deadline, "not in time");
    }
    assert!(most <= 1024, "{most} calls in a turn");
    assert_eq!(ids(&side.take()), [(1, WcStatus::Success)]);
    let landed: Vec<u8> = contents(&to, 0, 16_384).into_iter().step_by(2).collect();
    assert_eq!(landed, pattern(8192, 5));
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

/// An answer that comes twice while the first one is still being copied: the second one would write after the READ has completed.
#[test]
fn r1_a_read_whose_answer_comes_twice_takes_it_once() {
    let (cuda, fake) = Fake::new(1);
    let mut side = Side::new(SoftTransport::Tcp, Profile::Default);
    let (qp, mut peer) = raw_peer(&side);
    let hello = Preamble { target: qp.qp_num(), own: 77, key: qp.address().soft_key };
    peer.write_all(&hello.encode()).unwrap();
    let memory = Memory::cuda_of(&cuda, 0, 4096);
    let to = Region::register(&side.pd, memory.map_for(&side.pd).unwrap(), ALL).unwrap();
    post(&qp, 1, SendOp::Read { remote_addr: 0, rkey: 1 }, &[sge(&to, 0, 16)]);
    // It waits in line, so that the READ is not done when the second answer comes.
    fake.hold(true);
    let answer = |byte| {
        let desc = Desc { total: 16, len: 16, ..Desc::new(Opcode::ReadResponse, 0) };
        frame(&[desc], &[byte; 16], 0)
    };
    // Until the READ is asked for: the preamble, and a frame.
    let mut said = 0;
    let deadline = Instant::now() + DEADLINE;
    peer.set_nonblocking(true).unwrap();
    while said < PREAMBLE + HEADER + DESC {
        side.poll();
        said += peer.read(&mut [0; 256]).unwrap_or(0);
        assert!(Instant::now() < deadline, "the READ is not asked for");
    }
    peer.set_nonblocking(false).unwrap();
    peer.write_all(&[answer(1), answer(2)].concat()).unwrap();
    ends_in_error(side, &qp, "an answer that comes twice");
    fake.hold(false);
    assert_ne!(contents(&to, 0, 16), [2; 16]);
    assert_eq!(fake.wrong(), Vec::<String>::new());
}

/// The answer to an atomic acknowledges the WRITEs before it.
#[test]
fn k1_an_atomic_is_not_answered_before_the_copies_in_front_of_it_are_over() {
    // In few copies: nobody looks for the end of the first ones while all of them are held.
    const LEN: u64 = 4096;
    for on in [SoftTransport::Tcp, SoftTransport::Shm] {
        let mut g = Gpus::over(on, Profile::Default);
        let (from, to) = (g.region(true, LEN, true), g.region(false, LEN, true));
        let (old, number) =
            (g.pair.a.region(8, ALL), g.pair.b.region(8, ALL.union(AccessFlags::REMOTE_ATOMIC)));
        fill(&from, 0, &pattern(LEN as usize, 8));
        // Of the receiver's GPU: over TCP the sender's copies too.
        g.fake.hold_on(1, true);
        post(g.pair.qa(), 1, write_to(&to, 0, None), &[sge(&from, 0, LEN)]);
        let remote = number.remote();
        let add = SendOp::FetchAdd { remote_addr: remote.addr, rkey: remote.rkey, add: 3 };
        post(g.pair.qa(), 2, add, &[sge(&old, 0, 8)]);
        let (a, _) = g.pair.wait(2, 0);
        assert_eq!(g.fake.queued(), 0, "{on}: the copy is over");
        assert_eq!(ids(&a), [(1, WcStatus::Success), (2, WcStatus::Success)]);
        assert_eq!(contents(&number, 0, 8), 3u64.to_ne_bytes());
        assert_eq!(contents(&to, 0, LEN as usize), pattern(LEN as usize, 8));
        g.fake.hold_on(1, false);
    }
}

/// The driver copies to ordinary host memory in the thread that asks for it.
#[test]
fn r9_a_large_copy_from_a_gpu_to_host_memory_takes_several_turns() {
    const LEN: u64 = 4 << 20;
    in_both_ways(|_| {
        let mut g = Gpus::new(Profile::Default);
        let (from, to) = (g.region(true, LEN, true), g.region(false, LEN, false));
        let here = g.region(true, LEN, false);
        let theirs = g.region(false, LEN, true);
        for (what, op, at, source, target) in [
            ("WRITE", write_to(&to, 0, None), &from, &from, &to),
            ("READ", read_from(&theirs, 0), &here, &theirs, &here),
        ] {
            fill(source, 0, &pattern(LEN as usize, 9));
            let before = g.fake.count("cuMemcpyAsync");
            post(g.pair.qa(), 1, op, &[sge(at, 0, LEN)]);
            g.pair.wait(1, 0);
            let copies = g.fake.count("cuMemcpyAsync") - before;
            assert!(copies > 4, "{what}: {copies} copies of a MiB and more");
            assert_eq!(contents(target, 0, LEN as usize), pattern(LEN as usize, 9), "{what}");
        }
    });
}
