"""Connects the ranks of each machine, so that their collectives go through shared memory (`runtime/shared_memory.py`).

In: the groups of a run, connected by gloo. Out: those whose ranks are all on one machine, for as long as they are held.
Ranks map each other's memory, a file without a name that they get through a Unix socket, so nothing stays behind when a
rank is killed. A rank that has no such memory or sockets uses gloo with all others; where a connection fails, all do.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rldsl.runtime.collectives import all_agree, all_gather
from rldsl.runtime.shared_memory import SLOT_BYTES, SLOTS, Peer, SharedMemoryGroup, register

MAX_RANKS = 64        # of a machine that are connected, each with each
SETUP_SECONDS = 60.0  # in which another rank must connect
DIGEST = 16           # bytes of what identifies a machine, and of the name of a rank's socket
HELLO = struct.Struct("<q")         # the rank that speaks
CREDENTIALS = struct.Struct("iII")  # of SO_PEERCRED: process, user, group
CPU = torch.device("cpu")

Group = tuple[Sequence[int], Any]  # its ranks, as numbers of the world, in its order, and the ProcessGroup


@dataclass(frozen=True, slots=True)
class Connected:
    """A rank of this machine, this one or another."""

    peer: Peer | None     # None: this rank
    memory: torch.Tensor  # [bytes] uint8: its slots, of all groups


def share_memory(groups: Sequence[Group], timeout: timedelta | None) -> tuple[SharedMemoryGroup, ...]:
    """All ranks of the world call it together, with the same groups in the same order. timeout: of each wait for a
    rank; None: without end. Returns the groups that share memory, of those with this rank; the functions of
    `runtime/collectives.py` use it as long as the result is held."""
    if dist.get_world_size() == 1 or dist.get_backend() != "gloo":
        return ()
    connected = _connect_machine(len(groups) * SLOTS * SLOT_BYTES)
    if connected is None:
        return ()
    made = _groups_of(connected, groups, timeout)
    for each in made:
        register(each)
    return made


def _connect_machine(size: int) -> dict[int, Connected] | None:
    """The ranks of this machine by number, this one included, each with `size` bytes; none where this rank shares no
    memory. None: a connection has failed, of any rank of the world. All ranks of the world call it together."""
    rank, name = dist.get_rank(), os.urandom(DIGEST)
    with ExitStack() as stack:
        opened = _open(name, size, stack)
        names = _names_on_machine(name, opened is not None)
        own = opened if 1 < len(names) <= MAX_RANKS else None
        below = _call_lower(rank, names) if own else {}
        # before any rank waits for a call that does not come
        if not all_agree(below is not None, dist.group.WORLD, CPU) or below is None:
            return None
        connected = _try_to_connect(rank, names, below, *own, size) if own else {}
    return connected if all_agree(connected is not None, dist.group.WORLD, CPU) else None


def _names_on_machine(name: bytes, shares: bool) -> dict[int, bytes]:
    """The names of the sockets of the ranks on this machine, by rank, this one's included. shares: whether this rank
    has a socket and memory; else it is alone. All ranks of the world call it together."""
    own = (machine_digest() if shares else os.urandom(DIGEST)) + name
    table = [bytes(x) for x in all_gather(torch.tensor(list(own), dtype=torch.uint8, device=CPU)).tolist()]
    return {r: other[DIGEST:] for r, other in enumerate(table) if other[:DIGEST] == own[:DIGEST]}


def _call_lower(rank: int, names: Mapping[int, bytes]) -> dict[int, socket.socket] | None:
    """Sockets to the ranks with lower numbers; None if one cannot be had."""
    try:
        return {r: _call(_address(name)) for r, name in names.items() if r < rank}
    except OSError:
        return None


def _groups_of(connected: Mapping[int, Connected], groups: Sequence[Group], timeout: timedelta | None
               ) -> tuple[SharedMemoryGroup, ...]:
    """Those of the groups in which this rank is and whose ranks are all connected. The memory of a rank has slots for
    all groups, one behind the other."""
    rank, seconds = dist.get_rank(), None if timeout is None else timeout.total_seconds()
    made = []
    for number, (ranks, group) in enumerate(groups):
        if rank in ranks and len(ranks) > 1 and connected.keys() >= set(ranks):
            at = slice(number * SLOTS * SLOT_BYTES, (number + 1) * SLOTS * SLOT_BYTES)
            made.append(SharedMemoryGroup(group, number, ranks.index(rank), [connected[r].peer for r in ranks],
                                          [connected[r].memory[at].view(SLOTS, -1) for r in ranks], seconds))
    return tuple(made)


def machine_digest() -> bytes:
    """Equal for processes that can share memory: of one user of one machine and its network, which containers may
    divide."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = os.stat("/proc/self/ns/net")
    except OSError:
        return os.urandom(DIGEST)
    return sha256(f"{boot} {network.st_dev} {network.st_ino} {os.geteuid()}".encode()).digest()[:DIGEST]


