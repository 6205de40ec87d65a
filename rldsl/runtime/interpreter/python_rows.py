"""What users' Python functions get of rows.

In: the rows of a frame at hand, and the frames whose rows the function gets with each of them. Out: a dict for each
row, and its name in messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rldsl.plan.events import split_buffer
from rldsl.runtime.image_tokens import plain_ids
from rldsl.runtime.rewards.user_functions import Row
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.step import StepState


def python_rows(step: StepState, reader: DataReader, reads: tuple[str, ...], frame: str, rows: torch.Tensor,
                given: Sequence[tuple[str, str]]) -> tuple[list[Row], list[str]]:
    """For each of `rows` of `frame`, what a user's function sees: the data columns, the sequence of the first of
    `given`, and those of the others under their names (None where that frame has no such row). And the row's name in
    messages: its number in the step, and its place in the data.

    reads: the buffers of the event. given: (name, frame), whose rows those of `frame` lie in."""
    context = step.context
    record = context.frames[frame]
    columns = next((step.buffers.get(b) for b in reads if split_buffer(b)[0].endswith(".columns")
                    and context.frames[context.values[split_buffer(b)[0]].frame].row_space == record.root_origin),
                   None)
    per_row_of_data = record.count // record.chain[-1].count
    found = [(name, record.count // context.frames[of].count, _sequences(step, reader, reads, of, rows, frame))
             for name, of in given]
    arguments: list[Row] = []
    names: list[str] = []
    for row in rows.tolist():
        place, of_data, _ = columns[row // per_row_of_data] if columns is not None else ("", {}, 0)
        names.append(f"{row} ({place})" if place else str(row))
        argument = dict(of_data)
        for name, per_row, sequences in found:
            sequence = sequences.get(row // per_row)
            argument |= {name: sequence} if name else sequence or {}
        arguments.append(argument)
    return arguments, names


def _sequences(step: StepState, reader: DataReader, reads: tuple[str, ...], frame: str, rows: torch.Tensor,
               of: str) -> dict[int, Row]:
    """Row of `frame` -> its sequence as text and as token ids, for those that rows of the frame `of` lie in.

    Of a conversation the completion begins with the model's first turn, and has what the environment said in between.

    finished: the response is shorter than the most tokens allowed, or its last token ends a sequence. A response that
    a stop string ended on exactly the last allowed token counts as unfinished: its tokens alone cannot show it."""
    record = step.context.frames[frame]
    held = step.read(reads, f"{frame}.tokens")
    wanted = (rows // (step.context.frames[of].count // record.count)).unique()
    wanted = wanted[torch.isin(wanted, held.ids)]
    packed = step.packed(frame, held, wanted)
    tokens = reader.tokens(record)
    decode = tokens.tokenizer.decode
    found: dict[int, Row] = {}
    prompts: dict[tuple[int, ...], str] = {}  # the samples of a prompt have it in common
    at = 0
    ids = plain_ids(packed.tokens.tolist())
    own: list[bool] | None = None if packed.own is None else packed.own.tolist()
    for row, p, r in zip(wanted.tolist(), packed.prompt_lens.tolist(), packed.response_lens.tolist(), strict=True):
        first = p if own is None else own.index(True, at, at + p + r) - at if r else p
        prompt, completion = ids[at : at + first], ids[at + first : at + p + r]
        at += p + r
        key = tuple(prompt)
        if key not in prompts:
            prompts[key] = decode(prompt, skip_special_tokens=True)
        found[row] = {
            "prompt": prompts[key],
            "completion": decode(completion, skip_special_tokens=True),
            "prompt_ids": prompt, "completion_ids": completion,
            "finished": r < record.max_response_tokens or (r > 0 and completion[-1] in tokens.ends),
        }
    return found
