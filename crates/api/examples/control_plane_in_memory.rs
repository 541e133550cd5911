//! Serves the control plane over a platform in memory, to try clients against: nothing is started,
//! so only calls that do not go into a sandbox work. Prints the address and two keys.

#![allow(clippy::unwrap_used, clippy::print_stdout, missing_docs)]

#[path = "../tests/api/common/mod.rs"]
mod common;

use std::sync::Arc;

use sandhold_api::{ApiParts, ApiState, Settings, router};
use sandhold_store::{MemoryStore, Role};
use sandhold_types::{SystemClock, SystemEntropy};

#[tokio::main]
async fn main() {
    let address = std::env::args()
        .nth(1)
        .unwrap_or_else(|| String::from("127.0.0.1:0"));
    let (clock, entropy) = (Arc::new(SystemClock), Arc::new(SystemEntropy));
    let store = Arc::new(MemoryStore::new());
    let member = common::add_key(&*store, &*entropy, "default", Role::Member).await;
    let admin = common::add_key(&*store, &*entropy, "default", Role::Admin).await;
    let templates = Arc::new(common::platform::MemoryTemplates::new());
    let platform =
        common::platform::MemoryPlatform::new(clock.clone(), entropy.clone(), templates.clone());
    let platform = Arc::new(platform);
    let parts = ApiParts {
        platform: platform.clone(),
        travel: platform,
        templates,
        builds: None,
        store,
        clock,
        entropy,
        governor: None,
        settings: Settings::default(),
    };
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    println!("http://{} {member} {admin}", listener.local_addr().unwrap());
    let state = ApiState::open(parts).await.unwrap();
    axum::serve(listener, router(state)).await.unwrap();
}
