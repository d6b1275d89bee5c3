//! The gateway against workers that are full, stuck, endless, or lie: without a model. A request ends with the right answer or with a
//! clear error, another worker is tried, and the healthy one is not blamed.

mod common;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use common::fake::{Fake, counts, error, gateway, gateway_with, landed, line, refuse, stuck, until, well};
use common::{Reading, body, streamed, whole};
use gateway::gateway::route::{Candidate, Prefix, Route};
use gateway::protocol::{
    DecodeEvent, DecodeRequest, Fault, Finish, PrefillEvent, PrefillReply, Refusal, Transfer,
};
use serde_json::json;

const ANSWER: &str = "1 2 3 ";

fn busy(fault: Fault) -> Refusal {
    Refusal::of(fault, "no room")
}

/// Rounds of fleets of equal workers begin with the first, and equal prompts with the same prefill worker.
#[tokio::test]
async fn k7_a_worker_that_is_full_after_all_is_left_for_another_and_the_time_counts_as_queued() {
    let prefill = Fake::prefill("p", well).await;
    let full = Fake::decode("a", |_| {
        (StatusCode::SERVICE_UNAVAILABLE, axum::Json(busy(Fault::Busy))).into_response()
    });
    let (full, free) = (full.await, Fake::decode("b", counts).await);
    let gateway = gateway(&[&prefill, &full, &free], |_| ()).await;
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((&*text, &usage["landfall"]["decode"]), (ANSWER, &json!("b")));
    assert_eq!(usage["landfall"]["attempts"], 1);
    // It was asked once, and not again at once.
    assert_eq!(full.begun(), 1);
}

#[tokio::test]
async fn k7_a_request_waits_in_the_queue_while_the_only_worker_says_that_it_is_full() {
    let times = AtomicU64::new(0);
    let prefill = Fake::prefill("p", move |request| match times.fetch_add(1, Ordering::SeqCst) {
        0 => refuse(busy(Fault::Busy)),
        1 => refuse(busy(Fault::PeerBusy)),
        _ => well(request),
    });
    let (prefill, decode) = (prefill.await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!(text, ANSWER);
    // Twice it was left alone for 50 ms, and that is not the worker's time.
    assert!(usage["landfall"]["queued_ms"].as_f64().unwrap() >= 100.0, "{usage}");
    assert_eq!(usage["landfall"]["attempts"], 1);
}

#[tokio::test]
async fn k7_a_worker_that_is_always_full_ends_in_504_at_the_deadline_and_is_not_asked_without_pause() {
    let prefill = Fake::prefill("p", |_| refuse(busy(Fault::Busy))).await;
    let decode = Fake::decode("d", counts).await;
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    let mut request = body("x", 3);
    request["timeout"] = json!(5);
    let (status, error) = error(gateway.ask(&request).await).await;
    assert_eq!((status, &error["type"]), (504, &json!("deadline")));
    assert!(error["message"].as_str().unwrap().contains("full"), "{error}");
    // After 50, 100, 200, 400 ms, and from then on 800: never more, however slow this machine is.
    assert!((2..=10).contains(&prefill.begun()), "{}", prefill.begun());
}

#[tokio::test]
async fn the_context_of_both_workers_counts() {
    let prefill = Fake::prefill("p", |request| {
        let needed = 500 + request.max_tokens;
        if needed <= request.decode_context {
            return well(request);
        }
        refuse(Refusal { tokens: Some(needed), ..Refusal::of(Fault::TooLong, "too long") })
    });
    let prefill = prefill.await;
    let small = Fake::decode_that("a", |worker| worker.context = 100, counts).await;
    let large = Fake::decode("b", counts).await;
    let gateway = gateway(&[&prefill, &small, &large], |_| ()).await;
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((&*text, &usage["landfall"]["decode"]), (ANSWER, &json!("b")));
    assert_eq!((small.begun(), usage["landfall"]["attempts"].as_u64()), (0, Some(1)));
    // What even the larger one does not take.
    for tokens in [525, 4000] {
        let (status, error) = error(gateway.ask(&body("x", tokens)).await).await;
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (400, &json!("context_length_exceeded"), &json!("prompt"))
        );
        assert!(error["message"].as_str().unwrap().contains("the limit is 1024"), "{error}");
    }
}

