//! A worker process, from outside: it is told lines, it says lines, it gets signals.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use super::levels::SETTINGS;
use super::process;
use super::tied::Tied;

/// Far above what a worker takes for anything, on a busy machine too.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Killed when dropped, stopped or not; and when this program is killed.
pub struct Node {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Node {
    pub fn start() -> std::io::Result<Self> {
        // This very program, also when its file was built anew meanwhile.
        let mut child = Command::new("/proc/self/exe")
            .arg(process::ARGUMENT)
            .envs(SETTINGS)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .tied()
            .spawn()?;
        let missing = || std::io::Error::other("a pipe of the child is missing");
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let lines = BufReader::new(child.stdout.take().ok_or_else(missing)?).lines();
        Ok(Self { child, stdin, lines })
    }

    /// A process that was killed hears nothing; that is found where it should answer.
    pub async fn tell(&mut self, line: &str) {
        let _ = self.stdin.write_all(format!("{line}\n").as_bytes()).await;
    }

    /// Its next line; `None` when it has ended.
    pub async fn hear(&mut self) -> Option<String> {
        self.lines.next_line().await.ok().flatten()
    }

    /// Until it has been waited for.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    pub fn signal(&self, signal: libc::c_int) {
        if let Some(pid) = self.pid().and_then(|pid| libc::pid_t::try_from(pid).ok()) {
            // SAFETY: a plain system call; the process is our child and not waited for yet, so that the number is its own.
            unsafe { libc::kill(pid, signal) };
        }
    }

    /// How it ended: `killed` is by SIGKILL, which is what faults and signals of a plan do.
    pub async fn ended(&mut self) -> Result<(), String> {
        use std::os::unix::process::ExitStatusExt;
        match tokio::time::timeout(PATIENCE, self.child.wait()).await {
            Ok(Ok(status)) if status.signal() == Some(libc::SIGKILL) => Ok(()),
            Ok(Ok(status)) => Err(format!("a worker ended by itself: {status}")),
            Ok(Err(error)) => Err(format!("waiting for a worker: {error}")),
            Err(_) => Err("a worker neither speaks nor ends".to_owned()),
        }
    }

    pub async fn kill(mut self) {
        let _ = self.child.kill().await;
    }
}

/// The next line of any of the nodes that are `asked`, and which one it is; `None` when that one has ended.
pub async fn hear_any<N: std::borrow::BorrowMut<Node>>(
    nodes: &mut [Option<N>],
    asked: impl Fn(usize) -> bool,
) -> (usize, Option<String>) {
    use std::future::{Future, poll_fn};
    use std::task::Poll;
    let mut hearing: Vec<_> = nodes
        .iter_mut()
        .enumerate()
        .filter(|(who, _)| asked(*who))
        .filter_map(|(who, node)| node.as_mut().map(|node| (who, Box::pin(node.borrow_mut().hear()))))
        .collect();
    poll_fn(|cx| {
        for (who, line) in &mut hearing {
            if let Poll::Ready(line) = line.as_mut().poll(cx) {
                return Poll::Ready((*who, line));
            }
        }
        Poll::Pending
    })
    .await
}
