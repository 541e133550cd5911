//! Images in registries. The protocol is the `oci-client` crate's; which registry is asked with
//! what, and that nothing unchecked is believed, is ours.

use std::{
    fmt,
    io::{self, Read},
    sync::Once,
    time::Duration,
};

use futures::TryStreamExt;
use oci_client::{
    Client, Reference,
    client::{ClientConfig, ClientProtocol},
    manifest::OciDescriptor,
    secrets::RegistryAuth,
};
use tokio::runtime::Handle;
use tokio_util::io::{StreamReader, SyncIoBridge};

use super::{
    Blob, Credentials, First, ImageError, Registries, Store,
    document::{DOCUMENT_BYTES_MAX, MANIFEST_TYPES},
    guard::Guard,
    with_causes,
};
use crate::layers::Digest;

/// How long a registry may take to accept a connection.
const CONNECT_MAX: Duration = Duration::from_secs(10);
/// How long it may send nothing.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How long it may take to give a manifest, sign-in included.
const MANIFEST_MAX: Duration = Duration::from_secs(60);
/// How long the longest reference is, in bytes.
const REFERENCE_BYTES_MAX: usize = 512;

/// An image that a registry has.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) store: RegistryStore,
    pub(super) first: First,
}

/// One registry, and what the image is called there.
#[derive(Clone)]
struct Seat {
    host: String,
    client: Client,
    reference: Reference,
    auth: RegistryAuth,
}

/// Who can be asked for the image's content, the one that had its manifest first.
pub(super) struct RegistryStore {
    seats: Vec<Seat>,
    name: String,
    runtime: Handle,
    guard: Option<Guard>,
}

impl fmt::Debug for RegistryStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RegistryStore")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

/// Asks the mirrors of the reference's registry, then the registry itself.
pub(super) async fn find(
    name: &str,
    credentials: Option<&Credentials>,
    registries: &Registries,
) -> Result<Found, ImageError> {
    let reference = read_reference(name)?;
    let registry = reference.registry().to_owned();
    let no_guard = |error: io::Error| ImageError::Registry {
        reference: name.to_owned(),
        problem: error.to_string(),
    };
    let guard = match registries.allowed() {
        Some(allowed) => Some(Guard::open(allowed).await.map_err(no_guard)?),
        None => None,
    };
    let mut seats: Vec<Seat> = Vec::new();
    for host in registries.order(&registry) {
        let own = credentials.filter(|_| host == registry);
        let seat = seat(host, &reference, own, registries, guard.as_ref());
        seats.push(seat.map_err(|problem| no_guard(io::Error::other(problem)))?);
    }
    let mut problems = Vec::new();
    for index in 0..seats.len() {
        match first_document(&seats[index], &reference).await {
            Ok(bytes) => {
                seats.drain(..index);
                let store = RegistryStore {
                    seats,
                    name: name.to_owned(),
                    runtime: Handle::current(),
                    guard,
                };
                let first = First { bytes, name: None };
                return Ok(Found { store, first });
            }
            Err(problem) => problems.push(format!("{}: {problem}", seats[index].host)),
        }
    }
    Err(not_had(name, guard.as_ref(), problems.join("; ")))
}

/// Why nobody gave it: it was refused to ask, or nobody had it.
fn not_had(name: &str, guard: Option<&Guard>, problem: String) -> ImageError {
    let reference = name.to_owned();
    match guard.and_then(Guard::refusal) {
        Some(why) => ImageError::NotAllowed { reference, why },
        None => ImageError::Registry { reference, problem },
    }
}

fn read_reference(name: &str) -> Result<Reference, ImageError> {
    let wrong = |problem: String| ImageError::Reference {
        reference: name.chars().take(100).collect(),
        problem,
    };
    if name.len() > REFERENCE_BYTES_MAX {
        return Err(wrong(format!(
            "it is longer than {REFERENCE_BYTES_MAX} bytes"
        )));
    }
    name.parse()
        .map_err(|error: oci_client::ParseError| wrong(error.to_string()))
}

