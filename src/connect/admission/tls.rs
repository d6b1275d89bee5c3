//! Certificates: mutual TLS 1.3 on the out-of-band bootstrap. Who the peer is, its certificate says.

use std::fmt::{self, Write};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use sha2::{Digest, Sha256};
use tokio::net::TcpStream;
use tokio_rustls::client::TlsStream as ClientStream;
use tokio_rustls::rustls::client::{Resumption, WebPkiServerVerifier};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::{self, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::server::{NoServerSessionStorage, VerifierBuilderError, WebPkiClientVerifier};
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore, ServerConfig};
use tokio_rustls::server::TlsStream as ServerStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};
use zeroize::Zeroizing;

use super::super::deadline::Deadline;
use super::super::error::{ConnectError, Stage};
use super::PeerAuth;
use super::private_file::{self, SecretFileError};

#[cfg(test)]
mod tests;

/// What the two sides speak inside of TLS: a program that speaks something else under the same authority is refused.
const ALPN: &[u8] = b"landfall/1";
/// Longest file, bytes.
const MAX_FILE: u64 = 1 << 20;

/// Certificates by which both sides of a connect show who they are: mutual TLS, version 1.3.
///
/// Each side has a certificate, its key, and the certificates of the authorities that it trusts. Whoever has a certificate of
/// one of them is let in, or only those that [`peers`](Self::peers) names. The listener's has to be for the name that was
/// dialled, or for [`server_name`](Self::server_name). Sessions are not resumed: each connect is checked anew.
///
/// The bootstrap is encrypted then; data that follows is not. It needs [`Bootstrap::Oob`](crate::kv::Bootstrap::Oob).
///
/// Clones share the certificates: [`reload`](Self::reload) of one is seen by all, an endpoint's configuration included.
#[derive(Clone)]
pub struct Tls {
    shared: Arc<Shared>,
    server_name: Option<ServerName<'static>>,
    peers: Option<Arc<[String]>>,
}

struct Shared {
    cert: PathBuf,
    key: PathBuf,
    roots: PathBuf,
    current: RwLock<Arc<Current>>,
}

struct Current {
    server: Arc<ServerConfig>,
    client: Arc<ClientConfig>,
}

/// Certificates could not be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file of certificates cannot be read.
    #[error("{} cannot be read", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The key's file cannot be read, or others could read or change it.
    #[error(transparent)]
    Key(#[from] SecretFileError),
    /// A file that does not hold what it should.
    #[error("{} is no PEM file with {wanted}", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should hold.
        wanted: &'static str,
    },
    /// The certificate, its key and the authorities do not make a configuration.
    #[error("the certificate in {} cannot be used with its key and the authorities", path.display())]
    Unusable {
        /// The certificate's file.
        path: PathBuf,
        /// Why.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// Not a DNS name, nor an IP address.
    #[error("{got:?} is not a name that a certificate is for; give a DNS name or an IP address")]
    Name {
        /// What was given.
        got: String,
    },
}

impl Tls {
    /// The PEM files of our certificate (with those between it and the authority, if there are any), of its key, and of the
    /// authorities that we trust. Nobody but its owner has access to the key's. Reads them on the calling thread.
    ///
    /// # Errors
    /// Every [`TlsError`] but [`TlsError::Name`].
    pub fn from_files(
        cert: impl AsRef<Path>,
        key: impl AsRef<Path>,
        roots: impl AsRef<Path>,
    ) -> Result<Self, TlsError> {
        let [cert, key, roots] = [cert.as_ref(), key.as_ref(), roots.as_ref()].map(Path::to_owned);
        let current = RwLock::new(Arc::new(Current::read(&cert, &key, &roots)?));
        Ok(Self { shared: Arc::new(Shared { cert, key, roots, current }), server_name: None, peers: None })
    }

    /// The name that a listener's certificate has to be for, whatever address was dialled.
    ///
    /// # Errors
    /// [`TlsError::Name`].
    pub fn server_name(self, name: &str) -> Result<Self, TlsError> {
        Ok(Self { server_name: Some(name_of(name)?), ..self })
    }

