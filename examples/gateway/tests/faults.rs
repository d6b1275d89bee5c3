//! What goes wrong: too many requests, workers that die or freeze, clients that leave, time that runs out, processes that are asked
//! to stop. Each request ends with its right answer or with a clear error, and nothing stays held.

mod common;

use common::{
    End, Reading, alone, body, client, config, load, send, signal, start, streamed, until, until_free, whole,
};
use gateway::load::prompts::{Random, text};
use gateway::protocol::Role;
use serde_json::{Value, json};

/// Long enough that something can happen in the middle.
const MANY: u32 = 300;

fn prompt(tokens: usize) -> String {
    text(tokens, &mut Random::new(tokens as u64))
}

#[tokio::test]
async fn k7_too_many_requests_wait_in_a_bounded_queue_or_are_refused_with_429() {
    let mut config = config(1, 1, "auto");
    config.worker.push("--slots=1".into());
    config.gateway.push("--queue=2".into());
    let cluster = start(config).await;
    let (_, expected) = alone(&prompt(20), 100);
    let all = futures_util::future::join_all((0..10).map(|_| async {
        let response = send(&cluster, &body(&prompt(20), 100)).await;
        if response.status() == 429 {
            let after: u64 = response.headers()["retry-after"].to_str().unwrap().parse().unwrap();
            assert!((1..=60).contains(&after));
            let error: Value = response.json().await.unwrap();
            assert_eq!(error["error"]["type"], "overloaded");
            return false;
        }
        assert_eq!(whole(response).await.0, expected);
        true
    }))
    .await;
    let answered = all.iter().filter(|&&answered| answered).count();
    assert!((3..10).contains(&answered), "{answered} of 10 were answered");
    until_free(&cluster, 1).await;
}

#[tokio::test]
async fn k5_a_decode_worker_killed_in_mid_answer_costs_the_client_nothing() {
    let mut cluster = start(config(1, 2, "auto")).await;
    let (tokens, expected) = alone(&prompt(40), MANY);
    let mut reading = Reading::new(send(&cluster, &streamed(&prompt(40), MANY)).await);
    reading.parts(5).await;
    let n = until(&cluster, Role::Decode, |load| load.computing > 0).await;
    cluster.workers[n].1.kill().await;
    let (answer, usage) = reading.done().await;
    assert_eq!(answer, expected);
    assert_eq!(usage["landfall"]["token_ids"], json!(tokens));
    assert_eq!(usage["landfall"]["attempts"], 2);
    // It comes back, and both are used again.
    cluster.restart(n).await.unwrap();
    until_free(&cluster, 4).await;
    let metrics =
        client().get(format!("{}/metrics", cluster.url())).send().await.unwrap().text().await.unwrap();
    assert!(metrics.contains("gateway_workers_lost_total{role=\"decode\"} 1"), "{metrics}");
}

#[tokio::test]
async fn k5_a_prefill_worker_killed_in_mid_prompt_is_replaced_by_another() {
    let mut cluster = start(config(2, 1, "auto")).await;
    let long = prompt(800);
    let (tokens, _) = alone(&long, 8);
    let (n, usage) = {
        let request = body(&long, 8);
        let mut sent = std::pin::pin!(async { whole(send(&cluster, &request).await).await });
        let n = tokio::select! {
            n = until(&cluster, Role::Prefill, |load| load.computing > 0) => n,
            (_, usage) = &mut sent => panic!("it was answered before it could be disturbed: {usage}"),
        };
        signal(cluster.workers[n].1.pid(), "-KILL").await;
        (n, sent.await.1)
    };
    assert_eq!(usage["landfall"]["token_ids"], json!(tokens));
    assert_eq!(usage["landfall"]["attempts"], 2);
    cluster.restart(n).await.unwrap();
    // What the dead one had reserved at the decode worker is free.
    until_free(&cluster, 4).await;
}

/// A frozen process holds its connections: that it is silent is found out by the directory.
#[tokio::test]
async fn k5_a_frozen_decode_worker_is_left_for_another() {
    let mut cluster = start(config(1, 2, "auto")).await;
    let (tokens, _) = alone(&prompt(40), MANY);
    let mut reading = Reading::new(send(&cluster, &streamed(&prompt(40), MANY)).await);
    reading.parts(5).await;
    let n = until(&cluster, Role::Decode, |load| load.computing > 0).await;
    signal(cluster.workers[n].1.pid(), "-STOP").await;
    let (_, usage) = reading.done().await;
    assert_eq!(usage["landfall"]["token_ids"], json!(tokens));
    assert_eq!(usage["landfall"]["attempts"], 2);
    cluster.workers[n].1.kill().await;
}

