"""Random flows with all that makes sequences of sequences, run on one rank and under other placements.

    python -m tests.fuzz.flows [--count N] [--seed S] [--lag K]

`flow(seed)` grows a program a statement at a time and keeps what the checker accepts, so that whatever may stand
together does. Each is compiled for one rank and for a placement of `PLACES`, the verifier and the simulator accept
both plans, and the runs have the same rows, buffers and numbers (`tests/papers/matrix.py` says how near). A message
with a code is an answer at compile time; a traceback, a plan that the simulator refuses or a difference is a failure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from shutil import rmtree

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.codec import decode
from tests.papers.matrix import ALONE, PLACES, distance, results
from tests.papers.programs import RECORDER, Program, root, run_all
from tests.verify.faults import faults
from tests.verify.stepper import simulate

STEPS = 2  # the second reads what the first has written; with a lag one more
ROWS = 60  # of a batch: what makes more is left out
HERE = Path(__file__).parent
HEAD = """use py "noted.py" (parity: gen -> seq, spread: gen -> seq, alike: gen, other -> seq,
    ask: gen -> prompts(max_tokens=6), ask_some: gen -> prompts?(max_tokens=6))
buffer good = rows(capacity=7)
buffer bad  = rows(capacity=5)
data prompts = jsonl("data/prompts.jsonl", batch=3, max_prompt_tokens=12, kind="prompts")
data further = jsonl("data/prompts.jsonl", batch=2, max_prompt_tokens=12, kind="prompts")
state rate of prompts = 0.5
state heat = 2
model actor  = causal_lm("models/sft") train adamw(lr=0.01, eps=1e-3)
model critic = value_model("models/sft") train adamw(lr=0.01, eps=1e-3)
model judge  = reward_model("models/rm")
model wise   = causal_lm("models/teacher")
loss pg(logprobs: token; adv: token) { return -mean(mean(adv * logprobs by seq)) }
loss near(values: token; aim: seq) { return mean((values - aim) * (values - aim)) }
loss nll(logprobs: token;) { return -mean(logprobs) }
loss margin(chosen: token, rejected: token;) { return mean(mean(rejected by seq)) - mean(mean(chosen by seq)) }
"""
FIRST = ("prompt = prompts.next()", "prompt = prompts.next(weight=max(1.2 - prompts.rate, 0.05))",
         "prompt = prompts.next(weight=max(exp(-heat * prompts.rate), 0.05))")


@dataclass
class Flow:
    """A program that grows. rows: a batch of sequences -> at most so many of them."""

    draw: Random
    lines: list[str] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    values: list[str] = field(default_factory=list)
    tried: int = 0
    lag: int = 0  # of a flow that generates

    def text(self, *more: str) -> str:
        body = "".join(f"  {line}\n" for line in (*self.lines, *more))
        lag = f", lag={self.lag}" if self.lag and ".generate(" in body else ""
        return f"{HEAD}flow f(steps={STEPS + bool(lag)}, seed={self.draw.seed_}{lag}) {{\n{body}}}\n"

    def add(self, line: str) -> bool:
        """Keep a statement if the checker does."""
        self.tried += 1
        if api.check(self.text(line), str(HERE / "flow.rlf")):
            return False
        self.lines.append(line)
        return True

    def add_each(self, lines: Sequence[str]) -> None:
        """Keep those statements that the checker does: all in one check, or else by halves."""
        if lines and not self.add("\n  ".join(lines)) and len(lines) > 1:
            half = len(lines) // 2
            self.add_each(lines[:half])
            self.add_each(lines[half:])

    # ------------------------------------------------------------------------------------------- parts of a line

    def frame(self) -> str:
        return self.draw.choice([*self.rows])

    def value(self) -> str:
        f, draw = self.frame(), self.draw
        return draw.choice((*self.values[-6:], f"parity({f})", f"spread({f})", f"len({f})", f"{f}.x", f"{f}.y",
                            "prompt.rate",
                            f"sum({f}.logprobs by seq)", f"uniform(len({f}))", f"judge.score({f})", f"{f}.finished"))

    def number(self) -> str:
        """An expression."""
        a, b, f, draw = self.value(), self.value(), self.frame(), self.draw
        reduce = draw.choice(("mean", "max", "min", "sum", "count", "std", "median", "last"))
        shift = draw.choice(("next", "prev", "cumsum", "at_end"))
        return draw.choice((
            a, f"{a} + {b}", f"{a} - {b}", f"{a} * 0.5", f"where({a} > 0.3, {b}, 0.1)", f"{reduce}({a} by prompt)",
            f"{reduce}({a} by {f})", f"mean({a} by seq)", f"{shift}({a} by prompt)", f"discount({a} by prompt, 0.9)",
            f"over({a}, {f})", f"over({a}, {f}, 0.2)", f"along({a}, {f})", f"at_end({a}, {f})", f"{f}.at",
            f"alike({f}, {self.frame()})", f"actor.logprobs({f})", f"critic.values({f})", f"at_end({a})",
            f"{f}.logprobs", f"clip({a}, 0, 1)", f"{a} * heat"))

    def condition(self, f: str) -> str:
        draw = self.draw
        return draw.choice((f"parity({f}) > 0", f"uniform(len({f})) < 0.6", f"len({f}) > 1", f"{self.value()} > 0.4",
                            f"std({self.value()} by prompt) > 0", f"{f}.x > 0.3", "prompt.rate < 0.6",
                            f"not {f}.finished"))

    # ------------------------------------------------------------------------------------------------ statements

    def make(self) -> None:
        """Try one more batch of sequences."""
        draw, f, g = self.draw, self.frame(), self.frame()
        name, n, x = f"f{self.tried}", draw.randint(1, 3), self.value()
        how = draw.choice(("", "", ", temperature=0.8", ", greedy=true", ", reuse=true"))
        tokens = draw.randint(1, 4)
        cut = draw.choice(("every=1, most=2", "every=2, most=3", "fractions=[0.5]", 'at="1", most=2'))
        made, count = draw.choice((
            (f"actor.generate({f}, n={n}, max_new_tokens={tokens}{how})", self.rows[f] * n),
            (f"actor.generate({f}, n={n}, max_new_tokens={tokens}{how})", self.rows[f] * n),
            (f"wise.generate({draw.choice(('ask', 'ask_some'))}({f}), n={n}, max_new_tokens={tokens})",
             self.rows[f] * n),
            (f"{f} where {self.condition(f)}", self.rows[f]),
            (f"{f} where {self.condition(f)}", self.rows[f]),
            (f"{f} with x={x}", self.rows[f]), (f"{f} with x={self.number()}, y={self.number()}", self.rows[f]),
            (f"pick({f}, {x})", self.rows[f]), (f"pick({f}, -{x})", self.rows[f]), (f"others({f})", self.rows[f] * 2),
            (f"whole({f})", self.rows[f]), (f"prefixes({f}, {cut})", self.rows[f] * 3),
            (f"concat({f}, {g})", self.rows[f] + self.rows[g]),
            (f"good.sample({n}, weight={draw.choice(('good.x * heat', 'good.x + 0.1', 'exp(-good.x)'))})", n),
            (f"{draw.choice(('good', 'bad'))}.sample({n})", n),
            ("further.next()", 2), (f"pair({f}, {g})", self.rows[f])))
        if count <= ROWS and self.add(f"{name} = {made}"):
            names = (f"{name}.chosen", f"{name}.rejected") if made.startswith("pair") else (name,)
            self.rows |= dict.fromkeys(names, count)

    def do(self) -> None:
        """Try one more statement of another kind."""
        draw, f, v = self.draw, self.frame(), self.number()
        name = f"v{self.tried}"
        line = draw.choice((
            f"{name} = {v}", f"{name} = {v}", f"{name} = {v}", f"{name} = {v}", f"{name} = {v}", f"{name} = {v}",
            f"good.add({f})", f"bad.add({f} where {self.condition(f)})", f"every 2 {{ bad.add({f}) }}",
            f"prompt.rate = 0.5 * prompt.rate + 0.1 * {v}", f"{f}.rate = {v}", "heat = 0.9 * heat",
            f"actor.train({f}, loss=pg(adv={v}), minibatches={draw.randint(1, 3)})",
            f"actor.train({f}, loss=nll())", f"critic.train({f}, loss=near(aim={v}))",
            f"actor.train({f}.chosen, {f}.rejected, loss=margin())".replace(".chosen.chosen", ".chosen")
            .replace(".chosen.rejected", ".rejected")))
        if self.add(line) and line.startswith(name):
            self.values.append(name)


class _Draw(Random):
    """That knows its seed."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.seed_ = seed


