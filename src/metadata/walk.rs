//! One pass over JSON objects some of whose keys are known.
//!
//! serde's derive would do, but for three things: its errors do not say which key they are about,
//! it takes an array for an object, and what it skips may nest without end.

use std::{borrow::Cow, cell::Cell, fmt, marker::PhantomData};

use serde::{
    Deserialize, Deserializer,
    de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::Value;

/// The key in errors that no single key is to blame for.
pub(super) const WHOLE: &str = "metadata";

/// An object some of whose keys are known.
pub(super) trait Object<'de>: Default {
    /// Takes `entry` to the place of `key`, or skips it.
    fn take<A: MapAccess<'de>>(&mut self, key: &str, entry: Entry<'_, A>) -> Result<(), A::Error>;
}

/// A string; borrowed, unless the text has escapes in it.
#[derive(Deserialize)]
pub(super) struct Text<'a>(#[serde(borrow)] pub(super) Cow<'a, str>);

/// The value of one key, not read yet.
pub(super) struct Entry<'w, A> {
    map: &'w mut A,
    key: &'w Cell<&'static str>,
}

impl<'de, A: MapAccess<'de>> Entry<'_, A> {
    pub(super) fn value<T: Deserialize<'de>>(
        self,
        key: &'static str,
        place: &mut Option<T>,
    ) -> Result<(), A::Error> {
        self.read(key, place, PhantomData)
    }

    pub(super) fn object<T: Object<'de>>(
        self,
        key: &'static str,
        place: &mut Option<T>,
    ) -> Result<(), A::Error> {
        let walk = Walk::new(self.key);
        self.read(key, place, walk)
    }

    fn read<T, W: DeserializeSeed<'de, Value = T>>(
        self,
        key: &'static str,
        place: &mut Option<T>,
        seed: W,
    ) -> Result<(), A::Error> {
        self.key.set(key);
        if place.is_some() {
            return Err(A::Error::custom("appears twice"));
        }
        *place = Some(self.map.next_value_seed(seed)?);
        self.key.set(WHOLE);
        Ok(())
    }

    /// Not `IgnoredAny`: what is not looked at must still be JSON of a depth and of numbers that
    /// the rest of the world can read.
    pub(super) fn skip(self) -> Result<(), A::Error> {
        self.map.next_value::<Value>().map(drop)
    }
}

/// The string under `socket` in an object. Any other value has none, and that is no mistake; what it is
/// made of must be JSON that the rest of the world can read, as with [`Entry::skip`].
#[derive(Default)]
pub(super) struct Hint {
    pub(super) socket: Option<String>,
}

impl<'de> Deserialize<'de> for Hint {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(HintOf)
    }
}

struct HintOf;

/// What is of no use whatever it is.
macro_rules! no_hint {
    ($($visit:ident: $of:ty,)*) => {
        $(fn $visit<E>(self, _: $of) -> Result<Hint, E> {
            Ok(Hint::default())
        })*
    };
}

impl<'de> Visitor<'de> for HintOf {
    type Value = Hint;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    no_hint! {
        visit_bool: bool,
        visit_i64: i64,
        visit_u64: u64,
        visit_f64: f64,
        visit_str: &str,
    }

    fn visit_unit<E>(self) -> Result<Hint, E> {
        Ok(Hint::default())
    }

    fn visit_none<E>(self) -> Result<Hint, E> {
        Ok(Hint::default())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Hint, D::Error> {
        Hint::deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Hint, A::Error> {
        while seq.next_element::<Value>()?.is_some() {}
        Ok(Hint::default())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Hint, A::Error> {
        let mut hint = Hint::default();
        while let Some(Text(key)) = map.next_key()? {
            let value = map.next_value::<Value>()?;
            if key == "socket" {
                // Of two the last counts, as in a `Value`.
                hint.socket = if let Value::String(socket) = value { Some(socket) } else { None };
            }
        }
        Ok(hint)
    }
}

/// Reads an object, and nothing but an object, as `T`.
pub(super) struct Walk<'w, T> {
    /// What is being read at this moment, for the error that may come of it.
    key: &'w Cell<&'static str>,
    of: PhantomData<T>,
}

impl<'w, T> Walk<'w, T> {
    pub(super) fn new(key: &'w Cell<&'static str>) -> Self {
        Self { key, of: PhantomData }
    }
}

impl<'de, T: Object<'de>> DeserializeSeed<'de> for Walk<'_, T> {
    type Value = T;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, T: Object<'de>> Visitor<'de> for Walk<'_, T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut object = T::default();
        while let Some(Text(key)) = map.next_key()? {
            object.take(&key, Entry { map: &mut map, key: self.key })?;
        }
        Ok(object)
    }
}
