// The C interface of Mooncake's transfer engine over the pip wheel, whose mooncake/engine.so exports
// C++ only. It declares just as much of the engine's classes as gives the right symbols and layouts,
// which are those of the wheel versions that the Rust side lists. Built on demand by mooncake-sys.
//
// No exception leaves it: a call that met one returns kException, and mooncakeRelayLastError says
// what it was. Every text is copied. Notifications are malloc'ed here and freed here.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <string>
#include <vector>

namespace mooncake {

class Status final {
   public:
    ~Status() { delete[] message_; }
    uint16_t code_ = 0;
    const char *message_ = nullptr;
};

class Transport {
   public:
    struct TransferRequest {
        enum OpCode { READ, WRITE };
        OpCode opcode = READ;
        void *source = nullptr;
        uint64_t target_id = 0;
        uint64_t target_offset = 0;
        size_t length = 0;
        int advise_retry_cnt = 0;
        int transport_hint = 0;
        uint64_t task_group_id = 0;
    };
    struct TransferStatus {
        int s = 0;
        size_t transferred_bytes = 0;
    };
    struct BufferEntry {
        void *addr = nullptr;
        size_t length = 0;
    };
};
static_assert(sizeof(Transport::TransferRequest) == 56);
static_assert(sizeof(Transport::TransferStatus) == 16);
static_assert(sizeof(Status) == 16);
static_assert(sizeof(std::string) == 32, "the wheel has libstdc++'s new strings");

class TransferMetadata {
   public:
    struct NotifyDesc {
        std::string name;
        std::string notify_msg;
    };
};

class Topology {
   public:
    int discover(const std::vector<std::string> &filter);
};

class TransferEngine {
   public:
    TransferEngine(bool auto_discover, const std::vector<std::string> &filter);
    ~TransferEngine();
    int init(const std::string &metadata, const std::string &name, const std::string &host,
             uint64_t port);
    std::shared_ptr<Topology> getLocalTopology();
    std::string getLocalIpAndPort();
    Transport *installTransport(const std::string &proto, void **args);
    int uninstallTransport(const std::string &proto);
    uint64_t openSegment(const std::string &name);
    int closeSegment(uint64_t segment);
    int removeLocalSegment(const std::string &name);
    int syncSegmentCache(const std::string &name);
    int registerLocalMemory(void *addr, size_t length, const std::string &location, bool remote,
                            bool update);
    int unregisterLocalMemory(void *addr, bool update);
    int registerLocalMemoryBatch(const std::vector<Transport::BufferEntry> &buffers,
                                 const std::string &location);
    int unregisterLocalMemoryBatch(const std::vector<void *> &addrs);
    uint64_t allocateBatchID(size_t size);
    Status freeBatchID(uint64_t batch);
    Status submitTransfer(uint64_t batch, const std::vector<Transport::TransferRequest> &requests);
    Status submitTransferWithNotify(uint64_t batch,
                                    const std::vector<Transport::TransferRequest> &requests,
                                    TransferMetadata::NotifyDesc note);
    Status getTransferStatus(uint64_t batch, size_t task, Transport::TransferStatus &status);
    int getNotifies(std::vector<TransferMetadata::NotifyDesc> &notes);
    int sendNotifyByID(uint64_t segment, TransferMetadata::NotifyDesc note);
    void enableGracefulShutdown();

   private:
    // Three shared pointers and a flag in the wheel; more room than any version needs.
    alignas(16) char storage_[1024];
};

}  // namespace mooncake

using mooncake::Status;
using mooncake::TransferEngine;
using mooncake::TransferMetadata;
using mooncake::Transport;

namespace {

constexpr int kException = -9001;
constexpr int kInvalidArgument = 1;

thread_local std::string last_error;

// Runs `call`; an exception becomes `failure`.
template <class T, class Call>
T guarded(T failure, Call call) noexcept {
    try {
        return call();
    } catch (const std::exception &error) {
        try {
            last_error = error.what();
        } catch (...) {
        }
    } catch (...) {
        try {
            last_error = "an exception of an unknown type";
        } catch (...) {
        }
    }
    return failure;
}

TransferEngine *native(void *engine) { return static_cast<TransferEngine *>(engine); }

// Segments are `int` in the C interface: those that do not fit are no segments.
int32_t narrow(uint64_t segment) {
    constexpr uint64_t most = std::numeric_limits<int32_t>::max();
    return segment <= most ? static_cast<int32_t>(segment) : -1;
}

std::vector<std::string> no_filter() { return {}; }

}  // namespace

