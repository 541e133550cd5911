//! How the service is reached: plain, or over TLS with certificates that are checked.
//!
//! A certificate that is not trusted is a wrong answer, not a missing one: nothing was sent.

use std::{
    error::Error,
    net::{Ipv4Addr, Ipv6Addr, SocketAddr},
    path::{Path, PathBuf},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
    vec,
};

use bytes::Bytes;
use http_body_util::Full;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::{
    client::legacy::{
        Client, Error as ClientError,
        connect::{
            HttpConnector,
            dns::{GaiResolver, Name},
        },
    },
    rt::TokioExecutor,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, pem::PemObject as _},
};
use tower::Service;

/// How long a connection may take.
const CONNECT_WAIT: Duration = Duration::from_secs(10);

pub(super) type Transport = Client<HttpsConnector<HttpConnector<Resolver>>, Full<Bytes>>;

/// Whether what is sent is enciphered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    Plain,
    Tls,
}

impl Scheme {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "http",
            Self::Tls => "https",
        }
    }
}

/// Why a service's certificates cannot be checked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TrustError {
    /// The file cannot be read, or is none.
    #[error("'{path}' holds no certificate that can be trusted: {why}")]
    Authority {
        /// Which.
        path: PathBuf,
        /// Why.
        why: String,
    },
    /// This machine's own authorities cannot be read.
    #[error("this machine's certificate authorities cannot be read: {0}")]
    Machine(String),
}

/// A client that trusts the authorities of this file, or of this machine.
pub(super) fn transport(scheme: Scheme, authority: Option<&Path>) -> Result<Transport, TrustError> {
    let builder = HttpsConnectorBuilder::new();
    let builder = match (scheme, authority) {
        (_, Some(path)) => builder.with_tls_config(trusting(authorities(path)?)?),
        (Scheme::Tls, None) => builder
            .with_provider_and_native_roots(ring::default_provider())
            .map_err(|error| TrustError::Machine(error.to_string()))?,
        // Nobody's certificate is ever looked at.
        (Scheme::Plain, None) => builder.with_tls_config(trusting(RootCertStore::empty())?),
    };
    let mut http = HttpConnector::new_with_resolver(Resolver(GaiResolver::new()));
    http.set_connect_timeout(Some(CONNECT_WAIT));
    http.set_nodelay(true);
    http.enforce_http(false);
    let connector = match scheme {
        Scheme::Plain => builder.https_or_http(),
        Scheme::Tls => builder.https_only(),
    };
    let connector = connector.enable_http1().wrap_connector(http);
    Ok(Client::builder(TokioExecutor::new()).build(connector))
}

fn authorities(path: &Path) -> Result<RootCertStore, TrustError> {
    let wrong = |why: String| TrustError::Authority {
        path: path.to_owned(),
        why,
    };
    let mut trusted = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(path);
    for certificate in certificates.map_err(|error| wrong(error.to_string()))? {
        let certificate = certificate.map_err(|error| wrong(error.to_string()))?;
        let added = trusted.add(certificate);
        added.map_err(|error| wrong(error.to_string()))?;
    }
    if trusted.is_empty() {
        return Err(wrong("there is none".to_owned()));
    }
    Ok(trusted)
}

fn trusting(trusted: RootCertStore) -> Result<ClientConfig, TrustError> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder
        .with_safe_default_protocol_versions()
        .map_err(|error| TrustError::Machine(error.to_string()))?;
    Ok(builder
        .with_root_certificates(trusted)
        .with_no_client_auth())
}

/// What is wrong with the service's certificate, if that is why nothing was sent.
pub(super) fn untrusted(error: &ClientError) -> Option<String> {
    match tls_error(error)? {
        tls @ rustls::Error::InvalidCertificate(_) => Some(tls.to_string()),
        _ => None,
    }
}

/// An I/O error names as its source not what it holds, but the source of that.
fn tls_error<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a rustls::Error> {
    if let Some(tls) = error.downcast_ref() {
        return Some(tls);
    }
    let held = error
        .downcast_ref::<std::io::Error>()
        .and_then(std::io::Error::get_ref);
    match held {
        Some(held) => tls_error(held),
        None => tls_error(error.source()?),
    }
}

/// Names under `localhost` are this machine (RFC 6761); all others are asked for.
#[derive(Debug, Clone)]
pub(super) struct Resolver(GaiResolver);

impl Service<Name> for Resolver {
    type Response = vec::IntoIter<SocketAddr>;
    type Error = std::io::Error;
    type Future = Pin<Box<dyn Future<Output = std::io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, name: Name) -> Self::Future {
        if name.as_str().ends_with(".localhost") {
            let here = vec![
                SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
                SocketAddr::from((Ipv6Addr::LOCALHOST, 0)),
            ];
            return Box::pin(std::future::ready(Ok(here.into_iter())));
        }
        let asked = self.0.call(name);
        Box::pin(async move { Ok(asked.await?.collect::<Vec<_>>().into_iter()) })
    }
}
