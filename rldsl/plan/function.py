"""A user's Python function, as a plan names it. By itself, for the processes that call it load little else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Returns = Literal["seq", "prompt", "prompts", "prompts?"]

@dataclass(frozen=True, slots=True)
class Function:
    """The compiler records the hashes and never imports the file."""

    id: str
    path: str  # of the file, relative to the working directory
    name: str  # of the function in it
    sha256: str  # of the file's bytes
    # for each row: one number (seq, or prompt for rows of prompts), or the text of a prompt (prompts), which may be
    # missing (prompts?)
    returns: Returns = "seq"
    # (name, path, sha256) of the local modules that the file imports (`plan/local_modules.py`)
    modules: tuple[tuple[str, str, str], ...] = ()

    @property
    def returns_text(self) -> bool:
        """Whether it returns prompts, and not numbers."""
        return self.returns.startswith("prompts")
