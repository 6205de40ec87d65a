"""A user's Python function or environment, as a plan names it. In a separate module: the processes that call it load
little else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

ROW_KEYS = ("prompt", "completion", "prompt_ids", "completion_ids", "finished")  # of what it gets of a row
ARGUMENT = "argument "  # how an attribute of a `py` node begins that names the frame of a further argument
Attributes = tuple[tuple[str, object], ...]
Text = str | list[dict[str, Any]]  # a prompt: a string, or chat messages
Result = float | Text | None  # of a row; None: no prompt
Returns = Literal["seq", "prompt", "prompts", "prompts?", "env"]


@dataclass(frozen=True, slots=True)
class Function:
    """A function, or the class of an environment. The compiler records the hashes and never imports the file."""

    id: str  # unique in a plan
    path: str  # of the file, relative to the working directory
    name: str  # of the function or class in it
    sha256: str  # of the file's bytes
    # for each row: one number (seq, or prompt for rows of prompts), or the text of a prompt (prompts), which may be
    # missing (prompts?); env: a class, each of whose objects talks with a model (`GenerateSpec.conversation`)
    returns: Returns = "seq"
    # (name, path, sha256) of the local modules that the file imports (`plan/local_modules.py`)
    modules: tuple[tuple[str, str, str], ...] = ()
    # of an environment: the columns of data that its `reset` needs, each a parameter without a default
    columns: tuple[str, ...] = ()

    @property
    def returns_text(self) -> bool:
        """Whether it returns prompts, and not numbers."""
        return self.returns.startswith("prompts")


def call_attributes(rows: str, given: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """The frames of a call, as attributes of a `py` node. rows: the frame for whose rows it gives results. given: (name
    of the argument, frame whose rows it gets); the function gets the first as the row itself, others by name."""
    first = given[0][1]
    return ("frame", rows), *((("first", first),) if first != rows else ()), *(
        (f"{ARGUMENT}{name}", frame) for name, frame in given[1:])


def frames_of_call(attributes: Attributes) -> tuple[tuple[str, str], ...]:
    """(name of the argument, frame) of what the call with these attributes gets; "" names the row itself."""
    by_name = dict(attributes)
    more = ((name.removeprefix(ARGUMENT), str(frame)) for name, frame in attributes if name.startswith(ARGUMENT))
    return ("", str(by_name.get("first", by_name.get("frame", "")))), *more
