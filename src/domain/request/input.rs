//! Declares the bodies of requests. A field is declared once, in [`input!`]: its name, its type with all limits, and its
//! description. The declaration yields the struct, the reader and the schema of the API description.
//!
//! Readers collect every problem with the path of its field instead of stopping at the first. A value that has a problem
//! is replaced by its default so that the rest can be checked; nobody sees it, because the request is refused.

use serde_json::{Map, Value, json};

use super::RequestLimits;
use super::fields::Fields;
use super::problems::{FieldProblem, ProblemCode, refuse_nul};
use super::reading::{Place, Reading, Source};

/// The schemas of the API description, by name.
pub type Schemas = Map<String, Value>;

/// A type of values in requests: how they are read, and how the API description describes them.
pub trait Input: Sized {
    /// Whether the value stays text when the object around it is parsed.
    const KEEPS_TEXT: bool = false;

    /// Reads a value that is not null. Returns `None` after it has added a problem.
    fn read(source: Source<'_>, at: Place<'_>, reading: &mut Reading<'_>) -> Option<Self>;

    /// The schema, or a reference to it.
    fn schema() -> Value;

    /// Adds the schemas that [`Input::schema`] refers to.
    fn define(_: &mut Schemas) {}
}

/// The type of a field: an [`Input`] if the field is required, or an `Option` or [`Given`] of one.
pub trait FieldInput: Sized {
    const REQUIRED: bool = false;
    const KEEPS_TEXT: bool;

    fn take_from(fields: &mut Fields<'_>, name: &'static str, reading: &mut Reading<'_>) -> Self;
    fn field_schema() -> Value;
    fn define_field(schemas: &mut Schemas);
}

impl<T: Input + Default> FieldInput for T {
    const REQUIRED: bool = true;
    const KEEPS_TEXT: bool = T::KEEPS_TEXT;

    fn take_from(fields: &mut Fields<'_>, name: &'static str, reading: &mut Reading<'_>) -> T {
        let Some(source) = fields.take(name).filter(|source| !source.is_null()) else {
            reading.add(fields.at().field(name), ProblemCode::Required, "is required");
            return T::default();
        };
        T::read(source, fields.at().field(name), reading).unwrap_or_default()
    }

    fn field_schema() -> Value {
        T::schema()
    }

    fn define_field(schemas: &mut Schemas) {
        T::define(schemas);
    }
}

impl<T: Input> FieldInput for Option<T> {
    const KEEPS_TEXT: bool = T::KEEPS_TEXT;

    fn take_from(fields: &mut Fields<'_>, name: &'static str, reading: &mut Reading<'_>) -> Option<T> {
        let source = fields.take(name).filter(|source| !source.is_null())?;
        T::read(source, fields.at().field(name), reading)
    }

    fn field_schema() -> Value {
        nullable(T::schema())
    }

    fn define_field(schemas: &mut Schemas) {
        T::define(schemas);
    }
}

/// A field for which null means something else than absence.
#[derive(Debug, Default, PartialEq)]
pub enum Given<T> {
    #[default]
    Absent,
    Null,
    /// Present, with a problem that is already recorded.
    Invalid,
    Value(T),
}

impl<T> Given<T> {
    /// Whether the field is present and not null.
    pub fn is_given(&self) -> bool {
        matches!(self, Given::Invalid | Given::Value(_))
    }

    pub fn value(self) -> Option<T> {
        match self {
            Given::Value(value) => Some(value),
            Given::Absent | Given::Null | Given::Invalid => None,
        }
    }
}

impl<T: Input> FieldInput for Given<T> {
    const KEEPS_TEXT: bool = T::KEEPS_TEXT;

    fn take_from(fields: &mut Fields<'_>, name: &'static str, reading: &mut Reading<'_>) -> Given<T> {
        match fields.take(name) {
            None => Given::Absent,
            Some(source) if source.is_null() => Given::Null,
            Some(source) => T::read(source, fields.at().field(name), reading).map_or(Given::Invalid, Given::Value),
        }
    }

    fn field_schema() -> Value {
        nullable(T::schema())
    }

    fn define_field(schemas: &mut Schemas) {
        T::define(schemas);
    }
}

/// A field that is accepted and ignored.
#[derive(Debug, Default)]
pub struct Ignored;

impl FieldInput for Ignored {
    const KEEPS_TEXT: bool = true;

    fn take_from(fields: &mut Fields<'_>, name: &'static str, _: &mut Reading<'_>) -> Ignored {
        fields.take(name);
        Ignored
    }

    fn field_schema() -> Value {
        json!({})
    }

