//! Workers without a model, which do what a test wants, right or wrong; and a gateway in this process.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use axum::{Json, Router};
use futures_util::StreamExt;
use gateway::gateway::route::{ByPrefix, Route};
use gateway::gateway::{GatewayArgs, GatewayError, Server};
use gateway::protocol::{
    DecodeEvent, DecodeRequest, Finish, PrefillEvent, PrefillReply, PrefillRequest, Refusal, Role, Transfer,
    Worker,
};
use serde_json::Value;
use tokio::task::{AbortHandle, JoinHandle};

type Act<T> = Arc<dyn Fn(T) -> Response + Send + Sync>;

/// What it was asked.
#[derive(Debug, Default)]
pub struct Asked {
    /// Requests, by their first word.
    pub prompts: Mutex<BTreeMap<String, u64>>,
    pub begun: AtomicU64,
    /// Requests whose answer was dropped before its end.
    pub left: AtomicU64,
    /// Attempts that were given up.
    pub released: AtomicU64,
}

pub struct Fake {
    pub worker: Worker,
    pub asked: Arc<Asked>,
    task: AbortHandle,
}

impl Drop for Fake {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[derive(Clone)]
struct Shared {
    worker: Worker,
    asked: Arc<Asked>,
    prefill: Act<PrefillRequest>,
    decode: Act<DecodeRequest>,
}

impl Fake {
    pub async fn prefill(
        name: &str,
        act: impl Fn(PrefillRequest) -> Response + Send + Sync + 'static,
    ) -> Self {
        Self::start(
            name,
            Role::Prefill,
            |_| (),
            Arc::new(act),
            Arc::new(|_| StatusCode::NOT_FOUND.into_response()),
        )
        .await
    }

    pub async fn decode(name: &str, act: impl Fn(DecodeRequest) -> Response + Send + Sync + 'static) -> Self {
        Self::decode_that(name, |_| (), act).await
    }

    /// One that says something else of itself.
    pub async fn decode_that(
        name: &str,
        edit: impl FnOnce(&mut Worker),
        act: impl Fn(DecodeRequest) -> Response + Send + Sync + 'static,
    ) -> Self {
        Self::start(
            name,
            Role::Decode,
            edit,
            Arc::new(|_| StatusCode::NOT_FOUND.into_response()),
            Arc::new(act),
        )
        .await
    }

    async fn start(
        name: &str,
        role: Role,
        edit: impl FnOnce(&mut Worker),
        prefill: Act<PrefillRequest>,
        decode: Act<DecodeRequest>,
    ) -> Self {
        static EPOCH: AtomicU64 = AtomicU64::new(1);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let http = listener.local_addr().unwrap();
        let mut worker = Worker {
            name: name.to_owned(),
            role,
            http,
            kv: (role == Role::Decode).then_some(http),
            epoch: EPOCH.fetch_add(1, Ordering::Relaxed),
            model: "fake@1".to_owned(),
            context: 1024,
            slots: 4,
            blocks: 1,
            block_bytes: 1,
            draining: false,
        };
        edit(&mut worker);
        let asked = Arc::new(Asked::default());
        let shared = Shared { worker: worker.clone(), asked: asked.clone(), prefill, decode };
        let router = Router::new()
            .route("/v1/worker", get(|State(s): State<Shared>| async move { Json(s.worker) }))
            .route("/v1/prefill", post(on_prefill))
            .route("/v1/decode", post(on_decode))
            .route("/v1/attempts/{attempt}", delete(on_release))
            .with_state(shared);
        let task = tokio::spawn(async move { axum::serve(listener, router).await }).abort_handle();
        Self { worker, asked, task }
    }

    pub fn begun(&self) -> u64 {
        self.asked.begun.load(Ordering::SeqCst)
    }

    pub fn left(&self) -> u64 {
        self.asked.left.load(Ordering::SeqCst)
    }

