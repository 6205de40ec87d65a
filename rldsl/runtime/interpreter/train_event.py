"""The train event: minibatches, their exact metrics, and stopping early.

In: rows, values and the loss program of a train call. Out: a changed model, and the metrics of the call.
Invariant: every rank makes the same optimizer steps, and stops at the same one.
Errors: RL0733 a gradient that is not finite, RL0735 an invalid learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist

from rldsl.diag import fail
from rldsl.plan.events import Train
from rldsl.plan.heads import LOGPROBS_AT, SKIPPED, STOP, UPDATES
from rldsl.runtime.backend import Axes, Axis, FirstPass, LossFn, OverVocabulary, PackedBatch, Shard
from rldsl.runtime.collectives import all_reduce
from rldsl.runtime.host_numbers import on_device
from rldsl.runtime.interpreter.minibatch_loss import Counts, MinibatchLoss, loss_counts
from rldsl.runtime.interpreter.nonfinite import refuse_minibatch
from rldsl.runtime.interpreter.ragged_index import FrameRows, RaggedIndex
from rldsl.runtime.interpreter.vocabulary import split
from rldsl.runtime.interpreter.whole_minibatch import WholeMinibatchLoss
from rldsl.runtime.state.context import RunContext
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows
from rldsl.sharding.gradient_leaves import leaves_together, pass_tokens, passes_of_rank
from rldsl.sharding.micro_batches import micro_batches, num_micro_batches
from rldsl.sharding.partition import Rows

AnyLoss = MinibatchLoss | WholeMinibatchLoss


def train(models: ModelStore, step: StepState, event: Train) -> None:
    """minibatches * epochs optimizer steps; metrics are exact over each minibatch and averaged over minibatches. A
    selection may leave fewer rows than minibatches: an empty minibatch makes no step. A metric that no minibatch has is
    not written: without any step there is no "grad_norm", and "lr" is that of the last step that was planned.

    A loss with an output "stop" is evaluated after the backward passes of each minibatch, over all its rows; if it is
    true, that minibatch makes no step and no later one runs. Its own metrics count, but it has no "grad_norm" and no
    "lr".

    Every rank knows the norm of a gradient before anything is updated. If it is not finite, either the run ends and the
    minibatch is on disk, or this minibatch makes no step and counts in "skipped" and in no other metric."""
    context = models.context
    spread, layout = context.spreads[event.spread], context.world.layouts[event.layout]
    shard, axes = models.shard_to_write(event.model, event.layout), context.world.axes(layout)
    program_outputs = dict(context.programs[event.loss].outputs)
    call = _TrainCall(step, event)
    heads = [models.shard_to_read(*copy) for copy in event.head_copies]
    given_rate = _learning_rate(step, event)
    results = _Results(shard, axes, context.device, given_rate)
    for minibatch in chain.from_iterable(step.rows.minibatch_parts(spread)):
        if results.stopped or not any(minibatch):
            results.skip_update()
            continue
        by_leaf = call.micro_batches_by_leaf(minibatch, axes.dp, axes.pp.size,
                                             pad_count=layout.zero > 0 or layout.ep > 1)
        minibatch_loss, batches, loss, first_pass = call.minibatch(minibatch, list(chain.from_iterable(by_leaf)),
                                                                   axes.dp)
        results.losses.append(minibatch_loss)
        leaves = [len(leaf) for leaf in by_leaf] if spread.leaves else ()
        joined = call.leaves_together(minibatch, axes.dp) if spread.leaves else 1
        # passed only where they are needed: a backend may lack these arguments
        optional: dict[str, Any] = {name: x for name, x in (("heads", heads), ("leaves", leaves),
                                                           ("joined", joined if joined > 1 else 0),
                                                           ("first_pass", first_pass),
                                                           ("router_bias_update_rate", event.router_bias_update_rate))
                                    if x}
        result = shard.train(batches, call.model_outputs_by_frame, call.temperature, loss,
                             results.record_metrics_and_ask_to_stop if STOP in program_outputs else None,
                             event.recompute, given_rate, **optional)
        if result is None:
            results.stop()
        elif math.isfinite(result["grad_norm"]):
            results.updates.append(result)
        elif event.nonfinite == "stop":
            tensors = call.dump_tensors(call.rows_of(minibatch, axes.dp)) if results.reports else {}
            refuse_minibatch(context, step.number, tensors, result["grad_norm"], axes.mesh.group,
                             model=event.model, loss=event.loss.rpartition("/")[2], at=event.at)
        else:
            results.drop_minibatch()
    numbers = results.numbers(program_outputs)
    for name, value in event.outputs:
        if name in numbers:
            step.write_number(value, spread.id, numbers[name])
        else:
            step.buffers.put(f"{value}@{spread.id}", RaggedRows.empty(torch.float64, context.device))


class _Results:
    """What the minibatches of a train call have given so far."""

    def __init__(self, shard: Shard, axes: Axes, device: torch.device, given_rate: float | None):
        """given_rate: the learning rate that the program computes; None where the optimizer's schedule says it."""
        self.shard, self.group, self.device, self.given_rate = shard, axes.mesh.group, device, given_rate
        # the tp * cp * pp ranks with the same rows compute the same loss: one of them reports it
        self.reports = axes.tp.index == axes.cp.index == 0 and axes.pp.index == axes.pp.size - 1
        self.losses: list[AnyLoss] = []
        self.metrics: list[dict[str, float]] = []  # of minibatches whose metrics are recorded
        self.updates: list[Mapping[str, float]] = []  # results of the optimizer steps that were made
        self.num_dropped = 0  # minibatches whose gradient is not finite
        self.rate = 0.0  # of the last update that was planned and not made
        self.stopped = False

    def record_metrics_and_ask_to_stop(self) -> bool:
        """Record the metrics of the last minibatch. Returns whether the call ends with it."""
        self.metrics.extend(minibatch_metrics(self.losses[-1:], self.reports, self.group, self.device))
        return bool(self.metrics[-1][STOP])

    def skip_update(self) -> None:
        """Count a minibatch that makes no optimizer step, and note the learning rate that it would have had."""
        scheduled = self.shard.skip_updates(1)
        self.rate = scheduled if self.given_rate is None else self.given_rate

    def stop(self) -> None:
        """The last minibatch makes no step, and no later one runs."""
        self.stopped = True
        self.skip_update()

    def drop_minibatch(self) -> None:
        """The last minibatch makes no step, and is in no metric but the number of those that were dropped."""
        self.num_dropped += 1
        self.skip_update()
        self.losses.pop()
        del self.metrics[len(self.losses):]  # where metrics are recorded with each minibatch, its own are there already

    def numbers(self, program_outputs: Mapping[str, object]) -> dict[str, float]:
        """The outputs of the event, by name, averaged over minibatches. program_outputs: those of the loss."""
        if self.losses and STOP not in program_outputs:
            self.metrics = minibatch_metrics(self.losses, self.reports, self.group, self.device)
        found = {"lr": self.updates[-1]["lr"] if self.updates else self.rate, SKIPPED: float(self.num_dropped),
                 UPDATES: float(len(self.updates))}
        if self.updates:
            found["grad_norm"] = _mean([r["grad_norm"] for r in self.updates])
        if self.metrics:
            found |= {name: _mean([m[name] for m in self.metrics]) for name in program_outputs}
        return found


