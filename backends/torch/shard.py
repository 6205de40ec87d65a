"""One rank's part of a model: the torch side of the runtime's `Shard`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from rldsl.backends.torch.generate.decode_state import Desk
from rldsl.backends.torch.generate.generate import generate
from rldsl.backends.torch.model import load_weights as checkpoint
from rldsl.backends.torch.model.invariant import Invariant
from rldsl.backends.torch.model.lora import begin
from rldsl.backends.torch.model.offload import Host
from rldsl.backends.torch.model.outputs import outputs as model_outputs
from rldsl.backends.torch.model.packed_batch import batch
from rldsl.backends.torch.model.stage import Stage
from rldsl.backends.torch.train.optimizer import Trainer
from rldsl.backends.torch.train.pipeline import forward, forward_backward

from rldsl.plan.events import CopyPart, Sampling
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, GenerationOutput, LossFn, MicroBatch, PackedBatch, Shard, WeightCache
from rldsl.sharding.dtypes import storage_dtype

ONE_TOKEN = PackedBatch(torch.tensor([0]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0]))


class TorchShard:
    """stages, trainers: what a backend with modules of its own puts in their places."""

    stages: type[Any] = Stage
    trainers: type[Trainer] = Trainer

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, load: bool,
                 trainable: bool, weight_cache: WeightCache | None = None):
        self.model, self.axes, self.device = model, axes, device
        self.half = model.dtype == "bfloat16"
        said, kept = (torch.bfloat16 if name == "bfloat16" else torch.float32
                      for name in (model.dtype, storage_dtype(model, layout.id)))
        self.stage = self.stages(model, layout, mesh, axes, device, kept, said, weight_cache)
        checkpoint.load(model, self.stage.unread_base, self.stage.base)
        if load and model.lora is not None:
            begin(model, self.stage.held, self.stage.parameters)
        elif load:
            checkpoint.load(model, self.stage.unread, self.stage.parameters)
        self.host = Host(device)
        self.desks: dict[Hashable, Desk] = {}
        self.trainer = self.trainers(self.stage, model, layout, mesh, axes) if trainable else None

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return {name: p.data for name, p in self.stage.parameters.items()}

    def generate(self, prompts: PackedBatch, sampling: Sampling, *, seed: int, step: int,
                 max_num_seqs: int, max_prompt_len: int = 0) -> GenerationOutput:
        with self._numbers():
            return generate(self.stage, self.axes, prompts, sampling, tokenizer_dir=self.model.path, seed=seed,
                            step=step, limit=max_num_seqs, most=max_prompt_len,
                            desks=self.desks if self._lasting() else None)

    @torch.no_grad()
    def infer(self, batches: Sequence[PackedBatch], output: str, temperature: float) -> torch.Tensor:
        together = self.axes.ep.size > 1  # the ranks that share experts make the same passes
        batches = [b for b in batches if together or len(b)]
        packed = [batch((b if len(b) else ONE_TOKEN,), self.device, self.axes.cp, self.stage.tokens) for b in batches]
        found: list[torch.Tensor] = []
        with self._numbers(), self.stage.tokens.divided():
            forward(self.stage, self.axes.pp, packed, lambda i, hidden: found.extend(
                [model_outputs(self.stage, hidden, packed[i], (output,), temperature)[output][0]] if len(batches[i]) else []))
        size = sum(b.sequences[0] if output == "scores" else b.responses[0] for b, own in zip(packed, batches) if len(own))
        result = torch.cat(found) if found else torch.empty(size, device=self.device)
        if self.axes.pp.size > 1:
            dist.broadcast(result, src=self.axes.pp.ranks[-1], group=self.axes.pp.group)
        return result

    def train(self, minibatch: Sequence[MicroBatch], outputs: Sequence[Sequence[str]], temperature: float,
              loss_fn: LossFn, should_stop: Callable[[], bool] | None = None, recompute: str = "none"
              ) -> Mapping[str, float] | None:
        trainer = self._trained()
        sharded = self.stage.sharded
        there = [any(len(frame) for frame in frames) for frames in minibatch]
        passes = [i for i, some in enumerate(there) if some or sharded or self.axes.ep.size > 1]
        packed = [batch(minibatch[i] if there[i] else (ONE_TOKEN,), self.device, self.axes.cp, self.stage.tokens)
                  for i in passes]
        wanted = {name for names in outputs for name in names}

        def loss_share(i: int, hidden: torch.Tensor) -> torch.Tensor:
            if not there[passes[i]]:  # the other shards of dp make a pass, so this one does
                return hidden.float().sum() * 0
            fresh = model_outputs(self.stage, hidden, packed[i], wanted, temperature)
            return loss_fn(passes[i], [{name: fresh[name][frame] for name in names}
                                       for frame, names in enumerate(outputs)])

        trainer.clear()
        with self._numbers(), self.stage.tokens.divided(), self.stage.recomputing(recompute == "full"):
            if sharded:
                sharded.begin()
            forward_backward(self.stage, self.axes.pp, packed, loss_share)
        if should_stop is not None and should_stop():
            if sharded:
                sharded.end(use=False)
            return None
        return trainer.step()

    def skip_updates(self, updates: int) -> float:
        return self._trained().skip_updates(updates)

    def optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return self._trained().optimizer_state(list(self.stage.parameters))

    def schedule_state(self) -> Mapping[str, int]:
        return self._trained().schedule_state()

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        self._trained().load_schedule_state(counts)

    def export(self) -> Mapping[str, Any]:
        return {"config": self.stage.config, "tokenizer": self.model.path}

    def offload(self, part: CopyPart) -> None:
        if part == "optimizer":
            self._trained().away(self.host)
        else:
            self._place(self.host.away(self._resident()))

    def onload(self, part: CopyPart) -> Callable[[], None]:
        if part == "optimizer":
            return self._trained().back(self.host)
        tensors, finish = self.host.back(self._resident())
        self._place(tensors)
        return finish

    def _resident(self) -> dict[str, torch.Tensor]:
        return {name: p.data for name, p in (*self.stage.parameters.items(), *self.stage.base.items())}

    def _lasting(self) -> bool:
        """Whether what decoding records holds for the next call too: modules multiply with the parameters themselves,
        and not with halves of them; a graph of CUDA would keep its memory."""
        cast = self.half and any(p.dtype == torch.float32 for p in self.stage.parameters.values())
        return self.device.type == "cpu" and not cast and isinstance(self.stage, Stage)

    def _place(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.desks.clear()
        for name, parameter in (*self.stage.parameters.items(), *self.stage.base.items()):
            parameter.data = tensors[name]

    def alias(self, other: Shard) -> None:
        self.desks.clear()
        theirs = other.state_dict()
        for name, parameter in self.stage.parameters.items():
            parameter.data = theirs[name]

    def free(self) -> None:
        self.desks.clear()
        for parameter in self.stage.parameters.values():
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)  # one element, and the shape

    def allocate(self) -> None:
        for parameter in self.stage.parameters.values():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _trained(self) -> Trainer:
        assert self.trainer is not None, f"{self.model.name} is not trained under this layout"
        return self.trainer

    @contextmanager
    def _numbers(self) -> Iterator[None]:
        """In which dtype, and in which order, things are computed inside."""
        with self._autocast(), Invariant() if self.model.invariant else nullcontext():
            yield

    def _autocast(self) -> torch.autocast:
        # a copy that is kept over the passes of a minibatch would hand on its gradient after those of its layer were summed
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.half,
                              cache_enabled=self.stage.sharded is None)