#[tokio::test]
async fn k5_with_nobody_to_go_on_a_stream_ends_with_an_error_and_a_request_with_503() {
    let mut config = config(1, 1, "auto");
    config.gateway.push("--grace=1".into());
    let mut cluster = start(config).await;
    let mut request = streamed(&prompt(40), MANY);
    request["timeout"] = json!(200);
    let mut reading = Reading::new(send(&cluster, &request).await);
    reading.parts(3).await;
    cluster.workers[1].1.kill().await;
    let (_, end) = reading.end().await;
    let End::Error(error) = end else { panic!("{end:?}") };
    assert_eq!(error["type"], "unavailable", "{error}");
    let response = send(&cluster, &body(&prompt(40), 4)).await;
    assert_eq!(response.status(), 503);
    assert!(response.headers().contains_key("retry-after"));
    let error: Value = response.json().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("1 and 0 are there"), "{error}");
    let health = client().get(format!("{}/health", cluster.url())).send().await.unwrap();
    assert_eq!(health.status(), 503);
}

#[tokio::test]
async fn k4_a_client_that_leaves_in_mid_answer_frees_everything_at_once() {
    let cluster = start(config(1, 1, "auto")).await;
    let mut reading = Reading::new(send(&cluster, &streamed(&prompt(40), 900)).await);
    reading.parts(3).await;
    drop(reading);
    until_free(&cluster, 4).await;
    // Not by having come to its end.
    assert_eq!(load(cluster.workers[1].1.address).await.abandoned, 1);
}

#[tokio::test]
async fn k4_a_client_that_leaves_in_mid_prompt_frees_everything_at_once() {
    let cluster = start(config(1, 1, "auto")).await;
    let long = body(&prompt(800), 8);
    let sent = send(&cluster, &long);
    tokio::select! {
        response = sent => panic!("{} before it could be disturbed", response.status()),
        _ = until(&cluster, Role::Decode, |load| load.reserved > 0) => {}
    }
    until_free(&cluster, 4).await;
    assert_eq!(load(cluster.workers[0].1.address).await.abandoned, 1);
}

#[tokio::test]
async fn k5_a_deadline_ends_the_request_with_504_and_frees_everything() {
    let cluster = start(config(1, 1, "auto")).await;
    let mut request = body(&prompt(200), 800);
    request["timeout"] = json!(0.3);
    let response = send(&cluster, &request).await;
    assert_eq!(response.status(), 504);
    let error: Value = response.json().await.unwrap();
    assert_eq!(error["error"]["type"], "deadline", "{error}");
    until_free(&cluster, 4).await;
}

#[tokio::test]
async fn what_nobody_can_serve_is_refused_with_400() {
    let cluster = start(config(1, 1, "auto")).await;
    let too_long = body(&prompt(2000), 8);
    let mut two = body("Hello", 8);
    two["n"] = json!(2);
    // All in one word, and far beyond the context.
    let one_word = body(&"a".repeat(10_000), 8);
    for (request, word) in [
        (too_long, "the limit is 1024"),
        (one_word, "the limit is 1024"),
        (two, "n is not supported, but for 1"),
        (json!({ "prompt": "x", "max_tokens": 0 }), "max_tokens"),
        (json!({}), "prompt"),
    ] {
        let response = send(&cluster, &request).await;
        assert_eq!(response.status(), 400);
        let error: Value = response.json().await.unwrap();
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{error}");
    }
    until_free(&cluster, 4).await;
}

#[tokio::test]
async fn a_decode_worker_that_is_asked_to_stop_finishes_and_the_next_request_goes_elsewhere() {
    let mut cluster = start(config(1, 2, "auto")).await;
    let (_, expected) = alone(&prompt(40), MANY);
    let mut reading = Reading::new(send(&cluster, &streamed(&prompt(40), MANY)).await);
    reading.parts(3).await;
    let n = until(&cluster, Role::Decode, |load| load.computing > 0).await;
    signal(cluster.workers[n].1.pid(), "-TERM").await;
    let (answer, usage) = reading.done().await;
    assert_eq!((answer, &usage["landfall"]["attempts"]), (expected, &json!(1)));
    let drained = usage["landfall"]["decode"].clone();
    assert!(cluster.workers[n].1.wait().await.unwrap().success());
    let (_, usage) = whole(send(&cluster, &body(&prompt(40), 4)).await).await;
    assert_ne!(usage["landfall"]["decode"], drained);
}

#[tokio::test]
async fn a_gateway_that_is_asked_to_stop_finishes_what_it_has() {
    let mut cluster = start(config(1, 1, "auto")).await;
    let (_, expected) = alone(&prompt(40), MANY);
    let mut reading = Reading::new(send(&cluster, &streamed(&prompt(40), MANY)).await);
    reading.parts(3).await;
    signal(cluster.gateway.pid(), "-TERM").await;
    let (answer, _) = reading.done().await;
    assert_eq!(answer, expected);
    assert!(cluster.gateway.wait().await.unwrap().success());
}