#[tokio::test]
async fn k5_without_workers_a_request_waits_for_the_grace_and_is_then_refused_with_what_is_so() {
    let gateway = gateway(&[], |args| args.grace = 0.2).await;
    let (status, body) = error(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((status, &body["type"]), (503, &json!("unavailable")));
    assert!(body["message"].as_str().unwrap().contains("0 and 0 are there"), "{body}");
    // By now it is known: the refusal does not take its deadline, which is two minutes.
    let request = common::body("x", 3);
    let response = tokio::time::timeout(Duration::from_secs(60), gateway.ask(&request)).await.unwrap();
    assert!(response.headers().contains_key("retry-after"));
    assert_eq!(error(response).await.0, 503);
    gateway.until_metric("gateway_requests_total{outcome=\"unavailable\"} 2").await;
}

#[tokio::test]
async fn k5_a_worker_that_hangs_in_mid_request_does_not_eat_the_deadline() {
    let alive = line(&PrefillEvent::Working);
    let hangs = Fake::prefill("a", move |_| stuck(&alive)).await;
    let silent = Fake::decode("c", |_| stuck("")).await;
    let (prefill, decode) = (Fake::prefill("b", well).await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&hangs, &silent, &prefill, &decode], |args| args.stall = 3.0).await;
    // Whichever prompt: one of them is the hanging worker's first.
    let mut through_both = 0;
    for word in ["a", "b", "c", "d", "e", "f"] {
        let (text, usage) = whole(gateway.ask(&body(word, 3)).await).await;
        assert_eq!(text, ANSWER);
        through_both = through_both.max(usage["landfall"]["attempts"].as_u64().unwrap());
    }
    assert!(hangs.begun() > 0 && silent.begun() > 0 && through_both > 1);
    until("they were left", || hangs.left() == hangs.begun() && silent.left() == silent.begun()).await;
}

/// A slow one that gets on is not stuck.
#[tokio::test]
async fn k5_a_worker_that_works_for_longer_than_it_may_be_silent_is_waited_for() {
    let prefill = Fake::prefill("p", |_| {
        let body = async_stream::stream! {
            for _ in 0..90 {
                tokio::time::sleep(Duration::from_millis(100)).await;
                yield Ok::<_, std::io::Error>(line(&PrefillEvent::Working));
            }
            yield Ok(line(&PrefillEvent::Done(landed())));
        };
        axum::body::Body::from_stream(body).into_response()
    });
    let (prefill, decode) = (prefill.await, Fake::decode("d", counts).await);
    // Eighty times as long as from one sign of life to the next, for a busy machine; and less than all of it.
    let gateway = gateway(&[&prefill, &decode], |args| args.stall = 8.0).await;
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((&*text, usage["landfall"]["attempts"].as_u64()), (ANSWER, Some(1)));
}

fn accuses(_: DecodeRequest) -> Response {
    (StatusCode::BAD_GATEWAY, axum::Json(Refusal::of(Fault::Peer, "nothing has landed"))).into_response()
}

#[tokio::test]
async fn k5_a_prefill_worker_that_lies_does_not_have_the_decode_worker_blamed() {
    // It says that all has landed, and the decode worker says that nothing has; or it says that the decode worker is broken.
    for blames in [false, true] {
        let liar = Fake::prefill("liar", move |request| {
            if blames {
                refuse(Refusal::of(Fault::Peer, "the channel has ended"))
            } else {
                let lie = PrefillReply { prompt_tokens: 99, ..landed() };
                assert_ne!(request.attempt, 0);
                line(&PrefillEvent::Done(lie)).into_response()
            }
        });
        let act = |request: DecodeRequest| {
            if request.prompt_tokens == 99 { accuses(request) } else { counts(request) }
        };
        let (liar, decode) = (liar.await, Fake::decode("decode", act).await);
        let honest = Fake::prefill("honest", well).await;
        let gateway = gateway(&[&liar, &decode, &honest], |_| ()).await;
        for word in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            let (text, usage) = whole(gateway.ask(&body(word, 3)).await).await;
            assert_eq!((&*text, &usage["landfall"]["prefill"]), (ANSWER, &json!("honest")));
        }
        assert!(liar.begun() > 0);
        // The decode worker answers: it was never taken out, and it is not counted as lost.
        let metrics = gateway.metrics().await;
        assert!(!metrics.contains("gateway_workers_lost_total{role=\"decode\"}"), "{metrics}");
    }
}

#[tokio::test]
async fn k5_an_accused_worker_that_does_not_answer_is_taken_out() {
    let dead = Fake::decode_that("a", |worker| worker.epoch += 1000, counts).await;
    // It is there, and in another life than the directory has it in: as after a restart that is not known yet.
    let stale = dead.worker.epoch;
    let prefill = Fake::prefill("p", move |request| {
        if request.decode_epoch == stale {
            refuse(Refusal::of(Fault::Peer, "another life answers"))
        } else {
            well(request)
        }
    });
    let (prefill, decode) = (prefill.await, Fake::decode("b", counts).await);
    let gateway = gateway(&[&prefill, &dead, &decode], |_| ()).await;
    drop(dead);
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((&*text, &usage["landfall"]["decode"]), (ANSWER, &json!("b")));
}

