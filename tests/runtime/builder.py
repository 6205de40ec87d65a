"""Programs by hand, for tests: a line of methods instead of indices. Frames `gen` (rows R, prompts P), and the two
sides of a pair `won`, `lost` over rows Q."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from rldsl.plan.expr import LEVELS, Level, Node, Program
from rldsl.runtime.interpreter.ragged_index import FrameRows
from tests.frames import frame

FRAMES = {
    "gen": frame("gen", "R", "P", 12, 3, "d", 8, 9),
    "won": frame("won", "Q", "P2", 12, 1, "d", 8, 9),
    "lost": frame("lost", "Q", "P2", 12, 1, "d", 8, 9),
}


def space(frame: str, level: Level) -> str:
    f = FRAMES[frame]
    return {"token": f.id, "seq": f.row_space, "prompt": f.prompt_space, "batch": ""}[level]


@dataclass
class Builder:
    nodes: list[Node] = field(default_factory=list)
    frame: str = "gen"

    def put(self, op: str, args: tuple[int, ...] = (), level: Level = "batch", where: str = "", **attrs: Any) -> int:
        self.nodes.append(Node(op, args, level, where, tuple(attrs.items())))
        return len(self.nodes) - 1

    def input(self, name: str, level: Level, frame: str = "") -> int:
        return self.put("input", (), level, space(frame or self.frame, level), name=name)

    def py(self, name: str, frame: str = "") -> int:
        frame = frame or self.frame
        return self.put("py", (), "seq", space(frame, "seq"), function=name, frame=frame)

    def len(self, frame: str = "") -> int:
        frame = frame or self.frame
        return self.put("len", (), "seq", space(frame, "seq"), frame=frame)

    def at_end(self, x: int, frame: str = "") -> int:
        frame = frame or self.frame
        return self.put("at_end", (x,), "token", frame, frame=frame)

    def to(self, op: str, x: int, level: Level, frame: str = "") -> int:
        return self.put(op, (x,), level, space(frame or self.frame, level), to=level)

    def seq(self, op: str, x: int, *more: int) -> int:
        level: Level = "seq" if op == "last" else "token"
        frame = self.nodes[x].space
        return self.put(op, (x, *more), level, space(frame, level))

    def __call__(self, op: str, *args: int | float | bool) -> int:
        """An elementwise operator; plain numbers become constants."""
        made = [a if type(a) is int else self.put("const", value=a) for a in args]
        finest = max((self.nodes[a] for a in made), key=lambda n: LEVELS.index(n.level))
        return self.put(op, tuple(made), finest.level, finest.space)

    def program(self, **outputs: int) -> Program:
        return Program("p", tuple(self.nodes), tuple(outputs.items()))


def view(frame: str, rows: list[int], lens: list[int]) -> FrameRows:
    """lens: of every row of the frame."""
    per = FRAMES[frame].per_prompt
    return FrameRows(torch.tensor(rows, dtype=torch.int64), torch.tensor([r // per for r in rows], dtype=torch.int64),
                torch.tensor([lens[r] for r in rows], dtype=torch.int64))


def tokens_of(flat: torch.Tensor, lens: list[int], rows: list[int]) -> torch.Tensor:
    """The tokens of some rows, out of those of the whole frame."""
    parts = flat.split(lens)
    return torch.cat([parts[r] for r in rows]) if rows else flat[:0]
