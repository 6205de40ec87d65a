"""The rows of a replay buffer on one rank: all of them, in host memory.

In: rows of a frame, in ascending order. Out: rows that are drawn; and what a checkpoint stores of them, by shares, and
the buffer from all shares. Invariants: a row has a number that counts all rows that were ever added, from 0; the rows
that are there are those with the highest numbers, at most `capacity`, in the order of their numbers. So every rank has
equal rows whatever the placement, and so has a run that resumes with another number of ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from rldsl.plan.model import ReplayBuffer
from rldsl.runtime.store import RaggedRows
from rldsl.runtime.weighted_sample import sample_by_weight

PREFIX = "rows of buffer"  # of the names of tensors in a checkpoint; no model or state has a name with a blank
DTYPES = {"f32": torch.float32, "i64": torch.int64, "bool": torch.bool}
COUNT, LENGTHS, TEMPERATURE = "number of rows added", "lengths", "sampling temperature"


class OtherRows(Exception):
    """The rows of a sound checkpoint are not those that the program keeps; the message says in what."""


@dataclass(frozen=True, slots=True)
class StoredRow:
    """One row; its tensors are on the CPU."""

    prompt: int  # tokens of its prompt
    response: int  # tokens of its response
    values: Mapping[str, torch.Tensor]  # field -> its entries


class ReplayRows:
    """The rows of one buffer."""

    def __init__(self, record: ReplayBuffer):
        self.record = record
        self.rows: deque[StoredRow] = deque(maxlen=record.capacity)  # the oldest first, which leave first
        self.added = 0  # rows, in the whole run

    def add(self, prompt: Sequence[int], response: Sequence[int], values: Mapping[str, RaggedRows]) -> None:
        """Add rows. prompt, response: tokens of each. values: field -> the entries of the same rows."""
        parts = {name: held.data.to("cpu", DTYPES[self._dtype(name)], copy=True).split(held.sizes.tolist())
                 for name, held in values.items()}
        for i, (p, r) in enumerate(zip(prompt, response, strict=True)):
            self.rows.append(StoredRow(p, r, {name: of[i].clone() for name, of in parts.items()}))
        self.added += len(prompt)

    def numbers(self, name: str) -> torch.Tensor:
        """[rows]: a field that each row has one number of, the oldest row first."""
        return torch.cat([row.values[name] for row in self.rows])

    def draw(self, k: int, weights: np.ndarray, seed: int, step: int) -> list[StoredRow]:
        """Up to k rows without replacement, in the order of their numbers (`weighted_sample.py`). weights: [rows], the
        oldest first. Errors: ValueError for a weight that is negative or not finite."""
        numbers = np.arange(self.added - len(self.rows), self.added)
        return [self.rows[i] for i in sorted(sample_by_weight(weights, k, seed, step, numbers).tolist())]

    def ragged(self, name: str, drawn: Sequence[StoredRow], device: torch.device) -> RaggedRows:
        """A field of rows that were drawn, as rows 0, 1, ... of a frame."""
        if not drawn:
            return RaggedRows.empty(DTYPES[self._dtype(name)], device)
        sizes = torch.tensor([row.values[name].numel() for row in drawn])
        data = torch.cat([row.values[name] for row in drawn])
        return RaggedRows(torch.arange(len(drawn), device=device), sizes.to(device), data.to(device))

    def _dtype(self, name: str) -> str:
        return next(f.dtype for f in self.record.fields if f.name == name)

    # ---------------------------------------------------------------------------------------- checkpoints

    def share(self, rank: int, world: int) -> dict[str, torch.Tensor]:
        """What one rank writes to a checkpoint: name -> tensor. Each rank writes a run of rows, the oldest first; the
        end of a name says which part of the whole tensor it is."""
        n, owner = len(self.rows), f"{PREFIX}|{self.record.value}"
        first, stop = rank * n // world, (rank + 1) * n // world
        out = {f"{owner}|{COUNT}|0:1": torch.tensor([self.added]),
               f"{owner}|{TEMPERATURE}|0:1": torch.tensor([self.record.temperature])} if rank == 0 else {}
        if first == stop:
            return out
        rows = list(self.rows)
        mine = rows[first:stop]
        out[f"{owner}|{LENGTHS}|{first}:{stop},0:2"] = torch.tensor([[r.prompt, r.response] for r in mine])
        for f in self.record.fields:
            ends = [0, *accumulate(row.values[f.name].numel() for row in rows)]
            if ends[stop] > ends[first]:
                out[f"{owner}|{f.name}|{ends[first]}:{ends[stop]}"] = torch.cat([r.values[f.name] for r in mine])
        return out

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The rows of a checkpoint; of more than the capacity the newest. tensors: field (and `COUNT`, `LENGTHS`) ->
        the complete tensor, of all shares. Errors: ValueError where they do not fit together; OtherRows."""
        lengths = tensors.get(LENGTHS, torch.empty(0, 2, dtype=torch.int64))
        if lengths.dtype != torch.int64 or lengths.ndim != 2 or lengths.shape[1:] != (2,) or int(lengths.min()
                if lengths.numel() else 0) < 0:
            raise ValueError("its lengths are damaged")
        count = tensors[COUNT]
        added = int(count[0]) if count.dtype == torch.int64 and count.shape == (1,) else -1
        if added < len(lengths):
            raise ValueError(f"it has {len(lengths)} rows, but {added} were added")
        prompt, response = lengths.unbind(1)
        parts: dict[str, tuple[torch.Tensor, ...]] = {}
        for f in self.record.fields:
            sizes = {"tokens": prompt + response, "response": response, "row": torch.ones_like(prompt)}[f.extent]
            whole = tensors.get(f.name, torch.empty(0, dtype=DTYPES[f.dtype]))
            if whole.dtype != DTYPES[f.dtype] or whole.shape != (int(sizes.sum()),):
                raise ValueError(f"{f.name} is damaged")
            parts[f.name] = whole.split(sizes.tolist())
        self._check_kind(prompt, response, tensors.get(TEMPERATURE))
        for i, (p, r) in enumerate(lengths.tolist()):
            self.rows.append(StoredRow(p, r, {name: of[i].clone() for name, of in parts.items()}))
        self.added = added

    def _check_kind(self, prompt: torch.Tensor, response: torch.Tensor, temperature: torch.Tensor | None) -> None:
        """Errors: OtherRows. temperature: [1] float32; None in checkpoints of earlier versions."""
        for lengths, most, what in ((prompt, self.record.max_prompt_tokens, "prompt"),
                                    (response, self.record.max_response_tokens, "response")):
            longest = int(lengths.max()) if len(lengths) else 0
            if longest > most:
                raise OtherRows(f"a {what} has {longest} tokens, and the program allows {most}")
        now = torch.tensor([self.record.temperature])
        then = now if temperature is None else temperature
        if then.dtype != now.dtype or then.shape != now.shape:
            raise ValueError("its temperature is damaged")
        if len(prompt) and not then.equal(now):
            raise OtherRows(f"their log-probs are at the temperature {then.item():g}, those of the program at "
                            f"{now.item():g}")


def join_parts(pieces: Sequence[tuple[tuple[int, int], torch.Tensor]]) -> torch.Tensor:
    """One tensor of parts along the first dimension. pieces: (start, stop) of each. Errors: ValueError where parts are
    missing or overlap."""
    at = 0
    for (start, stop), _ in sorted(pieces, key=lambda p: p[0]):
        if start != at:
            raise ValueError("parts of it are missing or overlap")
        at = stop
    return torch.cat([tensor for _, tensor in sorted(pieces, key=lambda p: p[0])])
