//! A request that is being read: where a value is, and the problems found so far.

use std::fmt::{self, Display};

use serde_json::Value;
use serde_json::value::RawValue;

use super::RequestLimits;
use super::problems::{ProblemCode, Problems};

/// The path of a value in its request. Written out only if the value has a problem.
#[derive(Clone, Copy, Debug)]
pub struct Place<'a> {
    parent: Option<&'a Place<'a>>,
    step: Step<'a>,
}

#[derive(Clone, Copy, Debug)]
enum Step<'a> {
    Name(&'a str),
    Field(&'a str),
    Item(usize),
}

impl<'a> Place<'a> {
    /// The place of the value that a request consists of, under this name.
    pub const fn named(name: &'a str) -> Place<'a> {
        Place { parent: None, step: Step::Name(name) }
    }

    #[must_use]
    pub const fn field(&'a self, name: &'a str) -> Place<'a> {
        Place { parent: Some(self), step: Step::Field(name) }
    }

    #[must_use]
    pub const fn item(&'a self, i: usize) -> Place<'a> {
        Place { parent: Some(self), step: Step::Item(i) }
    }
}

impl Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        if let Some(parent) = self.parent {
            parent.fmt(f)?;
        }
        match self.step {
            Step::Name(name) => f.write_str(name),
            Step::Field(name) => write!(f, ".{name}"),
            Step::Item(i) => write!(f, "[{i}]"),
        }
    }
}

/// A request that is being read.
#[derive(Debug)]
pub struct Reading<'a> {
    pub limits: &'a RequestLimits,
    pub problems: Problems,
    /// Whether unknown fields are a problem.
    pub strict: bool,
}

impl<'a> Reading<'a> {
    pub fn new(limits: &'a RequestLimits) -> Reading<'a> {
        Reading { limits, problems: Problems::default(), strict: true }
    }

    pub fn add(&mut self, at: impl Display, code: ProblemCode, message: impl Display) {
        self.problems.add(at, code, message);
    }
}

/// A JSON value of a request: a tree, or text that was not parsed.
#[derive(Debug)]
pub enum Source<'a> {
    Tree(Value),
    Text(&'a RawValue),
}

impl Source<'_> {
    pub fn is_null(&self) -> bool {
        match self {
            Source::Tree(value) => value.is_null(),
            Source::Text(text) => text.get() == "null",
        }
    }

    /// Returns the value as a tree.
    pub fn tree(self, at: Place, reading: &mut Reading) -> Option<Value> {
        match self {
            Source::Tree(value) => Some(value),
            Source::Text(text) => {
                let value = serde_json::from_str(text.get());
                let problem = |error| reading.add(at, ProblemCode::Malformed, format!("is not valid JSON: {error}"));
                value.map_err(problem).ok()
            }
        }
    }
}
