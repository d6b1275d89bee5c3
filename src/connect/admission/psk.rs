//! Pre-shared keys: by id, from bytes or from a file that only its owner reads, and replaced without a restart.

use std::fmt;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use zeroize::{Zeroize, Zeroizing};

use super::private_file::{self, SecretFileError};

/// Shortest and longest key, bytes. A key is random: nothing here makes a password strong.
const KEY_BYTES: std::ops::RangeInclusive<usize> = 32..=256;
/// Longest id, bytes.
pub(crate) const MAX_ID: usize = 64;
/// Longest file, bytes.
const MAX_FILE: u64 = 64 << 10;

/// Pre-shared keys, each under an id.
///
/// The first is shown when connecting; a listener admits holders of any of them. So a key is replaced in three steps, none of
/// which refuses anybody: add the new key as the second everywhere, make it the first everywhere, remove the old one.
///
/// Clones share the keys: [`reload`](Self::reload) of one is seen by all, an endpoint's configuration included. Keys are never
/// shown, and are wiped from memory when they are replaced or dropped.
#[derive(Clone)]
pub struct Psk {
    keys: Arc<RwLock<Arc<[Key]>>>,
    file: Option<PathBuf>,
}

/// One key.
#[derive(Clone)]
pub(crate) struct Key {
    pub(crate) id: String,
    pub(super) secret: Zeroizing<Vec<u8>>,
}

/// Pre-shared keys could not be had. It never holds a key, nor a part of one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PskError {
    /// An id that is none.
    #[error("{got:?} is not the id of a key; an id is 1 to 64 visible ASCII characters")]
    Id {
        /// The id.
        got: String,
    },
    /// A key of the wrong length.
    #[error(
        "key {id:?} has {got} bytes, and has to have 32 to 256 random ones; make one with `openssl rand -hex 32`"
    )]
    Length {
        /// Its id.
        id: String,
        /// Its length in bytes.
        got: usize,
    },
    /// Two keys under one id.
    #[error("key {id:?} is there twice; give each key an id of its own")]
    Twice {
        /// The id.
        id: String,
    },
    /// The file cannot be read, or others could read or change it.
    #[error(transparent)]
    File(#[from] SecretFileError),
    /// A line of the file that is none.
    #[error("line {line} of the key file {} is not an id, a space, and hexadecimal digits", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
    },
    /// The file has no key, or is longer than 64 KiB.
    #[error("the key file {} has no key, or is longer than 64 KiB; write one line `ID HEX` for each key", path.display())]
    Empty {
        /// The file.
        path: PathBuf,
    },
    /// The keys did not come from a file.
    #[error("these keys did not come from a file, so that there is nothing to read again")]
    NoFile,
}

impl Psk {
    /// One key, of 32 to 256 random bytes.
    ///
    /// # Errors
    /// [`PskError::Id`] and [`PskError::Length`].
    pub fn new(id: &str, key: &[u8]) -> Result<Self, PskError> {
        Ok(Self::of(vec![Key::new(id, Zeroizing::new(key.to_vec()))?], None))
    }

    /// With a further key, which is admitted, and is not the one that is shown.
    ///
    /// # Errors
    /// As [`Psk::new`], and [`PskError::Twice`].
    pub fn and(self, id: &str, key: &[u8]) -> Result<Self, PskError> {
        let mut keys = self.keys().to_vec();
        push(&mut keys, Key::new(id, Zeroizing::new(key.to_vec()))?)?;
        Ok(Self::of(keys, self.file))
    }

    /// The keys of a file: a line `ID HEX` for each, with at least 64 hexadecimal digits. Empty lines and lines that begin with
    /// `#` are passed over.
    ///
    /// ```sh
    /// (umask 077; echo "2026-11 $(openssl rand -hex 32)" > landfall.psk)
    /// ```
    ///
    /// The file belongs to this user or to root, and nobody else has access; one of root's may be read by its group, as
    /// Kubernetes mounts secrets. Reads the file on the calling thread.
    ///
    /// # Errors
    /// Every [`PskError`] but [`PskError::NoFile`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self, PskError> {
        let path = path.as_ref();
        Ok(Self::of(read(path)?, Some(path.to_owned())))
    }

    /// Reads the file again. Handshakes from now on use its keys; channels that are connected go on. When it fails, the keys
    /// stay as they were.
    ///
    /// # Errors
    /// As [`Psk::from_file`], and [`PskError::NoFile`].
    pub fn reload(&self) -> Result<(), PskError> {
        let keys = read(self.file.as_deref().ok_or(PskError::NoFile)?)?;
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys.into();
        Ok(())
    }

    /// The ids, that of the key which is shown first.
    pub fn ids(&self) -> Vec<String> {
        self.keys().iter().map(|key| key.id.clone()).collect()
    }

    fn of(keys: Vec<Key>, file: Option<PathBuf>) -> Self {
        Self { keys: Arc::new(RwLock::new(keys.into())), file }
    }

    fn keys(&self) -> Arc<[Key]> {
        // Replaced as a whole.
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The key to show.
    pub(super) fn first(&self) -> Key {
        // There is one, by every constructor.
        self.keys()[0].clone()
    }

    /// The key of this id.
    pub(super) fn find(&self, id: &str) -> Option<Key> {
        self.keys().iter().find(|key| key.id == id).cloned()
    }
}