@cache  # a second of trials each
def flow(seed: int, lag: int = 0) -> str:
    """A program that the checker accepts. It ends with a metric of whatever it has."""
    made = Flow(_Draw(seed), lag=lag)
    draw = made.draw
    if draw.random() < 0.2 and not lag:  # what is collected cannot be generated ahead
        block = (f"repeat {{\n{FIRST[0]}\ngen = actor.generate(prompt, n=2, max_new_tokens=3)\n"
                 f"kept = gen where {draw.choice(('parity(gen) > 0', 'std(parity(gen) by prompt) > 0'))}\n"
                 f"}} until count(kept) >= {draw.randint(2, 5)} max 2")
        assert made.add(block)
        made.rows = {"gen": 12, "kept": 12, "prompt": 6}
    else:
        assert made.add(draw.choice(FIRST))
        assert made.add(f"gen = actor.generate(prompt, n={draw.randint(2, 3)}, max_new_tokens=4)")
        made.rows = {"prompt": 3, "gen": 9}
    wanted = draw.randint(8, 18)
    while len(made.lines) < wanted and made.tried < 160:
        made.make() if draw.random() < 0.6 else made.do()
    for model in ("actor", "critic"):
        if not any(f"{model}.train" in line for line in made.lines):
            loss = "nll()" if model == "actor" else "near(aim=len(gen))"
            assert made.add(f"{model}.train(gen, loss={loss})")
    made.add_each([f"metric m{i} = mean({value})" for i, value in enumerate(made.values)])
    made.add_each([line for i, f in enumerate(x for x in made.rows if not x.endswith("rejected")) for line in (
        f"metric c{i} = count({f.removesuffix('.chosen')})", f"metric t{i} = mean(len({f}))",
        f"metric p{i} = mean(actor.logprobs({f}))")])
    made.add(f"save actor to \"out/{seed}-actor\"")
    return made.text()


