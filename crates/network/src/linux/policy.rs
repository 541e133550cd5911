//! What a sandbox may reach, as rules of the kernel's packet filter. Pure: policy in, JSON out.
//!
//! ```text
//!   guest ─▶ [router: forward]  blocked? drop · allowed? accept · denied? drop · else by policy
//!         ─▶ [router: input]    only the resolver, and answers to what was dialled
//!         ─▶ [host: input]      drop: no address of the host, whichever it is
//!         ─▶ [host: forward]    blocked even after the host's own address translation? drop
//! ```
//!
//! The two layers do not trust each other: the router's rules hold without the host's, and the
//! host's hold for an address that only the host knows to be its own.

use std::net::{IpAddr, Ipv4Addr};

use sandhold_platform::{Egress, IpBlock};
use serde_json::{Value, json};

use super::address;

/// Out of reach for every sandbox whatever its policy says (R-P2): this network, private ranges,
/// carrier-grade NAT, loopback, link-local with the metadata address, protocol assignments,
/// documentation, benchmarking (our own uplinks), multicast, reserved and broadcast.
pub(super) const BLOCKED: [(Ipv4Addr, u8); 15] = [
    (Ipv4Addr::new(0, 0, 0, 0), 8),
    (Ipv4Addr::new(10, 0, 0, 0), 8),
    (Ipv4Addr::new(100, 64, 0, 0), 10),
    (Ipv4Addr::new(127, 0, 0, 0), 8),
    (Ipv4Addr::new(169, 254, 0, 0), 16),
    (Ipv4Addr::new(172, 16, 0, 0), 12),
    (Ipv4Addr::new(192, 0, 0, 0), 24),
    (Ipv4Addr::new(192, 0, 2, 0), 24),
    (Ipv4Addr::new(192, 88, 99, 0), 24),
    (Ipv4Addr::new(192, 168, 0, 0), 16),
    (Ipv4Addr::new(198, 18, 0, 0), 15),
    (Ipv4Addr::new(198, 51, 100, 0), 24),
    (Ipv4Addr::new(203, 0, 113, 0), 24),
    (Ipv4Addr::new(224, 0, 0, 0), 4),
    (Ipv4Addr::new(240, 0, 0, 0), 4),
];

/// Whether an address is out of reach for whoever acts for a tenant.
#[must_use]
pub fn is_out_of_reach(address: Ipv4Addr) -> bool {
    let address = address.to_bits();
    let mut blocked = BLOCKED.iter();
    blocked.any(|(base, length)| (address ^ base.to_bits()) >> (32 - length) == 0)
}

/// Connections and other flows that one sandbox may have open to the outside.
const FLOWS_MAX: u32 = 2000;

const FAMILY: &str = "inet";
const ROUTER_TABLE: &str = "sandbox";

/// Whether a policy needs a way out at all.
pub(super) fn needs_uplink(egress: &Egress) -> bool {
    match egress {
        Egress::Internet => true,
        Egress::Nothing => false,
        // Everything denied and nothing allowed is still a policy that can change live; the rules
        // decide.
        Egress::Filtered { .. } => true,
    }
}

/// The whole ruleset of a router namespace; replaces what is there in one transaction.
pub(super) fn router_rules(egress: &Egress) -> Value {
    let mut rules = Rules::new(ROUTER_TABLE);
    rules.command(json!({"flush": {"ruleset": null}}));
    rules.table();
    rules.set("blocked", BLOCKED.map(|(a, p)| prefix(a, p)).to_vec());
    rules.filter_chain("input", "input", 0, "drop");
    rules.filter_chain("forward", "forward", 0, "drop");
    rules.rule("input", vec![established(), accept()]);
    if let Some((allowed, denied)) = reachable(egress) {
        rules.set("allowed", allowed);
        rules.set("denied", denied);
        for protocol in ["udp", "tcp"] {
            let port = equals(payload(protocol, "dport"), json!(53));
            rules.rule(
                "input",
                vec![from(address::ROUTER_INNER_LINK), port, accept()],
            );
        }
        let out = || {
            vec![
                from(address::ROUTER_INNER_LINK),
                to(address::ROUTER_UPLINK),
                equals(payload("ip", "saddr"), json!(address::INNER.to_string())),
            ]
        };
        // Never by connection state in this direction: a change of policy cuts what is open.
        let steps = [
            ("blocked", drop()),
            ("allowed", accept()),
            ("denied", drop()),
        ];
        // Each flow takes a place in the machine's own table of connections, which all share.
        let mut crowded = out();
        crowded.extend([is_new(), over(FLOWS_MAX), drop()]);
        rules.rule("forward", crowded);
        for (set, verdict) in steps {
            let mut rule = out();
            rule.extend([is_in(set), verdict]);
            rules.rule("forward", rule);
        }
        let mut rest = out();
        rest.push(accept());
        rules.rule("forward", rest);
        let back = vec![from(address::ROUTER_UPLINK), established(), accept()];
        rules.rule("forward", back);
        rules.nat_chain();
        let masquerade = vec![to(address::ROUTER_UPLINK), json!({"masquerade": null})];
        rules.rule("nat", masquerade);
    }
    rules.finish()
}

