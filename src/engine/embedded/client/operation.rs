//! What the client is doing at this moment, so that it can be ended.

use std::{convert::Infallible, sync::Arc, time::Instant};

use crossbeam::channel::{self, Receiver, Sender};
use parking_lot::{Condvar, Mutex};

use super::socket::Socket;
use crate::{
    error::{Error, Result},
    memory::Span,
};

/// All that is under way.
///
/// A call waits either on the socket that it holds or on a channel; [`end`](Table::end) shuts the
/// one down and disconnects the other, so that no wait outlives it.
#[derive(Debug, Default)]
pub(super) struct Operations {
    table: Mutex<Table>,
    let_go: Condvar,
}

#[derive(Debug, Default)]
struct Table {
    running: bool,
    calls: Vec<Option<Call>>,
}

#[derive(Debug)]
struct Call {
    dest: Option<Span>,
    ended: bool,
    socket: Option<Arc<Socket>>,
    /// What the call waits on when it waits on no socket.
    cancel: Option<Sender<Infallible>>,
}

impl Operations {
    pub(super) fn start(&self) {
        self.table.lock().running = true;
    }

    /// Ends every call and lets no other begin. They return soon; nobody waits for them here.
    pub(super) fn stop(&self) {
        let mut table = self.table.lock();
        table.running = false;
        table.end(|_| true);
    }

    /// Ends the calls that fill a part of `span`, and waits until they have let go of it. False:
    /// `deadline` passed first.
    pub(super) fn end_into(&self, span: Span, deadline: Instant) -> bool {
        let inside = |call: &Call| call.dest.is_some_and(|dest| dest.overlaps(span));
        let mut table = self.table.lock();
        loop {
            // Those too that have begun since.
            table.end(inside);
            if !table.calls.iter().flatten().any(inside) {
                return true;
            }
            if self.let_go.wait_until(&mut table, deadline).timed_out() {
                return !table.calls.iter().flatten().any(inside);
            }
        }
    }

    /// How many calls have begun and not returned.
    #[cfg(test)]
    pub(super) fn under_way(&self) -> usize {
        self.table.lock().calls.iter().flatten().count()
    }

    /// Begins a call that fills `dest`, if it fills anything.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] unless started; [`Error::TimedOut`] if `deadline` has passed.
    pub(super) fn begin(&self, dest: Option<Span>, deadline: Instant) -> Result<Operation<'_>> {
        let began = Instant::now();
        let mut table = self.table.lock();
        if !table.running {
            return Err(Error::Closed);
        }
        if deadline <= began {
            return Err(Error::TimedOut);
        }
        let call = Some(Call { dest, ended: false, socket: None, cancel: None });
        let index = match table.calls.iter().position(Option::is_none) {
            Some(index) => {
                table.calls[index] = call;
                index
            }
            None => {
                table.calls.push(call);
                table.calls.len() - 1
            }
        };
        Ok(Operation { all: self, index, began, deadline })
    }
}

impl Table {
    fn end(&mut self, which: impl Fn(&Call) -> bool) {
        for call in self.calls.iter_mut().flatten().filter(|call| which(call)) {
            call.ended = true;
            call.cancel = None;
            if let Some(socket) = &call.socket {
                socket.shut();
            }
        }
    }
}

/// One call of the client.
#[derive(Debug)]
pub(super) struct Operation<'a> {
    all: &'a Operations,
    index: usize,
    /// When it began.
    pub(super) began: Instant,
    /// When it returns at the latest.
    pub(super) deadline: Instant,
}

impl Operation<'_> {
    /// From now on the call waits on `socket`, and no longer on the one before.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] once the call was ended.
    pub(super) fn hold(&self, socket: &Arc<Socket>) -> Result<()> {
        self.with(|call| {
            call.socket = (!call.ended).then(|| Arc::clone(socket));
            if call.ended { Err(Error::Closed) } else { Ok(()) }
        })
    }

    /// Nobody shuts the socket down any more.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] once the call was ended, and the socket with it.
    pub(super) fn release(&self) -> Result<()> {
        self.with(|call| {
            call.socket = None;
            if call.ended { Err(Error::Closed) } else { Ok(()) }
        })
    }

    /// Disconnected once the call is ended.
    pub(super) fn cancelled(&self) -> Receiver<Infallible> {
        let (cancel, cancelled) = channel::bounded(0);
        self.with(|call| call.cancel = (!call.ended).then_some(cancel));
        cancelled
    }

    fn with<T>(&self, f: impl FnOnce(&mut Call) -> T) -> T {
        let mut table = self.all.table.lock();
        f(table.calls[self.index].as_mut().expect("the entry lives as long as its operation"))
    }
}

impl Drop for Operation<'_> {
    fn drop(&mut self) {
        let mut table = self.all.table.lock();
        // The socket may close here, and that is quick: it is non-blocking and does not linger.
        if table.calls[self.index].take().is_some_and(|call| call.ended) {
            self.all.let_go.notify_all();
        }
    }
}
