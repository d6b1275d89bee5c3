//! With other processes: this test program again, as a peer or as a reader of its own.

use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use super::super::super::{SoftDevice, SoftMr, SoftPd};
use super::*;
use crate::device::SoftConfig;
use crate::memory::{Mapping, Memory};
use crate::provider::AccessFlags;
use crate::random::random_u64;

const DEADLINE: Duration = Duration::from_secs(60);
/// The variable that makes `peer` do something: the name of the socket, and what it is to be before it says where its memory is.
const PEER: &str = "LANDFALL_TEST_PEER";
/// The name of the socket at which the reader of another pid namespace calls.
const CALL: &str = "LANDFALL_TEST_CALL";
/// What that reader has in its memory.
static HERE: [u8; 21] = *b"inside of a namespace";
const PAGE: usize = 4096;
const PEER_BYTES: usize = 5 * PAGE;
/// Of no privileges, and of nobody's.
const NOBODY: u32 = 65_534;

fn pattern(at: usize) -> u8 {
    (at * 7 + at / 256) as u8
}

fn this_test(name: &str) -> Vec<String> {
    let test = format!("provider::soft::shm::cross::tests::{name}");
    ["--exact", &test, "--ignored", "--nocapture", "--test-threads=1"].map(str::to_owned).into()
}

fn program() -> Command {
    Command::new(std::env::current_exe().unwrap())
}

fn abstract_listener() -> (UnixListener, String) {
    let name = format!("landfall-test-{:016x}", random_u64().unwrap());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    (UnixListener::bind_addr(&address).unwrap(), name)
}

fn call(name: &str) -> UnixStream {
    UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap()
}

/// The next caller, within the deadline.
fn accept(listener: &UnixListener) -> UnixStream {
    let mut one = libc::pollfd { fd: listener.as_fd().as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one element, which lives for the call.
    let ready = unsafe { libc::poll(&mut one, 1, DEADLINE.as_millis() as libc::c_int) };
    assert_eq!(ready, 1, "nobody has called");
    let (socket, _) = listener.accept().unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    socket
}

/// Ends with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only when it has ended and was waited for.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A peer process with memory that it has not shared.
struct Peer {
    // Closed first: a peer of another user cannot be killed from here, and ends by itself.
    socket: UnixStream,
    process: Process,
    at: u64,
}

impl Peer {
    fn start(how: &str) -> Self {
        Self::begin(how).go()
    }

    /// A peer that has called, and does what `how` says when it is told to go on.
    fn begin(how: &str) -> Self {
        let (listener, name) = abstract_listener();
        let child = program()
            .args(this_test("peer"))
            .env(PEER, format!("{name}:{how}"))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let process = Process(child);
        Self { process, socket: accept(&listener), at: 0 }
    }

    fn go(mut self) -> Self {
        self.socket.write_all(&[1]).unwrap();
        let mut at = [0; 8];
        self.socket.read_exact(&mut at).unwrap();
        self.at = u64::from_le_bytes(at);
        self
    }

    fn open(&self) -> Result<CrossReader, CrossError> {
        CrossReader::open(self.socket.as_fd())
    }

    /// Opens it and looks, as a queue pair does when it connects.
    fn look(&self) -> Result<(), CrossError> {
        let expected: Vec<u8> = (0..16).map(pattern).collect();
        self.open()?.probe(self.at, &expected)
    }
}

/// What a peer process does: it takes memory, changes itself as it is told, says where the memory is, and waits for the end.
#[test]
#[ignore = "the peer process of the tests of this file"]
fn peer() {
    let told = std::env::var(PEER).unwrap();
    let (name, how) = told.split_once(':').unwrap();
    let mut socket = call(name);
    let memory = Memory::anonymous(PEER_BYTES as u64).map().unwrap();
    for at in 0..PEER_BYTES {
        let byte = ptr::with_exposed_provenance_mut::<u8>(memory.addr() as usize + at);
        // SAFETY: inside of the mapping.
        unsafe { byte.write_volatile(pattern(at)) };
    }
    socket.read_exact(&mut [0]).unwrap();
    match how {
        "as it is" => {}
        "a hole" => {
            let hole = ptr::with_exposed_provenance_mut(memory.addr() as usize + 2 * PAGE);
            // SAFETY: a page of a mapping of this process that nothing uses.
            assert_eq!(unsafe { libc::munmap(hole, PAGE) }, 0);
        }
        "not dumpable" => {
            become_nobody();
            dumpable(false);
        }
        "dumpable nobody" => {
            become_nobody();
            dumpable(true);
        }
        other => panic!("{other}"),
    }
    socket.write_all(&memory.addr().to_le_bytes()).unwrap();
    // Until the other side closes.
    let _ = socket.read(&mut [0]);
}

fn dumpable(may: bool) {
    // SAFETY: a plain system call.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(may), 0, 0, 0) }, 0);
}

/// Gives up every privilege, when there is one.
fn become_nobody() {
    // SAFETY: plain system calls.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgroups(0, ptr::null()), 0);
            assert_eq!(libc::setresgid(NOBODY, NOBODY, NOBODY), 0);
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
    }
}

