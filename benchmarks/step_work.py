"""The work of one measured training step, the same for every system that does it; and how its time is told.

In: a `Work`, as JSON on the command line of a system's process. Out: its `Times`, as the last line of standard output.
Nothing heavy is imported here: a peer's process has only what the peer needs.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

WARM = 2  # steps that do not count
CHARACTERS = "0123456789+-*=abcdefghijklmnopqrstuvwxyz ?.,"


@dataclass(frozen=True, slots=True)
class Work:
    """folder: with models/sft, models/rm, data/prompts.jsonl and data/answers.jsonl. batch: prompts, or answers of sft,
    a step. n: samples of each prompt. prompt, tokens: the most tokens of a prompt and of a response. updates: optimizer
    steps a step. ref: whether GRPO has a reference model. ranks: of data parallelism, with one thread each."""

    name: str
    folder: str
    steps: int
    batch: int
    n: int = 1
    prompt: int = 32
    tokens: int = 64
    updates: int = 1
    ref: bool = False
    lr: float = 1e-5
    seed: int = 1
    ranks: int = 1

    @property
    def base(self) -> str:
        return f"{self.folder}/models/sft"

    @property
    def rm(self) -> str:
        return f"{self.folder}/models/rm"

    def rows(self, name: str) -> list[dict[str, str]]:
        return [json.loads(line) for line in Path(self.folder, f"data/{name}.jsonl").read_text().splitlines()]


@dataclass(slots=True)
class Times:
    """Of each step that counts: wall, CPU seconds of the process and of those that it started, tokens in its
    sequences."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)


def children(pid: int | str = "self") -> float:
    """CPU seconds of the processes that a process has started and that live, and of theirs (Linux; elsewhere 0)."""
    try:
        found = [c for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
        used = [Path(f"/proc/{c}/stat").read_text().rpartition(")")[2].split()[11:13] for c in found]
    except OSError:  # one has ended meanwhile
        return 0.0
    return sum(int(x) for both in used for x in both) / os.sysconf("SC_CLK_TCK") + sum(map(children, found))


class Clock:
    """`mark` at the end of each step, warm ones included, and once before the first."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float]] = []  # wall and CPU seconds, without those of the marks themselves
        self.own = 0.0  # wall seconds of the marks so far
        self.own_cpu = 0.0

    def mark(self) -> None:
        began, cpu = time.perf_counter(), time.process_time()
        self.marks.append((began - self.own, cpu - self.own_cpu + children()))
        self.own_cpu += time.process_time() - cpu
        self.own += time.perf_counter() - began

    def times(self, tokens: Sequence[float]) -> Times:
        """tokens: of every step."""
        wall, cpu = ([b[i] - a[i] for a, b in zip(self.marks[WARM:], self.marks[WARM + 1 :])] for i in (0, 1))
        return Times(wall, cpu, list(tokens[WARM:]))


def share_of_digits(text: str) -> float:
    """The reward: 0 to 1."""
    return sum(c.isdigit() for c in text) / max(len(text), 1)


def write_data(folder: Path, count: int, prompt: int, tokens: int, seed: int = 0) -> None:
    """Prompts of a quarter of `prompt` to `prompt` characters, and answers of 1 to `tokens`, most of them short."""
    draw = random.Random(seed)

    def text(size: int) -> str:
        return "".join(draw.choices(CHARACTERS, k=size))

    rows = [{"prompt": text(draw.randint(prompt // 4, prompt)),
             "answer": text(max(1, min(tokens, int(draw.lognormvariate(0, 0.8) * tokens / 4))))} for _ in range(count)]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name in ("prompts", "answers"):
        lines = (json.dumps(r if name == "answers" else {"prompt": r["prompt"]}) + "\n" for r in rows)
        (folder / f"data/{name}.jsonl").write_text("".join(lines))


def end_with(parent: int) -> None:
    """End this process within a second of the one that started it, even if that was killed."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def serve(systems: dict[str, Callable[[Work], Times]]) -> None:
    """The main function of a system's process: argv[1] is the `Work`, whose name begins with that of the workload."""
    end_with(os.getppid())
    work = Work(**json.loads(sys.argv[1]))
    print(json.dumps(asdict(systems[work.name.partition(" ")[0]](work))), flush=True)
