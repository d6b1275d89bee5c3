//! The peer process of an example that is alone: the same program, started again as the side that listens.

use std::net::SocketAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};

use super::{Error, PROGRAM};

/// Killed when dropped.
pub(crate) struct Peer {
    child: Child,
    stderr: ChildStderr,
}

impl Peer {
    /// Starts it. Its first line on standard output is its address.
    pub(crate) async fn start(args: Vec<String>) -> Result<(Self, SocketAddr), Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(args);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(|e| format!("starting the peer process: {e}"))?;
        let pipes = child.stdout.take().zip(child.stderr.take());
        let (stdout, stderr) = pipes.ok_or("the peer process has no standard output")?;
        let peer = Self { child, stderr };
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).await?;
        match line.trim().parse() {
            Ok(address) => Ok((peer, address)),
            Err(_) => {
                Err(peer.ended().await.err().unwrap_or_else(|| "the peer process did not listen".into()))
            }
        }
    }

    /// Waits for its end. Its complaint becomes ours.
    pub(crate) async fn ended(mut self) -> Result<(), Error> {
        let mut said = String::new();
        (&mut self.stderr).take(16 << 10).read_to_string(&mut said).await?;
        let status = self.child.wait().await?;
        if status.success() {
            return Ok(());
        }
        // Its line begins with the program's name, as ours will.
        let said = said.trim().trim_start_matches(PROGRAM).trim_start_matches(": ");
        let colon = if said.is_empty() { "" } else { ": " };
        Err(format!("the peer process ended with {status}{colon}{said}").into())
    }
}
