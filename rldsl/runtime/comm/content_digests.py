"""Ranks compare what they have read: copies of a file on several machines must be identical.

In: of each thing that this rank has read (a data file, a tokenizer, its slices of a weight file), a digest of the
content. Out: nothing, or RL0769 with the file and the ranks. Ranks that read the same part of the same file must have
found the same bytes; parts that only one rank reads cannot be compared.
Cost: one pass of sha256 over what the rank reads anyway, and one collective with 32 bytes for each rank and file: at
1,024 ranks that read 100 files each, 3.2 MB per rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic
from rldsl.plan.disk_paths import shown
from rldsl.plan.notation import ranks_text
from rldsl.runtime.collectives import all_gather, all_reduce
from rldsl.runtime.comm.agreement import raise_together

HALF = 16  # bytes of a key, and of a content


@dataclass(frozen=True, slots=True)
class ContentDigest:
    """What one rank has read of one file or directory. Equal keys and contents count once: two layouts of a model."""

    # the path, as the plan has it
    place: str
    # names it in a message
    what: str
    # ranks with equal keys have read the same part
    key: bytes
    # digest of what was read
    content: bytes

    @classmethod
    def of(cls, place: str, what: str, content: bytes, part: bytes = b"") -> ContentDigest:
        """content: a digest of what was read. part: a digest of which part that is (empty: all of it)."""
        return cls(place, what, sha256(f"{what}\0{place}\0".encode("utf-8", "surrogatepass") + part).digest()[:HALF],
                   sha256(content).digest()[:HALF])


def compare_contents(digests: Sequence[ContentDigest], device: torch.device) -> None:
    """All ranks call it together. RL0769."""
    if tables := tables_of_ranks(digests, device):
        raise_together(list(differences(digests, tables, dist.get_rank())), dist.group.WORLD, device)


def tables_of_ranks(digests: Sequence[ContentDigest], device: torch.device) -> list[bytes]:
    """Of each rank, its keys and contents; [] if no rank has any. All ranks call it together."""
    count = torch.tensor([len(digests)], device=device)
    all_reduce(count, dist.ReduceOp.MAX)
    if not int(count):
        return []
    table = b"".join(entry.key + entry.content for entry in digests).ljust(2 * HALF * int(count), b"\0")
    encoded = torch.frombuffer(bytearray(table), dtype=torch.uint8).to(device)
    return [x.cpu().numpy().tobytes() for x in all_gather(encoded)]


def readers_of(tables: Sequence[bytes]) -> dict[bytes, dict[bytes, set[int]]]:
    """Key -> content -> the ranks that have read it so. tables: as of `differences`."""
    readers: dict[bytes, dict[bytes, set[int]]] = {}
    for number, table in enumerate(tables):
        for at in range(0, len(table), 2 * HALF):
            key, content = table[at : at + HALF], table[at + HALF : at + 2 * HALF]
            if any(key):
                readers.setdefault(key, {}).setdefault(content, set()).add(number)
    return readers


def differences(digests: Sequence[ContentDigest], tables: Sequence[bytes], rank: int) -> Iterator[Diagnostic]:
    """For each thing that ranks have read differently, a message on the first rank that reads it. tables: of each rank,
    its keys and contents."""
    readers = readers_of(tables)
    for entry in {entry.key: entry for entry in digests}.values():
        groups = sorted(map(sorted, readers[entry.key].values()), key=lambda ranks: (-len(ranks), ranks[0]))
        if len(groups) > 1 and rank == min(ranks[0] for ranks in groups):
            others = sorted(number for ranks in groups[1:] for number in ranks)
            yield Diagnostic(
                "RL0769", f"{entry.what} differs between rank{'s' * (len(others) > 1)} {ranks_text(others)} and "
                          f"rank{'s' * (len(groups[0]) > 1)} {ranks_text(groups[0])}",
                place=shown(entry.place),
                help="the copies on all machines must be identical: copy the file again, or use a shared file system")
