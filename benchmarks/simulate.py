"""How far `rlc sim` is from real runs: the same plans simulated and run on this machine's processor.

    python benchmarks/simulate.py                 # all plans: about half an hour
    python benchmarks/simulate.py --only ppo      # those whose names contain a word
    python benchmarks/simulate.py --drawn 40 --seed 1    # drawn programs and placements, with lag, selections, environments
    python benchmarks/simulate.py --drawn 40 --seed 1 --part 2/4 --log runs/drawn.jsonl    # a quarter of them; the log
                                                         # has all parts, and the summary is of what is in it

Each plan is profiled and run within the same minute. A step's time is the median over the steps of a run, without the
first two. Gates: median error 15 %, Kendall's tau of the order 0.8; of drawn plans 10.4 % and 0.82. It exits with 1 if
one is missed, and says for each program by how much it is off in the median, with the sign. The machine must have nothing else to do: a step
that waits for a core is no fault of the model. `work` is the error of the seconds that the ranks compute, which other
programs disturb less; both sides use one thread for each rank (OMP_NUM_THREADS=1).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rldsl.clusters import Cluster
    from rldsl.simulate import Timeline

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

GATES = {"median error": 0.15, "tau": 0.8}
DRAWN_GATES = {"median error": 0.104, "tau": 0.82}  # what was reached when cases were first drawn
SIZES = {"s": dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
                   num_key_value_heads=2, head_dim=32),
         "m": dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
                   num_key_value_heads=4, head_dim=32),
         "l": dict(hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
                   num_key_value_heads=4, head_dim=64)}
WARM = 2  # steps that do not count

HEAD = """param size: text
param steps = 6
param batch = 16
"""
GENERATE = HEAD + """data prompts = jsonl("data/prompts.jsonl", batch=batch, max_prompt_tokens=32)
model actor = causal_lm("models/" + size)
flow generate(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=32, min_new_tokens=32)
  metric tokens = mean(len(gen))
}
"""
SFT = HEAD + """use std.sft (sft)
data answers = jsonl("data/answers.jsonl", batch=batch, max_prompt_tokens=32, max_answer_tokens=96)
model actor = causal_lm("models/" + size) train adamw(lr=1e-5)
flow sft(steps=steps, seed=1) {
  answer = answers.next()
  actor.train(answer, loss=sft(), minibatches=2)
}
"""
DPO = HEAD + """use std.dpo (dpo)
data pairs = jsonl("data/pairs.jsonl", batch=batch, max_prompt_tokens=32, max_answer_tokens=32)
model actor = causal_lm("models/" + size) train adamw(lr=1e-6)
model ref   = causal_lm("models/" + size)
flow dpo(steps=steps, seed=1) {
  pair         = pairs.next()
  ref_chosen   = ref.logprobs(pair.chosen)
  ref_rejected = ref.logprobs(pair.rejected)
  actor.train(pair.chosen, pair.rejected, loss=dpo(ref_chosen=ref_chosen, ref_rejected=ref_rejected, beta=0.1))
}
"""
GRPO = HEAD + """use std.grpo (group_norm, grpo)
use py "rewards.py" (digits_only: gen -> seq)
data prompts = jsonl("data/prompts.jsonl", batch=batch, max_prompt_tokens=32)
model actor = causal_lm("models/" + size) train adamw(lr=1e-6)
model ref   = causal_lm("models/" + size)
flow grpo(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=24, min_new_tokens=24)
  reward = digits_only(gen)
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.04), minibatches=2)
  metric reward = mean(reward)
}
"""
PPO = HEAD + """use std.ppo (kl_rewards, gae, ppo_clip, value_clip)
data prompts = jsonl("data/prompts.jsonl", batch=batch, max_prompt_tokens=32)
model actor  = causal_lm("models/" + size)   train adamw(lr=1e-6)
model critic = value_model("models/" + size) train adamw(lr=5e-6)
model ref    = causal_lm("models/" + size)
model judge  = reward_model("models/" + size + "-rm")
flow ppo(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=32, min_new_tokens=32)
  score  = judge.score(gen)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  r        = kl_rewards(score, gen.logprobs, ref_lp, coef=0.1)
  adv, ret = gae(r, v, gamma=1.0, lam=0.95)
  critic.train(gen, loss=value_clip(old=v, ret=ret), minibatches=2)
  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=whiten(adv)), minibatches=2)
  metric score = mean(score)
}
"""
AHEAD = GRPO.replace("seed=1)", "seed=1, lag=1)")  # generation runs one step ahead
SELECTED = GRPO.replace(  # all are kept, as the simulator assumes
    "  ref_lp = ", "  kept   = gen where reward >= 0\n  ref_lp = ").replace(
    "ref.logprobs(gen)", "ref.logprobs(kept)").replace("actor.train(gen,", "actor.train(kept,")
TALK = HEAD + """use std.grpo (group_norm, grpo)
use py "envs.py" (Talk: env)
data prompts = jsonl("data/prompts.jsonl", batch=batch, max_prompt_tokens=64)
model actor = causal_lm("models/" + size + "-chat") train adamw(lr=1e-6)
model ref   = causal_lm("models/" + size + "-chat")
flow talk(steps=steps, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, env=Talk, n=2, max_turns=3, max_new_tokens=12, max_tokens=192)
  ref_lp = ref.logprobs(gen)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(gen.reward), ref=ref_lp, beta=0.04), minibatches=2)
}
"""  # three turns, with an answer of the environment before each but the first
TURNS, TOOL_SECONDS, MOST_IN_TURN = 3, 0.05, 12
ENVS = f'''"""Three turns, with {TOOL_SECONDS} seconds before each answer."""
import time


class Talk:
    def init(self, prompt):
        self.turns = 0
        time.sleep({TOOL_SECONDS})
        return prompt, {{}}

    def step(self, text):
        self.turns += 1
        time.sleep({TOOL_SECONDS})
        done = self.turns == {TURNS}
        answer = [] if done else [{{"role": "user", "content": "0123456789"}}]
        return {{"observations": answer, "reward": float(len(text) % 2), "done": done}}
'''
PROGRAMS = {"talk": TALK, "generate": GENERATE, "sft": SFT, "dpo": DPO, "grpo": GRPO, "ppo": PPO, "ahead": AHEAD,
            "selected": SELECTED}
ALL2, ALL4 = "mesh(0:2)", "mesh(0:4)"
SPLIT = ("actor.generate on mesh(0:4) dp=4", "judge.* on mesh(0:1)", "ref.* on mesh(1:2)",
         "critic.values on mesh(2:4) dp=2", "critic.train on mesh(2:4) dp=2", "actor.train on mesh(0:2) dp=2")


@dataclass(frozen=True, slots=True)
class Case:
    """rules: of placement, as `rlc compile --on` takes them."""

    program: str
    size: str
    rules: tuple[str, ...]
    batch: int = 16

    @property
    def name(self) -> str:
        return f"{self.program}-{self.size}{self.batch} {'; '.join(self.rules) or 'one rank'}"


CASES = (
    Case("generate", "s", ()), Case("generate", "m", (), 32), Case("generate", "l", ()),
    Case("generate", "s", (f"*.* on {ALL2} dp=2",), 32), Case("generate", "m", (f"*.* on {ALL2} tp=2",)),
    Case("generate", "m", (f"*.* on {ALL2} pp=2",)), Case("generate", "m", (f"*.* on {ALL4} dp=4",), 32),
    Case("generate", "s", (f"*.* on {ALL4} dp=2 tp=2",)),
    Case("sft", "s", (), 64), Case("sft", "m", (), 32), Case("sft", "l", ()),
    Case("sft", "m", (f"*.* on {ALL2} dp=2",), 64), Case("sft", "m", (f"*.* on {ALL2} tp=2",), 32),
    Case("sft", "m", (f"*.* on {ALL2} pp=2 mbs=4",), 32), Case("sft", "m", (f"*.* on {ALL4} dp=2 pp=2",), 64),
    Case("dpo", "s", ()), Case("dpo", "m", (f"*.* on {ALL2} dp=2",), 32),
    Case("dpo", "m", (f"ref.* on {ALL2} tp=2", f"actor.* on {ALL2} pp=2"), 32),
    Case("grpo", "s", ()), Case("grpo", "m", (f"*.* on {ALL2} dp=2",)),
    Case("grpo", "m", (f"*.* on {ALL2} dp=2", f"actor.train on {ALL2} tp=2")),
    Case("grpo", "s", (f"*.* on {ALL4} dp=4", f"actor.train on {ALL4} dp=2 pp=2"), 32),
    Case("ppo", "s", (), 32), Case("ppo", "m", ()), Case("ppo", "m", (f"*.* on {ALL2} dp=2",), 32),
    Case("ppo", "m", (f"actor.generate on {ALL2} dp=2", "judge.* on mesh(0:1)", "ref.* on mesh(1:2)",
                      "critic.* on mesh(1:2)", "actor.train on mesh(0:1)"), 32),
    Case("ppo", "m", SPLIT, 64),
)


APART = {2: ("actor.generate on mesh(0:1)", "ref.* on mesh(1:2)", "actor.train on mesh(1:2)"),
         4: ("actor.generate on mesh(0:2) dp=2", "ref.* on mesh(2:4) dp=2", "actor.train on mesh(2:4) dp=2")}


def drawn(count: int, seed: int) -> list[Case]:
    """Programs with placements, drawn: with and without a lag, a selection or an environment, on one, two and four
    ranks."""
    import random

    draw, found = random.Random(seed), []
    while len(found) < count:
        program, ranks = draw.choice(sorted(PROGRAMS)), draw.choice((1, 2, 2, 4))
        mesh = f"mesh(0:{ranks})"
        degrees = draw.choice([f"dp={ranks}", f"tp={min(ranks, 2)} dp={max(ranks // 2, 1)}",
                               f"pp={min(ranks, 2)} dp={max(ranks // 2, 1)}"])
        rules = (f"*.* on {mesh} {degrees}",) if ranks > 1 else ()
        if program == "ahead":
            rules = APART[max(ranks, 2)]
        case = Case(program, draw.choice("sml"), rules, draw.choice((16, 32, 64)))
        if case not in found:
            found.append(case)
    return found


def make(folder: Path) -> None:
    """Models and data; prompts of 24 to 32 characters, one token each."""
    import random

    from examples.tiny import CHAT_TEMPLATE, make_model, write_jsonl

    draw = random.Random(0)

    def words(low: int, high: int) -> str:
        return "".join(draw.choice("0123456789abcdefghij") for _ in range(draw.randint(low, high)))

    for name, size in SIZES.items():
        make_model(folder / "models" / name, scale=0.02, **size)
        make_model(folder / "models" / f"{name}-rm", head="reward_model", scale=0.02, **size)
        make_model(folder / "models" / f"{name}-chat", scale=0.02, chat=CHAT_TEMPLATE, **size)
    (folder / "envs.py").write_text(ENVS)
    rows = [{"prompt": words(24, 32)} for _ in range(512)]
    write_jsonl(folder / "data/prompts.jsonl", rows)
    write_jsonl(folder / "data/answers.jsonl", [r | {"answer": words(72, 95)} for r in rows])
    write_jsonl(folder / "data/pairs.jsonl", [r | {"chosen": words(20, 31), "rejected": words(20, 31)} for r in rows])
    (folder / "rewards.py").write_text((ROOT / "examples/rewards.py").read_text())
    for name, text in PROGRAMS.items():
        (folder / f"{name}.rlf").write_text(text)


# means of what `make` writes; an end-of-sequence token more. Of conversations, with the words of the template: the
# prompt, and what both sides say after it
PROMPTS, PROMPT, ANSWERS = {"talk": 46.3}, 28.0, {"sft": 84.5, "dpo": 26.5, "talk": 88.3}


def turn_tokens(vocabulary: int) -> tuple[float, ...]:
    """Lengths of turns, equally likely, of a model whose weights are drawn: it ends a turn with about one token in as
    many as its vocabulary has."""
    parts = 100
    ends = [math.ceil(math.log(1 - (i + 0.5) / parts) / math.log(1 - 1 / vocabulary)) for i in range(parts)]
    return tuple(float(min(n, MOST_IN_TURN)) for n in ends)


def environments(machine: Cluster, size: str) -> Cluster:
    """The machine with what is known of conversations."""
    from rldsl.clusters.model import Distribution

    config = json.loads(Path(f"models/{size}-chat/config.json").read_text())
    lengths = turn_tokens(config["vocab_size"])
    return replace(machine, turns=Distribution(TURNS), tool_seconds=Distribution(TOOL_SECONDS),
                   reset_seconds=Distribution(TOOL_SECONDS),
                   turn_tokens=Distribution(sum(lengths) / len(lengths), values=lengths))


def compiled(case: Case, steps: int) -> Path:
    from rldsl import api
    from rldsl.plan.codec import encode

    sets = {"size": case.size, "steps": steps, "batch": case.batch}
    plan = api.compile(f"{case.program}.rlf", sets, None, case.rules)
    file = Path("case.plan")
    file.write_bytes(encode(plan))
    return file


@dataclass(frozen=True, slots=True)
class Real:
    """Of a step: seconds, and seconds that all ranks computed together."""

    seconds: float
    computed: float


def measured(plan: Path, world: int, steps: int) -> Real:
    """A real run."""
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--standalone", "--nproc-per-node", str(world), "-m",
               "rldsl.run", str(plan), "--out", "run", "--device", "cpu", "--plain", "--overwrite",
               "--trace", "run.json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    spans = [s for s in json.loads(Path("run.json").read_text())["traceEvents"] if s["ph"] == "X"]
    computed = sum(s["args"]["busy"] for s in spans if s["args"]["step"] > WARM) / (steps - WARM)
    return Real(statistics.median(x["seconds"] for x in lines[WARM:]), computed)


def tau(pairs: Sequence[tuple[float, float]]) -> float:
    """Kendall's tau of two orders."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return sum((s > 0) - (s < 0) for s in signs) / len(signs) if signs else 1.0


