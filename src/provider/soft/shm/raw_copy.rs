//! Copies out of memory that another process may be writing. Addresses in, bytes moved; knows nothing of this crate, so that
//! `benches/copy.rs` measures this very file.
//!
//! Such memory is never read by Rust code: a plain load that races with a store is undefined, whoever stores. The loads are
//! made outside of the language instead, by machine instructions that are written out here or by the C library, reached through
//! a pointer of which the compiler knows nothing. As with a copy by the kernel, what may be torn is then the bytes in the
//! target, and no value that this program computes with.
//!
//! Two ways, for two sizes. [`plain`] leaves the target in the caches, where who reads it next finds it. [`stream`] writes it
//! past them (non-temporal stores): the processor does not first read the lines that it is about to overwrite, and the caches
//! keep what they had.

use std::hint::black_box;

/// An instruction set with non-temporal stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code)] // Not every architecture has both, and one bench names them all.
pub(super) enum Streams {
    /// 32 bytes a store.
    Avx,
    /// 16 bytes a store.
    Sse2,
    /// None: a stream is a plain copy.
    None,
}

impl Streams {
    /// What this processor has.
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            // The answer is looked up once in a process.
            if std::arch::is_x86_feature_detected!("avx") { Self::Avx } else { Self::Sse2 }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            Self::None
        }
    }
}

/// Copies `len` bytes from `source` to `target`.
///
/// # Safety
/// `source..+len` is mapped and readable, also if others write it meanwhile; `target..+len` is valid for writes and nobody else
/// accesses it. As addresses the two do not overlap.
pub(super) unsafe fn plain(source: *const u8, target: *mut u8, len: usize) {
    type Memcpy =
        unsafe extern "C" fn(*mut libc::c_void, *const libc::c_void, libc::size_t) -> *mut libc::c_void;
    // Hidden, so that the call is not turned into loads of this program.
    let memcpy: Memcpy = black_box(libc::memcpy);
    // SAFETY: the caller's promise is what memcpy asks for.
    unsafe { memcpy(target.cast(), source.cast(), len) };
}

/// As [`plain`], past the caches by `streams` if that is not `None`. What was written is visible to whoever sees a later
/// release store of this thread.
///
/// # Safety
/// As [`plain`], and this processor has `streams`.
pub(super) unsafe fn stream(source: *const u8, target: *mut u8, len: usize, streams: Streams) {
    // Whole quads to aligned addresses; what is before and behind them is copied plainly.
    let head = target.align_offset(ALIGN).min(len);
    let body = (len - head) / STEP * STEP;
    if streams == Streams::None || body < LEAST {
        // SAFETY: the caller's promise.
        return unsafe { plain(source, target, len) };
    }
    let done = head + body;
    // SAFETY: `head`, `body` and the rest are the parts of `len`, so each part is inside of what the caller promises. The body
    // begins at a multiple of `ALIGN` and is a multiple of `STEP` above zero; the processor is the caller's promise.
    unsafe {
        plain(source, target, head);
        quads(source.add(head), target.add(head), body, streams);
        plain(source.add(done), target.add(done), len - done);
    }
}

/// What the address of a stream's target is a multiple of: a line of the caches.
const ALIGN: usize = 64;
/// A turn copies two lines of each of four parts, the lanes. The processor then fetches from four places at once, which is worth a
/// fifth of the speed where the source is not in a cache.
const LINES: usize = 128;
const STEP: usize = 4 * LINES;
/// A lane at most.
const LANE: usize = 4096;
/// Less than this is not worth it.
const LEAST: usize = 1024;

/// Copies four lanes, each `$lane` bytes from the last one, from `$source` to `$target`, `LINES` of each a turn: loads to the
/// registers `$n`, looks ahead, stores past the caches.
#[cfg(target_arch = "x86_64")]
macro_rules! quad {
    (
        $source:expr, $target:expr, $lane:expr, $step:literal, $load:literal, $store:literal, $register:literal, $end:literal;
        $($n:literal at $at:literal),*;
        ahead $($ahead:literal),*
    ) => {
        std::arch::asm!(
            "2:",
            $(concat!($load, " ", $register, $n, ", ", $register, "word ptr [rsi + ", $at, "]"),)*
            $(concat!("prefetcht0 byte ptr [rsi + ", $ahead, "]"),)*
            $(concat!($store, " ", $register, "word ptr [rdi + ", $at, "], ", $register, $n),)*
            concat!("add rsi, ", $step),
            concat!("add rdi, ", $step),
            concat!("sub rcx, ", $step),
            "jnz 2b",
            $end,
            inout("rsi") $source => _,
            inout("rdi") $target => _,
            inout("rcx") $lane => _,
            in("r8") $lane,
            in("r9") 3 * $lane,
            clobber_abi("sysv64"),
            options(nostack),
        )
    };
}

/// The body of a stream, and the fence behind it: non-temporal stores are not ordered with later stores otherwise.
///
/// # Safety
/// As [`stream`]; `target` is a multiple of [`ALIGN`] and `len` one of [`STEP`].
#[cfg(target_arch = "x86_64")]
unsafe fn quads(source: *const u8, target: *mut u8, len: usize, streams: Streams) {
    let mut at = 0;
    while at < len {
        let lane = LANE.min((len - at) / 4);
        let (source, target) = (source.wrapping_add(at), target.wrapping_add(at));
        at += 4 * lane;
        if streams == Streams::Avx {
            // SAFETY: `lane` is a multiple of the step, since `len` is one of four steps, and not zero; so loads and stores are
            // inside of `4 * lane` bytes at `source` and `target`, which is aligned for them. Looking ahead faults nowhere. All
            // registers that change, with their upper halves, are clobbers of the ABI or outputs.
            unsafe {
                quad!(
                    source, target, lane, 128, "vmovdqu", "vmovntdq", "ymm", "vzeroupper";
                    0 at "0", 1 at "32", 2 at "64", 3 at "96",
                    4 at "r8", 5 at "r8 + 32", 6 at "r8 + 64", 7 at "r8 + 96",
                    8 at "2 * r8", 9 at "2 * r8 + 32", 10 at "2 * r8 + 64", 11 at "2 * r8 + 96",
                    12 at "r9", 13 at "r9 + 32", 14 at "r9 + 64", 15 at "r9 + 96";
                    ahead "512", "576", "r8 + 512", "r8 + 576", "2 * r8 + 512", "2 * r8 + 576", "r9 + 512", "r9 + 576"
                );
            }
        } else {
            // SAFETY: as above; SSE2 is part of every x86_64.
            unsafe {
                quad!(
                    source, target, lane, 64, "movdqu", "movntdq", "xmm", "";
                    0 at "0", 1 at "16", 2 at "32", 3 at "48",
                    4 at "r8", 5 at "r8 + 16", 6 at "r8 + 32", 7 at "r8 + 48",
                    8 at "2 * r8", 9 at "2 * r8 + 16", 10 at "2 * r8 + 32", 11 at "2 * r8 + 48",
                    12 at "r9", 13 at "r9 + 16", 14 at "r9 + 32", 15 at "r9 + 48";
                    ahead "512", "r8 + 512", "2 * r8 + 512", "r9 + 512"
                );
            }
        }
    }
    // SAFETY: part of SSE, which every x86_64 has.
    unsafe { std::arch::x86_64::_mm_sfence() };
}

/// # Safety
/// As [`plain`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn quads(source: *const u8, target: *mut u8, len: usize, _: Streams) {
    // SAFETY: the caller's promise.
    unsafe { plain(source, target, len) };
}
