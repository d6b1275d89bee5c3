//! The demonstration: a gateway, a prefill and a decode worker on loopback, and one prompt answered.

use std::io::Write;

use clap::Args;
use futures_util::StreamExt;
use gateway::cluster::{Cluster, ClusterConfig};
use gateway::load::sse;
use serde_json::{Value, json};

/// The options of the demonstration.
#[derive(Args, Debug)]
pub(crate) struct DemoArgs {
    /// What is asked
    #[arg(default_value = "In one sentence: why is the sky blue?")]
    prompt: String,
    /// Tokens of the answer, at most
    #[arg(long, default_value_t = 64)]
    max_tokens: u32,
    /// What carries the KV cache: auto, shm, tcp, or verbs:DEVICE
    #[arg(long, default_value = "auto")]
    transport: gateway::worker::memory::Transport,
    /// Keep everything running until it is interrupted
    #[arg(long)]
    stay: bool,
}

pub(crate) async fn run(args: DemoArgs) -> Result<(), Box<dyn std::error::Error>> {
    // Once, and for as long as it takes: the workers have a limited time to start, and would each fetch it.
    tokio::task::spawn_blocking(gateway::fetch::model).await??;
    let cluster = Cluster::start(ClusterConfig {
        program: std::env::current_exe()?,
        prefill: 1,
        decode: 1,
        worker: vec![format!("--transport={}", args.transport)],
        gateway: Vec::new(),
        directory: None,
    })
    .await?;
    for (_, worker) in &cluster.workers {
        eprintln!("{:<9} at {}, process {}", worker.name, worker.address, worker.pid().unwrap_or_default());
    }
    eprintln!("{:<9} at {}", "gateway", cluster.url());
    println!("> {}", args.prompt);
    let body = json!({
        "messages": [{ "role": "user", "content": args.prompt }],
        "max_tokens": args.max_tokens,
        "stream": true,
        "stream_options": { "include_usage": true },
    });
    let url = format!("{}/v1/chat/completions", cluster.url());
    let response = reqwest::Client::builder().no_proxy().build()?.post(url).json(&body).send().await?;
    if !response.status().is_success() {
        return Err(response.text().await?.into());
    }
    let mut events = std::pin::pin!(sse(response.bytes_stream()));
    while let Some(event) = events.next().await {
        let event = event?;
        if event == "[DONE]" {
            break;
        }
        let event: Value = serde_json::from_str(&event)?;
        if let Some(error) = event.get("error") {
            return Err(error["message"].as_str().unwrap_or_default().into());
        }
        if let Some(text) = event["choices"][0]["delta"]["content"].as_str() {
            print!("{text}");
            std::io::stdout().flush()?;
        }
        if event["usage"].is_object() {
            println!("\n\n{}", serde_json::to_string_pretty(&event["usage"])?);
        }
    }
    if args.stay {
        eprintln!("running; interrupt to end");
        tokio::signal::ctrl_c().await?;
    }
    Ok(())
}
