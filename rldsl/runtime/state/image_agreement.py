"""Ranks compare the image files of a run: each makes pixels itself, so all must read the same pictures.

In: the sources that this rank has opened. Out: nothing, or an error. Every rank looks once more at the files, after all
have opened them: one that was written in between is RL0752. Where ranks of several machines read a source, its files
are digested, each once on every machine: its ranks divide the blocks of rows among themselves. Blocks are compared
first; of those that differ, the files, so that a message names one. Where the user asks for it, every image is decoded,
once by any rank.
Codes: RL0740 an image cannot be decoded, RL0752 a file changed, RL0769 machines have different files.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist

from rldsl.diag import Diagnostic, Failure
from rldsl.runtime.collectives import all_gather
from rldsl.runtime.comm.agreement import raise_together
from rldsl.runtime.comm.content_digests import ContentDigest, compare_contents, readers_of, tables_of_ranks
from rldsl.runtime.data import Source
from rldsl.runtime.data.image_digests import image_files, images_of
from rldsl.runtime.data.row_check import RowErrors

MOST_BLOCKS = 4096  # of a source
LEAST_ROWS = 64  # of a block
T = TypeVar("T")


def compare_image_files(sources: Mapping[str, Source], with_images: Sequence[str], device: torch.device) -> None:
    """All ranks call it together. sources: that this rank has opened. with_images: names of all that have images."""
    if not with_images or dist.get_world_size() == 1:
        return
    _together(lambda: check_unchanged(sources[name] for name in with_images if name in sources), device)
    places = _places(sources, with_images, device)
    blocks: dict[bytes, tuple[Source, range]] = {}  # by the key of the digest of each that this rank reads

    def digest_blocks() -> list[ContentDigest]:
        digests = []
        for source in (sources[name] for name in with_images if name in places):
            at, count = places[source.data.name]
            for rows in _blocks(source)[at::count]:
                digests.append(_of_block(source, rows))
                blocks[digests[-1].key] = source, rows
        return digests

    tables = tables_of_ranks(_together(digest_blocks, device), device)
    differing = [key for key, contents in readers_of(tables).items() if len(contents) > 1]
    if differing:
        compare_contents(_together(lambda: chain.from_iterable(_of_files(*blocks[key]) for key in differing
                                                               if key in blocks), device), device)


def decode_images(sources: Mapping[str, Source], with_images: Sequence[str], device: torch.device) -> None:
    """RL0740 for images that cannot be decoded. All ranks call it together; those that have opened a source divide its
    rows among themselves. sources: that this rank has opened. with_images: names of all that have images."""
    readers = _readers(sources, with_images, device)

    def decode() -> Sequence[None]:
        errors = RowErrors()
        for source in (sources[name] for name in with_images if name in sources):
            ranks = readers[source.data.name]
            for rows in _blocks(source)[ranks.index(dist.get_rank()) :: len(ranks)]:
                for place, image in images_of(source, rows):
                    try:
                        source.image_column.read(image, place)
                    except Failure as failure:
                        errors.add(failure.diagnostics)
        errors.stop()
        return ()

    _together(decode, device)


def _together(what: Callable[[], Iterable[T]], device: torch.device) -> list[T]:
    """What this rank makes, or an error on all ranks if one cannot."""
    found: list[T] = []
    wrong: Sequence[Diagnostic] = ()
    try:
        found = list(what())
    except Failure as failure:
        wrong = failure.diagnostics
    raise_together(wrong, dist.group.WORLD, device)
    return found


def check_unchanged(sources: Iterable[Source]) -> Sequence[None]:
    """RL0752 where an image file was written since it was read first."""
    for source in sources:
        if source.image_column.stamps:
            for place, image in image_files(source):
                source.image_column.check_unchanged(image, place)
    return ()


def _places(sources: Mapping[str, Source], with_images: Sequence[str], device: torch.device
            ) -> dict[str, tuple[int, int]]:
    """Of each source that ranks of several machines have opened, and this one: the place of this rank among those of
    its machine that have, and how many these are."""
    local = all_gather(torch.tensor([int(os.environ.get("LOCAL_RANK", "0"))], device=device)).flatten().tolist()
    machines = [local[: rank + 1].count(0) for rank in range(len(local))]
    mine, found = dist.get_rank(), {}
    for name, readers in _readers(sources, with_images, device).items():
        neighbors = [rank for rank in readers if machines[rank] == machines[mine]]
        if mine in readers and len({machines[rank] for rank in readers}) > 1:
            found[name] = neighbors.index(mine), len(neighbors)
    return found


def _readers(sources: Mapping[str, Source], with_images: Sequence[str], device: torch.device) -> dict[str, list[int]]:
    """The ranks that have opened each source."""
    known = torch.tensor([int(name in sources) for name in with_images], dtype=torch.int64, device=device)
    table = all_gather(known).tolist()
    return {name: [rank for rank, row in enumerate(table) if row[i]] for i, name in enumerate(with_images)}


def _blocks(source: Source) -> list[range]:
    """The rows of a source in blocks, which depend on their number alone."""
    count = len(source.table)
    size = max(LEAST_ROWS, -(-count // MOST_BLOCKS))
    return [range(first, min(first + size, count)) for first in range(0, count, size)]


def _of_block(source: Source, rows: range) -> ContentDigest:
    whole = sha256()
    for place, image in image_files(source, rows):
        whole.update(source.image_column.digest(image, place).encode())
    part = str(rows.start).encode()
    return ContentDigest.of(source.data.path, f"images of `{source.data.name}`", whole.digest(), part)


def _of_files(source: Source, rows: range) -> Iterable[ContentDigest]:
    for place, image in image_files(source, rows):
        yield ContentDigest.of(image.path, f"an image of `{source.data.name}` ({place})",
                               source.image_column.digest(image, place).encode())
