"""A generate event with `per_step`: the next part of each response that has not ended, and new responses.

In: the prompts of this step and of those before it, and the responses that earlier steps left. Out: every response of
the prompts that are under way, and which prompts have only responses that ended; the rest stays for the next step.
Invariant: what is sampled for a response depends on the step and row in which it began and on the position, as without
`per_step`, and on the parameters of the step that samples it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rldsl.diag import internal_error
from rldsl.plan.events import Generate
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.backend import GenerationOutput, PackedBatch
from rldsl.runtime.comm.row_assignment import RowLengths
from rldsl.runtime.draws import as_if_in_step
from rldsl.runtime.state.carried import CarriedRows
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows, offsets_within, ragged_indices


@dataclass(frozen=True, slots=True)
class _Parts:
    """Responses, [S] rows ascending."""

    rows: torch.Tensor  # [S] int64
    tokens: RaggedRows  # of the responses
    logprobs: RaggedRows  # of the responses
    finished: torch.Tensor  # [S] bool

    @property
    def sizes(self) -> torch.Tensor:
        """[S] int64, tokens."""
        return self.tokens.sizes

    def incomplete(self, event: Generate) -> torch.Tensor:
        """[S] bool: which have neither ended nor as many tokens as they may have."""
        return ~self.finished & (self.sizes < event.sampling.max_new_tokens)

    def with_more(self, chosen: torch.Tensor, made: GenerationOutput) -> _Parts:
        """With what was sampled for the rows that are chosen ([S] bool), in their order."""
        rows, batch = self.rows[chosen], made.batch
        of_response = offsets_within(batch.prompt_lens + batch.response_lens) >= batch.prompt_lens.repeat_interleave(
            batch.prompt_lens + batch.response_lens)
        more = [RaggedRows(rows, batch.response_lens, x) for x in (batch.tokens[of_response], made.logprobs)]
        finished = self.finished.clone()
        finished[chosen] = made.finished
        tokens, logprobs = _appended(self.tokens, more[0], chosen), _appended(self.logprobs, more[1], chosen)
        return _Parts(self.rows, tokens, logprobs, finished)


def _appended(rows: RaggedRows, more: RaggedRows, chosen: torch.Tensor) -> RaggedRows:
    """`rows` with the entries of `more` behind those of the rows that are chosen ([S] bool)."""
    added = torch.zeros_like(rows.sizes)
    added[chosen] = more.sizes
    return RaggedRows(rows.ids, rows.sizes + added, _interleaved(rows, RaggedRows(rows.ids, added, more.data)))


def generate_a_part(models: ModelStore, step: StepState, event: Generate) -> None:
    """Continue and begin responses, and write what the step has."""
    frame = step.context.frames[event.frame]
    prompt_rows = step.my_rows(step.context.spreads[event.spread], event.prompts)
    prompts = step.read(event.reads, f"{event.prompts}.tokens").gather(prompt_rows)
    parts = _under_way(step, event, frame, prompt_rows)
    shard, seed = models.shard_to_read(event.model, event.layout), step.sampling_seed(event.id, event.draws_as)
    most, begun = event.sampling.max_new_tokens, parts.incomplete(event)
    allowed = torch.where(_ages(parts.rows, frame) == frame.iterations - 1, last_part(event, frame), event.per_step)
    for new in dict.fromkeys((event.per_step, last_part(event, frame))):  # every rank makes the same calls
        chosen = begun & (allowed == new)
        batch = _batch(step, frame, prompts, parts, chosen, seed)
        made = shard.generate(batch, replace(event.sampling, max_new_tokens=new), seed=seed, step=step.index,
                              max_num_seqs=event.mbs, max_prompt_len=frame.max_prompt_tokens + most - new,
                              max_prompts=len(prompt_rows) * frame.per_prompt)
        parts = parts.with_more(chosen, made)
    by_prompt = parts.rows // frame.per_prompt
    waits = torch.isin(by_prompt, by_prompt[parts.incomplete(event)])
    _write(step, event, frame, prompts, parts, ~waits)
    left = parts.rows[waits]
    step.carried[event.frame] = CarriedRows(step.number, parts.tokens.gather(left), parts.logprobs.gather(left),
                                            RaggedRows(left, torch.ones_like(left), parts.finished[waits]))


def last_part(event: Generate, frame: IndexedFrame) -> int:
    """Tokens that are left for the last step of a response."""
    return event.sampling.max_new_tokens - (frame.iterations - 1) * event.per_step


def _ages(rows: torch.Tensor, frame: IndexedFrame) -> torch.Tensor:
    """[S] int64: how many steps ago each row began."""
    return rows // (frame.count // frame.iterations)


def _under_way(step: StepState, event: Generate, frame: IndexedFrame, prompt_rows: torch.Tensor) -> _Parts:
    """What this rank has of the responses that are under way, those that begin now included."""
    each = torch.arange(frame.per_prompt, device=prompt_rows.device)
    mine = (prompt_rows[:, None] * frame.per_prompt + each).flatten()
    new = mine[_ages(mine, frame) == 0]
    before = step.carried.get(event.frame)
    if before is None:
        if step.number > 1:
            raise internal_error(f"nothing is known of the responses of step {step.number - 1}", "generate")
        tokens, logprobs = (RaggedRows(new, torch.zeros_like(new), torch.empty(0, dtype=d, device=new.device))
                            for d in (torch.int64, torch.float32))
        return _Parts(new, tokens, logprobs, torch.zeros_like(new, dtype=torch.bool))
    if before.step != step.number - 1:
        raise internal_error(f"step {step.number} continues the responses of step {before.step}", "generate")
    old = before.numbered(frame.count // frame.iterations).among(mine)
    rows, order = torch.cat([new, old.finished.ids]).sort()
    none = torch.zeros_like(new)
    tokens, logprobs = (RaggedRows.join([RaggedRows(new, none, x.data[:0]), x]) for x in (old.tokens, old.logprobs))
    return _Parts(rows, tokens, logprobs, torch.cat([none.to(torch.bool), old.finished.data])[order])


def _batch(step: StepState, frame: IndexedFrame, prompts: RaggedRows, parts: _Parts, chosen: torch.Tensor, seed: int
           ) -> PackedBatch:
    """Some responses, behind their prompts, as a backend continues them."""
    rows = parts.rows[chosen]
    behind, so_far = prompts.gather(rows // frame.per_prompt), parts.tokens.gather(rows)
    own = rows % (frame.count // frame.iterations)
    keys = as_if_in_step(own, step.index - _ages(rows, frame), seed, step.index)
    return PackedBatch(keys, behind.sizes, so_far.sizes, _interleaved(behind, so_far))


def _interleaved(first: RaggedRows, second: RaggedRows) -> torch.Tensor:
    """The entries of each row of `first`, and behind them those of the same row of `second`."""
    count = len(first.sizes)
    both, sizes = torch.cat([first.data, second.data]), torch.cat([first.sizes, second.sizes])
    order = torch.arange(2 * count, device=sizes.device).view(2, count).T.flatten()
    return both[ragged_indices(sizes.cumsum(0) - sizes, order, sizes[order])]


def _write(step: StepState, event: Generate, frame: IndexedFrame, prompts: RaggedRows, parts: _Parts,
           ended: torch.Tensor) -> None:
    """The values of the step. ended: [S] bool, of all responses of a prompt."""
    rows, device = parts.rows, parts.rows.device
    behind = prompts.gather(rows // frame.per_prompt)
    lens = RowLengths(*(torch.zeros(frame.count, dtype=torch.int64, device=device) for _ in range(2)))
    lens.prompt[rows], lens.response[rows] = behind.sizes, parts.sizes
    step.rows.set_lengths(event.frame, lens)  # 0 for other ranks' rows, until the lengths are exchanged
    ages = _ages(rows, frame).repeat_interleave(parts.sizes)
    behind_by = event.ahead + ages - offsets_within(parts.sizes) // event.per_step
    for name, data in (("tokens", _interleaved(behind, parts.tokens)), ("logprobs", parts.logprobs.data),
                       ("finished", parts.finished), ("ended", ended), ("version", behind_by.float())):
        step.write(f"{event.frame}.{name}", event.spread, rows, data)
