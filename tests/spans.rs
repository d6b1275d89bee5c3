//! What channels tell subscribers of spans. One test: `tracing` remembers for all threads who is interested in what.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use landfall::device::{Device, SoftConfig, SoftTransport};
use landfall::kv::{
    KvChannel, KvConfig, KvEndpoint, KvPool, Layout, PoolAccess, ReadRequest, ReadStrategy, WriteRequest,
};
use landfall::memory::Memory;

async fn endpoint() -> KvEndpoint {
    let device = Device::soft(SoftConfig::new().transport(SoftTransport::Tcp)).unwrap();
    let layout = Layout::contiguous(1, 8, 4096).unwrap();
    let memory = Memory::anonymous(layout.required_bytes());
    let pool =
        KvPool::with_memory(&device.alloc_pd().unwrap(), layout, memory, PoolAccess::Both).await.unwrap();
    KvEndpoint::new(pool, KvConfig::default()).unwrap()
}

async fn transfers() {
    let (near, far) = (endpoint().await, endpoint().await);
    let mut listener = far.listen("127.0.0.1:0".parse().unwrap()).await.unwrap();
    let (near, far) = tokio::join!(near.connect(listener.local_addr()), listener.accept());
    let (near, far): (KvChannel, KvChannel) = (near.unwrap(), far.unwrap());
    let grant = far.grant(far.pool().alloc(3).await.unwrap()).unwrap();
    near.write(WriteRequest::new(&grant, near.pool().alloc(3).await.unwrap()).tag(7)).await.0.unwrap();
    let grant = far.grant_read(far.pool().alloc(2).await.unwrap()).unwrap();
    let target = near.pool().alloc(2).await.unwrap();
    let strategy = ReadStrategy::RdmaRead { depth: 1, qps: 1 };
    near.read(ReadRequest::new(&grant, target).strategy(strategy)).await.0.unwrap();
    let grant = far.grant(far.pool().alloc(1).await.unwrap()).unwrap();
    near.kill();
    near.write(WriteRequest::new(&grant, near.pool().alloc(1).await.unwrap())).await.0.unwrap_err();
}

/// Records the fields of each span by its name.
#[derive(Default)]
struct Spans {
    open: Mutex<Vec<(&'static str, BTreeMap<String, String>)>>,
    closed: Mutex<Vec<(&'static str, BTreeMap<String, String>)>>,
}

struct Fields<'f>(&'f mut BTreeMap<String, String>);

impl tracing::field::Visit for Fields<'_> {
    fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn Debug) {
        self.0.insert(field.name().to_owned(), format!("{value:?}"));
    }
}

struct Subscriber(Arc<Spans>);

impl tracing::Subscriber for Subscriber {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.is_span() && metadata.target() == "landfall::kv"
    }

    fn new_span(&self, attributes: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        let mut fields = BTreeMap::new();
        attributes.record(&mut Fields(&mut fields));
        let mut open = self.0.open.lock().unwrap();
        open.push((attributes.metadata().name(), fields));
        tracing::span::Id::from_u64(open.len() as u64)
    }

    fn record(&self, span: &tracing::span::Id, values: &tracing::span::Record<'_>) {
        let mut open = self.0.open.lock().unwrap();
        values.record(&mut Fields(&mut open[span.into_u64() as usize - 1].1));
    }

    fn try_close(&self, span: tracing::span::Id) -> bool {
        let span = self.0.open.lock().unwrap()[span.into_u64() as usize - 1].clone();
        self.0.closed.lock().unwrap().push(span);
        true
    }

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn every_transfer_is_a_span_with_its_times() {
    let spans = Arc::new(Spans::default());
    // All of it is on this thread.
    let _guard = tracing::subscriber::set_default(Subscriber(spans.clone()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        tokio::time::timeout(Duration::from_secs(60), transfers()).await.expect("in time");
    });
    let closed = spans.closed.lock().unwrap();
    let one = |name: &str| {
        closed.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("no {name}: {closed:?}"))
    };
    let (_, wrote) = one("kv_write");
    let fields = ["transfer", "bytes", "descriptors", "tag", "outcome", "wrs", "attempts", "landed_us"];
    for field in fields {
        assert!(wrote.contains_key(field), "{field}: {wrote:?}");
    }
    assert_eq!(
        (&wrote["bytes"], &wrote["tag"], &wrote["outcome"]),
        (&"12288".into(), &"7".into(), &"\"landed\"".into())
    );
    let (_, read) = one("kv_read");
    assert_eq!(
        (&read["bytes"], &read["method"], &read["outcome"]),
        (&"8192".into(), &"\"rdma-read\"".into(), &"\"done\"".into())
    );
    assert!(read.contains_key("landed_us"));
    // Refused at the call: no transfer, and so no span.
    assert_eq!(closed.iter().filter(|(name, _)| *name == "kv_write").count(), 1);
}
