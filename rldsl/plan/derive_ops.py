"""How a frame may be made from another one: the operations of the event `derive`.

In: nothing. Out: `DERIVE_OPS`, the facts by which every reader of a plan treats an operation. What an operation
computes is in one table for each side: which rows and values it makes in `runtime/interpreter/derive.py`, what has to
hold for it in `verify/derive.py`. docs/howto/add-a-derive-op.md adds one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DeriveOpName = Literal["where", "restrict", "pick", "others", "whole", "text", "prefixes", "concat", "reprompt"]
OverLong = Literal["error", "truncate", "drop"]  # what is done with a text above the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class DeriveOp:
    """What an operation does, beyond which rows it makes."""

    verb: str  # what people read of it: "select" in "select kept"
    # the frame's rows begin with it: it writes their tokens, and an exchange of their lengths follows. False: the rows
    # and their lengths exist already, and it makes values alone
    makes_rows: bool = True
    # the tokens of each row are those of the source's row that it lies in, or a prefix of them
    keeps_prefixes: bool = False
    keeps_turns: bool = True  # its rows are conversations where those of the source are
    several: bool = False  # it reads rows of several frames (`parts`), and makes each value of one of each
    calls_python: bool = False  # it calls a user's function, so that each row must be on one rank alone
    whole_prompts: bool = False  # it needs all rows of a prompt at once
    key: Literal["", "bool", "f32"] = ""  # dtype of the source's seq value that says which rows there are; "": none


DERIVE_OPS: Mapping[DeriveOpName, DeriveOp] = {
    # the rows whose condition holds, under the same numbers
    "where": DeriveOp(verb="select", key="bool", keeps_prefixes=True),
    "restrict": DeriveOp(verb="select", makes_rows=False),  # values of a frame, for the rows of a selection of it
    # of each prompt the row with the largest number, the first of equals
    "pick": DeriveOp(verb="pick", key="f32", whole_prompts=True),
    "others": DeriveOp(verb="pair up", whole_prompts=True),  # for each row the other rows of its prompt
    # all that models generated of a sequence, from the prompt with which its chain of continuations begins
    "whole": DeriveOp(verb="join", keeps_prefixes=True),
    # prompts that a Python function writes about the rows, tokenized where the rows are
    "text": DeriveOp(verb="write", calls_python=True, keeps_turns=False),
    # prompts that are the beginnings of each row's response
    "prefixes": DeriveOp(verb="cut", keeps_prefixes=True, keeps_turns=False),
    # the responses of a frame, each after another prompt
    "reprompt": DeriveOp(verb="reprompt", keeps_turns=False),
    "concat": DeriveOp(verb="concatenate", several=True),  # the rows of several frames as those of one
}


def continued_frame(prompts: str, sources: Mapping[str, tuple[DeriveOpName, str]]) -> str:
    """The frame whose sequences begin as those of `prompts` do: itself, or what it was derived from.

    sources: derived frame -> (operation, frame that it is made from)."""
    seen: set[str] = set()
    while prompts in sources and prompts not in seen:
        seen.add(prompts)
        op, source = sources[prompts]
        if op not in DERIVE_OPS or not DERIVE_OPS[op].keeps_prefixes:
            break
        prompts = source
    return prompts
