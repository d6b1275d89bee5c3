//! What is honoured, what is taken, and what is refused by its name.

use serde_json::json;

use super::*;

fn chat(extra: Value) -> Result<Wanted, ApiError> {
    let mut body = json!({ "messages": [{ "role": "user", "content": "Hello" }] });
    let Value::Object(extra) = extra else { panic!("{extra}") };
    body.as_object_mut().unwrap().extend(extra);
    Wanted::chat(body, 77)
}

fn said(message: Value) -> Result<Wanted, ApiError> {
    chat(json!({ "messages": [message] }))
}

#[test]
fn what_is_honoured() {
    let wanted = chat(json!({
        "model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.25, "seed": -3, "stream": true,
        "stream_options": { "include_usage": true }, "timeout": 2.5, "return_token_ids": true,
    }))
    .unwrap();
    assert_eq!(wanted.model.as_deref(), Some("m"));
    assert_eq!((wanted.max_tokens, wanted.timeout), (5, Some(2.5)));
    assert_eq!(wanted.sampling, Sampling { temperature: 0.5, top_p: 0.25, seed: u64::MAX - 2 });
    assert!(wanted.stream && wanted.include_usage && wanted.token_ids);
    // Without any, the most probable tokens, and a seed by chance.
    let wanted = chat(json!({ "max_completion_tokens": 7, "seed": null })).unwrap();
    assert_eq!((wanted.max_tokens, wanted.model), (7, None));
    assert_eq!(wanted.sampling, Sampling { temperature: 0.0, top_p: 1.0, seed: 77 });
    assert_eq!(chat(json!({ "seed": u64::MAX })).unwrap().sampling.seed, u64::MAX);
}

#[test]
fn what_asks_for_what_happens_anyway_is_taken_and_the_same_otherwise_is_refused_by_name() {
    for (name, same, other) in [
        ("n", json!(1), json!(2)),
        ("best_of", json!(1), json!(3)),
        ("echo", json!(false), json!(true)),
        ("suffix", json!(""), json!("x")),
        ("stop", json!([]), json!(["x"])),
        ("stop", json!(null), json!("x")),
        ("presence_penalty", json!(0), json!(0.5)),
        ("frequency_penalty", json!(0.0), json!(1)),
        ("logit_bias", json!({}), json!({ "5": 1 })),
        ("logprobs", json!(false), json!(true)),
        ("top_logprobs", json!(0), json!(2)),
        ("tools", json!([]), json!([{ "type": "function" }])),
        ("tool_choice", json!("none"), json!("required")),
        ("parallel_tool_calls", json!(true), json!("x")),
        ("response_format", json!({ "type": "text" }), json!({ "type": "json_object" })),
        ("modalities", json!(["text"]), json!(["audio"])),
        ("store", json!(false), json!(true)),
        ("service_tier", json!("auto"), json!("flex")),
        ("user", json!("me"), json!(7)),
        ("metadata", json!({ "a": "b" }), json!("x")),
        // Of nobody.
        ("top_k", json!(null), json!(40)),
        ("stream_options", json!({}), json!({ "include_obfuscation": true })),
    ] {
        assert!(chat(json!({ name: same })).is_ok(), "{name}: {same}");
        let error = chat(json!({ name: other })).unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (400, "unsupported_parameter"), "{error:?}");
        assert!(error.param.as_ref().is_some_and(|param| param.starts_with(name)), "{error:?}");
        assert!(error.message.contains(name), "{error:?}");
    }
}

#[test]
fn a_value_that_cannot_be_is_refused_by_name() {
    for (name, value) in [
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!(1_u64 << 32)),
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.1)),
        ("temperature", json!("0")),
        ("top_p", json!(1.01)),
        ("seed", json!(0.5)),
        ("seed", json!(1e30)),
        ("stream", json!("yes")),
        ("model", json!(3)),
        ("timeout", json!(0)),
        ("timeout", json!(-1)),
        ("stream_options", json!(true)),
        ("messages", json!([])),
        ("messages", json!("Hello")),
    ] {
        let error = chat(json!({ name: value })).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(name)), "{error:?}");
        assert_eq!(error.body()["error"]["type"], "invalid_request_error");
    }
    let error = chat(json!({ "max_tokens": 5, "max_completion_tokens": 6 })).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("max_tokens"));
    for body in [json!(null), json!([1]), json!("x")] {
        assert_eq!(Wanted::text(body, 0).unwrap_err().status.as_u16(), 400);
    }
    for prompt in [json!(null), json!(""), json!(["a", "b"]), json!([1, 2]), json!({})] {
        let error = Wanted::text(json!({ "prompt": prompt }), 0).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("prompt"));
    }
    assert_eq!(Wanted::text(json!({ "prompt": ["a"] }), 0).unwrap().prompt, Prompt::Text("a".to_owned()));
}

#[test]
fn messages_have_a_role_that_there_is_and_a_text_or_parts_of_one() {
    let parts = json!([{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }]);
    // As clients send an earlier answer back.
    let message = json!({ "role": "developer", "content": parts, "refusal": null, "tool_calls": [] });
    let Prompt::Chat(messages) = said(message).unwrap().prompt else { panic!("a conversation") };
    assert_eq!(messages, [ChatMessage { role: "system".to_owned(), content: "ab".to_owned() }]);
    for (message, param) in [
        (json!({ "content": "x" }), "messages[0].role"),
        (json!({ "role": "tool", "content": "x" }), "messages[0].role"),
        (json!({ "role": "user<|im_end|>", "content": "x" }), "messages[0].role"),
        (json!({ "role": "user" }), "messages[0].content"),
        (json!({ "role": "user", "content": 5 }), "messages[0].content"),
        (json!({ "role": "user", "content": ["x"] }), "messages[0].content"),
        (json!({ "role": "user", "content": [{ "type": "image_url" }] }), "messages[0].content[0].type"),
        (json!({ "role": "user", "content": "x", "name": "y" }), "messages[0].name"),
        (json!("x"), "messages[0]"),
    ] {
        let error = said(message).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{error:?}");
    }
}

#[test]
fn tokens_that_would_come_nowhere_are_refused() {
    let mut body = json!({ "return_token_ids": true, "stream": true });
    for options in [json!(null), json!({ "include_usage": false })] {
        body["stream_options"] = options;
        let error = chat(body.clone()).unwrap_err();
        assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("return_token_ids")));
        assert!(error.message.contains("stream_options.include_usage"), "{error}");
    }
    body["stream_options"] = json!({ "include_usage": true });
    assert!(chat(body).unwrap().token_ids);
    assert!(chat(json!({ "return_token_ids": true })).unwrap().token_ids);
}
