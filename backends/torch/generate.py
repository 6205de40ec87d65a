"""Completions by one shard: packed prefill, a static KV slab, decoding with refill of finished slots.

Every rank of the shard runs the same control flow: the last pipeline stage samples, and the tokens go to all stages.
Ranks that share experts make their passes together, until the sequences of all are complete.
What is sampled for a row depends on (seed, step, row, position) and the model alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rldsl.backends.torch.attention import Decode, Prefill, Slab, Varlen
from rldsl.backends.torch.sampling import choose
from rldsl.diag import fail
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axes, Axis, Generated, Packed
from rldsl.runtime.draws import uniform
from rldsl.runtime.store import within

if TYPE_CHECKING:
    from rldsl.backends.torch.stage import Stage


PREFILL = 1 << 14  # tokens of prompts that are run at once, so that the memory of a prefill does not grow with the batch


@dataclass
class Progress:
    """What has been sampled so far; every field is indexed by sequence.

    tokens [N, M] int64, logprobs [N, M] float32 with M = max_new_tokens; done [N] bool (ended by itself);
    lengths [N] int64: number of sampled tokens."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    done: torch.Tensor

    @staticmethod
    def start(count: int, longest: int, device: torch.device) -> Progress:
        return Progress(torch.zeros(count, longest, dtype=torch.long, device=device),
                        torch.zeros(count, longest, device=device),
                        torch.zeros(count, dtype=torch.long, device=device),
                        torch.zeros(count, dtype=torch.bool, device=device))


@dataclass
class Sampler:
    """The next token of sequences, from the last stage's hidden states."""

    stage: Stage
    axes: Axes
    sampling: Sampling
    seed: int
    step: int
    eos_ids: list[int]
    stops: StopStrings | None
    rows: torch.Tensor
    widest: int = field(init=False)

    def __post_init__(self) -> None:
        tp, vocab = self.stage.head_axis.size, self.stage.vocab
        self.widest = max((i + 1) * vocab // tp - i * vocab // tp for i in range(tp))

    def next(self, hidden: torch.Tensor | None, which: torch.Tensor, position: torch.Tensor
             ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [S, H] on the last stage; which [S]: sequences; position [S]: number of tokens sampled before.
        Tokens [S] and log-probs [S], on every stage."""
        if self.stage.last:
            assert hidden is not None
            forbidden = position < self.sampling.min_new_tokens if self.sampling.min_new_tokens else None
            draws = uniform(self.seed, self.step, self.rows[which], position)
            tokens, logprobs = choose(self._logits(hidden), self.sampling, draws, forbidden, self.eos_ids)
        else:
            tokens = torch.empty_like(which)
            logprobs = torch.empty(which.shape, device=which.device)
        pp = self.axes.pp
        if pp.size > 1:
            for value in (tokens, logprobs):
                dist.broadcast(value, src=pp.ranks[-1], group=pp.group)
        return tokens, logprobs

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V] float32, gathered over the vocabulary's shards."""
        logits = (hidden @ self.stage.head.to(hidden.dtype).T).float()
        tp, vocab = self.stage.head_axis, self.stage.vocab
        if tp.size == 1:
            return logits
        padded = logits.new_zeros(len(hidden), self.widest)
        padded[:, : logits.shape[1]] = logits
        parts = [torch.empty_like(padded) for _ in range(tp.size)]
        dist.all_gather(parts, padded, group=tp.group)
        sizes = [(i + 1) * vocab // tp.size - i * vocab // tp.size for i in range(tp.size)]
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes)], -1)


