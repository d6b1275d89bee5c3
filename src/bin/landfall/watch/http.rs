//! The exporter's HTTP: as much as a scrape needs, and bounded in everything that a client decides.
//!
//! A connection carries one request. A client has five seconds and 8 KiB for its head; 64 are served at once, and when more come, the
//! oldest that is not being answered gives way, though none before its first read: what it asks may be here already. However many ask,
//! the devices are read at most four times a second.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use landfall::device::PortInfo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Mutex;
use tokio::task::AbortHandle;

use super::Watched;
use super::prometheus::{self, Scrape};
use crate::output::{Error, Output, complain};

const CLIENTS: usize = 64;
const PATIENCE: Duration = Duration::from_secs(5);
const MAX_HEAD: usize = 8 << 10;
/// What a client may send beyond its request, so that closing does not reset the connection before it has the answer.
const MAX_REST: u64 = 64 << 10;
const FRESH: Duration = Duration::from_millis(250);

/// What was read last, and when.
type Cache = Arc<Mutex<Option<(Instant, Arc<str>)>>>;

/// A client that is served.
struct Client {
    task: AbortHandle,
    progress: Arc<Progress>,
}

#[derive(Default)]
struct Progress {
    /// Something was read of it, or nothing was there.
    read: AtomicBool,
    /// It has asked, and has no answer yet.
    asked: AtomicBool,
}

pub(super) async fn serve(address: SocketAddr, watched: Watched, output: &Output) -> Result<(), Error> {
    let listener =
        TcpListener::bind(address).await.map_err(|error| format!("listening on {address}: {error}"))?;
    let url = format!("http://{}/metrics", listener.local_addr()?);
    if output.is_json() {
        output.line(&std::collections::BTreeMap::from([("url", &url)]))?;
    } else {
        output.print(&format!("{url}\n"))?;
    }
    let (cache, watched) = (Cache::default(), Arc::new(watched));
    let mut clients: VecDeque<Client> = VecDeque::new();
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, or a client that has gone: not to be asked again at once.
                complain(&format!("accepting a connection: {error}"));
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        clients.retain(|client| !client.task.is_finished());
        if clients.len() >= CLIENTS {
            // Where none may, it is the new one itself.
            let Some(client) = gives_way(clients.iter().map(|client| &*client.progress)) else { continue };
            if let Some(client) = clients.remove(client) {
                client.task.abort();
            }
        }
        let (cache, watched, progress) = (cache.clone(), watched.clone(), Arc::<Progress>::default());
        let own = progress.clone();
        let task = tokio::spawn(async move {
            // A client that is slow, or gone, is its own affair.
            let _ = tokio::time::timeout(PATIENCE, answer(stream, &own, &cache, watched)).await;
        });
        clients.push_back(Client { task: task.abort_handle(), progress });
        // A flood of others does not keep it from being read.
        tokio::task::yield_now().await;
    }
}

/// Which of these clients, the oldest first, makes room for another one: one that is not being answered, if there is one.
fn gives_way<'a>(clients: impl Iterator<Item = &'a Progress> + Clone) -> Option<usize> {
    let has = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
    let idle = clients.clone().position(|client| has(&client.read) && !has(&client.asked));
    idle.or_else(|| clients.clone().position(|client| has(&client.read)))
}

async fn answer(
    mut stream: TcpStream,
    progress: &Progress,
    cache: &Cache,
    watched: Arc<Watched>,
) -> std::io::Result<()> {
    let request = request(&mut stream, &progress.read).await?;
    progress.asked.store(true, Ordering::Relaxed);
    let response = match request {
        Request::Get { path, body } => match path.as_str() {
            "/metrics" => Response::ok(metrics(cache, move || scrape(&watched)).await, body),
            "/" => Response::ok("landfall watch: the counters are at /metrics\n".into(), body),
            _ => Response::refused("404 Not Found", "there is nothing but /metrics here\n"),
        },
        Request::OtherMethod => Response::refused("405 Method Not Allowed", "GET and HEAD only\n"),
        Request::Bad => Response::refused("400 Bad Request", "this is no HTTP/1 request\n"),
        Request::TooLong => {
            Response::refused("431 Request Header Fields Too Large", "the request is too long\n")
        }
    };
    stream.write_all(response.text().as_bytes()).await?;
    stream.shutdown().await?;
    progress.asked.store(false, Ordering::Relaxed);
    tokio::io::copy(&mut stream.take(MAX_REST), &mut tokio::io::sink()).await?;
    Ok(())
}

enum Request {
    Get { path: String, body: bool },
    OtherMethod,
    Bad,
    TooLong,
}

