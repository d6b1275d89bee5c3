//! Who may connect: the arguments of it.

use std::path::PathBuf;

use landfall::connect::{Admission, Psk};

use crate::Error;

macro_rules! admission_usage {
    () => {
        "\
  --psk FILE             who connects has to hold a key of this file, lines of `ID HEX`, and so have we:
                         (umask 077; echo \"2026-11 $(openssl rand -hex 32)\" > FILE)
  --tls-cert FILE        who connects has to have a certificate of the authorities in --tls-ca, and so have we: PEM files of
  --tls-key FILE         our certificate and its key. Out of band only, and built with --features tls
  --tls-ca FILE
  --tls-name NAME        the name in the listener's certificate          [the host that is dialled]
  --insecure             let anybody connect: without it, a key or certificates, --listen takes loopback addresses only
"
    };
}
pub(crate) use admission_usage;

#[derive(Clone, Debug, Default)]
pub(crate) struct AdmissionArgs {
    psk: Option<PathBuf>,
    cert: Option<PathBuf>,
    key: Option<PathBuf>,
    ca: Option<PathBuf>,
    name: Option<String>,
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
            "--tls-cert" => self.cert = Some(value()?.into()),
            "--tls-key" => self.key = Some(value()?.into()),
            "--tls-ca" => self.ca = Some(value()?.into()),
            "--tls-name" => self.name = Some(value()?),
            "--insecure" => self.insecure = true,
            _ => return Ok(false),
        }
        Ok(true)
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        let files = [&self.cert, &self.key, &self.ca];
        let tls = files.iter().any(|file| file.is_some()) || self.name.is_some();
        if tls && files.iter().any(|file| file.is_none()) {
            return Err("TLS takes all of --tls-cert, --tls-key and --tls-ca".to_owned());
        }
        if usize::from(self.psk.is_some()) + usize::from(tls) + usize::from(self.insecure) > 1 {
            return Err("--psk, --tls-… and --insecure: choose one of them".to_owned());
        }
        Ok(())
    }

    pub(crate) fn admission(&self) -> Result<Admission, Error> {
        if let (Some(cert), Some(key), Some(ca)) = (&self.cert, &self.key, &self.ca) {
            return self.tls(cert, key, ca);
        }
        Ok(match &self.psk {
            Some(file) => Admission::Psk(Psk::from_file(file)?),
            None if self.insecure => Admission::Open,
            None => Admission::Local,
        })
    }

    #[cfg(feature = "tls")]
    fn tls(&self, cert: &PathBuf, key: &PathBuf, ca: &PathBuf) -> Result<Admission, Error> {
        let tls = landfall::connect::Tls::from_files(cert, key, ca)?;
        Ok(Admission::Tls(match &self.name {
            Some(name) => tls.server_name(name)?,
            None => tls,
        }))
    }

    #[cfg(not(feature = "tls"))]
    fn tls(&self, _cert: &PathBuf, _key: &PathBuf, _ca: &PathBuf) -> Result<Admission, Error> {
        Err("this program was built without TLS: build it with --features tls".into())
    }

    /// The same for the peer process. It may have to listen on a device's address, which is no loopback one.
    pub(crate) fn peer(&self) -> Vec<String> {
        let mut line = Vec::new();
        for (flag, file) in
            [("psk", &self.psk), ("tls-cert", &self.cert), ("tls-key", &self.key), ("tls-ca", &self.ca)]
        {
            line.extend(file.as_ref().map(|file| format!("--{flag}={}", file.display())));
        }
        line.extend(self.name.as_ref().map(|name| format!("--tls-name={name}")));
        if line.is_empty() {
            line.push("--insecure".to_owned());
        }
        line
    }
}
