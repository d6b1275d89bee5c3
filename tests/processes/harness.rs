//! The peer process: starting it, hearing what it prints, freezing and killing it, and one harness over every profile, over TCP
//! and in shared memory, and over RDMA devices.
//!
//! A peer prints lines that begin with a mark, and takes one line commands on its standard input. Everything else
//! that is on its standard output is the test runner's.

use std::future::Future;
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use landfall::kv::{KvConfig, KvEndpoint, KvPool, Layout, PoolAccess};
use landfall::memory::Memory;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// Longer than anything takes on a busy machine. A test that reaches it hangs, and says where.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Blocks of each side's pool, and their size.
pub(crate) const BLOCKS: u32 = 32;
pub(crate) const BLOCK_BYTES: u64 = 1 << 20;

pub(crate) use crate::on::On;
use crate::tied::Tied;

/// Environment of a peer: its role, what it runs on, and where it listens or connects.
pub(crate) const ROLE: &str = "LANDFALL_TEST_ROLE";
pub(crate) const PROFILE: &str = "LANDFALL_TEST_PROFILE";
pub(crate) const ADDRESS: &str = "LANDFALL_TEST_ADDRESS";
/// In the place of a profile: RDMA devices.
const DEVICES: &str = "devices";
/// Before a profile: in shared memory.
const SHM: &str = "shm-";
/// Heartbeat and peer time-out of a peer, in milliseconds: `200 2000`. Unset: the defaults.
pub(crate) const LIVENESS: &str = "LANDFALL_TEST_LIVENESS";
/// How a peer connects. Unset: as its device can.
pub(crate) const BOOTSTRAP: &str = "LANDFALL_TEST_BOOTSTRAP";

/// How many rails a peer has. Unset: one.
pub(crate) const RAILS: &str = "LANDFALL_TEST_RAILS";

/// What a peer's own lines begin with.
pub(crate) const MARK: &str = "@@ ";

/// Makes a test for each profile over TCP, and one in shared memory, out of `async fn name(on: On)`, and one on RDMA devices, which
/// is ignored by default.
macro_rules! on_every_profile {
    ($($name:ident),+ $(,)?) => {$(
        mod $name {
            use super::$name as body;
            mod tcp { $crate::on::on_each_profile!(Soft, harness); }
            mod shm { $crate::on::on_each_profile!(Shm, harness); }
            #[test]
            #[ignore = "needs RDMA devices"]
            fn verbs() { crate::harness::run(body(crate::harness::On::Devices)) }
        }
    )+};
}
pub(crate) use on_every_profile;

pub(crate) fn run(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

/// Awaits with [`PATIENCE`].
pub(crate) async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(value) => value,
        Err(_) => panic!("after {PATIENCE:?} still waiting for: {what}"),
    }
}

