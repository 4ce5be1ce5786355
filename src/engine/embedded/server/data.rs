//! One connection to the data port: any number of requests, one after another.
//!
//! ```text
//!   Ask ──read──────────────► Answer ──► Ask
//!    ├───write──► Store ──┬─► Answer ──► Ask       (v1: no answer)
//!    ├───note───► Note ───┤
//!    └───refused──────────┴─► Answer ──► Drain     (v1: closed at once)
//! ```

use std::{
    io,
    time::{Duration, Instant},
};

use arrayvec::ArrayVec;
use tracing::debug;

use super::{Context, SCRATCH, TURN, Turn, line::Line, pinned, staged::Staged};
use crate::{
    engine::{
        Identity, Notification,
        embedded::frame::{
            FrameError, Header, IDENTITY_LEN, MAX_NOTE_BODY, NOTIFY, READ_IDENTIFIED, READ_V1,
            READ_V2, Status, WRITE_V1, WRITE_V2, decode_identity, parse_notification,
        },
        exports::{Pin, Refusal},
    },
    wait::deadline_after,
};

/// How long the rest of a refused request is thrown away, so that no reset overtakes the status.
const DRAIN: Duration = Duration::from_millis(500);
/// What a step costs at least, so that tiny requests do not make a turn long.
const STEP: usize = 1 << 10;

#[derive(Debug)]
pub(super) struct DataConnection {
    line: Line,
    input: Input,
    stage: Stage,
    /// Until when the peer may be silent, if it is in the middle of something.
    silent_until: Option<Instant>,
}

#[derive(Debug)]
enum Stage {
    /// Gathers a header, and the identity if one follows it.
    Ask,
    Answer(Answer),
    /// Receives straight into the pinned bytes.
    Store {
        pin: Pin,
        stored: usize,
        acknowledge: bool,
    },
    /// Gathers a notification of `size` bytes; in `body` only if it is longer than the input.
    Note {
        size: usize,
        body: Vec<u8>,
    },
    Drain {
        until: Instant,
    },
}

/// A status or a stamp or both, then pinned bytes.
#[derive(Debug, Default)]
struct Answer {
    prefix: ArrayVec<u8, 16>,
    body: Option<Body>,
    sent: usize,
    last: bool,
}

/// The bytes of a slot.
#[derive(Debug)]
enum Body {
    Host(Pin),
    Device(Box<Staged>),
}

enum Step {
    /// Moved that many bytes.
    Went(usize),
    /// Until the next event.
    Blocked,
    Over,
}

impl DataConnection {
    pub(super) fn new(line: Line) -> Self {
        Self { line, input: Input::default(), stage: Stage::Ask, silent_until: None }
    }

    pub(super) fn line(&mut self) -> &mut Line {
        &mut self.line
    }

