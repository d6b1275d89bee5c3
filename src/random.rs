//! Random numbers of the kernel: epochs, connection ids, packet sequence numbers (B2).

use std::io;

/// Fills `out`.
pub(crate) fn random(out: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while at < out.len() {
        let rest = &mut out[at..];
        // SAFETY: the kernel writes at most `rest.len()` bytes to `rest`.
        let n = unsafe { libc::getrandom(rest.as_mut_ptr().cast(), rest.len(), 0) };
        if n < 0 {
            let e = io::Error::last_os_error();
            if e.kind() == io::ErrorKind::Interrupted {
                continue;
            }
            return Err(e);
        }
        at += n as usize;
    }
    Ok(())
}

/// 64 random bits.
pub(crate) fn random_u64() -> io::Result<u64> {
    let mut bytes = [0; 8];
    random(&mut bytes)?;
    Ok(u64::from_le_bytes(bytes))
}

/// A first packet sequence number: 24 random bits. Reused numbers would let packets of an earlier connection of
/// the same queue pair number pass for new ones.
pub(crate) fn random_psn() -> io::Result<u32> {
    Ok((random_u64()? & 0x00ff_ffff) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn b2_psns_have_24_random_bits() {
        let (mut ones, mut zeros) = (0u32, 0u32);
        for _ in 0..256 {
            let psn = random_psn().unwrap();
            assert!(psn < 1 << 24);
            ones |= psn;
            zeros |= !psn;
        }
        // Each bit was seen as 1 and as 0 (the chance that this fails by itself is 24 * 2^-255).
        assert_eq!(ones, 0x00ff_ffff);
        assert_eq!(zeros & 0x00ff_ffff, 0x00ff_ffff);
    }
}
