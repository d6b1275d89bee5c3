//! The lab is what its README says: devices, GIDs, wire, limits, repair, and a second guest that can die.
//!
//! Nothing of landfall is used here. When this fails, it is the lab that is broken, and what the device tests say means
//! nothing. Runs in the guest (`tests/lab/suite`); reads sysfs and the guest's environment.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(60);
const TWO_GUESTS_PORT: u16 = 7471;

fn env(name: &str) -> String {
    std::env::var(name)
        .unwrap_or_else(|_| panic!("{name} is not set: this runs in the guest, see tests/lab/README.md"))
}

fn text(path: impl AsRef<Path>) -> String {
    let path = path.as_ref();
    let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    text.trim().to_owned()
}

/// One of the guest's two devices and its end of the wire.
struct Device {
    name: String,
    ip: Ipv4Addr,
}

impl Device {
    fn both() -> [Device; 2] {
        ["0", "1"].map(|end| Device {
            name: env(&format!("RDMA_DEV{end}")),
            ip: env(&format!("RDMA_IP{end}")).parse().expect("the lab gives IPv4 addresses"),
        })
    }

    fn dir(&self) -> PathBuf {
        Path::new("/sys/class/infiniband").join(&self.name)
    }

    fn port(&self) -> PathBuf {
        self.dir().join("ports/1")
    }

    fn gid(&self, index: usize) -> Option<Ipv6Addr> {
        let gid = fs::read_to_string(self.port().join(format!("gids/{index}"))).ok()?;
        let gid: Ipv6Addr = gid.trim().parse().expect("a GID reads like an IPv6 address");
        Some(gid).filter(|gid| !gid.is_unspecified())
    }

    /// The network interface below the device: rxe_0 is that of rxe0.
    fn interface(&self) -> String {
        let (kind, end) = self.name.split_at(self.name.len() - 1);
        format!("{kind}_{end}")
    }

    fn statistic(&self, name: &str) -> u64 {
        let path = format!("/sys/class/net/{}/statistics/{name}", self.interface());
        text(path).parse().expect("a number")
    }
}

#[test]
#[ignore = "needs the lab"]
fn both_devices_are_active() {
    let node_type = match env("RDMA_KIND").as_str() {
        "rxe" => "1: CA",
        "siw" => "4: RNIC",
        kind => panic!("no such driver: {kind}"),
    };
    for device in Device::both() {
        assert_eq!(text(device.dir().join("node_type")), node_type, "{}", device.name);
        assert_eq!(text(device.port().join("link_layer")), "Ethernet", "{}", device.name);
        assert_eq!(text(device.port().join("state")), "4: ACTIVE", "{}", device.name);
        assert_eq!(text(device.port().join("phys_state")), "5: LinkUp", "{}", device.name);
    }
}

#[test]
#[ignore = "needs the lab"]
fn gids_are_those_of_the_driver() {
    for device in Device::both() {
        if env("RDMA_KIND") == "rxe" {
            let link_local = device.gid(0).expect("GID 0");
            assert!(link_local.is_unicast_link_local(), "{}: {link_local}", device.name);
            assert_eq!(device.gid(1), Some(device.ip.to_ipv6_mapped()), "{}", device.name);
            for index in 0..2 {
                let interface = text(device.port().join(format!("gid_attrs/ndevs/{index}")));
                assert_eq!(interface, device.interface(), "{}, GID {index}", device.name);
                let kind = text(device.port().join(format!("gid_attrs/types/{index}")));
                assert_eq!(kind, "RoCE v2", "{}, GID {index}", device.name);
            }
        } else {
            let mac = text(format!("/sys/class/net/{}/address", device.interface()));
            let mac: Vec<u8> =
                mac.split(':').map(|b| u8::from_str_radix(b, 16).expect("a MAC address")).collect();
            let gid = device.gid(0).expect("GID 0").octets();
            assert_eq!((&gid[..6], &gid[6..]), (&mac[..], &[0; 10][..]), "{}: the MAC address", device.name);
            assert_eq!(device.gid(1), None, "{} has one GID", device.name);
        }
    }
}

#[test]
#[ignore = "needs the lab"]
fn device_files_can_be_opened() {
    let open = |name: &str| {
        let path = Path::new("/dev/infiniband").join(name);
        fs::File::options()
            .read(true)
            .write(true)
            .open(&path)
            .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
    };
    open("rdma_cm");
    for device in Device::both() {
        let mut files =
            fs::read_dir("/sys/class/infiniband_verbs").expect("the uverbs class").filter_map(Result::ok);
        let file = files.find(|file| {
            fs::read_to_string(file.path().join("ibdev")).is_ok_and(|ibdev| ibdev.trim() == device.name)
        });
        let file = file.unwrap_or_else(|| panic!("no uverbs file for {}", device.name));
        open(file.file_name().to_str().expect("an ASCII name"));
    }
}

/// Registered memory is bounded by RLIMIT_MEMLOCK: a test that wants a limit sets its own.
#[test]
#[ignore = "needs the lab"]
fn locked_memory_is_unlimited() {
    let limits = text("/proc/self/limits");
    let line =
        limits.lines().find(|line| line.starts_with("Max locked memory")).expect("the limit is listed");
    assert_eq!(line.split_whitespace().nth(3), Some("unlimited"), "{line}");
}