/// The host's table of one node, for uplinks whose names begin with `uplinks`.
pub(super) fn host_rules(table: &str, uplinks: &str) -> Value {
    let any = format!("{uplinks}*");
    let mut rules = Rules::new(table);
    // Adding before deleting makes the deletion good whether or not it was there.
    rules.table();
    rules.command(json!({"delete": {"table": {"family": FAMILY, "name": table}}}));
    rules.table();
    rules.set("blocked", BLOCKED.map(|(a, p)| prefix(a, p)).to_vec());
    rules.filter_chain("input", "input", -10, "accept");
    rules.rule("input", vec![from(&any), drop()]);
    rules.filter_chain("forward", "forward", -10, "accept");
    let ipv6 =
        json!({"match": {"op": "==", "left": {"meta": {"key": "nfproto"}}, "right": "ipv6"}});
    rules.rule("forward", vec![from(&any), ipv6, drop()]);
    rules.rule("forward", vec![from(&any), to(&any), drop()]);
    rules.rule("forward", vec![from(&any), is_in("blocked"), drop()]);
    rules.rule("forward", vec![to(&any), established(), accept()]);
    rules.rule("forward", vec![to(&any), drop()]);
    rules.nat_chain();
    let (network, length) = address::UPLINK_BLOCK;
    let ours = equals(payload("ip", "saddr"), prefix(network, length));
    rules.rule("nat", vec![ours, json!({"masquerade": null})]);
    rules.finish()
}

/// Deletes the host's table, there or not.
pub(super) fn host_removal(table: &str) -> Value {
    let mut rules = Rules::new(table);
    rules.table();
    rules.command(json!({"delete": {"table": {"family": FAMILY, "name": table}}}));
    rules.finish()
}

/// What wins and what loses against it; `None` if nothing may be reached.
fn reachable(egress: &Egress) -> Option<(Vec<Value>, Vec<Value>)> {
    match egress {
        Egress::Nothing => None,
        Egress::Internet => Some((Vec::new(), Vec::new())),
        Egress::Filtered { allowed, denied } => Some((elements(allowed), elements(denied))),
    }
}

/// Blocks of version 4; there is no version 6 in a sandbox's network, so those have no effect.
fn elements(blocks: &[IpBlock]) -> Vec<Value> {
    let version_4 = |block: &IpBlock| match block.address {
        IpAddr::V4(address) => Some(prefix(address, block.prefix_length.min(32))),
        IpAddr::V6(_) => None,
    };
    blocks.iter().filter_map(version_4).collect()
}

/// A range, with the bits after the prefix cleared as the packet filter demands.
fn prefix(address: Ipv4Addr, length: u8) -> Value {
    let mask = u32::MAX.checked_shl(32 - u32::from(length)).unwrap_or(0);
    let network = Ipv4Addr::from_bits(address.to_bits() & mask);
    json!({"prefix": {"addr": network.to_string(), "len": length}})
}

fn payload(protocol: &str, field: &str) -> Value {
    json!({"payload": {"protocol": protocol, "field": field}})
}

fn equals(left: Value, right: Value) -> Value {
    json!({"match": {"op": "==", "left": left, "right": right}})
}

