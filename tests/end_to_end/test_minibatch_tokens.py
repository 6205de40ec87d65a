"""`minibatch=N tokens`: which rows are in which minibatch, and whole runs under every placement."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan.model import Plan, Spread
from rldsl.plan.spaces import most_minibatches
from rldsl.sharding.partition import minibatch_rows_by_dp, minibatches_by_tokens
from rldsl.verify import verify
from tests.checkpoint import runs
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.frames import frame
from tests.samples import thorough_between
from tests.tiny import make_model


def by_hand(order: list[int], tokens: list[int], size: int) -> list[list[int]]:
    """One after another into a bag, until one does not fit."""
    bags: list[list[int]] = []
    for at in order:
        if bags and sum(tokens[i] for i in bags[-1]) + tokens[at] <= size:
            bags[-1].append(at)
        else:
            bags.append([at])
    return bags


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_taken_until_one_does_not_fit(seed: int) -> None:
    draw = Random(seed)
    count, longest = draw.randint(1, 40), draw.randint(1, 50)
    tokens, size = [draw.randint(1, longest) for _ in range(count)], draw.randint(1, 200)
    order = draw.sample(range(count), count)
    most = most_minibatches(count, longest, size)
    found = minibatches_by_tokens(order, tokens, size, most)
    expected = by_hand(order, tokens, size)
    assert len(found) == most and [list(m) for m in found if m] == [sorted(bag) for bag in expected]
    assert all(sum(tokens[i] for i in m) <= size or len(m) == 1 for m in found)


@pytest.mark.parametrize("longest, size", [(10, 10), (10, 19), (10, 20), (10, 1), (7, 100), (10, 11)])
def test_the_bound_holds_for_the_worst_rows(longest: int, size: int) -> None:
    """Short and long rows in turns waste most room."""
    for short in range(1, longest + 1):
        tokens = [short if i % 2 else longest for i in range(24)]
        assert len(by_hand(list(range(24)), tokens, size)) <= most_minibatches(24, longest, size)


@pytest.mark.parametrize("granularity", ["row", "prompt"])
def test_no_degree_moves_a_row_to_another_minibatch(granularity: str) -> None:
    of = frame("gen", "gen", "prompt", 24, 3, "d", 8, 8)
    lengths = {"gen": [1 + (7 * i) % 16 for i in range(24)]}
    units = 24 if granularity == "row" else 8
    most = most_minibatches(units, 16 * 24 // units, 60)
    spread = Spread("s", "m", "l", ("gen",), granularity, "tokens", most, 2, True, 0,  # type: ignore[arg-type]
                    minibatch_tokens=60)
    divided = {dp: minibatch_rows_by_dp(spread, dp, [of], lengths, 5, 3) for dp in (1, 2, 4)}
    whole = {dp: [[sorted(r for part in m for r in part) for m in epoch] for epoch in found]
             for dp, found in divided.items()}
    assert whole[1] == whole[2] == whole[4] and whole[1][0] != whole[1][1]
    for epoch in whole[1]:
        assert sorted(r for m in epoch for r in m) == list(range(24))
        if granularity == "prompt":
            assert all({r // 3 for r in m} == {r // 3 for r in m if sum(x // 3 == r // 3 for x in m) == 3} for m in epoch)


PROGRAM = """data d = jsonl("{rows}", batch=8, max_prompt_tokens=16)
use std.dpo (dpo)
model slow  = causal_lm("{base}")
model actor = causal_lm("{base}") train adamw(lr=1e-3)
model group = causal_lm("{base}") train adamw(lr=1e-3)
loss own(logprobs: token; r: seq) {{ return -mean(logprobs * r) }}
loss pull(logprobs: token; r: seq) {{ return mean(sum(logprobs by seq) * (mean(r by prompt) - r)) }}
flow f(steps=2, seed=1) {{
  prompt = d.next()
  gen  = slow.generate(prompt, n=2, max_new_tokens=6, temperature=0.8)
  r    = len(gen) - 3
  some = gen where r > -2
  actor.train(gen, loss=own(r=r), minibatch={size} tokens, epochs=2)
  actor.train(some, loss=own(r=r), minibatch=30 tokens, shuffle=false)
  group.train(gen, loss=pull(r=r), minibatch=50 tokens)
  duel = pair(pick(gen, r), pick(gen, -r))
  actor.train(duel.chosen, duel.rejected, loss=dpo(ref_chosen=slow.logprobs(duel.chosen),
    ref_rejected=slow.logprobs(duel.rejected)), minibatch=80 tokens)
  checkpoint every 1
}}
"""
PLACES = {
    "dp": "place *.train on mesh(0:4) dp=4 mbs=1",
    "tp": "place *.train on mesh(0:4) dp=2 tp=2 mbt=64",
    "pp": "place *.train on mesh(0:4) dp=2 pp=2 mbs=2",
    "zero": "place *.train on mesh(0:4) dp=4 zero=3 mbs=7",
    "cp": "place *.train on mesh(0:4) cp=2 dp=2",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("tiny")
    make_model(root / "m", num_hidden_layers=2)
    (root / "d.jsonl").write_text("".join(json.dumps({"prompt": "a b c d e"[: 1 + 2 * (i % 4)]}) + "\n" for i in range(32)))
    (root / "p.rlf").write_text(PROGRAM.format(rows=root / "d.jsonl", base=root / "m", size=40))
    return root / "p.rlf"


@pytest.fixture(scope="module")
def alone(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Metrics:
    return run_program(path, {}, tmp_path_factory.mktemp("alone"), "cluster nodes=1 gpus=1")


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between(PLACES))
def test_a_placement_changes_no_number(path: Path, alone: Metrics, place: str, tmp_path: Path) -> None:
    there = run_program(path, {}, tmp_path, f"cluster nodes=1 gpus=4\n{PLACES[place]}", like=alone)
    for a, b in zip(alone, there, strict=True):
        assert a.keys() == b.keys() and a == pytest.approx(b, rel=1e-3, abs=1e-5)


@pytest.mark.thorough
def test_one_minibatch_that_holds_all_is_the_whole_batch(path: Path, alone: Metrics, tmp_path: Path) -> None:
    text = path.read_text()
    large, whole = text.replace("40 tokens", "10k tokens"), text.replace("minibatch=40 tokens", "minibatches=1")
    found = []
    for name, program in (("large", large), ("whole", whole)):
        (tmp_path / f"{name}.rlf").write_text(program)
        found.append(run_program(tmp_path / f"{name}.rlf", {}, tmp_path / name, "cluster nodes=1 gpus=1", like=alone))
    assert found[0] == found[1] and found[0] != alone


@pytest.mark.thorough
def test_a_run_resumes_in_the_middle(path: Path, tmp_path: Path) -> None:
    data = compile_program(path, {}, "cluster nodes=1 gpus=2", tmp_path)
    runs.run(data, tmp_path / "whole")
    runs.run(data, tmp_path / "out", stop_after=1, like=tmp_path / "whole")
    runs.run(data, tmp_path / "out", resume=tmp_path / "out", like=tmp_path / "whole")
    assert runs.lines(tmp_path / "out") == runs.lines(tmp_path / "whole")


def with_spreads(plan: Plan, **change: int) -> Plan:
    return replace(plan, spreads=tuple(replace(s, **change) if s.minibatch_tokens == 40 else s for s in plan.spreads))


def test_the_verifier_counts_them(path: Path) -> None:
    plan = api.compile(str(path), {})
    verify(plan)
    (spread,) = [s for s in plan.spreads if s.minibatch_tokens == 40]
    for change in (dict(minibatch_tokens=400), dict(minibatch_tokens=-1), dict(minibatches=spread.minibatches - 1),
                   dict(minibatches=spread.minibatches + 1), dict(minibatch_tokens=4000)):
        with pytest.raises(Failure):
            verify(with_spreads(plan, **change))


def test_the_preview_says_it(path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "rldsl.cli", "compile", str(path), "-o", str(path.with_suffix(".plan"))],
                          capture_output=True, text=True, timeout=120)
    assert "minibatches actor.train: of at most 40 tokens; their number depends" in " ".join(done.stdout.split())


@pytest.mark.parametrize("option, code", [
    ("minibatch=0 tokens", "RL0205"), ("minibatch=40 tokens, minibatches=2", "RL0215"), ("minibatch=3 pairs", "RL0218"),
    ("minibatches=40 tokens", "RL0218"), ('minibatch="40 tokens"', "RL0205")])
def test_mistakes(path: Path, option: str, code: str) -> None:
    found = api.check(path.read_text().replace("minibatch=40 tokens", option), "p.rlf")
    assert [d.code for d in found] == [code]
