//! Async RDMA on tokio with an io_uring-style completion API.
//!
//! The promise is in the name: **a write is done when it has landed**, that is, when the remote side has
//! confirmed that the data is in its memory, never when the local queue has drained.
//!
//! # Cancel safety
//!
//! Every future of this crate can be dropped at any time. Memory that a device may still touch is kept until the device
//! is done with it, also when the future is forgotten. What dropping *means* differs:
//!
//! - [`kv::Write`]: the transfer is aborted and the peer is told; the channel goes on. [`kv::Write::detach`] lets it
//!   finish instead.
//! - [`ring::OpFuture`]: what was posted runs to its end; what was not is never posted.
//! - What waits for something to come (arrivals, messages, completions, blocks): nothing is lost.
//! - What builds something (connecting, accepting, registering): it is given up, and what it had is released.
//!
//! Tables are in [`ring`], and with each method.
//!
//! # Stability
//!
//! Version 0.1 is not released, and its API, wire formats and error texts may change. Enums and structs that will grow are
//! `#[non_exhaustive]`. Both ends of a connection have to run the same version; the handshake refuses another one. The
//! minimum Rust version is 1.95. Linux only.
//!
//! RDMA devices are driven through libibverbs and librdmacm; tried on the kernel's soft-RoCE and soft-iWARP, not on a network
//! card yet. The soft provider has the semantics of RDMA queue pairs without a device, over TCP between hosts and in shared
//! memory within one. [`guide::transports`] says what is true on each.
//!
//! # An example
//!
//! Two endpoints in one process; in earnest they are in two, and the grant travels with the application's requests.
//!
//! ```
//! use landfall::{device::Device, kv::{KvConfig, KvEndpoint, KvPool, Layout, WriteRequest}};
//!
//! # async fn endpoint() -> Result<KvEndpoint, Box<dyn std::error::Error>> {
//! // 64 blocks: 16 KiB in each of 2 layers.
//! let layout = Layout::contiguous(2, 64, 16 << 10)?;
//! let pool = KvPool::new(&Device::open("soft")?.alloc_pd()?, layout).await?;
//! let endpoint = KvEndpoint::new(pool, KvConfig::default())?;
//! # Ok(endpoint) }
//! # #[tokio::main] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let (prefill, decode) = (endpoint().await?, endpoint().await?);
//! # let mut listener = decode.listen("127.0.0.1:0".parse()?).await?;
//! # let (sender, receiver) = tokio::try_join!(prefill.connect(listener.local_addr()), listener.accept())?;
//! // The receiver: "you may write to these eight blocks, once".
//! let grant = receiver.grant(receiver.pool().alloc(8).await?)?;
//!
//! // The sender: fills eight blocks of its own and writes them.
//! let mut blocks = sender.pool().alloc(8).await?;
//! blocks.copy_in(1, 3, 0, b"layer 1, block 3")?;
//! let (result, blocks) = sender.write(WriteRequest::new(&grant, blocks)).await;
//! println!("landed after {:?}", result?.landed); // the receiver has confirmed
//!
//! // The receiver again.
//! let arrival = receiver.next_arrival().await?;
//! assert_eq!(arrival.blocks().checksum(1, 3)?, blocks.checksum(1, 3)?);
//! # sender.close().await?;
//! # Ok(()) }
//! ```
//!
//! # The layers
//!
//! ```text
//!  KvChannel    kv                      blocks, grants, landing; a protocol without I/O inside
//!  Ring         ring                    operations in, completions out; slots own the buffers; batches
//!  Resources    ring, memory, device    queue pairs, completion queues, regions, protection domains; the reactor
//!  Provider     (private)               the boundary, shaped like libibverbs; behind it: verbs (libibverbs), soft (TCP, shared memory)
//!  Bootstrap    connect                 two endpoints find each other: out of band over TCP, or by RDMA_CM
//! ```
//!
//! Most programs need [`kv`] only, and [`device`] to open what it runs on. [`ring`] is for protocols of your own.
//!
//! # The guide
//!
//! [`guide::concepts`] (the words), [`guide::landing`] (what a finished write means), [`guide::grants`] (who owns a block and when), [`guide::admission`] (who
//! may connect), [`guide::errors`] (whose fault, and what to do), [`guide::tuning`], [`guide::transports`], [`guide::runtime`].
//!
//! # Features
//!
//! - `verbs` (default): RDMA devices. libibverbs is loaded when one is asked for.
//! - `cuda`: memory of GPUs, see [`guide::gpu`]. The CUDA driver is loaded when it is asked for.
//! - `cli`: the program `landfall`, which looks at a host and measures it; [`guide::operating`] and [`guide::measuring`] say how.
//! - `tls`: admission by certificates ([`guide::admission`]). It needs a C compiler to build.
//! - `metrics`: numbers of all channels through the facade `metrics`; the application chooses the exporter.
//!
//! A default build needs a Rust toolchain and nothing else.
#![cfg_attr(docsrs, feature(doc_cfg))]
#![warn(missing_docs, unreachable_pub)]

pub mod connect;
pub mod counters;
pub mod cuda;
pub mod device;
pub mod doctor;
pub mod error;
pub mod guide;
pub mod kv;
pub mod memory;
#[cfg(feature = "metrics")]
pub mod metrics;
pub mod ring;

mod background;
mod clock;
mod completion_queue;
mod pages;
mod provider;
mod queue_pair;
mod random;
#[cfg(feature = "verbs")]
mod raw;
mod reactor;
mod shared_receive_queue;
mod sync;
mod wire;

/// The README's program compiles and runs.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzz_api;
