//! A sandbox as the platform would publish it; for tests and the benchmark.

use sandhold_platform::{
    AutoResume, BusyWith, Egress, Owner, PauseKeeps, PublicTraffic, SandboxView, TemplateStamp,
};
use sandhold_types::{
    Clocking, Incarnation, Lifetime, OnTimeout, Resources, SandboxState, Timestamp, Token,
};

pub(crate) const ID: &str = "abcdefghij0123456789";
pub(crate) const ACCESS_TOKEN: &str = "agents-own-token";

pub(crate) fn view(id: &str, incarnation: u64) -> SandboxView {
    let started_at = Timestamp::from_unix_ms(1);
    SandboxView {
        id: id.parse().unwrap(),
        owner: Owner {
            namespace: "default".parse().unwrap(),
            env: "dev".parse().unwrap(),
            key: "k1".parse().unwrap(),
        },
        template: TemplateStamp {
            id: "base".parse().unwrap(),
            build: "b1".parse().unwrap(),
            alias: None,
        },
        state: SandboxState::Running,
        incarnation: Incarnation(incarnation),
        started_at,
        lifetime: Lifetime {
            clocking: Clocking::Idle { window_ms: None },
            on_timeout: OnTimeout::Kill,
        },
        auto_resume: AutoResume::Off,
        busy_with: BusyWith::AnyCommand,
        timeout_keeps: PauseKeeps::Everything,
        sleep: None,
        last_activity: started_at,
        resources: Resources::default(),
        metadata: Default::default(),
        egress: Egress::Nothing,
        public_traffic: PublicTraffic::Allowed,
        mask_request_host: None,
        domain: None,
        envd_version: "0.6.13".to_owned(),
        access_token: Token::new(ACCESS_TOKEN.to_owned()),
        traffic_token: None,
        line: Vec::new(),
        ended: None,
    }
}
