"""What executing a plan costs beside the work of its events.

    python -m benchmarks.interp

walk: CPU microseconds of the executor for each event, over a list of events that do nothing, beyond calling what does
nothing. compute: those of the computations of a GRPO and a PPO step, beyond the same arithmetic written with torch by
hand on the same numbers (gate 50, goal 5, of the walk; a computation's is shown beside what it works for). control:
messages of a steady step on two ranks, by event and by the function that sends them. Messages carry what an event is
for: values, parameters, gradients, hidden states, lengths, metrics. Anything else, or anything outside an event, is
control (gate 0).
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.step_ours import GRPO_REF, PPO, REWARD
from benchmarks.step_work import Work, write_data
from rldsl import api
from rldsl.plan.codec import encode
from rldsl.plan.events import Compute, Event, Free, Generate, Infer, Item, Lengths, Log, Loop, Realloc, Train, Transfer
from rldsl.runtime.interpreter import interpreter
from rldsl.runtime.interpreter.interpreter import Interpreter, execute
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.plan_file import PlanFile
from tests.tiny import make_model
from tests.world import run_world

GATE, GOAL = 50.0, 5.0
EVENTS, TIMES, ROUNDS = 2000, 50, 7
PURPOSE = (Lengths, Transfer, Realloc, Generate, Infer, Train, Compute, Log)  # events whose messages carry something
SENDERS = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
           "all_to_all", "all_to_all_single", "batch_isend_irecv", "send", "recv", "barrier", "all_gather_object",
           "broadcast_object_list", "gather", "scatter", "reduce")
TWO = "place actor.train on mesh(0:2) dp=2\nplace actor.generate on mesh(0:2) tp=2\nplace ref.* on mesh(0:2) pp=2\n"


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU microseconds: of one time, and of the same by hand."""

    name: str
    ours: float
    hand: float


def program(folder: Path, name: str, text: str, place: str = "", steps: int = 3) -> bytes:
    """A compiled plan on a tiny model."""
    for kind, head in (("sft", "causal_lm"), ("rm", "reward_model")):
        if not (folder / "models" / kind).is_dir():
            make_model(folder / "models" / kind, head=head, num_hidden_layers=2)
    w = Work(name, str(folder), steps, batch=8, n=4, prompt=16, tokens=16)
    write_data(folder, 64, w.prompt, w.tokens)
    (folder / "digits.py").write_text(REWARD)
    (folder / f"{name}.rlf").write_text(text)
    rules = folder / "place.rlf"
    rules.write_text(place)
    asked = dict(base=w.base, rm=w.rm, data=f"{folder}/data", steps=steps, batch=w.batch, n=w.n, longest=w.prompt,
                 tokens=w.tokens, updates=1, lr=w.lr)
    return encode(api.compile(str(folder / f"{name}.rlf"), asked, str(rules) if place else None))


def cpu(work: Callable[[], Any], times: int) -> float:
    """Microseconds of one time: the median of some rounds."""
    found = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        for _ in range(times):
            work()
        found.append((time.process_time() - begin) / times * 1e6)
    return statistics.median(found)


def walked(walk: Interpreter) -> Cost:
    """Events that do nothing, walked and called."""
    mesh = walk.state.context.plan.meshes[0].id
    items: list[Item] = [Free(id=0, mesh=mesh, buffers=()) for _ in range(EVENTS)]
    handler = interpreter.HANDLERS[Free]

    def called() -> None:
        for item in items:
            handler(walk.state, item)

    return Cost("walk", cpu(lambda: Interpreter(walk.state, items).run(), 1) / EVENTS, cpu(called, 1) / EVENTS)


def group_norm(walk: Interpreter, e: Compute) -> Callable[[], Any]:
    """Advantages of GRPO, with rewards as a table of groups."""
    reward = _input(walk, e, 0).view(-1, 4)

    def work() -> torch.Tensor:
        return ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()

    return work


def whitened_gae(walk: Interpreter, e: Compute) -> Callable[[], Any]:
    """Rewards with a KL penalty, GAE and whitening of PPO, padded."""
    lens = walk.state.step.rows.lens[e.frames[0]].response
    mask = torch.arange(int(lens.max())) < lens[:, None]
    old, ref, v = (torch.zeros(mask.shape).masked_scatter(mask, torch.randn(int(lens.sum()))) for _ in range(3))
    score = torch.randn(len(lens))

    def work() -> torch.Tensor:
        rewards = -0.1 * (old - ref) * mask
        rewards[torch.arange(len(lens)), lens - 1] += score
        following = torch.cat([v[:, 1:] * mask[:, 1:], torch.zeros_like(v[:, :1])], 1)
        delta, running, adv = (rewards + following - v) * mask, torch.zeros(len(v)), torch.empty_like(v)
        for t in reversed(range(v.shape[1])):
            running = adv[:, t] = delta[:, t] + 0.95 * running
        flat = adv[mask]
        return (flat - flat.mean()) / (flat.var() + 1e-8).sqrt()

    return work


