//! Descriptors are a limit of this system: where none is left, a connect says so, at the end that has none and at the other; the
//! channels that there are go on, and when some are left again, so does the door.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use landfall::connect::{ConnectError, Fault};
use landfall::device::{Profile, SoftTransport};
use landfall::kv::{Grant, KvChannel, KvEndpoint, WriteRequest};

use crate::common::{On, allow_descriptors, config, fill, lands, limit_descriptors, pool, run};

const TRANSPORT: &str = "LANDFALL_TEST_TRANSPORT";
const MARK: &str = "@@ ";

fn on(transport: SoftTransport) -> On {
    match transport {
        SoftTransport::Shm => On::Shm(Profile::Default),
        _ => On::Soft(Profile::Default),
    }
}

/// Leaves this process `more` descriptors; what the limit is then.
fn leave(more: u64) -> u64 {
    allow_descriptors();
    let fds = std::fs::read_dir("/proc/self/fd").unwrap();
    let open: Vec<u64> = fds.filter_map(|fd| fd.ok()?.file_name().to_str()?.parse().ok()).collect();
    let limit = open.iter().max().map_or(0, |highest| highest + 1);
    limit_descriptors(limit);
    // Numbers are given out from below: the gaps are filled, for good.
    while let Ok(null) = std::fs::File::open("/dev/null") {
        std::mem::forget(null);
    }
    limit_descriptors(limit + more);
    limit + more
}

/// Another process: it runs an ignored test of this file.
struct Process {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Process {
    fn start(test: &str, transport: SoftTransport) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", &format!("limits::{test}"), "--ignored", "--nocapture"])
            .env(TRANSPORT, transport.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        Self { child, stdin, stdout: BufReader::new(stdout) }
    }

    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.stdout.read_line(&mut line).unwrap(), 0, "the process has ended");
            if let Some((_, said)) = line.trim_end().split_once(MARK) {
                return said.to_owned();
            }
        }
    }

    fn tell(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").unwrap();
    }

    fn ends_well(mut self) {
        drop(self.stdin);
        let mut rest = String::new();
        while self.stdout.read_line(&mut rest).unwrap() > 0 {}
        assert!(self.child.wait().unwrap().success(), "{rest}");
    }
}

fn say(line: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n{MARK}{line}").unwrap();
    out.flush().unwrap();
}

fn transport() -> SoftTransport {
    std::env::var(TRANSPORT).unwrap().parse().unwrap()
}

#[test]
fn r4_a_server_without_descriptors_says_busy_and_its_channels_go_on() {
    for transport in [SoftTransport::Tcp, SoftTransport::Shm] {
        run(server_without_descriptors(transport));
    }
}

async fn server_without_descriptors(transport: SoftTransport) {
    let mut server = Process::start("server", transport);
    let address = server.hear();
    let pool = pool(on(transport).soft().unwrap()).await;
    let endpoint = || KvEndpoint::new(pool.clone(), config()).unwrap();
    let mut channels: Vec<KvChannel> = Vec::new();
    for _ in 0..10 {
        channels.push(endpoint().connect(&address).await.unwrap());
    }
    for channel in &channels {
        lands_there(channel).await;
    }
    // One to accept by, and not enough for a channel.
    server.tell("leave 2");
    assert_eq!(server.hear(), "left");
    for _ in 0..5 {
        let refused = endpoint().connect(&address).await.unwrap_err();
        assert!(matches!(refused, ConnectError::Busy), "{refused:?}");
        assert_eq!(refused.fault(), Fault::Environment);
    }
    for channel in &channels {
        lands_there(channel).await;
    }
    // Channels that end make room for another one, once the other process has let go of them.
    for channel in channels.drain(8..) {
        channel.close().await.unwrap();
    }
    let again = loop {
        match endpoint().connect(&address).await {
            Ok(channel) => break channel,
            Err(ConnectError::Busy) => {}
            Err(other) => panic!("{other:?}"),
        }
    };
    lands_there(&again).await;
    drop((channels, again));
    server.ends_well();
}

/// The other process grants a block, is written to, and answers when that has arrived.
async fn lands_there(channel: &KvChannel) {
    channel.send_message(vec![0]).await.unwrap();
    let grant = Grant::from_bytes(&channel.recv_message().await.unwrap()).unwrap();
    let mut source = channel.pool().alloc(1).await.unwrap();
    fill(&mut source, 3);
    channel.write(WriteRequest::new(&grant, source)).await.0.unwrap();
    assert_eq!(channel.recv_message().await.unwrap(), b"arrived");
}

#[test]
#[ignore = "a process of r4_a_server_without_descriptors_says_busy_and_its_channels_go_on, not a test"]
fn server() {
    run(async {
        let pool = pool(on(transport()).soft().unwrap()).await;
        let endpoint = KvEndpoint::new(pool, config()).unwrap();
        let mut listener = endpoint.listen(([127, 0, 0, 1], 0).into()).await.unwrap();
        say(listener.local_addr());
        let serving = tokio::spawn(async move {
            while let Ok(channel) = listener.accept().await {
                tokio::spawn(serve(channel));
            }
        });
        let commands = tokio::task::spawn_blocking(|| {
            for line in std::io::stdin().lines().map_while(Result::ok) {
                let more = line.strip_prefix("leave ").expect("the only command");
                leave(more.parse().unwrap());
                say("left");
            }
        });
        commands.await.unwrap();
        serving.abort();
    });
}

async fn serve(channel: KvChannel) {
    while channel.recv_message().await.is_ok() {
        let Ok(blocks) = channel.pool().alloc(1).await else { return };
        let Ok(grant) = channel.grant(blocks) else { return };
        if channel.send_message(grant.to_bytes()).await.is_err() || channel.next_arrival().await.is_err() {
            return;
        }
        let _ = channel.send_message(b"arrived".to_vec()).await;
    }
}

#[test]
fn r4_a_client_without_descriptors_says_so_with_the_limit() {
    for transport in [SoftTransport::Tcp, SoftTransport::Shm] {
        Process::start("client", transport).ends_well();
    }
}

/// Both ends are in here; the descriptors that are left are too few for either, and it is the dialling end that finds it.
#[test]
#[ignore = "a process of r4_a_client_without_descriptors_says_so_with_the_limit, not a test"]
fn client() {
    run(async {
        let on = on(transport());
        let mut server = crate::common::Server::start(on).await;
        let mut clients = server.clients(5).await;
        for client in &clients {
            lands(&client.near, &client.far, 1, 5).await;
        }
        for left in 0..4 {
            let limit = leave(left);
            let refused = server.endpoint(7).connect(server.listener.local_addr()).await.unwrap_err();
            assert!(
                matches!(refused, ConnectError::Descriptors { limit: Some(said), .. } if said == limit),
                "{refused:?}"
            );
            assert_eq!(refused.fault(), Fault::Local);
            let text = refused.to_string();
            assert!(text.contains("ulimit -n") && text.contains(&limit.to_string()), "{text}");
            for client in &clients {
                lands(&client.near, &client.far, 1, 6).await;
            }
        }
        allow_descriptors();
        let endpoint = server.endpoint(7);
        clients.extend(server.connect(vec![endpoint]).await);
        for client in &clients {
            lands(&client.far, &client.near, 1, 8).await;
        }
        server.is_whole_again().await;
    });
}
