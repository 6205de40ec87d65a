"""Library code in one process: through the real compiler and the real evaluator, over simulated shards, in float64.

    batch = Batch.random(seed=1, prompts=4, n=3)                    # the frame `gen`
    adv = run_fn("std.grpo", "group_norm(r)", batch, r=batch.seqs(2), dp=4)
    done = run_loss("std.grpo", "grpo(old=old, adv=adv, ref=ref)", batch, dict(logprobs=batch.tokens(3)),
                    old=batch.tokens(4), adv=batch.seqs(5), ref=batch.tokens(6), dp=2, mbs=1)
    done.loss, done.grads["logprobs"], done.metrics["clip_frac"]

In: the library modules, one expression of the language as a program would write it, and values for its names. Out:
numbers of the whole batch in row order. Rows are divided as a plan divides them (`sharding/partition.py`); a loss runs
once for each micro-batch of each shard, as `runtime/interpreter/model_events.py` runs it, and its partials are added up over
the shards. """

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import resources
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from rldsl.plan.entries import EntrySpace
from rldsl.plan.expr import Level, Program
from rldsl.plan.heads import HEADS
from rldsl.plan.model import Spread
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.interpreter.expression_programs import run_compute
from rldsl.runtime.interpreter.minibatch_loss import MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.ragged_index import FrameRows
from rldsl.runtime.interpreter.whole_minibatch import WholeMinibatchLoss
from rldsl.semantics.errors import BAD, Errors
from rldsl.semantics.levels import Spaces
from rldsl.semantics.losses import bind_loss
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.modules import Modules
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term, input_, program
from rldsl.semantics.values import FrameRef, LossUse, Meaning, Pairs, Several
from rldsl.sharding.micro_batches import micro_batches
from rldsl.sharding.partition import rows_by_dp
from rldsl.source import SourceFile
from rldsl.syntax import ast
from rldsl.syntax.parse import parse
from tests.frames import frame

SEED = 7  # of the partitions


@dataclass(frozen=True)
class Given:
    """A value of a batch. data: flat float64 (or bool), one entry for each element of `level` over `frame`."""

    level: Level
    frame: str
    data: Tensor