fn is_root() -> bool {
    // SAFETY: a plain query.
    unsafe { libc::geteuid() == 0 }
}

fn yama() -> u32 {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    scope.trim().parse().unwrap_or(0)
}

/// A registered target.
struct Target {
    pd: Arc<SoftPd>,
    mr: SoftMr,
    mapping: Arc<Mapping>,
}

const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE;

impl Target {
    fn new() -> Self {
        let pd = SoftDevice::open(&SoftConfig::new()).unwrap().alloc_pd().unwrap();
        let mapping = Arc::new(Memory::anonymous(PEER_BYTES as u64).map().unwrap());
        let mr = pd.reg_mr(mapping.clone(), 0, PEER_BYTES as u64, ACCESS).unwrap();
        Self { pd, mr, mapping }
    }

    /// Reads `pieces` to its start.
    fn read(
        &self,
        reader: &CrossReader,
        pieces: &[(u64, u64)],
        len: u64,
        limits: Limits,
    ) -> Result<(), CrossError> {
        let guard = self.pd.device.mrs.read();
        let range = guard.registered(self.mr.lkey(), self.pd.id, self.mapping.addr(), len, ACCESS).unwrap();
        reader.read_within(pieces, range, limits)
    }

    fn bytes(&self) -> Vec<u8> {
        let start = ptr::with_exposed_provenance::<u8>(self.mapping.addr() as usize);
        // SAFETY: the whole of a mapping of this test's own, which nothing writes now.
        unsafe { std::slice::from_raw_parts(start, PEER_BYTES) }.to_vec()
    }
}

#[test]
fn k1_memory_of_another_process_is_read_from_and_to_where_it_belongs() {
    let peer = Peer::start("as it is");
    peer.look().unwrap();
    let reader = peer.open().unwrap();
    // Neighbours, overlaps, nothing, backwards; more of them than one call takes.
    let mut pieces: Vec<(usize, usize)> =
        vec![(0, 1), (1, 4096), (4096, 0), (4000, 200), (20_000, 480), (0, 0)];
    pieces.extend((0..300).map(|i| (17_000 - i * 13, 1 + i % 40)));
    let len: usize = pieces.iter().map(|piece| piece.1).sum();
    let expected: Vec<u8> = pieces.iter().flat_map(|&(at, n)| (at..at + n).map(pattern)).collect();
    let remote: Vec<(u64, u64)> = pieces.iter().map(|&(at, n)| (peer.at + at as u64, n as u64)).collect();
    let small = [(1, 1), (7, 1), (4096, 3), (1000, 128), (usize::MAX, 2)];
    let limits = small.into_iter().map(|(bytes, pieces)| Limits { bytes, pieces }).chain([Limits::KERNEL]);
    for limits in limits {
        let target = Target::new();
        target.read(&reader, &remote, len as u64, limits).unwrap();
        let bytes = target.bytes();
        assert!(bytes[..len] == expected, "{limits:?}");
        assert!(bytes[len..].iter().all(|&b| b == 0), "behind the target, {limits:?}");
    }
    let target = Target::new();
    let beyond = [(peer.at, u64::MAX), (0, 1)];
    for (pieces, len) in [(&remote[..2], 4096), (&remote[..2], 4098), (&beyond[..], 4096)] {
        let e = target.read(&reader, pieces, len, Limits::KERNEL).unwrap_err();
        assert!(matches!(e, CrossError::Os { .. }), "lengths differ: {e}");
    }
    target.read(&reader, &[], 0, Limits::KERNEL).unwrap();
}

