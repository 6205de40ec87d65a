"""Completions by one shard: packed prefill, a static KV slab, decoding with refill of finished slots.

Every rank of the shard does the same work in the same order: the last pipeline stage samples, and the tokens go to all
stages. Sequences that follow each other and have the same prompt share its prefill. What is sampled for a row depends
on (seed, step, row, position) and the model alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rldsl.backends.torch.engine import Engine, Progress
from rldsl.backends.torch.moments import run
from rldsl.backends.torch.replay import Replay
from rldsl.backends.torch.sampling import Sampler
from rldsl.backends.torch.slots import Slots
from rldsl.backends.torch.stops import StopStrings, tokenizer_of
from rldsl.diag import fail
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axes, Generated, Packed
from rldsl.runtime.store import within

if TYPE_CHECKING:
    from rldsl.backends.torch.stage import Stage

EVERY = {"cuda": 8}  # steps between two looks of the host at which sequences have ended, where a look costs something


@torch.no_grad()
def generate(stage: Stage, axes: Axes, prompts: Packed, sampling: Sampling, *, tokenizer_dir: str, seed: int, step: int,
             limit: int, every: int = 0, replay: bool = True) -> Generated:
    """See `Shard.generate`. limit: slots of the slab (0: one for each sequence). every: steps between two looks at
    which sequences have ended (0: as the device likes it). replay: whether steps of the same shapes are recorded; both
    change no number."""
    count, device = len(prompts), prompts.tokens.device
    progress = Progress.start(count, sampling.max_new_tokens, device)
    if count and int(prompts.prompt_lens.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    if count or axes.ep.size > 1:
        tokenizer, ids = tokenizer_of(tokenizer_dir)
        stops = StopStrings(sampling.stop, tokenizer) if sampling.stop else None
        alone = axes.ep.size > 1 or stops is not None  # the host is asked in every step anyway
        eos_ids = torch.tensor(ids, dtype=torch.long, device=device)
        slots = Slots(prompts.prompt_lens.tolist(), repeated(prompts), min(limit or count, count), axes.pp.size,
                      sampling.max_new_tokens, 1 if alone else every or EVERY.get(device.type, 1))
        sampler = Sampler(stage, sampling, seed, step, eos_ids) if stage.last else None
        run(Engine(stage, prompts, sampler, eos_ids, stops, sampling.min_new_tokens, sampling.max_new_tokens, slots,
                   Replay(device, replay and axes.tp.size == 1), progress), axes)
    return _pack(prompts, progress)


def repeated(prompts: Packed) -> list[bool]:
    """Whether each sequence has the prompt of the one before it."""
    lens = prompts.prompt_lens
    sequence = torch.arange(len(lens), device=lens.device).repeat_interleave(lens)
    before = torch.arange(len(sequence), device=lens.device) - lens[sequence]
    other = (prompts.tokens != prompts.tokens[before.clamp(min=0)]).long()
    same = torch.zeros_like(lens).index_add_(0, sequence, other) == 0
    same[1:] &= lens[1:] == lens[:-1]
    same[:1] = False
    return same.tolist()


def _pack(prompts: Packed, progress: Progress) -> Generated:
    """Each prompt followed by its response, and the log-probs of the responses."""
    lens = prompts.prompt_lens + progress.lengths
    starts = lens.cumsum(0) - lens
    tokens = torch.empty(int(lens.sum()), dtype=torch.long, device=lens.device)
    tokens[starts.repeat_interleave(prompts.prompt_lens) + within(prompts.prompt_lens)] = prompts.tokens
    made = torch.arange(progress.tokens.shape[1], device=lens.device) < progress.lengths[:, None]
    responses = (starts + prompts.prompt_lens).repeat_interleave(progress.lengths) + within(progress.lengths)
    tokens[responses] = progress.tokens[made]
    batch = Packed(prompts.rows, prompts.prompt_lens, progress.lengths, tokens)
    return Generated(batch, progress.logprobs[made], progress.done)
