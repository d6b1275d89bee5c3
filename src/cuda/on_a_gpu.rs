//! The driver itself, on a GPU: what the recorded one cannot say. Without a GPU these fail; `tests/gpu` runs them.

use std::sync::Arc;
use std::time::Instant;

use super::SLOT_BYTES;
use super::context::{Cuda, Gpu};
use super::copy::Copier;
use super::memory::DeviceMemory;
use super::slots::Slot;
use crate::memory::next_name;

#[path = "../../tests/gpu_suite/shuffled.rs"]
mod order;

fn gpu() -> Arc<Gpu> {
    Cuda::system().unwrap().gpu(0).unwrap()
}

fn memory(gpu: &Arc<Gpu>, bytes: u64) -> Arc<DeviceMemory> {
    DeviceMemory::alloc(gpu, bytes, next_name).unwrap()
}

fn shuffled(n: u64, seed: u64) -> Vec<u64> {
    // Thousands, of pieces.
    order::shuffled(n as u32, seed).into_iter().map(u64::from).collect()
}

fn fly(copier: &mut Copier, gathers: bool) -> u32 {
    // SAFETY: the tests' own memory, which lives until the flight is over.
    let flight = unsafe { copier.launch(gathers).unwrap() };
    flight.wait().unwrap();
    assert!(flight.is_done().unwrap());
    flight.calls()
}

#[test]
#[ignore = "needs a GPU: tests/gpu"]
fn r2_the_kernel_copies_pieces_of_every_kind_to_their_places() {
    let gpu = gpu();
    let (from, to) = (memory(&gpu, 8 << 20), memory(&gpu, 8 << 20));
    let mut state = 1u64;
    let data: Vec<u8> = (0..8 << 20)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        })
        .collect();
    from.copy_in(from.addr(), &data).unwrap();
    let mut copier = Copier::new(gpu.clone()).unwrap();
    for (piece, count, gathered) in
        [(128, 1000, true), (1152, 3000, true), (65_536, 60, true), (1160, 100, false), (16, 50, false)]
    {
        to.copy_in(to.addr(), &vec![0; 8 << 20]).unwrap();
        let (sources, targets) = (shuffled(count, 3), shuffled(count, 4));
        let mut expected = vec![0u8; 8 << 20];
        for (&source, &target) in sources.iter().zip(&targets) {
            // Some are neighbours, which become one.
            let (source, target) = ((source * piece) as usize, (target * piece) as usize);
            copier.push(to.addr() + target as u64, from.addr() + source as u64, piece);
            expected[target..target + piece as usize].copy_from_slice(&data[source..source + piece as usize]);
        }
        let calls = fly(&mut copier, true);
        assert_eq!(calls == 2, gathered, "{count} pieces of {piece} bytes in {calls} calls");
        let mut got = vec![0; 8 << 20];
        to.copy_out(to.addr(), &mut got).unwrap();
        assert!(got == expected, "{count} pieces of {piece} bytes");
    }
}

/// 221,184 pieces of 1,152 bytes, as DeepSeek-V2-Lite's cache at page 1 has them, beside one copy of as many bytes.
#[test]
#[ignore = "needs a GPU: tests/gpu"]
fn k8_a_gathered_copy_beside_a_flat_one() {
    const PIECE: u64 = 1152;
    const COUNT: u64 = 27 * 8192;
    const ROUNDS: usize = 20;
    let gpu = gpu();
    let (from, to) = (memory(&gpu, PIECE * COUNT), memory(&gpu, PIECE * COUNT));
    let mut copier = Copier::new(gpu.clone()).unwrap();
    let mut middle = |fill: &dyn Fn(&mut Copier), gathers| {
        let mut micros: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                fill(&mut copier);
                let start = Instant::now();
                fly(&mut copier, gathers);
                start.elapsed().as_secs_f64() * 1e6
            })
            .collect();
        micros.sort_by(f64::total_cmp);
        micros[ROUNDS / 2]
    };
    let flat = middle(&|copier| copier.push(to.addr(), from.addr(), PIECE * COUNT), false);
    let (sources, targets) = (shuffled(COUNT, 5), shuffled(COUNT, 6));
    let fill = |copier: &mut Copier| {
        for (source, target) in sources.iter().zip(&targets) {
            copier.push(to.addr() + target * PIECE, from.addr() + source * PIECE, PIECE);
        }
    };
    let gathered = middle(&fill, true);
    // The kernel alone: its list is on the GPU already.
    let kernel = copier.kernel_micros(&fill, ROUNDS);
    println!(
        "{COUNT} pieces of {PIECE} bytes: one flat copy {flat:.0} us; gathered, with making and sending the list, {gathered:.0} us; the kernel alone {kernel:.0} us, {:.2} of flat",
        kernel / flat
    );
}

#[test]
#[ignore = "needs a GPU: tests/gpu"]
fn r10_case_45_allocations_are_exported_as_dmabuf_and_by_ipc() {
    let gpu = gpu();
    for bytes in [64 << 10, 3 << 20, 1 << 30] {
        let memory = memory(&gpu, bytes);
        memory.export().unwrap();
        let (fd, range) = memory.dma_buf().unwrap();
        assert!(range.start <= memory.addr() && range.end >= memory.addr() + bytes, "{range:x?}");
        assert!(range.start.is_multiple_of(4096) && range.end.is_multiple_of(4096), "{range:x?}");
        let link =
            std::fs::read_link(format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd))).unwrap();
        println!("{bytes} bytes: {} of {} bytes", link.display(), range.end - range.start);
    }
}

/// By single copies and by the kernel, in both directions; and their pool is empty when nobody has memory or a slot.
#[test]
#[ignore = "needs a GPU: tests/gpu"]
fn r2_pinned_slots_are_copied_to_and_from_by_copies_and_by_the_kernel() {
    let gpu = gpu();
    let (from, to) = (memory(&gpu, 8 << 20), memory(&gpu, 8 << 20));
    let slot = Slot::take(&gpu).unwrap();
    let mut copier = Copier::new(gpu.clone()).unwrap();
    for (piece, count) in [(SLOT_BYTES as u64, 1), (1152, 400), (100_000, 5)] {
        let data: Vec<u8> = (0..8u64 << 20).map(|i| (i.wrapping_mul(piece + 7) >> 6) as u8).collect();
        from.copy_in(from.addr(), &data).unwrap();
        to.copy_in(to.addr(), &vec![0; 8 << 20]).unwrap();
        let mut expected = vec![0u8; 8 << 20];
        for n in 0..count {
            // Every second piece out, from the last one on; and in, from the first one on.
            let source = (count - 1 - n) * 2 * piece;
            copier.push(slot.addr() + n * piece, from.addr() + source, piece);
            let target = n * 2 * piece;
            expected[target as usize..][..piece as usize]
                .copy_from_slice(&data[source as usize..][..piece as usize]);
        }
        let out = fly(&mut copier, true);
        for n in 0..count {
            copier.push(to.addr() + n * 2 * piece, slot.addr() + n * piece, piece);
        }
        let back = fly(&mut copier, true);
        let mut got = vec![0; 8 << 20];
        to.copy_out(to.addr(), &mut got).unwrap();
        println!("{count} pieces of {piece} bytes by {out} calls, and back by {back}");
        assert!(got == expected, "{count} pieces of {piece} bytes");
    }
}
