//! Lists: filters, order, pages (wire contract 1.3, BC-082, BC-084).

use std::{collections::BTreeSet, time::Duration};

use sandhold_types::SandboxState;
use serde_json::json;

use crate::common::{Answer, Api};

fn ids(answer: &Answer) -> Vec<String> {
    assert_eq!(answer.status, 200, "{answer:?}");
    let list = answer.body.as_array().unwrap();
    list.iter()
        .map(|entry| entry["sandboxID"].as_str().unwrap().to_owned())
        .collect()
}

async fn create_apart(api: &Api, bodies: &[&str]) -> Vec<String> {
    let mut made = Vec::new();
    for body in bodies {
        made.push(api.create_with(body).await);
        api.clock.advance(Duration::from_secs(1));
    }
    made
}

#[tokio::test]
async fn every_page_once_and_the_last_without_a_token() {
    // BC-082: 105 sandboxes, limit 10. Ten of a kind start in the same millisecond.
    for order in ["asc", "desc"] {
        let api = Api::new().await;
        for n in 0..105 {
            api.create().await;
            if n % 10 == 0 {
                api.clock.advance(Duration::from_millis(1));
            }
        }
        let (mut seen, mut pages, mut token) = (Vec::new(), 0, String::new());
        loop {
            let page = api
                .get(&format!(
                    "/v2/sandboxes?order={order}&limit=10&nextToken={token}"
                ))
                .await;
            assert_eq!(page.header("x-total-running"), Some("105"));
            seen.extend(ids(&page));
            pages += 1;
            match page.header("x-next-token") {
                Some(next) => next.clone_into(&mut token),
                None => break,
            }
        }
        assert_eq!((seen.len(), pages), (105, 11));
        assert_eq!(
            seen.iter().collect::<BTreeSet<_>>().len(),
            105,
            "each exactly once"
        );
    }
}

