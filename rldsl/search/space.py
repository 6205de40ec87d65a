"""The search space: blocks of ranks that a call may run on, and strategies that divide its model and rows over one.

In: the shape of a cluster, a model's family, the kind of a call. Out: blocks in a tree, and strategies.
Blocks are the whole cluster, its nodes halved repeatedly down to one node, then even parts of a node. Any two are
disjoint or nested, and each is a mesh that a program can name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import gcd
from typing import Literal, NamedTuple

from rldsl.models.families import Family
from rldsl.placement.model import Placement, layout_of
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh

Kind = Literal["generate", "infer", "train"]
LONG = 8192  # tokens per sequence from which context parallelism is tried


class Block(NamedTuple):
    """Ranks start to stop - 1."""

    start: int  # first rank
    stop: int  # one more than the last

    @property
    def size(self) -> int:
        return self.stop - self.start

    def contains(self, other: Block) -> bool:
        return self.start <= other.start and other.stop <= self.stop

    def overlaps(self, other: Block) -> bool:
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
class BlockTree:
    """All blocks of `nodes` machines with `gpus` devices each. `BlockTree(2, 4)`: 0:8, 0:4, 0:2, 0:1, ..."""

    nodes: int  # number of machines
    gpus: int  # per machine

    @cached_property
    def root(self) -> Block:
        return Block(0, self.nodes * self.gpus)

    def children(self, b: Block) -> tuple[Block, ...]:
        return _children(b, self.gpus)

    @cached_property
    def all_blocks(self) -> tuple[Block, ...]:
        """The largest first."""
        found, todo = [], [self.root]
        while todo:
            found += todo
            todo = [c for b in todo for c in self.children(b)]
        return tuple(sorted(found, key=lambda b: (-b.size, b.start)))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(b.size for b in self.all_blocks))

    def distinct_blocks(self, used: Collection[Block]) -> Iterator[Block]:
        """The blocks, up to symmetry: of siblings of one size that no used block meets only the first is listed,
        because all nodes are equal and so are the devices of a node."""
        found: list[Block] = []

        def visit(b: Block, near: Sequence[Block]) -> None:
            """near: the used blocks that may lie inside `b`."""
            inside = [u for u in near if u[0] < b[1] and b[0] < u[1] and not (u[0] <= b[0] and b[1] <= u[1])]
            if not inside:
                found.extend(self._unused(b))
                return
            found.append(b)
            seen: set[int] = set()
            for c in self.children(b):
                if not any(u[0] < c[1] and c[0] < u[1] for u in inside):
                    if c.size in seen:
                        continue
                    seen.add(c.size)
                visit(c, inside)

        visit(self.root, tuple(used))
        return iter(found)

    @cached_property
    def _unused_blocks(self) -> dict[Block, tuple[Block, ...]]:
        return {}

    def _unused(self, b: Block) -> tuple[Block, ...]:
        """A block and the blocks inside it, up to symmetry, where none inside it is used."""
        if b not in self._unused_blocks:
            distinct = {c.size: c for c in reversed(self.children(b))}  # the first of each size
            inside = [c for c in self.children(b) if distinct[c.size] is c]
            self._unused_blocks[b] = (b, *(x for c in inside for x in self._unused(c)))
        return self._unused_blocks[b]


@dataclass(frozen=True, slots=True, order=True)
class Strategy:
    """How a call runs on its ranks. The fields are the options of a `place` rule."""

    dp: int = 1  # data parallelism
    tp: int = 1  # tensor parallelism
    pp: int = 1  # pipeline stages
    cp: int = 1  # context parallelism
    ep: int = 1  # expert parallelism
    zero: int = 0  # ZeRO level, 0 to 3
    mbs: int = 0  # sequences per micro-batch; 0: all
    recompute: bool = False  # full activation recomputation
    offload: bool = False  # parameters and optimizer state in host memory between calls
    vpp: int = 1  # chunks of layers per stage
    mbt: int = 0  # tokens per micro-batch; 0: no limit
    backend: str = DEFAULT_BACKEND  # that computes

    @staticmethod
    def of(p: Placement) -> Strategy:
        x = p.layout
        return Strategy(x.dp, x.tp, x.pp, x.cp, x.ep, x.zero, p.mbs, p.recompute == "full", p.offload, x.vpp, p.mbt,
                        x.backend)

    def layout(self, mesh: Mesh) -> Layout:
        return layout_of(mesh, self.dp, self.tp, self.pp, self.cp, self.backend, self.zero, self.ep, self.vpp)

    def with_micro_batches(self, mbs: int, mbt: int) -> Strategy:
        """`replace` for the fields that a search changes most often, which takes a third of the time."""
        return Strategy(self.dp, self.tp, self.pp, self.cp, self.ep, self.zero, mbs, self.recompute, self.offload,
                        self.vpp, mbt, self.backend)

    @property
    def degrees(self) -> tuple[int | str, ...]:
        """Equal for equal layouts on one mesh."""
        return self.dp, self.tp, self.pp, self.cp, self.ep, self.zero, self.vpp, self.backend

    @property
    def division(self) -> tuple[int | str, ...]:
        """Equal for strategies that may share parameters on the same ranks (`reshard/alias.py`)."""
        return self.tp, self.pp, self.vpp, self.ep, min(self.zero, 1), self.backend

    def text(self) -> str:
        """As in a clause: "dp=4 tp=2"."""
        degrees = [f"{k}={v}" for k, v, usual in (
            ("dp", self.dp, 0), ("tp", self.tp, 1), ("pp", self.pp, 1), ("vpp", self.vpp, 1), ("cp", self.cp, 1),
            ("ep", self.ep, 1), ("zero", self.zero, 0), ("mbs", self.mbs, 0), ("mbt", self.mbt, 0)) if v != usual]
        return " ".join([*degrees, *(["recompute=full"] if self.recompute else []),
                         *(["offload=true"] if self.offload else []),
                         *([f"backend={self.backend}"] if self.backend != DEFAULT_BACKEND else [])])


def divisions(kind: Kind, size: int, gpus: int, family: Family, tokens: int) -> Iterator[Strategy]:
    """Every division of `size` ranks that the model allows, with the other options at their defaults. tokens: of the
    longest sequence."""
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


def with_chunks(kind: Kind, s: Strategy, layers: int, chunks: tuple[int, ...]) -> tuple[Strategy, ...]:
    """With these numbers of layer chunks per pipeline stage (vpp)."""
    if kind != "train" or s.pp == 1:
        return (s,)
    return tuple(replace(s, vpp=v) for v in chunks if s.pp * v <= layers)


def zero_levels(kind: Kind, s: Strategy) -> tuple[Strategy, ...]:
    return tuple(replace(s, zero=z) for z in range(4)) if kind == "train" and s.dp > 1 else (s,)


def can_tp(f: Family, tp: int) -> bool:
    """Whether a family can be divided by `tp`, as `placement/degrees.check_family` decides."""
    if tp == 1:
        return True
    divides = not f.heads % tp and (not f.kv_heads % tp or not tp % f.kv_heads)
    return divides and not f.tp_problem and not (f.experts and tp > f.expert_width)


def micro_batch_sizes(rows: int, pp: int) -> tuple[int, ...]:
    """The distinct micro-batch sizes for `rows` rows of a dp rank: powers of two, then 0 for the largest possible: all
    rows, or with a pipeline the rows divided by its stages."""
    return (*(2**k for k in range(max(rows, 1).bit_length()) if -(-rows // 2**k) > pp), 0)


def _divisors(n: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, n + 1) if n % d == 0)
