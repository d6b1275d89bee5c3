//! Who may connect: the arguments of it.

use std::path::PathBuf;

use landfall::connect::{Admission, Psk};

use crate::Error;

macro_rules! admission_usage {
    () => {
        "\
  --psk FILE             who connects has to hold a key of this file, lines of `ID HEX`, and so have we:
                         (umask 077; echo \"2026-11 $(openssl rand -hex 32)\" > FILE)
  --insecure             let anybody connect: without it or a key, --listen takes loopback addresses only
"
    };
}
pub(crate) use admission_usage;

#[derive(Clone, Debug, Default)]
pub(crate) struct AdmissionArgs {
    psk: Option<PathBuf>,
    insecure: bool,
}

impl AdmissionArgs {
    /// Takes `flag`, if it is one of these.
    pub(crate) fn take(
        &mut self,
        flag: &str,
        value: &mut dyn FnMut() -> Result<String, String>,
    ) -> Result<bool, String> {
        match flag {
            "--psk" => self.psk = Some(value()?.into()),
            "--insecure" => self.insecure = true,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        match (&self.psk, self.insecure) {
            (Some(_), true) => Err("--insecure and --psk: with a key, not anybody may connect".to_owned()),
            _ => Ok(()),
        }
    }

    pub(crate) fn admission(&self) -> Result<Admission, Error> {
        Ok(match &self.psk {
            Some(file) => Admission::Psk(Psk::from_file(file)?),
            None if self.insecure => Admission::Open,
            None => Admission::Local,
        })
    }

    /// The same for the peer process. It may have to listen on a device's address, which is no loopback one.
    pub(crate) fn peer(&self) -> Vec<String> {
        match &self.psk {
            Some(file) => vec![format!("--psk={}", file.display())],
            None => vec!["--insecure".to_owned()],
        }
    }
}