#[tokio::test]
async fn pages_survive_what_happens_between_them() {
    let api = Api::new().await;
    let made = create_apart(&api, &[r#"{"templateID":"base","timeout":600}"#; 6]).await;
    let first = api.get("/v2/sandboxes?order=asc&limit=3").await;
    let token = first.header("x-next-token").unwrap().to_owned();
    // The last one of the page goes, and a new one comes.
    api.delete(&format!("/sandboxes/{}", made[2])).await;
    let new = api.create().await;
    let second = api
        .get(&format!(
            "/v2/sandboxes?order=asc&limit=3&nextToken={token}"
        ))
        .await;
    assert_eq!(ids(&second), made[3..]);
    let token = second.header("x-next-token").unwrap();
    let third = api
        .get(&format!(
            "/v2/sandboxes?order=asc&limit=3&nextToken={token}"
        ))
        .await;
    assert_eq!(ids(&third), [new]);
}

#[tokio::test]
async fn a_token_is_good_for_its_own_question_only() {
    // BC-082
    let api = Api::new().await;
    create_apart(&api, &[r#"{"templateID":"base","timeout":600}"#; 3]).await;
    let page = api.get("/v2/sandboxes?limit=1").await;
    let token = page.header("x-next-token").unwrap().to_owned();
    let again = api
        .get(&format!("/v2/sandboxes?limit=2&nextToken={token}"))
        .await;
    assert_eq!(
        ids(&again).len(),
        2,
        "the length is not part of the question"
    );
    let forged = format!("A{}", &token[1..]);
    let cut = &token[..token.len() - 1];
    for query in [
        format!("nextToken={token}&order=asc"),
        format!("nextToken={token}&metadata=a%3Db"),
        format!("nextToken={token}&state=running"),
        format!("nextToken={forged}x"),
        format!("nextToken={cut}"),
        String::from("nextToken=../../etc/passwd"),
        format!("nextToken={}", "A".repeat(10_000)),
    ] {
        let refused = api.get(&format!("/v2/sandboxes?{query}")).await;
        refused.is_refused(400, "invalid_request");
        assert!(
            refused.text("message").starts_with("nextToken"),
            "{refused:?}"
        );
    }
    let path = format!("/v2/sandboxes?limit=1&nextToken={token}");
    let other = api.request("GET".parse().unwrap(), &path, "");
    api.with_key(&api.other_key, other)
        .await
        .is_refused(400, "invalid_request");
}

#[tokio::test]
async fn limits_are_checked() {
    // BC-082
    let api = Api::new().await;
    for limit in ["0", "101", "-1", "x", "", "1.5", "99999999999999999999"] {
        let refused = api.get(&format!("/v2/sandboxes?limit={limit}")).await;
        refused.is_refused(400, "invalid_request");
        assert!(refused.text("message").starts_with("limit"), "{refused:?}");
    }
}

#[tokio::test]
async fn every_filter() {
    let api = Api::new().await;
    let made = create_apart(
        &api,
        &[
            r#"{"templateID":"base","timeout":600,"metadata":{"k":"v w&","x":"1"}}"#,
            r#"{"templateID":"code-interpreter-v1","timeout":600,"metadata":{"k":"other"}}"#,
            r#"{"templateID":"tpl1","timeout":600}"#,
        ],
    )
    .await;
    let [first, second, third] = &made[..] else {
        panic!()
    };
    api.platform.set_state(second, SandboxState::Paused);
    let after = api
        .get(&format!("/sandboxes/{first}"))
        .await
        .text("startedAt")
        .to_owned();
    for (query, expected) in [
        (String::new(), vec![third, second, first]),
        ("order=asc".into(), vec![first, second, third]),
        ("state=running".into(), vec![third, first]),
        ("state=paused".into(), vec![second]),
        ("state=paused,running".into(), vec![third, second, first]),
        (
            "state=paused&state=running".into(),
            vec![third, second, first],
        ),
        // As it was seen on the wire (wire contract 1.3).
        ("metadata=k%3Dv%252520w%252526".into(), vec![first]),
        ("metadata=k%3Dv%252520w%252526%26x%3D1".into(), vec![first]),
        ("metadata=k%3Dv%252520w%252526%26x%3D2".into(), vec![]),
        ("template=base".into(), vec![third, first]),
        ("template=tpl1".into(), vec![third, first]),
        ("template=tpl2".into(), vec![second]),
        ("template=nope".into(), vec![]),
        (format!("startedAfter={after}"), vec![third, second]),
        (format!("startedAfter={after}&state=paused"), vec![second]),
    ] {
        let list = api.get(&format!("/v2/sandboxes?{query}")).await;
        let found = ids(&list);
        assert_eq!(found.iter().collect::<Vec<_>>(), expected, "{query}");
        assert_eq!(list.header("x-total-running"), Some("2"));
    }
    assert_eq!(
        ids(&api.get("/sandboxes").await),
        [third.as_str(), first.as_str()]
    );
    let found = api.get("/sandboxes?metadata=x%3D1").await;
    assert_eq!(ids(&found), [first.as_str()]);
}

#[tokio::test]
async fn a_filter_that_matches_nothing_lists_nothing() {
    // BC-084
    let api = Api::new().await;
    api.create_with(r#"{"templateID":"base","timeout":600,"metadata":{"k":"v"}}"#)
        .await;
    for path in ["/v2/sandboxes", "/sandboxes"] {
        for query in ["metadata=other%3Dv", "metadata=k%3Dother", "metadata=k%3D"] {
            let list = api.get(&format!("{path}?{query}")).await;
            assert_eq!(list.body, json!([]), "{path} {query}");
        }
        for query in [
            "metadata=",
            "metadata=k",
            "metadata=%25",
            "metadata=k%3D%25zz",
            "metadata=k%3D%25ff",
        ] {
            let refused = api.get(&format!("{path}?{query}")).await;
            refused.is_refused(400, "invalid_request");
        }
    }
    let paused = api.get("/v2/sandboxes?state=paused").await;
    assert_eq!(paused.body, json!([]));
}

#[tokio::test]
async fn a_listing_does_not_wait_for_creates() {
    // R-P9
    let api = Api::new().await;
    let made = api.create().await;
    api.platform.hold_creates();
    let request = api.request(
        "POST".parse().unwrap(),
        "/v2/sandboxes",
        r#"{"templateID":"base"}"#,
    );
    let creating = api.send(request);
    let reading = async {
        crate::common::eventually("the create is under way", || {
            api.platform.creates_seen() == 2
        })
        .await;
        let list = api.get("/v2/sandboxes").await;
        assert_eq!(ids(&list), [made]);
        api.platform.turns.add_permits(1);
    };
    let (created, ()) = tokio::join!(creating, reading);
    assert_eq!(created.status, 201);
}
