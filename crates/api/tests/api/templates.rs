//! Templates over the wire (wire contract 1.1, 1.6).

use serde_json::json;

use crate::common::Api;

#[tokio::test]
async fn templates_are_listed_found_and_removed() {
    let api = Api::new().await;
    let list = api.get("/templates").await;
    assert_eq!(list.body.as_array().unwrap().len(), 3);
    assert_eq!(list.body[0]["aliases"], json!(["base"]));
    for reference in ["base", "tpl1"] {
        let one = api.get(&format!("/templates/{reference}")).await;
        assert_eq!(one.body["templateID"], "tpl1");
        assert_eq!(one.body["builds"][0]["status"], "ready");
    }
    let alias = api.get("/templates/aliases/base").await;
    assert_eq!(alias.body, json!({"templateID": "tpl1", "public": true}));
    // A name may hold `/` and `:` (wire contract 1.0).
    assert_eq!(api.delete("/templates/team%2Fown%3Av1").await.status, 204);
    api.delete("/templates/team%2Fown%3Av1")
        .await
        .is_refused(404, "template_not_found");
    api.get("/templates/aliases/team%2Fown%3Av1")
        .await
        .is_refused(404, "template_not_found");
    api.delete("/templates/base")
        .await
        .is_refused(403, "forbidden");
}

#[tokio::test]
async fn a_tenants_template_is_its_own() {
    // R-P8
    let api = Api::new().await;
    for path in ["/templates/tpl3", "/templates/aliases/team%2Fown%3Av1"] {
        let request = api.request("GET".parse().unwrap(), path, "");
        api.with_key(&api.other_key, request)
            .await
            .is_refused(404, "template_not_found");
    }
    let request = api.request("DELETE".parse().unwrap(), "/templates/tpl3", "");
    api.with_key(&api.other_key, request)
        .await
        .is_refused(404, "template_not_found");
    assert_eq!(api.get("/templates/tpl3").await.status, 200);
}
