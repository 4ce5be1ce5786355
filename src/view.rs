//! A look at a sender's slot, in place: no copy, on the same host.

use std::{
    fmt, slice,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    core::Core,
    engine::Viewed,
    error::{Error, Result},
    gets::{Handle, Job, What},
    memory::Host,
    process,
    tensor::Tensor,
    wait::deadline_after,
};

/// The bytes of one put, in the sender's own slot: what [`Relay::view`](crate::Relay::view) gives.
///
/// The slot stays as it is while the view holds; dropping the view tells the sender that it was
/// read. It holds until it is dropped, or until the first of these: [`Config::view_limit`] passes,
/// the put ends on the sender's side and its quarantine is over, the sender dies, or this relay
/// aborts the get or closes. From then on [`is_gone`](Self::is_gone) is true and
/// [`copy_to`](Self::copy_to) fails: the sender may write its next tensor there at any moment.
/// The memory itself stays mapped while the view lives.
///
/// [`Config::view_limit`]: crate::Config::view_limit
pub struct View {
    core: Arc<Core<Host>>,
    viewed: Box<dyn Viewed>,
    handle: Handle,
    what: What,
    tensor: Tensor,
}

impl View {
    /// The number of bytes.
    pub fn len(&self) -> usize {
        self.what.remote.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What the bytes are.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Where they are, to be read only; mapped while the view lives.
    ///
    /// What is read there was that put's if the view is not [gone](Self::is_gone) afterwards.
    pub fn as_ptr(&self) -> *const u8 {
        self.viewed.span().ptr.as_ptr()
    }

    /// Whether it holds no more. Asked after a use of the bytes, it says whether that use was good.
    pub fn is_gone(&self) -> bool {
        !process::is_here() || !self.viewed.holds() || Instant::now() >= self.what.deadline
    }

    /// Copies all of it to the front of `dest`.
    ///
    /// # Errors
    ///
    /// [`Error::TooLarge`] if `dest` is too short. [`Error::Stale`] if the view is gone, or went
    /// during the copy: then `dest` is unspecified.
    pub fn copy_to(&self, dest: &mut [u8]) -> Result<()> {
        let (len, slot_size) = (self.len(), dest.len());
        let dest = dest.get_mut(..len).ok_or(Error::TooLarge { len, slot_size })?;
        self.check()?;
        self.viewed.copy_to(dest);
        self.check()
    }

    /// The bytes, as a slice of the sender's memory.
    ///
    /// # Safety
    ///
    /// For as long as the slice is used, the view is not [gone](Self::is_gone), and the sender does
    /// not write to the slot, which a relay of this library does only once the view is gone. So the
    /// caller knows the sender's program, and that it lives and keeps the put open until the slice
    /// is used no more: the lease and [`Config::view_limit`](crate::Config::view_limit) are longer.
    /// Where that cannot be promised, use [`copy_to`](Self::copy_to).
    pub unsafe fn as_slice(&self) -> &[u8] {
        let span = self.viewed.span();
        // SAFETY: the engine keeps the span mapped while `viewed` lives, and the caller answers for
        // it that nobody writes there.
        unsafe { slice::from_raw_parts(span.ptr.as_ptr(), span.len) }
    }

    fn check(&self) -> Result<()> {
        process::check()?;
        if self.is_gone() {
            return Err(gone(&self.what));
        }
        Ok(())
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if !process::is_here() {
            return;
        }
        let held = self.viewed.end();
        self.core.end_view(self.handle, &self.what, held);
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("peer", &self.what.remote.peer)
            .field("len", &self.len())
            .field("is_gone", &self.is_gone())
            .finish_non_exhaustive()
    }
}

impl Core<Host> {
    /// Pins what is to be viewed. It is in the table of gets from then on, so that whatever ends a
    /// get ends it.
    pub(crate) fn view(
        self: &Arc<Self>,
        mut what: What,
        tensor: Tensor,
        limit: Duration,
    ) -> Result<View> {
        let Some(viewed) = self.engine.view(&what.remote, what.deadline) else {
            return Err(Error::config("metadata", NOT_HERE));
        };
        self.learn(&what, viewed.as_ref().err());
        let viewed = viewed.inspect_err(|error| {
            self.counters.gets.count();
            self.count_failure(&what, error);
        })?;
        let now = Instant::now();
        what.deadline = deadline_after(now, limit);
        let job = Job { what: what.clone(), since: now, request: None, completer: None };
        let handle = self.gets.enter(job, viewed.span())?;
        self.counters.gets.count();
        self.wake_notifier_by(self.ticks(what.deadline));
        Ok(View { core: Arc::clone(self), viewed, handle, what, tensor })
    }

    fn end_view(&self, handle: Handle, what: &What, held: bool) {
        let finished = self.gets.finish(handle);
        if !finished.is_some_and(|(_, wanted)| wanted) {
            // Whoever ended it has counted it and told the sender.
            return;
        }
        if held {
            self.acknowledge(what);
            self.count_got(what);
        } else {
            self.count_failure(what, &gone(what));
        }
    }
}

const NOT_HERE: &str = "its sender's memory cannot be viewed from here: it is on another host, in \
                        another network namespace or of another user, or shared memory is off: \
                        use get or get_into";

fn gone(what: &What) -> Error {
    Error::stale(&what.remote.peer, "the view is gone: the sender has its slot back")
}
