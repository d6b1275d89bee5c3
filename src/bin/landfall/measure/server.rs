//! Who is measured: takes control channels, and does for each what is asked, on a thread of its own.
//!
//! A client that breaks off, says nonsense or asks for too much costs itself only: its session ends, its memory is given back, and
//! the server goes on.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use landfall::error::chain;
use landfall::kv::{Bootstrap, KvChannel, KvEndpoint, KvListener};
use tokio::sync::Semaphore;

use super::data::{self, Budget, Setup, Share};
use super::lane::Lane;
use super::load::Report;
use super::talk::{self, About, Answer, Ask, Counted, Shape};
use super::units::{LONGEST, many, show_bytes};
use crate::device::{Side, tcp_device};
use crate::output::Error;

/// How long a client may take to connect the data channel that it asked for.
const PATIENCE: Duration = Duration::from_secs(20);

/// What all sessions share.
#[derive(Clone)]
pub(crate) struct Server {
    pub(crate) setup: Setup,
    pub(crate) budget: Budget,
    /// Where it listens.
    pub(crate) address: SocketAddr,
    /// What is worth a line.
    pub(crate) say: Arc<dyn Fn(&str) + Send + Sync>,
}

impl Server {
    /// Serves at most `clients` at once, for ever; the error is of the listener itself.
    pub(crate) async fn run(self, mut listener: KvListener, clients: usize) -> Result<(), Error> {
        let places = Arc::new(Semaphore::new(clients));
        loop {
            let channel = listener.accept().await?;
            let Ok(place) = places.clone().try_acquire_owned() else {
                tokio::spawn(turn_away(channel, clients));
                continue;
            };
            let server = self.clone();
            let session = move || {
                let _place = place;
                server.session(channel);
            };
            // Its own thread: clients do not slow each other more than the machine makes them.
            let name = "landfall-client".to_owned();
            if let Err(why) = std::thread::Builder::new().name(name).spawn(session) {
                (self.say)(&format!("a client was turned away, there is no thread for it: {why}"));
            }
        }
    }

    fn session(self, control: KvChannel) {
        let peer = control.path().peer_gid;
        let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
            Ok(runtime) => runtime,
            Err(why) => return (self.say)(&format!("{peer}: no runtime for this client: {why}")),
        };
        let say = self.say.clone();
        let without = "none was asked for".to_owned();
        runtime.block_on(Session { server: self, control, peer, data: None, without }.run());
        say(&format!("{peer}: gone"));
    }
}

async fn turn_away(channel: KvChannel, clients: usize) {
    let why = format!("this server has its {clients} clients; wait, or start it with more --clients");
    let turned = async {
        talk::asked(&channel).await;
        let _ = talk::answer(&channel, &Answer::Refused { why }).await;
        let _ = channel.closed().await;
    };
    let _ = tokio::time::timeout(PATIENCE, turned).await;
}

struct Session {
    server: Server,
    control: KvChannel,
    peer: IpAddr,
    data: Option<(Lane, Share)>,
    /// Why there is no data channel.
    without: String,
}

impl Session {
    async fn run(mut self) {
        while let Some(asked) = talk::asked(&self.control).await {
            let done = match asked {
                Ok(ask) => self.serve(ask).await,
                // Whoever speaks another language is told so, and that is all.
                Err(misspoken) => {
                    (self.server.say)(&format!("{}: {misspoken}", self.peer));
                    let _ = self.refuse(misspoken.to_string()).await;
                    let _ = self.control.close().await;
                    break;
                }
            };
            // The control channel has ended.
            if done.is_err() {
                break;
            }
        }
        self.close().await;
    }

    async fn close(&mut self) {
        if let Some((lane, share)) = self.data.take() {
            lane.close().await;
            drop(share);
        }
    }

    async fn refuse(&self, why: String) -> Result<(), Error> {
        talk::answer(&self.control, &Answer::Refused { why }).await
    }

