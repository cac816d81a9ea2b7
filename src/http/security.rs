//! What the description says of the door: how a key is sent, and for every operation that it needs one and how it may be
//! refused. Derived from what the door does, so that no operation can be forgotten. Must not describe anything else.

use axum::http::Method;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{
    ApiKey, ApiKeyValue, HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme,
};
use utoipa::openapi::{Components, Content, OpenApi, Ref, Response, ResponseBuilder};

use super::auth::{always_open, needed, takes_token};
use crate::access::Scope;

const BEARER: &str = "bearer";
const HEADER: &str = "api_key";
const TOKEN: &str = "handle_token";

pub fn describe(document: &mut OpenApi) {
    let components = document.components.get_or_insert_with(Components::new);
    let bearer = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some("A key of API_KEYS.")).build();
    components.add_security_scheme(BEARER, SecurityScheme::Http(bearer));
    let header = ApiKeyValue::with_description("X-API-Key", "The same key in a header of its own.");
    components.add_security_scheme(HEADER, SecurityScheme::ApiKey(ApiKey::Header(header)));
    let token =
        ApiKeyValue::with_description("token", "As in the handle that a worker is sent: for one run of one task.");
    components.add_security_scheme(TOKEN, SecurityScheme::ApiKey(ApiKey::Query(token)));
    for (path, item) in &mut document.paths.paths {
        for (method, operation) in operations(item) {
            if operation.request_body.is_some() {
                add(operation, "408", "The body did not arrive in time");
                add(operation, "503", "The database is not available, or too many large requests are being worked on");
            }
            if !always_open(path) {
                secure(path, &method, operation);
            }
        }
    }
}

fn secure(path: &str, method: &Method, operation: &mut Operation) {
    let mut schemes = vec![BEARER, HEADER];
    let mut refusal = "No API key, or an unknown one".to_owned();
    if takes_token(method, Some(path)) {
        schemes.push(TOKEN);
        refusal.push_str("; or the token of another task or run");
    }
    let none: [&str; 0] = [];
    operation.security = Some(schemes.into_iter().map(|name| SecurityRequirement::new(name, none)).collect());
    add(operation, "401", &refusal);
    add(operation, "421", "Without API keys: the Host is not this service");
    match needed(method, Some(path)) {
        Scope::Read => {}
        scope => add(operation, "403", &format!("The scope of the API key is less than {}", scope.as_str())),
    }
}

fn add(operation: &mut Operation, status: &str, description: &str) {
    operation.responses.responses.insert(status.to_owned(), problem(description).into());
}

fn problem(description: &str) -> Response {
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
