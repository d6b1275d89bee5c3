//! What a copy out of a peer's memory costs, by size: through the caches, and past them.
//!
//! ```text
//!   copy.KIND.STATE.SIZE    GB/s
//!     KIND     plain (the C library's memcpy), avx and sse2 (non-temporal stores)
//!     STATE    hot    the same two buffers again and again
//!              cold   both flushed from the caches before each copy
//!              read   as hot, and the target is read afterwards, as its user would
//!     SIZE     up to 256 MiB
//! ```
//!
//! The source is a second, read-only mapping of a memfd, as a peer's region is; the target is anonymous. This is the very code
//! that the soft device copies with (`src/provider/soft/shm/raw_copy.rs`), in its pieces of 64 KiB. What it says decides from
//! which size on a transfer is written past the caches.
//!
//! `cargo bench --bench copy [-- --no-pin]`

#[path = "common/mod.rs"]
mod common;
#[path = "../src/provider/soft/shm/raw_copy.rs"]
mod raw_copy;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::ExitCode;
use std::time::Instant;

use common::{Error, INITIATOR_CPU, Samples, line};
use raw_copy::Streams;

const SIZES: [usize; 9] =
    [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20];
/// As `copy.rs` cuts a copy.
const PIECE: usize = 64 << 10;
/// What a case copies in all, at least one copy.
const BYTES_A_CASE: usize = 1 << 30;
const MOST_COPIES: usize = 1000;

fn main() -> ExitCode {
    let mut pin = true;
    let mut measures = false;
    for arg in std::env::args().skip(1) {
        match arg.as_str() {
            "--bench" => measures = true,
            "--no-pin" => pin = false,
            other => {
                eprintln!("copy: {other}: no such option; there is --no-pin");
                return ExitCode::from(2);
            }
        }
    }
    match run(pin, measures) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("copy: {why}");
            ExitCode::FAILURE
        }
    }
}

fn run(pin: bool, measures: bool) -> Result<(), Error> {
    if pin {
        common::pin(INITIATOR_CPU)?;
    }
    let kinds = match Streams::detect() {
        Streams::Avx => &[("plain", Streams::None), ("avx", Streams::Avx), ("sse2", Streams::Sse2)][..],
        Streams::Sse2 => &[("plain", Streams::None), ("sse2", Streams::Sse2)],
        Streams::None => &[("plain", Streams::None)],
    };
    let sizes = if measures { &SIZES[..] } else { &SIZES[..3] };
    for &size in sizes {
        let buffers = Buffers::new(size)?;
        let copies = if measures { (BYTES_A_CASE / size).clamp(5, MOST_COPIES) } else { 1 };
        for state in ["hot", "cold", "read"] {
            // In turn, so that a slow moment of the machine is everybody's.
            let mut samples: Vec<Samples> = kinds.iter().map(|_| Samples::default()).collect();
            for _ in 0..copies {
                for (&(_, streams), samples) in kinds.iter().zip(&mut samples) {
                    // The first leaves the caches as this kind leaves them.
                    buffers.sample(state, streams);
                    samples.push(buffers.sample(state, streams));
                }
            }
            for (&(kind, _), samples) in kinds.iter().zip(&samples) {
                let name = format!("copy.{kind}.{state}.{}KiB", size >> 10);
                line(&name, size as f64 / samples.median() / 1e9, "GB/s");
            }
        }
    }
    Ok(())
}

/// A peer's region as it is seen here, and a target.
struct Buffers {
    source: *const u8,
    target: *mut u8,
    size: usize,
}

impl Buffers {
    /// Never unmapped: the program ends soon.
    fn new(size: usize) -> Result<Self, Error> {
        // SAFETY: plain system calls; the descriptor is nobody else's, and mappings are at addresses of the kernel's choice.
        unsafe {
            let fd = libc::memfd_create(c"copy".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error().into());
            }
            let fd = OwnedFd::from_raw_fd(fd);
            if libc::ftruncate(fd.as_raw_fd(), libc::off_t::try_from(size)?) != 0 {
                return Err(io::Error::last_os_error().into());
            }
            let both = libc::PROT_READ | libc::PROT_WRITE;
            let owner = map(size, both, libc::MAP_SHARED, fd.as_raw_fd())?;
            let source = map(size, libc::PROT_READ, libc::MAP_SHARED, fd.as_raw_fd())?;
            let target = map(size, both, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
            owner.write_bytes(3, size);
            target.write_bytes(1, size);
            Ok(Self { source, target, size })
        }
    }

    /// The seconds of one copy.
    fn sample(&self, state: &str, streams: Streams) -> f64 {
        if state == "cold" {
            flush(self.source, self.size);
            flush(self.target, self.size);
        }
        let start = Instant::now();
        for at in (0..self.size).step_by(PIECE) {
            let n = PIECE.min(self.size - at);
            // SAFETY: inside of two mappings of `size` bytes; `run` asks for what this processor has.
            unsafe { raw_copy::stream(self.source.add(at), self.target.add(at), n, streams) };
        }
        if state == "read" {
            // SAFETY: a mapping of `size` bytes that nothing writes now.
            let words: &[u64] = unsafe { std::slice::from_raw_parts(self.target.cast(), self.size / 8) };
            std::hint::black_box(words.iter().fold(0u64, |sum, word| sum.wrapping_add(*word)));
        }
        start.elapsed().as_secs_f64()
    }
}

/// # Safety
/// As `mmap`: no fixed address.
unsafe fn map(size: usize, protection: i32, flags: i32, fd: i32) -> Result<*mut u8, Error> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), size, protection, flags | libc::MAP_POPULATE, fd, 0) };
    if at == libc::MAP_FAILED { Err(io::Error::last_os_error().into()) } else { Ok(at.cast()) }
}

/// Empties the caches of `start..+size`.
#[cfg(target_arch = "x86_64")]
fn flush(start: *const u8, size: usize) {
    use std::arch::x86_64::{_mm_clflush, _mm_mfence};
    for at in (0..size).step_by(64) {
        // SAFETY: an address inside of a mapping; the instruction is part of SSE2.
        unsafe { _mm_clflush(start.wrapping_add(at)) };
    }
    // SAFETY: part of SSE2, which every x86_64 has.
    unsafe { _mm_mfence() };
}

/// No program can, there: cold is as hot.
#[cfg(not(target_arch = "x86_64"))]
fn flush(_: *const u8, _: usize) {}
