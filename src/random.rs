//! Random numbers of the kernel: epochs, connection ids, packet sequence numbers (B2).

use std::io;

/// 64 random bits.
pub(crate) fn random_u64() -> io::Result<u64> {
    let mut bytes = [0u8; 8];
    loop {
        // SAFETY: the pointer and the length are those of `bytes`, which is writable and outlives the call.
        let n = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
        if n == bytes.len() as isize {
            return Ok(u64::from_le_bytes(bytes));
        }
        if n < 0 {
            let e = io::Error::last_os_error();
            if e.kind() != io::ErrorKind::Interrupted {
                return Err(e);
            }
        }
    }
}

/// A first packet sequence number: 24 random bits. Reused numbers would let packets of an earlier connection of
/// the same queue pair number pass for new ones.
#[allow(dead_code)] // The verbs provider is the consumer: remove this with it.
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
