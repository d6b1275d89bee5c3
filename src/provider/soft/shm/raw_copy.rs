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
    // Whole blocks to aligned addresses; what is before and behind them is copied plainly.
    let head = target.align_offset(ALIGN).min(len);
    let body = (len - head) / BLOCK * BLOCK;
    if streams == Streams::None || body == 0 {
        // SAFETY: the caller's promise.
        return unsafe { plain(source, target, len) };
    }
    let done = head + body;
    // SAFETY: `head`, `body` and the rest are the parts of `len`, so each part is inside of what the caller promises. The body
    // begins at a multiple of `ALIGN` and is a multiple of `BLOCK` above zero; the processor is the caller's promise.
    unsafe {
        plain(source, target, head);
        blocks(source.add(head), target.add(head), body, streams);
        plain(source.add(done), target.add(done), len - done);
    }
}

/// What the address of a stream's target is a multiple of.
const ALIGN: usize = 64;
/// Bytes of one turn of the loops below.
const BLOCK: usize = 128;

/// The loop of a stream, and the fence behind it: non-temporal stores are not ordered with later stores otherwise.
///
/// # Safety
/// As [`stream`]; `target` is a multiple of [`ALIGN`] and `len` a multiple of [`BLOCK`], not zero.
#[cfg(target_arch = "x86_64")]
unsafe fn blocks(source: *const u8, target: *mut u8, len: usize, streams: Streams) {
    use std::arch::asm;
    if streams == Streams::Avx {
        // SAFETY: loads are inside of `source..+len` and stores inside of `target..+len`, which is aligned for them. Every
        // register that the instructions change, and all upper halves, are clobbers of the C ABI.
        unsafe {
            asm!(
                "2:",
                "vmovdqu ymm0, ymmword ptr [rsi]",
                "vmovdqu ymm1, ymmword ptr [rsi + 32]",
                "vmovdqu ymm2, ymmword ptr [rsi + 64]",
                "vmovdqu ymm3, ymmword ptr [rsi + 96]",
                "prefetcht0 byte ptr [rsi + 512]",
                "prefetcht0 byte ptr [rsi + 576]",
                "vmovntdq ymmword ptr [rdi], ymm0",
                "vmovntdq ymmword ptr [rdi + 32], ymm1",
                "vmovntdq ymmword ptr [rdi + 64], ymm2",
                "vmovntdq ymmword ptr [rdi + 96], ymm3",
                "add rsi, 128",
                "add rdi, 128",
                "sub rcx, 128",
                "jnz 2b",
                "vzeroupper",
                "sfence",
                inout("rsi") source => _,
                inout("rdi") target => _,
                inout("rcx") len => _,
                clobber_abi("sysv64"),
                options(nostack),
            );
        }
        return;
    }
    // SAFETY: as above; SSE2 is part of every x86_64.
    unsafe {
        asm!(
            "2:",
            "movdqu xmm0, xmmword ptr [rsi]",
            "movdqu xmm1, xmmword ptr [rsi + 16]",
            "movdqu xmm2, xmmword ptr [rsi + 32]",
            "movdqu xmm3, xmmword ptr [rsi + 48]",
            "movdqu xmm4, xmmword ptr [rsi + 64]",
            "movdqu xmm5, xmmword ptr [rsi + 80]",
            "movdqu xmm6, xmmword ptr [rsi + 96]",
            "movdqu xmm7, xmmword ptr [rsi + 112]",
            "prefetcht0 byte ptr [rsi + 512]",
            "prefetcht0 byte ptr [rsi + 576]",
            "movntdq xmmword ptr [rdi], xmm0",
            "movntdq xmmword ptr [rdi + 16], xmm1",
            "movntdq xmmword ptr [rdi + 32], xmm2",
            "movntdq xmmword ptr [rdi + 48], xmm3",
            "movntdq xmmword ptr [rdi + 64], xmm4",
            "movntdq xmmword ptr [rdi + 80], xmm5",
            "movntdq xmmword ptr [rdi + 96], xmm6",
            "movntdq xmmword ptr [rdi + 112], xmm7",
            "add rsi, 128",
            "add rdi, 128",
            "sub rcx, 128",
            "jnz 2b",
            "sfence",
            inout("rsi") source => _,
            inout("rdi") target => _,
            inout("rcx") len => _,
            clobber_abi("sysv64"),
            options(nostack),
        );
    }
}

/// # Safety
/// As [`plain`].
#[cfg(not(target_arch = "x86_64"))]
unsafe fn blocks(source: *const u8, target: *mut u8, len: usize, _: Streams) {
    // SAFETY: the caller's promise.
    unsafe { plain(source, target, len) };
}