@dataclass(frozen=True)
class Batch:
    """Ragged sequences. lens: response lengths of the rows of each frame, which are `gen`, or `pair.chosen` and
    `pair.rejected`. n rows belong to each prompt."""

    lens: dict[str, list[int]]
    n: int = 1
    width: int = 0  # alternatives at each token of the frame `gen`, whose entry space is "t.ids"

    @staticmethod
    def random(seed: int = 0, prompts: int = 4, n: int = 3, max_len: int = 9, edge: str = "") -> Batch:
        """The frame `gen`. edge: "one_token" (each response has one), "empty" (some have none), "alone" (one row)."""
        prompts, n = (1, 1) if edge == "alone" else (prompts, n)
        return Batch({"gen": _lens(seed, prompts * n, max_len, edge)}, n)

    @staticmethod
    def pairs(seed: int = 0, rows: int = 7, max_len: int = 9, edge: str = "") -> Batch:
        """The two sides of pairs, of lengths of their own."""
        rows = 1 if edge == "alone" else rows
        return Batch({side: _lens(seed + i, rows, max_len, edge) for i, side in enumerate(("pair.chosen", "pair.rejected"))})

    @property
    def rows(self) -> int:
        return len(next(iter(self.lens.values())))

    @property
    def frames(self) -> dict[str, IndexedFrame]:
        if len(self.lens) == 1:
            return {"gen": frame("gen", "gen", "prompt", self.rows, self.n, "d", 8, 99)}
        return {side: frame(side, "pair", "pair", self.rows, 1, "d", 8, 99) for side in self.lens}

    def tokens(self, seed: int, frame: str = "", scale: float = 1.0, shift: float = 0.0) -> Given:
        """Normal numbers, one for each token. frame: by default the first."""
        frame = frame or next(iter(self.lens))
        return Given("token", frame, scale * _normal(seed, sum(self.lens[frame])) + shift)

    def logprobs(self, seed: int, frame: str = "", scale: float = 1.0) -> Given:
        """Negative numbers, one for each token."""
        given = self.tokens(seed, frame, scale)
        return Given("token", given.frame, -given.data.abs() - 1e-3)

    @property
    def entries(self) -> dict[str, EntrySpace]:
        return {"t.ids": EntrySpace("gen", self.width)} if self.width else {}

    def alternatives(self, seed: int, scale: float = 1.0) -> Given:
        """Log-probs of some alternatives at each token; there are others."""
        scores = scale * _normal(seed, sum(self.lens["gen"]) * (self.width + 1)).view(-1, self.width + 1)
        return Given("entry", "gen", scores.log_softmax(-1)[:, 1:].flatten())

    def seqs(self, seed: int, scale: float = 1.0) -> Given:
        return Given("seq", next(iter(self.lens)), scale * _normal(seed, self.rows))

    def of_prompts(self, seed: int, scale: float = 1.0) -> Given:
        return Given("prompt", next(iter(self.lens)), scale * _normal(seed, self.rows // self.n))

    def given(self, level: Level, data: Sequence[float] | Tensor, frame: str = "") -> Given:
        return Given(level, frame or next(iter(self.lens)), torch.as_tensor(data, dtype=torch.float64))

    def split(self, x: Given | Tensor, frame: str = "") -> list[Tensor]:
        """A token value, sequence by sequence."""
        frame = x.frame if isinstance(x, Given) else frame or next(iter(self.lens))
        return list((x.data if isinstance(x, Given) else x).split(self.lens[frame]))


def _lens(seed: int, rows: int, longest: int, edge: str) -> list[int]:
    if edge == "one_token":
        return [1] * rows
    drawn = torch.randint(1, longest + 1, (rows,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [0 if i % 3 == 1 else n for i, n in enumerate(drawn)] if edge == "empty" else drawn


def _normal(seed: int, size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)


@dataclass(frozen=True)
class Done:
    """loss, metrics: of the whole batch. grads: fresh name -> d loss / d value, flat. outputs: of a `run_fn`."""

    loss: float
    grads: dict[str, Tensor]
    metrics: dict[str, float]


# ------------------------------------------------------------------------------------------------- compiling


@dataclass
class _Compiled:
    """Names of a batch and its values in a scope over the library."""

    exprs: ExpressionBuilder
    scope: Scope
    errors: Errors
    trees: list[ast.Expr] = field(default_factory=list)

    def meaning(self) -> Meaning:
        result = self.exprs.build(self.trees[0], self.scope)
        self.errors.check()
        return result


def _compile(modules: str, call: str, batch: Batch, data: dict[str, Given | float], text: str) -> _Compiled:
    """The expression `call` as it stands in a flow. modules: "std.ppo std.grpo"; text: declarations besides."""
    uses = "".join(f"use {m} ({', '.join(_names(m))})\n" for m in modules.split())
    file = parse(SourceFile("harness.rlf", f"{uses}{text}\nparam call_ = {call}\n"))
    errors = Errors()
    loader = Modules(parse, _no_files, errors)
    module = loader.main(file)
    exprs = ExpressionBuilder(Spaces(), errors, loader.prelude())
    frames = {f: exprs.spaces.add(record, *record.chain) for f, record in batch.frames.items()}
    scope = Scope(module, names={n: _term(n, v, frames, file) for n, v in data.items()})
    exprs.spaces.entries.update(batch.entries)
    if "gen" in frames:
        scope.names["gen"] = FrameRef(frames["gen"], "generated")
    else:
        scope.names["pair"] = Pairs(*(FrameRef(f, "pairs") for f in frames.values()))
    errors.check()
    trees = [i.default for i in file.items if isinstance(i, ast.Param) and i.name.name == "call_"]
    return _Compiled(exprs, scope, errors, trees)


def _names(module: str) -> list[str]:
    text = (resources.files("rldsl.stdlib") / f"{module[4:]}.rlf").read_text("utf-8")
    return [i.name.name for i in parse(SourceFile(module, text)).items if isinstance(i, (ast.FnDecl, ast.LossDecl))]


def _no_files(path: str) -> str:
    raise OSError(f"the harness reads no files: {path}")


def _term(name: str, value: Given | float, frames: dict[str, IndexedFrame], file: ast.File) -> Term:
    span = file.items[0].span
    if not isinstance(value, Given):
        return input_(name, "batch", "", span)
    frame = frames[value.frame]
    space = {"entry": "t.ids", "token": frame.id, "seq": frame.row_space, "prompt": frame.prompt_space, "batch": ""}[value.level]
    return input_(name, value.level, space, span, "bool" if value.data.dtype == torch.bool else "f32")


# --------------------------------------------------------------------------------------------------- running


def run_fn(modules: str, call: str, batch: Batch, *, dp: int = 1, text: str = "",
           **data: Given | float) -> Tensor | tuple[Tensor, ...]:
    """The value of an expression of the flow, or the tuple of what it returns, each flat over the batch."""
    made = _compile(modules, call, batch, data, text)
    meaning = made.meaning()
    results = [t for t in (meaning.values if isinstance(meaning, Several) else (meaning,)) if isinstance(t, Term)]
    code = program("harness", [(f"y{i}", t) for i, t in enumerate(results)])
    shards = _shards(batch, dp, "prompt")
    outputs = _on_ranks(dp, lambda rank, group: run_compute(
        code, {n: _part(batch, data[n], shards[rank]) for n in code.inputs()}, _views(batch, shards[rank]), batch.frames,
        group, None, entries=batch.entries))
    joined = tuple(_join(batch, t, [o[f"y{i}"] for o in outputs], shards) for i, t in enumerate(results))
    return joined if isinstance(meaning, Several) else joined[0]


def run_loss(modules: str, call: str, batch: Batch, fresh: dict[str, Given], *, head: str = "causal_lm", dp: int = 1,
             mbs: int = 0, mbt: int = 0, text: str = "", **data: Given | float) -> Done:
    """One minibatch, the whole batch, of the loss `call`, trained on all frames of the batch. fresh: by the names that
    the loss declares before `;`. mbs, mbt: most rows, and most response tokens, of a micro-batch (0: all)."""
    code, inputs, needs_all = _bound_loss(modules, call, batch, head, text, data)
    leaves = {n: g.data.clone().requires_grad_(True) for n, g in fresh.items()}
    known = inputs | {n: Given(fresh[n].level, fresh[n].frame, x) for n, x in leaves.items()}
    counts = loss_counts(code, batch.frames, range(batch.rows), batch.lens, batch.entries)
    totals = [sum(x) for x in zip(*batch.lens.values())]
    parts = [micro_batches(rows, totals, mbs, 1, mbt) for rows in _shards(batch, dp, "row")]

    def run_of(rank: int | None = None, group: Any = None) -> MinibatchLoss | WholeMinibatchLoss:
        if not needs_all:
            return MinibatchLoss(code, counts)
        whole = WholeMinibatchLoss(
            code, counts, leaves, {n for n, g in inputs.items() if isinstance(g, Given) and g.data.dtype == torch.bool},
            {n: torch.tensor(x, dtype=torch.float64) for n, x in inputs.items() if not isinstance(x, Given)})
        if rank is not None:
            for part in parts[rank]:
                with torch.no_grad():
                    whole.add_outputs({n: _part(batch, known[n], part) for n in code.inputs()}, _views(batch, part))
            whole.evaluate(group, torch.device("cpu"))
        return whole

    vectors, sums = [], 0
    for run, own in zip(_on_ranks(dp, run_of), parts):  # one for each rank
        for part in own:
            read = {n: _part(batch, known[n], part) for n in code.inputs()}
            run(read, _views(batch, part)).backward()
        vectors.append(run.partials())
        sums = run.num_summed
    table = torch.stack(vectors)
    found = run_of().finish(torch.cat([table[:, :sums].sum(0), table[:, sums:].amax(0)]))
    grads = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items()}
    return Done(found.pop("loss"), grads, found)


def _bound_loss(modules: str, call: str, batch: Batch, head: str, text: str, data: dict[str, Given | float]
                ) -> tuple[Program, dict[str, Given | float], bool]:
    """As `compile_loss`, and whether the loss needs the whole minibatch at once."""
    made = _compile(modules, call, batch, data, text)
    use = made.meaning()
    assert isinstance(use, LossUse), f"{call} is not a loss"
    lowered = bind_loss(use, HEADS[head], tuple(batch.frames.values()), "harness", made.exprs)
    made.errors.check()
    assert lowered is not BAD
    inputs: dict[str, Given | float] = {}
    for name, term in lowered.data:
        value = _evaluated(term, batch, data)
        inputs[name] = Given(term.level, _frame(batch, term), value) if term.level != "batch" else float(value)
    return lowered.program, inputs, bool(lowered.first_pass)


def compile_loss(modules: str, call: str, batch: Batch, head: str, text: str,
                 data: dict[str, Given | float]) -> tuple[Program, dict[str, Given | float]]:
    """The loss's program, and what each of its data inputs is given (an argument that is an expression is computed)."""
    return _bound_loss(modules, call, batch, head, text, data)[:2]


def _evaluated(term: Term, batch: Batch, data: dict[str, Given | float]) -> Tensor:
    rows = range(batch.rows)
    code = program("argument", [("y", term)])
    return run_compute(code, {n: _part(batch, data[n], rows) for n in code.inputs()}, _views(batch, rows), batch.frames,
                       None, None, entries=batch.entries)["y"]


def _frame(batch: Batch, term: Term) -> str:
    return term.space if term.level == "token" else next(iter(batch.lens))


def _shards(batch: Batch, dp: int, unit: str) -> list[Sequence[int]]:
    """The rows of each rank."""
    frames = tuple(batch.frames.values())
    spread = Spread("s", "m", "l", tuple(f.id for f in frames), unit)  # type: ignore[arg-type]
    return [s[frames[0].id] for s in rows_by_dp(spread, dp, frames, batch.lens, SEED, 0)]


def _views(batch: Batch, rows: Sequence[int]) -> dict[str, FrameRows]:
    at = torch.tensor(list(rows), dtype=torch.int64)
    return {f: FrameRows(at, at // batch.n, torch.tensor(lens, dtype=torch.int64)[at]) for f, lens in batch.lens.items()}


def _part(batch: Batch, value: Given | float, rows: Sequence[int]) -> Tensor:
    """The elements of some rows."""
    if not isinstance(value, Given):
        return torch.tensor(value, dtype=torch.float64)
    parts = _elements(batch, value.level, value.frame, value.data)
    picked = [parts[r] for r in (rows if value.level != "prompt" else sorted({r // batch.n for r in rows}))]
    return torch.cat(picked) if picked else value.data[:0]


def _elements(batch: Batch, level: Level, frame: str, data: Tensor) -> list[Tensor]:
    if level == "entry":
        return list(data.split([n * batch.width for n in batch.lens[frame]]))
    return list(data.split(batch.lens[frame] if level == "token" else 1))


def _join(batch: Batch, term: Term, outputs: list[Tensor], shards: list[Sequence[int]]) -> Tensor:
    """The shards' elements in the order of the batch."""
    if term.level == "batch":
        assert all(torch.equal(o, outputs[0]) for o in outputs), "ranks disagree on a batch-level value"
        return outputs[0]
    parts: dict[int, Tensor] = {}
    for output, rows in zip(outputs, shards):
        ids = list(rows) if term.level != "prompt" else sorted({r // batch.n for r in rows})
        each = {"token": lambda r: batch.lens[term.space][r], "entry": lambda r: batch.lens["gen"][r] * batch.width}
        sizes = [each.get(term.level, lambda r: 1)(r) for r in ids]
        parts |= dict(zip(ids, output.split(sizes)))
    return torch.cat([parts[i] for i in sorted(parts)])


def _on_ranks(count: int, work: Callable[[int, Any], Any]) -> list[Any]:
    """`work(rank, group)` on threads whose all-reduces meet."""
    if count == 1:
        return [work(0, None)]
    meeting, results = _Meeting(count), [None] * count

    def one(rank: int) -> None:
        try:
            results[rank] = work(rank, (meeting, rank))
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            meeting.failed.append(error)
            meeting.barrier.abort()

    with ExitStack() as patched:
        for name in ("expression_programs", "batch_reductions", "whole_minibatch"):
            patched.enter_context(mock.patch(f"rldsl.runtime.interpreter.{name}.dist", _FAKE))
        for name in ("batch_reductions", "whole_minibatch"):
            patched.enter_context(mock.patch(f"rldsl.runtime.interpreter.{name}.all_reduce", _all_reduce))
        threads = [threading.Thread(target=one, args=(r,)) for r in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if meeting.failed:
        raise meeting.failed[0]
    return results


class _Meeting:
    def __init__(self, count: int):
        self.barrier = threading.Barrier(count)
        self.values: list[Tensor | None] = [None] * count
        self.failed: list[BaseException] = []


def _all_reduce(tensor: Tensor, op: Any, group: tuple[_Meeting, int]) -> None:
    meeting, rank = group
    meeting.values[rank] = tensor.clone()
    meeting.barrier.wait()
    table = torch.stack([v for v in meeting.values if v is not None])
    meeting.barrier.wait()
    tensor.copy_(table.sum(0) if op == ReduceOp.SUM else table.amax(0))


_FAKE = SimpleNamespace(ReduceOp=ReduceOp, get_rank=lambda group: group[1], get_world_size=lambda group: group[0].barrier.parties)
