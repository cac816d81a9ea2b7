//! The problems of a request: each with the path of its field, a code for programs and a message for people.

use std::fmt::{self, Display};

use serde::Serialize;
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// The most problems that are listed. Further ones are only counted.
const MAX_PROBLEMS: usize = 10_000;
/// The most characters of a path: enough to find the field, and too few to make an answer large.
const MAX_PATH_CHARS: usize = 300;

/// The class of a problem. Stable: programs compare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ProblemCode {
    /// The field is missing or null.
    Required,
    /// No such field exists here.
    UnknownField,
    /// No such query parameter exists.
    UnknownParameter,
    /// The value has another JSON type.
    WrongType,
    /// The number is too small or too large.
    OutOfRange,
    /// The text is too short or too long.
    WrongLength,
    /// The list has too few or too many entries.
    WrongCount,
    /// The value has too many bytes or is nested too deeply.
    TooLarge,
    /// The text has no visible character.
    Blank,
    /// The value is not one of the allowed words.
    UnknownValue,
    /// The text does not have the required format.
    Malformed,
    /// The text contains a NUL character.
    NulCharacter,
    /// The value is given more than once.
    NotUnique,
    /// No earlier task of the request has this id.
    UnknownDependency,
    /// The metadata of the task lacks the field.
    MissingMetadataField,
    /// The field or value is not allowed together with the others.
    NotAllowed,
    /// More problems were found than are listed.
    MoreProblems,
}

impl ProblemCode {
    pub const ALL: [ProblemCode; 17] = [
        ProblemCode::Required,
        ProblemCode::UnknownField,
        ProblemCode::UnknownParameter,
        ProblemCode::WrongType,
        ProblemCode::OutOfRange,
        ProblemCode::WrongLength,
        ProblemCode::WrongCount,
        ProblemCode::TooLarge,
        ProblemCode::Blank,
        ProblemCode::UnknownValue,
        ProblemCode::Malformed,
        ProblemCode::NulCharacter,
        ProblemCode::NotUnique,
        ProblemCode::UnknownDependency,
        ProblemCode::MissingMetadataField,
        ProblemCode::NotAllowed,
        ProblemCode::MoreProblems,
    ];

    pub const fn as_str(self) -> &'static str {
        match self {
            ProblemCode::Required => "required",
            ProblemCode::UnknownField => "unknown_field",
            ProblemCode::UnknownParameter => "unknown_parameter",
            ProblemCode::WrongType => "wrong_type",
            ProblemCode::OutOfRange => "out_of_range",
            ProblemCode::WrongLength => "wrong_length",
            ProblemCode::WrongCount => "wrong_count",
            ProblemCode::TooLarge => "too_large",
            ProblemCode::Blank => "blank",
            ProblemCode::UnknownValue => "unknown_value",
            ProblemCode::Malformed => "malformed",
            ProblemCode::NulCharacter => "nul_character",
            ProblemCode::NotUnique => "not_unique",
            ProblemCode::UnknownDependency => "unknown_dependency",
            ProblemCode::MissingMetadataField => "missing_metadata_field",
            ProblemCode::NotAllowed => "not_allowed",
            ProblemCode::MoreProblems => "more_problems",
        }
    }
}

/// One problem of a request.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
pub struct FieldProblem {
    /// The path of the field, such as `[0].retry.max_retries`, or the name of the parameter or header.
    #[schema(example = "[0].timeout")]
    pub path: String,
    /// The class of the problem. docs/errors.md lists all classes; more may come.
    #[schema(value_type = String, example = "out_of_range")]
    pub code: ProblemCode,
    /// What is wrong, and what is allowed.
    #[schema(example = "must be a whole number from 1 to 86400, not 0")]
    pub message: String,
}

impl FieldProblem {
    pub fn new(path: impl Display, code: ProblemCode, message: impl Display) -> FieldProblem {
        let path = path.to_string();
        let path = if path.is_empty() { "body" } else { path.trim_start_matches('.') };
        FieldProblem { path: path.chars().take(MAX_PATH_CHARS).collect(), code, message: message.to_string() }
    }
}

