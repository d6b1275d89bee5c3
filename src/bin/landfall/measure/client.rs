//! Who measures: the control channel to a server, and data channels on it.

use std::net::SocketAddr;
use std::time::Duration;

use landfall::kv::{KvChannel, KvEndpoint, PathReport, PeerIdentity};

use super::data::{self, Setup};
use super::lane::Lane;
use super::load::Report;
use super::talk::{self, About, Answer, Ask, Counted, Shape};
use super::units::show_bytes;
use crate::device::{DeviceArgs, Side, tcp_device};
use crate::output::{Error, Usage};

/// A connected client.
pub(crate) struct Client {
    setup: Setup,
    /// As the user gave it, for a data channel's port to be put in.
    host: String,
    address: SocketAddr,
    control: KvChannel,
    about: About,
    _endpoint: KvEndpoint,
}

impl Client {
    /// Connects to `target` (`host:port`), which has to be such a server.
    pub(crate) async fn connect(target: &str, device: &DeviceArgs) -> Result<Self, Error> {
        let host = match target.rsplit_once(':') {
            Some((host, port)) if port.parse::<u16>().is_ok() && !host.is_empty() => host.to_owned(),
            _ => return Err(Usage(format!("{target}: the server's address is wanted, as HOST:PORT")).into()),
        };
        let found = tokio::net::lookup_host(target).await;
        let mut found = found.map_err(|why| format!("looking up {target}: {why}"))?;
        let address = found.next().ok_or_else(|| format!("{target} has no address"))?;
        let setup = device.setup(Side::Connects(address))?;
        let endpoint = setup.control().await?;
        let peer = PeerIdentity { epoch: None, name: Some(talk::NAME.to_owned()) };
        let control = endpoint.connect_to(target, &peer).await?;
        let Answer::Hello(about) = talk::ask(&control, &Ask::Hello, Duration::ZERO).await? else {
            return Err(unexpected("Hello"));
        };
        Ok(Self { setup, host, address, control, about, _endpoint: endpoint })
    }

    /// The server.
    pub(crate) fn about(&self) -> &About {
        &self.about
    }

    pub(crate) fn is_rdma(&self) -> bool {
        self.setup.is_rdma()
    }

    /// A data channel of `qps` queue pairs a rail, at both ends of which there is memory for `shape`.
    pub(crate) async fn open(&self, shape: Shape, qps: usize) -> Result<Measured<'_>, Error> {
        shape.check().map_err(Usage)?;
        let blocks = shape.blocks(shape.both, true);
        // Before memory of this end is taken, which nobody bounds.
        let (needs, lends) = (data::pool_bytes(&shape, shape.blocks(true, shape.both))?, self.about.limit);
        if needs > lends {
            return Err(format!(
                "the transfers in flight take {} at each end, and the server lends {}; measure smaller or fewer ones, or start it \
                 with a larger --limit",
                show_bytes(needs),
                show_bytes(lends)
            )
            .into());
        }
        let endpoint = if shape.tcp {
            let devices = vec![tcp_device(Side::Connects(self.address))?];
            let admission = self.setup.admission.clone();
            Setup { devices, bootstrap: Default::default(), admission }.data(&shape, blocks, qps).await?
        } else {
            self.setup.data(&shape, blocks, qps).await?
        };
        let ask = Ask::Open { shape, epoch: endpoint.epoch() };
        let Answer::Opened { port, epoch } = talk::ask(&self.control, &ask, Duration::ZERO).await? else {
            return Err(unexpected("Open"));
        };
        let peer = PeerIdentity { epoch: Some(epoch), name: None };
        let channel = endpoint.connect_to(format!("{}:{port}", self.host), &peer).await?;
        let lane = Lane::new(endpoint, channel, shape, shape.both, true)?;
        Ok(Measured { lane, client: self })
    }

    /// Ends the session. Nothing is left to be done when that fails.
    pub(crate) async fn close(self) {
        let _ = self.control.close().await;
    }
}

fn unexpected(asked: &str) -> Error {
    format!("the peer has answered something else than was asked for ({asked})").into()
}

/// A data channel.
pub(crate) struct Measured<'c> {
    pub(crate) lane: Lane,
    client: &'c Client,
}

impl Measured<'_> {
    /// Transfers for `time`: those of this end, and of the other where both do it.
    pub(crate) async fn drive(
        &mut self,
        in_flight: u32,
        time: Duration,
        seen: &std::sync::atomic::AtomicU64,
    ) -> Result<(Report, Option<Report>), Error> {
        if !self.lane.starter.shape.both {
            return Ok((self.lane.starter.drive(in_flight, time, seen).await?, None));
        }
        let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        let ask = Ask::Drive { in_flight, millis };
        let theirs = talk::ask(&self.client.control, &ask, time);
        let ours = self.lane.starter.drive(in_flight, time, seen);
        match tokio::try_join!(ours, theirs)? {
            (ours, Answer::Drove(theirs)) => Ok((ours, Some(theirs))),
            _ => Err(unexpected("Drive")),
        }
    }

    pub(crate) fn path(&self) -> PathReport {
        self.lane.channel().path()
    }

    /// What the devices of both ends have counted: of this one, and of the server's.
    pub(crate) async fn verify(&self) -> Result<(Counted, Counted), Error> {
        let ours = Counted::of(&self.lane.channel().verify_path().await);
        match talk::ask(&self.client.control, &Ask::Verify, Duration::ZERO).await? {
            Answer::Verified(theirs) => Ok((ours, theirs)),
            _ => Err(unexpected("Verify")),
        }
    }

    pub(crate) async fn close(self) {
        self.lane.close().await;
    }
}
