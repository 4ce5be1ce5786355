/* A stand-in for the driver of NVIDIA devices (libcuda.so), for tests where there is none.
 *
 * It has the functions that the library and cudarc call, in host memory, and is as strict as the real
 * one at its strictest:
 *
 * - A device's address is mapped without any right: whoever touches it but by these functions dies.
 * - A call without a current context, or with another than its stream's, fails.
 * - Streams run on threads of their own. What is enqueued waits: for a time that can be set, or until
 *   it is let go.
 * - What is freed, closed or reused while a stream still uses it is counted as a violation.
 *
 * It counts calls and live objects, and has any call fail that it is told to. From inside the process
 * it is told so by the standin_* functions, from outside by the environment:
 *
 *   STANDIN_DEVICES=N        how many devices there are (2)
 *   STANDIN_MEMORY=BYTES     what each of them has (256 MiB)
 *   STANDIN_DELAY_US=N       how long each copy takes at least (0)
 *   STANDIN_STRICT=1         copies of pageable memory return before they are over, as of pinned memory
 *   STANDIN_NO_IPC=1         no memory is shared with other processes
 *   STANDIN_FAIL=F:N:CODE,.. the N-th call of F from now on fails with CODE; N = 0: every call
 *   STANDIN_REPORT=FILE      at exit, a line for each kind of object: its name, and how many live
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define API __attribute__((visibility("default")))

typedef unsigned result;
typedef unsigned long long devptr;

enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100,
    INVALID_DEVICE = 101, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600,
    NOT_SUPPORTED = 801, UNKNOWN = 999,
};

enum { MOST_DEVICES = 8, MOST_BLOCKS = 4096, DEPTH = 64 };

/* Everything below belongs to whoever holds this; whatever changes is told to all. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

struct context { int device, retained; struct stream *null_stream; };

struct event { struct event *self; struct context *context; uint64_t recorded, done; };

struct stream {
    struct stream *self;
    struct context *context;
    struct op *first, *last;
    uint64_t queued, done;
    int held, closing;
    pthread_t thread;
};

/* What a stream does: copies (`value` < 0), fills, waits for an event, or marks one. */
struct op {
    enum { COPY, FILL, WAIT, MARK } kind;
    struct op *next;
    char *from, *to, *own;
    size_t len;
    int value;
    struct event *event;
    uint64_t number;
    struct block *blocks[2];
};

/* Memory: a device's, pinned, or another process's. */
struct block {
    enum { FREE, DEVICE, PINNED, IPC } kind;
    struct context *context;
    char *addr, *real;
    size_t len;
    int fd, users, opened;
    char handle[64];
};

static int devices = 2, started, strict, no_ipc, holding;
static size_t memory = 256u << 20, used[MOST_DEVICES];
static unsigned delay_us;
static struct context contexts[MOST_DEVICES];
static struct block blocks[MOST_BLOCKS];
static long live_streams, live_events, violations;
static __thread struct context *stack[DEPTH];
static __thread int depth;

/* ---- what is told from outside ---- */

struct function { const char *name; unsigned long calls, at; unsigned code; int after; };
static struct function functions[96];

static struct function *find(const char *name) {
    struct function *f = functions;
    while (f->name && strcmp(f->name, name)) f++;
    if (!f->name) f->name = strdup(name);
    return f;
}

/* Counts a call, and says what it is to fail with. */
static result fails(const char *name, int after) {
    pthread_mutex_lock(&lock);
    struct function *f = find(name);
    if (!after) f->calls++;
    int now = f->code && f->after == after && (f->at == 0 || f->calls == f->at);
    result code = now ? f->code : OK;
    if (now && f->at) f->code = 0;
    pthread_mutex_unlock(&lock);
    return code;
}

#define ENTER do { result failed_ = fails(__func__, 0); if (failed_) return failed_; } while (0)
/* The call was done, and yet says that it failed: with the fault of an earlier one, say. */
#define LEAVE return fails(__func__, 1)

API void standin_fail(const char *name, unsigned nth, unsigned code, int after) {
    pthread_mutex_lock(&lock);
    struct function *f = find(name);
    f->at = nth ? f->calls + nth : 0, f->code = code, f->after = after;
    pthread_mutex_unlock(&lock);
}

API unsigned long standin_calls(const char *name) {
    pthread_mutex_lock(&lock);
    unsigned long calls = find(name)->calls;
    pthread_mutex_unlock(&lock);
    return calls;
}

