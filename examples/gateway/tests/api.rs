//! The API over HTTP, with workers that have no model: statuses, bodies, counts, draining, connections.

mod common;

use std::time::Duration;

use common::fake::{Fake, Gateway, counts, error, gateway, line, until, well};
use common::{End, Reading, body, client, streamed, whole};
use gateway::protocol::{DecodeEvent, Finish};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn pair() -> (Fake, Fake, Gateway) {
    let (prefill, decode) = (Fake::prefill("p", well).await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    (prefill, decode, gateway)
}

#[tokio::test]
async fn what_is_refused_before_it_is_begun_has_its_status_a_body_and_a_count() {
    let (prefill, _decode, gateway) = pair().await;
    let url = |path: &str| format!("http://{}{path}", gateway.address);
    let post = |text: String| {
        client().post(url("/v1/completions")).header("content-type", "application/json").body(text)
    };
    let large = json!({ "prompt": "x".repeat(2 << 20) }).to_string();
    let cases = [
        (post("{".to_owned()), 400, "invalid_request"),
        (post("[]".to_owned()), 400, "invalid_request"),
        (post(json!({ "prompt": "x", "top_k": 5 }).to_string()), 400, "unsupported_parameter"),
        (post(json!({ "prompt": "x", "max_tokens": 0 }).to_string()), 400, "invalid_value"),
        (post(json!({ "prompt": "x", "model": "gpt-4" }).to_string()), 404, "model_not_found"),
        (post(large), 413, "payload_too_large"),
        (client().post(url("/v1/completions")).body("prompt=x"), 415, "unsupported_media_type"),
        (client().get(url("/v1/embeddings")), 404, "not_found"),
        (client().get(url("/v1/completions")), 405, "method_not_allowed"),
    ];
    for (n, (request, status, code)) in cases.into_iter().enumerate() {
        let response = request.send().await.unwrap();
        if status == 405 {
            assert_eq!(response.headers()["allow"], "POST");
        }
        let (has, error) = error(response).await;
        assert_eq!((has, &error["code"]), (status, &json!(code)), "case {n}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let metrics = gateway.metrics().await;
    for line in [
        "gateway_requests_total{outcome=\"invalid_request\"} 2",
        "gateway_requests_total{outcome=\"unsupported_parameter\"} 1",
        "gateway_requests_total{outcome=\"payload_too_large\"} 1",
        "gateway_requests_total{outcome=\"not_found\"} 1",
        "gateway_errors_total{status=\"400\"} 4",
        "gateway_errors_total{status=\"404\"} 2",
        "gateway_errors_total{status=\"405\"} 1",
        "gateway_errors_total{status=\"413\"} 1",
        "gateway_errors_total{status=\"415\"} 1",
    ] {
        assert!(metrics.lines().any(|has| has == line), "{line} in {metrics}");
    }
    assert_eq!(prefill.begun(), 0);
}

#[tokio::test]
async fn the_model_is_the_workers_by_its_id_or_its_name() {
    let (_prefill, _decode, gateway) = pair().await;
    for model in ["fake@1", "fake"] {
        let mut request = body("x", 3);
        request["model"] = json!(model);
        let answer: Value = gateway.ask(&request).await.json().await.unwrap();
        assert_eq!(answer["model"], "fake@1");
    }
    let chat = json!({ "messages": [{ "role": "user", "content": "x" }], "max_tokens": 3 });
    let answer: Value = gateway.post("/v1/chat/completions", &chat).await.json().await.unwrap();
    assert_eq!(answer["choices"][0]["message"]["content"], "1 2 3 ");
}

#[tokio::test]
async fn a_gateway_that_drains_says_so_and_finishes_what_it_has_with_another_worker_if_need_be() {
    let (tell, told) = tokio::sync::watch::channel(0);
    let prefill = Fake::prefill("p", well).await;
    // Each answer waits in its middle for the word, and the first worker then dies under it.
    let act = move |breaks: bool| {
        let told = told.clone();
        move |_| {
            let mut told = told.clone();
            let body = async_stream::stream! {
                yield Ok(line(&DecodeEvent::Token { token: 1, text: "1 ".to_owned() }));
                let _ = told.wait_for(|&word| word > 0).await;
                if breaks {
                    yield Err(std::io::Error::other("the worker is gone"));
                } else {
                    yield Ok(line(&DecodeEvent::Token { token: 2, text: "2 ".to_owned() }));
                    yield Ok(line(&DecodeEvent::Done { finish: Finish::Stop }));
                }
            };
            axum::response::IntoResponse::into_response(axum::body::Body::from_stream(body))
        }
    };
    let (breaks, decode) = (Fake::decode("a", act(true)).await, Fake::decode("b", act(false)).await);
    let mut gateway = gateway(&[&prefill, &breaks, &decode], |_| ()).await;
    let mut reading = Reading::new(gateway.ask(&streamed("x", 5)).await);
    reading.parts(1).await;
    gateway.stop();
    // It listens, and says how it is, to new connections too.
    let health = async {
        loop {
            let response = gateway.get("/health").await;
            let status = response.status();
            let health: Value = response.json().await.unwrap();
            if health["draining"] == true {
                return status;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert_eq!(tokio::time::timeout(common::LONG, health).await.unwrap(), 503);
    let response = gateway.ask(&body("x", 3)).await;
    assert!(response.headers().contains_key("retry-after"));
    let (status, error) = error(response).await;
    assert_eq!((status, &error["type"]), (503, &json!("unavailable")));
    tell.send(1).unwrap();
    let (text, usage) = reading.done().await;
    assert_eq!((&*text, usage["landfall"]["attempts"].as_u64()), ("1 2 ", Some(2)));
    gateway.ended().await;
}

#[tokio::test]
async fn a_gateway_whose_time_to_drain_is_over_ends_what_is_left_with_an_error() {
    let one = line(&DecodeEvent::Token { token: 1, text: "1 ".to_owned() });
    let (prefill, decode) =
        (Fake::prefill("p", well).await, Fake::decode("d", move |_| common::fake::stuck(&one)).await);
    let mut gateway = gateway(&[&prefill, &decode], |args| args.drain = 0.5).await;
    let mut reading = Reading::new(gateway.ask(&streamed("x", 5)).await);
    reading.parts(1).await;
    let request = body("y", 5);
    let url = format!("http://{}/v1/completions", gateway.address);
    let whole = tokio::spawn(client().post(url).json(&request).send());
    until("both are served", || decode.begun() == 2).await;
    gateway.stop();
    let (text, end) = reading.end().await;
    let End::Error(stream) = end else { panic!("{end:?}") };
    assert_eq!((&*text, &stream["type"]), ("1 ", &json!("unavailable")), "{stream}");
    let (status, error) = error(whole.await.unwrap().unwrap()).await;
    assert_eq!((status, &error["message"]), (503, &json!("the gateway is shutting down")));
    gateway.ended().await;
}

#[tokio::test]
async fn a_gateway_whose_workers_are_full_is_healthy_and_says_that_they_are() {
    let (prefill, decode) =
        (Fake::prefill("p", |_| common::fake::stuck("")).await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    let held = body("x", 3);
    let four = futures_util::future::join_all((0..4).map(|_| gateway.ask(&held)));
    let look = async {
        until("all seats are taken", || prefill.begun() == 4).await;
        let response = gateway.get("/health").await;
        let status = response.status();
        (status, response.json::<Value>().await.unwrap())
    };
    let (status, health) = tokio::select! {
        _ = four => panic!("the four were answered"),
        seen = look => seen,
    };
    assert_eq!(status, 200, "{health}");
    assert_eq!((&health["prefill_workers"], &health["prefill_full"]), (&json!(1), &json!(1)));
    assert_eq!((&health["decode_workers"], &health["decode_full"]), (&json!(1), &json!(1)));
}

fn raw(body: &Value) -> String {
    let body = body.to_string();
    format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

#[tokio::test]
async fn requests_that_are_sent_before_the_answers_are_read_are_answered_in_order() {
    let (prefill, _decode, gateway) = pair().await;
    let mut connection = TcpStream::connect(gateway.address).await.unwrap();
    let three = raw(&body("x", 1)) + &raw(&json!({ "prompt": "" })) + &raw(&streamed("x", 2));
    connection.write_all(three.as_bytes()).await.unwrap();
    let mut answers = String::new();
    let read = async {
        while !answers.contains("[DONE]") {
            let mut part = [0; 4096];
            let n = connection.read(&mut part).await.unwrap();
            assert!(n > 0, "{answers}");
            answers.push_str(std::str::from_utf8(&part[..n]).unwrap());
        }
    };
    tokio::time::timeout(common::LONG, read).await.unwrap();
    let statuses: Vec<&str> =
        answers.matches("HTTP/1.1 200").chain(answers.matches("HTTP/1.1 400")).collect();
    assert_eq!(statuses.len(), 3, "{answers}");
    let at = |what: &str| answers.find(what).unwrap_or_else(|| panic!("{what} in {answers}"));
    assert!(at("\"text\":\"1 \"") < at("invalid_value") && at("invalid_value") < at("text/event-stream"));
    assert_eq!(prefill.begun(), 2);
}

/// Nothing else would end it in the time that the test waits: the worker is silent for good, and may be for longer.
#[tokio::test]
async fn k4_a_client_that_leaves_is_noticed_by_its_connection_alone() {
    let prefill = Fake::prefill("p", |_| common::fake::stuck("")).await;
    let decode = Fake::decode("d", counts).await;
    let patience = 10.0 * common::LONG.as_secs_f64();
    let edit = |args: &mut gateway::gateway::GatewayArgs| {
        (args.stall, args.timeout, args.max_timeout) = (patience, patience, patience);
    };
    let gateway = gateway(&[&prefill, &decode], edit).await;
    for mut request in [streamed("x", 2), body("x", 2)] {
        request["timeout"] = json!(patience);
        let begun = prefill.begun();
        let mut connection = TcpStream::connect(gateway.address).await.unwrap();
        connection.write_all(raw(&request).as_bytes()).await.unwrap();
        until("it is asked", || prefill.begun() > begun).await;
        drop(connection);
        gateway.until_metric("gateway_prefilling 0").await;
        until("given up", || prefill.left() == prefill.begun()).await;
    }
}

/// With another request in the pipe the connection is not read, and its end not seen: then it is the deadline that frees, of each
/// in turn.
#[tokio::test]
async fn k4_a_client_that_leaves_with_requests_in_the_pipe_frees_everything_at_their_deadlines() {
    let prefill = Fake::prefill("p", |_| common::fake::stuck("")).await;
    let decode = Fake::decode("d", counts).await;
    let patience = 10.0 * common::LONG.as_secs_f64();
    let gateway = gateway(&[&prefill, &decode], |args| args.stall = patience).await;
    let mut connection = TcpStream::connect(gateway.address).await.unwrap();
    let mut request = body("x", 2);
    request["timeout"] = json!(3);
    connection.write_all((raw(&request) + &raw(&request)).as_bytes()).await.unwrap();
    until("it is asked", || prefill.begun() >= 1).await;
    drop(connection);
    gateway.until_metric("gateway_prefilling 0").await;
    until("given up", || prefill.left() == prefill.begun()).await;
}

#[tokio::test]
async fn a_directory_of_host_names_is_looked_up() {
    let (prefill, decode) = (Fake::prefill("p", well).await, Fake::decode("d", counts).await);
    let list =
        format!("static://localhost:{},localhost:{}", prefill.worker.http.port(), decode.worker.http.port());
    let gateway = gateway(&[], |args| args.directory = list.parse().unwrap()).await;
    assert_eq!(whole(gateway.ask(&body("x", 3)).await).await.0, "1 2 3 ");
}