/// Between two addresses of one machine the kernel would take `lo`, and no packet would ever be on the wire.
#[test]
#[ignore = "needs the lab"]
fn traffic_between_the_devices_takes_the_wire() {
    let [near, far] = Device::both();
    takes_the_wire(&near, &far);
    takes_the_wire(&far, &near);
}

fn takes_the_wire(near: &Device, far: &Device) {
    const DATAGRAMS: u64 = 64;
    let sender = UdpSocket::bind((near.ip, 0)).expect("bind to the near end");
    let receiver = UdpSocket::bind((far.ip, 0)).expect("bind to the far end");
    receiver.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    let target = receiver.local_addr().expect("bound");

    let before = (near.statistic("tx_packets"), far.statistic("rx_packets"));
    let mut buffer = [0; 2048];
    for n in 0..DATAGRAMS {
        sender.send_to(&[n as u8; 1000], target).expect("send");
        let (len, from) = receiver.recv_from(&mut buffer).expect("the datagram arrives");
        assert_eq!((len, from.ip()), (1000, IpAddr::V4(near.ip)));
    }
    let sent = near.statistic("tx_packets") - before.0;
    let received = far.statistic("rx_packets") - before.1;
    assert!(sent >= DATAGRAMS && received >= DATAGRAMS, "{sent} sent, {received} received, of {DATAGRAMS}");
}

/// A test may take a device away, an interface down, and spoil the wire; `devices up`, run before each test binary, puts all right.
#[test]
#[ignore = "needs the lab"]
fn devices_are_put_back_after_a_removal() {
    fn run(program: &str, args: &[&str]) {
        let status = Command::new(program).args(args).status().expect("it starts");
        assert!(status.success(), "{program} {args:?}: {status}");
    }
    let [near, far] = Device::both();
    let interface = near.interface();
    run("tc", &["qdisc", "add", "dev", &interface, "root", "netem", "loss", "100%"]);
    run("ip", &["link", "set", &interface, "down"]);
    run("rdma", &["link", "delete", &far.name]);
    assert!(!far.dir().exists(), "{} is gone", far.name);

    run(&env("LAB_DEVICES"), &["up"]);
    assert_eq!(text(far.port().join("state")), "4: ACTIVE", "{}", far.name);
    let qdisc = Command::new("tc").args(["qdisc", "show", "dev", &interface]).output().expect("tc starts");
    let qdisc = String::from_utf8_lossy(&qdisc.stdout).into_owned();
    assert!(!qdisc.contains("netem"), "{qdisc}");
    assert_eq!(text(near.port().join("state")), "4: ACTIVE", "{}", near.name);
    takes_the_wire(&near, &far);
    takes_the_wire(&far, &near);
}

/// Guest 1 echoes bytes. Guest 0 has it killed, and from then on gets silence: no reset, no end of the stream, and the
/// link stays up. So dies a machine, and so no process can.
#[test]
#[ignore = "needs the lab"]
fn two_guests_and_one_dies() {
    let [own, peer] = ["RDMA_IP0", "RDMA_IP1"].map(|name| (env(name), TWO_GUESTS_PORT));
    let shared = PathBuf::from(env("LAB_SHARED"));
    if env("LAB_GUEST") == "1" {
        let listener = TcpListener::bind((own.0.as_str(), own.1)).expect("listen");
        fs::write(shared.join("listening"), "").expect("tell the other guest");
        let (mut stream, _) = listener.accept().expect("the other guest connects");
        stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        let mut byte = [0];
        while stream.read_exact(&mut byte).is_ok() {
            stream.write_all(&byte).expect("echo");
        }
        panic!("this guest should have been killed");
    }

    wait_for(&shared.join("listening"));
    let mut stream = TcpStream::connect((peer.0.as_str(), peer.1)).expect("connect to the other guest");
    let mut byte = [7];
    stream.set_read_timeout(Some(PATIENCE)).expect("a time-out");
    stream.write_all(&byte).expect("send");
    stream.read_exact(&mut byte).expect("the echo");

    fs::write(shared.join("kill.1"), "").expect("ask for the kill");
    wait_for(&shared.join("killed.1"));
    stream.set_read_timeout(Some(Duration::from_secs(1))).expect("a time-out");
    stream.write_all(&byte).expect("the socket knows nothing yet");
    let error = stream.read_exact(&mut byte).expect_err("nobody answers");
    assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "silence, not {error}");
    assert_eq!(text("/sys/class/net/eth0/carrier"), "1", "the link is still up");
    let state = text(format!("/sys/class/infiniband/{}/ports/1/state", env("RDMA_DEV0")));
    assert_eq!(state, "4: ACTIVE", "the port is still up");
}

/// Files are how guests and host speak; there is nothing to wait on but their names.
fn wait_for(file: &Path) {
    let deadline = Instant::now() + PATIENCE;
    while !file.exists() {
        assert!(Instant::now() < deadline, "{} did not appear", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}
