//! What a payload is: an element type and a shape. The relay carries both and looks into neither.

use std::{convert::Infallible, fmt, str::FromStr};

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::error::{Error, Result};

/// The element type and the shape of a payload.
///
/// ```
/// use mooncake_relay::{DType, Tensor};
/// let tensor = Tensor::new(DType::Bfloat16, [2, 3]);
/// assert_eq!(tensor.byte_len(), Some(12));
/// assert_eq!(Tensor::bytes(12).shape, [12]);
/// assert_eq!(Tensor::new(DType::Float64, []).byte_len(), Some(8)); // no axis: one element
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tensor {
    /// What an element is.
    pub dtype: DType,
    /// Elements along each axis, of which a relay lets 64 through; none means one element.
    pub shape: Vec<u64>,
}

impl Tensor {
    /// A tensor of this type and shape: an array, a `Vec` or a slice of elements along each axis. A
    /// shape in `usize` is converted: `shape.iter().map(|&n| n as u64).collect::<Vec<_>>()`.
    pub fn new(dtype: DType, shape: impl Into<Vec<u64>>) -> Self {
        Self { dtype, shape: shape.into() }
    }

    /// `len` plain bytes: `torch.uint8` of shape `[len]`.
    pub fn bytes(len: usize) -> Self {
        Self::new(DType::Uint8, [len as u64])
    }

    /// How many bytes its elements take; `None` if the type is unknown or the product overflows.
    ///
    /// ```
    /// use mooncake_relay::{DType, Tensor};
    /// assert_eq!(Tensor::new(DType::Int64, [128, 0, 7]).byte_len(), Some(0));
    /// assert_eq!(Tensor::new(DType::Int64, [u64::MAX, 2]).byte_len(), None);
    /// assert_eq!(Tensor::new("torch.qint8".into(), [4]).byte_len(), None);
    /// ```
    pub fn byte_len(&self) -> Option<u64> {
        let size = self.dtype.size()? as u64;
        if self.shape.contains(&0) {
            return Some(0); // however long the other axes are
        }
        self.shape.iter().try_fold(size, |product, &axis| product.checked_mul(axis))
    }

    /// Whether this can describe `len` bytes. Of an unknown type any shape can.
    ///
    /// # Errors
    ///
    /// [`Error::Metadata`] for `"shape"` or `"dtype"`.
    pub(crate) fn fits(&self, len: usize) -> Result<()> {
        let axes = self.shape.len();
        if axes > MAX_AXES {
            return Err(Error::metadata("shape", format!("{axes} axes are more than {MAX_AXES}")));
        }
        if let DType::Other(name) = &self.dtype {
            return if name.is_empty() || name.len() > MAX_NAME || name.contains(char::is_control) {
                let reason =
                    format!("give a name of 1 to {MAX_NAME} bytes, none of them a control");
                Err(Error::metadata("dtype", reason))
            } else {
                Ok(())
            };
        }
        if self.byte_len() == Some(len as u64) {
            return Ok(());
        }
        let (dtype, shape) = (&self.dtype, &self.shape);
        Err(Error::metadata("shape", format!("{shape:?} of {dtype} is not {len} bytes")))
    }
}

/// The most axes that a relay lets through; torch itself has the same limit.
const MAX_AXES: usize = 64;

/// The longest name of an unknown type, in bytes.
const MAX_NAME: usize = 255;

/// One table for all that is known of a type.
macro_rules! dtypes {
    ($($variant:ident, $name:literal, $size:literal;)+) => {
        /// An element type; prints, and is parsed, as torch prints it. Parsing never fails.
        ///
        /// ```
        /// use mooncake_relay::DType;
        /// assert_eq!(DType::Bfloat16.to_string(), "torch.bfloat16");
        /// assert_eq!("torch.bfloat16".parse(), Ok(DType::Bfloat16));
        /// assert_eq!("torch.qint8".parse(), Ok(DType::Other("torch.qint8".into())));
        /// assert_eq!((DType::Float32.size(), DType::Float32.name()), (Some(4), "torch.float32"));
        /// ```
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum DType {
            $(
                #[doc = concat!("`", $name, "`; bytes an element: ", $size, ".")]
                $variant,
            )+
            /// Any other name, kept as it came: of its shape any number of bytes is believed.
            Other(String),
        }

        impl DType {
            /// Bytes an element, if the type is known.
            pub fn size(&self) -> Option<usize> {
                match self {
                    $(Self::$variant => Some($size),)+
                    Self::Other(_) => None,
                }
            }

            /// The name, as torch prints it.
            pub fn name(&self) -> &str {
                match self {
                    $(Self::$variant => $name,)+
                    Self::Other(name) => name,
                }
            }

            fn known(name: &str) -> Option<Self> {
                match name {
                    $($name => Some(Self::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    Uint8, "torch.uint8", 1;
    Int8, "torch.int8", 1;
    Uint16, "torch.uint16", 2;
    Int16, "torch.int16", 2;
    Uint32, "torch.uint32", 4;
    Int32, "torch.int32", 4;
    Uint64, "torch.uint64", 8;
    Int64, "torch.int64", 8;
    Float16, "torch.float16", 2;
    Bfloat16, "torch.bfloat16", 2;
    Float32, "torch.float32", 4;
    Float64, "torch.float64", 8;
    Complex32, "torch.complex32", 4;
    Complex64, "torch.complex64", 8;
    Complex128, "torch.complex128", 16;
    Bool, "torch.bool", 1;
    Float8E4m3fn, "torch.float8_e4m3fn", 1;
    Float8E5m2, "torch.float8_e5m2", 1;
    Float8E4m3fnuz, "torch.float8_e4m3fnuz", 1;
    Float8E5m2fnuz, "torch.float8_e5m2fnuz", 1;
    Float8E8m0fnu, "torch.float8_e8m0fnu", 1;
}

impl From<&str> for DType {
    fn from(name: &str) -> Self {
        Self::known(name).unwrap_or_else(|| Self::Other(name.to_owned()))
    }
}

impl FromStr for DType {
    type Err = Infallible;

    fn from_str(name: &str) -> Result<Self, Infallible> {
        Ok(name.into())
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl Serialize for DType {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for DType {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;

        impl de::Visitor<'_> for Name {
            type Value = DType;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a type's name, such as \"torch.bfloat16\"")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<DType, E> {
                Ok(name.into())
            }
        }

        deserializer.deserialize_str(Name)
    }
}
