//! Extractors of path and query parameters. Every problem of a request becomes a line that names the parameter.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::{Api, Problem};
use crate::domain::request::problems::{FieldProblem, ProblemCode, Problems};
use crate::domain::request::values::{is_blank, parse_time};
use crate::store::page::Page;

/// Largest offset of a page: the database has to read all rows before it.
const MAX_OFFSET: i64 = 100_000;

/// The path parameter `id` or `batch_id`.
pub struct Id<T = Uuid>(pub T);

impl<T: FromStr> FromRequestParts<Arc<Api>> for Id<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Id<T>, Problem> {
        let params =
            RawPathParams::from_request_parts(parts, api).await.map_err(|_| malformed("path", "is not valid UTF-8"))?;
        let found = params.iter().next();
        let (name, text) = found.ok_or_else(Problem::internal)?;
        let kind = if std::any::type_name::<T>().ends_with("Uuid") { "a UUID" } else { "a whole number" };
        text.parse().map(Id).map_err(|_| malformed(name, format!("must be {kind}, not \"{}\"", excerpt(text))))
    }
}

/// The path parameter `kind`.
pub struct KindPath(pub String);

impl FromRequestParts<Arc<Api>> for KindPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<KindPath, Problem> {
        let params =
            RawPathParams::from_request_parts(parts, api).await.map_err(|_| malformed("kind", "is not valid UTF-8"))?;
        let (_, kind) = params.iter().next().ok_or_else(Problem::internal)?;
        if !(1..=100).contains(&kind.chars().count()) || kind.contains('\0') {
            let message = "must have 1 to 100 characters, none of them NUL";
            return Err(Problem::field("kind", ProblemCode::WrongLength, message));
        }
        if is_blank(kind) {
            return Err(Problem::field("kind", ProblemCode::Blank, "must not be blank"));
        }
        Ok(KindPath(kind.to_owned()))
    }
}

/// The query parameters. Handlers take them one by one; [`Query::close`] reports the rest as unknown.
pub struct Query {
    pairs: Vec<(String, String)>,
    problems: Problems,
}

impl<S: Send + Sync> FromRequestParts<S> for Query {
    type Rejection = std::convert::Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Query, Self::Rejection> {
        let text = parts.uri.query().unwrap_or_default();
        let pairs = url::form_urlencoded::parse(text.as_bytes()).into_owned().collect();
        Ok(Query { pairs, problems: Problems::default() })
    }
}

impl Query {
    /// Takes a parameter. An empty value counts as absent.
    pub fn text(&mut self, name: &str) -> Option<String> {
        let at = self.pairs.iter().position(|(key, _)| key == name)?;
        let (_, value) = self.pairs.remove(at);
        if self.pairs.iter().any(|(key, _)| key == name) {
            self.problems.add(name, ProblemCode::NotUnique, "must not be given more than once");
            self.pairs.retain(|(key, _)| key != name);
        }
        if value.contains('\u{fffd}') {
            self.problems.add(name, ProblemCode::Malformed, "must be valid UTF-8");
            return None;
        }
        if value.contains('\0') {
            self.problems.add(name, ProblemCode::NulCharacter, "must not contain NUL characters");
            return None;
        }
        Some(value).filter(|value| !value.is_empty())
    }

    /// Takes a parameter and parses it; `allowed` completes the message "must be …".
    pub fn parsed<T>(&mut self, name: &str, allowed: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text(name)?;
        let value = parse(&text);
        if value.is_none() {
            let message = format!("must be {allowed}, not \"{}\"", excerpt(&text));
            self.problems.add(name, ProblemCode::Malformed, message);
        }
        value
    }

    pub fn integer<T>(&mut self, name: &str, range: &RangeInclusive<T>) -> Option<T>
    where
        T: FromStr + PartialOrd + Display,
    {
        let allowed = format!("a whole number from {} to {}", range.start(), range.end());
        self.parsed(name, &allowed, |text| text.parse().ok().filter(|value| range.contains(value)))
    }

    /// Takes `wait_secs`.
    pub fn wait(&mut self) -> Duration {
        Duration::from_secs(self.integer("wait_secs", &(0..=60)).unwrap_or(0))
    }

    pub fn uuid(&mut self, name: &str) -> Option<Uuid> {
        self.parsed(name, "a UUID", |text| text.parse().ok())
    }

    pub fn object(&mut self, name: &str) -> Option<Value> {
        self.parsed(name, "a JSON object", |text| {
            let value = serde_json::from_str(text).ok().filter(Value::is_object)?;
            (!text.contains("\\u0000")).then_some(value)
        })
    }

    pub fn timestamp(&mut self, name: &str) -> Option<DateTime<Utc>> {
        self.parsed(name, "an RFC 3339 timestamp", |text| {
            // An unescaped `+` arrives as a space.
            parse_time(&text.replace(' ', "+"))
        })
    }

    /// Takes `page` and `page_size`, or `cursor` and `page_size`.
    pub fn page<Key: FromStr>(&mut self) -> (Page<Key>, i64) {
        let page = self.integer("page", &(0..=i64::from(u32::MAX)));
        // A larger page size is no error: the page has 100 rows.
        let size = self.integer("page_size", &(1..=i64::MAX)).unwrap_or(50).min(100);
        let cursor = self.parsed("cursor", "a value of X-Next-Cursor", |text| text.parse().ok());
        if page.is_some() && cursor.is_some() {
            self.problems.add("cursor", ProblemCode::NotAllowed, "must not be combined with page");
        }
        let offset = page.unwrap_or(0) * size;
        if offset > MAX_OFFSET {
            let problem = format!("page × page_size must be at most {MAX_OFFSET}, not {offset}");
            let message = format!("{problem}; use cursor (X-Next-Cursor of the previous page) beyond that");
            self.problems.add("page", ProblemCode::OutOfRange, message);
        }
        (cursor.map_or(Page::Offset(offset), Page::After), size)
    }

    /// Reports unread parameters as unknown. Returns all problems as one error, if there are any.
    pub fn close(mut self) -> Result<(), Problem> {
        for (name, _) in std::mem::take(&mut self.pairs) {
            self.problems.add(excerpt(&name), ProblemCode::UnknownParameter, "unknown query parameter");
        }
        if self.problems.is_empty() { Ok(()) } else { Err(Problem::invalid(self.problems.into_vec())) }
    }
}

fn malformed(path: &str, message: impl Display) -> Problem {
    Problem::invalid(vec![FieldProblem::new(path, ProblemCode::Malformed, message)])
}

/// The start of a value, fit for a message.
fn excerpt(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(60).collect()
}