/// Waits until `done`.
pub(crate) async fn until(what: &str, mut done: impl FnMut() -> bool) {
    within(what, async {
        while !done() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// A silent peer is lost after two seconds: soon enough for a test, late enough for a busy machine.
pub(crate) fn soon() -> KvConfig {
    KvConfig::default().heartbeat(Duration::from_millis(200)).peer_timeout(Duration::from_secs(2))
}

/// [`soon`], for a peer's environment.
pub(crate) const SOON: (&str, &str) = (LIVENESS, "200 2000");

/// On the device of this process's end; on several, where the environment of a peer says so.
pub(crate) async fn endpoint(on: On, config: KvConfig) -> KvEndpoint {
    let rails = std::env::var(RAILS).map_or(1, |n| n.parse().unwrap());
    endpoint_on_rails(on, config, rails).await
}

/// On so many devices of this process's end.
pub(crate) async fn endpoint_on_rails(on: On, config: KvConfig, rails: usize) -> KvEndpoint {
    let domain = |_| {
        let (near, far) = on.devices();
        let device = if end() == 0 { near } else { far };
        device.alloc_pd().unwrap()
    };
    let domains: Vec<_> = (0..rails).map(domain).collect();
    let domains: Vec<_> = domains.iter().collect();
    let layout = Layout::contiguous(1, BLOCKS, BLOCK_BYTES).unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::on_rails(&domains, layout, memory, PoolAccess::Target).await.unwrap();
    KvEndpoint::new(pool, on.admit(config.require_rdma(on == On::Devices))).unwrap()
}

/// Where the endpoint of this process listens.
pub(crate) fn any_port(on: On) -> std::net::SocketAddr {
    on.any_port_of(end())
}

/// The test is the near end and its peer the far one. Where two peers meet, the one that dials is the near end.
fn end() -> usize {
    match std::env::var(ROLE).as_deref() {
        Err(_) | Ok("idle-sender" | "pending-sender") => 0,
        Ok(_) => 1,
    }
}

/// For the environment of a peer, and back.
pub(crate) fn name(on: On) -> String {
    match on {
        On::Soft(profile) => profile.to_string(),
        On::Shm(profile) => format!("{SHM}{profile}"),
        On::Devices => DEVICES.to_owned(),
    }
}

pub(crate) fn named(name: &str) -> On {
    match name.strip_prefix(SHM) {
        Some(profile) => On::Shm(profile.parse().unwrap()),
        None if name == DEVICES => On::Devices,
        None => On::Soft(name.parse().unwrap()),
    }
}

/// A peer process. Killed when dropped, frozen or not.
pub(crate) struct Peer {
    child: Child,
    stdin: ChildStdin,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Peer {
    pub(crate) fn start(role: &str, on: impl Into<On>, environment: &[(&str, &str)]) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "roles::peer", "--ignored", "--nocapture"])
            .env(ROLE, role)
            .env(PROFILE, name(on.into()))
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .tied();
        let mut child = command.spawn().unwrap();
        let stdin = child.stdin.take().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, stdin, lines }
    }

    /// The rest of the next line of the peer's that begins with `word`. Others of its lines are passed over.
    pub(crate) async fn hear(&mut self, word: &str) -> String {
        let heard = async {
            while let Some(line) = self.lines.next_line().await.unwrap() {
                let Some((_, said)) = line.split_once(MARK) else { continue };
                if let Some(rest) = said.strip_prefix(word) {
                    return rest.trim().to_owned();
                }
            }
            panic!("the peer process ended before it said {word:?}");
        };
        within(word, heard).await
    }

    /// The number of the process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id().expect("the peer runs")
    }

    pub(crate) async fn tell(&mut self, line: &str) {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// Freezes the process, and returns when every thread of it has stopped. Nothing of ours runs meanwhile.
    pub(crate) fn freeze(&self) {
        self.signal(libc::SIGSTOP);
        let start = Instant::now();
        while !self.is_stopped() {
            assert!(start.elapsed() < PATIENCE, "the peer does not stop");
            std::thread::yield_now();
        }
    }

    /// The state is the field after the name, which is in parentheses: see proc_pid_stat(5).
    fn is_stopped(&self) -> bool {
        let pid = self.id();
        std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().all(|task| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(')').is_some_and(|(_, fields)| fields.trim_start().starts_with('T'))
        })
    }

    pub(crate) fn wake(&self) {
        self.signal(libc::SIGCONT);
    }

    pub(crate) async fn kill(&mut self) {
        within("a killed process", self.child.kill()).await.unwrap();
    }

    /// Lets the peer end by itself, by the end of its standard input.
    pub(crate) async fn end(self) -> ExitStatus {
        let Self { mut child, stdin, mut lines } = self;
        drop(stdin);
        within("the peer's end", async {
            // Until the end, so that the peer never blocks on its output.
            while lines.next_line().await.unwrap().is_some() {}
            child.wait().await.unwrap()
        })
        .await
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = self.child.id().expect("the peer runs") as libc::pid_t;
        // SAFETY: no memory is involved; the child has not been waited for, so that the id is still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }
}