extern "C" {

struct transfer_request {
    int opcode;
    void *source;
    int32_t target_id;
    uint64_t target_offset;
    uint64_t length;
};
struct transfer_status {
    int status;
    uint64_t transferred_bytes;
};
struct notify_msg {
    char *name;
    char *msg;
};
struct buffer_entry {
    void *addr;
    size_t length;
};

void *createTransferEngine(const char *metadata, const char *name, const char *host, uint64_t port,
                           int auto_discover) {
    return guarded<void *>(nullptr, [&]() -> void * {
        auto engine = std::make_unique<TransferEngine>(auto_discover != 0, no_filter());
        int code = engine->init(metadata, name, host, port);
        if (code != 0) {
            last_error = "init returned " + std::to_string(code);
            return nullptr;
        }
        return engine.release();
    });
}

void destroyTransferEngine(void *engine) {
    guarded(0, [&] {
        delete native(engine);
        return 0;
    });
}

int discoverTopology(void *engine) {
    return guarded(kException, [&] {
        auto topology = native(engine)->getLocalTopology();
        return topology ? topology->discover(no_filter()) : kInvalidArgument;
    });
}

int getLocalIpAndPort(void *engine, char *out, size_t len) {
    return guarded(kException, [&] {
        std::string text = native(engine)->getLocalIpAndPort();
        if (len == 0 || text.size() >= len) return kInvalidArgument;
        memcpy(out, text.c_str(), text.size() + 1);
        return 0;
    });
}

void *installTransport(void *engine, const char *proto, void **args) {
    return guarded<void *>(nullptr, [&] { return native(engine)->installTransport(proto, args); });
}

int uninstallTransport(void *engine, const char *proto) {
    return guarded(kException, [&] { return native(engine)->uninstallTransport(proto); });
}

int32_t openSegment(void *engine, const char *name) {
    return guarded(kException, [&] { return narrow(native(engine)->openSegment(name)); });
}

int32_t openSegmentNoCache(void *engine, const char *name) {
    return guarded(kException, [&] {
        int code = native(engine)->syncSegmentCache(name);
        if (code != 0) return code < 0 ? code : -code;
        return narrow(native(engine)->openSegment(name));
    });
}

int closeSegment(void *engine, int32_t segment) {
    return guarded(kException, [&] { return native(engine)->closeSegment(segment); });
}

int removeLocalSegment(void *engine, const char *name) {
    return guarded(kException, [&] { return native(engine)->removeLocalSegment(name); });
}

int syncSegmentCache(void *engine) {
    return guarded(kException, [&] { return native(engine)->syncSegmentCache(""); });
}

int registerLocalMemory(void *engine, void *addr, size_t length, const char *location,
                        int remote_accessible) {
    return guarded(kException, [&] {
        return native(engine)->registerLocalMemory(addr, length, location, remote_accessible != 0,
                                                   true);
    });
}

int unregisterLocalMemory(void *engine, void *addr) {
    return guarded(kException, [&] { return native(engine)->unregisterLocalMemory(addr, true); });
}

int registerLocalMemoryBatch(void *engine, buffer_entry *entries, size_t count,
                             const char *location) {
    return guarded(kException, [&] {
        std::vector<Transport::BufferEntry> buffers(count);
        for (size_t i = 0; i < count; ++i) buffers[i] = {entries[i].addr, entries[i].length};
        return native(engine)->registerLocalMemoryBatch(buffers, location);
    });
}

int unregisterLocalMemoryBatch(void *engine, void **addrs, size_t count) {
    return guarded(kException, [&] {
        return native(engine)->unregisterLocalMemoryBatch(
            std::vector<void *>(addrs, addrs + count));
    });
}

uint64_t allocateBatchID(void *engine, size_t size) {
    return guarded(UINT64_MAX, [&] { return native(engine)->allocateBatchID(size); });
}

int freeBatchID(void *engine, uint64_t batch) {
    return guarded(kException, [&] {
        Status status = native(engine)->freeBatchID(batch);
        return static_cast<int>(status.code_);
    });
}

static int submit(void *engine, uint64_t batch, transfer_request *entries, size_t count,
                  const notify_msg *note) {
    return guarded(kException, [&] {
        if (count == 0) return kInvalidArgument;
        std::vector<Transport::TransferRequest> requests(count);
        for (size_t i = 0; i < count; ++i) {
            auto &request = requests[i];
            request.opcode = static_cast<Transport::TransferRequest::OpCode>(entries[i].opcode);
            request.source = entries[i].source;
            request.target_id = static_cast<uint64_t>(entries[i].target_id);
            request.target_offset = entries[i].target_offset;
            request.length = entries[i].length;
        }
        if (note == nullptr) {
            Status status = native(engine)->submitTransfer(batch, requests);
            return static_cast<int>(status.code_);
        }
        Status status =
            native(engine)->submitTransferWithNotify(batch, requests, {note->name, note->msg});
        return static_cast<int>(status.code_);
    });
}

int submitTransfer(void *engine, uint64_t batch, transfer_request *entries, size_t count) {
    return submit(engine, batch, entries, count, nullptr);
}

int submitTransferWithNotify(void *engine, uint64_t batch, transfer_request *entries, size_t count,
                             notify_msg note) {
    return submit(engine, batch, entries, count, &note);
}

int getTransferStatus(void *engine, uint64_t batch, size_t task, transfer_status *out) {
    return guarded(kException, [&] {
        Transport::TransferStatus found;
        Status status = native(engine)->getTransferStatus(batch, task, found);
        if (status.code_ == 0) *out = {found.s, found.transferred_bytes};
        return static_cast<int>(status.code_);
    });
}

int freeNotifsMsgBuf(notify_msg *notes, int count) {
    if (notes == nullptr) return 0;
    for (int i = 0; i < count; ++i) {
        free(notes[i].name);
        free(notes[i].msg);
    }
    free(notes);
    return 0;
}

// NULL and a count of 0: there are none. NULL and a negative count: they could not be fetched. A text
// with a NUL in it, which C would cut and take for another, is NULL instead.
notify_msg *getNotifsFromEngine(void *engine, int *count) {
    *count = 0;
    notify_msg *failed = nullptr;
    return guarded(failed, [&]() -> notify_msg * {
        *count = kException;
        std::vector<TransferMetadata::NotifyDesc> found;
        native(engine)->getNotifies(found);
        *count = 0;
        if (found.empty()) return nullptr;
        int most = static_cast<int>(found.size());
        auto *notes = static_cast<notify_msg *>(calloc(found.size(), sizeof(notify_msg)));
        bool lacks_memory = false;
        auto copy = [&](const std::string &text) -> char * {
            if (text.find('\0') != std::string::npos) return nullptr;
            char *copied = strdup(text.c_str());
            lacks_memory |= copied == nullptr;
            return copied;
        };
        for (int i = 0; notes != nullptr && i < most; ++i) {
            notes[i] = {copy(found[i].name), copy(found[i].notify_msg)};
            if (lacks_memory) {
                freeNotifsMsgBuf(notes, most);
                notes = nullptr;
            }
        }
        *count = notes == nullptr ? kException : most;
        return notes;
    });
}

int genNotifyInEngine(void *engine, uint64_t target, notify_msg note) {
    return guarded(kException, [&] {
        return native(engine)->sendNotifyByID(target, {note.name, note.msg});
    });
}

void enableGracefulShutdown(void *engine) {
    guarded(0, [&] {
        native(engine)->enableGracefulShutdown();
        return 0;
    });
}

// Why the last call of this thread failed, as far as it is known. Valid until the next one.
const char *mooncakeRelayLastError() { return last_error.c_str(); }

}  // extern "C"
