//! Describes authentication in the API description: how clients send keys, and which refusals each operation may
//! answer. Derived from the functions that the authenticator uses, so no operation can be forgotten. Describes nothing
//! else.

use axum::http::Method;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{Components, Content, OpenApi, Ref, Response, ResponseBuilder};

use crate::access::Scope;
use crate::http::auth::{always_open, needed_scope, takes_token};

const BEARER: &str = "bearer";
const HEADER: &str = "api_key";
const TOKEN: &str = "handle_token";

pub fn describe(document: &mut OpenApi) {
    let components = document.components.get_or_insert_with(Components::new);
    let bearer =
        HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("An API key, one of API_KEYS.")).build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    let header = ApiKeyValue::with_description("X-API-Key", "An API key, as an alternative to Authorization.");
    components.add_security_scheme(HEADER, SecurityScheme::ApiKey(ApiKey::Header(header)));
    let token = ApiKeyValue::with_description(
        "token",
        "The token in the handle that Reprise sends to a worker; valid for one run of one task.",
    );
    components.add_security_scheme(TOKEN, SecurityScheme::ApiKey(ApiKey::Query(token)));
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            if operation.request_body.is_some() {
                add(operation, "408", "The body was not received within REQUEST_TIMEOUT_SECS");
                add(operation, "503", "The database is not available, or too many large requests are in progress");
            }
            if !always_open(path) {
                secure(path, &method, operation);
            }
        }
    }
}

fn secure(path: &str, method: &Method, operation: &mut Operation) {
    let mut schemes = vec![BEARER, HEADER];
    let mut refusal = "The API key is missing or unknown".to_owned();
    if takes_token(method, Some(path)) {
        schemes.push(TOKEN);
        refusal.push_str(", or the token belongs to another task or run");
    }
    let none: [&str; 0] = [];
    // The service may run without keys, so no credential is an alternative, too.
    let mut requirements = vec![SecurityRequirement::default()];
    requirements.extend(schemes.into_iter().map(|name| SecurityRequirement::new(name, none)));
    operation.security = Some(requirements);
    add(operation, "401", &refusal);
    add(operation, "421", "The Host header names another service; checked only if no API keys are set");
    match needed_scope(method, Some(path)) {
        Scope::Read => {}
        scope => add(operation, "403", &format!("The API key has a lower scope than {}", scope.as_str())),
    }
}

fn add(operation: &mut Operation, status: &str, description: &str) {
    operation.responses.responses.insert(status.to_owned(), response(description).into());
}

/// An error answer, as JSON.
pub fn problem(description: &str) -> serde_json::Value {
    serde_json::to_value(response(description)).unwrap_or_default()
}

fn response(description: &str) -> Response {
    let content = Content::new(Some(Ref::from_schema_name("Problem")));
    ResponseBuilder::new().description(description).content("application/problem+json", content).build()
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = (Method, &mut Operation)> {
    let all = [
        (Method::GET, &mut item.get),
        (Method::PUT, &mut item.put),
        (Method::POST, &mut item.post),
        (Method::DELETE, &mut item.delete),
        (Method::PATCH, &mut item.patch),
    ];
    all.into_iter().filter_map(|(method, operation)| Some((method, operation.as_mut()?)))
}
