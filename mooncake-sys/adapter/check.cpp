// Tries a freshly built adapter in a process of its own, which a wrong layout may crash:
//     check LIBPYTHON ADAPTER
// Registers memory, reads from the local segment, compares, notifies itself and receives it.
// Exits with 0, or says on standard output what went wrong. Built and run by mooncake-sys.

#include <dlfcn.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

namespace {

struct Request {
    int opcode;
    void *source;
    int32_t target_id;
    uint64_t target_offset;
    uint64_t length;
};
struct State {
    int status;
    uint64_t transferred_bytes;
};
struct Note {
    char *name;
    char *msg;
};

constexpr size_t kHalf = 64 * 1024;
alignas(4096) unsigned char memory[2 * kHalf];

[[noreturn]] void fail(const std::string &reason) {
    printf("%s\n", reason.c_str());
    fflush(stdout);
    // Without destructors: the engine is in an unknown state.
    _Exit(1);
}

void *adapter;

template <class F>
F *find(const char *name) {
    void *symbol = dlsym(adapter, name);
    if (symbol == nullptr) fail(std::string("no symbol ") + name);
    return reinterpret_cast<F *>(symbol);
}

template <class Try>
void eventually(const char *what, Try attempt) {
    for (int i = 0; i < 5000; ++i) {
        if (attempt()) return;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    fail(std::string(what) + " did not happen within 5 s");
}

}  // namespace

int main(int argc, char **argv) {
    if (argc != 3) fail("usage: check LIBPYTHON ADAPTER");
    if (dlopen(argv[1], RTLD_LAZY | RTLD_GLOBAL) == nullptr) fail(dlerror());
    adapter = dlopen(argv[2], RTLD_LAZY | RTLD_LOCAL);
    if (adapter == nullptr) fail(dlerror());

    auto last_error = find<const char *()>("mooncakeRelayLastError");
    auto create = find<void *(const char *, const char *, const char *, uint64_t, int)>(
        "createTransferEngine");
    void *engine = create("P2PHANDSHAKE", "127.0.0.1", "127.0.0.1", 0, 0);
    if (engine == nullptr) fail(std::string("no engine: ") + last_error());
    if (find<void *(void *, const char *, void **)>("installTransport")(engine, "tcp", nullptr) ==
        nullptr)
        fail("no TCP transport");

    for (size_t i = 0; i < kHalf; ++i) memory[i] = static_cast<unsigned char>(i * 31 + 7);
    int code = find<int(void *, void *, size_t, const char *, int)>("registerLocalMemory")(
        engine, memory, sizeof memory, "*", 1);
    if (code != 0) fail("registering memory returned " + std::to_string(code));

    uint64_t batch = find<uint64_t(void *, size_t)>("allocateBatchID")(engine, 1);
    Request request{0, memory + kHalf, 0, reinterpret_cast<uint64_t>(memory), kHalf};
    code = find<int(void *, uint64_t, Request *, size_t)>("submitTransfer")(engine, batch, &request,
                                                                           1);
    if (code != 0) fail("submitting a read returned " + std::to_string(code));
    auto status = find<int(void *, uint64_t, size_t, State *)>("getTransferStatus");
    eventually("the end of a read", [&] {
        State state{};
        int found = status(engine, batch, 0, &state);
        if (found != 0) fail("the status of a read returned " + std::to_string(found));
        if (state.status >= 5) fail("a read ended with status " + std::to_string(state.status));
        return state.status == 4;
    });
    if (memcmp(memory, memory + kHalf, kHalf) != 0) fail("a read delivered other bytes");
    code = find<int(void *, uint64_t)>("freeBatchID")(engine, batch);
    if (code != 0) fail("freeing a batch returned " + std::to_string(code));

    char name[] = "self-check", text[] = "of a name and a text";
    code = find<int(void *, uint64_t, Note)>("genNotifyInEngine")(engine, 0, Note{name, text});
    if (code != 0) fail("notifying itself returned " + std::to_string(code));
    auto receive = find<Note *(void *, int *)>("getNotifsFromEngine");
    auto release = find<int(Note *, int)>("freeNotifsMsgBuf");
    eventually("a notification", [&] {
        int count = 0;
        Note *notes = receive(engine, &count);
        if (count < 0) fail("receiving notifications failed");
        if (count == 0) return false;
        bool same = count == 1 && strcmp(notes[0].name, name) == 0 && strcmp(notes[0].msg, text) == 0;
        if (!same) fail("another notification came than was sent");
        release(notes, count);
        return true;
    });

    code = find<int(void *, void *)>("unregisterLocalMemory")(engine, memory);
    if (code != 0) fail("unregistering memory returned " + std::to_string(code));
    find<void(void *)>("destroyTransferEngine")(engine);
    return 0;
}
