//! Where each slot is, as far as it can be known from what was done.

/// How a put's token ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Slot,
    Aborted,
    PeerFailed,
    Closed,
}

/// Where a put's slot is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// Published.
    Open,
    /// Ended while somebody reads it.
    Quarantined,
    /// In the token, which is done.
    Token,
    /// Nowhere: it is free, or another's.
    Over,
}

/// One put.
#[derive(Clone, Debug)]
pub(crate) struct Put {
    pub(crate) place: Place,
    /// What the token has, or will have.
    pub(crate) outcome: Option<Outcome>,
    /// Whether somebody still has the token.
    pub(crate) has_token: bool,
    /// How many are in the middle of reading it.
    pub(crate) readers: u32,
}

impl Put {
    pub(crate) fn new(has_token: bool) -> Self {
        Self { place: Place::Open, outcome: None, has_token, readers: 0 }
    }

    /// Something ends it, if it is open.
    pub(crate) fn end(&mut self, outcome: Outcome) {
        if self.place == Place::Open {
            self.outcome = Some(outcome);
            self.place = if self.readers > 0 { Place::Quarantined } else { self.quiet() };
        }
    }

    /// One who read it reads no more.
    pub(crate) fn leave(&mut self) {
        self.readers -= 1;
        if self.readers == 0 && self.place == Place::Quarantined {
            self.place = self.quiet();
        }
    }

    /// Whether its token is done.
    pub(crate) fn is_done(&self) -> bool {
        match self.outcome {
            None => false,
            Some(Outcome::Slot) => self.place != Place::Quarantined,
            Some(_) => true,
        }
    }

    /// Its token is gone, taken or dropped.
    pub(crate) fn lose_token(&mut self) {
        self.has_token = false;
        if self.place == Place::Token {
            self.place = Place::Over;
        }
    }

    fn quiet(&self) -> Place {
        if self.has_token && self.outcome == Some(Outcome::Slot) {
            Place::Token
        } else {
            Place::Over
        }
    }
}
