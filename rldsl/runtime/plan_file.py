"""A plan as a rank reads it: the bytes of its file, decoded once.

In: a path, or bytes. Out: the plan, and the id by which dumps, records and emitted programs know it.
Errors: RL0700 the file cannot be read, and those of `plan/codec.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rldsl.diag import fail
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.model import Plan


@dataclass(frozen=True)
class PlanFile:
    """Made by `read` or `from_bytes`."""

    name: str    # what messages call the file
    data: bytes  # its bytes
    plan: Plan   # what they say

    @classmethod
    def read(cls, path: str) -> PlanFile:
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise fail("RL0700", f"the plan cannot be read: {error.strerror}", place=path,
                       help="`rlc compile PROGRAM.rlf` writes plans") from None
        return cls.from_bytes(data, path)

    @classmethod
    def from_bytes(cls, data: bytes, name: str = "the plan") -> PlanFile:
        return cls(name, data, decode(data, name))

    @cached_property
    def id(self) -> str:
        return plan_id(self.data)
