"""Whole training steps against those of other systems: the same model, tokenizer, data, reward and run.

    python -m benchmarks.step [--only WORD] [--peer PYTHON] [--rounds N] [--steps N]

grpo: TRL's GRPOTrainer. ppo, sft: plain torch loops with HuggingFace modules (`step_plain.py`). Each system has its
own process with one thread, and they take turns; a step's time is measured from the end of one to the end of the
next, without the first two. Ratios are ours to theirs: of the median and of the least wall time of a step, and of the
CPU time, reward workers with it, which what else runs on the machine disturbs less; a gate is kept where the median or
the CPU time keeps it. tokens: sampled, or trained on, in a step by each; they differ only as far as samples do. Gates:
0.5 of TRL's time (goal 0.25); a plain loop's time.

TRL is not a dependency: `pip install -e '.[bench]'`, or name another interpreter that has it with --peer.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.step_processes import measured
from benchmarks.step_work import WARM, Times, Work, write_data

TINY = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8)
SMALL = dict(hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
             num_key_value_heads=4, head_dim=32)
SIZES = {"tiny": TINY, "small": SMALL}
MISSING = "TRL is not installed: pip install -e '.[bench]', or --peer PYTHON of an environment that has trl"


@dataclass(frozen=True, slots=True)
class Case:
    """size: of the model. peer: the module of the other system. gate: of the ratio of times."""

    name: str
    size: str
    peer: str
    gate: float
    goal: float
    work: dict[str, float]


CASES = (
    Case("grpo tiny", "tiny", "benchmarks.step_trl", 0.5, 0.25, dict(batch=8, n=8)),
    Case("grpo small", "small", "benchmarks.step_trl", 0.5, 0.25, dict(batch=8, n=8)),
    Case("grpo small, ref, 4 updates", "small", "benchmarks.step_trl", 0.5, 0.25,
         dict(batch=8, n=8, updates=4, ref=True)),
    Case("ppo tiny", "tiny", "benchmarks.step_plain", 1.0, 0.5, dict(batch=64, updates=4)),
    Case("ppo small", "small", "benchmarks.step_plain", 1.0, 0.5, dict(batch=64, updates=4)),
    Case("sft tiny", "tiny", "benchmarks.step_plain", 1.0, 0.5, dict(batch=64, tokens=128, updates=2)),
    Case("sft small", "small", "benchmarks.step_plain", 1.0, 0.5, dict(batch=64, tokens=128, updates=2)),
)


def prepare(folder: Path, size: str, prompt: int, tokens: int) -> None:
    """A random model, a reward model and data; the same for both systems."""
    from examples.tiny import make_model

    for name, head in (("sft", "causal_lm"), ("rm", "reward_model")):
        if not (folder / "models" / name).is_dir():
            make_model(folder / "models" / name, head=head, seed=len(name), scale=0.1, **SIZES[size])
    write_data(folder, 512, prompt, tokens)


def compare(case: Case, folder: Path, peer: str, rounds: int, steps: int) -> bool | str:
    """Print a line. Whether the gate is kept, or why there is no line."""
    work = Work(name=case.name, folder=str(folder), steps=steps + WARM, **case.work)  # type: ignore[arg-type]
    prepare(folder, case.size, work.prompt, work.tokens)
    sides: dict[str, list[Times]] = {case.peer: [], "benchmarks.step_ours": []}  # a peer that is missing is found first
    for _ in range(rounds):
        for module, found in sides.items():
            python = peer if module == "benchmarks.step_trl" else sys.executable
            one = measured(python, module, work)
            if isinstance(one, str):
                return one
            found.append(one)
    (their_wall, their_least, their_cpu, their_tokens), (wall, least, cpu, tokens) = map(_figures, sides.values())
    ratio = wall / their_wall
    good = min(ratio, cpu / their_cpu) <= case.gate
    print(f"{case.name:28}{1e3 * wall:9.0f}{1e3 * their_wall:9.0f} ms  / peer: {ratio:5.2f} median"
          f"{least / their_least:6.2f} least{cpu / their_cpu:6.2f} CPU  tokens {tokens:6.0f} {their_tokens:6.0f}"
          f"  gate {case.gate} goal {case.goal}{'' if good else '  MISSED'}", flush=True)
    return good


def _figures(found: list[Times]) -> tuple[float, float, float, float]:
    """Median and least wall time of a step, mean CPU time of one, mean tokens."""
    wall, cpu, tokens = ([x for t in found for x in getattr(t, name)] for name in ("wall", "cpu", "tokens"))
    return statistics.median(wall), min(wall), statistics.mean(cpu), statistics.mean(tokens)


def main() -> int:
    """0 where every gate is kept; 2 where a peer is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--peer", default=sys.executable, metavar="PYTHON", help="interpreter that has trl")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    given = parser.parse_args()
    code = 0
    print(f"{'':28}{'ours':>9}{'peer':>9}", flush=True)
    with tempfile.TemporaryDirectory() as place:
        for case in CASES:
            if given.only not in case.name:
                continue
            found = compare(case, Path(place) / case.size, given.peer, given.rounds, given.steps)
            if isinstance(found, str):
                missing = "No module named 'trl'" in found
                print(f"{case.name:28}not measured: {MISSING if missing else found[-2000:]}", flush=True)
                code = 2
            elif not found:
                code = code or 1
    return code


if __name__ == "__main__":
    sys.exit(main())