    /// Idle ones have none, nor have readers of a slot: its owner says when he wants it back.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if let Stage::Drain { until } = &self.stage { Some(*until) } else { self.silent_until }
    }

    /// Whether it is the peer's turn to send, or to take, the rest of something.
    fn is_midway(&self) -> bool {
        match &self.stage {
            Stage::Ask => !self.input.bytes().is_empty(),
            Stage::Answer(answer) => answer.body.is_none(),
            Stage::Store { .. } | Stage::Note { .. } => true,
            Stage::Drain { .. } => false,
        }
    }

    /// Whether the owner of the bytes wants them back now.
    pub(super) fn is_cut(&self) -> bool {
        match &self.stage {
            Stage::Answer(Answer { body: Some(body), .. }) => body.pin().is_cut(),
            Stage::Store { pin, .. } => pin.is_cut(),
            _ => false,
        }
    }

    /// Gives back the chunks of a slow peer.
    pub(super) fn yield_chunks(&mut self, now: Instant) {
        if let Stage::Answer(Answer { body: Some(Body::Device(staged)), .. }) = &mut self.stage {
            staged.yield_chunks(now);
        }
    }

    pub(super) fn turn(&mut self, context: &mut Context<'_>) -> io::Result<Turn> {
        let mut moved = false;
        let turn = self.steps(context, &mut moved)?;
        if !self.is_midway() {
            self.silent_until = None;
        } else if moved || self.silent_until.is_none() {
            let stall = context.shared.patience.stall;
            self.silent_until = Some(deadline_after(Instant::now(), stall));
        }
        Ok(turn)
    }

    fn steps(&mut self, context: &mut Context<'_>, moved: &mut bool) -> io::Result<Turn> {
        if self.is_cut() {
            debug!(peer = %self.line.peer(), "a read was cut: its quarantine is over");
            return Ok(Turn::Close);
        }
        let mut left = TURN;
        loop {
            let step = match &mut self.stage {
                Stage::Ask => self.ask(context)?,
                Stage::Answer(_) => self.answer(context)?,
                Stage::Store { .. } => self.store()?,
                Stage::Note { .. } => self.note(context)?,
                Stage::Drain { .. } => match self.line.receive(context.scratch)? {
                    None => Step::Blocked,
                    Some(0) => Step::Over,
                    Some(len) => Step::Went(len),
                },
            };
            match step {
                Step::Blocked => return Ok(Turn::Wait),
                Step::Over => return Ok(Turn::Close),
                Step::Went(len) => {
                    *moved |= len > 0;
                    match left.checked_sub(len.max(STEP)) {
                        Some(rest) => left = rest,
                        None => return Ok(Turn::Again),
                    }
                }
            }
        }
    }

    fn ask(&mut self, context: &Context<'_>) -> io::Result<Step> {
        let Some((header, rest)) = self.input.bytes().split_first_chunk() else {
            return self.fill();
        };
        let header = Header::decode(header);
        let (identity, taken) = match rest.first_chunk::<IDENTITY_LEN>() {
            _ if header.opcode != READ_IDENTIFIED => (None, Header::LEN),
            Some(identity) => (Some(decode_identity(identity)), Header::LEN + IDENTITY_LEN),
            None => return self.fill(),
        };
        self.input.consume(taken);
        // 64-bit only: every size is a length.
        let size = header.size as usize;
        match (header.opcode, identity) {
            (READ_V1 | READ_V2, _) => self.read(&header, size, context),
            (READ_IDENTIFIED, Some(identity)) => self.read_of(&identity, &header, size, context),
            (WRITE_V1 | WRITE_V2, _) => self.write(&header, size, context),
            (NOTIFY, _) if size <= MAX_NOTE_BODY => {
                self.stage = Stage::Note { size, body: Vec::new() };
                Ok(Step::Went(0))
            }
            (NOTIFY, _) => self.refuse(&header, "the note is too long", context),
            _ => self.refuse(&header, "the opcode is not known", context),
        }
    }

    fn read(&mut self, header: &Header, size: usize, context: &Context<'_>) -> io::Result<Step> {
        let mut answer = Answer::default();
        if header.opcode == READ_V2 {
            answer.prefix.extend(Status::Done.encode());
        }
        let exports = &context.shared.exports;
        match exports.pin_range(header.addr, size) {
            Ok(pin) => answer.body = Some(Body::of(pin, context)),
            Err(_) => match exports.stamp(header.addr, size) {
                Some(stamp) => answer.prefix.extend(stamp),
                None => return self.refuse(header, "the range is not published", context),
            },
        }
        self.stage = Stage::Answer(answer);
        Ok(Step::Went(0))
    }

    fn read_of(
        &mut self,
        identity: &Identity,
        header: &Header,
        size: usize,
        context: &Context<'_>,
    ) -> io::Result<Step> {
        let pin = if identity.instance == context.instance {
            context.shared.exports.pin(identity, header.addr, size)
        } else {
            Err(Refusal::OtherInstance)
        };
        let (status, pin) = match pin {
            Ok(pin) => (Status::Done, Some(pin)),
            Err(Refusal::Range) => {
                return self.refuse(header, "the range is not that put's", context);
            }
            Err(Refusal::Gone) => (Status::Gone, None),
            Err(Refusal::OtherInstance) => (Status::OtherInstance, None),
        };
        if pin.is_none() {
            debug!(peer = %self.line.peer(), ?status, "a stale read");
            context.refused();
        }
        let body = pin.map(|pin| Body::of(pin, context));
        self.stage = Stage::Answer(Answer { body, ..Answer::status(status) });
        Ok(Step::Went(0))
    }

    fn write(&mut self, header: &Header, size: usize, context: &Context<'_>) -> io::Result<Step> {
        if !context.shared.limits.allow_writes {
            return self.refuse(header, "writes are not allowed", context);
        }
        let Ok(pin) = context.shared.exports.pin_range(header.addr, size) else {
            return self.refuse(header, "the range is not published", context);
        };
        if context.shared.stager().is_some_and(|stager| stager.covers(pin.span())) {
            return self.refuse(header, "nobody writes to device memory", context);
        }
        let acknowledge = header.opcode == WRITE_V2;
        self.stage = Stage::Store { pin, stored: 0, acknowledge };
        Ok(Step::Went(0))
    }

    /// The low opcodes have no status: their refusal is the close.
    fn refuse(&mut self, header: &Header, reason: &str, context: &Context<'_>) -> io::Result<Step> {
        let Header { size, addr, opcode } = *header;
        debug!(peer = %self.line.peer(), opcode, addr, size, reason, "refused");
        context.refused();
        if opcode < 0x80 {
            return Ok(Step::Over);
        }
        self.stage = Stage::Answer(Answer { last: true, ..Answer::status(Status::Refused) });
        Ok(Step::Went(0))
    }

    fn answer(&mut self, context: &mut Context<'_>) -> io::Result<Step> {
        let Stage::Answer(Answer { prefix, body, sent, last }) = &mut self.stage else {
            return Ok(Step::Over);
        };
        let all = prefix.len() + body.as_ref().map_or(0, |body| body.pin().span().len);
        if *sent < all {
            let first = prefix.get(*sent..).unwrap_or_default();
            let offset = sent.saturating_sub(prefix.len());
            let second = match body {
                None => &[][..],
                Some(Body::Host(pin)) => &pinned::bytes(pin)[offset..],
                Some(Body::Device(staged)) if offset < staged.len() => {
                    // With the first bytes goes the status: without them there is none.
                    let Some(bytes) = staged.at(offset, context)? else { return Ok(Step::Blocked) };
                    bytes
                }
                Some(Body::Device(_)) => &[],
            };
            let second = &second[..second.len().min(TURN)];
            // The answers to requests that came together leave together. A device may keep us waiting
            // over the next one.
            let more = !*last && self.input.has_request() && context.shared.stager().is_none();
            let Some(len) = self.line.send(first, second, more)? else { return Ok(Step::Blocked) };
            *sent += len;
            context.served(len.saturating_sub(first.len()));
            if *sent < all {
                return Ok(Step::Went(len));
            }
        }
        // The kernel has its own copy of every byte: the slot is quiet from here on.
        self.stage = if *last {
            self.line.finish()?;
            Stage::Drain { until: Instant::now() + DRAIN }
        } else {
            Stage::Ask
        };
        Ok(Step::Went(0))
    }

    fn store(&mut self) -> io::Result<Step> {
        let Stage::Store { pin, stored, acknowledge } = &mut self.stage else {
            return Ok(Step::Over);
        };
        let room = &mut pinned::room(pin)[*stored..];
        let early = self.input.bytes();
        let (len, all) = if early.is_empty() {
            let all = room.len();
            let room = &mut room[..all.min(TURN)];
            match self.line.receive(room)? {
                None => return Ok(Step::Blocked),
                Some(0) => return Ok(Step::Over),
                Some(len) => (len, all),
            }
        } else {
            let len = early.len().min(room.len());
            room[..len].copy_from_slice(&early[..len]);
            self.input.consume(len);
            (len, room.len())
        };
        *stored += len;
        if len == all {
            let acknowledge = *acknowledge;
            self.stage =
                if acknowledge { Stage::Answer(Answer::status(Status::Done)) } else { Stage::Ask };
        }
        Ok(Step::Went(len))
    }

    fn note(&mut self, context: &mut Context<'_>) -> io::Result<Step> {
        let Stage::Note { size, body } = &mut self.stage else { return Ok(Step::Over) };
        let size = *size;
        if size <= Input::LEN {
            let Some(note) = self.input.bytes().get(..size) else { return self.fill() };
            let note = parse_notification(note);
            self.input.consume(size);
            return self.take(note, size, context);
        }
        let left = size - body.len();
        if left == 0 {
            let note = parse_notification(body);
            return self.take(note, size, context);
        }
        let early = self.input.bytes();
        let len = if early.is_empty() {
            let room = &mut context.scratch[..left.min(SCRATCH)];
            match self.line.receive(room)? {
                None => return Ok(Step::Blocked),
                Some(0) => return Ok(Step::Over),
                Some(len) => {
                    body.extend_from_slice(&room[..len]);
                    len
                }
            }
        } else {
            let len = early.len().min(left);
            body.extend_from_slice(&early[..len]);
            self.input.consume(len);
            len
        };
        Ok(Step::Went(len))
    }

    fn take(
        &mut self,
        note: Result<Notification, FrameError>,
        size: usize,
        context: &Context<'_>,
    ) -> io::Result<Step> {
        let header = Header { size: size as u64, addr: 0, opcode: NOTIFY };
        match note.map(|note| context.hear(note)) {
            Ok(true) => {
                self.stage = Stage::Answer(Answer::status(Status::Done));
                Ok(Step::Went(0))
            }
            Ok(false) => self.refuse(&header, "the queue of notes is full", context),
            Err(error) => self.refuse(&header, &error.to_string(), context),
        }
    }

    fn fill(&mut self) -> io::Result<Step> {
        Ok(match self.line.receive(self.input.room())? {
            None => Step::Blocked,
            Some(0) => Step::Over,
            Some(len) => {
                self.input.filled(len);
                Step::Went(len)
            }
        })
    }
}

