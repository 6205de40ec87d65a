"""Decoding while tools work: conversations that wait for slow tools next to others that decode.

    python -m benchmarks.tools [ROUNDS] [--cpu | --wall]

One process, one thread, one random model in float32, 64 conversations of up to 4 turns, whose lengths the model draws
(of about 50 tokens it takes each with about the same probability, and one of them ends a turn). All cases of a round
sample the same tokens, as far as rounding lets them:

- without tools: environments answer at once
- tools of 100 ms: each answer takes as long, while the other conversations decode
- in lock-step: the same tools, all at once, but nobody continues before all have been answered, as trainers do that
  call `generate` once per turn
- 16 slots: the same with a KV cache of 16 conversations at a time, first with `waiting=keep`, then with slots that
  are given away

Each is measured by two clocks, one after the other in each round, and rounds alternate in their order:

- wall: wall time; environments are real ones, each in a separate process
- cpu: the processor time of the rank; tools answer by that clock, in its process, and when nothing can be decoded, the
  clock is set forward. Other programs on the machine do not change it, but what the processes of environments cost is
  not in it.

Printed are the model's tokens per second, and their share of those without tools in the same round: medians over the
rounds. Gate: with tools of 100 ms at least 0.8 of the tokens per second without tools, by the processor's clock, and by
wall time if the rank had a processor to itself (0.9 of one, without tools): on a loaded machine the answers of tools
wait for a processor, too, and wall time is printed and not judged.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rldsl.plan.events import Sampling
from rldsl.plan.function import Function
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.environments import Arrival
from rldsl.runtime.interpreter.conversations import Environments, RowTalk, open_conversations
from tests.backend_torch.shards import make_shard, plan_model
from tests.tiny import EOS, make_model
from tests.world import run_world

CONVERSATIONS, TURNS, TOOL, GATE = 64, 4, 0.1, 0.8
CLOCKS = ("wall", "cpu")
ALONE = 0.9  # processors that a rank has which shares its own with nobody
SAMPLING = Sampling(max_new_tokens=64)
LIMITS = Conversation(("game",), max_turns=TURNS, max_tokens=512, turn_timeout=60.0)
MODEL: dict[str, Any] = dict(hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
                             head_dim=32, max_position_embeddings=1024, scale=0.02)
TEMPLATE = ("{% for m in messages %}{% if m.role == 'assistant' %}={{ m.content }}" + EOS +
            "{% else %}*{{ m.content }}*{% endif %}{% endfor %}{% if add_generation_prompt %}={% endif %}")
ENVIRONMENT = """
import time

class Game:
    def __init__(self):
        self.extras = {}

    def init(self, prompt):
        self.seconds, self.turns = self.extras["seconds"], 0
        return prompt, {}

    def step(self, text):
        time.sleep(self.seconds)
        self.turns += 1
        return {"observations": [{"role": "user", "content": "go on"}], "reward": 0.0, "done": self.turns == 4}