#[tokio::test]
async fn answers_without_an_end_or_a_bound_and_answers_that_are_none_end_the_attempt() {
    let endless = |_: DecodeRequest| {
        let body = async_stream::stream! {
            loop {
                yield Ok::<_, std::io::Error>(vec![b'x'; 1 << 16]);
            }
        };
        axum::body::Body::from_stream(body).into_response()
    };
    let too_many =
        |request: DecodeRequest| counts(DecodeRequest { max_tokens: request.max_tokens + 1, ..request });
    let broad = |_: DecodeRequest| {
        let token = line(&DecodeEvent::Token { token: 1, text: "1".repeat(5000) });
        (token + &line(&DecodeEvent::Done { finish: Finish::Stop })).into_response()
    };
    let too_few = |request: DecodeRequest| {
        let more = DecodeRequest { max_tokens: request.max_tokens - 1, ..request };
        counts(more)
    };
    // The request has minutes.
    let impatient = |_: DecodeRequest| {
        line(&DecodeEvent::Failed { fault: Fault::Deadline, why: "the time was over".to_owned() })
            .into_response()
    };
    let wrong = |_: DecodeRequest| "{\"token\":\"x\"}\n".into_response();
    let cut =
        |_: DecodeRequest| line(&DecodeEvent::Token { token: 1, text: "1 ".to_owned() }).into_response();
    let elsewhere = |_: DecodeRequest| {
        (StatusCode::TEMPORARY_REDIRECT, [("location", "http://127.0.0.1:1/")]).into_response()
    };
    let prefill = Fake::prefill("p", well).await;
    let bad = [
        Fake::decode("a", endless).await,
        Fake::decode("b", too_many).await,
        Fake::decode("c", wrong).await,
        Fake::decode("d", cut).await,
        Fake::decode("e", broad).await,
        Fake::decode("f", too_few).await,
        Fake::decode("g", impatient).await,
    ];
    let (redirects, good) = (Fake::decode("h", elsewhere).await, Fake::decode("i", counts).await);
    for bad in bad.iter().chain([&redirects]) {
        let gateway = gateway(&[&prefill, bad, &good], |_| ()).await;
        let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
        assert_eq!((&*text, &usage["landfall"]["decode"]), (ANSWER, &json!("i")), "{}", bad.worker.name);
        assert_eq!(usage["landfall"]["attempts"], 2);
        // Alone, it ends in an error, and not in half an answer with status 200.
        let gateway = self::gateway(&[&prefill, bad], |_| ()).await;
        let mut request = body("x", 3);
        request["timeout"] = json!(20);
        let (status, error) = error(gateway.ask(&request).await).await;
        assert!([502, 504].contains(&status), "{status}: {error}");
    }
}

/// The one that failed it answers at once, and would fail it four times more before the other has a place.
#[tokio::test]
async fn k5_a_request_that_a_worker_has_failed_waits_for_another_that_is_full() {
    let (tell, told) = tokio::sync::watch::channel(false);
    let prefill = Fake::prefill("p", well).await;
    let broken = Fake::decode("a", |_| {
        line(&DecodeEvent::Failed { fault: Fault::Worker, why: "broken".to_owned() }).into_response()
    });
    // Its only place is taken until the word.
    let act = move |request: DecodeRequest| {
        let (mut told, rest) = (told.clone(), counts(request));
        let body = async_stream::stream! {
            let _ = told.wait_for(|&word| word).await;
            let mut rest = rest.into_body().into_data_stream();
            while let Some(part) = futures_util::StreamExt::next(&mut rest).await {
                yield part;
            }
        };
        axum::body::Body::from_stream(body).into_response()
    };
    let (broken, good) = (broken.await, Fake::decode_that("b", |worker| worker.slots = 1, act).await);
    let gateway = gateway(&[&prefill, &broken, &good], |_| ()).await;
    let (one, two) = (body("x", 3), body("y", 3));
    let second = async {
        until("the first has the place", || good.begun() == 1).await;
        gateway.ask(&two).await
    };
    let (one, two, ()) = tokio::join!(gateway.ask(&one), second, async {
        until("both were failed", || broken.begun() == 2).await;
        gateway.until_metric("gateway_requests_waiting 1").await;
        tell.send(true).unwrap();
    });
    for response in [one, two] {
        let (text, usage) = whole(response).await;
        assert_eq!((&*text, usage["landfall"]["attempts"].as_u64()), (ANSWER, Some(2)));
    }
}