fn from(link: &str) -> Value {
    equals(json!({"meta": {"key": "iifname"}}), json!(link))
}

fn to(link: &str) -> Value {
    equals(json!({"meta": {"key": "oifname"}}), json!(link))
}

fn is_in(set: &str) -> Value {
    equals(payload("ip", "daddr"), json!(format!("@{set}")))
}

fn established() -> Value {
    let state = json!({"ct": {"key": "state"}});
    json!({"match": {"op": "in", "left": state, "right": ["established", "related"]}})
}

fn is_new() -> Value {
    let state = json!({"ct": {"key": "state"}});
    json!({"match": {"op": "in", "left": state, "right": "new"}})
}

/// True while more than `flows` of what reached this rule are open.
fn over(flows: u32) -> Value {
    json!({"ct count": {"val": flows, "inv": true}})
}

fn accept() -> Value {
    json!({"accept": null})
}

fn drop() -> Value {
    json!({"drop": null})
}

/// Commands for one table, in order.
struct Rules {
    table: String,
    commands: Vec<Value>,
}

impl Rules {
    fn new(table: &str) -> Self {
        Self {
            table: table.to_owned(),
            commands: Vec::new(),
        }
    }

    fn command(&mut self, command: Value) {
        self.commands.push(command);
    }

    fn table(&mut self) {
        self.command(json!({"add": {"table": {"family": FAMILY, "name": self.table}}}));
    }

    fn set(&mut self, name: &str, elements: Vec<Value>) {
        let mut set = json!({
            "family": FAMILY, "table": self.table, "name": name,
            "type": "ipv4_addr", "flags": ["interval"], "auto-merge": true,
        });
        if !elements.is_empty() {
            set["elem"] = Value::Array(elements);
        }
        self.command(json!({"add": {"set": set}}));
    }

    fn filter_chain(&mut self, name: &str, hook: &str, priority: i32, policy: &str) {
        self.command(json!({"add": {"chain": {
            "family": FAMILY, "table": self.table, "name": name,
            "type": "filter", "hook": hook, "prio": priority, "policy": policy,
        }}}));
    }

    fn nat_chain(&mut self) {
        self.command(json!({"add": {"chain": {
            "family": FAMILY, "table": self.table, "name": "nat",
            "type": "nat", "hook": "postrouting", "prio": 100, "policy": "accept",
        }}}));
    }

    fn rule(&mut self, chain: &str, expressions: Vec<Value>) {
        self.command(json!({"add": {"rule": {
            "family": FAMILY, "table": self.table, "chain": chain, "expr": expressions,
        }}}));
    }

    fn finish(self) -> Value {
        json!({"nftables": self.commands})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(egress: &Egress) -> String {
        router_rules(egress).to_string()
    }

    #[test]
    fn nothing_means_no_way_out_and_no_resolver() {
        let rules = text(&Egress::Nothing);
        assert!(!rules.contains("masquerade"));
        assert!(!rules.contains("dport"));
        assert!(!needs_uplink(&Egress::Nothing));
    }

    #[test]
    fn what_is_blocked_is_dropped_before_anything_is_allowed() {
        // R-P2
        let rules = text(&Egress::Filtered {
            allowed: vec![IpBlock {
                address: IpAddr::V4(Ipv4Addr::new(10, 1, 2, 3)),
                prefix_length: 24,
            }],
            denied: vec![IpBlock {
                address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
                prefix_length: 0,
            }],
        });
        let at = |needle: &str| rules.find(needle).unwrap();
        assert!(at("@blocked") < at("@allowed") && at("@allowed") < at("@denied"));
        // Bits after the prefix are cleared.
        assert!(rules.contains(r#"{"addr":"10.1.2.0","len":24}"#), "{rules}");
        assert!(rules.contains(r#"{"addr":"0.0.0.0","len":0}"#));
    }

    #[test]
    fn a_version_6_block_has_no_effect() {
        let rules = Egress::Filtered {
            allowed: vec![IpBlock {
                address: IpAddr::V6(std::net::Ipv6Addr::LOCALHOST),
                prefix_length: 128,
            }],
            denied: Vec::new(),
        };
        assert!(!text(&rules).contains("::1"));
    }
}
