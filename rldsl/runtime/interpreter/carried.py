"""Responses of several steps under way at once, as rows: what a generate event with `per_step` continues and begins.

In: the responses that the step before left (`state/carried.py`), and the rows that begin. Out: `Parts`, all of them in
the numbers of this step, and the batches in which a backend continues some.
Invariant: what is sampled for a response depends on the step and row in which it began and on the position, as without
`per_step`, and on the parameters of the step that samples it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rldsl.diag import internal_error
from rldsl.plan.spaces import IndexedFrame
from rldsl.runtime.backend import GenerationOutput, PackedBatch
from rldsl.runtime.draws import as_if_in_step
from rldsl.runtime.state.carried import CarriedRows
from rldsl.runtime.state.step import StepState
from rldsl.runtime.store import RaggedRows, offsets_within, ragged_indices


@dataclass(frozen=True, slots=True)
class Parts:
    """Responses, [S] rows ascending."""

    rows: torch.Tensor  # [S] int64
    tokens: RaggedRows  # of the responses
    logprobs: RaggedRows  # of the responses
    finished: torch.Tensor  # [S] bool

    @property
    def sizes(self) -> torch.Tensor:
        """[S] int64, tokens."""
        return self.tokens.sizes

    def incomplete(self, most: int) -> torch.Tensor:
        """[S] bool: which have neither ended nor `most` tokens."""
        return ~self.finished & (self.sizes < most)

    def left_for(self, step: int, frame: IndexedFrame, most: int) -> tuple[torch.Tensor, CarriedRows]:
        """[S] bool, whose prompts have responses that are incomplete; and all responses of these prompts, for the step
        after `step`."""
        prompts = self.rows // frame.per_prompt
        waits = torch.isin(prompts, prompts[self.incomplete(most)])
        left = self.rows[waits]
        return waits, CarriedRows(step, self.tokens.gather(left), self.logprobs.gather(left),
                                  RaggedRows(left, torch.ones_like(left), self.finished[waits]))

    def with_more(self, chosen: torch.Tensor, made: GenerationOutput) -> Parts:
        """With what was sampled for the rows that are chosen ([S] bool), in their order."""
        rows, batch = self.rows[chosen], made.batch
        of_response = offsets_within(batch.prompt_lens + batch.response_lens) >= batch.prompt_lens.repeat_interleave(
            batch.prompt_lens + batch.response_lens)
        more = [RaggedRows(rows, batch.response_lens, x) for x in (batch.tokens[of_response], made.logprobs)]
        finished = self.finished.clone()
        finished[chosen] = made.finished
        tokens, logprobs = _appended(self.tokens, more[0], chosen), _appended(self.logprobs, more[1], chosen)
        return Parts(self.rows, tokens, logprobs, finished)


def _appended(rows: RaggedRows, more: RaggedRows, chosen: torch.Tensor) -> RaggedRows:
    """`rows` with the entries of `more` after those of the rows that are chosen ([S] bool)."""
    added = torch.zeros_like(rows.sizes)
    added[chosen] = more.sizes
    return RaggedRows(rows.ids, rows.sizes + added, interleaved(rows, RaggedRows(rows.ids, added, more.data)))


def steps_ago(rows: torch.Tensor, frame: IndexedFrame) -> torch.Tensor:
    """[S] int64: how many steps ago each row began."""
    return rows // (frame.count // frame.iterations)


def under_way(step: StepState, name: str, frame: IndexedFrame, prompt_rows: torch.Tensor) -> Parts:
    """What this rank has of the responses of a frame that are under way, those that begin now included."""
    each = torch.arange(frame.per_prompt, device=prompt_rows.device)
    mine = (prompt_rows[:, None] * frame.per_prompt + each).flatten()
    new = mine[steps_ago(mine, frame) == 0]
    before = step.carried.get(name)
    if before is None:
        if step.number > 1:
            raise internal_error(f"nothing is known of the responses of step {step.number - 1}", "generate")
        tokens, logprobs = (RaggedRows(new, torch.zeros_like(new), torch.empty(0, dtype=d, device=new.device))
                            for d in (torch.int64, torch.float32))
        return Parts(new, tokens, logprobs, torch.zeros_like(new, dtype=torch.bool))
    if before.step != step.number - 1:
        raise internal_error(f"step {step.number} continues the responses of step {before.step}", "generate")
    old = before.numbered(frame.count // frame.iterations).among(mine)
    rows, order = torch.cat([new, old.finished.ids]).sort()
    none = torch.zeros_like(new)
    tokens, logprobs = (RaggedRows.join([RaggedRows(new, none, x.data[:0]), x]) for x in (old.tokens, old.logprobs))
    return Parts(rows, tokens, logprobs, torch.cat([none.to(torch.bool), old.finished.data])[order])


def batch_of(step: StepState, frame: IndexedFrame, prompts: RaggedRows, parts: Parts, chosen: torch.Tensor, seed: int
           ) -> PackedBatch:
    """Some responses, after their prompts, as a backend continues them."""
    rows = parts.rows[chosen]
    behind, so_far = prompts.gather(rows // frame.per_prompt), parts.tokens.gather(rows)
    own = rows % (frame.count // frame.iterations)
    keys = as_if_in_step(own, step.index - steps_ago(rows, frame), seed, step.index)
    return PackedBatch(keys, behind.sizes, so_far.sizes, interleaved(behind, so_far))


def interleaved(first: RaggedRows, second: RaggedRows) -> torch.Tensor:
    """The entries of each row of `first`, and after them those of the same row of `second`."""
    count = len(first.sizes)
    both, sizes = torch.cat([first.data, second.data]), torch.cat([first.sizes, second.sizes])
    order = torch.arange(2 * count, device=sizes.device).view(2, count).T.flatten()
    return both[ragged_indices(sizes.cumsum(0) - sizes, order, sizes[order])]