fn seat(
    host: &str,
    reference: &Reference,
    credentials: Option<&Credentials>,
    registries: &Registries,
    guard: Option<&Guard>,
) -> Result<Seat, String> {
    install_tls();
    let (host, repository) = (host.to_owned(), reference.repository().to_owned());
    let there = match (reference.digest(), reference.tag()) {
        (Some(digest), _) => Reference::with_digest(host.clone(), repository, digest.to_owned()),
        (None, tag) => {
            let tag = tag.unwrap_or("latest").to_owned();
            Reference::with_tag(host.clone(), repository, tag)
        }
    };
    let protocol = match registries.is_insecure(&host) {
        true => ClientProtocol::Http,
        false => ClientProtocol::Https,
    };
    let config = ClientConfig {
        protocol,
        connect_timeout: Some(CONNECT_MAX),
        read_timeout: Some(SILENCE_MAX),
        http_proxy: guard.map(Guard::url),
        https_proxy: guard.map(Guard::url),
        ..ClientConfig::default()
    };
    let auth = match credentials.or_else(|| registries.credentials(&host)) {
        Some(own) => RegistryAuth::Basic(own.username.clone(), own.password.clone()),
        None => RegistryAuth::Anonymous,
    };
    // Not `new`: what that falls back to has no guard.
    let client = Client::try_from(config).map_err(|error| with_causes(&error))?;
    Ok(Seat {
        client,
        reference: there,
        auth,
        host,
    })
}

/// The one provider of cryptography in this process.
fn install_tls() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // Somebody else's is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    });
}

async fn first_document(seat: &Seat, asked: &Reference) -> Result<Vec<u8>, String> {
    let pulled = seat
        .client
        .pull_manifest_raw(&seat.reference, &seat.auth, &MANIFEST_TYPES);
    let pulled = tokio::time::timeout(MANIFEST_MAX, pulled).await;
    let (bytes, _) = match pulled {
        Ok(Ok(pulled)) => pulled,
        Ok(Err(error)) => return Err(with_causes(&error)),
        Err(_) => return Err(format!("no answer within {} s", MANIFEST_MAX.as_secs())),
    };
    if bytes.len() as u64 > DOCUMENT_BYTES_MAX {
        return Err(format!(
            "its manifest is longer than {DOCUMENT_BYTES_MAX} bytes"
        ));
    }
    let found = Digest::of(&bytes).to_string();
    match asked.digest() {
        Some(digest) if digest != found => Err(format!("{digest} was asked for and {found} came")),
        _ => Ok(bytes.to_vec()),
    }
}

impl Store for RegistryStore {
    fn open(&self, blob: &Blob) -> Result<Box<dyn Read + Send>, ImageError> {
        let mut problems = Vec::new();
        for seat in &self.seats {
            match self.runtime.block_on(open_blob(seat, blob)) {
                Ok(reader) => return Ok(reader),
                Err(problem) => problems.push(format!("{}: {problem}", seat.host)),
            }
        }
        let problem = format!("{}: {}", blob.digest, problems.join("; "));
        Err(not_had(&self.name, self.guard.as_ref(), problem))
    }
}

async fn open_blob(seat: &Seat, blob: &Blob) -> Result<Box<dyn Read + Send>, String> {
    let descriptor = OciDescriptor {
        digest: blob.digest.to_string(),
        size: i64::try_from(blob.size).unwrap_or(i64::MAX),
        ..OciDescriptor::default()
    };
    let pulled = seat.client.pull_blob_stream(&seat.reference, &descriptor);
    let sized = pulled.await.map_err(|error| with_causes(&error))?;
    let stream = sized.stream.map_err(io::Error::other);
    let reader = StreamReader::new(Box::pin(stream));
    Ok(Box::new(SyncIoBridge::new(reader)))
}