"""


@dataclass(frozen=True)
class Case:
    name: str
    seconds: float  # of a tool
    slots: int = 0  # of the KV cache; 0: one for each conversation
    waiting: Waiting = "keep"
    lock_step: bool = False


CASES = (
    Case("without tools", 0.0),
    Case("tools of 100 ms", TOOL),
    Case("  in lock-step", TOOL, lock_step=True),
    Case("16 slots, without tools", 0.0, 16),
    Case("16 slots, waiting=keep", TOOL, 16),
    Case("16 slots, waiting=offload", TOOL, 16, "offload"),
    Case("16 slots, waiting=recompute", TOOL, 16, "recompute"),
)


@dataclass
class LockStep:
    """Gives answers out only when every conversation that is alive has one."""

    talk: Any
    alive: int = 0
    held: list[Arrival] = field(default_factory=list)

    def begin(self, row: int) -> None:
        self.alive += 1
        self.talk.begin(row)

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        self.talk.said(row, ids, ended_by_limit, logprobs)

    def finish(self, row: int, why: Any) -> None:
        self.talk.finish(row, why)

    def arrivals(self, wait: bool) -> list[Arrival]:
        found = self.talk.arrivals(wait)
        self.alive -= sum(a.ended for a in found)
        ended = [a for a in found if a.ended]
        self.held += [a for a in found if not a.ended]
        if wait and not ended and len(self.held) < self.alive:
            return self.arrivals(wait)
        if len(self.held) < self.alive:
            return ended
        given, self.held = self.held, []
        return ended + given


@dataclass
class CpuClock:
    """Tools that answer by the processor time of this process, with the same few tokens each."""

    seconds: float  # of a tool
    reply: tuple[int, ...]  # what each answer adds
    skipped: float = 0.0  # seconds that the clock was set forward
    turns: dict[int, int] = field(default_factory=dict)
    under_way: list[tuple[float, Arrival]] = field(default_factory=list)

    def now(self) -> float:
        return time.process_time() + self.skipped

    def begin(self, row: int) -> None:
        self.turns[row] = 0
        self.under_way.append((self.now(), Arrival(row, self.reply, False, None, None, None)))

    def said(self, row: int, ids: Sequence[int], ended_by_limit: bool, logprobs: Sequence[float]) -> None:
        self.turns[row] += 1
        last = self.turns[row] == TURNS
        self.under_way.append((self.now() + self.seconds, Arrival(
            row, () if last else self.reply, last, "done" if last else None, 0.0 if last else None, None)))

    def finish(self, row: int, why: Any) -> None:
        self.under_way.append((self.now(), Arrival(row, (), True, why, 0.0, None)))

    def arrivals(self, wait: bool) -> list[Arrival]:
        if wait:
            self.skipped += max(min(at for at, _ in self.under_way) - self.now(), 0.0)
        now = self.now()
        found = [a for at, a in self.under_way if at <= now]
        self.under_way = [(at, a) for at, a in self.under_way if at > now]
        return found


@dataclass(frozen=True)
class Run:
    """One case in one round."""

    seconds: float  # by its clock
    processor: float  # seconds of processor time of the rank
    tokens: int  # of the model
    given_away: int  # slots

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def measure(rank: int, folder: str, rounds: int, clocks: Sequence[str]) -> dict[tuple[str, str], list[Run]]:
    """(clock, case) -> its run in each round."""
    path = Path(folder) / "envs.py"
    game = Function("game", str(path), "Game", hashlib.sha256(path.read_bytes()).hexdigest(), "env")
    from transformers import AutoTokenizer

    from rldsl.runtime.data.tokens import Tokens

    directory = f"{folder}/model"
    tokens = Tokens(AutoTokenizer.from_pretrained(directory), directory, {"prompt": "prompt"})
    shard = make_shard(plan_model(directory), rank)
    opened = Environments({0: open_conversations(game, LIMITS, SAMPLING, tokens, 0)})
    reply = tuple(tokens.tokenizer("*go on*=", add_special_tokens=False)["input_ids"])

    def run(case: Case, clock: str, step: int, count: int) -> Run:
        columns = {row: {"prompt": [{"role": "user", "content": f"{row} + 1"}], "seconds": case.seconds}
                   for row in range(count)}
        talk: Any = CpuClock(case.seconds, reply) if clock == "cpu" else RowTalk(opened, 0, columns, "prompt", 1)
        now = talk.now if clock == "cpu" else time.perf_counter
        started, processor = now(), time.process_time()
        out = shard.converse(torch.arange(count), SAMPLING, LIMITS, LockStep(talk) if case.lock_step else talk, seed=1,
                             step=step, max_num_seqs=case.slots, waiting=case.waiting)
        return Run(now() - started, time.process_time() - processor, len(out.logprobs), out.given_away)

    run(CASES[0], clocks[0], 0, 8)  # warms up
    found: dict[tuple[str, str], list[Run]] = {(clock, case.name): [] for clock in clocks for case in CASES}
    for turn in range(1, rounds + 1):
        for case in CASES if turn % 2 else CASES[::-1]:
            for clock in clocks:
                found[clock, case.name].append(made := run(case, clock, turn, CONVERSATIONS))
                print(f"round {turn}, {clock}: {case.name}: {made.rate:.0f} tokens/s", flush=True)
    opened.close()
    return found


def shares(found: dict[tuple[str, str], list[Run]], clock: str, case: Case) -> list[float]:
    """Of each round: the rate over that without tools."""
    base = "16 slots, without tools" if case.slots else "without tools"
    return [a.rate / b.rate for a, b in zip(found[clock, case.name], found[clock, base], strict=True)]


def main() -> None:
    clocks = [c for c in CLOCKS if f"--{c}" in sys.argv] or CLOCKS
    rounds = next((int(x) for x in sys.argv[1:] if x.isdigit()), 3)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        make_model(folder / "model", **MODEL)
        config = folder / "model" / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        (folder / "envs.py").write_text(ENVIRONMENT)
        (found,) = run_world(1, measure, place, rounds, clocks, timeout=3000.0)
    print(f"{CONVERSATIONS} conversations of up to {TURNS} turns, {rounds} rounds")
    failed = False
    for clock in clocks:
        for case in CASES:
            runs, of = found[clock, case.name], shares(found, clock, case)
            print(f"{clock:<5}{case.name:<30}{statistics.median(r.rate for r in runs):8.0f} tokens/s  "
                  f"{statistics.median(of):5.2f} ({min(of):.2f} .. {max(of):.2f})  "
                  f"{statistics.median(r.tokens for r in runs):6.0f} tokens  "
                  f"{statistics.median(r.given_away for r in runs):4.0f} slots given away")
        share = statistics.median(shares(found, clock, CASES[1]))
        had = statistics.median(r.processor / r.seconds for r in found[clock, CASES[0].name]) if clock == "wall" else 1.0
        judged = had >= ALONE
        failed |= judged and share < GATE
        print(f"{clock}: gate {GATE}: {share:.2f} {'held' if share >= GATE else 'FAILED' if judged else 'missed'}"
              + ("" if judged else f", not judged: the rank had {had:.2f} of a processor"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
