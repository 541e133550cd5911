//! How long things take. Not a test of anything: it prints medians, and is run by hand:
//! `cargo nextest run -p sandhold-engine --test gvisor_figures --run-ignored only --no-capture`

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a measurement")]

mod support;

use std::{collections::BTreeMap, time::Instant};

use sandhold_engine::{AfterCapture, Engine};
use sandhold_network::Network;
use sandhold_platform::Egress;
use support::{PLAN, World, soon};

const ROUNDS: usize = 10;

#[derive(Default)]
struct Figures(BTreeMap<&'static str, Vec<f64>>);

impl Figures {
    async fn time<T>(&mut self, name: &'static str, work: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let result = work.await;
        let took = begun.elapsed().as_secs_f64() * 1000.0;
        self.0.entry(name).or_default().push(took);
        result
    }

    fn print(mut self) {
        for (name, times) in &mut self.0 {
            times.sort_by(f64::total_cmp);
            let (median, last) = (times[times.len() / 2], times[times.len() - 1]);
            println!(
                "{name:40} median {median:8.2} ms   longest {last:8.2} ms   n={}",
                times.len()
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures"]
async fn figures() {
    let world = World::new().await;
    let mut figures = Figures::default();
    let image = world.directory.path().join("image");
    // With a way out, so that the host's part of it is on throughout, as it is in use.
    let source = world.boot(PLAN, &Egress::Internet).await;
    let captured = world
        .engine
        .capture(&source.instance, &image, AfterCapture::Continue, soon());
    captured.await.unwrap();
    for _ in 0..ROUNDS {
        let image = Some(image.as_path());
        for (command, answer, from, prepared) in [
            ("boot: command", "boot: until it answers", None, false),
            (
                "restore: command",
                "restore: until it answers",
                image,
                false,
            ),
            (
                "restore prepared: command",
                "restore prepared: until it answers",
                image,
                true,
            ),
        ] {
            let attach = world.attach(&Egress::Nothing);
            let made = figures.time("network: attach, no way out", attach).await;
            let spec = world.spec(&made, from);
            if prepared {
                let prepare = world.engine.prepare(&spec, soon());
                figures.time("prepare", prepare).await.unwrap();
            }
            let begun = Instant::now();
            let launch = world.engine.launch(&spec, soon());
            figures.time(command, launch).await.unwrap();
            world.answers(&made).await;
            let took = begun.elapsed().as_secs_f64() * 1000.0;
            figures.0.entry(answer).or_default().push(took);
            figures
                .time("freeze", world.engine.freeze(&made.instance))
                .await
                .unwrap();
            figures
                .time("thaw and one exchange", async {
                    world.engine.thaw(&made.instance).await.unwrap();
                    world.ask(&made, "ping").await
                })
                .await;
            for _ in 0..20 {
                let dialled = world.network.dial(&made.id, support::PORT, soon());
                figures.time("dial", dialled).await.unwrap();
            }
            figures
                .time("remove", world.engine.remove(&made.instance, soon()))
                .await
                .unwrap();
            figures
                .time("network: detach", world.network.detach(&made.id))
                .await
                .unwrap();
        }
        let made = figures
            .time("network: attach, internet", world.attach(&Egress::Internet))
            .await;
        figures
            .time("network: detach, internet", world.network.detach(&made.id))
            .await
            .unwrap();
        let image = tempfile::tempdir().unwrap();
        let image = image.path().join("image");
        let captured =
            world
                .engine
                .capture(&source.instance, &image, AfterCapture::Continue, soon());
        figures.time("capture", captured).await.unwrap();
    }
    world.remove(&source).await;
    world.end().await;
    figures.print();
}