    /// The error is of the control channel; what cannot be had is told to the client.
    async fn serve(&mut self, ask: Ask) -> Result<(), Error> {
        let answer = match ask {
            Ask::Hello => Ok(self.hello()),
            Ask::Open { shape, epoch } => return self.open(shape, epoch).await,
            Ask::Drive { in_flight, millis } => self.drive(in_flight, millis).await.map(Answer::Drove),
            Ask::Verify => self.verify().await,
        };
        match answer {
            Ok(answer) => talk::answer(&self.control, &answer).await,
            Err(why) => self.refuse(chain(why.as_ref())).await,
        }
    }

    fn hello(&self) -> Answer {
        let Server { setup, budget, .. } = &self.server;
        Answer::Hello(About {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            devices: setup.names(),
            transport: setup.transport(),
            rdma: setup.is_rdma(),
            limit: budget.limit(),
        })
    }

    async fn open(&mut self, shape: Shape, epoch: u64) -> Result<(), Error> {
        self.close().await;
        match self.listen(&shape).await {
            Err(why) => self.refuse(chain(why.as_ref())).await,
            Ok((endpoint, mut listener, share)) => {
                let port = listener.local_addr().port();
                let opened = Answer::Opened { port, epoch: endpoint.epoch() };
                talk::answer(&self.control, &opened).await?;
                let accepted = tokio::time::timeout(PATIENCE, async {
                    loop {
                        // Somebody else may have come to this port, or have failed to.
                        match listener.accept().await {
                            Ok(channel) if channel.peer_epoch() == epoch => return channel,
                            _ => {}
                        }
                    }
                });
                let lane = match accepted.await {
                    Ok(channel) => Lane::new(endpoint, channel, shape, true, shape.both),
                    Err(_) => Err(format!("nobody has connected it within {PATIENCE:?}").into()),
                };
                match lane {
                    Ok(lane) => {
                        (self.server.say)(&format!("{}: {}", self.peer, describe(&shape, lane.channel())));
                        self.data = Some((lane, share));
                    }
                    // The next question is refused.
                    Err(why) => self.without = chain(why.as_ref()),
                }
                Ok(())
            }
        }
    }

    async fn listen(&self, shape: &Shape) -> Result<(KvEndpoint, KvListener, Share), Error> {
        shape.check()?;
        let Server { setup, budget, address, .. } = &self.server;
        let blocks = shape.blocks(true, shape.both);
        let share = budget.take(data::pool_bytes(shape, blocks)?)?;
        // Queue pairs are as many as the client has.
        let endpoint = if shape.tcp {
            let devices = vec![tcp_device(Side::Listens(*address))?];
            let admission = setup.admission.clone();
            Setup { devices, bootstrap: Bootstrap::Auto, admission }.data(shape, blocks, 1).await?
        } else {
            setup.data(shape, blocks, 1).await?
        };
        let listener = endpoint.listen(SocketAddr::new(address.ip(), 0)).await?;
        Ok((endpoint, listener, share))
    }

    fn lane(&mut self) -> Result<&mut Lane, Error> {
        match &mut self.data {
            Some((lane, _)) => Ok(lane),
            None => Err(format!("there is no data channel: {}", self.without).into()),
        }
    }

    async fn drive(&mut self, in_flight: u32, millis: u64) -> Result<Report, Error> {
        let lane = self.lane()?;
        let Shape { both, in_flight: most, .. } = lane.starter.shape;
        if !both {
            return Err("this data channel was not opened for both directions".into());
        }
        let time = Duration::from_millis(millis).min(LONGEST);
        lane.starter.drive(in_flight.clamp(1, most), time, &AtomicU64::new(0)).await
    }

    async fn verify(&mut self) -> Result<Answer, Error> {
        let lane = self.lane()?;
        let path = lane.channel().verify_path().await;
        Ok(Answer::Verified(Counted::of(&path)))
    }
}

fn describe(shape: &Shape, channel: &KvChannel) -> String {
    let path = channel.path();
    let direction = if shape.both { " both ways" } else { "" };
    let each = if shape.descriptors > 1 { format!("{} × ", shape.descriptors) } else { String::new() };
    format!(
        "{}{direction} {each}{}, {} in flight on {}, {} over {}",
        shape.op.name(),
        show_bytes(shape.block_bytes),
        shape.in_flight,
        many(path.qps.len(), "queue pair"),
        path.transport,
        path.device
    )
}