/* The name of the n-th function that was called, or NULL. */
API const char *standin_called(unsigned n) { return n < 96 ? functions[n].name : NULL; }

API void standin_hold(int on) {
    pthread_mutex_lock(&lock);
    holding = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

API void standin_hold_stream(struct stream *stream, int on) {
    pthread_mutex_lock(&lock);
    stream->held = on;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
}

API void standin_delay(unsigned us) { delay_us = us; }
API void standin_strict(int on) { strict = on; }
API void standin_memory(size_t bytes) { memory = bytes; }

static long live(int kind) {
    long count = 0;
    for (int i = 0; i < MOST_BLOCKS; i++) count += (int)blocks[i].kind == kind;
    return count;
}

/* "device", "pinned", "ipc", "stream", "event", "context" or "violation". */
API long standin_live(const char *kind) {
    pthread_mutex_lock(&lock);
    long count = -1, retained = 0;
    for (int i = 0; i < devices; i++) retained += contexts[i].retained;
    if (!strcmp(kind, "device")) count = live(DEVICE);
    if (!strcmp(kind, "pinned")) count = live(PINNED);
    if (!strcmp(kind, "ipc")) count = live(IPC);
    if (!strcmp(kind, "stream")) count = live_streams;
    if (!strcmp(kind, "event")) count = live_events;
    if (!strcmp(kind, "context")) count = retained;
    if (!strcmp(kind, "violation")) count = violations;
    pthread_mutex_unlock(&lock);
    return count;
}

static void violation(const char *what) {
    violations++;
    fprintf(stderr, "standin: %s\n", what);
}

__attribute__((constructor)) static void begin(void) {
    const char *set;
    if ((set = getenv("STANDIN_DEVICES"))) devices = atoi(set);
    if (devices > MOST_DEVICES) devices = MOST_DEVICES;
    if ((set = getenv("STANDIN_MEMORY"))) memory = strtoull(set, NULL, 10);
    if ((set = getenv("STANDIN_DELAY_US"))) delay_us = atoi(set);
    strict = getenv("STANDIN_STRICT") != NULL;
    no_ipc = getenv("STANDIN_NO_IPC") != NULL;
    if ((set = getenv("STANDIN_FAIL"))) {
        char *text = strdup(set), *rest = text, *one;
        while ((one = strsep(&rest, ","))) {
            char *name = strsep(&one, ":"), *nth = strsep(&one, ":");
            if (name && nth && one) standin_fail(name, atoi(nth), atoi(one), 0);
        }
        free(text);
    }
    for (int i = 0; i < devices; i++) contexts[i].device = i;
}

__attribute__((destructor)) static void end(void) {
    static const char *kinds[] = { "device", "pinned", "ipc", "stream", "event", "context", "violation" };
    const char *path = getenv("STANDIN_REPORT");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    for (int i = 0; i < 7; i++) fprintf(file, "%s %ld\n", kinds[i], standin_live(kinds[i]));
    fclose(file);
}

/* ---- streams ---- */

static void run(struct op *op) {
    if (op->kind == COPY) memmove(op->to, op->from, op->len);
    if (op->kind == FILL) memset(op->to, op->value, op->len);
}

static void *work(void *argument) {
    struct stream *stream = argument;
    pthread_mutex_lock(&lock);
    for (;;) {
        struct op *op = stream->first;
        if (!op && stream->closing) break;
        int moves = op && (op->kind == COPY || op->kind == FILL);
        if (!op || (moves && (holding || stream->held))
            || (op->kind == WAIT && op->event->done < op->number)) {
            pthread_cond_wait(&changed, &lock);
            continue;
        }
        if (moves) {
            pthread_mutex_unlock(&lock);
            if (delay_us) usleep(delay_us);
            run(op);
            pthread_mutex_lock(&lock);
        }
        if (op->kind == MARK && op->event->done < op->number) op->event->done = op->number;
        for (int i = 0; i < 2; i++) if (op->blocks[i]) op->blocks[i]->users--;
        stream->first = op->next;
        if (!stream->first) stream->last = NULL;
        stream->done++;
        free(op->own);
        free(op);
        pthread_cond_broadcast(&changed);
    }
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* Under the lock. */
static struct stream *make_stream(struct context *context) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->self = stream, stream->context = context;
    pthread_create(&stream->thread, NULL, work, stream);
    pthread_detach(stream->thread);
    return stream;
}

/* Under the lock. The legacy stream and that of each thread are one here. */
static struct stream *stream_of(struct stream *stream) {
    struct context *context = depth ? stack[depth - 1] : NULL;
    if (!context) return NULL;
    if ((uintptr_t)stream <= 2) {
        if (!context->null_stream) context->null_stream = make_stream(context);
        return context->null_stream;
    }
    return stream->self == stream && stream->context == context ? stream : NULL;
}

/* Under the lock. */
static void enqueue(struct stream *stream, struct op op) {
    struct op *own = malloc(sizeof op);
    *own = op;
    own->next = NULL;
    for (int i = 0; i < 2; i++) if (own->blocks[i]) own->blocks[i]->users++;
    if (stream->last) stream->last->next = own; else stream->first = own;
    stream->last = own;
    stream->queued++;
    pthread_cond_broadcast(&changed);
}

/* Under the lock. */
static void drain(struct stream *stream) {
    uint64_t until = stream->queued;
    while (stream->done < until) pthread_cond_wait(&changed, &lock);
}

/* ---- blocks ---- */

static struct block *block_at(const void *addr, size_t len, int kinds) {
    for (int i = 0; i < MOST_BLOCKS; i++) {
        struct block *b = &blocks[i];
        uintptr_t at = (uintptr_t)addr, base = (uintptr_t)b->addr;
        if (b->kind && (kinds >> b->kind & 1) && at >= base && at - base + len <= b->len) return b;
    }
    return NULL;
}

static struct block *free_block(void) {
    for (int i = 0; i < MOST_BLOCKS; i++) if (!blocks[i].kind) return &blocks[i];
    return NULL;
}

/* Under the lock. What a processor must not touch stands at `addr`, what it is made of at `real`. */
static int map_block(struct block *b, int kind, int fd, size_t len) {
    void *real = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    void *addr = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (real == MAP_FAILED || addr == MAP_FAILED) return 0;
    *b = (struct block){ .kind = kind, .context = stack[depth - 1], .addr = addr, .real = real,
                         .len = len, .fd = fd, .opened = 1 };
    return 1;
}

static void unmap_block(struct block *b) {
    munmap(b->real, b->len);
    munmap(b->addr, b->len);
    close(b->fd);
    b->kind = FREE;
}

/* ---- the driver's functions ---- */

#define LOCKED(...) do { pthread_mutex_lock(&lock); __VA_ARGS__ pthread_mutex_unlock(&lock); } while (0)
#define CURRENT do { if (!depth || !stack[depth - 1]) return INVALID_CONTEXT; } while (0)
#define STARTED do { if (!started) return NOT_INITIALIZED; } while (0)

API result cuInit(unsigned flags) {
    ENTER;
    if (flags) return INVALID_VALUE;
    if (!devices) return NO_DEVICE;
    started = 1;
    LEAVE;
}

API result cuDriverGetVersion(int *version) { ENTER; *version = 12000; LEAVE; }

static const struct { result code; const char *name, *text; } names[] = {
    { OK, "CUDA_SUCCESS", "no error" },
    { INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument" },
    { OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory" },
    { NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error" },
    { NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected" },
    { INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal" },
    { INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context" },
    { INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle" },
    { NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready" },
    { NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported" },
    { 700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered" },
    { UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error" },
};

API result cuGetErrorName(result code, const char **name) {
    ENTER;
    *name = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) *name = names[i].name;
    return *name ? OK : INVALID_VALUE;
}

API result cuGetErrorString(result code, const char **text) {
    ENTER;
    *text = NULL;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (names[i].code == code) *text = names[i].text;
    return *text ? OK : INVALID_VALUE;
}

API result cuDeviceGetCount(int *count) { ENTER; STARTED; *count = devices; LEAVE; }

API result cuDeviceGet(int *device, int ordinal) {
    ENTER; STARTED;
    if (ordinal < 0 || ordinal >= devices) return INVALID_DEVICE;
    *device = ordinal;
    LEAVE;
}

API result cuDeviceGetUuid_v2(char *uuid, int device) {
    ENTER; STARTED;
    memcpy(uuid, "stand-in device0", 16);
    uuid[15] += device;
    LEAVE;
}

API result cuDeviceGetName(char *name, int len, int device) {
    ENTER; STARTED;
    snprintf(name, len, "stand-in %d", device);
    LEAVE;
}

/* No memory pools, or anything else that is optional. */
API result cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER; STARTED;
    (void)attribute, (void)device;
    *value = 0;
    LEAVE;
}

API result cuDevicePrimaryCtxRetain(struct context **context, int device) {
    ENTER; STARTED;
    if (device < 0 || device >= devices) return INVALID_DEVICE;
    LOCKED({ contexts[device].retained++; });
    *context = &contexts[device];
    LEAVE;
}

API result cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER; STARTED;
    LOCKED({
        if (contexts[device].retained-- <= 0) violation("a context was released too often");
        if (!contexts[device].retained) {
            for (int i = 0; i < MOST_BLOCKS; i++)
                if (blocks[i].kind && blocks[i].context == &contexts[device])
                    violation("a context was released before its memory");
        }
    });
    LEAVE;
}

API result cuCtxPushCurrent_v2(struct context *context) {
    ENTER; STARTED;
    if (!context || context->retained <= 0) return INVALID_CONTEXT;
    if (depth == DEPTH) return INVALID_VALUE;
    stack[depth++] = context;
    LEAVE;
}

API result cuCtxPopCurrent_v2(struct context **context) {
    ENTER; STARTED; CURRENT;
    *context = stack[--depth];
    LEAVE;
}

API result cuCtxGetCurrent(struct context **context) {
    ENTER; STARTED;
    *context = depth ? stack[depth - 1] : NULL;
    LEAVE;
}

API result cuCtxSetCurrent(struct context *context) {
    ENTER; STARTED;
    if (depth) depth--;
    if (context) stack[depth++] = context;
    LEAVE;
}

/* Only cudarc calls it: nobody else may make a device stand still. */
API result cuCtxSynchronize(void) { ENTER; STARTED; CURRENT; LEAVE; }

API result cuMemGetInfo_v2(size_t *free, size_t *total) {
    ENTER; STARTED; CURRENT;
    LOCKED({ *total = memory; *free = memory - used[stack[depth - 1]->device]; });
    LEAVE;
}

API result cuMemAlloc_v2(devptr *ptr, size_t len) {
    ENTER; STARTED; CURRENT;
    if (!len) return INVALID_VALUE;
    size_t pages = (len + 4095) & ~(size_t)4095;
    result outcome = OUT_OF_MEMORY;
    LOCKED({
        size_t *taken = &used[stack[depth - 1]->device];
        struct block *b = free_block();
        int fd = -1;
        if (b && pages <= memory - *taken && (fd = memfd_create("standin", MFD_CLOEXEC)) >= 0
            && !ftruncate(fd, pages) && map_block(b, DEVICE, fd, pages)) {
            memset(b->real, 0xAA, pages); /* nobody is to count on zeros */
            *taken += pages;
            *ptr = (uintptr_t)b->addr;
            outcome = OK;
        } else if (fd >= 0) close(fd);
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuMemFree_v2(devptr ptr) {
    ENTER; STARTED; CURRENT;
    result outcome = INVALID_VALUE;
    LOCKED({
        struct block *b = block_at((void *)ptr, 1, 1 << DEVICE);
        if (b && b->addr == (char *)ptr) {
            if (b->context != stack[depth - 1]) violation("memory was freed in another context");
            if (b->users) violation("memory was freed while a stream used it");
            while (b->users) pthread_cond_wait(&changed, &lock);
            memset(b->real, 0xDD, b->len); /* who still has it mapped sees that it is gone */
            used[b->context->device] -= b->len;
            unmap_block(b);
            outcome = OK;
        } else violation("what is no allocation was freed");
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuMemGetAddressRange_v2(devptr *base, size_t *len, devptr ptr) {
    ENTER; STARTED; CURRENT;
    struct block *b;
    LOCKED({
        b = block_at((void *)ptr, 1, 1 << DEVICE | 1 << IPC);
        if (b && base) *base = (uintptr_t)b->addr;
        if (b && len) *len = b->len;
    });
    if (!b) return INVALID_VALUE;
    LEAVE;
}

API result cuMemHostAlloc(void **ptr, size_t len, unsigned flags) {
    ENTER; STARTED; CURRENT;
    (void)flags;
    void *at = len ? aligned_alloc(4096, (len + 4095) & ~(size_t)4095) : NULL;
    if (!at) return len ? OUT_OF_MEMORY : INVALID_VALUE;
    memset(at, 0xAA, len);
    LOCKED({
        struct block *b = free_block();
        *b = (struct block){ .kind = PINNED, .context = stack[depth - 1], .addr = at, .real = at,
                             .len = len, .fd = -1 };
    });
    *ptr = at;
    LEAVE;
}

API result cuMemFreeHost(void *ptr) {
    ENTER; STARTED; CURRENT;
    result outcome = INVALID_VALUE;
    LOCKED({
        struct block *b = block_at(ptr, 1, 1 << PINNED);
        if (b && b->addr == ptr) {
            if (b->users) violation("pinned memory was freed while a stream used it");
            while (b->users) pthread_cond_wait(&changed, &lock);
            free(b->addr);
            b->kind = FREE;
            outcome = OK;
        } else violation("what is not pinned was freed");
    });
    if (outcome) return outcome;
    LEAVE;
}

static char *real_at(struct block *b, devptr ptr) { return b->real + (ptr - (uintptr_t)b->addr); }

API result cuMemsetD8Async(devptr ptr, unsigned char value, size_t len, struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct block *b = block_at((void *)ptr, len, 1 << DEVICE | 1 << IPC);
        struct stream *on = stream_of(stream);
        if (!on) outcome = INVALID_HANDLE;
        else if (!b) outcome = INVALID_VALUE;
        else enqueue(on, (struct op){ .kind = FILL, .to = real_at(b, ptr), .len = len, .value = value,
                                      .blocks = { b } });
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuMemcpyHtoDAsync_v2(devptr to, const void *from, size_t len, struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct block *b = block_at((void *)to, len, 1 << DEVICE | 1 << IPC);
        struct block *pinned = block_at(from, len, 1 << PINNED);
        struct stream *on = stream_of(stream);
        if (!on) outcome = INVALID_HANDLE;
        else if (!b || block_at(from, 1, 1 << DEVICE | 1 << IPC)) outcome = INVALID_VALUE;
        else {
            char *own = NULL;
            /* Pageable memory may be used again at once. */
            if (!pinned && !strict) own = memcpy(malloc(len), from, len);
            enqueue(on, (struct op){ .kind = COPY, .from = own ? own : (char *)from, .own = own,
                                     .to = real_at(b, to), .len = len, .blocks = { b, pinned } });
        }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuMemcpyDtoHAsync_v2(void *to, devptr from, size_t len, struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct block *b = block_at((void *)from, len, 1 << DEVICE | 1 << IPC);
        struct block *pinned = block_at(to, len, 1 << PINNED);
        struct stream *on = stream_of(stream);
        if (!on) outcome = INVALID_HANDLE;
        else if (!b || block_at(to, 1, 1 << DEVICE | 1 << IPC)) outcome = INVALID_VALUE;
        else {
            enqueue(on, (struct op){ .kind = COPY, .from = real_at(b, from), .to = to, .len = len,
                                     .blocks = { b, pinned } });
            if (!pinned && !strict) drain(on);
        }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuMemcpyDtoDAsync_v2(devptr to, devptr from, size_t len, struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct block *a = block_at((void *)from, len, 1 << DEVICE | 1 << IPC);
        struct block *b = block_at((void *)to, len, 1 << DEVICE | 1 << IPC);
        struct stream *on = stream_of(stream);
        if (!on) outcome = INVALID_HANDLE;
        else if (!a || !b) outcome = INVALID_VALUE;
        else enqueue(on, (struct op){ .kind = COPY, .from = real_at(a, from), .to = real_at(b, to),
                                      .len = len, .blocks = { a, b } });
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuStreamCreate(struct stream **stream, unsigned flags) {
    ENTER; STARTED; CURRENT;
    (void)flags;
    LOCKED({ *stream = make_stream(stack[depth - 1]); live_streams++; });
    LEAVE;
}

/* What is on it goes on. Its handle is good for nothing from then on. */
API result cuStreamDestroy_v2(struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct stream *on = stream_of(stream);
        if (!on || on != stream) outcome = INVALID_HANDLE;
        else {
            on->self = NULL, on->closing = 1;
            live_streams--;
            pthread_cond_broadcast(&changed);
        }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuStreamSynchronize(struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct stream *on = stream_of(stream);
        if (on) drain(on); else outcome = INVALID_HANDLE;
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuStreamWaitEvent(struct stream *stream, struct event *event, unsigned flags) {
    ENTER; STARTED; CURRENT;
    (void)flags;
    result outcome = OK;
    LOCKED({
        struct stream *on = stream_of(stream);
        if (!on || event->self != event) outcome = INVALID_HANDLE;
        else enqueue(on, (struct op){ .kind = WAIT, .event = event, .number = event->recorded });
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuEventCreate(struct event **event, unsigned flags) {
    ENTER; STARTED; CURRENT;
    (void)flags;
    struct event *made = calloc(1, sizeof *made);
    made->self = made, made->context = stack[depth - 1];
    LOCKED({ live_events++; });
    *event = made;
    LEAVE;
}

API result cuEventDestroy_v2(struct event *event) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        if (event->self != event) outcome = INVALID_HANDLE;
        else { event->self = NULL; live_events--; }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuEventRecord(struct event *event, struct stream *stream) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        struct stream *on = stream_of(stream);
        if (!on || event->self != event || event->context != on->context) outcome = INVALID_HANDLE;
        else enqueue(on, (struct op){ .kind = MARK, .event = event, .number = ++event->recorded });
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuEventQuery(struct event *event) {
    ENTER; STARTED; CURRENT;
    result outcome;
    LOCKED({
        outcome = event->self != event ? INVALID_HANDLE
                : event->done < event->recorded ? NOT_READY : OK;
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuEventSynchronize(struct event *event) {
    ENTER; STARTED; CURRENT;
    result outcome = OK;
    LOCKED({
        uint64_t until = event->recorded;
        if (event->self != event) outcome = INVALID_HANDLE;
        else while (event->done < until) pthread_cond_wait(&changed, &lock);
    });
    if (outcome) return outcome;
    LEAVE;
}

/* ---- memory of another process ---- */

struct handle { char magic[8]; int pid, fd, device, pad; unsigned long long len, inode; char rest[24]; };
_Static_assert(sizeof(struct handle) == 64, "as long as the driver's");
static const char MAGIC[8] = "standin";

API result cuIpcGetMemHandle(struct handle *handle, devptr ptr) {
    ENTER; STARTED; CURRENT;
    if (no_ipc) return NOT_SUPPORTED;
    result outcome = INVALID_VALUE;
    LOCKED({
        struct block *b = block_at((void *)ptr, 1, 1 << DEVICE);
        struct stat file;
        if (b && !fstat(b->fd, &file)) {
            *handle = (struct handle){ .pid = getpid(), .fd = b->fd, .device = b->context->device,
                                       .len = b->len, .inode = file.st_ino };
            memcpy(handle->magic, MAGIC, 8);
            outcome = OK;
        }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuIpcOpenMemHandle_v2(devptr *ptr, struct handle handle, unsigned flags) {
    ENTER; STARTED; CURRENT;
    (void)flags;
    if (no_ipc) return NOT_SUPPORTED;
    if (memcmp(handle.magic, MAGIC, 8)) return INVALID_HANDLE;
    if (handle.pid == getpid()) return INVALID_CONTEXT; /* as the real one has it */
    result outcome = INVALID_HANDLE;
    LOCKED({
        for (int i = 0; i < MOST_BLOCKS; i++) {
            struct block *b = &blocks[i];
            if (b->kind == IPC && b->context == stack[depth - 1] && !memcmp(b->handle, &handle, 64)) {
                b->opened++;
                *ptr = (uintptr_t)b->addr;
                outcome = OK;
                break;
            }
        }
        char path[64];
        struct stat file;
        snprintf(path, sizeof path, "/proc/%d/fd/%d", handle.pid, handle.fd);
        int fd = outcome ? open(path, O_RDWR | O_CLOEXEC) : -1;
        if (fd >= 0) {
            struct block *b = free_block();
            if (b && !fstat(fd, &file) && file.st_ino == handle.inode
                && (unsigned long long)file.st_size >= handle.len && map_block(b, IPC, fd, handle.len)) {
                memcpy(b->handle, &handle, 64);
                *ptr = (uintptr_t)b->addr;
                outcome = OK;
            } else close(fd);
        }
    });
    if (outcome) return outcome;
    LEAVE;
}

API result cuIpcCloseMemHandle(devptr ptr) {
    ENTER; STARTED; CURRENT;
    result outcome = INVALID_VALUE;
    LOCKED({
        struct block *b = block_at((void *)ptr, 1, 1 << IPC);
        if (b && b->addr == (char *)ptr) {
            if (--b->opened == 0) {
                if (b->users) violation("another process's memory was closed while a stream used it");
                while (b->users) pthread_cond_wait(&changed, &lock);
                unmap_block(b);
            }
            outcome = OK;
        } else violation("what was not opened was closed");
    });
    if (outcome) return outcome;
    LEAVE;
}
