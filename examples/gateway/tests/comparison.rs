//! K1 with a real model: what goes through prefill, the channel and decode is what one process computes, token for token.

mod common;

use common::{alone, body, config, send, start, until_free, whole};
use gateway::load::prompts::{Random, text};

/// Of 20 lengths, from a few tokens to most of the context: within a chunk, at its edges, over several; within a block of the pool,
/// and over many.
const LENGTHS: [usize; 20] =
    [1, 7, 14, 21, 35, 49, 56, 63, 70, 77, 91, 120, 150, 190, 240, 300, 380, 470, 560, 700];
const TOKENS: u32 = 24;

async fn twenty_prompts(transport: &str) {
    let cluster = start(config(2, 2, transport)).await;
    let mut random = Random::new(20);
    let (mut bytes, mut prefills) = (0, std::collections::BTreeSet::new());
    for length in LENGTHS {
        let prompt = text(length, &mut random);
        let (tokens, expected) = alone(&prompt, TOKENS);
        let (answer, usage) = whole(send(&cluster, &body(&prompt, TOKENS)).await).await;
        let under = &usage["landfall"];
        assert_eq!(under["token_ids"], serde_json::json!(tokens), "{length} tokens or so, {usage}");
        assert_eq!(answer, expected);
        assert_eq!(under["kv"]["path"], transport);
        assert_eq!(under["attempts"], 1);
        bytes += under["kv"]["bytes"].as_u64().unwrap();
        prefills.insert(under["prefill"].to_string());
    }
    // It did move, and routing did not send it all to one worker.
    assert!(bytes > 1_000_000, "{bytes}");
    assert_eq!(prefills.len(), 2);
    until_free(&cluster, 4).await;
}

#[tokio::test]
async fn k1_twenty_prompts_token_for_token_in_shared_memory() {
    twenty_prompts("shm").await;
}

#[tokio::test]
async fn k1_twenty_prompts_token_for_token_over_tcp() {
    twenty_prompts("tcp").await;
}

/// A prompt that begins as an earlier one did goes to the worker that has the beginning, and its answer has the same tokens.
#[tokio::test]
async fn a_prompt_that_begins_alike_is_computed_from_where_it_differs() {
    let cluster = start(config(2, 1, "auto")).await;
    let beginning = text(300, &mut Random::new(3));
    let mut cached = Vec::new();
    for end in ["a bird sang", "a door closed", "it began to rain"] {
        let prompt = format!("{beginning} {end}");
        let (tokens, _) = alone(&prompt, TOKENS);
        let (_, usage) = whole(send(&cluster, &body(&prompt, TOKENS)).await).await;
        assert_eq!(usage["landfall"]["token_ids"], serde_json::json!(tokens));
        cached.push(usage["landfall"]["cached_tokens"].as_u64().unwrap());
    }
    assert_eq!(cached[0], 0);
    assert!(cached[1] >= 128 && cached[2] >= 128, "{cached:?}");
}

/// Many at once, of which each gets its own answer: what is computed beside it changes nothing.
#[tokio::test]
async fn sixteen_at_once_get_the_answers_that_each_gets_alone() {
    let cluster = start(config(2, 2, "auto")).await;
    let mut random = Random::new(16);
    let prompts: Vec<String> = (0..16).map(|n| text(10 + 9 * n, &mut random)).collect();
    let answers = futures_util::future::join_all(prompts.iter().map(|prompt| async {
        let (_, usage) = whole(send(&cluster, &body(prompt, TOKENS)).await).await;
        usage["landfall"]["token_ids"].clone()
    }))
    .await;
    for (prompt, answer) in prompts.iter().zip(answers) {
        assert_eq!(answer, serde_json::json!(alone(prompt, TOKENS).0));
    }
    until_free(&cluster, 4).await;
}
