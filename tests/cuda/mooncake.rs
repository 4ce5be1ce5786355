//! What the Mooncake engine tells its library of a device's memory: on a library that notes it down.

use std::{env, fs, path::PathBuf, process, process::Command, sync::Arc};

use mooncake_relay::{Config, Cuda, Error, MooncakeConfig, MooncakeEngine, Relay};

use crate::{Rig, cases};

cases! {
    Device []:
        the_mooncake_engine_registers_a_device_s_memory_as_that,
        a_mooncake_library_without_cuda_is_given_no_device_s_memory;
}

/// As much of the library as a relay needs that moves nothing.
const LIBRARY: &str = r#"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef struct { char *name, *msg; } note;
typedef struct { int opcode; void *source; int target; unsigned long offset, len; } request;
typedef struct { int status; size_t bytes; } status;
static note last, *waiting;
static void say(const char *what, const char *location, void *addr, size_t len) {
    FILE *file = fopen(getenv("MOONCAKE_RELAY_TEST_NOTED"), "a");
    fprintf(file, "%s %s %lu %lu\n", what, location, (unsigned long)addr, (unsigned long)len);
    fclose(file);
}
void *createTransferEngine(const char *a, const char *b, const char *c, unsigned long d, int e) { return malloc(1); }
void destroyTransferEngine(void *e) { free(e); }
int getLocalIpAndPort(void *e, char *out, size_t len) { snprintf(out, len, "127.0.0.1:1"); return 0; }
int discoverTopology(void *e) { return 0; }
void *installTransport(void *e, const char *proto, void **args) { return e; }
int uninstallTransport(void *e, const char *proto) { return 0; }
int openSegment(void *e, const char *name) { return -1; }
int openSegmentNoCache(void *e, const char *name) { return -1; }
int closeSegment(void *e, int id) { return 0; }
int removeLocalSegment(void *e, const char *name) { return 0; }
int registerLocalMemory(void *e, void *addr, size_t len, const char *location, int remote) {
    say(remote ? "remote" : "local", location, addr, len); return 0;
}
int unregisterLocalMemory(void *e, void *addr) { say("gone", "-", addr, 0); return 0; }
int registerLocalMemoryBatch(void *e, void *entries, size_t n, const char *location) { return 0; }
int unregisterLocalMemoryBatch(void *e, void **addrs, size_t n) { return 0; }
unsigned long allocateBatchID(void *e, size_t n) { return 1; }
int freeBatchID(void *e, unsigned long batch) { return 0; }
int submitTransfer(void *e, unsigned long batch, request *r, size_t n) {
    memcpy(r->source, (void *)r->offset, r->len); return 0;
}
int submitTransferWithNotify(void *e, unsigned long batch, void *requests, size_t n, note m) { return 1; }
int getTransferStatus(void *e, unsigned long batch, size_t task, status *s) { s->status = 4; return 0; }
note *getNotifsFromEngine(void *e, int *n) { note *m = waiting; *n = m != NULL; waiting = NULL; return m; }
int freeNotifsMsgBuf(note *msgs, int n) { return 0; }
int genNotifyInEngine(void *e, unsigned long target, note m) {
    last.name = strdup(m.name), last.msg = strdup(m.msg), waiting = &last; return 0;
}
int syncSegmentCache(void *e) { return 0; }
"#;

/// The library, and what it has noted.
struct Noting {
    library: PathBuf,
    noted: PathBuf,
}

impl Noting {
    fn new() -> Self {
        let file = |end| env::temp_dir().join(format!("mooncake-noting-{}{end}", process::id()));
        let (source, library, noted) = (file(".c"), file(".so"), file(".txt"));
        fs::write(&source, LIBRARY).unwrap();
        fs::write(&noted, "").unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-w", "-shared", "-fPIC"]).arg(&source).arg("-o").arg(&library);
        assert!(cc.status().unwrap().success());
        fs::remove_file(source).unwrap();
        // SAFETY: this process is for one case, which has started no other thread yet.
        unsafe { env::set_var("MOONCAKE_RELAY_TEST_NOTED", &noted) };
        Self { library, noted }
    }

    fn open(&self, protocol: &str) -> Arc<MooncakeEngine> {
        let config = MooncakeConfig {
            hostname: "127.0.0.1".into(),
            protocol: protocol.into(),
            library: Some(self.library.clone()),
            ..MooncakeConfig::default()
        };
        let engine = Arc::new(MooncakeEngine::open(&config).unwrap());
        fs::write(&self.noted, "").unwrap(); // what the library was tried with
        engine
    }

    /// Each line's first two words, sorted.
    fn noted(&self) -> Vec<String> {
        let text = fs::read_to_string(&self.noted).unwrap();
        let two = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
        let mut lines: Vec<_> = text.lines().map(two).collect();
        lines.sort();
        lines
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.library);
        let _ = fs::remove_file(&self.noted);
    }
}

fn make(engine: Arc<MooncakeEngine>) -> Result<Relay<Cuda>, Error> {
    Relay::with_memory(0, engine, &Config::default().with_slot_size(1 << 20))
}

fn the_mooncake_engine_registers_a_device_s_memory_as_that(_: &Rig) {
    let noting = Noting::new();
    let relay = make(noting.open("nvlink")).unwrap();
    // The slots; the stamps; and words to read stamps into.
    let expected = ["local *", "local cuda:0", "remote *", "remote cuda:0"];
    assert_eq!(noting.noted(), expected);
    assert_eq!(relay.health().device, "cuda:0");
    drop(relay);
    assert_eq!(noting.noted().iter().filter(|line| *line == "gone -").count(), 4);
}

fn a_mooncake_library_without_cuda_is_given_no_device_s_memory(_: &Rig) {
    let noting = Noting::new();
    match make(noting.open("tcp")) {
        Err(Error::Config { field: "engine", reason }) => {
            assert!(
                reason.contains("cuda:0") && reason.contains("mooncake-transfer-engine"),
                "{reason}"
            );
        }
        other => panic!("{other:?}"),
    }
    assert!(noting.noted().iter().all(|line| !line.contains("cuda")));
}
