//! One JSON object a line, in and out.

use std::{
    collections::HashMap,
    io::{self, Write},
    time::Duration,
};

use mooncake_relay::{Error, Metadata, Result, Tensor};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json, value::RawValue};

/// One line in. The values stay text until they are asked for, so that whatever is wrong with one
/// of them can be answered under the command's tag.
pub(crate) struct Command {
    /// Which command; empty if the line does not say.
    pub(crate) cmd: String,
    fields: HashMap<String, Box<RawValue>>,
}

impl Command {
    pub(crate) fn parse(line: &[u8]) -> Result<Self> {
        let fields = serde_json::from_slice(line).map_err(|error| bad("line", error))?;
        let mut command = Self { cmd: String::new(), fields };
        command.cmd = command.required("cmd").unwrap_or_default();
        Ok(command)
    }

    pub(crate) fn field<T: DeserializeOwned>(&self, name: &'static str) -> Result<Option<T>> {
        let Some(text) = self.fields.get(name) else { return Ok(None) };
        serde_json::from_str(text.get()).map_err(|error| bad(name, error))
    }

    pub(crate) fn required<T: DeserializeOwned>(&self, name: &'static str) -> Result<T> {
        self.field(name)?.ok_or_else(|| bad(name, "missing"))
    }

    pub(crate) fn seconds(&self, name: &'static str) -> Result<Option<Duration>> {
        let Some(seconds) = self.field(name)? else { return Ok(None) };
        Duration::try_from_secs_f64(seconds).map(Some).map_err(|error| bad(name, error))
    }

    pub(crate) fn tensor(&self, len: usize) -> Result<Tensor> {
        let bytes = Tensor::bytes(len);
        Ok(Tensor {
            dtype: self.field("dtype")?.unwrap_or(bytes.dtype),
            shape: self.field("shape")?.unwrap_or(bytes.shape),
        })
    }

    /// From the text as it came, so that the library is the one to judge it.
    pub(crate) fn metadata(&self) -> Result<Metadata> {
        self.fields.get("metadata").map_or("null", |text| text.get()).parse()
    }

    pub(crate) fn tag_text(&self) -> &str {
        self.fields.get("tag").map_or("null", |tag| tag.get())
    }
}

/// Why a command failed: the error's variant and its text.
#[derive(Clone, Serialize)]
pub(crate) struct Failure {
    kind: &'static str,
    error: String,
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self { kind: error.kind(), error: error.to_string() }
    }
}

pub(crate) fn bad(field: &'static str, reason: impl ToString) -> Error {
    Error::Config { field, reason: reason.to_string() }
}

/// Says how a command ended. Without a command, the line was none.
pub(crate) fn answer(command: Option<&Command>, outcome: Result<Value, Failure>) {
    #[derive(Serialize)]
    struct Answer<'a> {
        event: Option<&'a str>,
        tag: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        of: Option<&'a RawValue>,
        ok: bool,
        #[serde(flatten)]
        facts: Value,
    }
    let echo = |name| command.and_then(|command| command.fields.get(name)).map(|text| &**text);
    say(&Answer {
        event: command.map(|command| command.cmd.as_str()),
        tag: echo("tag"),
        of: echo("of"),
        ok: outcome.is_ok(),
        facts: outcome.unwrap_or_else(|failure| json!(failure)),
    });
}

/// Writes one line in one piece. If nobody reads stdout any more, the end of input follows.
pub(crate) fn say(line: &impl Serialize) {
    let mut text = serde_json::to_vec(line).expect("what is said has text keys and finite numbers");
    text.push(b'\n');
    let mut out = io::stdout().lock();
    let _ = out.write_all(&text).and_then(|()| out.flush());
}