def _open(name: bytes, size: int, stack: ExitStack) -> tuple[socket.socket, int] | None:
    """A socket that other ranks connect to, and memory for them, which the stack closes. None: this system has no such
    sockets, or no files without a name."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return None
    try:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
        listener.bind(_address(name))
        listener.listen(MAX_RANKS)
        listener.settimeout(SETUP_SECONDS)
        file = os.memfd_create("rldsl", os.MFD_CLOEXEC)
        stack.callback(os.close, file)
        os.ftruncate(file, size)
    except OSError:
        return None
    return listener, file


def _address(name: bytes) -> str:
    """In the abstract namespace, which has no files."""
    return f"\0rldsl-{name.hex()}"


def _try_to_connect(rank: int, ranks: Collection[int], below: Mapping[int, socket.socket], listener: socket.socket,
                    file: int, size: int) -> dict[int, Connected] | None:
    """As `_connect`; None where that fails."""
    try:
        return _connect(rank, ranks, below, listener, file, size)
    except (OSError, ValueError):
        return None


def _connect(rank: int, ranks: Collection[int], below: Mapping[int, socket.socket], listener: socket.socket, file: int,
             size: int) -> dict[int, Connected]:
    """The ranks of this machine, this one included. ranks: their numbers. below: the sockets of those with lower
    numbers, which this one has called. file: this rank's memory, of `size` bytes. Errors: OSError, ValueError."""
    found = {rank: Connected(None, _mapped(file, size))}
    for other in below.values():
        socket.send_fds(other, [HELLO.pack(rank)], [file])
    for _ in range(sum(r > rank for r in ranks)):
        other, _ = listener.accept()
        other.settimeout(SETUP_SECONDS)
        who = _take(other, found, size)
        if who not in ranks or who <= rank:
            raise ValueError(f"rank {who} has connected to rank {rank}")
        socket.send_fds(other, [HELLO.pack(rank)], [file])
    for r, other in below.items():
        if _take(other, found, size) != r:
            raise ValueError(f"rank {r} has another number")
    return found


def _call(address: str) -> socket.socket:
    other = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    other.settimeout(SETUP_SECONDS)
    other.connect(address)
    return other


def _take(other: socket.socket, found: dict[int, Connected], size: int) -> int:
    """Receive the number and the memory of a rank. Errors: OSError, ValueError."""
    _, user, _ = CREDENTIALS.unpack(other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    if user != os.geteuid():
        raise ValueError(f"user {user} has connected")
    data, files, _, _ = socket.recv_fds(other, HELLO.size, 1)
    try:
        if len(data) != HELLO.size or len(files) != 1 or os.fstat(files[0]).st_size != size:
            raise ValueError("a rank gave no memory of this size")
        (who,) = HELLO.unpack(data)
        other.setblocking(False)
        found[who] = Connected(Peer(who, other), _mapped(files[0], size))
    finally:
        for file in files:
            os.close(file)
    return int(who)


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
