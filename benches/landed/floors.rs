//! What bare sockets, and a bare copy, reach on this machine, at this moment: the shapes of a write without a library in between.
//!
//! A round trip carries 4 KiB one way and 64 bytes back, as a small write and its confirmation do. A stream is 256 MiB
//! one way, in calls of 1 MiB, and one byte back. The congestion control is reno, which the soft device chooses on
//! loopback, too.

use std::io::{ErrorKind, Read, Write};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::args::{Args, Side};
use crate::common::{self, Error, RECEIVER_CPU, Samples, line};

const ROUND_TRIP_SPIN: &str = "floor.spin.roundtrip";
const ROUND_TRIP_TOKIO: &str = "floor.tokio.roundtrip";
const STREAM_RAW: &str = "floor.raw.stream256MiB";
const STREAM_TOKIO: &str = "floor.tokio.stream256MiB";

const MEMCPY: &str = "floor.memcpy.256MiB";

pub const NAMES: [&str; 5] = [ROUND_TRIP_SPIN, ROUND_TRIP_TOKIO, STREAM_RAW, STREAM_TOKIO, MEMCPY];

const REQUEST: usize = 4096;
const REPLY: usize = 64;
const ROUND_TRIPS: usize = 2000;
const STREAM: usize = 256 << 20;
const CALL: usize = 1 << 20;
const STREAMS: usize = 5;
const PATIENCE: Duration = Duration::from_secs(60);

/// Measures one floor. The peer connects to us, so that neither waits long for one that has died.
pub fn measure(args: &Args, name: &str) -> Result<(), Error> {
    if name == MEMCPY {
        copy(if args.quick { 1 } else { STREAMS });
        return Ok(());
    }
    let runtime = common::runtime()?;
    let listener = runtime.block_on(TcpListener::bind(("127.0.0.1", 0)))?;
    let port = listener.local_addr()?.port();
    let options = [format!("--floor={name}"), format!("--port={port}")];
    let peer = common::Peer::start(args.shared().into_iter().chain(options))?;
    let accepted = async { tokio::time::timeout(PATIENCE, listener.accept()).await };
    let (socket, _) = runtime.block_on(accepted)??;
    prepare(&socket)?;
    let quick = args.quick;
    match name {
        ROUND_TRIP_SPIN => spin_ping(socket, name, if quick { 10 } else { ROUND_TRIPS })?,
        ROUND_TRIP_TOKIO => {
            runtime.block_on(tokio_ping(socket, name, if quick { 10 } else { ROUND_TRIPS }))?
        }
        STREAM_RAW => raw_send(socket, name, if quick { 1 } else { STREAMS })?,
        _ => runtime.block_on(tokio_send(socket, name, if quick { 1 } else { STREAMS }))?,
    }
    peer.finish()
}

/// The far end. It goes on until the connection is closed.
pub fn peer(args: &Args, name: &str) -> Result<(), Error> {
    debug_assert!(matches!(args.side, Side::Floor(_)));
    if args.pin {
        common::pin(RECEIVER_CPU)?;
    }
    let runtime = common::runtime()?;
    common::hello("ready")?;
    let socket = runtime.block_on(TcpStream::connect(("127.0.0.1", args.port)))?;
    prepare(&socket)?;
    match name {
        ROUND_TRIP_SPIN => spin_pong(socket),
        ROUND_TRIP_TOKIO => runtime.block_on(tokio_pong(socket)),
        STREAM_RAW => raw_receive(socket),
        _ => runtime.block_on(tokio_receive(socket)),
    }
}

fn prepare(socket: &TcpStream) -> Result<(), Error> {
    socket.set_nodelay(true)?;
    // Not every kernel has or allows it; then the floor is what the default gives, and says so.
    if let Err(why) = socket2::SockRef::from(socket).set_tcp_congestion(b"reno") {
        eprintln!("landed: reno is not available here: {why}");
    }
    Ok(())
}