#[test]
fn b1_a_peer_that_says_what_is_not_there_is_not_believed() {
    let peer = Peer::start("as it is");
    let reader = peer.open().unwrap();
    let mut expected: Vec<u8> = (0..16).map(pattern).collect();
    expected[15] ^= 1;
    assert!(matches!(reader.probe(peer.at, &expected), Err(CrossError::NotThePeer)));
    assert!(matches!(reader.probe(8, &expected), Err(CrossError::Fault { at: 8 })));
    for at in [u64::MAX, u64::MAX - 7, 1 << 63] {
        assert!(matches!(reader.probe(at, &expected), Err(CrossError::Fault { at: a }) if a == at));
    }
}

#[test]
fn r1_a_hole_in_the_peers_memory_is_an_error_that_says_where() {
    let peer = Peer::start("a hole");
    let reader = peer.open().unwrap();
    let target = Target::new();
    let hole = peer.at + 2 * PAGE as u64;
    let page = PAGE as u64;
    let read = |pieces: &[(u64, u64)]| {
        target.read(&reader, pieces, pieces.iter().map(|p| p.1).sum(), Limits::KERNEL)
    };
    let cases: [&[(u64, u64)]; 4] = [
        &[(hole, 1)],
        &[(hole - 10, 20)],
        &[(peer.at, 2 * page), (hole, page)],
        &[(hole - 1, 1), (hole - 1, 2)],
    ];
    for pieces in cases {
        let e = read(pieces).unwrap_err();
        assert!(matches!(e, CrossError::Fault { at } if at == hole), "{e}");
    }
    read(&[(peer.at, 2 * page), (hole + page, 2 * page)]).unwrap();
    let bytes = target.bytes();
    assert!(
        (0..2 * PAGE).all(|at| bytes[at] == pattern(at) && bytes[2 * PAGE + at] == pattern(3 * PAGE + at))
    );
}

#[test]
fn k5_a_peer_that_has_ended_is_gone_before_and_after_it_is_waited_for() {
    let mut peer = Peer::start("as it is");
    let reader = peer.open().unwrap();
    let by_number = PeerProcess::by_number(reader.peer.pid(), peer.socket.as_fd()).unwrap();
    assert!(by_number.is_alive().unwrap());
    assert_eq!(reader.peer.pid(), peer.process.0.id() as i32);
    peer.process.0.kill().unwrap();
    // It is dead, and still has its number, when its socket has closed.
    let _ = peer.socket.read(&mut [0]);
    let gone = |peer: &Peer| {
        let probed = reader.probe(peer.at, &[pattern(0)]);
        assert!(matches!(probed, Err(CrossError::Gone)), "{probed:?}");
        let numbered = PeerProcess::by_number(reader.peer.pid(), peer.socket.as_fd());
        assert!(matches!(numbered, Err(CrossError::Gone)), "{numbered:?}");
    };
    // The descriptors of a process that ends are closed a moment before it counts as ended.
    let start = std::time::Instant::now();
    while by_number.is_alive().unwrap() {
        assert!(start.elapsed() < DEADLINE);
        std::thread::yield_now();
    }
    gone(&peer);
    peer.process.0.wait().unwrap();
    gone(&peer);
    assert!(!by_number.is_alive().unwrap());
    assert!(matches!(peer.open(), Err(CrossError::Gone)));
}

