"""NIXL between two processes: the receiver reads from the sender's memory and notifies it.

    nixl.py ROW WAY PINNED SIZE:COUNT...    WAY is shm or tcp, PINNED two cores with a comma, or none

For each size it prints one line of JSON, as the other senders do. The request is a word in memory
that both processes share; registration, the connection and the transfer's handle are made before,
so that a round is the post of that handle, its end, and the notification that comes with it. The
sender writes its bytes anew before each round, and the receiver looks at the first and the last.
"""

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time

import numpy as np

try:
    from nixl_cu12 import nixl_agent, nixl_agent_config
except ImportError:
    from nixl_cu13 import nixl_agent, nixl_agent_config

WORDS = 4096
PATIENCE = 60
REQUEST, BEGUN, SIZE, READY = range(4)
NOTE = b"transfer_complete"


def main():
    if sys.argv[1] == "--receiver":
        return receive(int(sys.argv[2]), sys.argv[3], sizes_of(sys.argv[4:]))
    row, way, pinned, *sizes = sys.argv[1:]
    transports = {"shm": "shm,self", "tcp": "tcp,self"}
    os.environ["UCX_TLS"] = transports[way]
    if way == "tcp":
        os.environ["UCX_NET_DEVICES"] = "lo"
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    send(row, pinned, sizes)


def sizes_of(texts):
    return [tuple(int(part) for part in text.split(":")) for text in texts]


def cores_of(pinned):
    return [int(core) for core in pinned.split(",")] if "," in pinned else None


def pin(core):
    # The calling thread only, as the other senders do.
    os.sched_setaffinity(0, {core})


def agent_of(name):
    # Whoever waits drives the transfer; a thread that polls for it would want a core of its own.
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    # UCX has no shared memory for endpoints that handle a peer's failure, which is NIXL's default.
    options = {"ucx_error_handling_mode": "none"} if "shm" in os.environ["UCX_TLS"] else {}
    agent.create_backend("UCX", options)
    return agent


def memory_of(agent, largest):
    # Anonymous memory, every page touched.
    memory = np.empty(largest, dtype=np.uint8)
    memory.fill(1)
    agent.register_memory([(memory.ctypes.data, largest, 0, "")], "DRAM")
    return memory


def words_of(fd):
    return np.frombuffer(mmap.mmap(fd, WORDS), dtype=np.uint64)


def rounds(count):
    # A tenth warms up.
    return max(count // 10, 2), count


def send(row, pinned, texts):
    sizes = sizes_of(texts)
    fd = os.memfd_create("nixl", 0)
    os.ftruncate(fd, WORDS)
    words = words_of(fd)
    child = subprocess.Popen(
        [sys.executable, __file__, "--receiver", str(fd), pinned, *texts],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[fd],
    )
    agent = agent_of("sender")
    memory = memory_of(agent, max(size for size, _ in sizes))
    descs = agent.get_xfer_descs([(memory.ctypes.data, size, 0) for size, _ in sizes], "DRAM")
    for part in (agent.get_agent_metadata(), agent.get_serialized_descs(descs)):
        child.stdin.write(len(part).to_bytes(8, "little") + part)
    child.stdin.flush()
    wait_for(words, READY, 1)
    cores = cores_of(pinned)
    if cores:
        pin(cores[0])
    number = 0
    for size, count in sizes:
        transfer, whole = [], []
        warm_up, count = rounds(count)
        for at in range(warm_up + count):
            number += 1
            memory[:size].fill(number % 251)
            begun = time.monotonic_ns()
            words[REQUEST] = number
            hear(agent)
            ended = time.monotonic_ns()
            if at >= warm_up:
                transfer.append(ended - int(words[BEGUN]))
                whole.append(ended - begun)
        say(row, size, transfer, whole)
    child.stdin.close()
    if child.wait() != 0:
        sys.exit("the receiver failed")
    leave()


def say(row, size, transfer, whole):
    transfer, whole = sorted(transfer), sorted(whole)

    def percentile(times, part):
        return times[min(len(times) * part // 100, len(times) - 1)] / 1e3

    measured = {
        "row": row,
        "size": size,
        "count": len(transfer),
        "p50": percentile(transfer, 50),
        "p99": percentile(transfer, 99),
        "whole": percentile(whole, 50),
    }
    print(json.dumps(measured, separators=(",", ":")), flush=True)


def hear(agent):
    deadline = time.monotonic() + PATIENCE
    looks = 0
    while True:
        notes = agent.get_new_notifs()
        if notes:
            assert notes == {"receiver": [NOTE]}, notes
            return
        looks += 1
        if looks % 64 == 0:
            os.sched_yield()
            assert time.monotonic() < deadline, "no notification"


def wait_for(words, which, value):
    deadline = time.monotonic() + PATIENCE
    looks = 0
    while words[which] != value:
        looks += 1
        if looks % 64 == 0:
            os.sched_yield()
            assert time.monotonic() < deadline, "the other process does not answer"


def receive(fd, pinned, sizes):
    # No orphan: the sender's end is noticed by a system call that it interrupts.
    ctypes.CDLL(None).prctl(1, 9)
    words = words_of(fd)
    agent = agent_of("receiver")
    memory = memory_of(agent, max(size for size, _ in sizes))
    parts = []
    for _ in range(2):
        length = int.from_bytes(sys.stdin.buffer.read(8), "little")
        parts.append(sys.stdin.buffer.read(length))
    sender = agent.add_remote_agent(parts[0])
    remote = agent.deserialize_descs(parts[1])
    agent.make_connection(sender)
    handles = []
    for at, (size, _) in enumerate(sizes):
        own = agent.get_xfer_descs([(memory.ctypes.data, size, 0)], "DRAM")
        there = agent.get_xfer_descs([remote[at]], "DRAM")
        handles.append(agent.initialize_xfer("READ", own, there, sender, NOTE))
    cores = cores_of(pinned)
    if cores:
        pin(cores[1])
    words[READY] = 1
    number = 0
    for handle, (size, count) in zip(handles, sizes):
        for _ in range(sum(rounds(count))):
            number += 1
            wait_for(words, REQUEST, number)
            words[BEGUN] = time.monotonic_ns()
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            assert state == "DONE", state
            assert memory[0] == memory[size - 1] == number % 251, "other bytes"
    # The last notification may still be on its way.
    while sys.stdin.buffer.read(1):
        pass
    leave()


def leave():
    # Without the agents' end, in which UCX waits for a peer that may have gone.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