def _learning_rate(step: StepState, event: Train) -> float | None:
    """The learning rate that the program computes for this call, which every rank of it has; None where the schedule of
    the optimizer says it."""
    if not event.rate:
        return None
    rate = float(step.read(event.reads, event.rate).data)
    if not 0 <= rate < math.inf:
        raise fail("RL0735", f"the learning rate of `{event.model}` is {rate:g}", place=event.at,
                   notes=(f"in step {step.number}",),
                   help="a learning rate must be a finite number of at least 0: bound what `lr=` computes, for example "
                        "with `max(0, ...)`")
    return rate


class _TrainCall:
    """What the minibatches of one train call share: the rows' lengths and tokens, and the loss's data inputs."""

    def __init__(self, step: StepState, event: Train):
        self.step, self.event, self.program = step, event, step.context.programs[event.loss]
        self.in_leaves = step.context.spreads[event.spread].leaves > 0
        self.over_vocabulary = split(self.program, {x: of.frame for x, of in step.context.entries.items()
                                                    if not of.width})
        if self.over_vocabulary is not None:
            self.program = self.over_vocabulary.rest
        self.frames = {f: step.context.frames[f] for f in event.frames}
        self.temperature = self.frames[event.frames[0]].temperature
        # the model outputs that the loss reads, for each of `event.frames`
        self.model_outputs_by_frame = [
            [output for _, frame, output in event.model_outputs if frame == f] for f in event.frames]
        lens = {f: step.rows.lens[f] for f in event.frames}
        self.lens, self.responses = lens, {f: x.to_list("response") for f, x in lens.items()}
        self.totals = [sum(x) for x in zip(*(x.to_list("tokens") for x in lens.values()), strict=True)]
        self.siblings = step.siblings(event.frames, event.model, step.context.world.layouts[event.layout])
        self.tokens = {f: step.read(event.reads, f"{f}.tokens") for f in event.frames}
        self.data = {name: step.read(event.reads, value) for name, value in event.data_inputs}
        self.head_of = dict(event.heads)
        # the data inputs that are whole distributions, in the order of `event.heads`
        self.teachers = [name for value in self.head_of for name, v in event.data_inputs if v == value]

    def dump_tensors(self, rows: Rows) -> dict[str, torch.Tensor]:
        """What the loss sees of some rows, by name, for a dump (`nonfinite.py` says what the names are)."""
        tensors: dict[str, torch.Tensor] = {}
        part = torch.tensor(rows, dtype=torch.int64, device=self.step.context.device)
        for frame in self.event.frames:
            packed = self.step.packed(frame, self.tokens[frame], part)
            tensors |= {f"{frame}.rows": packed.rows, f"{frame}.prompt_lens": packed.prompt_lens,
                        f"{frame}.response_lens": packed.response_lens, f"{frame}.tokens": packed.tokens}
        per_prompt = self.frames[self.event.frames[0]].per_prompt
        for name, value in self.event.data_inputs:
            tensors[f"data.{name}"] = _data(self.step.context, value, self.data[name], part, per_prompt).reshape(-1)
        return tensors if rows else {}

    def rows_of(self, parts: Sequence[Rows], dp: Axis) -> Rows:
        """A dp rank's rows of a minibatch. parts: as of `StepRows.minibatch_parts`."""
        each = len(parts) // dp.size
        return tuple(r for part in parts[dp.index * each : (dp.index + 1) * each] for r in part)

    def micro_batches_by_leaf(self, parts: Sequence[Rows], dp: Axis, pp: int, pad_count: bool
                              ) -> list[tuple[Rows, ...]]:
        """[leaf] -> the micro-batches of a dp rank; one leaf for all without `invariant=training`. pad_count: add empty
        ones, so that all dp ranks have as many."""
        if self.in_leaves:
            return passes_of_rank(parts, dp.size, dp.index, self.totals, pass_tokens(self.frames.values()), pad_count)
        bounds = self.event.mbs, pp, self.event.mbt
        divided = micro_batches(parts[dp.index], self.totals, *bounds, self.siblings)
        if pad_count:
            divided += ((),) * (max(num_micro_batches(r, self.totals, *bounds) for r in parts) - len(divided))
        return [divided]

    def leaves_together(self, leaves: Sequence[Rows], dp: Axis) -> int:
        """How many leaves of a dp rank are computed together. leaves: of the whole minibatch."""
        return leaves_together(leaves, dp.size, self.totals, pass_tokens(self.frames.values()), self.event.mbt)

    def minibatch(self, rows: Sequence[Rows], divided: Sequence[Rows], dp: Axis
                  ) -> tuple[AnyLoss, list[tuple[PackedBatch, ...]], LossFn, FirstPass | None]:
        """The loss and metrics of a minibatch, the micro-batches of this dp rank, the loss of one of them, and
        the first pass, if the loss needs all outputs of the minibatch at once.

        rows: of the whole minibatch, in any parts. divided: of each micro-batch."""
        step, event, frames = self.step, self.event, self.frames
        counts = loss_counts(self.program, frames, sorted(r for part in rows for r in part), self.responses,
                             step.context.entries)
        whole = self._whole(counts) if event.first_pass else None
        minibatch_loss = whole or MinibatchLoss(self.program, counts)
        parts = [on_device(p, step.context.device) for p in divided]
        batches = [tuple(self._packed(f, *part) for f in event.frames) for part in zip(parts, divided, strict=True)]
        # selected before the first pass, since the host waits for the device to learn how many elements there are
        selected = [{name: _data(step.context, value, self.data[name], part, frames[event.frames[0]].per_prompt)
                     for name, value in event.data_inputs if value not in self.head_of} for part in parts]

        def read(i: int, model_outputs: Sequence[Mapping[str, torch.Tensor]]
                 ) -> tuple[dict[str, torch.Tensor], dict[str, FrameRows]]:
            frame_rows = {f: FrameRows(parts[i], parts[i] // frames[f].per_prompt, self.lens[f].response[parts[i]],
                             sum(self.responses[f][r] for r in divided[i])) for f in event.frames}
            inputs = {name: model_outputs[event.frames.index(f)][output] for name, f, output in event.model_outputs}
            inputs |= selected[i]
            if self.over_vocabulary is not None:
                inputs |= self.over_vocabulary.inputs(
                    cast(OverVocabulary, inputs.pop(LOGPROBS_AT)), LOGPROBS_AT, self.teachers, inputs,
                    RaggedIndex(frame_rows, frames, step.context.entries))
            return inputs, frame_rows

        first_pass = None if whole is None else FirstPass(
            lambda i, outputs: whole.add_outputs(*read(i, outputs)),
            lambda: whole.evaluate(dp.group, step.context.device))
        return minibatch_loss, batches, lambda i, outputs: minibatch_loss(*read(i, outputs)), first_pass

    def _whole(self, counts: Counts) -> WholeMinibatchLoss:
        """The loss of a minibatch that needs all of it at once."""
        values, data = self.step.context.values, {n: v for n, v in self.event.data_inputs if v not in self.head_of}
        given = {n for n in data if n in self.program.inputs()}
        outputs = set(self.program.inputs()) - given  # of the model, or made of them over the vocabulary
        return WholeMinibatchLoss(
            self.program, counts, outputs, {n for n in given if values[data[n]].dtype == "bool"},
            {n: self.data[n].data[0] for n in given if values[data[n]].extent == "batch"})

    def _packed(self, frame: str, rows: torch.Tensor, numbers: Rows) -> PackedBatch:
        packed = self.step.packed(frame, self.tokens[frame], rows, numbers)
        ids = self.event.ids
        if self.head_of:
            values = self.step.context.values
            return replace(packed, hidden=tuple(
                self.step.read(self.event.reads, v).select(rows).data.view(-1, values[v].width) for v in self.head_of))
        return replace(packed, ids=self.step.ids_of_tokens(self.event.reads, ids, rows)) if ids else packed


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _data(context: RunContext, value: str, column: RaggedRows, rows: torch.Tensor, per_prompt: int) -> torch.Tensor:
    """The entries of some rows. per_prompt: rows of a prompt in the frame that is trained on, for values with one
    entry per prompt."""
    record = context.values[value]
    if record.extent == "batch":
        return column.data[0]
    if record.extent == "prompt":
        rows = (rows // per_prompt).unique()
    return column.select(rows).data


def minibatch_metrics(losses: Sequence[AnyLoss], counts: bool, group: object,
                      device: torch.device) -> list[dict[str, float]]:
    """The metrics of every minibatch, from one all-reduce of sums and one of maxima over the mesh.

    counts: whether this rank contributes; exactly one of the ranks with the same rows must."""
    parts = [loss.partials(device).tensor_split([loss.num_summed]) for loss in losses]
    sums, maxima = (torch.cat(each) for each in zip(*parts, strict=True))
    if not counts:
        sums.zero_()
        maxima.fill_(-torch.inf)
    if group is not None:
        if sums.numel():
            all_reduce(sums, group=group)
        if maxima.numel():
            all_reduce(maxima, dist.ReduceOp.MAX, group)
    each = zip(losses, sums.split([len(s) for s, _ in parts]), maxima.split([len(m) for _, m in parts]), strict=True)
    return [loss.finish(torch.cat(both)) for loss, *both in each]