#[test]
fn k1_both_ends_in_one_process_read_each_other() {
    let (a, _b) = UnixStream::pair().unwrap();
    let reader = CrossReader::open(a.as_fd()).unwrap();
    let here = *b"an owner's bytes";
    reader.probe(here.as_ptr() as u64, &here).unwrap();
}

/// Runs a test of this file that gives up its privileges, in a process of its own.
fn in_its_own_process(name: &str) {
    let out = program().args(this_test(name)).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && text.contains("1 passed"), "{text}{errors}");
    eprint!("{errors}");
}

#[test]
fn k9_without_permission_the_error_names_the_setting() {
    in_its_own_process("reader_without_privileges");
}

#[test]
#[ignore = "gives up its privileges: run by k9_without_permission_the_error_names_the_setting"]
fn reader_without_privileges() {
    let was_root = is_root();
    // The peers keep what this process has now, until they are told.
    let other_user = was_root.then(|| Peer::start("as it is"));
    let [undumpable, dumpable] = ["not dumpable", "dumpable nobody"].map(Peer::begin);
    become_nobody();
    let [undumpable, dumpable] = [undumpable, dumpable].map(Peer::go);
    let look = |peer: &Peer| match peer.look() {
        Err(CrossError::NotPermitted { setting, .. }) => setting,
        other => panic!("{other:?}"),
    };
    if let Some(peer) = &other_user {
        assert!(look(peer).contains("uid"));
    }
    let e = undumpable.look().unwrap_err().to_string();
    assert!(e.contains("PR_SET_DUMPABLE"), "{e}");
    // And it is this that makes the difference.
    match yama() {
        0 | 1 => dumpable.look().unwrap(),
        _ => assert!(look(&dumpable).contains("ptrace_scope")),
    }
}

#[test]
fn k9_pid_namespaces_are_read_from_outside_and_say_so_from_inside() {
    let (listener, name) = abstract_listener();
    let mut command = Command::new("/bin/sh");
    // The shell stays outside: what it starts is the first process of the namespace.
    command.args(["-c", "\"$@\"; exit $?", "sh"]).arg(std::env::current_exe().unwrap());
    command
        .args(this_test("reader_in_a_pid_namespace"))
        .env(CALL, &name)
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let root = is_root();
    // SAFETY: between fork and exec only a system call is made.
    unsafe {
        command.pre_exec(move || {
            let user = if root { 0 } else { libc::CLONE_NEWUSER };
            match libc::unshare(libc::CLONE_NEWPID | user) {
                0 => Ok(()),
                _ => Err(io::Error::last_os_error()),
            }
        });
    }
    let process = match command.spawn() {
        Ok(child) => Process(child),
        Err(e) => {
            eprintln!("not tried: a pid namespace cannot be made here without root: {e}");
            return;
        }
    };
    let mut socket = accept(&listener);
    let mut at = [0; 8];
    socket.read_exact(&mut at).unwrap();
    // From outside, the process inside has a number and is read.
    let reader = CrossReader::open(socket.as_fd()).unwrap();
    let looked = reader.probe(u64::from_le_bytes(at), &HERE);
    match yama() {
        0 | 1 => looked.unwrap(),
        scope => assert!(is_root() && scope == 2 || looked.is_err()),
    }
    // From inside, this process has none.
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    assert!(answer.contains("pid namespace"), "{answer}");
    drop(process);
}

#[test]
#[ignore = "the process inside of k9_pid_namespaces_are_read_from_outside_and_say_so_from_inside"]
fn reader_in_a_pid_namespace() {
    let mut socket = call(&std::env::var(CALL).unwrap());
    socket.write_all(&(HERE.as_ptr() as u64).to_le_bytes()).unwrap();
    let answer = match CrossReader::open(socket.as_fd()) {
        Err(e @ CrossError::NotVisible) => e.to_string(),
        other => format!("{other:?}"),
    };
    socket.write_all(answer.as_bytes()).unwrap();
    socket.shutdown(std::net::Shutdown::Write).unwrap();
    // Until it has been read from outside.
    let _ = socket.read(&mut [0]);
}
