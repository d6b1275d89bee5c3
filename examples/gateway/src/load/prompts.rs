//! Prompts of given lengths, and what is to come of them. The same for the same seed.

/// Numbers that look random: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// From 0 to `limit` − 1.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}

const SUBJECTS: [&str; 8] = [
    "The captain",
    "A small bird",
    "My neighbour",
    "The old machine",
    "Our teacher",
    "A river",
    "The city",
    "Nobody",
];
const VERBS: [&str; 8] =
    ["remembers", "carries", "has lost", "repairs", "describes", "looks for", "is afraid of", "paints"];
const OBJECTS: [&str; 8] = [
    "the blue door",
    "seven letters",
    "a heavy stone",
    "the northern road",
    "the last train",
    "an apple",
    "the harbour",
    "music",
];

/// A text of about so many tokens: sentences of about seven.
pub fn text(tokens: usize, random: &mut Random) -> String {
    let mut words = String::new();
    for _ in 0..tokens.div_ceil(7) {
        let mut of = |list: &[&'static str; 8]| list[random.below(8) as usize];
        let (subject, verb, object) = (of(&SUBJECTS), of(&VERBS), of(&OBJECTS));
        words.push_str(&format!("{subject} {verb} {object}. "));
    }
    words.push_str("And then");
    words
}

/// The prompts of a run: three of each length.
#[derive(Clone, Debug)]
pub struct Prompts {
    texts: Vec<(String, Option<String>)>,
}

impl Prompts {
    pub fn new(lengths: &[usize], seed: u64) -> Self {
        let mut random = Random::new(seed);
        let texts = (0..3).flat_map(|_| lengths).map(|&tokens| (text(tokens, &mut random), None)).collect();
        Self { texts }
    }

    /// Keeps what `answer` says is to come of each.
    ///
    /// # Errors
    /// Those of `answer`.
    pub fn expect<E>(&mut self, mut answer: impl FnMut(&str) -> Result<String, E>) -> Result<(), E> {
        for (text, expected) in &mut self.texts {
            *expected = Some(answer(text)?);
        }
        Ok(())
    }

    /// That of request `number`, and what is to come of it, where it is known.
    pub fn get(&self, number: u64) -> (&str, Option<&str>) {
        let (text, expected) = &self.texts[(number % self.texts.len() as u64) as usize];
        (text, expected.as_deref())
    }
}
