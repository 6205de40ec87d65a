"""One rank's copy of a model that vLLM samples from: the complete parameters, and an engine process.

The parameters are complete, so what a reallocation sends are the same boxes as for any layout with tp=1 and pp=1. On a
CPU they arrive in the memory that the engine maps; on a GPU they are copied there. From there vLLM takes them by name,
since it joins some of them (queries, keys and values) and may store them in a form of its own.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from rldsl.backends.torch.generate.stop_conditions import tokenizer_of
from rldsl.backends.torch.model.load_weights import WeightReads, load, load_config
from rldsl.backends.vllm.process import EngineProcess
from rldsl.backends.vllm.shared_weights import SharedWeights
from rldsl.diag import fail
from rldsl.plan.events import CopyPart, Sampling
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, GenerationOutput, PackedBatch, Prefix, Shard, WeightDigest
from rldsl.runtime.host_memory import HostMemory
from rldsl.sharding.boxes import local_shape, parameters, pieces_of_rank
from rldsl.sharding.dtypes import storage_dtype
from rldsl.sharding.partition import mix


class VllmShard:
    """See `rldsl.runtime.backend.Shard`, whose methods these are."""

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, load_weights: bool):
        self.model, self.device = model, device
        self.config = load_config(model)
        rank = axes.mesh.ranks[axes.mesh.index]
        held = {p.name: (p, pieces_of_rank(p, model.layers, layout, mesh, rank)) for p in parameters(model)}
        shapes = {name: tuple(local_shape(p, pieces)) for name, (p, pieces) in held.items()}
        dtype = torch.bfloat16 if storage_dtype(model, layout.id) == "bfloat16" else torch.float32
        self.shared = SharedWeights(shapes, dtype)
        # parameter name -> tensor: in the shared memory on a CPU, else on the device
        self.tensors = self._allocated()
        reads = WeightReads()
        if load_weights:
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
        found = _Responses(len(texts))
        if rows:
            slots = min(max_num_seqs or len(rows), len(rows))
            asked = max(max_num_seqs, max_prompts) or len(rows)
            engine = self._engine(max(max_prompt_len, *lens) + sampling.max_new_tokens, max(slots, asked))
            seeds = [mix(seed, step, row) >> 1 for row in prompts.rows[torch.tensor(rows)].tolist()]
            _, arrays = engine.ask(
                "generate", {"tokens": array("q", (t for i in rows for t in texts[i])),
                             "lens": array("q", (lens[i] for i in rows)), "seeds": array("q", seeds)},
                slots=slots, sampling={**asdict(sampling), "eos_ids": eos_ids})
            found.take(rows, arrays)
        return found.output(prompts, texts)

    def export(self) -> Mapping[str, Any]:
        return {"config": self.config, "tokenizer": self.model.path}

    def offload(self, part: CopyPart) -> None:
        self.tensors = self.host_memory.offload(self.tensors)
        self._sleep()

    def onload(self, part: CopyPart) -> Callable[[], None]:
        self.tensors, finish = self.host_memory.onload(self.tensors)
        return finish

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
        if self.device.type == "cpu":
            return dict(self.shared.tensors)
        return {name: torch.empty_like(x, device=self.device) for name, x in self.shared.tensors.items()}

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
            self.shared.copy_from(self.tensors)
            self.engine.ask("load")
            self.changed = False
        return self.engine


class _Responses:
    """Responses of sequences; those that were not asked for are empty and have ended."""

    def __init__(self, count: int):
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.finished = [True] * count

    def take(self, rows: Sequence[int], arrays: Mapping[str, array[Any]]) -> None:
        start = 0
        for row, size, finished in zip(rows, arrays["lens"], arrays["finished"], strict=True):
            self.tokens[row] = arrays["tokens"][start:start + size].tolist()
            self.logprobs[row] = arrays["logprobs"][start:start + size].tolist()
            self.finished[row] = bool(finished)
            start += size

    def output(self, prompts: PackedBatch, texts: Sequence[Sequence[int]]) -> GenerationOutput:
        device = prompts.tokens.device
        joined = [t for text, new in zip(texts, self.tokens, strict=True) for t in (*text, *new)]
        batch = PackedBatch(
            prompts.rows, prompts.prompt_lens + prompts.response_lens,
            torch.tensor(list(map(len, self.tokens)), dtype=torch.int64, device=device),
            torch.tensor(joined, dtype=torch.int64, device=device))
        logprobs = torch.tensor([x for row in self.logprobs for x in row], dtype=torch.float32, device=device)
        return GenerationOutput(batch, logprobs, torch.tensor(self.finished, dtype=torch.bool, device=device),
                                num_prefilled=sum(map(len, texts)))