impl Body {
    fn of(pin: Pin, context: &Context<'_>) -> Self {
        match context.shared.stager() {
            Some(stager) if stager.covers(pin.span()) => {
                Self::Device(Box::new(Staged::new(&stager, pin)))
            }
            _ => Self::Host(pin),
        }
    }

    fn pin(&self) -> &Pin {
        match self {
            Self::Host(pin) => pin,
            Self::Device(staged) => staged.pin(),
        }
    }
}

impl Answer {
    fn status(status: Status) -> Self {
        Self { prefix: status.encode().into_iter().collect(), ..Self::default() }
    }
}

/// Received, and not looked at yet.
#[derive(Debug)]
struct Input {
    buffer: Box<[u8; Self::LEN]>,
    start: usize,
    end: usize,
}

impl Input {
    /// Room for as many requests as are asked at once, and for notes of ours, so that one system call
    /// receives them.
    const LEN: usize = 4 << 10;

    /// Whether a whole request is here that is answered at once.
    fn has_request(&self) -> bool {
        let Some((header, rest)) = self.bytes().split_first_chunk() else { return false };
        let Header { size, opcode, .. } = Header::decode(header);
        match opcode {
            READ_IDENTIFIED => rest.len() >= IDENTITY_LEN,
            NOTIFY => rest.len() as u64 >= size,
            _ => false,
        }
    }

    fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    fn consume(&mut self, len: usize) {
        self.start += len;
    }

    /// Where the next bytes go. Not empty unless the input is full.
    fn room(&mut self) -> &mut [u8] {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        &mut self.buffer[self.end..]
    }

    fn filled(&mut self, len: usize) {
        self.end += len;
    }
}

impl Default for Input {
    fn default() -> Self {
        Self { buffer: Box::new([0; Self::LEN]), start: 0, end: 0 }
    }
}
