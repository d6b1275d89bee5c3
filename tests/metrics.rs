//! What channels tell a recorder of numbers.

#[path = "../benches/common/recorder.rs"]
mod recorder;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;
use std::time::Duration;

use landfall::device::{Device, ProtectionDomain, SoftConfig, SoftTransport};
use landfall::kv::{
    KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, ReadRequest, ReadStrategy, WriteRequest,
};
use landfall::memory::Memory;
use landfall::metrics::{Kind, NAMES};
use recorder::Numbers;

/// Long, on a machine that does other things too.
const LONG: Duration = Duration::from_secs(60);
const BLOCK: u64 = 4096;
/// What the dashboard asks of `landfall watch --prometheus`.
const DEVICES: [&str; 4] = [
    "landfall_port_up",
    "landfall_port_sent_bytes_total",
    "landfall_port_received_bytes_total",
    "landfall_port_errors_total",
];

/// One for all tests: they tell their channels apart by the names of peers.
fn numbers() -> &'static Numbers {
    static NUMBERS: OnceLock<Numbers> = OnceLock::new();
    NUMBERS.get_or_init(|| {
        let numbers = Numbers::default();
        metrics::set_global_recorder(numbers.clone()).expect("the first one");
        landfall::metrics::describe();
        numbers
    })
}

/// What is said of the channels to this peer.
fn of(peer: &str) -> BTreeMap<String, f64> {
    let label = format!("peer={peer}");
    let own = |key: &String| key.split(['{', ',', '}']).any(|part| part == label);
    numbers()
        .all()
        .into_iter()
        .filter(|(key, _)| own(key))
        .map(|(k, v)| (k.replace(&label, "peer=P"), v))
        .collect()
}

fn device() -> Device {
    Device::soft(SoftConfig::new().transport(SoftTransport::Tcp)).unwrap()
}

async fn endpoint(name: &str, rails: usize) -> (KvEndpoint, Vec<Device>) {
    numbers();
    let devices: Vec<_> = (0..rails).map(|_| device()).collect();
    let pds: Vec<_> = devices.iter().map(|device| device.alloc_pd().unwrap()).collect();
    let pds: Vec<&ProtectionDomain> = pds.iter().collect();
    let layout = Layout::contiguous(1, 64, BLOCK).unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool = KvPool::on_rails(&pds, layout, memory, PoolAccess::Both).await.unwrap();
    (KvEndpoint::named(pool, KvConfig::default(), name).unwrap(), devices)
}

/// Channels from one endpoint to another of these names.
async fn pair(from: &str, to: &str, rails: usize) -> (KvChannel, KvChannel, Vec<Device>) {
    let ((near, devices), (far, _)) = (endpoint(from, rails).await, endpoint(to, rails).await);
    let mut listener = far.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (near, far) = tokio::join!(near.connect(listener.local_addr()), listener.accept());
    (near.unwrap(), far.unwrap(), devices)
}

async fn write(near: &KvChannel, far: &KvChannel, blocks: u32) {
    let grant = far.grant(far.pool().alloc(blocks).await.unwrap()).unwrap();
    let (landed, _) =
        near.write(WriteRequest::new(&grant, near.pool().alloc(blocks).await.unwrap()).tag(7)).await;
    landed.unwrap();
    far.next_arrival().await.unwrap();
}

async fn read(near: &KvChannel, far: &KvChannel, strategy: ReadStrategy) {
    let grant = far.grant_read(far.pool().alloc(2).await.unwrap()).unwrap();
    let target = near.pool().alloc(2).await.unwrap();
    near.read(ReadRequest::new(&grant, target).strategy(strategy)).await.0.unwrap();
    far.next_served().await.unwrap().result().unwrap();
}

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(LONG, test).await.expect("in time") });
}

async fn until(what: &str, done: impl Fn() -> bool) {
    while !done() {
        tokio::time::sleep(Duration::from_millis(5)).await;
        assert!(!what.is_empty());
    }
}

