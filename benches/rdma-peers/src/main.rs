//! async-rdma 0.5 on an RDMA device: WRITEs until their completion, and until a notified peer has answered.
//!
//! Two processes of one host, as in landfall's own benches: the receiver on cpu 0, the initiator on cpu 1, each on a
//! `current_thread` runtime. The crate is used with its own defaults.

mod cases;
mod initiator;
mod receiver;

use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use async_rdma::RdmaBuilder;

type Error = Box<dyn std::error::Error + Send + Sync>;

const USAGE: &str = "\
usage: landfall-rdma-peers [--device NAME] [--peer-device NAME] [--gid-index N] [--only CASE] [--quick]
                           [--multi-thread]

  --device NAME       the initiator's device (RDMA_DEV0)
  --peer-device NAME  the receiver's device (the initiator's)
  --gid-index N       of both devices (1: on rxe that is the IPv4 address)
  --only CASE         one case, by its name
  --quick             a tenth of the repetitions
  --multi-thread      a runtime of two threads in each process, not pinned
";

const RECEIVER_CPU: usize = 0;
const INITIATOR_CPU: usize = 1;
/// How long the receiver may take until it listens.
const START: Duration = Duration::from_secs(30);

pub(crate) struct Args {
    device: String,
    peer_device: String,
    gid_index: usize,
    only: Option<String>,
    quick: bool,
    multi_thread: bool,
    /// For the receiver: where to listen.
    serve: Option<u16>,
}

fn main() -> ExitCode {
    let args = match parse(std::env::args().skip(1)) {
        Ok(Some(args)) => args,
        Ok(None) => {
            print!("{USAGE}");
            return ExitCode::SUCCESS;
        }
        Err(why) => {
            eprint!("{why}\n{USAGE}");
            return ExitCode::from(2);
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            eprintln!("landfall-rdma-peers: {why}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Args>, String> {
    let (mut device, mut peer_device) = (std::env::var("RDMA_DEV0").ok(), None);
    let (mut gid_index, mut only, mut serve) = (1, None, None);
    let (mut quick, mut multi_thread) = (false, false);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse().map_err(|_| format!("{text:?} is not a number"));
        match word.as_str() {
            "--device" => device = Some(value()?),
            "--peer-device" => peer_device = Some(value()?),
            "--gid-index" => gid_index = number(value()?)?,
            "--only" => only = Some(value()?),
            "--quick" => quick = true,
            "--multi-thread" => multi_thread = true,
            "--serve" => serve = Some(value()?.parse().map_err(|_| "--serve needs a port".to_owned())?),
            // `cargo bench` says it.
            "--bench" => {}
            "--help" => return Ok(None),
            other => return Err(format!("{other:?} is not known")),
        }
    }
    let device = device.ok_or("no device: set RDMA_DEV0, or give --device NAME")?;
    let peer_device = peer_device.unwrap_or_else(|| device.clone());
    Ok(Some(Args { device, peer_device, gid_index, only, quick, multi_thread, serve }))
}

fn run(args: &Args) -> Result<(), Error> {
    let cpu = if args.serve.is_some() { RECEIVER_CPU } else { INITIATOR_CPU };
    let runtime = if args.multi_thread {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?
    } else {
        pin(cpu)?;
        tokio::runtime::Builder::new_current_thread().enable_all().build()?
    };
    if let Some(port) = args.serve {
        return runtime.block_on(receiver::serve(args, loopback(port)));
    }
    // Free now. The crate does not tell which port it took.
    let port = TcpListener::bind(loopback(0))?.local_addr()?.port();
    let mut peer = Peer(start_receiver(args, port)?);
    wait_until_it_listens(&mut peer.0, port)?;
    runtime.block_on(initiator::measure(args, loopback(port)))?;
    let status = peer.0.wait()?;
    if status.success() { Ok(()) } else { Err(format!("the receiver failed: {status}").into()) }
}

/// Killed when dropped, so that a failed run leaves nothing.
struct Peer(Child);

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

fn start_receiver(args: &Args, port: u16) -> Result<Child, Error> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--serve", &port.to_string(), "--device", &args.peer_device]);
    command.args(["--gid-index", &args.gid_index.to_string()]);
    if args.multi_thread {
        command.arg("--multi-thread");
    }
    Ok(command.stdin(Stdio::null()).spawn()?)
}

/// A connection on trial would be taken for the initiator's, so the kernel's list is looked at.
fn wait_until_it_listens(child: &mut Child, port: u16) -> Result<(), Error> {
    let listening = format!(":{port:04X} 00000000:0000 0A");
    let end = Instant::now() + START;
    while Instant::now() < end {
        if std::fs::read_to_string("/proc/net/tcp")?.contains(&listening) {
            return Ok(());
        }
        if let Some(status) = child.try_wait()? {
            return Err(format!("the receiver ended before it listened ({status})").into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    Err(format!("the receiver did not listen within {START:?}").into())
}

fn builder(device: &str, args: &Args) -> RdmaBuilder {
    RdmaBuilder::default().set_dev(device).set_gid_index(args.gid_index)
}

/// Pins this thread, and those that it starts from now on, to one cpu.
fn pin(cpu: usize) -> Result<(), Error> {
    // SAFETY: a cpu_set_t is a plain bit set, for which all zeroes is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `set` is a live cpu_set_t, and both cpus are far below CPU_SETSIZE.
    unsafe { libc::CPU_SET(cpu, &mut set) };
    // SAFETY: the pointer and the size are those of `set`; the kernel only reads it.
    let result = unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) };
    if result == 0 { Ok(()) } else { Err(format!("cpu {cpu}: {}", std::io::Error::last_os_error()).into()) }
}
