"""Collectives between ranks on one machine, through memory that they share.

gloo sends everything through sockets, and threads that wake each other, also to a rank of the same machine; for small
tensors that is nearly all that a sum takes. Here each rank writes to memory that the others read, and then sends them a
token through a Unix socket. A rank that has received a token sees what was written before it.

In: tensors on CPUs, of equal shapes on all ranks. Out: the same as from torch.distributed; sums are in the order of the
ranks, so that all ranks get the same bits. They are operators of torch, so that captured steps see them, and operators
take a group by its name, as those of torch.distributed do.
Errors: RuntimeError where a rank is gone, does not come within the timeout, or makes another call.

`runtime/comm/machine_peers.py` connects the ranks. Not for several threads at once.
"""

from __future__ import annotations

import os
import select
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from socket import socket
from typing import Any
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
import torch.distributed as dist

SLOT_BYTES = 1 << 21  # that a rank gives at a time
SLOTS = 2             # of a rank: one is read while the next is written
ONE_ROUND = 1 << 17   # bytes up to which each rank adds all itself, instead of a part for all
SPIN_SECONDS = 1e-4   # of looking for a token before a rank sleeps: to be woken takes about as long
MAX_POLL = 2**31 - 1  # milliseconds that a system call waits at most
TOKEN = struct.Struct("<qqqq")  # group, number of the call in it, its kind, bytes
COMBINE: Mapping[str, Callable[..., torch.Tensor]] = {"sum": torch.add, "max": torch.maximum}
KINDS = ("sum", "max", "parts", "gather", "exchange")


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank of this machine."""

    rank: int      # in the world
    socket: socket  # that carries tokens; messages keep their boundaries


class SharedMemoryGroup:
    """The ranks of a group, all on one machine."""

    def __init__(self, group: dist.ProcessGroup, number: int, index: int, peers: Sequence[Peer | None],
                 slots: Sequence[torch.Tensor], timeout: float | None):
        """number: of the group in the run. index: of this rank in the group. peers: by index; None: this rank. slots:
        [SLOTS, SLOT_BYTES] uint8 of each rank. timeout: seconds that a rank waits for another; None: without end."""
        self.group: ReferenceType[dist.ProcessGroup] = ref(group)
        self.number, self.index, self.size, self.timeout = number, index, len(peers), timeout
        self.others = [peer for peer in peers if peer is not None]
        self.slots = slots
        self.calls = 0  # tokens sent to each
        self.turn = 0   # the slot to write to
        self._views: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}

    def all_reduce(self, x: torch.Tensor, op: str) -> None:
        """x: contiguous; replaced by the sum or the maximum."""
        for part in x.view(-1).split(SLOT_BYTES // x.element_size()):
            if part.nbytes <= ONE_ROUND:
                given = self._give(part, part.dtype)
                self._meet(op, part.nbytes)
                _combine(given, COMBINE[op], part)
            else:
                self._reduce_in_parts(part, op)

    def _reduce_in_parts(self, x: torch.Tensor, op: str) -> None:
        """Each rank combines a part, of which the others give theirs, and gives the result to them."""
        given = self._slots_of_call(x.numel(), x.dtype)
        cuts = [slice(x.numel() * i // self.size, x.numel() * (i + 1) // self.size) for i in range(self.size)]
        own, mine = cuts[self.index], given[self.index]
        for cut in cuts:
            if cut != own:
                mine[cut].copy_(x[cut])
        self._meet(op, x.nbytes)
        _combine([x[own] if i == self.index else rows[own] for i, rows in enumerate(given)], COMBINE[op], mine[own])
        self._meet("parts", x.nbytes)
        for cut, rows in zip(cuts, given, strict=True):
            x[cut].copy_(rows[cut])

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x: [n] bytes. out: [ranks, n]."""
        for at in range(0, x.numel(), SLOT_BYTES):
            part = x[at : at + SLOT_BYTES]
            given = self._give(part, x.dtype)
            self._meet("gather", part.numel())
            for i, row in enumerate(given):
                out[i, at : at + SLOT_BYTES].copy_(row)

    def all_to_all(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x, out: [ranks, n] bytes, a row for each rank and of each."""
        width = SLOT_BYTES // self.size
        for at in range(0, x.shape[1], width):
            part = x[:, at : at + width]
            given = self._give(part, x.dtype)
            self._meet("exchange", part.numel())
            for i, rows in enumerate(given):
                out[i, at : at + width].copy_(rows.view(part.shape)[self.index])

    def _give(self, part: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
        """Write to this rank's slot. Returns what each rank gives once all have met."""
        given = self._slots_of_call(part.numel(), dtype)
        given[self.index].view(part.shape).copy_(part)
        return given

    def _slots_of_call(self, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """`count` numbers in the slot of each rank. What is there once all have met stays until the call after the next
        one, to which no rank comes before all have read it."""
        views = self._views.get((self.turn, dtype))
        if views is None:
            with torch.inference_mode(False):  # in which a trace runs: later calls may be outside it
                views = self._views[self.turn, dtype] = [slots[self.turn].view(dtype) for slots in self.slots]
        self.turn = (self.turn + 1) % SLOTS
        return [view[:count] for view in views]

    def _meet(self, kind: str, size: int) -> None:
        """Tell the others that this rank is here, and wait for them."""
        self.calls += 1
        token = TOKEN.pack(self.number, self.calls, KINDS.index(kind), size)
        for peer in self.others:
            _send(peer, token)
        for peer in self.others:
            got = _receive(peer, self.timeout)
            if got != token:
                raise RuntimeError(f"rank {peer.rank} makes another call: {_text(got)}, and this rank {_text(token)}")


def _text(token: bytes) -> str:
    group, number, kind, size = TOKEN.unpack(token)
    return f"number {number} in group {group}, {KINDS[kind]} of {size} bytes"


def _send(peer: Peer, token: bytes) -> None:
    try:
        os.write(peer.socket.fileno(), token)
    except OSError as error:
        raise RuntimeError(f"connection closed by rank {peer.rank}: {error}") from None


def _receive(peer: Peer, timeout: float | None) -> bytes:
    file, until = peer.socket.fileno(), time.perf_counter() + SPIN_SECONDS
    while True:
        try:
            token = os.read(file, TOKEN.size)
            break
        except BlockingIOError:
            if time.perf_counter() < until:
                os.sched_yield()
                continue
        except OSError as error:
            raise RuntimeError(f"connection closed by rank {peer.rank}: {error}") from None
        waiting = select.poll()
        waiting.register(file, select.POLLIN)
        if not waiting.poll(None if timeout is None else min(timeout * 1e3, MAX_POLL)):
            raise RuntimeError(f"timed out after {timeout:g} s of waiting for rank {peer.rank}")
    if not token:
        raise RuntimeError(f"connection closed by rank {peer.rank}")
    return token


def _combine(given: Sequence[torch.Tensor], how: Callable[..., torch.Tensor], out: torch.Tensor) -> None:
    """In their order."""
    how(given[0], given[1], out=out)
    for rows in given[2:]:
        how(out, rows, out=out)


# torch's operators take numbers, texts and tensors, so groups are found by their names, as those of torch.distributed
_GROUPS: WeakValueDictionary[str, SharedMemoryGroup] = WeakValueDictionary()


def register(made: SharedMemoryGroup) -> None:
    """From now on collectives of its group use it, as long as it is held."""
    group = made.group()
    if group is not None:
        _GROUPS[group.group_name] = made


def shared_memory_name(group: Any) -> str | None:
    """The name by which the operators know a group (None: the world); None: its ranks share no memory."""
    if not _GROUPS:
        return None
    wanted: Any = dist.group.WORLD if group is None else group
    name = str(wanted.group_name)
    made = _GROUPS.get(name)
    return name if made is not None and made.group() is wanted else None


def all_reduce(x: torch.Tensor, op: str, name: str) -> None:
    """See `SharedMemoryGroup.all_reduce`, of the group of this name. op: of `COMBINE`."""
    _GROUPS[name].all_reduce(x, op)


def all_gather(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """See `SharedMemoryGroup.all_gather`."""
    _GROUPS[name].all_gather(x, out)


def all_to_all(x: torch.Tensor, out: torch.Tensor, name: str) -> None:
    """See `SharedMemoryGroup.all_to_all`."""
    _GROUPS[name].all_to_all(x, out)


_OPERATORS = torch.library.Library("rldsl", "FRAGMENT")
_OPERATORS.define("shared_all_reduce(Tensor(a!) x, str op, str name) -> ()")
_OPERATORS.define("shared_all_gather(Tensor x, Tensor(a!) out, str name) -> ()")
_OPERATORS.define("shared_all_to_all(Tensor x, Tensor(a!) out, str name) -> ()")
_OPERATORS.impl("shared_all_reduce", all_reduce, "CPU")
_OPERATORS.impl("shared_all_gather", all_gather, "CPU")
_OPERATORS.impl("shared_all_to_all", all_to_all, "CPU")
# operator -> its call without torch's dispatcher, for captured steps
PLAIN: dict[Any, Callable[..., Callable[[], Any]]] = {
    torch.ops.rldsl.shared_all_reduce.default: partial(partial, all_reduce),
    torch.ops.rldsl.shared_all_gather.default: partial(partial, all_gather),
    torch.ops.rldsl.shared_all_to_all.default: partial(partial, all_to_all)}