    pub fn released(&self) -> u64 {
        self.asked.released.load(Ordering::SeqCst)
    }
}

async fn on_prefill(State(s): State<Shared>, Json(request): Json<PrefillRequest>) -> Response {
    if let gateway::protocol::Prompt::Text(text) = &request.prompt {
        let word = text.split(' ').next().unwrap_or_default().to_owned();
        *s.asked.prompts.lock().unwrap().entry(word).or_default() += 1;
    }
    watched(&s, (s.prefill)(request))
}

async fn on_decode(State(s): State<Shared>, Json(request): Json<DecodeRequest>) -> Response {
    watched(&s, (s.decode)(request))
}

async fn on_release(State(s): State<Shared>, Path(_): Path<u64>) -> StatusCode {
    s.asked.released.fetch_add(1, Ordering::SeqCst);
    StatusCode::NO_CONTENT
}

/// Counts an answer that is dropped before its end.
fn watched(s: &Shared, response: Response) -> Response {
    struct Left(Arc<Asked>, bool);
    impl Drop for Left {
        fn drop(&mut self) {
            if self.1 {
                self.0.left.fetch_add(1, Ordering::SeqCst);
            }
        }
    }
    s.asked.begun.fetch_add(1, Ordering::SeqCst);
    let left = Left(s.asked.clone(), true);
    let (head, body) = response.into_parts();
    let body = async_stream::stream! {
        let (mut left, mut body) = (left, body.into_data_stream());
        while let Some(part) = body.next().await {
            yield part;
        }
        left.1 = false;
    };
    Response::from_parts(head, Body::from_stream(body))
}

pub fn line(event: &impl serde::Serialize) -> String {
    serde_json::to_string(event).unwrap() + "\n"
}

/// What was computed, and has landed.
pub fn landed() -> PrefillReply {
    PrefillReply {
        prompt_tokens: 3,
        cached_tokens: 0,
        first: 1,
        computed_us: 5,
        transfer: Transfer { bytes: 10, path: "tcp".to_owned(), ..Transfer::default() },
    }
}

pub fn well(_: PrefillRequest) -> Response {
    line(&PrefillEvent::Done(landed())).into_response()
}

pub fn refuse(refusal: Refusal) -> Response {
    line(&PrefillEvent::Failed(refusal)).into_response()
}

/// As many tokens as are asked for: 1, 2, 3…
pub fn counts(request: DecodeRequest) -> Response {
    let tokens = (1..=request.max_tokens)
        .map(|n| line(&DecodeEvent::Token { token: n as i32, text: format!("{n} ") }));
    (tokens.collect::<String>() + &line(&DecodeEvent::Done { finish: Finish::Length })).into_response()
}

/// These words, and then nothing: neither more nor an end.
pub fn stuck(words: &str) -> Response {
    let words = words.to_owned();
    let body = async_stream::stream! {
        yield Ok::<_, std::io::Error>(words);
        std::future::pending::<()>().await;
    };
    Body::from_stream(body).into_response()
}

pub struct Gateway {
    pub address: SocketAddr,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    served: JoinHandle<Result<(), GatewayError>>,
}

/// Of these workers.
pub async fn gateway(workers: &[&Fake], edit: impl FnOnce(&mut GatewayArgs)) -> Gateway {
    gateway_with(workers, Box::new(ByPrefix), edit).await
}

pub async fn gateway_with(
    workers: &[&Fake],
    route: Box<dyn Route>,
    edit: impl FnOnce(&mut GatewayArgs),
) -> Gateway {
    let mut list: Vec<String> = workers.iter().map(|fake| fake.worker.http.to_string()).collect();
    if list.is_empty() {
        // Nobody listens there.
        list.push("127.0.0.1:1".to_owned());
    }
    let mut args = GatewayArgs {
        listen: ([127, 0, 0, 1], 0).into(),
        directory: format!("static://{}", list.join(",")).parse().unwrap(),
        queue: 32,
        timeout: 120.0,
        max_timeout: 600.0,
        grace: 60.0,
        stall: 60.0,
        drain: 60.0,
    };
    edit(&mut args);
    let server = Server::start(args, route).await.unwrap();
    let address = server.address;
    let (stop, stopped) = tokio::sync::oneshot::channel();
    let served = tokio::spawn(server.serve(async { _ = stopped.await }));
    Gateway { address, stop: Some(stop), served }
}

impl Gateway {
    pub async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        super::client().post(format!("http://{}{path}", self.address)).json(body).send().await.unwrap()
    }

    pub async fn ask(&self, body: &Value) -> reqwest::Response {
        self.post("/v1/completions", body).await
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        super::client().get(format!("http://{}{path}", self.address)).send().await.unwrap()
    }

    pub async fn metrics(&self) -> String {
        self.get("/metrics").await.text().await.unwrap()
    }

    /// Waits until the metrics have this line.
    pub async fn until_metric(&self, line: &str) {
        let wait = async {
            while !self.metrics().await.lines().any(|has| has == line) {
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            }
        };
        if tokio::time::timeout(super::LONG, wait).await.is_err() {
            panic!("no {line} in {}", self.metrics().await);
        }
    }

    pub fn stop(&mut self) {
        let _ = self.stop.take().expect("once").send(());
    }

    pub async fn ended(self) {
        tokio::time::timeout(super::LONG, self.served).await.expect("in time").unwrap().unwrap();
    }
}

/// Waits until it is so.
pub async fn until(what: &str, is: impl Fn() -> bool) {
    let wait = async {
        while !is() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(super::LONG, wait).await.is_ok(), "{what}");
}

/// An error's status and body.
pub async fn error(response: reqwest::Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let body: Value = response.json().await.expect("an error's body is JSON");
    assert!(body["error"]["message"].is_string(), "{body}");
    (status, body["error"].clone())
}
