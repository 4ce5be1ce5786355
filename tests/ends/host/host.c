/* A C program that loads a relay, and ends in the way that its second argument names. SIGPIPE is as
 * the system has it: it ends whoever writes to a closed socket without a word about it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct host host;
static host *(*host_open)(int);
static int (*host_put)(host *, size_t, char *, size_t);
static long (*host_get)(host *, const char *);
static void (*host_keep_busy)(host *);
static int (*host_close)(host *);

static void *library;
static host *relay;
static char text[1 << 16];

static void *symbol(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        _exit(90);
    }
    return found;
}

static void fail(const char *what) {
    fprintf(stderr, "%s\n", what);
    _exit(91);
}

/* "get <metadata>" and "put <bytes>", a line each, answered by a line. */
static void serve(void) {
    while (fgets(text, sizeof text, stdin)) {
        text[strcspn(text, "\n")] = 0;
        if (!strncmp(text, "get ", 4)) {
            printf("%ld\n", host_get(relay, text + 4));
        } else if (!strncmp(text, "put ", 4)) {
            size_t len = strtoul(text + 4, NULL, 10);
            puts(host_put(relay, len, text, sizeof text) ? "-1" : text);
        } else {
            fail("what?");
        }
        fflush(stdout);
    }
}

static void *exits(void *ignored) {
    (void)ignored;
    exit(7);
}

static void *outlives_main(void *main_thread) {
    pthread_join(*(pthread_t *)main_thread, NULL);
    if (host_put(relay, 5, text, sizeof text) || host_get(relay, text) != 5)
        fail("it does not work without the main thread");
    if (host_close(relay))
        fail("not all of it has ended");
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 3)
        fail("host LIBRARY WAY");
    const char *way = argv[2];
    signal(SIGPIPE, SIG_DFL);
    library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fail(dlerror());
    host_open = symbol("host_open");
    host_put = symbol("host_put");
    host_get = symbol("host_get");
    host_keep_busy = symbol("host_keep_busy");
    host_close = symbol("host_close");
    relay = host_open(strcmp(way, "serve_tcp") != 0);
    if (!relay)
        fail("no relay");
    if (!strncmp(way, "serve", 5)) {
        serve();
        return host_close(relay);
    }
    if (host_put(relay, 100, text, sizeof text) || host_get(relay, text) != 100)
        fail("it does not work");
    if (host_put(relay, 100, text, sizeof text))
        fail("no second put");
    static pthread_t main_thread, other;
    if (!strcmp(way, "outlived")) {
        main_thread = pthread_self();
        pthread_create(&other, NULL, outlives_main, &main_thread);
        pthread_exit(NULL);
    }
    host_keep_busy(relay);
    if (!strcmp(way, "return"))
        return 7;
    if (!strcmp(way, "exit"))
        exit(7);
    if (!strcmp(way, "at_once"))
        _exit(7);
    if (!strcmp(way, "thread")) {
        pthread_create(&other, NULL, exits, NULL);
        for (;;)
            pause();
    }
    if (!strcmp(way, "unloaded")) {
        if (host_close(relay))
            fail("not all of it has ended");
        dlclose(library);
        return 7;
    }
    fail("which way?");
}