def _input(walk: Interpreter, e: Compute, number: int) -> torch.Tensor:
    return walk.state.step.read(e.reads, e.inputs[number][1]).data.clone()


HAND = {"group_norm": group_norm, "gae": whitened_gae}


def computed(walk: Interpreter, e: Compute, hand: str) -> Cost:
    """A computation of the step under way, again and again."""
    nodes = len(walk.state.context.programs[e.program].nodes)
    return Cost(f"compute, {nodes} operators", cpu(lambda: Interpreter.run_event(walk, e), TIMES),
                cpu(HAND[hand](walk, e), TIMES))


def costs(_: int, plan: bytes, out: str, hand: str) -> list[Cost]:
    """In the second step of a run, on its one rank."""
    found: list[Cost] = []

    class Measured(Interpreter):
        def run_event(self, event: Event) -> None:
            super().run_event(event)
            if self.state.step.number != 2 or not isinstance(event, Compute):
                return
            if not found:
                found.append(walked(self))
            ops = {n.op for n in self.state.context.programs[event.program].nodes}
            wanted = {"group_norm": "input", "gae": "discount"}[hand]
            if wanted in ops and "py" not in ops and len(found) == 1 and len(event.frames) == 1:
                found.append(computed(self, event, hand))

    os.chdir(Path(out).parent)
    execute(PlanFile.from_bytes(plan, "bench.plan"), out, options=Options(overwrite=True),
            run=lambda w: Measured(w.state, w.own, w.recorder).run())
    return found


def messages(_: int, plan: bytes, out: str) -> dict[tuple[str, str], int]:
    """(event or "outside", sender) -> messages of the last step of a run."""
    sent: Counter[tuple[str, str]] = Counter()
    now: list[str] = ["outside"]
    for name in SENDERS:
        setattr(dist, name, _counted(getattr(dist, name), name, sent, now))

    class Counting(Interpreter):
        def run_event(self, event: Event) -> None:
            now[0] = type(event).__name__ if isinstance(event, PURPOSE) else f"{type(event).__name__} (no purpose)"
            super().run_event(event)
            now[0] = "outside"

        def turns(self, loop: Loop) -> Iterator[int]:
            steps = self.depth == 0
            for i in super().turns(loop):
                if steps:
                    sent.clear()
                yield i
            if steps:
                found.update(sent)

    found: Counter[tuple[str, str]] = Counter()
    os.chdir(Path(out).parent)
    execute(PlanFile.from_bytes(plan, "bench.plan"), out, options=Options(overwrite=True),
            run=lambda w: Counting(w.state, w.own, w.recorder).run())
    return dict(found)


def _counted(plain: Callable[..., Any], name: str, sent: Counter[tuple[str, str]],
             now: list[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        module = str(caller.f_globals.get("__name__", "")).rpartition(".")[2]
        sent[now[0], f"{module}.{caller.f_code.co_name} {name}"] += 1
        return plain(*args, **kwargs)

    return counted


def main() -> int:
    """The number of gates that are missed."""
    with tempfile.TemporaryDirectory() as place:
        folder, missed = Path(place), 0
        plans = {"group_norm": program(folder, "grpo", GRPO_REF), "gae": program(folder, "ppo", PPO)}
        for hand, plan in plans.items():
            (found,) = run_world(1, costs, plan, str(folder / hand), hand)
            for cost in found:
                beyond = cost.ours - cost.hand
                gate = ""
                if cost.name == "walk":
                    missed += beyond > GATE
                    gate = f"  gate {GATE:g} goal {GOAL:g}{'  MISSED' if beyond > GATE else ''}"
                print(f"{hand:<12}{cost.name:<26}{cost.ours:8.1f} us, by hand {cost.hand:8.1f}: "
                      f"{beyond:8.1f} beyond{gate}", flush=True)
        plan = program(folder, "grpo", GRPO_REF, TWO, steps=4)
        ranks = run_world(2, messages, plan, str(folder / "two"))
        for (event, sender), count in sorted(ranks[0].items()):
            print(f"{event:<12}{sender:<46}{count:5} a step")
        control = sum(n for rank in ranks for (event, _), n in rank.items() if event not in
                      {k.__name__ for k in PURPOSE})
        print(f"control messages of a steady step beyond the length exchange: {control}  gate 0"
              f"{'  MISSED' if control else ''}")
        return missed + (control > 0)


if __name__ == "__main__":
    sys.exit(main() > 0)
