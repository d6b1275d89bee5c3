//! From tokens' bytes to text: a character can be spread over several tokens. A value, without any I/O.

/// Bytes that are no whole character yet.
#[derive(Debug, Default)]
pub struct Text {
    rest: Vec<u8>,
}

impl Text {
    /// The characters that `bytes` completes. What can never become one is replaced, as `String::from_utf8_lossy` does.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.rest.extend_from_slice(bytes);
        let mut whole = String::new();
        loop {
            match std::str::from_utf8(&self.rest) {
                Ok(text) => {
                    whole.push_str(text);
                    self.rest.clear();
                    return whole;
                }
                Err(error) => {
                    let (valid, bad) = (error.valid_up_to(), error.error_len());
                    whole.push_str(&String::from_utf8_lossy(&self.rest[..valid]));
                    let Some(bad) = bad else {
                        self.rest.drain(..valid);
                        return whole;
                    };
                    whole.push(char::REPLACEMENT_CHARACTER);
                    self.rest.drain(..valid + bad);
                }
            }
        }
    }

    /// The text of all of an answer's bytes. A character that it breaks off in is left out.
    pub fn of(bytes: &[u8]) -> String {
        Self::default().push(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_in_parts_comes_once_and_whole() {
        let mut text = Text::default();
        let parts: Vec<String> = "aé🦀z".bytes().map(|byte| text.push(&[byte])).collect();
        assert_eq!(parts, ["a", "", "é", "", "", "", "🦀", "z"]);
    }

    #[test]
    fn what_is_no_character_is_replaced_as_at_once() {
        let bytes = b"a\xf0\x9fb\xffc";
        let mut text = Text::default();
        let whole: String = bytes.iter().map(|&byte| text.push(&[byte])).collect();
        assert_eq!(whole, String::from_utf8_lossy(bytes));
        assert_eq!(whole, Text::of(bytes));
    }

    #[test]
    fn a_character_that_is_not_finished_is_left_out() {
        let crab = "🦀".as_bytes();
        for end in 1..crab.len() {
            assert_eq!(Text::of(&[b"a", &crab[..end]].concat()), "a");
        }
    }
}
