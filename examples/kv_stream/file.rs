//! `--file`: any file in blocks of 256 KiB, 1,024 blocks a request, compared by SHA-256 at the far end.

use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;

use landfall::kv::{Arrival, Dtype, KvChannel, KvPool, Layout};
use sha2::{Digest, Sha256};

use crate::args::Args;
use crate::prefill::{verdict, write};
use crate::report::{Progress, Report};
use crate::{Error, Message};

const BLOCK: usize = 256 << 10;
const BLOCKS: u32 = 1024;

pub fn layout() -> Result<Layout, Error> {
    Ok(Layout::contiguous(1, BLOCKS, BLOCK as u64)?.with_dtype(Dtype::new("file")?))
}

/// Streams the file; its SHA-256 in hexadecimal.
pub async fn send(
    args: &Args,
    pool: &KvPool,
    channel: &KvChannel,
    path: &Path,
    report: &mut Report,
) -> Result<String, Error> {
    let name = |error: std::io::Error| format!("--file {}: {error}", path.display());
    let mut file = File::open(path).map_err(name)?;
    let size = file.metadata().map_err(name)?.len();
    let mut progress = Progress::new(args, size);
    let mut hash = Sha256::new();
    let mut buffer = vec![0; BLOCK];
    for index in 0.. {
        let mut blocks = pool.alloc(BLOCKS).await?;
        let (mut used, mut bytes) = (0, 0);
        while used < BLOCKS {
            let n = read_full(&mut file, &mut buffer).map_err(name)?;
            if n == 0 {
                break;
            }
            hash.update(&buffer[..n]);
            blocks.copy_in(0, used, 0, &buffer[..n])?;
            used += 1;
            bytes += n as u64;
        }
        if used == 0 {
            break;
        }
        blocks.truncate(used);
        write(args, channel, report, Message::Request { index, blocks: used, seed: 0, bytes }, blocks)
            .await?;
        progress.add(bytes);
        verdict(channel, report, index).await?;
    }
    Ok(hex(hash))
}

fn read_full(file: &mut File, buffer: &mut [u8]) -> std::io::Result<usize> {
    let mut n = 0;
    while n < buffer.len() {
        match file.read(&mut buffer[n..]) {
            Ok(0) => break,
            Ok(more) => n += more,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(n)
}

fn hex(hash: Sha256) -> String {
    hash.finalize().iter().map(|b| format!("{b:02x}")).collect()
}

/// Where an arriving file goes.
pub struct Sink {
    file: File,
    hash: Sha256,
}

impl Sink {
    pub fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|e| format!("--file {}: {e}", path.display()))?;
        Ok(Self { file, hash: Sha256::new() })
    }

    /// Stores the first `bytes` of an arrival; the number of bytes that are missing.
    pub fn store(&mut self, arrival: &Arrival, bytes: u64) -> Result<u64, Error> {
        let mut buffer = vec![0; BLOCK];
        let mut left = bytes;
        for position in 0..arrival.blocks().len() {
            let n = left.min(BLOCK as u64) as usize;
            arrival.blocks().copy_out(0, position, 0, &mut buffer[..n])?;
            self.hash.update(&buffer[..n]);
            self.file.write_all(&buffer[..n])?;
            left -= n as u64;
        }
        Ok(left)
    }

    pub fn finish(self) -> String {
        hex(self.hash)
    }
}
