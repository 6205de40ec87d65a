"""A minibatch of a train call, on one rank: the passes that it makes, and what its loss reads of each.

In: micro-batches, and how many of them each leaf has (`passes.py`). Out: packed inputs; of the last hidden states of a
pass, what a loss reads, and this rank's share of the loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from typing import Any

import torch

from rldsl.backends.torch.model.model_inputs import DUMMY_BATCH, ModelInputs, in_one_row, pack_inputs
from rldsl.backends.torch.model.outputs import model_outputs
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel
from rldsl.backends.torch.model.stage import Stage
from rldsl.backends.torch.train.passes import TrainPass, passes_by_sum
from rldsl.runtime.backend import Axes, FirstPass, LossFn, MicroBatch


@dataclass(frozen=True, slots=True)
class MinibatchPasses:
    """The forward and backward passes of a minibatch, in order."""

    by_sum: list[list[TrainPass]]  # those whose gradients are added before they join the tree
    passes: list[TrainPass]  # all of them
    inputs: list[ModelInputs]  # of each

    def sums(self) -> Iterator[tuple[list[TrainPass], int]]:
        """The passes of each sum, with the number of the first."""
        return zip(self.by_sum, accumulate(map(len, self.by_sum[:-1]), initial=0), strict=True)


def pack_minibatch(stage: Stage, axes: Axes, device: torch.device, minibatch: Sequence[MicroBatch],
                   leaves: Sequence[int], joined: int, sequence_parallel: SequenceParallel, loads: bool
                   ) -> MinibatchPasses:
    """leaves: micro-batches of each leaf; (): there are none. joined: leaves of a pass. loads: routers count the tokens
    of each expert."""
    has_rows = [any(len(frame) for frame in frames) for frames in minibatch]
    # other ranks wait for the passes of this one under `zero` and `ep`: one without rows runs a token
    run_empty = stage.zero is not None or axes.ep.size > 1
    by_sum = passes_by_sum(leaves or (len(minibatch),), max(joined, 1), has_rows, run_empty)
    passes = [p for together in by_sum for p in together]

    def pack(i: int) -> ModelInputs:
        packed = pack_inputs(minibatch[i] if has_rows[i] else (DUMMY_BATCH,), device, axes.cp, sequence_parallel,
                             stage.ordered_gradients, stage.vision, stage.shares_prompts, loads)
        if packed.copies is not None and not has_rows[i]:
            packed.copies.zero_()
        return packed

    return MinibatchPasses(by_sum, passes, [in_one_row([None if i is None else pack(i) for i in p.members])
                                            for p in passes])


@dataclass(frozen=True, slots=True)
class OutputReader:
    """Reads what the loss of a minibatch needs of the last hidden states of each pass."""

    stage: Stage  # the last one of the pipeline
    minibatch: MinibatchPasses  # the passes
    outputs: Sequence[Sequence[str]]  # of each frame, the names of the model's outputs
    temperature: float  # of log-probs
    others: Sequence[Stage]  # whose output embeddings the loss reads, too

    def read(self, number: int, hidden: torch.Tensor) -> Iterator[tuple[int, list[dict[str, Any]]]]:
        """Of each micro-batch of a pass that has rows: its number, and what the loss reads of each frame."""
        wanted = {name for names in self.outputs for name in names}
        computed = model_outputs(self.stage, hidden, self.minibatch.inputs[number], wanted, self.temperature,
                                 self.others)
        for place, i in enumerate(self.minibatch.passes[number].with_rows):
            yield i, [{name: computed[name][place * len(self.outputs) + frame] for name in names}
                      for frame, names in enumerate(self.outputs)]

    def loss_share(self, loss_fn: LossFn, first: int, number: int, hidden: torch.Tensor) -> torch.Tensor:
        """The loss of a pass. first: the number of the first pass under way, from which `number` counts."""
        if not self.minibatch.passes[first + number].with_rows:
            return hidden.float().sum() * 0
        return reduce(torch.add, (loss_fn(i, found) for i, found in self.read(first + number, hidden)))

    def see(self, first_pass: FirstPass, number: int, hidden: torch.Tensor) -> None:
        """What comes before, of a pass that has rows."""
        if self.minibatch.passes[number].with_rows:
            for i, found in self.read(number, hidden):
                first_pass.see(i, found)
