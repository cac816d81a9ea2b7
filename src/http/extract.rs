//! Reads requests so that whatever is wrong with one becomes a problem that names the place.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::sync::Arc;

use axum::extract::{FromRequestParts, RawPathParams};
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::{Api, Problem};
use crate::domain::request::fields::representable;
use crate::domain::request::problems::Problems;
use crate::store::page::Page;

/// How deep pages go: the database has to read all rows before a page.
const DEEPEST: i64 = 100_000;

/// A path parameter called `id` or `batch_id`.
pub struct Id<T = Uuid>(pub T);

impl<T: FromStr> FromRequestParts<Arc<Api>> for Id<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<Id<T>, Problem> {
        let params = RawPathParams::from_request_parts(parts, api)
            .await
            .map_err(|_| Problem::invalid(vec!["path: is not valid UTF-8".into()]))?;
        let found = params.iter().next();
        let (name, text) = found.ok_or_else(Problem::internal)?;
        let kind = if std::any::type_name::<T>().ends_with("Uuid") { "a UUID" } else { "a whole number" };
        text.parse()
            .map(Id)
            .map_err(|_| Problem::invalid(vec![format!("{name}: must be {kind}, not \"{}\"", shown(text))]))
    }
}

/// A path parameter that names a kind of task.
pub struct KindPath(pub String);

impl FromRequestParts<Arc<Api>> for KindPath {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, api: &Arc<Api>) -> Result<KindPath, Problem> {
        let params = RawPathParams::from_request_parts(parts, api)
            .await
            .map_err(|_| Problem::invalid(vec!["kind: is not valid UTF-8".into()]))?;
        let (_, kind) = params.iter().next().ok_or_else(Problem::internal)?;
        if !(1..=100).contains(&kind.chars().count()) || kind.contains('\0') {
            return Err(Problem::invalid(vec!["kind: must have 1 to 100 characters, none of them NUL".into()]));
        }
        Ok(KindPath(kind.to_owned()))
    }
}

/// The query parameters, taken one by one; what nobody takes is unknown.
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
    pub fn text(&mut self, name: &str) -> Option<String> {
        let at = self.pairs.iter().position(|(key, _)| key == name)?;
        let (_, value) = self.pairs.remove(at);
        if self.pairs.iter().any(|(key, _)| key == name) {
            self.problems.add(name, "is given more than once");
            self.pairs.retain(|(key, _)| key != name);
        }
        if value.contains('\u{fffd}') {
            self.problems.add(name, "must be valid UTF-8");
            return None;
        }
        if value.contains('\0') {
            self.problems.add(name, "must not contain NUL characters");
            return None;
        }
        Some(value)
    }

    pub fn parsed<T>(&mut self, name: &str, what: &str, parse: impl Fn(&str) -> Option<T>) -> Option<T> {
        let text = self.text(name)?;
        let value = parse(&text);
        if value.is_none() {
            self.problems.add(name, format!("must be {what}, not \"{}\"", shown(&text)));
        }
        value
    }

    pub fn integer<T>(&mut self, name: &str, range: &RangeInclusive<T>) -> Option<T>
    where
        T: FromStr + PartialOrd + Display,
    {
        let what = format!("a whole number from {} to {}", range.start(), range.end());
        self.parsed(name, &what, |text| text.parse().ok().filter(|value| range.contains(value)))
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
            // A `+` that was not escaped arrives as a space.
            let at = DateTime::parse_from_rfc3339(&text.replace(' ', "+")).ok()?;
            Some(at.with_timezone(&Utc)).filter(representable)
        })
    }

    /// `page` and `page_size`, or `cursor` and `page_size`.
    pub fn page<Key: FromStr>(&mut self) -> (Page<Key>, i64) {
        let page = self.integer("page", &(0..=i64::from(u32::MAX)));
        // Larger than allowed is not wrong, only too much.
        let size = self.integer("page_size", &(1..=i64::MAX)).unwrap_or(50).min(100);
        let cursor = self.parsed("cursor", "a value of X-Next-Cursor", |text| text.parse().ok());
        if page.is_some() && cursor.is_some() {
            self.problems.add("cursor", "cannot be combined with page");
        }
        let offset = page.unwrap_or(0) * size;
        if offset > DEEPEST {
            let what = format!("page × page_size must be at most {DEEPEST}, not {offset}");
            self.problems.add("page", format!("{what}; use cursor (X-Next-Cursor of the page before) to go deeper"));
        }
        (cursor.map_or(Page::Offset(offset), Page::After), size)
    }

    pub fn close(mut self) -> Result<(), Problem> {
        for (name, _) in std::mem::take(&mut self.pairs) {
            self.problems.add(shown(&name), "unknown query parameter");
        }
        if self.problems.is_empty() { Ok(()) } else { Err(Problem::invalid(self.problems.into_vec())) }
    }
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(60).collect()
}
