//! Many small pieces in one copy: a kernel that the driver compiles at run time.
//!
//! Pieces of one length, in vectors of 16 bytes. Each thread copies vectors, and finds the piece of each by a division; so no lane
//! idles at the end of a piece, and the list is short: eight bytes a piece, where it goes to and comes from, counted in units of each
//! end. Of collected pieces those are vectors, from the lowest address; pieces of several lengths are cut to what divides all of
//! them. Of pages they are blocks, and one list serves all layers, of which each has blocks of threads of its own.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use super::context::Gpu;
use super::error::CudaError;
use super::sys::Opaque;
use crate::background;
use crate::pages::Pages;

/// A piece of memory, and where it is copied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) to: u64,
    pub(super) from: u64,
    pub(super) len: u64,
}

/// Bytes that a thread moves at once.
const VECTOR: u64 = 16;
/// With fewer pieces the driver's own copies are as good.
const FEW: usize = 4;
/// From this length on a piece is worth a copy of its own.
const LARGE: u64 = 1 << 20;
/// Cutting to less than this makes the list longer than it is worth.
const SMALLEST: u64 = 128;
/// Entries of a list at most.
const MOST: u64 = 4 << 20;

const THREADS: u32 = 256;
/// Vectors that a thread has in flight.
const AT_ONCE: u32 = 4;
/// What the second dimension of a grid holds.
const MOST_LAYERS: u32 = 65_535;
/// Blocks at most: more than are resident, fewer than cost a start each.
const BLOCKS: u32 = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) to: End,
    pub(super) from: End,
    /// Vectors of a piece, and of all pieces of a layer.
    pub(super) per_piece: u32,
    pub(super) total: u32,
    pub(super) layers: u32,
}

/// Where pieces are: `unit` times what the list says behind `base`, and in each further layer so much more. In bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub(super) base: u64,
    pub(super) layer: u64,
    pub(super) unit: u32,
}

impl Plan {
    /// Blocks of a layer, and threads of a block.
    pub(super) fn grid(&self) -> (u32, u32) {
        let most = (BLOCKS / self.layers.max(1)).max(1);
        (self.total.div_ceil(THREADS * AT_ONCE).clamp(1, most), THREADS)
    }
}

/// Fills `list` for the kernel. `None` where single copies are to be made instead: of few or large pieces, where addresses
/// or lengths are no multiples of a vector, or where targets overlap, of which the last one has to win.
pub(super) fn plan(pieces: &[Piece], list: &mut Vec<u64>) -> Option<Plan> {
    if pieces.len() < FEW {
        return None;
    }
    let (mut to, mut from, mut unit, mut bytes) = (u64::MAX, u64::MAX, 0, 0u64);
    for piece in pieces {
        (to, from) = (to.min(piece.to), from.min(piece.from));
        unit = gcd(unit, piece.len);
        bytes = bytes.checked_add(piece.len)?;
    }
    let aligned = |piece: &Piece| (piece.to | piece.from | piece.len).is_multiple_of(VECTOR);
    if !(SMALLEST..LARGE).contains(&unit)
        || bytes / pieces.len() as u64 >= LARGE
        || bytes / unit > MOST
        || !pieces.iter().all(aligned)
        || overlap(pieces)
    {
        return None;
    }
    let vectors = |at: u64, base: u64| u32::try_from((at - base) / VECTOR).ok();
    list.clear();
    for piece in pieces {
        for at in (0..piece.len).step_by(unit as usize) {
            let (to, from) = (vectors(piece.to + at, to)?, vectors(piece.from + at, from)?);
            list.push(u64::from(from) << 32 | u64::from(to));
        }
    }
    // Half of what the kernel's counters hold, so that they never wrap around.
    let total = u32::try_from(bytes / VECTOR).ok().filter(|&total| total < 1 << 31)?;
    let end = |base| End { base, layer: 0, unit: VECTOR as u32 };
    Some(Plan { to: end(to), from: end(from), per_piece: (unit / VECTOR) as u32, total, layers: 1 })
}

/// Whether the kernel may be for `pages`, wherever they are.
pub(super) fn may_gather(pages: &Pages) -> bool {
    let (s, t) = (pages.source, pages.target);
    let deep = if pages.layers > 1 { s.layer | t.layer } else { 0 };
    let all = u64::from(pages.piece) | s.block | t.block | deep;
    all.is_multiple_of(VECTOR) && pages.layers <= MOST_LAYERS
}