@dataclass(frozen=True, slots=True)
class Compared:
    """A plan, simulated and run."""

    program: str  # its name
    simulated: float  # seconds of a step
    measured: float  # the same
    work: float  # simulated seconds of computation / measured ones - 1

    @property
    def error(self) -> float:
        return self.simulated / self.measured - 1


def summary(found: Sequence[Compared], gates: Mapping[str, float]) -> bool:
    """Print what all comparisons say together. Returns whether the gates are met."""
    errors, order = [abs(x.error) for x in found], tau([(x.simulated, x.measured) for x in found])
    print(f"\n{len(found)} plans: median error {statistics.median(errors):.1%} (gate {gates['median error']:.1%}), "
          f"largest {max(errors):.1%}, Kendall's tau {order:.3f} (gate {gates['tau']})")
    for program in sorted({x.program for x in found}):
        own = [x for x in found if x.program == program]
        print(f"  {program:<10} {len(own):>2} plans: median of the step {statistics.median(x.error for x in own):+.1%}, "
              f"of the work {statistics.median(x.work for x in own):+.1%}")
    good = statistics.median(errors) <= gates["median error"] and order >= gates["tau"]
    print("gates met" if good else "gates NOT met")
    return good


def part_of(cases: Sequence[Case], part: str) -> list[Case]:
    """part: "2/4", the second quarter, dealt out in turn; "": all."""
    number, _, of = part.partition("/")
    return list(cases[int(number) - 1 :: int(of)]) if part else list(cases)