#[test]
fn the_numbers_are_those_of_the_channel() {
    run(async {
        let (near, far, _devices) = pair("numbers-near", "numbers-far", 1).await;
        for blocks in [1, 1, 3] {
            write(&near, &far, blocks).await;
        }
        read(&near, &far, ReadStrategy::RdmaRead { depth: 1, qps: 1 }).await;
        read(&near, &far, ReadStrategy::RemoteWrite).await;
        // A grant that is used twice is refused; one that is revoked ends without.
        let grant = far.grant(far.pool().alloc(1).await.unwrap()).unwrap();
        let source = near.pool().alloc(1).await.unwrap();
        let (landed, source) = near.write(WriteRequest::new(&grant, source)).await;
        landed.unwrap();
        near.write(WriteRequest::new(&grant, source)).await.0.unwrap_err();
        far.next_arrival().await.unwrap();
        let revoked = far.grant(far.pool().alloc(1).await.unwrap()).unwrap();
        far.revoke(&revoked);
        far.next_arrival().await.unwrap_err();

        let (ours, theirs) = (near.stats(), far.stats());
        assert_eq!((ours.landed, ours.reads, ours.refused), (4, 2, 1));
        let number = |of: &BTreeMap<String, f64>, key: &str| {
            *of.get(key).unwrap_or_else(|| panic!("no {key} in {of:#?}"))
        };
        let said = of("numbers-far");
        let ended =
            |op, outcome| format!("landfall_transfers_total{{op={op},outcome={outcome},path=tcp,peer=P}}");
        let bytes = |op| format!("landfall_bytes_total{{op={op},path=tcp,peer=P}}");
        for (key, value) in [
            (ended("write", "landed"), ours.landed),
            (ended("write", "not_delivered"), 0),
            (ended("read", "done"), ours.reads),
            (ended("call", "refused"), ours.refused),
            (bytes("write"), ours.landed_bytes),
            (bytes("read"), ours.read_bytes),
            ("landfall_landed_seconds{op=write,path=tcp,peer=P}#count".to_owned(), ours.landed),
            ("landfall_landed_seconds{op=read,path=tcp,peer=P}#count".to_owned(), ours.reads),
            ("landfall_local_to_landed_seconds{path=tcp,peer=P}#count".to_owned(), ours.landed),
            ("landfall_retries_total{path=tcp,peer=P}".to_owned(), 0),
            ("landfall_channels{peer=P}".to_owned(), 1),
        ] {
            assert_eq!(number(&said, &key), value as f64, "{key}");
        }
        let posted: u64 = near.path().qps.iter().map(|qp| qp.bytes_written).sum();
        let rail = "landfall_rail_bytes_total{device=soft-default,direction=written,peer=P,rail=0}";
        assert_eq!(number(&said, rail), posted as f64);
        let said = of("numbers-near");
        assert_eq!(number(&said, &ended("arrive", "arrived")), theirs.arrived as f64);
        assert_eq!(number(&said, &ended("arrive", "aborted")), 1.0);
        assert_eq!(number(&said, &ended("serve", "served")), theirs.served as f64);
        assert_eq!(number(&said, &bytes("serve")), theirs.served_bytes as f64);

        near.close().await.unwrap();
        far.closed().await;
        for peer in ["numbers-near", "numbers-far"] {
            assert_eq!(number(&of(peer), "landfall_channels{peer=P}"), 0.0);
            let rails = of(peer).into_iter().filter(|(key, _)| key.starts_with("landfall_rails"));
            assert_eq!(rails.map(|(_, value)| value).collect::<Vec<_>>(), [0.0, 0.0]);
        }
    });
}

#[test]
fn k10_a_rail_that_fails_is_down_until_it_is_back() {
    run(async {
        let (near, far, devices) = pair("rails-near", "rails-far", 2).await;
        write(&near, &far, 8).await;
        let state = |state: &str, rail: usize| {
            of("rails-far")
                [&format!("landfall_rails{{device=soft-default,peer=P,rail={rail},state={state}}}")]
        };
        assert_eq!((state("up", 0), state("up", 1), state("down", 1)), (1.0, 1.0, 0.0));
        devices[1].soft_link().unwrap().cut();
        until("the rail is down", || state("down", 1) == 1.0).await;
        assert_eq!((state("up", 0), state("up", 1)), (1.0, 0.0));
        write(&near, &far, 8).await;
        devices[1].soft_link().unwrap().mend();
        until("the rail is back", || state("up", 1) == 1.0).await;
        assert_eq!(state("down", 1), 0.0);
        near.close().await.unwrap();
        far.closed().await;
        assert_eq!((state("up", 0), state("up", 1), state("down", 1)), (0.0, 0.0, 0.0));
    });
}

/// What a rail had under way when it failed is written again, by the other one.
#[test]
fn k10_further_attempts_are_told() {
    run(async {
        let (near, far, devices) = pair("retries-near", "retries-far", 2).await;
        write(&near, &far, 8).await;
        let link = devices[1].soft_link().unwrap();
        let retries = || of("retries-far")["landfall_retries_total{path=tcp,peer=P}"];
        let up = || of("retries-far")["landfall_rails{device=soft-default,peer=P,rail=1,state=up}"] == 1.0;
        let mut landed = 1;
        // How a write is divided between the rails is theirs to say.
        while retries() == 0.0 {
            let grants = (0..8).map(|_| far.grant(far.pool().try_alloc(8).unwrap()).unwrap());
            let started = |grant| {
                let source = near.pool().try_alloc(8).unwrap();
                near.write(WriteRequest::new(&grant, source))
            };
            let writes: Vec<_> = grants.map(started).collect();
            link.cut();
            for write in writes {
                write.await.0.unwrap();
                far.next_arrival().await.unwrap();
                landed += 1;
            }
            link.mend();
            until("the rail is back", up).await;
        }
        assert_eq!(near.stats().landed, landed);
        near.close().await.unwrap();
    });
}