/// The plan for `pages`, whose first blocks are at these addresses; its list is their pairs. `None` where addresses, lengths or
/// strides are no multiples of a vector, or too large for the kernel's numbers.
pub(super) fn plan_pages(pages: &Pages, to: u64, from: u64) -> Option<Plan> {
    let (s, t) = (pages.source, pages.target);
    if !may_gather(pages) || !(to | from).is_multiple_of(VECTOR) {
        return None;
    }
    let vectors = u64::from(pages.piece) * pages.pairs.len() as u64 / VECTOR;
    let total = u32::try_from(vectors).ok().filter(|&total| total < 1 << 31)?;
    let (to_unit, from_unit) = (u32::try_from(t.block).ok()?, u32::try_from(s.block).ok()?);
    Some(Plan {
        to: End { base: to, layer: t.layer, unit: to_unit },
        from: End { base: from, layer: s.layer, unit: from_unit },
        per_piece: pages.piece / VECTOR as u32,
        total,
        layers: pages.layers,
    })
}

/// Whether some byte is written twice: the kernel has no order.
fn overlap(pieces: &[Piece]) -> bool {
    let mut targets: Vec<(u64, u64)> = pieces.iter().map(|p| (p.to, p.to.saturating_add(p.len))).collect();
    targets.sort_unstable();
    targets.windows(2).any(|pair| pair[0].1 > pair[1].0)
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// The kernel of a GPU. The driver takes tens of milliseconds to compile it, so that nobody who moves data waits for that.
#[derive(Debug, Default)]
pub(super) struct Kernel {
    made: OnceLock<Opaque>,
    being_made: AtomicBool,
}

impl Kernel {
    /// The kernel for `gpu`, if it is there. If not it is made from now on, on another thread; also one that could not be had before:
    /// the GPU's memory may have been full.
    pub(super) fn get(gpu: &Arc<Gpu>) -> Option<Opaque> {
        let made = gpu.kernel.made.get().copied();
        if made.is_none() && !gpu.kernel.being_made.swap(true, Ordering::Relaxed) {
            let gpu = gpu.clone();
            background::run_apart(move || {
                if let Err(error) = Self::make(&gpu) {
                    tracing::debug!(%error, "pieces are copied one by one");
                }
                gpu.kernel.being_made.store(false, Ordering::Relaxed);
            });
        }
        made
    }

    /// Has the driver compile it, unless it is there, and waits for that.
    pub(super) fn make(gpu: &Gpu) -> Result<Opaque, CudaError> {
        if let Some(made) = gpu.kernel.made.get() {
            return Ok(*made);
        }
        let made = gpu.enter()?.driver().function(TEXT, c"landfall_gather")?;
        // Of two threads that have made one, both use the first.
        Ok(*gpu.kernel.made.get_or_init(|| made))
    }
}

/// Where there is a vector `$index`, loads its entry of the list: `p$n` says whether, and `in$n` where it is in its piece.
macro_rules! find {
    ($n:literal, $index:literal) => {
        concat!(
            "setp.lt.u32 p",
            $n,
            ", ",
            $index,
            ", %total;\n",
            "div.u32 piece, ",
            $index,
            ", %per;\n",
            "mul.lo.u32 in",
            $n,
            ", piece, %per;\n",
            "sub.u32 in",
            $n,
            ", ",
            $index,
            ", in",
            $n,
            ";\n",
            "mul.wide.u32 at, piece, 8;\n",
            "add.u64 at, at, %list;\n",
            "@p",
            $n,
            " ld.global.nc.v2.u32 {t",
            $n,
            ", f",
            $n,
            "}, [at];\n",
        )
    };
}

/// Loads the vector itself, and leaves in `to$n` where it goes.
macro_rules! load {
    ($n:literal) => {
        concat!(
            "mad.wide.u32 to",
            $n,
            ", t",
            $n,
            ", %tounit, %to;\n",
            "mad.wide.u32 to",
            $n,
            ", in",
            $n,
            ", 16, to",
            $n,
            ";\n",
            "mad.wide.u32 at, f",
            $n,
            ", %fromunit, %from;\n",
            "mad.wide.u32 at, in",
            $n,
            ", 16, at;\n",
            "@p",
            $n,
            " ld.global.v4.u32 {a",
            $n,
            ", b",
            $n,
            ", c",
            $n,
            ", d",
            $n,
            "}, [at];\n",
        )
    };
}

macro_rules! store {
    ($n:literal) => {
        concat!("@p", $n, " st.global.v4.u32 [to", $n, "], {a", $n, ", b", $n, ", c", $n, ", d", $n, "};\n")
    };
}

/// PTX: the text that the driver compiles for the GPU that it finds.
const TEXT: &CStr = match CStr::from_bytes_with_nul(
    concat!(
        ".version 6.4\n.target sm_60\n.address_size 64\n",
        ".visible .entry landfall_gather(.param .u64 p_list, .param .u64 p_to, .param .u64 p_from, ",
        ".param .u64 p_tolayer, .param .u64 p_fromlayer, .param .u32 p_tounit, .param .u32 p_fromunit, ",
        ".param .u32 p_per, .param .u32 p_total)\n{\n",
        ".reg .pred p0, p1, p2, p3, more;\n",
        ".reg .u64 %list, %to, %from, %tolayer, %fromlayer, layer, at, to0, to1, to2, to3;\n",
        ".reg .u32 %tounit, %fromunit, %per, %total, piece, i0, i1, i2, i3, block, width, lane, stride, step;\n",
        ".reg .u32 in0, in1, in2, in3, t0, t1, t2, t3, f0, f1, f2, f3;\n",
        ".reg .u32 a0, b0, c0, d0, a1, b1, c1, d1, a2, b2, c2, d2, a3, b3, c3, d3;\n",
        "ld.param.u64 %list, [p_list];\nld.param.u64 %to, [p_to];\nld.param.u64 %from, [p_from];\n",
        "ld.param.u64 %tolayer, [p_tolayer];\nld.param.u64 %fromlayer, [p_fromlayer];\n",
        "ld.param.u32 %tounit, [p_tounit];\nld.param.u32 %fromunit, [p_fromunit];\n",
        "ld.param.u32 %per, [p_per];\nld.param.u32 %total, [p_total];\n",
        "cvta.to.global.u64 %list, %list;\ncvta.to.global.u64 %to, %to;\ncvta.to.global.u64 %from, %from;\n",
        "mov.u32 block, %ctaid.y;\ncvt.u64.u32 layer, block;\n",
        "mad.lo.u64 %to, layer, %tolayer, %to;\nmad.lo.u64 %from, layer, %fromlayer, %from;\n",
        "mov.u32 block, %ctaid.x;\nmov.u32 width, %ntid.x;\nmov.u32 lane, %tid.x;\n",
        "mad.lo.u32 i0, block, width, lane;\n",
        "mov.u32 stride, %nctaid.x;\nmul.lo.u32 stride, stride, width;\nshl.b32 step, stride, 2;\n",
        "again:\n",
        "add.u32 i1, i0, stride;\nadd.u32 i2, i1, stride;\nadd.u32 i3, i2, stride;\n",
        find!("0", "i0"),
        find!("1", "i1"),
        find!("2", "i2"),
        find!("3", "i3"),
        load!("0"),
        load!("1"),
        load!("2"),
        load!("3"),
        store!("0"),
        store!("1"),
        store!("2"),
        store!("3"),
        "add.u32 i0, i0, step;\n",
        "setp.lt.u32 more, i0, %total;\n@more bra again;\nret;\n}\n\0",
    )
    .as_bytes(),
) {
    Ok(text) => text,
    Err(_) => panic!("the text ends with its only 0"),
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_of_several_lengths_are_cut_to_one() {
        let mut list = Vec::new();
        let piece = |to, from, len| Piece { to, from, len };
        let pieces = [
            piece(0x10_0000, 0x90_0000, 1152),
            piece(0x20_0000, 0x80_0000, 3456),
            piece(0x30_0000, 0x81_0000, 1152),
            piece(0x18_0000, 0x82_0000, 2304),
        ];
        let plan = plan(&pieces, &mut list).unwrap();
        let end = |base| End { base, layer: 0, unit: 16 };
        let (to, from) = (end(0x10_0000), end(0x80_0000));
        assert_eq!(plan, Plan { to, from, per_piece: 72, total: 7 * 72, layers: 1 });
        let unpacked: Vec<(u64, u64)> =
            list.iter().map(|e| (to.base + (e & 0xffff_ffff) * 16, from.base + (e >> 32) * 16)).collect();
        let expected: Vec<(u64, u64)> =
            pieces.iter().flat_map(|p| (0..p.len).step_by(1152).map(|at| (p.to + at, p.from + at))).collect();
        assert_eq!(unpacked, expected);
    }

    #[test]
    fn what_a_kernel_is_not_good_for_is_left_to_single_copies() {
        let mut list = Vec::new();
        let of = |n: u64, len: u64, shift: u64| -> Vec<Piece> {
            (0..n).map(|i| Piece { to: i * 8 * len + shift, from: i * 16 * len, len }).collect()
        };
        assert!(plan(&of(8, 1152, 0), &mut list).is_some());
        for (why, pieces) in [
            ("few", of(3, 1152, 0)),
            ("large", of(8, 2 << 20, 0)),
            ("tiny", of(8, 64, 0)),
            ("unaligned", of(8, 1152, 8)),
            ("the same target twice", [of(7, 1152, 0), of(1, 1152, 0)].concat()),
            ("overlapping", [of(7, 1152, 0), of(2, 1152, 64)].concat()),
            ("far", [of(7, 1152, 0), of(1, 1152, 1 << 40)].concat()),
        ] {
            assert_eq!(plan(&pieces, &mut list), None, "{why}");
        }
    }
}