class StopStrings:
    """Whether a completion ends in one of the stop strings."""

    def __init__(self, stop: tuple[str, ...], tokenizer_dir: str):
        self.stop = stop
        self.tokenizer = _tokenizer(tokenizer_dir)
        self.tail = max(map(len, stop)) + 8  # every token has at least a character; 8 more for merges

    def hit(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """tokens [S, M], lengths [S] -> [S] bool."""
        tails = [row[max(0, n - self.tail) : n] for row, n in zip(tokens.tolist(), lengths.tolist())]
        texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
        return torch.tensor([text.endswith(self.stop) for text in texts], dtype=torch.bool, device=tokens.device)


@lru_cache(maxsize=4)
def _tokenizer(directory: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


@torch.no_grad()
def generate(stage: Stage, axes: Axes, prompts: Packed, sampling: Sampling, *, eos_ids: list[int], tokenizer_dir: str,
             seed: int, step: int, limit: int) -> Generated:
    """See `Shard.generate`. limit: slots of the slab (0: one for each sequence)."""
    count, device = len(prompts), prompts.tokens.device
    progress = Progress.start(count, sampling.max_new_tokens, device)
    if count and int(prompts.prompt_lens.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    if count or axes.ep.size > 1:
        stops = StopStrings(sampling.stop, tokenizer_dir) if sampling.stop else None
        sampler = Sampler(stage, axes, sampling, seed, step, eos_ids, stops, prompts.rows)
        _run(stage, axes, prompts, sampler, progress, min(limit or count, count))
    return _pack(prompts, progress)


def _run(stage: Stage, axes: Axes, prompts: Packed, sampler: Sampler, progress: Progress, slots: int) -> None:
    count, device = len(prompts), prompts.tokens.device
    longest = sampler.sampling.max_new_tokens
    starts = prompts.prompt_lens.cumsum(0) - prompts.prompt_lens
    slab = Slab(slots, (int(prompts.prompt_lens.max()) if count else 0) + longest)
    held = torch.full((slots,), -1, dtype=torch.long, device=device)  # the sequence in each slot
    waiting = 0  # sequences from here on have not begun
    while True:
        free = (held < 0).nonzero()[:, 0]
        busy = waiting < count or len(free) < slots
        if not _any(busy, axes.ep, device):
            return
        if not busy:  # others still need the experts of this rank
            _forward(stage, axes, held.new_zeros(1), held.new_zeros(1), Varlen(held.new_ones(1)))
            continue
        if waiting < count and len(free):
            ahead = prompts.prompt_lens[waiting : waiting + len(free)].cumsum(0)
            some = max(1, int((ahead <= PREFILL).sum()))
            begun = torch.arange(waiting, waiting + some, device=device)
            slot, waiting = free[: len(begun)], waiting + len(begun)
            held[slot] = begun
            lens = prompts.prompt_lens[begun]
            tokens = prompts.tokens[starts[begun].repeat_interleave(lens) + within(lens)]
            packing = Prefill(slab, slot, lens)
            hidden = _forward(stage, axes, tokens, packing.positions, packing)
            last, which = lens.cumsum(0) - 1, begun
        else:
            slot = (held >= 0).nonzero()[:, 0]
            which, last = held[slot], None
            made = progress.lengths[which]
            tokens = progress.tokens[which, made - 1]
            positions = prompts.prompt_lens[which] + made - 1
            hidden = _forward(stage, axes, tokens, positions, Decode(slab, slot, positions))
        hidden = hidden if hidden is None or last is None else hidden[last]
        ended = _record(sampler, progress, hidden, which)
        held[slot[ended]] = -1


def _any(busy: bool, ep: Axis, device: torch.device) -> bool:
    """Whether any rank that shares experts with this one has sequences that are not complete."""
    if ep.size == 1:
        return busy
    flag = torch.tensor(int(busy), device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ep.group)
    return bool(flag)


def _record(sampler: Sampler, progress: Progress, hidden: torch.Tensor | None, which: torch.Tensor) -> torch.Tensor:
    """Sample one token for each of `which`; [S] bool: it was the sequence's last."""
    made = progress.lengths[which]
    tokens, logprobs = sampler.next(hidden, which, made)
    progress.tokens[which, made] = tokens
    progress.logprobs[which, made] = logprobs
    progress.lengths[which] = made + 1
    done = torch.isin(tokens, torch.tensor(sampler.eos_ids, dtype=torch.long, device=tokens.device))
    if sampler.stops is not None:
        allowed = made + 1 >= sampler.sampling.min_new_tokens
        done |= sampler.stops.hit(progress.tokens[which], made + 1) & allowed
    progress.done[which] = done
    return done | (made + 1 == sampler.sampling.max_new_tokens)


def _forward(stage: Stage, axes: Axes, tokens: torch.Tensor, positions: torch.Tensor, packing: Varlen | Decode
             ) -> torch.Tensor | None:
    """Hidden states [T, H] after the last stage, on the last stage; None elsewhere."""
    pp, hidden = axes.pp, None
    if not stage.first:
        hidden = torch.empty(len(tokens), stage.hidden, dtype=stage.compute_dtype, device=tokens.device)
        dist.recv(hidden, src=pp.ranks[pp.index - 1], group=pp.group)
    hidden = stage.forward(tokens, positions, packing, hidden)
    if stage.last:
        return hidden
    dist.send(hidden.contiguous(), dst=pp.ranks[pp.index + 1], group=pp.group)
    return None


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