impl fmt::Debug for Psk {
    /// Without the keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Psk").field("ids", &self.ids()).field("file", &self.file).finish_non_exhaustive()
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Key").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Key {
    fn new(id: &str, secret: Zeroizing<Vec<u8>>) -> Result<Self, PskError> {
        if !is_id(id) {
            return Err(PskError::Id { got: id.chars().take(MAX_ID).collect() });
        }
        if !KEY_BYTES.contains(&secret.len()) {
            return Err(PskError::Length { id: id.to_owned(), got: secret.len() });
        }
        Ok(Self { id: id.to_owned(), secret })
    }
}

/// Whether `id` is one: it goes into errors and logs.
pub(super) fn is_id(id: &str) -> bool {
    (1..=MAX_ID).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_graphic())
}

fn push(keys: &mut Vec<Key>, key: Key) -> Result<(), PskError> {
    if keys.iter().any(|other| other.id == key.id) {
        return Err(PskError::Twice { id: key.id });
    }
    keys.push(key);
    Ok(())
}

fn read(path: &Path) -> Result<Vec<Key>, PskError> {
    let file = private_file::open(path)?;
    let mut text = Zeroizing::new(String::with_capacity(MAX_FILE as usize + 1));
    // It has room for all that is read, so that no copy is left behind by growing.
    let read = file.take(MAX_FILE + 1).read_to_string(&mut text);
    read.map_err(|source| SecretFileError::unreadable(path, source))?;
    let mut keys = Vec::new();
    for (line, said) in (1..).zip(text.lines()) {
        let said = said.trim();
        if said.is_empty() || said.starts_with('#') {
            continue;
        }
        let parsed = said
            .split_once(char::is_whitespace)
            // What looks like a key is no id, and no error shows it.
            .filter(|(id, _)| id.len() < KEY_BYTES.start() * 2 || !id.bytes().all(|b| b.is_ascii_hexdigit()))
            .and_then(|(id, hex)| Some((id, unhex(hex.trim())?)));
        let Some((id, secret)) = parsed else { return Err(PskError::Line { path: path.to_owned(), line }) };
        push(&mut keys, Key::new(id, secret)?)?;
    }
    if keys.is_empty() || text.len() as u64 > MAX_FILE {
        return Err(PskError::Empty { path: path.to_owned() });
    }
    Ok(keys)
}

