//! One connection to the control port: one frame, one reply.

use std::{
    io, mem,
    time::{Duration, Instant},
};

use tracing::debug;

use super::{Context, TURN, Turn, line::Line};
use crate::engine::embedded::frame::{
    Control, ControlKind, FrameError, check_json, decode_control, encode_control,
    parse_notification,
};

/// How long a client may take for its request, and for hearing the reply.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long a client that has its reply may keep the connection.
const LINGER: Duration = Duration::from_secs(1);
/// A request of this size is always taken, a longer one only while there is memory for it.
const MODEST: usize = 64 << 10;
/// How many bytes all requests that are not whole yet may take together.
const HELD_LIMIT: usize = 64 << 20;

#[derive(Debug)]
pub(super) struct ControlConnection {
    line: Line,
    stage: Stage,
    until: Instant,
}

#[derive(Debug)]
enum Stage {
    /// What has arrived of the request.
    Request(Vec<u8>),
    Reply {
        frame: Vec<u8>,
        sent: usize,
    },
    /// The client closes first, so that no reset overtakes the reply.
    Linger,
}

impl ControlConnection {
    pub(super) fn new(line: Line) -> Self {
        let until = Instant::now() + PATIENCE;
        Self { line, stage: Stage::Request(Vec::new()), until }
    }

    pub(super) fn line(&mut self) -> &mut Line {
        &mut self.line
    }

    pub(super) fn deadline(&self) -> Instant {
        self.until
    }

    /// How many bytes it holds of a request that is not whole.
    pub(super) fn held(&self) -> usize {
        if let Stage::Request(input) = &self.stage { input.len() } else { 0 }
    }

    pub(super) fn turn(&mut self, context: &mut Context<'_>) -> io::Result<Turn> {
        let mut left = TURN;
        loop {
            let moved = match &mut self.stage {
                Stage::Request(input) => {
                    let Some(len) = self.line.receive(context.scratch)? else {
                        return Ok(Turn::Wait);
                    };
                    if len == 0 {
                        return Ok(Turn::Close);
                    }
                    if input.len() + len > MODEST && context.held + input.len() > HELD_LIMIT {
                        debug!(peer = %self.line.peer(), "no memory left for a long request");
                        return Ok(Turn::Close);
                    }
                    input.extend_from_slice(&context.scratch[..len]);
                    match answer(input, context) {
                        Ok(None) => {}
                        Ok(Some(frame)) => self.stage = Stage::Reply { frame, sent: 0 },
                        Err(error) => {
                            debug!(peer = %self.line.peer(), %error, "bad control frame");
                            context.refused();
                            return Ok(Turn::Close);
                        }
                    }
                    len
                }
                Stage::Reply { frame, sent } => {
                    let Some(len) = self.line.send(&frame[*sent..], &[], false)? else {
                        return Ok(Turn::Wait);
                    };
                    *sent += len;
                    if *sent == frame.len() {
                        self.line.finish()?;
                        self.stage = Stage::Linger;
                        self.until = Instant::now() + LINGER;
                    }
                    len
                }
                Stage::Linger => match self.line.receive(context.scratch)? {
                    None => return Ok(Turn::Wait),
                    Some(0) => return Ok(Turn::Close),
                    Some(len) => len,
                },
            };
            match left.checked_sub(moved) {
                Some(rest) => left = rest,
                None => return Ok(Turn::Again),
            }
        }
    }
}

/// The reply to the frame in `input`; `None` while it is not whole.
fn answer(input: &mut Vec<u8>, context: &Context<'_>) -> Result<Option<Vec<u8>>, FrameError> {
    let Some(Control { kind, json, .. }) = decode_control(input)? else { return Ok(None) };
    let reply = match kind {
        ControlKind::Connection | ControlKind::Untyped => {
            check_json(json)?;
            encode_control(kind, SKELETON)
        }
        ControlKind::Metadata => {
            check_json(json)?;
            encode_control(kind, &context.shared.descriptor(context.instance).encode())
        }
        ControlKind::Notify => {
            let taken = context.hear(parse_notification(json)?);
            encode_control(kind, if taken { NOTE_TAKEN } else { NOTE_REFUSED })
        }
        ControlKind::Probe => {
            check_json(json)?;
            encode_control(kind, ALIVE)
        }
    };
    drop(mem::take(input));
    Ok(Some(reply))
}

const SKELETON: &[u8] = br#"{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"reply_msg":""}
"#;
const NOTE_TAKEN: &[u8] = b"{\"name\":\"\",\"notify_msg\":\"success\"}\n";
/// The sender takes an empty message for a refusal.
const NOTE_REFUSED: &[u8] = b"{\"name\":\"\",\"notify_msg\":\"\"}\n";
const ALIVE: &[u8] = b"{\"status\":\"success\"}\n";
