//! Links by which a client sends files without a key: signed, for one tenant and one hash, until a
//! time.

use hmac::{Hmac, Mac};
use sandhold_platform::FilesHash;
use sandhold_types::{Namespace, Timestamp};
use sha2::Sha256;

use crate::request::Query;

/// How long a link opens something, in milliseconds: longer than a client goes on sending.
const VALID_MS: u64 = 75 * 60 * 1000;

/// Signs links.
#[derive(Clone)]
pub(crate) struct LinkKey([u8; 32]);

fn keyed(key: &[u8; 32]) -> Hmac<Sha256> {
    // HMAC takes keys of every length.
    #[allow(clippy::expect_used)]
    Hmac::<Sha256>::new_from_slice(key).expect("a key of any length")
}

impl std::fmt::Debug for LinkKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("[secret]")
    }
}

impl LinkKey {
    /// A key of its own, made from the one that the store keeps.
    pub(crate) fn derived_from(kept: [u8; 32]) -> Self {
        let mut mac = keyed(&kept);
        mac.update(b"upload links");
        Self(mac.finalize().into_bytes().into())
    }

    fn mac(&self, namespace: &Namespace, files: &FilesHash, until_ms: u64) -> Hmac<Sha256> {
        let mut mac = keyed(&self.0);
        // A namespace holds no line break.
        mac.update(format!("upload\n{namespace}\n{}\n{until_ms}", files.as_str()).as_bytes());
        mac
    }

    /// The query of a link that is good from `now` on for a while.
    pub(crate) fn query(&self, namespace: &Namespace, files: &FilesHash, now: Timestamp) -> String {
        let until_ms = now.unix_ms() + VALID_MS;
        let mac = self.mac(namespace, files, until_ms).finalize().into_bytes();
        let signature = hex::encode(mac);
        format!("tenant={namespace}&until={until_ms}&signature={signature}")
    }

    /// Whose files a link sends; none if it is not ours or too old.
    pub(crate) fn open(
        &self,
        query: &Query,
        files: &FilesHash,
        now: Timestamp,
    ) -> Option<Namespace> {
        let namespace: Namespace = query.first("tenant")?.parse().ok()?;
        let until_ms: u64 = query.first("until")?.parse().ok()?;
        let signature = hex::decode(query.first("signature")?).ok()?;
        let mac = self.mac(&namespace, files, until_ms);
        mac.verify_slice(&signature).ok()?;
        (now.unix_ms() < until_ms).then_some(namespace)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_opens_what_it_was_made_for() {
        // R-P8
        let key = LinkKey::derived_from([7; 32]);
        let (tenant, other): (Namespace, Namespace) = ("t".parse().unwrap(), "u".parse().unwrap());
        let hash = |digit: &str| FilesHash::read(&digit.repeat(64)).unwrap();
        let now = Timestamp::from_unix_ms(1_000_000);
        let text = key.query(&tenant, &hash("a"), now);
        let query = Query::parse(&text);
        assert_eq!(key.open(&query, &hash("a"), now), Some(tenant));
        assert_eq!(key.open(&query, &hash("b"), now), None);
        let late = Timestamp::from_unix_ms(now.unix_ms() + VALID_MS);
        assert_eq!(key.open(&query, &hash("a"), late), None);
        assert_eq!(
            LinkKey::derived_from([8; 32]).open(&query, &hash("a"), now),
            None
        );
        for changed in [
            text.replace("tenant=t", &format!("tenant={other}")),
            text.replace("until=", "until=9"),
            String::from("tenant=t"),
            String::new(),
        ] {
            assert_eq!(key.open(&Query::parse(&changed), &hash("a"), now), None);
        }
    }
}
