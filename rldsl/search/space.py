"""Where a call may run: blocks of ranks, and how it may divide its model and rows over one.

In: the shape of a cluster, a model's family, what a call is. Out: blocks in a tree, and strategies.
Blocks are the whole cluster, halves of its nodes again and again down to one node, then even parts of a node: any two
are disjoint, or one lies in the other, and each is a mesh that a program can name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
from typing import Literal, NamedTuple

from rldsl.models.families import Family
from rldsl.placement.model import Place, layout_of
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh

Kind = Literal["generate", "infer", "train"]
LONG = 8192  # tokens from which on dividing sequences (cp) is tried


class Block(NamedTuple):
    """Ranks start to stop - 1."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def holds(self, other: Block) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def meets(self, other: Block) -> bool:
        return self.start < other.stop and other.start < self.stop

    def mesh(self) -> Mesh:
        return Mesh(f"{self.start}:{self.stop}", ((self.start, self.stop),))


@cache
def _children(b: Block, gpus: int) -> tuple[Block, ...]:
    nodes = b.size // gpus
    if nodes > 1:
        middle = b.start + (nodes + 1) // 2 * gpus
        return Block(b.start, middle), Block(middle, b.stop)
    if b.size == 1:
        return ()
    part = b.size // next(p for p in range(2, b.size + 1) if b.size % p == 0)
    return tuple(Block(at, at + part) for at in range(b.start, b.stop, part))


@dataclass(frozen=True)
class Tree:
    """All blocks of `nodes` machines of `gpus` devices. `Tree(2, 4)`: 0:8, 0:4, 0:2, 0:1, ..."""

    nodes: int
    gpus: int

    @property
    def root(self) -> Block:
        return Block(0, self.nodes * self.gpus)

    def children(self, b: Block) -> tuple[Block, ...]:
        return _children(b, self.gpus)

    @cached_property
    def every(self) -> tuple[Block, ...]:
        """The largest first."""
        found, todo = [], [self.root]
        while todo:
            found += todo
            todo = [c for b in todo for c in self.children(b)]
        return tuple(sorted(found, key=lambda b: (-b.size, b.start)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(b.size for b in self.every))

    def different(self, used: Collection[Block]) -> Iterator[Block]:
        """One of all blocks that are alike, given those that are in use: of brothers in which nothing is, and of one
        size, only the first matters, because nodes are equal and so are the devices of a node."""
        def visit(b: Block) -> Iterator[Block]:
            yield b
            seen: set[int] = set()
            mine = [u for u in used if u.meets(b) and not u.holds(b)]
            for c in self.children(b):
                if not any(u.meets(c) for u in mine):
                    if c.size in seen:
                        continue
                    seen.add(c.size)
                yield from visit(c)

        return visit(self.root)


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """How a call runs on its ranks; the words are those of a placement. recompute: full. mbt is not searched for."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 0
    mbs: int = 0
    recompute: bool = False
    offload: bool = False
    vpp: int = 1
    mbt: int = 0
    backend: str = DEFAULT_BACKEND

    @staticmethod
    def of(p: Place) -> Strategy:
        x = p.layout
        return Strategy(x.dp, x.tp, x.pp, x.cp, x.ep, x.zero, p.mbs, p.recompute == "full", p.offload, x.vpp, p.mbt,
                        x.backend)

    def layout(self, mesh: Mesh) -> Layout:
        return layout_of(mesh, self.dp, self.tp, self.pp, self.cp, self.backend, self.zero, self.ep, self.vpp)

    @property
    def degrees(self) -> tuple[int | str, ...]:
        """What tells layouts on one mesh apart."""
        return self.dp, self.tp, self.pp, self.cp, self.ep, self.zero, self.vpp, self.backend

    def text(self) -> str:
        """As a clause says it: "dp=4 tp=2"."""
        said = [f"{k}={v}" for k, v, usual in (
            ("dp", self.dp, 0), ("tp", self.tp, 1), ("pp", self.pp, 1), ("vpp", self.vpp, 1), ("cp", self.cp, 1),
            ("ep", self.ep, 1), ("zero", self.zero, 0), ("mbs", self.mbs, 0), ("mbt", self.mbt, 0)) if v != usual]
        return " ".join([*said, *(["recompute=full"] if self.recompute else []),
                         *(["offload=true"] if self.offload else []),
                         *([f"backend={self.backend}"] if self.backend != DEFAULT_BACKEND else [])])


def divisions(kind: Kind, size: int, gpus: int, family: Family, tokens: int) -> Iterator[Strategy]:
    """Every division of `size` ranks that the model allows, without micro-batches. tokens: of the longest sequence."""
    long = kind != "generate" and tokens >= LONG
    for tp in _divisors(min(size, gpus)):
        if size % tp or gpus % tp or not can_tp(family, tp):
            continue
        for pp in _divisors(size // tp):
            if pp > 1 and (pp > family.layers or family.pp_problem):
                continue
            for cp in _divisors(min(size // tp // pp, gpus // tp)) if long else (1,):
                if size % (tp * pp * cp):
                    continue
                dp = size // (tp * pp * cp)
                plain = Strategy(dp, tp, pp, cp)
                for ep in _divisors(gcd(dp, family.experts)) if family.experts and cp == 1 else (1,):
                    yield replace(plain, ep=ep)


def with_chunks(kind: Kind, s: Strategy, layers: int, ways: tuple[int, ...]) -> tuple[Strategy, ...]:
    """With so many chunks of layers on each rank of a pipeline."""
    if kind != "train" or s.pp == 1:
        return (s,)
    return tuple(replace(s, vpp=v) for v in ways if s.pp * v <= layers)


def zero_levels(kind: Kind, s: Strategy) -> tuple[Strategy, ...]:
    return tuple(replace(s, zero=z) for z in range(4)) if kind == "train" and s.dp > 1 else (s,)


def can_tp(f: Family, tp: int) -> bool:
    """As `placement/degrees.check_family` has it."""
    if tp == 1:
        return True
    whole = not f.heads % tp and (not f.kv_heads % tp or not tp % f.kv_heads)
    return whole and not f.tp_problem and not (f.experts and tp > f.expert_width)


def micro_batch_sizes(rows: int, pp: int) -> tuple[int, ...]:
    """Sizes of micro-batches that differ for so many rows of a shard: powers of two, and the largest possible (0): all
    rows, or a part of them for each stage of a pipeline."""
    return (*(2**k for k in range(max(rows, 1).bit_length()) if -(-rows // 2**k) > pp), 0)


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
