//! From tokens' bytes to text: a character can be spread over several tokens. A value, without any I/O.

/// Bytes that are no whole character yet.
#[derive(Debug, Default)]
pub(super) struct Text {
    rest: Vec<u8>,
}

impl Text {
    /// The characters that `bytes` completes. What can never become one is replaced, as `String::from_utf8_lossy` does.
    pub(super) fn push(&mut self, bytes: &[u8]) -> String {
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

    /// What is left at the end.
    pub(super) fn finish(self) -> String {
        String::from_utf8_lossy(&self.rest).into_owned()
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
        assert_eq!(text.finish(), "");
    }

    #[test]
    fn what_is_no_character_is_replaced_as_at_once() {
        let bytes = b"a\xf0\x9fb\xffc\xc3";
        let mut text = Text::default();
        let mut whole: String = bytes.iter().map(|&byte| text.push(&[byte])).collect();
        whole.push_str(&text.finish());
        assert_eq!(whole, String::from_utf8_lossy(bytes));
    }
}