fn spin_ping(socket: TcpStream, name: &str, rounds: usize) -> Result<(), Error> {
    let mut socket = socket.into_std()?;
    let (request, mut reply) = ([1u8; REQUEST], [0u8; REPLY]);
    let mut samples = Samples::default();
    for round in 0..=rounds {
        let start = Instant::now();
        spin_write(&mut socket, &request)?;
        if !spin_read(&mut socket, &mut reply)? {
            return Err("the peer of a floor closed early".into());
        }
        // The first warms up.
        if round > 0 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    print_round_trips(name, &samples);
    Ok(())
}

fn spin_pong(socket: TcpStream) -> Result<(), Error> {
    let mut socket = socket.into_std()?;
    let (mut request, reply) = ([0u8; REQUEST], [2u8; REPLY]);
    while spin_read(&mut socket, &mut request)? {
        spin_write(&mut socket, &reply)?;
    }
    Ok(())
}

/// False at the end of the stream.
fn spin_read(socket: &mut std::net::TcpStream, mut into: &mut [u8]) -> Result<bool, Error> {
    while !into.is_empty() {
        match socket.read(into) {
            Ok(0) => return Ok(false),
            Ok(n) => into = &mut into[n..],
            Err(why) if why.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(why) => return Err(why.into()),
        }
    }
    Ok(true)
}

fn spin_write(socket: &mut std::net::TcpStream, mut bytes: &[u8]) -> Result<(), Error> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(n) => bytes = &bytes[n..],
            Err(why) if why.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
            Err(why) => return Err(why.into()),
        }
    }
    Ok(())
}

async fn tokio_ping(mut socket: TcpStream, name: &str, rounds: usize) -> Result<(), Error> {
    let (request, mut reply) = ([1u8; REQUEST], [0u8; REPLY]);
    let mut samples = Samples::default();
    for round in 0..=rounds {
        let start = Instant::now();
        socket.write_all(&request).await?;
        socket.read_exact(&mut reply).await?;
        if round > 0 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    print_round_trips(name, &samples);
    Ok(())
}

async fn tokio_pong(mut socket: TcpStream) -> Result<(), Error> {
    let (mut request, reply) = ([0u8; REQUEST], [2u8; REPLY]);
    loop {
        match socket.read_exact(&mut request).await {
            Ok(_) => socket.write_all(&reply).await?,
            Err(why) if why.kind() == ErrorKind::UnexpectedEof => return Ok(()),
            Err(why) => return Err(why.into()),
        }
    }
}

fn raw_send(socket: TcpStream, name: &str, streams: usize) -> Result<(), Error> {
    let mut socket = blocking(socket)?;
    let data = vec![3u8; STREAM];
    let mut samples = Samples::default();
    for stream in 0..=streams {
        let start = Instant::now();
        for call in data.chunks(CALL) {
            socket.write_all(call)?;
        }
        socket.read_exact(&mut [0])?;
        if stream > 0 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    print_streams(name, &samples);
    Ok(())
}

fn raw_receive(socket: TcpStream) -> Result<(), Error> {
    let mut socket = blocking(socket)?;
    let mut data = vec![2u8; STREAM];
    loop {
        for call in data.chunks_mut(CALL) {
            match socket.read_exact(call) {
                Ok(()) => {}
                Err(why) if why.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                Err(why) => return Err(why.into()),
            }
        }
        socket.write_all(b"k")?;
    }
}

fn blocking(socket: TcpStream) -> Result<std::net::TcpStream, Error> {
    let socket = socket.into_std()?;
    socket.set_nonblocking(false)?;
    Ok(socket)
}

async fn tokio_send(mut socket: TcpStream, name: &str, streams: usize) -> Result<(), Error> {
    let data = vec![3u8; STREAM];
    let mut samples = Samples::default();
    for stream in 0..=streams {
        let start = Instant::now();
        for call in data.chunks(CALL) {
            socket.write_all(call).await?;
        }
        socket.read_exact(&mut [0]).await?;
        if stream > 0 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    print_streams(name, &samples);
    Ok(())
}

async fn tokio_receive(mut socket: TcpStream) -> Result<(), Error> {
    let mut data = vec![2u8; STREAM];
    loop {
        for call in data.chunks_mut(CALL) {
            match socket.read_exact(call).await {
                Ok(_) => {}
                Err(why) if why.kind() == ErrorKind::UnexpectedEof => return Ok(()),
                Err(why) => return Err(why.into()),
            }
        }
        socket.write_all(b"k").await?;
    }
}

/// One thread, from memory to memory, both of which are there.
fn copy(times: usize) {
    let (source, mut target) = (vec![3u8; STREAM], vec![2u8; STREAM]);
    let mut samples = Samples::default();
    for time in 0..=times {
        let start = Instant::now();
        target.copy_from_slice(std::hint::black_box(&source));
        std::hint::black_box(&mut target);
        if time > 0 {
            samples.push(start.elapsed().as_secs_f64());
        }
    }
    print_streams(MEMCPY, &samples);
}

fn print_round_trips(name: &str, samples: &Samples) {
    line(&format!("{name}.p50"), samples.median() * 1e6, "us");
    line(&format!("{name}.p99"), samples.quantile(0.99) * 1e6, "us");
}

fn print_streams(name: &str, samples: &Samples) {
    line(name, STREAM as f64 / samples.median() / 1e9, "GB/s");
}
