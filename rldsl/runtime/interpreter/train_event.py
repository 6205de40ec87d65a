"""The train event: minibatches, their exact metrics, and stopping early.

In: rows, values and the loss program of a train call. Out: a changed model, and the metrics of the call.
Invariant: every rank makes the same optimizer steps, and stops at the same one.
Errors: RL0733 a gradient that is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import torch
import torch.distributed as dist

from rldsl.plan.events import Train
from rldsl.plan.heads import SKIPPED, STOP, UPDATES
from rldsl.runtime.interpreter.expression_programs import LossRun, View, loss_counts
from rldsl.runtime.interpreter.nonfinite import refuse_minibatch
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import Column
from rldsl.sharding.partition import Rows, micro_batches, num_micro_batches


def train(models: ModelStore, step: StepState, event: Train) -> None:
    """minibatches * epochs optimizer steps; metrics are exact over each minibatch and averaged over them. A selection
    may leave fewer rows than minibatches: an empty one makes no step. A metric that no minibatch has is not written:
    without any step there is no "grad_norm", and "lr" is that of the last step that was planned.

    A loss that can stop is asked after the backward passes of each minibatch, over all its rows; when it says yes, that
    minibatch makes no step and no later one runs. Its own metrics count, its "grad_norm" and "lr" do not exist.

    The norm of a gradient is known on every rank before anything is updated. Where it is not finite, the run ends with
    the minibatch on disk, or this minibatch makes no step, counts in "skipped" and in no other metric."""
    context = models.context
    spread, layout = context.spreads[event.spread], context.world.layouts[event.layout]
    shard, axes = models.writable(event.model, event.layout), context.world.axes(layout)
    outputs = dict(context.programs[event.loss].outputs)
    own = axes.tp.index == axes.cp.index == 0 and axes.pp.index == axes.pp.size - 1
    call = _TrainCall(step, event)
    runs: list[LossRun] = []
    metrics: list[dict[str, float]] = []
    updates: list[Mapping[str, float]] = []

    def stop() -> bool:
        metrics.extend(minibatch_metrics(runs[-1:], own, axes.mesh.group, context.device))
        return bool(metrics[-1][STOP])

    stopped, skipped, rate = False, 0, 0.0
    for minibatch in chain.from_iterable(step.rows.schedule(spread)):
        if stopped or not any(minibatch):
            rate = shard.skip_updates(1)
            continue
        run, batches, loss = call.minibatch(minibatch, axes.dp.index, axes.pp.size, layout.zero > 0 or layout.ep > 1)
        runs.append(run)
        update = shard.train(batches, call.what, call.temperature, loss, stop if STOP in outputs else None,
                             event.recompute)
        if update is None:
            stopped = True
            rate = shard.skip_updates(1)
        elif math.isfinite(update["grad_norm"]):
            updates.append(update)
        elif event.nonfinite == "stop":
            refuse_minibatch(context, step.number, event, call.rows(minibatch[axes.dp.index]) if own else {},
                   update["grad_norm"], axes.mesh.group)
        else:
            skipped += 1
            rate = shard.skip_updates(1)
            runs.pop()
            del metrics[len(runs):]
    if runs and STOP not in outputs:
        metrics = minibatch_metrics(runs, own, axes.mesh.group, context.device)
    found = {"lr": updates[-1]["lr"] if updates else rate, SKIPPED: float(skipped), UPDATES: float(len(updates))}
    found |= {"grad_norm": _mean([u["grad_norm"] for u in updates])} if updates else {}
    found |= {name: _mean([m[name] for m in metrics]) for name in outputs} if metrics else {}
    for name, value in event.outputs:
        if name in found:
            step.write_number(value, spread.id, found[name])
        else:
            step.buffers.put(f"{value}@{spread.id}", Column.none(torch.float64, context.device))


class _TrainCall:
    """What the minibatches of one train call have in common."""

    def __init__(self, step: StepState, event: Train):
        self.step, self.event, self.program = step, event, step.context.programs[event.loss]
        self.frames = {f: step.context.frames[f] for f in event.frames}
        self.temperature = self.frames[event.frames[0]].temperature
        self.what = [[kind for _, frame, kind in event.fresh if frame == f] for f in event.frames]
        lens = {f: step.rows.lens[f] for f in event.frames}
        self.lens, self.responses = lens, {f: x.response.tolist() for f, x in lens.items()}
        self.totals = [sum(x) for x in zip(*(x.of("tokens").tolist() for x in lens.values()))]
        self.tokens = {f: step.read(event.reads, f"{f}.tokens") for f in event.frames}
        self.data = {name: step.read(event.reads, value) for name, value in event.data}

    def rows(self, rows: Rows) -> dict[str, torch.Tensor]:
        """What the loss sees of some rows, by name, to be studied on disk."""
        found: dict[str, torch.Tensor] = {}
        part = torch.tensor(rows, dtype=torch.int64, device=self.step.context.device)
        for frame in self.event.frames:
            packed = self.step.packed(frame, self.tokens[frame], part)
            found |= {f"{frame}.rows": packed.rows, f"{frame}.prompt_lens": packed.prompt_lens,
                      f"{frame}.response_lens": packed.response_lens, f"{frame}.tokens": packed.tokens}
        per_prompt = self.frames[self.event.frames[0]].per_prompt
        for name, value in self.event.data:
            found[f"data.{name}"] = _data(self.step.context, value, self.data[name], part, per_prompt).reshape(-1)
        return found if rows else {}

    def minibatch(self, rows: Sequence[Rows], shard: int, pp: int, even: bool):
        """rows: of each dp shard. The run that finds loss and metrics, this shard's micro-batches, and their loss.
        even: with empty ones at the end, so that all shards have as many."""
        step, event, frames = self.step, self.event, self.frames
        run = LossRun(self.program, loss_counts(self.program, frames, sorted(r for s in rows for r in s),
                                                self.responses))
        bounds = event.mbs, pp, event.mbt
        divided = micro_batches(rows[shard], self.totals, *bounds)
        if even:
            divided += ((),) * (max(num_micro_batches(r, self.totals, *bounds) for r in rows) - len(divided))
        parts = [torch.tensor(p, dtype=torch.int64, device=step.context.device) for p in divided]
        batches = [tuple(step.packed(f, self.tokens[f], part) for f in event.frames) for part in parts]

        def loss(i: int, fresh: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
            views = {f: View(parts[i], parts[i] // frames[f].per_prompt, self.lens[f].response[parts[i]],
                             sum(self.responses[f][r] for r in divided[i])) for f in event.frames}
            inputs = {name: fresh[event.frames.index(f)][kind] for name, f, kind in event.fresh}
            inputs |= {name: _data(step.context, value, self.data[name], parts[i], frames[event.frames[0]].per_prompt)
                       for name, value in event.data}
            return run(inputs, views)

        return run, batches, loss


def _mean(found: Sequence[float]) -> float:
    return sum(found) / len(found)


def _data(context: RunContext, value: str, column: Column, rows: torch.Tensor, per_prompt: int) -> torch.Tensor:
    """The entries of some rows. per_prompt: rows of a prompt in the frame that is trained on; the value may be of its
    prompts."""
    record = context.values[value]
    if record.extent == "batch":
        return column.data[0]
    if record.extent == "prompt":
        rows = (rows // per_prompt).unique()
    return column.pick(rows).data


def minibatch_metrics(runs: Sequence[LossRun], own: bool, group: object,
                      device: torch.device) -> list[dict[str, float]]:
    """The metrics of every minibatch, from one all-reduce of sums and one of maxima over the mesh. own: whether this
    rank's partials count (its rows are on other ranks too)."""
    table = torch.stack([run.partials(device) for run in runs])
    sums = runs[0].sums
    if not own:
        table[:, :sums] = 0
        table[:, sums:] = -torch.inf
    added, largest = table[:, :sums].contiguous(), table[:, sums:].contiguous()
    if group is not None:
        dist.all_reduce(added, group=group)
        if largest.numel():
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    return [run.finish(row) for run, row in zip(runs, torch.cat([added, largest], 1))]