/// A sender that is faster than its receiver waits for credits, and says how long.
#[test]
fn k7_waits_for_credits_are_told() {
    run(async {
        let config = KvConfig::default().data_credits(1);
        let numbered = async |name: &str| {
            numbers();
            let layout = Layout::contiguous(1, 64, BLOCK).unwrap();
            let pool = KvPool::new(&device().alloc_pd().unwrap(), layout).await.unwrap();
            KvEndpoint::named(pool, config.clone(), name).unwrap()
        };
        let (near, far) = (numbered("credits-near").await, numbered("credits-far").await);
        let mut listener = far.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
        let (near, far) = tokio::join!(near.connect(listener.local_addr()), listener.accept());
        let (near, far) = (near.unwrap(), far.unwrap());
        let mut writes = Vec::new();
        for _ in 0..16 {
            let grant = far.grant(far.pool().alloc(1).await.unwrap()).unwrap();
            writes.push(near.write(WriteRequest::new(&grant, near.pool().alloc(1).await.unwrap())));
        }
        for write in writes {
            write.await.0.unwrap();
        }
        let said = of("credits-far");
        assert!(said["landfall_credits_waited_seconds{path=tcp,peer=P}#count"] >= 1.0, "{said:#?}");
    });
}

#[test]
fn every_name_is_documented_and_described() {
    run(async {
        let (near, far, _devices) = pair("names-near", "names-far", 1).await;
        write(&near, &far, 1).await;
        let told: BTreeSet<String> =
            of("names-far").keys().map(|key| key.split('{').next().unwrap().to_owned()).collect();
        let known: BTreeSet<String> = NAMES.iter().map(|(name, _, _)| (*name).to_owned()).collect();
        // There is no GPU: a test of the library has a recorded driver for that.
        let everywhere: BTreeSet<String> =
            known.iter().filter(|name| *name != "landfall_gpu_bytes_total").cloned().collect();
        assert_eq!(told, everywhere);
        assert_eq!(numbers().described().into_keys().collect::<BTreeSet<_>>(), known);
        let page = include_str!("../src/metrics.rs");
        for (name, kind, _) in NAMES {
            let letter = match kind {
                Kind::Counter => 'c',
                Kind::Gauge => 'g',
                _ => 'h',
            };
            assert!(page.contains(&format!("//! | `{name}` | {letter} | ")), "{name} is not in the table");
        }
    });
}

/// Every expression of the dashboard: its queries, and those of its variables.
fn expressions(dashboard: &serde_json::Value, found: &mut Vec<String>) {
    match dashboard {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if name == "expr" || name == "definition" => found.push(text.to_owned()),
                    _ => expressions(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|value| expressions(value, found)),
        _ => {}
    }
}

/// A dashboard that asks for what nobody tells shows nothing, and nobody sees why.
#[test]
fn the_dashboard_asks_for_what_there_is() {
    let dashboard: serde_json::Value =
        serde_json::from_str(include_str!("../deploy/grafana.json")).expect("the dashboard is JSON");
    let mut found = Vec::new();
    expressions(&dashboard, &mut found);
    assert!(found.len() > 15, "{found:?}");
    // As Prometheus names them: a histogram is three.
    let mut known: BTreeSet<String> = BTreeSet::new();
    for (name, kind, _) in NAMES {
        match kind {
            Kind::Histogram => known.extend(["bucket", "sum", "count"].map(|part| format!("{name}_{part}"))),
            _ => _ = known.insert(name.to_owned()),
        }
    }
    let mut asked = BTreeSet::new();
    for expression in &found {
        let words = expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        asked.extend(words.filter(|word| word.starts_with("landfall_")).map(str::to_owned));
    }
    let of_channels = |name: &&String| !DEVICES.contains(&name.as_str());
    let exporter = include_str!("../src/bin/landfall/watch/prometheus.rs");
    for name in DEVICES {
        assert!(exporter.contains(&format!("\"{name}\"")), "landfall watch does not tell {name}");
    }
    let unknown: Vec<_> = asked.iter().filter(of_channels).filter(|name| !known.contains(*name)).collect();
    assert!(unknown.is_empty(), "nobody tells {unknown:?}");
    // And it shows everything that a channel tells.
    for (name, _, _) in NAMES {
        assert!(asked.iter().any(|word| word.starts_with(name)), "the dashboard does not show {name}");
    }
    let labels = [
        "peer",
        "path",
        "op",
        "outcome",
        "rail",
        "device",
        "direction",
        "way",
        "state",
        "le",
        "port",
        "counter",
    ];
    for expression in &found {
        let by = expression.split(" by (").skip(1).filter_map(|rest| rest.split_once(')'));
        for label in by.flat_map(|(list, _)| list.split(", ")) {
            assert!(labels.contains(&label), "{label} in {expression}");
        }
    }
}
