"""Writes the seeds of the fuzz targets: the captured frames of the wire protocol and what our tests send."""

import json
import struct
from pathlib import Path

SEEDS = Path(__file__).parent / "seeds"
OWNER, READER = b"the slots' owner", b"who reads of it."
INSTANCE = b"an instance here"
ID = struct.pack(">QII", 7, 3, 1)


def seed(target, name, *parts):
    folder = SEEDS / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"".join(parts))


def frame(kind, text):
    body = (b"" if kind is None else bytes([kind])) + text
    return struct.pack("<Q", len(body)) + body


def header(opcode, size, addr=0x7F88444FC010):
    return struct.pack("<QQB7x", size, addr, opcode)


def note(name, message, reason=None):
    body = {"name": name, "notify_msg": message} | ({"reason": reason} if reason else {})
    return json.dumps(body, separators=(",", ":")).encode()


def record(kind, name, reason=b"", text=b""):
    rest = struct.pack("<BBH", kind, len(reason), len(name)) + name + reason + text
    return struct.pack("<I", len(rest)) + rest


DESCRIPTOR = (
    b'{"buffers":[{"addr":140223238357008,"length":1048576,"name":"127.0.0.1:15225"}],"name":"127.0.0.1:15225",'
    b'"protocol":"tcp","rdma_server_name":"","tcp_data_host":"127.0.0.1","tcp_data_port":16961,'
    b'"tcp_proto_version":2,"timestamp":"2026-11-30 08:17:25.702259"}\n'
)
OURS = (
    b'{"name":"[::1]:15225","protocol":"tcp","relay":{"version":1,"instance":"616e20696e7374616e63652068657265"},'
    b'"tcp_data_port":16961,"tcp_proto_version":2}'
)
SKELETON = b'{"local_gid":"","local_lid":0,"local_nic_path":"","payload":"","peer_nic_path":"","qp_num":[],"reply_msg":""}\n'
CONTROL = {
    "metadata_request": frame(1, b"{}"),
    "metadata_response": frame(1, DESCRIPTOR),
    "metadata_ours": frame(1, OURS),
    "not_ready": frame(1, b"null"),
    "notify_request": frame(2, b'{"name":"req-7","notify_msg":"done"}\n'),
    "notify_ours": frame(2, note("stage0_f38df03d0badcafe0000000100000007", "transfer_failed", "TimedOut")),
    "notify_response": frame(2, b'{"name":"","notify_msg":"success"}\n'),
    "notify_refused": frame(2, b'{"name":"","notify_msg":""}\n'),
    "probe_request": frame(3, b"{}\n"),
    "probe_response": frame(3, b'{"status":"success"}\n'),
    "connection_request": frame(0, b"{}"),
    "connection_response": frame(0, SKELETON),
    "untyped_request": frame(None, b"{}"),
    "too_long": struct.pack("<QB", 1 << 20 | 1, 1),
}
BODY = bytes((31 * i + 1) % 256 for i in range(32))
DONE, REFUSED, GONE, OTHER = (struct.pack("<I", n) + b"VTCM" for n in range(4))
DATA = {
    "v1_read": header(0x00, 64),
    "v2_read": header(0x80, 32),
    "v2_write": header(0x81, 16) + b"0123456789abcdef",
    "v1_write": header(0x01, 16) + b"0123456789abcdef",
    "identified": header(0xA0, 32) + INSTANCE + ID,
    "note": header(0xA2, len(note("a_1", "transfer_complete"))) + note("a_1", "transfer_complete"),
    "unknown": header(0xA3, 1),
    "status": DONE,
}
RECORDS = {
    "complete": record(0, b"stage0_f38df03d0badcafe0000000100000007"),
    "failed": record(1, b"a_1", b"TimedOut"),
    "other": record(2, "é".encode(), b"", b"done"),
}

for name, bytes_ in {**CONTROL, **DATA, **RECORDS}.items():
    seed("frames", name, bytes_)

for name, bytes_ in CONTROL.items():
    seed("server", f"control_{name}", b"\x02", bytes_)
for name, bytes_ in DATA.items():
    seed("server", f"data_{name}", b"\x00", bytes_)
# opcode, kind, size, more, offset, follow, follows
asks = {
    "read": bytes([0x80, 0, 64, 0, 0, 0, 0]),
    "read_all_v1": bytes([0x00, 0, 0, 1, 0, 0, 0]),
    "read_beyond": bytes([0x80, 2, 255, 0, 8, 0, 0]),
    "read_stamp": bytes([0x80, 6, 8, 0, 0, 0, 0]),
    "read_huge": bytes([0x80, 1, 1, 255, 0, 0, 0]),
    "write": bytes([0x81, 0x20, 64, 0, 0, 0, 0x55]),
    "write_v1_then_read": bytes([0x01, 0x20, 64, 0, 0, 0, 0x55, 0x00, 0, 1, 0, 0, 0, 0]),
    "write_before": bytes([0x81, 0x24, 64, 0, 8, 0, 0x55]),
    "identified": bytes([0xA0, 8, 64, 0, 0, 0, 0]),
    "identified_stale": bytes([0xA0, 24, 64, 0, 1, 0, 0]),
    "identified_twice": bytes([0xA0, 8, 16, 0, 0, 0, 0] * 2),
    "note": bytes([0xA2, 0, len(note("a", "b")), 0, 0, len(note("a", "b")), 0]) + note("a", "b"),
    "note_long": bytes([0xA2, 0xE0, 0xFF, 8, 0, 0, 0x20]),
}
for name, bytes_ in asks.items():
    for how in (0x01, 0x85):
        seed("server", f"{name}_{how}", bytes([how]), bytes_)

