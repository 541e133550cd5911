//! Names and addresses that are the same in every sandbox's network, and those that are not.
//!
//! *Inside* every sandbox has the same address, in the link-local range: whatever is in it is out
//! of reach by policy anyway, so it hides nothing that a guest could want, it clashes with no LAN,
//! and it is the address that existing clients of such platforms already expect. Hardware addresses
//! are fixed too, so that a restored guest's idea of its neighbour is right at once.
//!
//! *Uplinks* need an address each, since answers must find their way back. They are taken from the
//! block that is reserved for benchmarking (RFC 2544): it is routed nowhere, and used by no LAN and
//! no VPN, unlike 10/8 or 100.64/10. The host's routing table is the allocator: adding a route that
//! exists is refused, across all nodes of a machine.

use std::net::Ipv4Addr;

use sandhold_types::SandboxId;

/// The sandbox's address.
pub(super) const INNER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 21);
/// The router's address towards the sandbox: its gateway and its resolver.
pub(super) const ROUTER: Ipv4Addr = Ipv4Addr::new(169, 254, 0, 22);
/// The network of these two.
pub(super) const INNER_PREFIX: u8 = 30;
/// The next hop of every uplink; no machine has it, its hardware address is given.
pub(super) const UPLINK_GATEWAY: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Where uplinks get their addresses from.
pub(super) const UPLINK_BLOCK: (Ipv4Addr, u8) = (Ipv4Addr::new(198, 18, 0, 0), 15);

/// The sandbox's interface, in the inner namespace.
pub(super) const INNER_LINK: &str = "eth0";
/// Its other end, in the router namespace.
pub(super) const ROUTER_INNER_LINK: &str = "inner";
/// The way out, in the router namespace.
pub(super) const ROUTER_UPLINK: &str = "uplink";

/// Numbers of the interfaces in their own namespaces, high enough to be free in a fresh one.
pub(super) const INNER_INDEX: u32 = 1001;
pub(super) const ROUTER_INNER_INDEX: u32 = 1001;
pub(super) const ROUTER_UPLINK_INDEX: u32 = 1002;

/// Locally administered hardware addresses.
pub(super) const INNER_MAC: [u8; 6] = [0x02, 0x53, 0x48, 0, 0, 0x01];
pub(super) const ROUTER_INNER_MAC: [u8; 6] = [0x02, 0x53, 0x48, 0, 0, 0x02];
pub(super) const ROUTER_UPLINK_MAC: [u8; 6] = [0x02, 0x53, 0x48, 0, 0, 0x03];
pub(super) const HOST_UPLINK_MAC: [u8; 6] = [0x02, 0x53, 0x48, 0, 0, 0x04];

/// How many addresses are tried for one uplink.
pub(super) const UPLINK_TRIES_MAX: u32 = 32;

/// How all uplinks of a node begin. With the digits that follow it fills the 15 characters of an
/// interface name.
pub(super) fn uplink_prefix(node_tag: &str) -> String {
    format!("sh{node_tag}")
}

/// The host's end of a sandbox's uplink.
pub(super) fn uplink_name(node_tag: &str, id: &SandboxId) -> String {
    // Identifiers are random, so their beginning is as good as a hash of them.
    format!("{}{}", uplink_prefix(node_tag), &id.as_str()[..7])
}

/// The address to try for a sandbox's uplink in the given attempt.
pub(super) fn uplink_candidate(id: &SandboxId, attempt: u32) -> Ipv4Addr {
    // FNV-1a: spreads, needs no key; a clash only costs another attempt.
    let hash = id
        .as_str()
        .bytes()
        .chain(attempt.to_le_bytes())
        .fold(0x811c_9dc5_u32, |hash, byte| {
            (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
        });
    let (network, length) = UPLINK_BLOCK;
    let hosts = u32::MAX >> length;
    // The first 16 are kept for gateways.
    let host = 16 + (hash % (hosts - 16));
    Ipv4Addr::from_bits(network.to_bits() | host)
}

#[cfg(test)]
mod tests {
    use sandhold_types::SeededEntropy;

    use super::*;

    #[test]
    fn uplink_names_fit_and_candidates_stay_in_their_block() {
        let entropy = SeededEntropy::new(3);
        for attempt in 0..1000 {
            let id = SandboxId::generate(&entropy);
            assert_eq!(uplink_name("ab12cd", &id).len(), 15);
            let candidate = uplink_candidate(&id, attempt);
            let octets = candidate.octets();
            assert!(
                octets[0] == 198 && matches!(octets[1], 18 | 19),
                "{candidate}"
            );
            assert_ne!(candidate, UPLINK_GATEWAY);
        }
    }
}
