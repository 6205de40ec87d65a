"""Completions by one shard: packed prefill, a static KV slab, decoding with refill of finished slots.

Every rank of the shard runs the same control flow: the last pipeline stage samples, and the tokens go to all stages.
Ranks that share experts make their passes together, until the sequences of all are complete.
What is sampled for a row depends on (seed, step, row, position) and the model alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rldsl.backends.torch.attention import Decode, Prefill, Slab, Varlen
from rldsl.backends.torch.sampling import choose
from rldsl.diag import fail
from rldsl.plan.events import Sampling
from rldsl.runtime.backend import Axes, Axis, Generated, Packed
from rldsl.runtime.draws import uniform
from rldsl.runtime.ends import ends
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
    eos_ids: torch.Tensor
    stops: StopStrings | None
    rows: torch.Tensor
    widest: int = field(init=False)
    head: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        tp, vocab = self.stage.head_axis.size, self.stage.vocab
        self.widest = max((i + 1) * vocab // tp - i * vocab // tp for i in range(tp))
        self.head = None if self.stage.head is None else self.stage.head.to(self.stage.head_dtype)  # once for all

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
            both = torch.stack((tokens.double(), logprobs.double()))  # exact: one message instead of two
            dist.broadcast(both, src=pp.ranks[-1], group=pp.group)
            tokens, logprobs = both[0].long(), both[1].float()
        return tokens, logprobs

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, V] float32, gathered over the vocabulary's shards."""
        assert self.head is not None
        logits = (hidden @ self.head.T).float()
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
    """Whether the last token of a completion completes one of the stop strings; it may have more text behind it."""

    def __init__(self, stop: tuple[str, ...], tokenizer: Any):
        self.stop, self.tokenizer = stop, tokenizer
        self.tail = max(len(text.encode()) for text in stop) + 8  # a token may be one byte of a character; 8 for others

    def hit(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """tokens [S, M], lengths [S] -> [S] bool."""
        at = lengths[:, None] + torch.arange(-self.tail, 0, device=tokens.device)
        some = torch.where(at >= 0, tokens.gather(1, at.clamp(min=0)), -1).tolist()
        tails = [[token for token in row if token >= 0] for row in some]
        before, after = (self.tokenizer.batch_decode(x, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                         for x in ([tail[:-1] for tail in tails], tails))
        return torch.tensor(list(map(self._completed, before, after)), dtype=torch.bool, device=tokens.device)

    def _completed(self, before: str, after: str) -> bool:
        """Whether a stop string ends in what the last token changed, which may be the character before it too."""
        same = len(commonprefix((before, after)))
        return any(after.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self.stop)


@lru_cache(maxsize=4)
def _tokenizer(directory: str) -> tuple[Any, list[int]]:
    """With the tokens that end a sequence."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    return found, sorted(ends(directory, found))


@torch.no_grad()
def generate(stage: Stage, axes: Axes, prompts: Packed, sampling: Sampling, *, tokenizer_dir: str, seed: int, step: int,
             limit: int) -> Generated:
    """See `Shard.generate`. limit: slots of the slab (0: one for each sequence)."""
    count, device = len(prompts), prompts.tokens.device
    progress = Progress.start(count, sampling.max_new_tokens, device)
    if count and int(prompts.prompt_lens.min()) == 0:
        raise fail("RL0732", "a sequence has an empty prompt", help="every prompt needs at least one token")
    if count or axes.ep.size > 1:
        tokenizer, ids = _tokenizer(tokenizer_dir)
        stops = StopStrings(sampling.stop, tokenizer) if sampling.stop else None
        sampler = Sampler(stage, axes, sampling, seed, step, torch.tensor(ids, dtype=torch.long, device=device), stops,
                          prompts.rows)
        _run(stage, axes, prompts, sampler, progress, min(limit or count, count))
    return _pack(prompts, progress)


def _run(stage: Stage, axes: Axes, prompts: Packed, sampler: Sampler, progress: Progress, slots: int) -> None:
    """Which sequence is in which slot, and how long it is, is known on the host: a decoding step asks the device once,
    which sequences ended in it."""
    device, longest, lens = prompts.tokens.device, sampler.sampling.max_new_tokens, prompts.prompt_lens.tolist()
    count, starts = len(lens), prompts.prompt_lens.cumsum(0) - prompts.prompt_lens
    slab = Slab(slots, max(lens, default=0) + longest)
    held: dict[int, int] = {}  # slot -> its sequence
    sizes: dict[int, int] = {}  # slot -> tokens of its sequence
    free, waiting = list(range(slots)), 0  # sequences from `waiting` on have not begun
    slot = which = torch.empty(0, dtype=torch.long, device=device)  # of `held`, in order
    while True:
        busy = waiting < count or bool(held)
        if not _any(busy, axes.ep, device):
            return
        if not busy:  # others still need the experts of this rank
            one = torch.ones(1, dtype=torch.long, device=device)
            _forward(stage, axes, one - 1, one - 1, Varlen(one))
            continue
        if some := _begin(lens, waiting, len(free), slots):
            into, free = free[:some], free[some:]
            begun = torch.arange(waiting, waiting + some, device=device)
            each = prompts.prompt_lens[begun]
            tokens = prompts.tokens[starts[begun].repeat_interleave(each) + within(each)]
            packing = Prefill(slab, torch.tensor(into, device=device), each)
            hidden = _forward(stage, axes, tokens, packing.positions, packing)
            ended = _record(sampler, progress, None if hidden is None else hidden[each.cumsum(0) - 1], begun).tolist()
            held.update(zip(into, range(waiting, waiting + some)))
            sizes.update(zip(into, lens[waiting : waiting + some]))
            waiting, changed = waiting + some, into
        else:
            made = progress.lengths[which]
            positions = prompts.prompt_lens[which] + made - 1
            packing = Decode(slab, slot, positions, max(sizes.values()))
            hidden = _forward(stage, axes, progress.tokens[which, made - 1], positions, packing)
            ended, changed = _record(sampler, progress, hidden, which).tolist(), list(held)
        for s, over in zip(changed, ended):
            sizes[s] += 1
            if over:
                del held[s], sizes[s]
                free.append(s)
        if some or any(ended):
            held = dict(sorted(held.items()))
            slot, which = (torch.tensor(x, dtype=torch.long, device=device) for x in (list(held), list(held.values())))


def _begin(lens: list[int], waiting: int, free: int, slots: int) -> int:
    """How many sequences to begin now: a prefill of a few is as slow as a decoding step, so it waits for a sixteenth of
    the slots, or until its tokens are enough."""
    ahead = list(accumulate(lens[waiting : waiting + free]))
    some = max(1, sum(x <= PREFILL for x in ahead)) if ahead else 0
    last = waiting + some == len(lens)
    return some if 16 * free >= slots or last or ahead and ahead[-1] >= PREFILL else 0


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
    done = torch.isin(tokens, sampler.eos_ids)
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