@dataclass
class Tried:
    """refused: (seed, codes) at compile time. wrong: what is a failure. equal: seeds whose runs are equal."""

    refused: dict[int, list[str]] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)
    equal: list[int] = field(default_factory=list)


def place_of(seed: int) -> str:
    return [*PLACES][seed % len(PLACES)]


def compiled(base: Path, seed: int, tried: Tried, lag: int = 0) -> tuple[bytes, bytes] | None:
    """The plans of a flow, on one rank and placed; None where the compiler, the verifier or the simulator refuses."""
    folder = base / f"f{seed}"
    folder.mkdir(exist_ok=True)
    (folder / "noted.py").write_text((HERE / "noted.py").read_text() + RECORDER)
    made = []
    try:
        program = Program(f"f{seed}", folder, flow(seed, lag), {})
        for place in (ALONE, PLACES[place_of(seed)]):
            data = program.compiled(place)
            plan = decode(data, "x.plan")
            if found := faults(plan):
                raise AssertionError(f"refused by the verifier: {found}")
            verdict = simulate(plan, Random(seed))
            assert verdict.ends, f"refused by the simulator: {verdict.why}"
            made.append((data, verdict.meaning))
    except Failure as e:
        tried.refused[seed] = sorted({d.code for d in e.diagnostics})
        return None
    except Exception:
        tried.wrong[seed] = traceback.format_exc(limit=-6)
        return None
    return made[0][0], made[1][0]


def run(base: Path, seeds: Iterable[int], lag: int = 0) -> Tried:
    """These flows, compiled, verified, simulated and run."""
    tried = Tried()
    plans = {f"f{seed}": both for seed in seeds if (both := compiled(base, seed, tried, lag))}
    _compare(base, plans, tried)
    return tried


def _compare(base: Path, plans: dict[str, tuple[bytes, bytes]], tried: Tried) -> None:
    """Runs share worlds; where one fails, each is run for itself."""
    for name in plans:
        for out in (name, f"{name} placed"):
            rmtree(base / "out" / out, ignore_errors=True)
    try:
        runs = run_all(1, {name: alone for name, (alone, _) in plans.items()}, base)
        worlds: dict[int, dict[str, bytes]] = {}
        for name, (_, placed) in plans.items():
            worlds.setdefault(json.loads(placed.splitlines()[0])["world"], {})[f"{name} placed"] = placed
        for size, group in worlds.items():
            runs |= run_all(size, group, base, {name: runs[name.split()[0]].responses for name in group})
    except Exception as e:
        if len(plans) > 1:
            for name, both in plans.items():
                _compare(base, {name: both}, tried)
        else:
            tried.wrong |= {int(name[1:]): f"{place_of(int(name[1:]))}: {e}" for name in plans}
        return
    found = results(base, runs)
    for name in plans:
        seed = int(name[1:])
        apart = distance(found[f"{name} placed"], found[name])
        if apart <= 1:
            tried.equal.append(seed)
        else:
            first = _first(found[name].steps, found[f"{name} placed"].steps)
            tried.wrong[seed] = f"{place_of(seed)}: {apart} times the tolerance: {first}"


def _first(mine: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]]) -> str:
    """The first numbers that differ."""
    for step, (a, b) in enumerate(zip(mine, theirs), 1):
        if wrong := [f"{k} is {a.get(k)} and {b.get(k)}" for k in a | b
                     if not abs(a.get(k, float("inf")) - b.get(k, 0)) <= 2e-4 * abs(a.get(k, 0)) + 2e-5]:
            return f"step {step}: {', '.join(wrong[:5])}"
    return "rows, buffers or parameters"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=0, help="the first number")
    arguments.add_argument("--group", type=int, default=10, help="flows that share worlds")
    arguments.add_argument("--lag", type=int, default=0, help="of each flow that generates")
    given = arguments.parse_args()
    equal, refused, wrong = 0, Counter[str](), 0
    with tempfile.TemporaryDirectory() as folder:
        base = root(Path(folder))
        for start in range(given.seed, given.seed + given.count, given.group):
            tried = run(base, range(start, min(start + given.group, given.seed + given.count)), given.lag)
            equal, wrong = equal + len(tried.equal), wrong + len(tried.wrong)
            refused.update(code for codes in tried.refused.values() for code in codes)
            for seed, why in tried.wrong.items():
                print(f"---- flow {seed}\n{flow(seed, given.lag).removeprefix(HEAD)}\n{why}", flush=True)
            print(f"{start}: {equal} equal, refused {dict(refused)}, {wrong} wrong", flush=True)
    print(f"{given.count} flows: {equal} run as on one rank, {refused.total()} refused, {wrong} WRONG")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
