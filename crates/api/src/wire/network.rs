//! What a sandbox may reach and who may reach it, as clients write it (wire contract 1.2, 1.7).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sandhold_platform::{Egress, IpBlock, PublicTraffic};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::refuse;
use crate::error::ApiError;

/// The longest name that a `Host` is replaced by.
const HOST_BYTES_MAX: usize = 255;

/// `network` of a create, and, with the two spellings of the flag, the body of
/// `PUT /sandboxes/{id}/network`.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkBody {
    allow_out: Option<Vec<String>>,
    deny_out: Option<Vec<String>>,
    allow_public_traffic: Option<bool>,
    mask_request_host: Option<String>,
    #[serde(alias = "allow_internet_access")]
    allow_internet_access: Option<bool>,
    dns_servers: Option<Value>,
    egress_proxy: Option<Value>,
    https_ports: Option<Value>,
    rules: Option<Value>,
}

/// What of it the platform is asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Network {
    pub(crate) egress: Egress,
    pub(crate) public_traffic: Option<PublicTraffic>,
    pub(crate) mask_request_host: Option<String>,
}

impl NetworkBody {
    /// Checks it. `allow_internet_access` is the flag that a create has beside it.
    pub(crate) fn network(
        &self,
        allow_internet_access: Option<bool>,
        ranges_max: usize,
    ) -> Result<Network, ApiError> {
        refuse("network.dnsServers", self.dns_servers.as_ref())?;
        refuse("network.egressProxy", self.egress_proxy.as_ref())?;
        refuse("network.httpsPorts", self.https_ports.as_ref())?;
        refuse("network.rules", self.rules.as_ref())?;
        let allowed = ranges("network.allowOut", self.allow_out.as_deref(), ranges_max)?;
        let denied = ranges("network.denyOut", self.deny_out.as_deref(), ranges_max)?;
        let flag = allow_internet_access.or(self.allow_internet_access);
        if let Some(host) = &self.mask_request_host {
            check_host(host)?;
        }
        Ok(Network {
            egress: egress(flag, allowed, denied),
            public_traffic: self.allow_public_traffic.map(|allowed| match allowed {
                true => PublicTraffic::Allowed,
                false => PublicTraffic::TokenRequired,
            }),
            mask_request_host: self.mask_request_host.clone().filter(|h| !h.is_empty()),
        })
    }
}

/// No internet access is the same as denying everything: what is allowed still wins.
fn egress(flag: Option<bool>, allowed: Vec<IpBlock>, mut denied: Vec<IpBlock>) -> Egress {
    if flag == Some(false) {
        denied = EVERYTHING.to_vec();
    }
    let denies_everything = denied.iter().any(|block| *block == EVERYTHING[0]);
    match (allowed.is_empty(), denied.is_empty()) {
        (true, true) => Egress::Internet,
        (true, false) if denies_everything => Egress::Nothing,
        _ => Egress::Filtered { allowed, denied },
    }
}

const EVERYTHING: [IpBlock; 2] = [
    IpBlock {
        address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        prefix_length: 0,
    },
    IpBlock {
        address: IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        prefix_length: 0,
    },
];

fn ranges(
    field: &'static str,
    texts: Option<&[String]>,
    ranges_max: usize,
) -> Result<Vec<IpBlock>, ApiError> {
    let texts = texts.unwrap_or_default();
    if texts.len() > ranges_max {
        let rule = format!("has more than {ranges_max} entries");
        return Err(ApiError::invalid(field, rule));
    }
    let read = |(index, text): (usize, &String)| match parse_block(text) {
        Some(block) => Ok(block),
        None if field == "network.allowOut" && looks_like_a_domain(text) => Err(
            ApiError::NotSupported(format!("{field} with a domain name")),
        ),
        None => Err(ApiError::invalid(
            format!("{field}[{index}]"),
            "must be an IP address or a range such as 203.0.113.0/24",
        )),
    };
    texts.iter().enumerate().map(read).collect()
}

/// An address or a range. Bits beyond the prefix are dropped, as everybody does.
pub(crate) fn parse_block(text: &str) -> Option<IpBlock> {
    let text = text.trim();
    let Some((address, length)) = text.split_once('/') else {
        let address: IpAddr = text.parse().ok()?;
        let prefix_length = if address.is_ipv4() { 32 } else { 128 };
        return Some(IpBlock {
            address,
            prefix_length,
        });
    };
    let address: IpAddr = address.parse().ok()?;
    // `u8::from_str` also takes a sign, which no range has.
    let length_is_digits = length.bytes().all(|b| b.is_ascii_digit());
    let prefix_length: u8 = length_is_digits.then(|| length.parse().ok())??;
    let address = match address {
        IpAddr::V4(v4) if prefix_length <= 32 => {
            let mask = u32::MAX.checked_shl(32 - u32::from(prefix_length));
            IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & mask.unwrap_or(0)))
        }
        IpAddr::V6(v6) if prefix_length <= 128 => {
            let mask = u128::MAX.checked_shl(128 - u32::from(prefix_length));
            IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & mask.unwrap_or(0)))
        }
        _ => return None,
    };
    Some(IpBlock {
        address,
        prefix_length,
    })
}

/// Told apart from a mistyped address by having a letter in its last label.
fn looks_like_a_domain(text: &str) -> bool {
    let name = text
        .strip_prefix("*.")
        .unwrap_or(text)
        .trim_end_matches('.');
    let label = |label: &str| {
        !label.is_empty()
            && label.len() <= 63
            && label
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let last = name.rsplit('.').next().unwrap_or_default();
    name.len() <= 253 && name.split('.').all(label) && last.bytes().any(|b| b.is_ascii_alphabetic())
}

/// A host, with `${PORT}` for the port. What goes into a header must not end it.
fn check_host(host: &str) -> Result<(), ApiError> {
    let plain = host.replace("${PORT}", "0");
    let fits =
        |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'-' | b'_' | b':' | b'[' | b']');
    if host.len() > HOST_BYTES_MAX || !plain.bytes().all(fits) {
        return Err(ApiError::invalid(
            "network.maskRequestHost",
            "must be a host name, with a port or ${PORT} if it has one",
        ));
    }
    Ok(())
}

