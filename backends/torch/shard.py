"""One rank's part of a model: the torch side of the runtime's `Shard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from rldsl.backends.torch.generate.captured_step import CaptureSwitch
from rldsl.backends.torch.generate.conversations import converse
from rldsl.backends.torch.generate.decode_state import DecodeState
from rldsl.backends.torch.generate.generate import generate
from rldsl.backends.torch.kernels.kept_memory import keep_few_compiled_products, keep_freed_memory
from rldsl.backends.torch.model.invariant_probe import check_kernels
from rldsl.backends.torch.model.load_weights import WeightReads, load
from rldsl.backends.torch.model.lora import init_lora
from rldsl.backends.torch.model.model_inputs import DUMMY_BATCH, ModelInputs, pack_inputs
from rldsl.backends.torch.model.outputs import model_outputs, top_tokens
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel
from rldsl.backends.torch.model.stage import Stage
from rldsl.backends.torch.train.minibatch import OutputReader, pack_minibatch
from rldsl.backends.torch.train.optimizer import ShardOptimizer
from rldsl.backends.torch.train.pipeline import pipeline_first_pass, pipeline_forward, pipeline_forward_backward
from rldsl.backends.torch.train.router_bias import RouterLoads
from rldsl.diag import fail
from rldsl.plan.events import CopyPart, Sampling
from rldsl.plan.expr import Level
from rldsl.plan.heads import DISTRIBUTION, OUTPUTS
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.backend import (
    Axes,
    ConversationOutput,
    FirstPass,
    GenerationOutput,
    Images,
    LossFn,
    MicroBatch,
    PackedBatch,
    Prefix,
    Shard,
    Talk,
    WeightCache,
    WeightDigest,
)
from rldsl.runtime.host_memory import HostMemory
from rldsl.sharding.dtypes import storage_dtype


class OutputShape(NamedTuple):
    """Of what is read of hidden states, on ranks that have none."""

    level: Level  # of the rows: tokens and entries, or sequences
    dtype: torch.dtype  # of a number
    width: int = 0  # numbers of a row, as a second dimension; 0: none

    def of(self, inputs: Sequence[ModelInputs]) -> tuple[int, ...]:
        if self.level == "entry":
            return (sum(x.responses[0] * x.ids.shape[1] for x in inputs if x.ids is not None),)
        rows = sum(x.sequences[0] if self.level == "seq" else x.responses[0] for x in inputs)
        return (rows, self.width) if self.width else (rows,)


class TorchShard:
    """See `rldsl.runtime.backend.Shard`, whose methods these are."""

    # a backend with its own modules replaces both
    stage_class: type[Any] = Stage                        # modules and parameters
    trainer_class: type[ShardOptimizer] = ShardOptimizer  # gradients and optimizer

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, load_weights: bool,
                 trainable: bool, weight_cache: WeightCache | None = None, images: Images | None = None):
        self.model, self.axes, self.device = model, axes, device
        if device.type == "cpu":
            keep_freed_memory()
            keep_few_compiled_products()
        self.uses_bfloat16 = model.dtype == "bfloat16"
        matmul_dtype, param_dtype = (torch.bfloat16 if name == "bfloat16" else torch.float32
                                     for name in (model.dtype, storage_dtype(model, layout.id)))
        if model.invariant:
            check_kernels(model, device)
        self.stage = self.stage_class(model, layout, mesh, axes, device, param_dtype, matmul_dtype, weight_cache,
                                      *((images,) if images else ()))
        reads = WeightReads()
        load(model, self.stage.base_to_load, self.stage.base, reads)
        if load_weights and model.lora is not None:
            init_lora(model, self.stage.held, self.stage.parameters, reads)
        elif load_weights:
            load(model, self.stage.to_load, self.stage.parameters, reads)
        self._weight_digests = tuple(reads.digests())
        self.host_memory = HostMemory(device)
        self.decode_states: dict[Hashable, DecodeState] = {}
        self.capture = CaptureSwitch()
        self.router_loads: RouterLoads | None = None  # where a train call moves router biases
        self.trainer = self.trainer_class(self.stage, model, layout, mesh, axes) if trainable else None

    def weight_digests(self) -> Iterable[WeightDigest]:
        return self._weight_digests

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        return {name: p.data for name, p in self.stage.parameters.items()}

    def generate(self, prompts: PackedBatch, sampling: Sampling, *, seed: int, step: int, max_num_seqs: int,
                 max_prompt_len: int = 0, max_prompts: int = 0, continues: bool = False, keep_cache: bool = False,
                 prefix: Prefix | None = None) -> GenerationOutput:
        keeps = self._can_keep_captures()
        with self._numerics():
            if keeps:
                self.stage.weight_copies.fill()
            return generate(self.stage, self.axes, prompts, sampling, tokenizer_dir=self.model.path, seed=seed,
                            step=step, max_num_seqs=max_num_seqs, max_prompt_len=max_prompt_len,
                            max_prompts=max_prompts, continues=continues, capture=self.capture,
                            states=self.decode_states if keeps else None, keep_cache=keep_cache,
                            prefix=prefix)

    def converse(self, rows: torch.Tensor, sampling: Sampling, limits: Conversation, talk: Talk | None, *, seed: int,
                 step: int, max_num_seqs: int, waiting: Waiting = "keep") -> ConversationOutput:
        with self._numerics():
            return converse(self.stage, self.axes, rows, sampling, limits, talk,
                            tokenizer_dir=self.model.path, seed=seed, step=step, max_num_seqs=max_num_seqs,
                            waiting=waiting)

    def infer(self, batches: Sequence[PackedBatch], output: str, temperature: float) -> torch.Tensor:
        if output == DISTRIBUTION and self.stage.head_is_biased:
            raise fail("RL0725", "the output embedding of this family has a bias, which hidden states do not show",
                       place=self.model.path, help="use `logprobs`, `entropy` or `top`, or a family without one")

        def read(hidden: torch.Tensor, inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
            return model_outputs(self.stage, hidden, inputs, (output,), temperature)[output]

        shape = OutputShape("token", torch.float32, self.stage.hidden_size) if output == DISTRIBUTION else \
            OutputShape(OUTPUTS[output].level, torch.float32)
        (result,) = self._forward(batches, read, (shape,))
        return result.flatten()

    def top(self, batches: Sequence[PackedBatch], k: int, temperature: float, words: int = 0
            ) -> tuple[torch.Tensor, torch.Tensor]:
        def read(hidden: torch.Tensor, inputs: ModelInputs) -> tuple[torch.Tensor, ...]:
            return top_tokens(self.stage, hidden, inputs, k, temperature, words)

        ids, logprobs = self._forward(batches, read, (OutputShape("token", torch.int64, k),
                                                      OutputShape("token", torch.float32, k)))
        return ids, logprobs

    @torch.no_grad()
    def _forward(self, batches: Sequence[PackedBatch],
                 read: Callable[[torch.Tensor, ModelInputs], tuple[torch.Tensor, ...]],
                 shapes: tuple[OutputShape, ...]) -> tuple[torch.Tensor, ...]:
        """One forward pass of all micro-batches, and what `read` computes of the last hidden states of each, joined;
        the same on every rank of the shard."""
        passes_must_match = self.axes.ep.size > 1  # ranks that share experts make the same passes
        batches = [b for b in batches if passes_must_match or len(b)]
        inputs = [pack_inputs((b if len(b) else DUMMY_BATCH,), self.device, self.axes.cp, self.stage.sequence_parallel,
                              vision=self.stage.vision, share=self.stage.shares_prompts)
                  for b in batches]
        results: list[tuple[torch.Tensor, ...]] = []

        def finish(i: int, hidden: torch.Tensor) -> None:
            if len(batches[i]):
                results.append(read(hidden, inputs[i]))

        with self._numerics(), self.stage.sequence_parallel.region():
            pipeline_forward(self.stage, self.axes.pp, inputs, finish)
        present = [x for x, batch in zip(inputs, batches, strict=True) if len(batch)]
        joined = tuple(map(torch.cat, zip(*results, strict=True))) or tuple(
            torch.empty(s.of(present), dtype=s.dtype, device=self.device) for s in shapes)
        if self.axes.pp.size > 1:
            for result in joined:
                dist.broadcast(result, src=self.axes.pp.ranks[-1], group=self.axes.pp.group)
        return joined

    def train(self, minibatch: Sequence[MicroBatch], outputs: Sequence[Sequence[str]], temperature: float,
              loss_fn: LossFn, should_stop: Callable[[], bool] | None = None, recompute: str = "none",
              rate: float | None = None, heads: Sequence[Shard] = (), leaves: Sequence[int] = (), joined: int = 1,
              first_pass: FirstPass | None = None, router_bias_update_rate: float = 0.0
              ) -> Mapping[str, float] | None:
        trainer, zero = self._trainer(), self.stage.zero
        loads = self._cleared_loads() if router_bias_update_rate else None
        # where gradients have one order, norms see all tokens on every rank of tp
        sequence_parallel = SequenceParallel(self.axes.tp, False) if self.stage.ordered_gradients else \
            self.stage.sequence_parallel
        joined = joined if joined > 1 and self.stage.joins_leaves and not heads else 1
        passes = pack_minibatch(self.stage, self.axes, self.device, minibatch, leaves, joined, sequence_parallel,
                                loads is not None)
        read = OutputReader(self.stage, passes, outputs, temperature, [cast(TorchShard, head).stage for head in heads])
        trainer.zero_grad()
        if zero:
            zero.begin_minibatch()
        if first_pass is not None:
            # in a separate context: autocast keeps what it casts, without gradient here
            with torch.no_grad(), self._numerics(), sequence_parallel.region():
                pipeline_first_pass(self.stage, self.axes.pp, passes.inputs, partial(read.see, first_pass))
                if self.stage.last:
                    first_pass.end()
        with self._numerics(), sequence_parallel.region(), self.stage.recomputing(recompute == "full"):
            for together, first in passes.sums():
                if together or not leaves:
                    trainer.begin_leaf()
                    pipeline_forward_backward(self.stage, self.axes.pp, passes.inputs[first : first + len(together)],
                                              partial(read.loss_share, loss_fn, first), trainer.end_pass)
                if leaves:
                    trainer.end_leaf(any(p.with_rows for p in together), bool(together))
        if should_stop is not None and should_stop():
            if zero:
                zero.end_minibatch(use_grads=False)
            return None
        result = trainer.step(rate)
        if loads is not None and math.isfinite(result["grad_norm"]):
            loads.update(router_bias_update_rate)
        return result

    def skip_updates(self, updates: int) -> float:
        return self._trainer().skip_updates(updates)

    def optimizer_state(self) -> Mapping[str, Mapping[str, torch.Tensor]]:
        return self._trainer().optimizer_state()

    def schedule_state(self) -> Mapping[str, int]:
        return self._trainer().schedule_state()

    def load_schedule_state(self, counts: Mapping[str, int]) -> None:
        self._trainer().load_schedule_state(counts)

    def export(self) -> Mapping[str, Any]:
        return {"config": self.stage.config, "tokenizer": self.model.path}

    def offload(self, part: CopyPart) -> None:
        if part == "optimizer":
            self._trainer().offload(self.host_memory)
        else:
            self._set_memory(self.host_memory.offload(self._memory()))

    def onload(self, part: CopyPart) -> Callable[[], None]:
        if part == "optimizer":
            return self._trainer().onload(self.host_memory)
        tensors, finish = self.host_memory.onload(self._memory())
        self._set_memory(tensors)
        return finish

    def alias(self, other: Shard) -> None:
        self.decode_states.clear()
        theirs = other.state_dict()
        for name, parameter in self.stage.parameters.items():
            parameter.data = theirs[name]

    def free(self) -> None:
        self.decode_states.clear()
        for parameter in self.stage.parameters.values():
            parameter.data = parameter.data.new_empty(()).expand(parameter.shape)  # one element, but the same shape

    def allocate(self) -> None:
        for parameter in self.stage.parameters.values():
            parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _memory(self) -> dict[str, torch.Tensor]:
        """All that an offload of parameters moves."""
        return {name: p.data for name, p in (*self.stage.parameters.items(), *self.stage.base.items())}

    def _set_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The same tensors as `_memory`, elsewhere."""
        self.decode_states.clear()
        for name, parameter in (*self.stage.parameters.items(), *self.stage.base.items()):
            parameter.data = tensors[name]

    def _can_keep_captures(self) -> bool:
        """Whether captured decode steps stay valid for later calls. They do not where they read copies of parameters,
        which are made anew for each call: those that autocast makes, and that of a head with its bias. On CUDA a kept
        graph would keep its memory."""
        return (self.device.type == "cpu" and isinstance(self.stage, Stage) and not self.stage.casts
                and not self.stage.copies_head)

    def _cleared_loads(self) -> RouterLoads:
        """The loads of experts, of which nothing is counted yet."""
        if self.router_loads is None:
            self.router_loads = RouterLoads(self.stage, self.model, self.axes)
        self.router_loads.clear()
        return self.router_loads

    def _trainer(self) -> ShardOptimizer:
        if self.trainer is None:
            raise RuntimeError(f"{self.model.name} is not trained under this layout")
        return self.trainer

    @contextmanager
    def _numerics(self) -> Iterator[None]:
        """The dtypes, and the order of sums, in which everything inside is computed."""
        if not self.model.invariant:
            with self._autocast():
                yield
            return
        with self._autocast(), self.stage.weight_copies.in_call(), self.stage.invariant_mode():
            yield

    def _autocast(self) -> torch.autocast:
        # under `zero`, a cast copy that is cached over the passes of a minibatch would pass its gradient on only after
        # those of its layer were reduced
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.uses_bfloat16,
                              cache_enabled=self.stage.zero is None)
