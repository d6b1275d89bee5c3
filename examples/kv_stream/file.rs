//! `--file`: any file in blocks of 256 KiB, 1,024 blocks a request, compared by SHA-256 at the far end.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use landfall::kv::{Arrival, Dtype, KvChannel, KvPool, Layout};
use sha2::{Digest, Sha256};

use crate::args::Args;
use crate::prefill::{verdict, write};
use crate::report::{Progress, Report};
use crate::{Error, Message};

const BLOCK: usize = 256 << 10;
const BLOCKS: u32 = 1024;

pub(crate) fn layout() -> Result<Layout, Error> {
    Ok(Layout::contiguous(1, BLOCKS, BLOCK as u64)?.with_dtype(Dtype::new("file")?))
}

/// A file to be streamed.
pub(crate) struct Input {
    file: File,
    path: PathBuf,
    size: u64,
}

impl Input {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let name = |error| named(path, error);
        let file = File::open(path).map_err(name)?;
        let metadata = file.metadata().map_err(name)?;
        if metadata.is_dir() {
            return Err(format!("--file {}: it is a directory; name a file", path.display()).into());
        }
        Ok(Self { file, path: path.to_owned(), size: metadata.len() })
    }

    /// Streams it; its SHA-256 in hexadecimal.
    pub(crate) async fn send(
        mut self,
        args: &Args,
        pool: &KvPool,
        channel: &KvChannel,
        report: &mut Report,
    ) -> Result<String, Error> {
        let mut progress = Progress::new(args, self.size);
        let mut hash = Sha256::new();
        let mut buffer = vec![0; BLOCK];
        for index in 0.. {
            let mut blocks = pool.alloc(BLOCKS).await?;
            let (mut used, mut bytes) = (0, 0);
            while used < BLOCKS {
                let n = read_full(&mut self.file, &mut buffer).map_err(|e| named(&self.path, e))?;
                if n == 0 {
                    break;
                }
                hash.update(&buffer[..n]);
                // The last block goes as a whole, with zeros behind the end of the file.
                buffer[n..].fill(0);
                blocks.copy_in(0, used, 0, &buffer)?;
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
}

fn named(path: &Path, error: std::io::Error) -> Error {
    format!("--file {}: {error}", path.display()).into()
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
pub(crate) struct Sink {
    file: File,
    path: PathBuf,
    hash: Sha256,
}

impl Sink {
    pub(crate) fn create(path: &Path) -> Result<Self, Error> {
        let file = File::create(path).map_err(|e| named(path, e))?;
        Ok(Self { file, path: path.to_owned(), hash: Sha256::new() })
    }

    /// Stores the first `bytes` of an arrival; the number of bytes that are missing.
    pub(crate) fn store(&mut self, arrival: &Arrival, bytes: u64) -> Result<u64, Error> {
        let mut buffer = vec![0; BLOCK];
        let mut left = bytes;
        for position in 0..arrival.blocks().len() {
            let n = left.min(BLOCK as u64) as usize;
            arrival.blocks().copy_out(0, position, 0, &mut buffer[..n])?;
            self.hash.update(&buffer[..n]);
            self.file.write_all(&buffer[..n]).map_err(|e| named(&self.path, e))?;
            left -= n as u64;
        }
        Ok(left)
    }

    pub(crate) fn finish(self) -> String {
        hex(self.hash)
    }
}
