"""Completions by one shard: packed prefill, a static KV slab, decoding with refill of finished slots.

Every rank of the shard does the same work in the same order: the last pipeline stage samples, and the tokens go to all
stages. Sequences that follow each other and have the same prompt share its prefill. What is sampled for a row depends
on (seed, step, row, position) and the model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from rldsl.backends.torch.generate.clock_ticks import run
from rldsl.backends.torch.generate.decode_state import Desk, Desks, Progress, keep
from rldsl.backends.torch.generate.engine import Engine
from rldsl.backends.torch.generate.sampling import Sampler
from rldsl.backends.torch.generate.scheduler import Slots
from rldsl.backends.torch.generate.stop_conditions import StopStrings, tokenizer_of

from rldsl.diag import fail
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axes, GenerationOutput, PackedBatch
from rldsl.runtime.store import within

if TYPE_CHECKING:
    from rldsl.backends.torch.model.stage import Stage

EVERY = {"cuda": 8}  # steps between two looks of the host at which sequences have ended, where a look costs something


@torch.no_grad()
def generate(stage: Stage, axes: Axes, prompts: PackedBatch, sampling: Sampling, *, tokenizer_dir: str, seed: int, step: int,
             limit: int, most: int = 0, every: int = 0, replay: bool = True, desks: Desks | None = None) -> GenerationOutput:
    """See `Shard.generate`. limit: slots of the slab (0: one for each sequence). every: steps between two looks at
    which sequences have ended (0: as the device likes it). replay: whether steps of the same shapes are recorded.
    desks: where what was recorded is kept, for as long as parameters stay where they are. These three change no
    number."""
    count, device = len(prompts), prompts.tokens.device
    if count and int(prompts.prompt_lens.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    if not count and axes.ep.size == 1:
        return _pack(prompts, Progress.start(0, sampling.max_new_tokens, device))
    tokenizer, ids = tokenizer_of(tokenizer_dir)
    stops = StopStrings(sampling.stop, tokenizer) if sampling.stop else None
    alone = axes.ep.size > 1 or stops is not None  # the host is asked in every step anyway
    slots = Slots(prompts.prompt_lens.tolist(), repeated(prompts), min(limit or count, count), axes.pp.size,
                  sampling.max_new_tokens, 1 if alone else every or EVERY.get(device.type, 1), most)
    size = slots.count
    key = (count, size, sampling, tuple(ids))
    desk = None if desks is None else desks.pop(key, None)
    if desk is None or desk.slab.width < slots.width:
        desk = Desk.make(count, size, slots.width, sampling.max_new_tokens, ids, stage.last and not sampling.greedy,
                         axes.pp.size, replay and axes.tp.size == 1, device)
    desk.open()
    sampler = Sampler(stage, sampling, seed, step, desk.eos_ids) if stage.last else None
    run(Engine(stage, prompts, sampler, stops, sampling.min_new_tokens, sampling.max_new_tokens, slots, desk), axes)
    made = _pack(prompts, desk.progress)
    if desks is not None:
        keep(desks, key, desk)
    return made


def repeated(prompts: PackedBatch) -> list[bool]:
    """Whether each sequence has the prompt of the one before it."""
    lens = prompts.prompt_lens
    sequence = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
    before = torch.arange(len(sequence), device=lens.device) - lens[sequence]
    other = (prompts.tokens != prompts.tokens[before.clamp(min=0)]).long()
    same = torch.zeros_like(lens).index_add_(0, sequence, other) == 0
    same[1:] &= lens[1:] == lens[:-1]
    same[:1] = False
    return same.tolist()


def _pack(prompts: PackedBatch, progress: Progress) -> GenerationOutput:
    """Each prompt followed by its response, and the log-probs of the responses; nothing of it lies on the desk."""
    lens = prompts.prompt_lens + progress.lengths
    starts = lens.cumsum(0) - lens
    tokens = torch.empty(int(lens.sum()), dtype=torch.long, device=lens.device)
    tokens[starts.repeat_interleave(prompts.prompt_lens) + within(prompts.prompt_lens)] = prompts.tokens
    made = torch.arange(progress.tokens.shape[1], device=lens.device) < progress.lengths[:, None]
    responses = (starts + prompts.prompt_lens).repeat_interleave(progress.lengths) + within(progress.lengths)
    tokens[responses] = progress.tokens[made]
    batch = PackedBatch(prompts.rows, prompts.prompt_lens, progress.lengths.clone(), tokens)
    return GenerationOutput(batch, progress.logprobs[made], progress.done.clone())