# what, descriptor, length of the control port's answer, that, the data port's answer
for name, bytes_ in CONTROL.items():
    seed("client", f"asked_{name}", struct.pack("<BBH", 0, 0, len(bytes_)), bytes_)
    seed("client", f"told_{name}", struct.pack("<BBH", 9, 1, 0), bytes_)
for name, bytes_ in {"done": DONE + BODY, "refused": REFUSED, "gone": GONE, "other": OTHER, "bare": BODY}.items():
    for what in (32 << 2, 32 << 2 | 2, 1):
        for descriptor in (1, 2, 6):
            seed("client", f"{name}_{what}_{descriptor}", struct.pack("<BBH", what, descriptor, 0), bytes_)

MAGIC = b"mnckrly2" + struct.pack("<I", 1)
answer = MAGIC + OWNER + struct.pack("<IQQQ", 2, 0x7000, 8192, 8192)
for kind in (0xFF, 0x08, 0x00, 0x01, 0x02, 0x03, 0x1B, 0x50):
    seed("meeting", f"answer_{kind:02x}", bytes([kind & 0xEF if kind == 0xFF else kind]), answer, b"127.0.0.1:1")
seed("meeting", "hello", b"\x0f", MAGIC, READER, OWNER)
seed("meeting", "larger", b"\x0f", MAGIC + OWNER + struct.pack("<IQQQ", 65536, 2**64 - 8192, 8192, 8192) + b"127.0.0.1:1")
seed("meeting", "longer", b"\x0f", MAGIC + OWNER + struct.pack("<IQQQ", 2, 0x7000, 2**63, 2**63) + b"127.0.0.1:1")


def act(number, slot=0, *more):
    return bytes([number, slot]) + b"".join(more)


def word(value):
    return struct.pack("<Q", value & (2**64 - 1))


put, retract, cut, look, leave, left = act(4), act(5), act(6), act(7), act(12), act(13)
read = act(8, 0, word(64 << 32 | 1 << 24))
view = act(10, 0, word(64 << 32 | 1 << 24))
plays = {
    "whole": put + read + retract + read + look,
    "again": put + read + retract + put + read + cut,
    "views": put + view + retract + view + retract + put + view + act(11) + view,
    "pinned": put + act(0, 0, word(1 << 32 | 1 << 8 | 2)) + retract + cut + read,
    "notes": act(9, 0, word(100)) + look + act(9, 0, word(20000)) + act(9, 0, word(9)) + look,
    "ring": act(1, 1, word(0), RECORDS["failed"].ljust(128, b"\0")) + act(2, 0, word(16)) + look,
    "lying_tail": act(2, 0, word(65536)) + look + read + look,
    "odd_tail": act(0, 0, word(5 << 32 | 1)) + look,
    "lying_head": act(0, 0, word(2**40)) + act(9, 0, word(9)) + look,
    "scrawled": put + act(3, 0, b"\x01", word(4096)) + act(3, 0, b"\x02", word(2**40)) + read + view,
    "beyond": put + act(8, 0, word(200 << 32 | 4001 << 8 | 1 << 24)) + read,
    "gone": put + view + leave + look + read + left + read,
}
for name, bytes_ in plays.items():
    seed("control_region", name, bytes_)

PYTHON = '{"engine_id": "peer", "session_id": "127.0.0.1:15708", "protocol": "tcp", "transfer_id": "peer_f38df03d", "mooncake": {"buffer_ptr": 140333700214848, "device_id": 0}, "transfer_info": {"size": 12, "shape": [2, 3], "dtype": "torch.bfloat16", "credit_id": 1048576}}'
RELAY = '{"engine_id":"stage0","session_id":"127.0.0.1:15708","protocol":"tcp","transfer_id":"stage0_f38df03d0badcafe0000000100000007","mooncake":{"buffer_ptr":140333700214848,"device_id":0},"transfer_info":{"size":12,"shape":[2,3],"dtype":"torch.bfloat16","credit_id":1048576},"relay":{"version":1,"instance":"000102030405060708090a0b0c0d0e0f","slot":1,"generation":7,"stamp":"00000000deadbeef","stamp_ptr":"0x7fa200000008","lease_ms":30000}}'
LOCAL = RELAY.replace('"lease_ms":30000', '"lease_ms":18446744073709551615,"local":"mooncake-relay-000102030405060708090a0b0c0d0e0f"')
LEAST = '{"session_id":"[::1]:1","transfer_id":"a","mooncake":{"buffer_ptr":1},"transfer_info":{"size":0}}'
for name, text in {"python": PYTHON, "relay": RELAY, "local": LOCAL, "least": LEAST, "deep": "[" * 200, "empty": "{}"}.items():
    seed("metadata", name, text.encode())
