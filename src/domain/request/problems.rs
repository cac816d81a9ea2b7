//! The problems of a request, each with the path of its field.

use std::fmt::Display;

use serde_json::{Map, Value};

/// The most problems that are listed. Further ones are only counted.
const MAX_PROBLEMS: usize = 10_000;
/// The most characters of a path: enough to find the field, and too few to make an answer large.
const MAX_PATH_CHARS: usize = 300;

/// The problems of a request, one line each: `path: what is wrong`.
#[derive(Debug, Default)]
pub struct Problems {
    lines: Vec<String>,
    /// Problems beyond the listed ones.
    unlisted: usize,
}

impl Problems {
    pub fn add(&mut self, path: impl Display, problem: impl Display) {
        if self.lines.len() >= MAX_PROBLEMS {
            self.unlisted += 1;
            return;
        }
        let path = path.to_string();
        let path = if path.is_empty() { "body" } else { path.trim_start_matches('.') };
        let path: String = path.chars().take(MAX_PATH_CHARS).collect();
        self.lines.push(format!("{path}: {problem}"));
    }

    pub fn append(&mut self, others: Problems) {
        let room = MAX_PROBLEMS.saturating_sub(self.lines.len());
        self.unlisted += others.unlisted + others.lines.len().saturating_sub(room);
        self.lines.extend(others.lines.into_iter().take(room));
    }

    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    pub fn into_vec(mut self) -> Vec<String> {
        if self.unlisted > 0 {
            self.lines.push(format!("body: {} more problems not listed", self.unlisted));
        }
        self.lines
    }

    /// Returns the value if there are no problems, and the problems otherwise.
    pub fn or<T>(self, value: Option<T>) -> Result<T, Vec<String>> {
        match value {
            Some(value) if self.is_empty() => Ok(value),
            _ => Err(self.into_vec()),
        }
    }
}

/// Refuses NUL characters anywhere in a value, because PostgreSQL's text cannot hold them. Builds a path only where it
/// finds one: a body can have long names around very many values.
pub fn refuse_nul(value: &Value, path: &str, problems: &mut Problems) {
    look_for_nul(value, &mut vec![Segment::Name(path)], problems);
}

/// Refuses NUL characters anywhere in an object.
pub(in crate::domain) fn refuse_nul_in_object(map: &Map<String, Value>, path: &str, problems: &mut Problems) {
    look_in_object(map, &mut vec![Segment::Name(path)], problems);
}

#[derive(Clone, Copy)]
enum Segment<'a> {
    Name(&'a str),
    Field(&'a str),
    Item(usize),
}

fn look_for_nul<'a>(value: &'a Value, path: &mut Vec<Segment<'a>>, problems: &mut Problems) {
    match value {
        Value::String(text) if text.contains('\0') => problems.add(shown_path(path), "must not contain NUL characters"),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                path.push(Segment::Item(i));
                look_for_nul(item, path, problems);
                path.pop();
            }
        }
        Value::Object(map) => look_in_object(map, path, problems),
        _ => {}
    }
}

fn look_in_object<'a>(map: &'a Map<String, Value>, path: &mut Vec<Segment<'a>>, problems: &mut Problems) {
    for (name, item) in map {
        if name.contains('\0') {
            problems.add(shown_path(path), "field names must not contain NUL characters");
        } else {
            path.push(Segment::Field(name));
            look_for_nul(item, path, problems);
            path.pop();
        }
    }
}

fn shown_path(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Name(name) => text.push_str(name),
            Segment::Field(name) => text.extend(".".chars().chain(name.chars().take(MAX_PATH_CHARS))),
            Segment::Item(i) => text.extend(["[", &i.to_string(), "]"]),
        }
        if text.len() > 4 * MAX_PATH_CHARS {
            break;
        }
    }
    text
}
