"""Rows and what they have: data sources, spaces, frames, values, and what of them persists over steps.

- A *space* numbers rows 0..count-1 by the sample, never by a rank. Spaces are trees: completions lie below prompts.
- A *frame* is a set of sequences of one step that values range over: the prompts of a batch, the completions of a
  `generate`, the chosen side of pairs. It has one sequence for each row of a space.
- A *value* has numbers for each row of a frame: one per row, per token, ...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rldsl.plan.expr import Level

PROMPTS = "prompts"  # of rows with several answers: the frame of their prompts is NAME.prompts
INDEX = "index"  # value of such answers: the place of each among those of its row, from 0
PICKED = "pick_index"  # value of what `pick` has chosen: the place of each among those of its prompt, from 0
# row format -> what its columns are for
ROLES = {"prompts": ("prompt",), "answers": ("prompt", "answer"), "pairs": ("prompt", "chosen", "rejected")}


@dataclass(frozen=True, slots=True)
class Data:
    """A data source."""

    name: str  # in the program
    format: Literal["jsonl", "parquet", "hf"]  # of the files
    path: str  # a file, or a directory for "hf"
    # which columns it has by role (`ROLES`); all other columns reach Python functions
    row_format: Literal["prompts", "answers", "pairs"]
    batch: int  # rows (prompts, or pairs) per step
    columns: tuple[tuple[str, str], ...]  # (role, column name)
    tokenizer: str  # the model directory whose tokenizer is used
    shuffle: bool = True  # in every epoch
    max_prompt_tokens: int = 0  # 0: no limit
    max_answer_tokens: int = 0  # 0: no limit
    numbers: tuple[str, ...] = ()  # columns that are values: one number per row
    over_long: Literal["truncate", "drop", "error"] = "truncate"  # what is done with rows above a limit
    answers: int = 0  # of each row, with row format "answers"; 0: one, and a row is a sequence
    images: str = ""  # the column with the images of each row; "": rows have none
    max_image_tokens: int = 0  # of the images of a row together; 0: no limit but that of the prompt


@dataclass(frozen=True, slots=True)
class Space:
    """Numbered rows 0..count-1, a node of a tree: row r belongs to row r // fan of the parent, so ancestors are found
    by division. What a `repeat ... until` collects nests, too: row r of iteration t is row t * count + r of all."""

    id: str  # unique in a plan
    count: int  # rows
    parent: str = ""  # id of the space that its rows belong to; "": a root
    fan: int = 1  # rows of each row of the parent; 1 for a root
    of: str = ""  # id of the space that this one is a selection of, whose row numbers it keeps; "": none
    iterations: int = 1  # of a root that a `repeat ... until` or an `eval` collects: how many batches
    # of a root that concatenates the rows of other spaces: (space, number that its row 0 has here), in order
    parts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """Sequences of one step, one for each row of a space. `plan/spaces.py` has what follows from its space."""

    id: str  # unique in a plan
    row_space: str  # id; frames with the same one (the two sides of a pair) combine sequence by sequence
    data: str  # the source of its prompts
    max_prompt_tokens: int  # per row; bounds memory
    max_response_tokens: int  # per row; bounds memory
    temperature: float = 1.0  # of its log-probabilities
    # the model directory whose tokenizer made its tokens; "": that of its data source
    tokenizer: str = ""
    selected_from: str = ""  # the frame that this one is a selection of; "": none
    picked_from: str = ""  # the frame of which this one has one row for each prompt; "": none
    # the frame whose lengths say which rows are present (a row without tokens is absent); "": all are
    present_in: str = ""
    label: str = ""  # what people call it, where its id is a name of the compiler's (`plan/naming.py`)
    # turns of the model in a row, at most. With 0 a response follows a prompt; else both are in pieces, and in its
    # tokens those that the environment wrote are stored as ~id (`plan/turns.py`)
    max_turns: int = 0


# values of a frame, each where its sequences have it; turn_sizes: how many tokens each turn of a conversation has
SEQUENCE_VALUES = ("tokens", "logprobs", "finished", "turn_sizes")
# (name, level) of further values of conversations: what `get_reward` returned, turns of the model, what stopped it
# (`plan/turns.py`), which of the branches of its conversation it is, from 0, how many these are, and the reward of each
# turn
CONVERSATION_VALUES: tuple[tuple[str, Level], ...] = (
    ("reward", "seq"), ("turns", "seq"), ("stopped", "seq"), ("branch", "seq"), ("branches", "seq"),
    ("turn_reward", "turn"))
# of fields of sequences; programs cannot choose them
FIELD_NAMES = (*SEQUENCE_VALUES, "lengths", "columns", INDEX, PICKED)


@dataclass(frozen=True, slots=True)
class Value:
    """A named result."""

    id: str  # unique in a plan
    frame: str  # id
    level: Level  # what it has one element for: an entry, a token, a turn, a sequence, a prompt, or the whole batch
    # the entries of a row. tokens: one per prompt and response token; response: one per response token; turn: as many
    # as the frame may have turns, those after the last turn are padding; row, prompt,
    # batch: one each; columns: the data columns as text; lengths: prompt length, response length; row_numbers: the
    # number of the row in its data source; table: no rows of a frame, but one entry per row of a data source; cache:
    # keys and values of the sequence, in the form of the backend, on the ranks that computed them; stored: all rows of
    # a replay buffer; entry: `width` per response token; hidden: the last hidden state before each response token, from
    # which the log-probs of the whole vocabulary follow; array: `width` numbers of the whole batch (`plan/arrays.py`)
    extent: Literal["tokens", "response", "turn", "row", "prompt", "batch", "columns", "lengths", "row_numbers",
                    "table", "cache", "stored", "entry", "hidden", "array"]
    dtype: Literal["f32", "i64", "bool", "text"] = "f32"  # of an element
    # what people call it, where its id is a name of the compiler's: "mean(r by prompt) (ppo.rlf:12)"
    label: str = ""
    width: int = 1  # numbers for each response token, of extents "entry" and "hidden"; numbers of an "array"
    entries: str = ""  # at level entry: its space (`plan/entries.py`)

    @property
    def ragged(self) -> bool:
        """Whether rows have different numbers of entries, by the lengths of their sequences."""
        return self.extent in ("tokens", "response", "entry", "hidden")


@dataclass(frozen=True, slots=True)
class State:
    """A value that persists over steps: one number, or one for each row of a data source."""

    value: str  # id
    spread: str  # of granularity "all": every rank of its mesh holds the value
    initial: float  # before the first step
    data: str = ""  # the source whose rows have a number each (a value of extent "table"); "": one number


@dataclass(frozen=True, slots=True)
class StoredField:
    """A value of each row of a replay buffer."""

    name: str  # "tokens", "logprobs", or of `with`
    extent: Literal["tokens", "response", "row"]  # as of a `Value`
    dtype: Literal["f32", "i64", "bool"]  # as of a `Value`


@dataclass(frozen=True, slots=True)
class ReplayBuffer:
    """Rows that persist over steps: `buffer good = rows(capacity=4096)`. The oldest leave when it is full. Each rank of
    the spread holds all rows, in host memory, so that rows are drawn and checkpoints resumed without communication."""

    value: str  # id of the value that stands for all of its rows
    spread: str  # of granularity "all"
    capacity: int  # rows
    fields: tuple[StoredField, ...]  # what each row has
    # of the sequences: as of the frames that are stored, and of those that are sampled
    data: str
    max_prompt_tokens: int  # per row
    max_response_tokens: int  # per row
    temperature: float = 1.0  # of the log-probs
    tokenizer: str = ""  # as of a `Frame`
