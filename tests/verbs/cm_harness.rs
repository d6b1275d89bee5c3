//! Connections by RDMA_CM between the two devices, a peer process, and what the kernel says is left.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::process::{Child, Command, Stdio};
use std::task::Poll;
use std::time::Duration;

use landfall::connect::cm::{CmConnection, CmListener, CmOptions};

use crate::harness::*;

/// The address of a device.
pub(crate) fn address(number: usize) -> IpAddr {
    let variable = ["RDMA_IP0", "RDMA_IP1"][number];
    let address = std::env::var(variable).unwrap_or_else(|_| panic!("{variable} must name an address"));
    address.parse().unwrap()
}

pub(crate) fn options() -> CmOptions {
    CmOptions::new().attributes(patient()).deadline(DEADLINE)
}

/// On the second device.
pub(crate) async fn listener() -> CmListener {
    CmListener::bind(&device(1), SocketAddr::new(address(1), 0)).await.unwrap()
}

/// A queue pair on each device, connected by RDMA_CM. The client is `a`.
pub(crate) struct CmPair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    pub(crate) client: CmConnection,
    pub(crate) server: CmConnection,
}

impl CmPair {
    pub(crate) async fn new() -> Self {
        let (a, b) = (Side::new(0, 16, Duration::ZERO), Side::new(1, 16, Duration::ZERO));
        let listener = listener().await;
        let serve = async { listener.accept().await.unwrap().accept(&b.qp, options()).await };
        let connect = CmConnection::connect(&a.qp, listener.local_addr(), options());
        let (client, server) = tokio::join!(connect, serve);
        Self { client: client.unwrap(), server: server.unwrap(), a, b }
    }
}

/// Awaits all of them at the same time.
pub(crate) async fn all<F: Future>(futures: Vec<F>) -> Vec<F::Output> {
    let mut waiting: Vec<_> = futures.into_iter().map(|f| Some(Box::pin(f))).collect();
    let mut outputs = Vec::new();
    std::future::poll_fn(|cx| {
        for slot in &mut waiting {
            if let Some(future) = slot
                && let Poll::Ready(output) = future.as_mut().poll(cx)
            {
                outputs.push(output);
                *slot = None;
            }
        }
        if waiting.iter().all(Option::is_none) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    outputs
}

/// This binary once more, as `cm_queue_pairs::peer_process`. Killed when dropped.
pub(crate) struct Peer(Child);

const TO: &str = "LANDFALL_TEST_TO";

impl Peer {
    pub(crate) fn start(to: SocketAddr) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "cm_queue_pairs::peer_process", "--ignored", "--nocapture"]);
        command.env(TO, to.to_string()).stdout(Stdio::null());
        Self(command.spawn().unwrap())
    }

    /// What a peer process was told.
    pub(crate) fn told() -> SocketAddr {
        std::env::var(TO).expect("started by the test that kills it").parse().unwrap()
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = (self.0.kill(), self.0.wait());
    }
}

/// What the kernel and this process hold: objects of both devices (`rdma resource`), and open descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Held {
    devices: Vec<(String, u64)>,
    descriptors: usize,
}

impl Held {
    pub(crate) fn now() -> Self {
        let mut devices = Vec::new();
        for number in [0, 1] {
            let output = Command::new("rdma").args(["resource", "show", &name(number)]).output().unwrap();
            let text = String::from_utf8(output.stdout).unwrap();
            // `0: rxe0: pd 1 cq 2 qp 2 cm_id 0 mr 1 ctx 1 srq 0`
            let words: Vec<&str> = text.split_whitespace().skip(2).collect();
            for pair in words.chunks_exact(2) {
                devices.push((format!("{} {}", name(number), pair[0]), pair[1].parse().unwrap()));
            }
        }
        assert!(
            devices.iter().any(|(what, _)| what.ends_with(" qp")),
            "rdma resource says nothing: {devices:?}"
        );
        assert!(devices.iter().any(|(what, _)| what.ends_with(" cm_id")), "{devices:?}");
        let descriptors = std::fs::read_dir("/proc/self/fd").unwrap().count();
        Self { devices, descriptors }
    }

    /// Waits until there is no more than now. What is destroyed on other threads takes its time.
    pub(crate) async fn is_back(&self) {
        let mut last = Self::now();
        let back = async {
            while !last.is_within(self) {
                tokio::task::yield_now().await;
                last = Self::now();
            }
        };
        if tokio::time::timeout(DEADLINE / 3, back).await.is_err() {
            panic!("before {self:?}, and still {last:?}");
        }
    }

    fn is_within(&self, other: &Self) -> bool {
        self.descriptors <= other.descriptors
            && self.devices.iter().zip(&other.devices).all(|(a, b)| a.0 == b.0 && a.1 <= b.1)
    }
}