/// Reads to the end of the head. What the head says beyond its first line changes nothing.
async fn request(stream: &mut TcpStream, has_read: &AtomicBool) -> std::io::Result<Request> {
    let mut head = Vec::new();
    let ended = |head: &[u8]| head.windows(4).any(|w| w == b"\r\n\r\n");
    while !ended(&head) {
        if head.len() >= MAX_HEAD {
            return Ok(Request::TooLong);
        }
        let mut part = [0; 1024];
        let mut reading = pin!(stream.read(&mut part));
        let read = poll_fn(|cx| {
            let read = reading.as_mut().poll(cx);
            has_read.store(true, Ordering::Relaxed);
            read
        });
        match read.await? {
            0 => return Ok(Request::Bad),
            read => head.extend_from_slice(&part[..read]),
        }
    }
    Ok(parse(&head))
}

fn parse(head: &[u8]) -> Request {
    let line = head.split(|&b| b == b'\r').next().unwrap_or_default();
    let Ok(line) = std::str::from_utf8(line) else { return Request::Bad };
    let words: Vec<&str> = line.split(' ').collect();
    let [method, target, version] = words[..] else { return Request::Bad };
    if !version.starts_with("HTTP/1.") || !target.starts_with('/') {
        return Request::Bad;
    }
    let path = target.split('?').next().unwrap_or_default().to_owned();
    match method {
        "GET" => Request::Get { path, body: true },
        "HEAD" => Request::Get { path, body: false },
        _ => Request::OtherMethod,
    }
}

/// One reading for all who ask at about the same time. It goes on when whoever has asked for it has left, and nobody begins another one
/// before it has ended: a device may be slow to answer.
async fn metrics(cache: &Cache, read: impl FnOnce() -> String + Send + 'static) -> Arc<str> {
    let mut cached = cache.clone().lock_owned().await;
    if let Some((_, text)) = cached.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
        return text.clone();
    }
    let reading = tokio::task::spawn_blocking(move || {
        let text: Arc<str> = read().into();
        *cached = Some((Instant::now(), text.clone()));
        text
    });
    reading.await.unwrap_or_default()
}

fn scrape(watched: &Watched) -> String {
    let reading = watched.read();
    let mut of: Option<(String, Vec<PortInfo>)> = None;
    let ports = reading.totals.into_iter().map(|totals| {
        // Ports are in the order of their devices.
        if of.as_ref().is_none_or(|(device, _)| *device != totals.port.device) {
            let infos = PortInfo::read(&watched.sysfs, &totals.port.device);
            of = Some((totals.port.device.clone(), infos));
        }
        let info =
            of.as_ref().and_then(|(_, infos)| infos.iter().find(|info| info.number == totals.port.port));
        let info = info.cloned();
        (totals, info)
    });
    let ports = ports.collect();
    prometheus::text(&Scrape { ports, seconds: reading.at.elapsed().as_secs_f64() })
}

struct Response {
    status: &'static str,
    content_type: &'static str,
    length: usize,
    body: Option<Arc<str>>,
}

impl Response {
    /// Without a body for HEAD, which is told its length all the same.
    fn ok(text: Arc<str>, body: bool) -> Self {
        let length = text.len();
        Self { status: "200 OK", content_type: prometheus::CONTENT_TYPE, length, body: body.then_some(text) }
    }

    fn refused(status: &'static str, why: &str) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", length: why.len(), body: Some(why.into()) }
    }

    fn text(&self) -> String {
        let Self { status, content_type, length, body } = self;
        let allow = if status.starts_with("405") { "Allow: GET, HEAD\r\n" } else { "" };
        format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\
             {allow}Connection: close\r\n\r\n{}",
            body.as_deref().unwrap_or_default()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_gives_way_before_its_first_read() {
        let progress = |&(read, asked): &(bool, bool)| Progress { read: read.into(), asked: asked.into() };
        for (clients, expected) in [
            (&[(false, false), (true, true), (true, false)][..], Some(2)),
            (&[(false, false), (true, true), (true, true)], Some(1)),
            (&[(false, false), (false, false)], None),
        ] {
            let clients: Vec<Progress> = clients.iter().map(progress).collect();
            assert_eq!(gives_way(clients.iter()), expected);
        }
    }

    #[tokio::test]
    async fn a_slow_reading_is_not_begun_again_when_who_asked_has_left() {
        let cache = Cache::default();
        let (to_end, ends) = std::sync::mpsc::channel::<()>();
        let (to_begun, begun) = tokio::sync::oneshot::channel();
        let slow = move || {
            let _ = to_begun.send(());
            let _ = ends.recv();
            "slow".to_owned()
        };
        let asked = cache.clone();
        let first = tokio::spawn(async move { metrics(&asked, slow).await });
        begun.await.unwrap();
        first.abort();
        assert!(first.await.unwrap_err().is_cancelled());
        assert!(cache.try_lock().is_err(), "it goes on, and nobody begins another one");
        to_end.send(()).unwrap();
        let cached = tokio::time::timeout(Duration::from_secs(60), cache.lock()).await.unwrap();
        assert_eq!(cached.as_ref().map(|(_, text)| &**text), Some("slow"), "whoever asks next has it");
    }
}