impl Display for FieldProblem {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

#[cfg(test)]
impl FieldProblem {
    /// Whether the line of the problem starts with this text.
    pub fn starts_with(&self, start: &str) -> bool {
        self.to_string().starts_with(start)
    }
}

/// Compares the line of the problem.
#[cfg(test)]
impl PartialEq<&str> for FieldProblem {
    fn eq(&self, line: &&str) -> bool {
        line.strip_prefix(&self.path).and_then(|rest| rest.strip_prefix(": ")) == Some(&self.message)
    }
}

/// Compares the line of the problem.
#[cfg(test)]
impl PartialEq<String> for FieldProblem {
    fn eq(&self, line: &String) -> bool {
        self == &line.as_str()
    }
}

/// The problems found so far.
#[derive(Debug, Default)]
pub struct Problems {
    list: Vec<FieldProblem>,
    /// Problems beyond the listed ones.
    unlisted: usize,
}

impl Problems {
    pub fn add(&mut self, path: impl Display, code: ProblemCode, message: impl Display) {
        if self.list.len() >= MAX_PROBLEMS {
            self.unlisted += 1;
            return;
        }
        self.list.push(FieldProblem::new(path, code, message));
    }

    pub fn append(&mut self, others: Problems) {
        let room = MAX_PROBLEMS.saturating_sub(self.list.len());
        self.unlisted += others.unlisted + others.list.len().saturating_sub(room);
        self.list.extend(others.list.into_iter().take(room));
    }

    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub fn into_vec(mut self) -> Vec<FieldProblem> {
        if self.unlisted > 0 {
            let message = format!("{} more problems not listed", self.unlisted);
            self.list.push(FieldProblem::new("", ProblemCode::MoreProblems, message));
        }
        self.list
    }

    /// Returns the value if there are no problems, and the problems otherwise.
    pub fn or<T>(self, value: Option<T>) -> Result<T, Vec<FieldProblem>> {
        match value {
            Some(value) if self.is_empty() => Ok(value),
            _ => Err(self.into_vec()),
        }
    }
}

/// Refuses NUL characters anywhere in a value, because PostgreSQL's text cannot hold them. Builds a path only where it
/// finds one: a body can have long names around very many values.
pub fn refuse_nul(value: &Value, path: impl Display, problems: &mut Problems) {
    let mut found = Vec::new();
    look_for_nul(value, &mut Vec::new(), &mut found);
    for (rest, message) in found {
        problems.add(format_args!("{path}{rest}"), ProblemCode::NulCharacter, message);
    }
}

/// Refuses NUL characters anywhere in an object.
pub(in crate::domain) fn refuse_nul_in_object(map: &Map<String, Value>, path: impl Display, problems: &mut Problems) {
    let mut found = Vec::new();
    look_in_object(map, &mut Vec::new(), &mut found);
    for (rest, message) in found {
        problems.add(format_args!("{path}{rest}"), ProblemCode::NulCharacter, message);
    }
}

#[derive(Clone, Copy)]
enum Segment<'a> {
    Field(&'a str),
    Item(usize),
}

type Found = Vec<(String, &'static str)>;

fn look_for_nul<'a>(value: &'a Value, path: &mut Vec<Segment<'a>>, found: &mut Found) {
    match value {
        Value::String(text) if text.contains('\0') => found.push((shown_path(path), "must not contain NUL characters")),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                path.push(Segment::Item(i));
                look_for_nul(item, path, found);
                path.pop();
            }
        }
        Value::Object(map) => look_in_object(map, path, found),
        _ => {}
    }
}

fn look_in_object<'a>(map: &'a Map<String, Value>, path: &mut Vec<Segment<'a>>, found: &mut Found) {
    for (name, item) in map {
        if name.contains('\0') {
            found.push((shown_path(path), "field names must not contain NUL characters"));
        } else {
            path.push(Segment::Field(name));
            look_for_nul(item, path, found);
            path.pop();
        }
    }
}

fn shown_path(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        match segment {
            Segment::Field(name) => text.extend(".".chars().chain(name.chars().take(MAX_PATH_CHARS))),
            Segment::Item(i) => text.extend(["[", &i.to_string(), "]"]),
        }
        if text.len() > 4 * MAX_PATH_CHARS {
            break;
        }
    }
    text
}
