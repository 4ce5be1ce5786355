//! How it all fits together: to be read, not called.
//!
//! | page | answers |
//! |---|---|
//! | this one | what happens between `put` and the sender's token |
//! | [`slots`] | who owns a slot when, how puts and gets end, what each side knows then |
//! | [`threads`] | who may call what from where, what blocks, what happens before what, which order holds |
//! | [`settings`] | how many credits, how large, how long, which threads and cores; the environment by name |
//! | [`deployment`] | two ports, firewalls, containers, IPv6; the real engine, and Python peers on it |
//! | [`threats`] | who is trusted with what; what strangers, local users and peers can do, and the test for each |
//! | [`troubleshooting`] | symptom → where to look → what to do; every counter, error and log line of info and above |
//!
//! # The flow
//!
//! ```text
//!  the sender's process                                  the receiver's process
//!
//!  1 acquire ──► Slot: you fill it
//!  2 put ──────► the relay owns it; its range is served
//!    │ └─ Token
//!    └── Metadata ══ 3 JSON text, by any channel of yours ══► parse
//!                                                        4 get ──► a receive slot, or your buffer
//!      served by the engine ◄═════ 5 one-sided read ═══════ a transfer thread, or whoever waits
//!      nobody else is involved                             │
//!                                                        6 the bytes are those of that put?
//!  8 the notifier, or        ◄════ 7 notification ═════════┤
//!    whoever waits, hears it                             9 Token: Ok(Slot)
//!  9 Token: Ok(Slot): fill it again, or drop it
//! ```
//!
//! 1. A sender takes a free slot: a credit. There are [`Config::credits`](crate::Config::credits)
//!    of them, and no more puts than that are ever under way.
//! 2. [`put`](crate::Relay::put) moves the slot into the relay. From here on nobody can write to
//!    it, and the engine serves its bytes: those of that put, for as long as it is open.
//! 3. The [`Metadata`](crate::Metadata) says where the bytes are, what they are, and which put of
//!    which relay. How the text travels is your business: a pipe, a queue, an HTTP body.
//! 4. A receiver queues a [`get`](crate::Relay::get), or waits for it in
//!    [`get_into`](crate::Relay::get_into).
//! 5. The bytes travel once, from the sender's slot to the receiver's memory. No thread of yours
//!    takes part on the sender's side: its engine answers (the embedded one on a thread of its own).
//! 6. Between two relays of this library the sender's engine checks the put's identity before the
//!    first byte (the embedded and the in-process engine), or the receiver reads a stamp after the
//!    last (engines that cannot check). A mismatch is [`Error::Stale`](crate::Error::Stale).
//! 7. Only then the receiver notifies the sender. What is not taken at the first try is tried
//!    again aside, while the lease lasts.
//! 8. Whoever polls the sender's engine hears it and ends the put: the notifier thread, or a
//!    caller that waits, polls a token or waits for a slot.
//! 9. Each side's token yields its slot. *No order holds between the two*: either may be first.
//!
//! Two transfers, both sides in one process:
//!
//! ```
//! use std::{sync::Arc, time::Duration};
//! use mooncake_relay::{Config, DType, InProcessEngine, Metadata, Relay, Tensor};
//!
//! # fn main() -> mooncake_relay::Result<()> {
//! let config = Config::default().with_slot_size(1 << 16);
//! let sender = Relay::new(Arc::new(InProcessEngine::new("guide-sender")?), &config)?;
//! let receiver = Relay::new(Arc::new(InProcessEngine::new("guide-receiver")?), &config)?;
//!
//! // 1, 2: in place, without a copy.
//! let mut slot = sender.acquire(12, Duration::from_secs(1))?;
//! slot.fill(7);
//! let (metadata, put) = sender.put(slot, Tensor::new(DType::Bfloat16, [2, 3]))?;
//!
//! // 3, 4: a token that is waited on.
//! let metadata: Metadata = metadata.to_string().parse()?;
//! let received = receiver.get(&metadata)?.wait()?;
//! assert_eq!((&received[..], metadata.tensor()), (&[7; 12][..], &Tensor::new(DType::Bfloat16, [2, 3])));
//! let slot = put.wait()?; // 9: the sender's slot, to be filled again
//!
//! // The same slot once more, this time into a buffer of the receiver's own.
//! let (metadata, put) = sender.put(slot, Tensor::bytes(12))?;
//! let mut buffer = [0; 12];
//! receiver.get_into(&metadata, &mut buffer, Duration::from_secs(1))?;
//! assert_eq!(buffer, [7; 12]);
//! drop(put); // abandons the claim only: the slot is free once the notification is heard
//! # Ok(())
//! # }
//! ```
//!
//! # What there is
//!
//! | type | is |
//! |---|---|
//! | [`Relay`](crate::Relay) | the memory, the threads and the door to both; one for each engine |
//! | [`Slot`](crate::Slot) | the right to use one piece of that memory; a `[u8]` |
//! | [`Token`](crate::Token) | the claim on one transfer's outcome |
//! | [`Completion`](crate::Completion) | an outcome as a channel delivers it |
//! | [`Metadata`](crate::Metadata) | which bytes, where, of which put; JSON text |
//! | [`Tensor`](crate::Tensor), [`DType`](crate::DType) | what the bytes are; carried, not looked into |
//! | [`Config`](crate::Config) | the settings of a relay |
//! | [`View`](crate::View) | a look at a sender's slot in place, on the same host |
//! | [`Error`](crate::Error) | what went wrong: a variant for each remedy |
//! | [`Closed`](crate::Closed) | what a close found |
//! | [`Health`](crate::Health), [`Counters`](crate::Counters) | how it is doing |
//! | [`Engine`](crate::Engine) | how bytes travel; bring your own, or take one of the next three |
//! | `EmbeddedEngine` | shared memory on the same host, else TCP that speaks Mooncake's protocol; feature `embedded`, on by default |
//! | `MooncakeEngine` | the real Mooncake engine, loaded when it is opened; feature `mooncake`, on by default |
//! | [`InProcessEngine`](crate::InProcessEngine) | peers inside one process, for tests |
//! | [`open_engine`](crate::open_engine), [`EngineOptions`](crate::EngineOptions) | an engine by its name, for configuration |
//! | `Cuda`, `Staging` | slots in device memory, and how engines get at them; feature `cuda` |

#[doc = include_str!("guide/slots.md")]
pub mod slots {}

#[doc = include_str!("guide/threads.md")]
pub mod threads {}

#[doc = include_str!("guide/settings.md")]
pub mod settings {}

#[doc = include_str!("guide/deployment.md")]
pub mod deployment {}

#[doc = include_str!("guide/threats.md")]
pub mod threats {}

#[doc = include_str!("guide/troubleshooting.md")]
pub mod troubleshooting {}
