//! The API description. Routes, parameters and answers come from the handlers, request bodies from their declarations in
//! `domain/request`. This module adds what neither can say: names for the alternatives of unions, the words of
//! enumerations, webhooks, examples and the limits of the configuration.

mod examples;
mod security;
mod webhooks;

use serde_json::{Map, Value, json};

use crate::domain::request::input::Input;
use crate::domain::request::values::Label;
use crate::domain::request::{self, RequestLimits};
use crate::domain::task::lifecycle::{AttemptOutcome, Cause, RetryType};
use crate::domain::task::status::Status;

/// Completes the description that was made from the routes.
pub fn complete(mut routes: utoipa::openapi::OpenApi, limits: &RequestLimits) -> Value {
    security::describe(&mut routes);
    let mut document = serde_json::to_value(&routes).unwrap_or_default();
    if let Some(schemas) = document["components"]["schemas"].as_object_mut() {
        schemas.extend(request::schemas());
        name_rules(schemas);
        name_words(schemas);
        tie_failure_fields(schemas);
        fill_limits(schemas, limits);
    }
    let paths = document["paths"].as_object_mut().into_iter().flatten();
    for (_, operation) in paths.flat_map(|(_, item)| item.as_object_mut().into_iter().flatten()) {
        let optional = ["Heartbeat", "ManualRetry"].map(|name| format!("#/components/schemas/{name}"));
        let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
        parameters.into_iter().flatten().for_each(describe_parameter);
        if let Some(body) = operation.get_mut("requestBody") {
            let schema = body["content"]["application/json"]["schema"]["$ref"].as_str().unwrap_or_default();
            body["required"] = json!(!optional.iter().any(|name| name == schema));
        }
        let responses = &mut operation["responses"];
        responses["431"] = json!({"description": "The headers are too large; the answer has no body"});
        responses["500"] = security::problem("An error of the service; its log has the cause");
    }
    webhooks::describe(&mut document);
    examples::add(&mut document);
    document
}

/// Says what the text of a parameter may be.
fn describe_parameter(parameter: &mut Value) {
    let statuses = Status::ALL.map(|status| format!("{status:?}"));
    let schema = match (parameter["name"].as_str(), parameter["schema"]["type"].to_string().contains("string")) {
        (Some("until"), _) => {
            let words: Vec<String> = ["terminal".to_owned()].into_iter().chain(statuses).collect();
            json!({"type": "string", "enum": words})
        }
        (Some("status"), true) => {
            let word = statuses.join("|");
            json!({"type": "string", "pattern": format!("^({word})(,({word}))*$")})
        }
        (Some("kind"), _) if parameter["in"] == "path" => Label::<100>::schema(),
        (Some("metadata"), _) => json!({"type": "string", "format": "json-object"}),
        _ => return,
    };
    parameter["schema"] = schema;
}

/// Gives the alternatives of `Rule` names of their own. Otherwise generators number them.
fn name_rules(schemas: &mut Map<String, Value>) {
    let names = [("Concurency", "ConcurrencyRule"), ("Capacity", "CapacityRule")];
    let Some(alternatives) = schemas.get_mut("Rule").and_then(|rule| rule["oneOf"].as_array_mut()) else { return };
    let mut found = Vec::new();
    for (alternative, (word, name)) in alternatives.iter_mut().zip(names) {
        let mut schema = alternative.take();
        schema["properties"]["type"] = json!({"type": "string", "const": word});
        *alternative = json!({"$ref": format!("#/components/schemas/{name}")});
        found.push((name.to_owned(), schema));
    }
    let mapping: Map<String, Value> =
        names.iter().map(|(word, name)| ((*word).to_owned(), json!(format!("#/components/schemas/{name}")))).collect();
    schemas["Rule"]["discriminator"] = json!({"propertyName": "type", "mapping": mapping});
    schemas.extend(found);
}

/// Lists the words of fields that the store reads as text.
fn name_words(schemas: &mut Map<String, Value>) {
    let causes: Vec<&str> = ["create"].into_iter().chain(Cause::ALL.map(Cause::as_str)).collect();
    let outcomes = AttemptOutcome::ALL.map(AttemptOutcome::as_str);
    let retry_types = RetryType::ALL.map(RetryType::as_str);
    let words: [(&str, &str, &[&str]); 9] = [
        ("Attempt", "outcome", &outcomes),
        ("Attempt", "retry_type", &retry_types),
        ("TaskEvent", "cause", &causes),
        ("Delivery", "trigger", &["end", "retry", "cancel", "batch"]),
        ("Delivery", "condition", &["success", "failure", "complete"]),
        ("Health", "status", &["ok"]),
        ("Health", "database", &["ok", "unreachable"]),
        ("Readiness", "status", &["ready"]),
        ("Action", "kind", &["Webhook"]),
    ];
    for (schema, field, words) in words {
        let Some(property) = schemas.get_mut(schema).and_then(|schema| schema["properties"].get_mut(field)) else {
            continue;
        };
        let nullable = property["type"].is_array();
        property["enum"] = words.iter().map(|word| json!(word)).chain(nullable.then_some(Value::Null)).collect();
    }
}

/// Says in the schema which fields a reported failure needs and a reported success refuses.
fn tie_failure_fields(schemas: &mut Map<String, Value>) {
    let Some(patch) = schemas.get_mut("TaskPatch") else { return };
    let text = json!({"type": "string"});
    let absent = json!({"type": "null"});
    let failed = json!({"required": ["status"], "properties": {"status": {"const": "Failure"}}});
    let final_type = json!({"required": ["failure_type"],
        "properties": {"failure_type": {"enum": ["validation_error", "authentication_error"]}}});
    patch["if"] = failed;
    patch["then"] = json!({
        "required": ["failure_reason"],
        "properties": {"failure_reason": text},
        "if": final_type,
        "then": {"properties": {"retry_after_secs": absent}},
    });
    patch["else"] =
        json!({"properties": {"failure_reason": absent, "failure_type": absent, "retry_after_secs": absent}});
}

/// Writes the limits of the configuration into the schemas that name them.
fn fill_limits(schemas: &mut Map<String, Value>, limits: &RequestLimits) {
    for schema in schemas.values_mut() {
        fill(schema, limits);
    }
}

fn fill(schema: &mut Value, limits: &RequestLimits) {
    match schema {
        Value::Object(object) => {
            let limit = object.get("x-limit").and_then(Value::as_str).and_then(|name| request::limit(name, limits));
            if let Some(limit) = limit {
                let is_list = object.contains_key("items");
                object.insert(if is_list { "maxItems" } else { "maximum" }.into(), json!(limit));
            }
            object.values_mut().for_each(|value| fill(value, limits));
        }
        Value::Array(items) => items.iter_mut().for_each(|item| fill(item, limits)),
        _ => {}
    }
}