def main() -> int:
    """0 where the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--drawn", type=int, default=0, help="so many drawn cases instead of the listed ones")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--part", default="", help="of the cases, as 1/4: the first quarter")
    parser.add_argument("--log", type=Path, help="a file to which comparisons are appended; the summary is of all in it")
    parser.add_argument("--folder", default="runs/simulate", help="where models, plans and runs go")
    parser.add_argument("--reuse", action="store_true", help="take what was measured before, where it is there")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    log = given.log.absolute() if given.log else None
    folder = Path(given.folder)
    folder.mkdir(parents=True, exist_ok=True)
    make(folder)
    os.chdir(folder)
    from rldsl.api import read_plan
    from rldsl.clusters import read
    from rldsl.simulate import Lengths, simulate

    found: list[Compared] = []
    print(f"{'simulated':>10} {'measured':>10} {'error':>7} {'work':>7}  plan", flush=True)
    for case in part_of(drawn(given.drawn, given.seed) if given.drawn else CASES, given.part):
        if given.only not in case.name:
            continue
        file = compiled(case, given.steps)
        plan = read_plan(str(file))
        subprocess.run([sys.executable, "-m", "rldsl.cli", "profile", str(file), "-o", "profile.yaml",
                        "--device", "cpu", *([] if given.reuse else ["--fresh"])], check=True, capture_output=True)
        machine = environments(read("profile.yaml"), case.size)
        guess = simulate(plan, machine, Lengths(PROMPTS.get(case.program, PROMPT), ANSWERS.get(case.program, 0.0)))
        real = measured(file, plan.header.world, given.steps)
        found.append(one := Compared(case.program, guess.seconds, real.seconds, work(guess) / real.computed - 1))
        print(f"{one.simulated:>9.3f}s {one.measured:>9.3f}s {one.error:>+7.1%} {one.work:>+7.1%}  {case.name}",
              flush=True)
        if log:
            with log.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")
    if log and log.exists():
        found = [Compared(**json.loads(line)) for line in log.read_text().splitlines()]
    if not found:
        print("no case has such a name")
        return 2
    return int(not summary(found, DRAWN_GATES if given.drawn else GATES))


def work(timeline: Timeline) -> float:
    """Seconds that all ranks compute together."""
    ranks = [sum(stop - start for start, stop in c) for c in timeline.classes]
    return sum(s.busy * ranks[s.rank_class] for s in timeline.spans)


if __name__ == "__main__":
    sys.exit(main())