fn unhex(hex: &str) -> Option<Zeroizing<Vec<u8>>> {
    let digits = hex.as_bytes();
    if !digits.len().is_multiple_of(2) {
        return None;
    }
    let mut out = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for pair in digits.chunks_exact(2) {
        let mut byte = 0;
        for &digit in pair {
            byte = byte << 4 | char::from(digit).to_digit(16)? as u8;
        }
        out.push(byte);
        byte.zeroize();
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};

    use super::*;

    /// A file of this process, removed at the end.
    struct Temp(PathBuf);

    impl Temp {
        fn new(name: &str, mode: u32, content: &str) -> Self {
            let path = std::env::temp_dir().join(format!("landfall-psk-{}-{name}", std::process::id()));
            let _ = std::fs::remove_file(&path);
            let mut file =
                std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path).unwrap();
            file.write_all(content.as_bytes()).unwrap();
            file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
            Self(path)
        }
    }

    impl Drop for Temp {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    fn hex(byte: u8) -> String {
        format!("{byte:02x}").repeat(32)
    }

    #[test]
    fn b1_keys_come_from_a_file_and_are_replaced_without_a_restart() {
        let text = format!("# a comment\n\nnew {}\r\n  old\t{}  \n", hex(0xa1), hex(0xb2).to_uppercase());
        let file = Temp::new("rotate", 0o600, &text);
        let psk = Psk::from_file(&file.0).unwrap();
        assert_eq!(psk.ids(), ["new", "old"]);
        assert_eq!(*psk.first().secret, [0xa1; 32]);
        assert_eq!(*psk.find("old").unwrap().secret, [0xb2; 32]);
        let clone = psk.clone();
        std::fs::write(&file.0, format!("third {}", hex(3))).unwrap();
        psk.reload().unwrap();
        assert_eq!(clone.ids(), ["third"]);
        // What cannot be read changes nothing.
        std::fs::write(&file.0, "third zz").unwrap();
        assert!(matches!(psk.reload(), Err(PskError::Line { line: 1, .. })));
        assert_eq!(clone.ids(), ["third"]);
        assert!(matches!(Psk::new("a", &[1; 32]).unwrap().reload(), Err(PskError::NoFile)));
    }

    /// A key in the place of the id is not shown by the error.
    #[test]
    fn b1_columns_in_the_wrong_order_show_no_key() {
        for (line, digits) in [("2026", 64), ("2026", 80), ("2026-11", 64), ("aa", 512)] {
            let key = "5e".repeat(digits / 2);
            let file = Temp::new(&format!("swapped-{digits}-{line}"), 0o600, &format!("{key} {line}"));
            let error = Psk::from_file(&file.0).unwrap_err();
            assert!(matches!(error, PskError::Line { line: 1, .. }), "{error:?}");
            assert!(!format!("{error} {error:?}").contains("5e5e5e"), "{error:?}");
        }
    }

    #[test]
    fn b1_a_file_that_others_can_read_is_refused() {
        let text = format!("a {}", hex(1));
        for mode in [0o604, 0o602, 0o620, 0o644, 0o660, 0o666, 0o601] {
            let file = Temp::new(&format!("mode-{mode:o}"), mode, &text);
            let error = Psk::from_file(&file.0).unwrap_err();
            let refused =
                matches!(error, PskError::File(SecretFileError::Exposed { mode: m, .. }) if m == mode);
            assert!(refused, "{mode:o}: {error}");
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
        assert!(Psk::from_file(&Temp::new("mode-400", 0o400, &text).0).is_ok());
        assert!(matches!(Psk::from_file("/"), Err(PskError::File(_))));
        let missing = Psk::from_file("/nowhere/psk");
        assert!(matches!(missing, Err(PskError::File(SecretFileError::Unreadable { .. }))), "{missing:?}");
    }

    /// Nobody writes to it: whoever opens it as a file waits for ever.
    #[test]
    fn b1_a_pipe_with_a_name_is_no_key_file() {
        let path = std::env::temp_dir().join(format!("landfall-psk-{}-pipe", std::process::id()));
        let _ = std::fs::remove_file(&path);
        let name = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: `name` is a string that ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let refused = Psk::from_file(&path);
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(refused, Err(PskError::File(SecretFileError::Exposed { .. }))), "{refused:?}");
    }

    #[test]
    fn b1_what_is_no_key_is_refused_without_showing_it() {
        let (secret, short) = (hex(0x5e), "5e".repeat(31));
        let cases = [
            ("one-word", secret.clone()),
            ("odd", format!("a {secret}5")),
            ("digits", format!("a {secret}xx")),
            ("short", format!("a {short}")),
            ("long", format!("a {}", "5e".repeat(257))),
            ("twice", format!("a {secret}\na {secret}")),
            ("id", format!("{} {secret}", "i".repeat(65))),
            ("none", "# nothing".to_owned()),
        ];
        for (name, text) in cases {
            let file = Temp::new(name, 0o600, &text);
            let error = Psk::from_file(&file.0).unwrap_err();
            let said = format!("{error} {error:?}");
            assert!(!said.contains("5e5e"), "{name}: {said}");
        }
        for id in ["", "with space", "\u{e9}", "new\nline"] {
            assert!(matches!(Psk::new(id, &[1; 32]), Err(PskError::Id { .. })), "{id:?}");
        }
        assert!(matches!(Psk::new("a", &[1; 31]), Err(PskError::Length { got: 31, .. })));
        let twice = Psk::new("a", &[1; 32]).unwrap().and("a", &[2; 32]);
        assert!(matches!(twice, Err(PskError::Twice { .. })));
    }

    #[test]
    fn b1_debug_shows_no_pre_shared_key() {
        let psk = Psk::new("2026-11", b"the secret of thirty-two bytes..").unwrap();
        let all = format!("{psk:?} {:?} {:#?}", psk.first(), psk);
        // 116, 104, 101: as numbers, too.
        assert!(all.contains("2026-11") && !all.contains("secret of") && !all.contains("116"), "{all}");
    }
}
