"""One rank's copy of a model that vLLM samples from: the complete parameters, and an engine process.

The parameters are complete, so what a reallocation sends are the same boxes as for any layout with tp=1 and pp=1. On a
CPU they arrive in the memory that the engine maps; on a GPU they are copied there. From there vLLM takes them by name,
since it joins some of them (queries, keys and values) and may store them in another form.

Of a model with adapters only their factors are parameters, and arrive. What vLLM takes are the weights of the base with
the adapters merged, W + alpha / r * B A, computed in float32: it knows of no adapters.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rldsl.backends.torch.generate.conversation_state import LiveConversations
from rldsl.backends.torch.generate.stop_conditions import tokenizer_of
from rldsl.backends.torch.model.load_weights import HeldPieces, WeightReads, allocate_parameters, load, load_config
from rldsl.backends.torch.model.lora import init_lora, lora_adapters
from rldsl.backends.vllm.answers import Response, responses
from rldsl.backends.vllm.conversations import Turns
from rldsl.backends.vllm.process import EngineProcess
from rldsl.backends.vllm.shared_weights import SharedWeights
from rldsl.diag import fail
from rldsl.plan.events import CopyPart, Sampling
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.backend import (
    Axes,
    ConversationOutput,
    GenerationOutput,
    PackedBatch,
    Prefix,
    Shard,
    Talk,
    WeightCache,
    WeightDigest,
)
from rldsl.runtime.host_memory import HostMemory
from rldsl.sharding.boxes import Parameter, expand_specs, local_shape, parameters, pieces_of_rank
from rldsl.sharding.dtypes import storage_dtype
from rldsl.sharding.partition import mix


class VllmShard:
    """See `rldsl.runtime.backend.Shard`, whose methods these are."""

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, load_weights: bool,
                 weight_cache: WeightCache | None = None):
        self.model, self.device = model, device
        self.config = load_config(model)
        rank = axes.mesh.ranks[axes.mesh.index]

        def complete(wanted: Iterable[Parameter]) -> HeldPieces:
            return {p.name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank)) for p in wanted}

        held, base_held = complete(parameters(model)), complete(expand_specs(model.base, model.layers))
        dtype, stored = (torch.bfloat16 if name == "bfloat16" else torch.float32
                         for name in (model.dtype, storage_dtype(model, layout.id)))
        # of the base of a model with adapters: parameter name -> tensor on the device
        base, base_to_load = allocate_parameters(model.path, base_held, dtype, device, weight_cache)
        self.base: dict[str, torch.Tensor] = {name: p.data for name, p in base.items()}
        # parameter name -> (shape, dtype)
        self.kinds = {name: (tuple(local_shape(p, pieces)), torch.float32 if p.spec.float32 else stored)
                      for name, (p, pieces) in held.items()}
        self.shared = SharedWeights({name: (tuple(x.shape), x.dtype) for name, x in self.base.items()} or self.kinds)
        # parameter name -> tensor: on a CPU, and without adapters, in the shared memory, else on the device
        self.tensors = self._allocated()
        reads = WeightReads()
        load(model, base_to_load, self.base, reads)
        if load_weights and model.lora is not None:
            init_lora(model, held, self.tensors, reads)
        elif load_weights:
            load(model, held, self.tensors, reads)
        self._weight_digests = tuple(reads.digests())
        self.host_memory = HostMemory(device)
        self.engine: EngineProcess | None = None
        self.max_len = self.max_num_seqs = 0  # of the engine
        self.changed = True  # whether the engine's weights may not be those of this shard

    def weight_digests(self) -> Iterable[WeightDigest]:
        return self._weight_digests

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        self.changed = True  # whoever asks may write
        return dict(self.tensors)

    def generate(self, prompts: PackedBatch, sampling: Sampling, *, seed: int, step: int, max_num_seqs: int,
                 max_prompt_len: int = 0, max_prompts: int = 0, continues: bool = False, keep_cache: bool = False,
                 prefix: Prefix | None = None) -> GenerationOutput:
        """Errors: RL0732 for an empty prompt, RL0326 and RL0801 (`process.py`)."""
        lens = (prompts.prompt_lens + prompts.response_lens).tolist()
        if lens and min(lens) == 0:
            raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
        _, eos_ids = tokenizer_of(self.model.path)
        texts = [part.tolist() for part in prompts.tokens.split(lens)]
        rows = [i for i, text in enumerate(texts) if not (continues and text[-1] in eos_ids)]
        found: list[Response] = [Response([], [], True)] * len(texts)
        if rows:
            slots = min(max_num_seqs or len(rows), len(rows))
            asked = max(max_num_seqs, max_prompts) or len(rows)
            engine = self._engine(max(max_prompt_len, *lens) + sampling.max_new_tokens, max(slots, asked))
            seeds = [mix(seed, step, row) >> 1 for row in prompts.rows[torch.tensor(rows)].tolist()]
            _, answer = engine.ask(
                "generate", {"tokens": array("q", (t for i in rows for t in texts[i])),
                             "lens": array("q", (lens[i] for i in rows)), "seeds": array("q", seeds)},
                slots=slots, sampling={**asdict(sampling), "eos_ids": eos_ids})
            asked_for = dict.fromkeys(range(len(rows)), sampling.max_new_tokens)
            for i, response in responses(engine, "generate", answer, asked_for).items():
                found[rows[i]] = response
        return _output(prompts, texts, found)

    def converse(self, rows: torch.Tensor, sampling: Sampling, limits: Conversation, talk: Talk | None, *, seed: int,
                 step: int, max_num_seqs: int, waiting: Waiting = "keep") -> ConversationOutput:
        """Errors: RL0326 and RL0801 (`process.py`), and those of environments."""
        numbers = rows.tolist()
        if not numbers:
            return LiveConversations(limits, talk).output(rows.device)
        slots = min(max_num_seqs or len(numbers), len(numbers))
        _, eos_ids = tokenizer_of(self.model.path)
        turns = Turns(limits=limits, talk=talk, engine=self._engine(limits.max_tokens, max(slots, max_num_seqs)),
                      sampling=sampling, eos_ids=eos_ids, num_slots=slots, waiting=waiting, seed=seed, step=step)
        turns.expect(numbers)
        turns.run_to_the_end()
        return turns.output(rows.device)

    def export(self) -> Mapping[str, Any]:
        return {"config": self.config, "tokenizer": self.model.path}

    def offload(self, part: CopyPart) -> None:
        self._set_memory(self.host_memory.offload({**self.tensors, **self.base}))
        self._sleep()

    def onload(self, part: CopyPart) -> Callable[[], None]:
        tensors, finish = self.host_memory.onload({**self.tensors, **self.base})
        self._set_memory(tensors)
        return finish

    def _set_memory(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors, self.base = ({name: tensors[name] for name in held} for held in (self.tensors, self.base))

    def alias(self, other: Shard) -> None:
        raise TypeError("a copy for vLLM is never trained, so it cannot be that of another layout")

    def free(self) -> None:
        self.tensors = {}
        self.shared.release()
        self._sleep()

    def allocate(self) -> None:
        self.tensors = self._allocated()
        self.changed = True

    def close(self) -> None:
        """End the engine process."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def _allocated(self) -> dict[str, torch.Tensor]:
        if self.device.type == "cpu" and not self.model.base:
            return dict(self.shared.tensors)
        return {name: torch.empty(shape, dtype=dtype, device=self.device)
                for name, (shape, dtype) in self.kinds.items()}

    @torch.no_grad()
    def _fill_shared(self) -> None:
        """Let the shared memory have the weights that vLLM takes."""
        self.shared.copy_from(self.base or self.tensors)
        for module, adapter in lora_adapters(self.model, self.tensors).items():
            name = f"{module}.weight"
            product = adapter.b.float() @ adapter.a.float()
            self.shared.tensors[name].copy_(self.base[name].float() + adapter.scale * product)

    def _sleep(self) -> None:
        self.changed = True
        if self.engine is not None:
            self.engine.ask("sleep", device=self.device.type)

    def _engine(self, max_len: int, max_num_seqs: int) -> EngineProcess:
        """The engine with the weights of this shard. It is made anew where a call needs longer sequences, or more of
        them at a time, than it has room for: results do not depend on its room."""
        if self.engine is not None and (max_len > self.max_len or max_num_seqs > self.max_num_seqs):
            self.close()
        if self.engine is None:
            self.max_len, self.max_num_seqs = max(max_len, self.max_len), max(max_num_seqs, self.max_num_seqs)
            self.engine = EngineProcess(self.model.name, self.shared.descriptor, str(self.device))
            sizes = self.model.sizes
            itemsize = 2 if self.model.dtype == "bfloat16" else 4
            self.engine.ask(
                "open", memory=self.shared.descriptor, bytes=self.shared.size, weights=self.shared.records(),
                model=os.path.abspath(self.model.path), dtype=self.model.dtype, device=self.device.type,
                max_len=self.max_len, max_num_seqs=self.max_num_seqs,
                bytes_per_token=2 * sizes.kv_heads * sizes.head_dim * self.model.layers * itemsize)
            self.changed = True
        if self.changed:
            self._fill_shared()
            self.engine.ask("load")
            self.changed = False
        return self.engine


def _output(prompts: PackedBatch, texts: Sequence[Sequence[int]], made: Sequence[Response]) -> GenerationOutput:
    """Each sequence with its response."""
    device = prompts.tokens.device
    joined = [t for text, response in zip(texts, made, strict=True) for t in (*text, *response.tokens)]
    batch = PackedBatch(
        prompts.rows, prompts.prompt_lens + prompts.response_lens,
        torch.tensor([len(x.tokens) for x in made], dtype=torch.int64, device=device),
        torch.tensor(joined, dtype=torch.int64, device=device))
    logprobs = torch.tensor([x for response in made for x in response.logprobs], dtype=torch.float32, device=device)
    finished = torch.tensor([x.finished for x in made], dtype=torch.bool, device=device)
    return GenerationOutput(batch, logprobs, finished, num_prefilled=sum(map(len, texts)))