fn block_text(block: &IpBlock) -> String {
    format!("{}/{}", block.address, block.prefix_length)
}

/// `network` of a sandbox's details.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct NetworkDetail {
    allow_out: Vec<String>,
    deny_out: Vec<String>,
    allow_public_traffic: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_request_host: Option<String>,
}

impl NetworkDetail {
    pub(crate) fn of(egress: &Egress, traffic: PublicTraffic, mask: Option<&str>) -> Self {
        let texts = |blocks: &[IpBlock]| blocks.iter().map(block_text).collect();
        let (allow_out, deny_out) = match egress {
            Egress::Internet => (Vec::new(), Vec::new()),
            Egress::Nothing => (Vec::new(), vec![block_text(&EVERYTHING[0])]),
            Egress::Filtered { allowed, denied } => (texts(allowed), texts(denied)),
        };
        Self {
            allow_out,
            deny_out,
            allow_public_traffic: traffic == PublicTraffic::Allowed,
            mask_request_host: mask.map(str::to_owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::parse_body;

    fn read(body: &str, flag: Option<bool>) -> Result<Network, String> {
        let body: NetworkBody = parse_body(body.as_bytes()).map_err(|e| e.to_string())?;
        body.network(flag, 4).map_err(|refused| refused.to_string())
    }

    fn block(text: &str) -> IpBlock {
        parse_block(text).unwrap()
    }

    #[test]
    fn what_may_be_reached() {
        let filtered = |allowed: &[&str], denied: &[&str]| Egress::Filtered {
            allowed: allowed.iter().map(|t| block(t)).collect(),
            denied: denied.iter().map(|t| block(t)).collect(),
        };
        let cases = [
            ("{}", None, Egress::Internet),
            ("{}", Some(true), Egress::Internet),
            ("{}", Some(false), Egress::Nothing),
            (r#"{"allowInternetAccess":false}"#, None, Egress::Nothing),
            (r#"{"allow_internet_access":false}"#, None, Egress::Nothing),
            (r#"{"denyOut":["0.0.0.0/0"]}"#, None, Egress::Nothing),
            (
                r#"{"denyOut":["8.8.8.8"]}"#,
                None,
                filtered(&[], &["8.8.8.8/32"]),
            ),
            (
                r#"{"allowOut":["1.1.1.1"],"denyOut":["0.0.0.0/0"]}"#,
                None,
                filtered(&["1.1.1.1"], &["0.0.0.0/0"]),
            ),
            (
                r#"{"allowOut":["1.1.1.9/24"]}"#,
                Some(false),
                filtered(&["1.1.1.0/24"], &["0.0.0.0/0", "::/0"]),
            ),
            (
                r#"{"rules":{},"dnsServers":[],"egressProxy":null}"#,
                None,
                Egress::Internet,
            ),
        ];
        for (body, flag, expected) in cases {
            assert_eq!(read(body, flag).unwrap().egress, expected, "{body}");
        }
    }

    #[test]
    fn what_cannot_be_had_is_refused_and_not_ignored() {
        for body in [
            r#"{"allowOut":["example.com"]}"#,
            r#"{"allowOut":["*.example.com"],"denyOut":["0.0.0.0/0"]}"#,
            r#"{"rules":{"example.com":[{"transform":{"headers":{"a":"b"}}}]}}"#,
            r#"{"rules":[{"name":"a"}]}"#,
            r#"{"dnsServers":["8.8.8.8"]}"#,
            r#"{"egressProxy":{"address":"10.0.0.1:1080"}}"#,
            r#"{"httpsPorts":[443]}"#,
        ] {
            let refused = read(body, None).unwrap_err();
            assert!(
                refused.ends_with("is not supported yet"),
                "{body}: {refused}"
            );
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (body, field) in [
            (r#"{"denyOut":["example.com"]}"#, "network.denyOut[0]"),
            (
                r#"{"allowOut":["1.1.1.1","1.1.1.1/33"]}"#,
                "network.allowOut[1]",
            ),
            (r#"{"allowOut":["999.1.1.1"]}"#, "network.allowOut[0]"),
            (r#"{"allowOut":["::1/129"]}"#, "network.allowOut[0]"),
            (r#"{"allowOut":["1.1.1.1/+8"]}"#, "network.allowOut[0]"),
            (r#"{"allowOut":["1","2","3","4","5"]}"#, "network.allowOut"),
            (r#"{"allowOut":"1.1.1.1"}"#, "allowOut"),
            (r#"{"allowPublicTraffic":"no"}"#, "allowPublicTraffic"),
            (
                r#"{"maskRequestHost":"a\r\nX: y"}"#,
                "network.maskRequestHost",
            ),
            (r#"{"maskRequestHost":"a/b"}"#, "network.maskRequestHost"),
        ] {
            let refused = read(body, None).unwrap_err();
            assert!(refused.starts_with(field), "{body}: {refused}");
        }
    }

    #[test]
    fn who_may_reach_it() {
        let network = read(
            r#"{"allowPublicTraffic":false,"maskRequestHost":"localhost:${PORT}"}"#,
            None,
        );
        let network = network.unwrap();
        assert_eq!(network.public_traffic, Some(PublicTraffic::TokenRequired));
        assert_eq!(
            network.mask_request_host.as_deref(),
            Some("localhost:${PORT}")
        );
    }
}