#[tokio::test]
async fn numbers_that_are_lies_are_counted_without_harm() {
    let prefill = Fake::prefill("p", |_| {
        let transfer = Transfer {
            bytes: u64::MAX,
            path: "x\"} 1\nforged{y=\"".to_owned(),
            landed_us: u64::MAX,
            ..Transfer::default()
        };
        line(&PrefillEvent::Done(PrefillReply { prompt_tokens: u32::MAX, transfer, ..landed() }))
            .into_response()
    });
    let (prefill, decode) = (prefill.await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    for _ in 0..2 {
        assert_eq!(whole(gateway.ask(&body("x", 3)).await).await.0, ANSWER);
    }
    let metrics = gateway.metrics().await;
    assert!(metrics.contains(&format!("gateway_kv_bytes_total{{path=\"other\"}} {}", u64::MAX)), "{metrics}");
    assert!(!metrics.contains("forged"), "{metrics}");
}

/// In each phase: what it had is given up at the workers, and it is counted.
#[tokio::test]
async fn k4_a_client_that_leaves_is_noticed_in_each_phase() {
    let waits = Fake::prefill("p", |_| stuck("")).await;
    let decode =
        Fake::decode("d", |_| stuck(&line(&DecodeEvent::Token { token: 1, text: "1 ".to_owned() }))).await;
    let gateway = gateway(&[&waits, &decode], |args| args.queue = 1).await;
    let mut left = 0;
    let hung_up = async |left: &mut u64| {
        *left += 1;
        gateway.until_metric(&format!("gateway_requests_total{{outcome=\"hung_up\"}} {left}")).await;
    };
    // While the prompt is computed.
    let request = body("x", 3);
    tokio::select! {
        response = gateway.ask(&request) => panic!("{}", response.status()),
        () = until("it is asked", || waits.begun() == 1) => {}
    }
    hung_up(&mut left).await;
    until("given up at both", || waits.left() == 1 && decode.released() == 1).await;
    // While it waits for a place: four have them all.
    let (request, held) = (body("x", 3), body("y", 3));
    let four = futures_util::future::join_all((0..4).map(|_| gateway.ask(&held)));
    let fifth = async {
        until("all seats are taken", || waits.begun() == 5).await;
        tokio::select! {
            response = gateway.ask(&request) => panic!("{}", response.status()),
            () = gateway.until_metric("gateway_requests_waiting 1") => {}
        }
        hung_up(&mut left).await;
        gateway.until_metric("gateway_requests_waiting 0").await;
        assert_eq!(waits.begun(), 5);
    };
    tokio::select! {
        _ = four => panic!("the four were answered"),
        () = fifth => {}
    }
    left += 3;
    hung_up(&mut left).await;
    until("given up", || waits.left() == 5 && decode.released() == 5).await;
    // While it is answered.
    let prefill = Fake::prefill("q", well).await;
    let gateway = self::gateway(&[&prefill, &decode], |_| ()).await;
    let mut reading = Reading::new(gateway.ask(&streamed("x", 3)).await);
    reading.parts(1).await;
    drop(reading);
    gateway.until_metric("gateway_requests_total{outcome=\"hung_up\"} 1").await;
    until("given up", || decode.left() == 1).await;
    gateway.until_metric("gateway_decoding 0").await;
}

/// A client that asks for a stream and never reads: the workers are free all the same.
#[tokio::test]
async fn k7_a_client_that_never_reads_holds_no_worker() {
    use tokio::io::AsyncWriteExt;
    let (prefill, decode) = (Fake::prefill("p", well).await, Fake::decode("d", counts).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    let mut silent = tokio::net::TcpStream::connect(gateway.address).await.unwrap();
    let body = streamed("x", 900).to_string();
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    silent.write_all((head + &body).as_bytes()).await.unwrap();
    gateway.until_metric("gateway_requests_total{outcome=\"ok\"} 1").await;
    gateway.until_metric("gateway_decoding 0").await;
    assert_eq!(whole(gateway.ask(&common::body("x", 3)).await).await.0, ANSWER);
}

#[derive(Debug, Default)]
struct Recorded {
    /// What was decided: the prefix, and the worker.
    sent: std::sync::Arc<Mutex<Vec<(Prefix, String)>>>,
}

impl Route for Recorded {
    fn prefill(&self, prefix: Prefix, candidates: &[Candidate<'_>]) -> usize {
        // The last one, whatever the default would do.
        let at = candidates.len() - 1;
        self.sent.lock().unwrap().push((prefix, candidates[at].worker.name.clone()));
        at
    }

    fn decode(&self, _: Prefix, candidates: &[Candidate<'_>]) -> usize {
        candidates.len() - 1
    }
}

#[tokio::test]
async fn prompts_of_one_beginning_go_to_one_prefill_worker_and_others_to_others() {
    let prefills =
        [Fake::prefill("p0", well).await, Fake::prefill("p1", well).await, Fake::prefill("p2", well).await];
    let decode = Fake::decode("d", counts).await;
    let workers = [&prefills[0], &prefills[1], &prefills[2], &decode];
    let gateway = gateway(&workers, |_| ()).await;
    for word in 0..12 {
        // 256 bytes that are the same, and an end that is not.
        let beginning = format!("word-{word} {}", "x".repeat(256));
        for end in 0..3 {
            whole(gateway.ask(&body(&format!("{beginning} {end}"), 3)).await).await;
        }
    }
    let seen: Vec<_> = prefills.iter().map(|fake| fake.asked.prompts.lock().unwrap().clone()).collect();
    assert_eq!(seen.iter().map(std::collections::BTreeMap::len).sum::<usize>(), 12, "{seen:?}");
    assert!(seen.iter().flat_map(|words| words.values()).all(|&times| times == 3), "{seen:?}");
    assert!(seen.iter().filter(|words| !words.is_empty()).count() > 1, "{seen:?}");
}

#[tokio::test]
async fn the_hook_decides_where_a_prompt_goes() {
    let prefills = [Fake::prefill("p0", well).await, Fake::prefill("p1", well).await];
    let decodes = [Fake::decode("d0", counts).await, Fake::decode("d1", counts).await];
    let workers = [&prefills[0], &prefills[1], &decodes[0], &decodes[1]];
    let recorded = Recorded::default();
    let sent = recorded.sent.clone();
    let gateway = gateway_with(&workers, Box::new(recorded), |_| ()).await;
    let long = "x".repeat(300);
    for prompt in [format!("{long}a"), format!("{long}b"), "y".to_owned()] {
        let (_, usage) = whole(gateway.ask(&body(&prompt, 3)).await).await;
        assert_eq!(
            (&usage["landfall"]["prefill"], &usage["landfall"]["decode"]),
            (&json!("p1"), &json!("d1"))
        );
    }
    let sent = sent.lock().unwrap();
    assert!(sent.iter().all(|(_, name)| name == "p1"));
    assert!(sent[0].0 == sent[1].0 && sent[1].0 != sent[2].0);
}

#[tokio::test]
async fn an_answer_that_ends_at_once_is_an_empty_one() {
    let ends = |_: DecodeRequest| line(&DecodeEvent::Done { finish: Finish::Stop }).into_response();
    let (prefill, decode) = (Fake::prefill("p", well).await, Fake::decode("d", ends).await);
    let gateway = gateway(&[&prefill, &decode], |_| ()).await;
    let (text, usage) = whole(gateway.ask(&body("x", 3)).await).await;
    assert_eq!((&*text, usage["completion_tokens"].as_u64()), ("", Some(0)));
    let (text, _) = Reading::new(gateway.ask(&streamed("x", 3)).await).done().await;
    assert_eq!(text, "");
}

/// Two gateways' worth of trouble: an attempt that gives fewer tokens than the client has is not the rest of its answer.
#[tokio::test]
async fn a_second_answer_that_is_another_or_shorter_ends_the_stream_with_an_error() {
    for second in ["{\"token\":{\"token\":7,\"text\":\"7 \"}}\n", "{\"done\":{\"finish\":\"stop\"}}\n"] {
        let prefill = Fake::prefill("p", well).await;
        let times = AtomicU64::new(0);
        let decode = Fake::decode("d", move |_| match times.fetch_add(1, Ordering::SeqCst) {
            0 => {
                let first = line(&DecodeEvent::Token { token: 1, text: "1 ".to_owned() });
                let failed = DecodeEvent::Failed { fault: Fault::Worker, why: "broken".to_owned() };
                (first + &line(&failed)).into_response()
            }
            _ => second.into_response(),
        });
        let decode = decode.await;
        let gateway = gateway(&[&prefill, &decode], |_| ()).await;
        let (text, end) = Reading::new(gateway.ask(&streamed("x", 3)).await).end().await;
        let common::End::Error(error) = end else { panic!("{end:?}") };
        assert_eq!((&*text, &error["type"]), ("1 ", &json!("diverged")), "{error}");
    }
}