    /// Lets in, and connects to, only those whose certificate is for one of these names, as
    /// [`PeerAuth::Certificate`](super::PeerAuth::Certificate) has them. Names are compared as a whole: wildcards have no meaning. Case
    /// makes no difference in a DNS name, nor in the scheme and the host of a URI; in the rest of a URI it does.
    pub fn peers(self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        let names = names.into_iter().map(|name| canonical(&name.into()));
        Self { peers: Some(names.collect()), ..self }
    }

    /// Reads the files again. Handshakes from now on use what they hold; channels that are connected go on. When it fails,
    /// everything stays as it was.
    ///
    /// # Errors
    /// As [`Tls::from_files`].
    pub fn reload(&self) -> Result<(), TlsError> {
        let Shared { cert, key, roots, current } = &*self.shared;
        let read = Current::read(cert, key, roots)?;
        *current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(read);
        Ok(())
    }

    fn current(&self) -> Arc<Current> {
        // Replaced as a whole.
        self.shared.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The client's handshake. `target` is what was dialled, `host:port`.
    pub(crate) async fn connect(
        &self,
        stream: TcpStream,
        target: &str,
        deadline: Deadline,
    ) -> Result<(ClientStream<TcpStream>, PeerAuth), ConnectError> {
        let host = target.rsplit_once(':').map_or(target, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']');
        let name = match &self.server_name {
            Some(name) => name.clone(),
            None => name_of(host).map_err(|_| ConnectError::Address { given: target.to_owned() })?,
        };
        let connector = TlsConnector::from(self.current().client.clone());
        let stream =
            deadline.io(Stage::Tls, connector.connect(name, stream)).await.map_err(|error| match error {
                ConnectError::Tls { source, .. } if is_no_tls(&*source) => ConnectError::AdmissionMismatch {
                    ours: "tls".to_owned(),
                    theirs: "something else".to_owned(),
                },
                other => other,
            })?;
        speaks_landfall(stream.get_ref().1.alpn_protocol())?;
        let identity = self.identity(stream.get_ref().1.peer_certificates())?;
        Ok((stream, identity))
    }

    /// The server's handshake. Whether the peer is one of [`peers`](Self::peers) is for [`Tls::identity`] to say.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        deadline: Deadline,
    ) -> Result<ServerStream<TcpStream>, ConnectError> {
        let acceptor = TlsAcceptor::from(self.current().server.clone());
        let stream = deadline.io(Stage::Tls, acceptor.accept(stream)).await?;
        speaks_landfall(stream.get_ref().1.alpn_protocol())?;
        Ok(stream)
    }

    /// Who has shown these certificates, if it may connect.
    pub(crate) fn identity(&self, chain: Option<&[CertificateDer<'_>]>) -> Result<PeerAuth, ConnectError> {
        // Both sides ask for one, so that it is there.
        let names = chain.and_then(<[_]>::first).map(names_in).unwrap_or_default();
        if let Some(peers) = &self.peers
            && !names.iter().any(|name| peers.contains(&canonical(name)))
        {
            return Err(ConnectError::NotAdmitted { peer: names.join(", "), by: "this side" });
        }
        Ok(PeerAuth::Certificate(names))
    }
}

/// A side that does not say what it speaks passes a TLS handshake (RFC 7301, 3.2).
fn speaks_landfall(protocol: Option<&[u8]>) -> Result<(), ConnectError> {
    match protocol {
        Some(ALPN) => Ok(()),
        _ => Err(ConnectError::AdmissionMismatch {
            ours: "tls".to_owned(),
            theirs: "TLS of another program".to_owned(),
        }),
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("cert", &self.shared.cert)
            .field("roots", &self.shared.roots)
            .field("server_name", &self.server_name)
            .field("peers", &self.peers)
            .finish_non_exhaustive()
    }
}

impl Current {
    fn read(cert: &Path, key: &Path, roots: &Path) -> Result<Self, TlsError> {
        let unusable = |source: Box<dyn std::error::Error + Send + Sync>| TlsError::Unusable {
            path: cert.to_owned(),
            source,
        };
        let chain = certificates(cert)?;
        let mut store = RootCertStore::empty();
        for root in certificates(roots)? {
            store.add(root).map_err(|e| unusable(e.into()))?;
        }
        let (store, provider) = (Arc::new(store), Arc::new(ring::default_provider()));
        let key = private_key(key)?;
        let server = Self::server(&provider, &store, chain.clone(), key.clone_key());
        let client = Self::client(&provider, &store, chain, key);
        Ok(Self { server: Arc::new(server.map_err(unusable)?), client: Arc::new(client.map_err(unusable)?) })
    }

