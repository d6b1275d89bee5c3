//! What the tests share: processes on loopback, requests to them, and what one process makes of the same prompt.
#![allow(dead_code, reason = "each test file uses a part")]

pub mod fake;

use std::sync::OnceLock;
use std::time::Duration;

use futures_util::StreamExt;
use gateway::cluster::{Cluster, ClusterConfig};
use gateway::load::sse;
use gateway::model::{Model, generate};
use gateway::protocol::{Load, Role, Sampling, Token};
use gateway::worker::text::Text;
use serde_json::{Value, json};

/// Longer than anything takes that is not stuck.
pub const LONG: Duration = Duration::from_secs(300);

pub fn config(prefill: usize, decode: usize, transport: &str) -> ClusterConfig {
    ClusterConfig {
        program: env!("CARGO_BIN_EXE_gateway").into(),
        prefill,
        decode,
        worker: vec![format!("--transport={transport}")],
        gateway: Vec::new(),
        directory: None,
    }
}

pub async fn start(config: ClusterConfig) -> Cluster {
    Cluster::start(config).await.expect("the processes start")
}

pub fn client() -> reqwest::Client {
    reqwest::Client::builder().no_proxy().pool_max_idle_per_host(0).timeout(LONG).build().unwrap()
}

/// One model for all tests of a file: llama.cpp has one backend a process.
pub fn model() -> &'static Model {
    static MODEL: OnceLock<Model> = OnceLock::new();
    MODEL.get_or_init(|| Model::load(None).expect("the model"))
}

/// What one process makes of it.
pub fn alone(text: &str, max_tokens: u32) -> (Vec<Token>, String) {
    let model = model();
    let mut tokens = generate(model, &model.tokens(text), max_tokens, &Sampling::GREEDY).unwrap();
    tokens.retain(|&token| !model.is_end(token));
    let bytes: Vec<u8> = tokens.iter().flat_map(|&token| model.piece(token)).collect();
    (tokens, Text::of(&bytes))
}

pub fn body(prompt: &str, max_tokens: u32) -> Value {
    json!({ "prompt": prompt, "max_tokens": max_tokens, "timeout": 280, "return_token_ids": true })
}

pub fn streamed(prompt: &str, max_tokens: u32) -> Value {
    let mut body = body(prompt, max_tokens);
    body["stream"] = json!(true);
    body["stream_options"] = json!({ "include_usage": true });
    body
}

pub async fn send(cluster: &Cluster, body: &Value) -> reqwest::Response {
    client()
        .post(format!("{}/v1/completions", cluster.url()))
        .json(body)
        .send()
        .await
        .expect("the gateway answers")
}

/// A whole answer: its text, and its usage.
pub async fn whole(response: reqwest::Response) -> (String, Value) {
    let status = response.status();
    let answer: Value = response.json().await.expect("JSON");
    assert!(status.is_success(), "{status}: {answer}");
    (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["usage"].clone())
}

/// A stream that is being read.
pub struct Reading {
    events: std::pin::Pin<Box<dyn futures_util::Stream<Item = reqwest::Result<String>>>>,
    pub text: String,
    pub parts: usize,
}

/// How a stream has ended.
#[derive(Debug)]
pub enum End {
    Done(Value),
    Error(Value),
    Cut(String),
}

impl Reading {
    pub fn new(response: reqwest::Response) -> Self {
        assert!(response.status().is_success(), "{}", response.status());
        Self { events: Box::pin(sse(response.bytes_stream())), text: String::new(), parts: 0 }
    }

    /// Reads until so many parts have come in all.
    pub async fn parts(&mut self, parts: usize) {
        while self.parts < parts {
            let event = self.events.next().await.expect("more").expect("no error");
            let event: Value = serde_json::from_str(&event).expect("JSON");
            self.take(&event);
        }
    }

    fn take(&mut self, event: &Value) {
        if let Some(text) = event["choices"][0]["text"].as_str() {
            self.text.push_str(text);
            self.parts += 1;
        }
    }

    /// Reads to the end.
    pub async fn end(mut self) -> (String, End) {
        let mut usage = Value::Null;
        loop {
            let event = match self.events.next().await {
                Some(Ok(event)) if event == "[DONE]" => return (self.text, End::Done(usage)),
                Some(Ok(event)) => event,
                Some(Err(error)) => return (self.text, End::Cut(error.to_string())),
                None => return (self.text, End::Cut("without [DONE]".to_owned())),
            };
            let event: Value = serde_json::from_str(&event).expect("JSON");
            if event["error"].is_object() {
                return (self.text, End::Error(event["error"].clone()));
            }
            if event["usage"].is_object() {
                usage = event["usage"].clone();
            }
            self.take(&event);
        }
    }

    /// The usage of a stream that ends well.
    pub async fn done(self) -> (String, Value) {
        match self.end().await {
            (text, End::Done(usage)) => (text, usage),
            (text, end) => panic!("{end:?} after {text:?}"),
        }
    }
}

pub async fn load(address: std::net::SocketAddr) -> Load {
    client().get(format!("http://{address}/v1/load")).send().await.unwrap().json().await.unwrap()
}

/// Waits until `is` says so of a worker of that role; gives its place.
pub async fn until(cluster: &Cluster, role: Role, is: impl Fn(&Load) -> bool) -> usize {
    let wait = async {
        loop {
            for (n, (has, process)) in cluster.workers.iter().enumerate() {
                if *has == role && is(&load(process.address).await) {
                    return n;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(LONG, wait).await.expect("in time")
}

/// Waits until no worker holds anything.
pub async fn until_free(cluster: &Cluster, slots: u32) {
    for (role, process) in &cluster.workers {
        let worker: gateway::protocol::Worker = client()
            .get(format!("http://{}/v1/worker", process.address))
            .send()
            .await
            .unwrap()
            .json()
            .await
            .unwrap();
        until(cluster, *role, |load| {
            load.free_blocks == worker.blocks
                && load.free_slots == slots
                && load.computing == 0
                && load.reserved == 0
        })
        .await;
    }
}

pub async fn signal(pid: Option<u32>, signal: &str) {
    let pid = pid.expect("it runs").to_string();
    let status = tokio::process::Command::new("kill").args([signal, &pid]).status().await.unwrap();
    assert!(status.success());
}