    fn define_field(_: &mut Schemas) {}
}

/// Returns a schema that also allows null.
fn nullable(mut schema: Value) -> Value {
    let Some(object) = schema.as_object_mut() else { return schema };
    if object.contains_key("$ref") {
        return json!({"oneOf": [{"type": "null"}, schema]});
    }
    if let Some(kind) = object.get_mut("type") {
        *kind = json!([kind.take(), "null"]);
    }
    if let Some(word) = object.remove("const") {
        object.insert("enum".into(), json!([word]));
    }
    if let Some(words) = object.get_mut("enum").and_then(Value::as_array_mut) {
        words.push(Value::Null);
    }
    schema
}

pub fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// Turns the lines of a doc comment into the text of a description.
pub fn description(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ").trim().to_owned()
}

/// The schema of an object, to which [`input!`] adds its fields.
#[derive(Debug, Default)]
pub struct ObjectSchema {
    properties: Schemas,
    required: Vec<&'static str>,
}

impl ObjectSchema {
    pub fn field<F: FieldInput>(&mut self, name: &'static str, doc: &[&str], schemas: &mut Schemas) {
        let mut schema = F::field_schema();
        let text = description(doc);
        if !text.is_empty() {
            schema["description"] = Value::String(text);
        }
        self.properties.insert(name.to_owned(), schema);
        if F::REQUIRED {
            self.required.push(name);
        }
        F::define_field(schemas);
    }

    pub fn into_schema(self, doc: &[&str]) -> Value {
        let mut schema = json!({"type": "object", "properties": self.properties, "additionalProperties": false});
        let text = description(doc);
        if !text.is_empty() {
            schema["description"] = Value::String(text);
        }
        if !self.required.is_empty() {
            schema["required"] = json!(self.required);
        }
        schema
    }
}

/// Reads a body that is one value, and finishes it with checks that concern more than one field.
pub fn read_body<T: Input, U>(
    body: Value,
    limits: &RequestLimits,
    finish: impl FnOnce(T, &mut Reading) -> U,
) -> Result<U, Vec<FieldProblem>> {
    let mut reading = Reading::new(limits);
    refuse_nul(&body, "", &mut reading.problems);
    let read = T::read(Source::Tree(body), Place::named(""), &mut reading);
    let finished = read.map(|value| finish(value, &mut reading));
    reading.problems.or(finished)
}

/// Turns null into an empty object: a body that may be left out may also be null.
pub fn null_as_empty(body: Value) -> Value {
    if body.is_null() { Value::Object(Map::new()) } else { body }
}

/// Defines one alternative of a union: the object `T`, with a field that holds the word of the alternative.
pub fn define_alternative<T: Input>(name: &str, tag: &str, word: &str, required: bool, schemas: &mut Schemas) {
    T::define(schemas);
    let schema = &mut schemas[name];
    if required {
        schema["properties"][tag] = json!({"type": "string", "const": word});
        match schema["required"].as_array_mut() {
            Some(names) => names.push(json!(tag)),
            None => schema["required"] = json!([tag]),
        }
    } else {
        // Absent or null, the word stands for this alternative.
        schema["properties"][tag] = json!({"type": ["string", "null"], "enum": [word, null]});
    }
}

/// Declares an object of a request: `struct Type as "SchemaName" { fields }`. See the module.
macro_rules! input {
    (
        $(#[doc = $doc:literal])*
        $vis:vis struct $type:ident as $name:literal {
            $( $(#[doc = $field_doc:literal])* $field:ident: $kind:ty, )*
        }
    ) => {
        $(#[doc = $doc])*
        #[derive(Debug, Default)]
        $vis struct $type {
            $( $(#[doc = $field_doc])* pub $field: $kind, )*
        }

        impl $type {
            /// The names of the fields.
            #[allow(dead_code, reason = "used by alternatives of a union")]
            pub const FIELDS: &'static [&'static str] = &[$(stringify!($field)),*];

            /// Whether a field stays text when the object is parsed. Unknown fields do: nobody reads them.
            pub fn keeps_text(name: &str) -> bool {
                match name {
                    $( stringify!($field) => <$kind as $crate::domain::request::input::FieldInput>::KEEPS_TEXT, )*
                    _ => true,
                }
            }

            /// Reads the fields of an object and reports the unknown ones.
            pub fn read_fields(
                mut fields: $crate::domain::request::fields::Fields<'_>,
                reading: &mut $crate::domain::request::reading::Reading<'_>,
            ) -> $type {
                let read = $type {
                    $( $field: <$kind as $crate::domain::request::input::FieldInput>::take_from(
                        &mut fields, stringify!($field), reading,
                    ), )*
                };
                fields.close(reading);
                read
            }
        }

        impl $crate::domain::request::input::Input for $type {
            const KEEPS_TEXT: bool =
                false $(|| <$kind as $crate::domain::request::input::FieldInput>::KEEPS_TEXT)*;

            fn read(
                source: $crate::domain::request::reading::Source<'_>,
                at: $crate::domain::request::reading::Place<'_>,
                reading: &mut $crate::domain::request::reading::Reading<'_>,
            ) -> Option<$type> {
                let fields = $crate::domain::request::fields::Fields::open(source, at, $type::keeps_text, reading)?;
                Some($type::read_fields(fields, reading))
            }

            fn schema() -> serde_json::Value {
                $crate::domain::request::input::reference($name)
            }

            fn define(schemas: &mut $crate::domain::request::input::Schemas) {
                let mut object = $crate::domain::request::input::ObjectSchema::default();
                $( object.field::<$kind>(stringify!($field), &[$($field_doc),*], schemas); )*
                schemas.insert($name.to_owned(), object.into_schema(&[$($doc),*]));
            }
        }
    };
}

pub(in crate::domain) use input;
