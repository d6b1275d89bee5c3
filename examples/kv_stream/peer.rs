//! The peer process of a `kv_stream` that is alone: this program, started again as the decode side.

use std::net::SocketAddr;
use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::{Child, ChildStderr, Command};

use crate::Error;
use crate::args::Args;

/// Killed when dropped.
pub(crate) struct Peer {
    child: Child,
    stderr: ChildStderr,
}

impl Peer {
    /// Starts it, on an address of its own choice.
    pub(crate) async fn start(args: &Args) -> Result<(Self, SocketAddr), Error> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(["--child", "--quiet", "--listen=127.0.0.1:0"]);
        let mut option = |flag: &str, value: &dyn std::fmt::Display| {
            command.arg(format!("{flag}={value}"));
        };
        option("--qps", &args.qps);
        option("--spin", &args.spin.as_micros());
        option("--tokens", &args.tokens);
        option("--layers", &args.layers);
        option("--token-bytes", &args.token_bytes);
        option("--page", &args.page);
        option("--run", &args.run);
        if let Some(verbs) = &args.verbs {
            option("--transport", &"verbs");
            option("--device", verbs.peer_device.as_ref().unwrap_or(&verbs.device));
            if let Some(port) = verbs.port {
                option("--port", &port);
            }
            // The index is of our device's table; on another device the rule chooses.
            if let (Some(index), None) = (verbs.gid_index, &verbs.peer_device) {
                option("--gid-index", &index);
            }
        }
        if let Some(profile) = args.profile {
            option("--profile", &profile);
        }
        if args.file.is_some() {
            option("--file", &"/dev/null");
        }
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
        Err(format!("the peer process ended with {status}: {}", said.trim()).into())
    }
}