    fn server(
        provider: &Arc<CryptoProvider>,
        roots: &Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<ServerConfig, Box<dyn std::error::Error + Send + Sync>> {
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|e: VerifierBuilderError| e.to_string())?;
        let mut config = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Every connect is checked by the certificates of now.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    fn client(
        provider: &Arc<CryptoProvider>,
        roots: &Arc<RootCertStore>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<ClientConfig, Box<dyn std::error::Error + Send + Sync>> {
        let verifier = WebPkiServerVerifier::builder_with_provider(roots.clone(), provider.clone())
            .build()
            .map_err(|e: VerifierBuilderError| e.to_string())?;
        let mut config = ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(chain, key)?;
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(config)
    }
}

/// What a server answers that does not know TLS is no record of it.
fn is_no_tls(error: &(dyn std::error::Error + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(rustls::Error::InvalidMessage(_)))
}

fn name_of(name: &str) -> Result<ServerName<'static>, TlsError> {
    ServerName::try_from(name.to_owned()).map_err(|_| TlsError::Name { got: name.to_owned() })
}

/// The DNS names and URIs that a certificate is for, or its fingerprint where there are none: whom they are issued to for an IP
/// address alone are not one peer. It has been verified.
fn names_in(cert: &CertificateDer<'_>) -> Vec<String> {
    let names: Vec<String> = match webpki::EndEntityCert::try_from(cert) {
        Ok(cert) => cert.valid_dns_names().chain(cert.valid_uri_names()).map(str::to_owned).collect(),
        Err(_) => Vec::new(),
    };
    if names.is_empty() { vec![fingerprint(cert)] } else { names }
}

fn fingerprint(cert: &[u8]) -> String {
    let mut out = "sha256:".to_owned();
    for byte in Sha256::digest(cert) {
        // Writing to a string does not fail.
        let _ = write!(out, "{byte:02x}");
    }
    out
}

/// A name in the form in which it is compared: RFC 3986, 6.2.2.1, for a URI, which has a colon, and a DNS name has none.
fn canonical(name: &str) -> String {
    let Some((scheme, rest)) = name.split_once(':') else { return name.to_ascii_lowercase() };
    let scheme = scheme.to_ascii_lowercase();
    let Some(rest) = rest.strip_prefix("//") else { return format!("{scheme}:{rest}") };
    let (authority, path) = rest.split_at(rest.find(['/', '?', '#']).unwrap_or(rest.len()));
    // Who comes before the host is no part of it.
    let (user, host) = authority.split_at(authority.rfind('@').map_or(0, |at| at + 1));
    format!("{scheme}://{user}{}{path}", host.to_ascii_lowercase())
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let failed = |source| TlsError::File { path: path.to_owned(), source };
    let pem = || TlsError::Pem { path: path.to_owned(), wanted: "certificates" };
    let (mut bytes, file) = (Vec::new(), std::fs::File::open(path).map_err(failed)?);
    file.take(MAX_FILE).read_to_end(&mut bytes).map_err(failed)?;
    let all = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>().map_err(|_| pem())?;
    if all.is_empty() { Err(pem()) } else { Ok(all) }
}

fn private_key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    let mut file = private_file::open(path)?.take(MAX_FILE);
    // It has room for a key, so that no copy is left behind by growing.
    let mut bytes = Zeroizing::new(Vec::with_capacity(64 << 10));
    file.read_to_end(&mut bytes).map_err(|source| SecretFileError::unreadable(path, source))?;
    PrivateKeyDer::from_pem_slice(&bytes)
        .map_err(|_: pem::Error| TlsError::Pem { path: path.to_owned(), wanted: "a private key" })
}

impl ConnectError {
    /// An error of TLS inside of one of a socket, told as what it is. The other error as it was.
    pub(in crate::connect) fn tls(stage: Stage, error: io::Error) -> Result<Self, io::Error> {
        use rustls::Error as E;
        let Some(found) = error.get_ref().and_then(|e| e.downcast_ref::<E>()) else { return Err(error) };
        Ok(match found {
            E::AlertReceived(_) => Self::RefusedByTls { source: found.clone().into() },
            _ => Self::Tls { stage, source: found.clone().into() },
        })
    }
}
