"""Divisions over dp ranks that keep rows of one prompt together, where a rank computes it once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from rldsl import api
from rldsl.clusters import Cluster
from rldsl.plan.events import Infer, Train
from rldsl.plan.model import Spread
from rldsl.plan.projection import event_paths
from rldsl.plan.prompt_sources import prompts_by_spread
from rldsl.sharding.balance import sequence_cost
from rldsl.sharding.partition import minibatch_rows_by_dp, rows_by_dp
from rldsl.sharding.siblings import Siblings
from rldsl.simulate import simulate
from tests.frames import frame
from tests.tiny import make_all

RUN = 4


def drawn(seed: int) -> tuple[dict[str, list[int]], Siblings]:
    """Tokens of 32 rows of 8 prompts, and what prompts cost."""
    r = random.Random(seed)
    prompts = [p for _ in range(8) for p in [r.randrange(1, 300)] * RUN]
    return {"gen": [p + r.randrange(0, 200) for p in prompts]}, Siblings(RUN, [sequence_cost(p) for p in prompts])


def spread(**given: object) -> Spread:
    return Spread("s", "m", "l", ("gen",), **given)  # type: ignore[arg-type]


def heaviest(parts, lengths, siblings) -> int:
    costs = [sequence_cost(n) for n in lengths["gen"]]
    return max(siblings.computed(part, costs) for part in parts)


@pytest.mark.parametrize("dp", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("seed", range(8))
def test_each_row_is_somewhere_and_no_rank_computes_more_than_without(seed, dp):
    of, (lengths, siblings) = frame("gen", "gen", "prompt", 32, RUN, "d", 8, 8), drawn(seed)
    plain, together = ([part["gen"] for part in rows_by_dp(spread(), dp, [of], lengths, 1, 2, given)]
                       for given in (None, siblings))
    assert sorted(r for part in together for r in part) == list(range(32)) and len(together) == dp
    assert all(part == tuple(sorted(part)) for part in together)
    assert heaviest(together, lengths, siblings) <= heaviest(plain, lengths, siblings)


def test_long_prompts_are_computed_on_one_rank_each():
    of = frame("gen", "gen", "prompt", 32, RUN, "d", 8, 8)
    lengths, siblings = {"gen": [250 + i * 7 % 11 for i in range(32)]}, Siblings(RUN, [sequence_cost(200)] * 32)
    found = [part["gen"] for part in rows_by_dp(spread(), 4, [of], lengths, 1, 2, siblings)]
    assert found == [tuple(range(8 * i, 8 * i + 8)) for i in range(4)]
    apart = [part["gen"] for part in rows_by_dp(spread(), 4, [of], lengths, 1, 2)]
    assert any(len({r // RUN for r in part}) > 2 for part in apart), "without, they are mixed"


def test_minibatches_have_the_same_rows_as_without():
    """Which minibatch a row is in is a part of the algorithm."""
    of, (lengths, siblings) = frame("gen", "gen", "prompt", 32, RUN, "d", 8, 8), drawn(3)
    for given in ({"minibatches": 4, "epochs": 2, "shuffle": True}, {"minibatches": 3},
                  {"minibatches": 32, "minibatch_tokens": 900}):
        plain, together = (minibatch_rows_by_dp(spread(**given), 4, [of], lengths, 5, 3, x) for x in (None, siblings))
        assert [[sorted(r for part in m for r in part) for m in epoch] for epoch in plain] == \
            [[sorted(r for part in m for r in part) for m in epoch] for epoch in together]
        assert all(heaviest(b, lengths, siblings) <= heaviest(a, lengths, siblings)
                   for x, y in zip(plain, together, strict=True) for a, b in zip(x, y, strict=True))


PROGRAM = """use std.dpo (dpo)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft"%s) train adamw(lr=1e-3)
model ref = causal_lm("models/sft")
loss own(logprobs: token; old: token) { return -mean(logprobs * old) }
loss pull(logprobs: token; r: seq) { return mean(sum(logprobs by seq) * (mean(r by prompt) - r)) }
flow f(steps=1, seed=1) {
  prompt = prompts.next()
  gen = actor.generate(prompt, n=4, max_new_tokens=4)
  old = ref.logprobs(gen)
  %s
}
"""


def found(tmp_path: Path, statement: str, place: str = "dp=2", options: str = "") -> dict[str, int]:
    make_all(tmp_path)
    (tmp_path / "p.rlf").write_text(PROGRAM % (options, statement))
    (tmp_path / "p.place").write_text(
        f"cluster nodes=1 gpus=2\nplace *.generate on mesh(0:2) dp=2\nplace *.train on mesh(0:2) {place}\n"
        f"place *.logprobs on mesh(0:2) {place}\n")
    plan = api.compile(str(tmp_path / "p.rlf"), {}, str(tmp_path / "p.place"))
    by_id = {s.id: s for s in plan.spreads}
    runs = prompts_by_spread(plan)
    assert all(by_id[s].balance_by == "tokens" and by_id[s].granularity == "row" for s in runs)
    return {f"{len(by_id[s].frames)} {by_id[s].minibatches}": run for s, run in runs.items()}


def test_log_probs_and_training_divide_by_prompts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert found(tmp_path, "actor.train(gen, loss=own(old=old), minibatches=2)") == {"1 1": 4, "1 2": 4}
    assert found(tmp_path, "actor.train(gen, loss=own(old=old), minibatches=2)", "cp=2") == {}
    assert found(tmp_path, "actor.train(gen, loss=own(old=old), minibatches=2)", "dp=2", ", invariant=true") \
        == {"1 1": 4}, "of ref"
    assert found(tmp_path, "actor.train(gen, loss=own(old=old))", "dp=2", ", invariant=true") == {}, "one for both"
    assert found(tmp_path, "actor.train(gen, loss=own(old=old), minibatches=2)", "dp=2", ", invariant=training") \
        == {"1 1": 4}, "of ref"
    assert found(tmp_path, "actor.train(gen, loss=pull(r=len(gen)), minibatches=2)")["1 1"] == 4


def test_pairs_have_a_prompt_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert found(tmp_path, """duel = pair(pick(gen, mean(old by seq)), pick(gen, -mean(old by seq)))
  actor.train(duel.chosen, duel.rejected, loss=dpo(ref_chosen=ref.logprobs(duel.chosen),
    ref_rejected=ref.logprobs(duel.rejected)), minibatches=2)""") == {"1 1": 4}


def simulated(tmp_path: Path, n: int, statement: str, **cluster: int) -> tuple[float, float]:
    """Seconds of log-probs and of training."""
    (tmp_path / "p.rlf").write_text((PROGRAM % ("", statement)).replace("n=4", f"n={n}").replace("16)", "256)"))
    (tmp_path / "p.place").write_text("cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n")
    plan = api.compile(str(tmp_path / "p.rlf"), {}, str(tmp_path / "p.place"))
    machine = Cluster(gpus=2, bfloat16_tflops=1, float32_tflops=1, memory_gb_s=1000, link_gb_s=100, **cluster)
    by = simulate(plan, machine).event_seconds()
    return tuple(next(by[e.id] for e, _ in event_paths(plan) if isinstance(e, kind))  # type: ignore[return-value]
                 for kind in (Infer, Train))


def test_the_simulator_counts_a_prompt_once(tmp_path, monkeypatch):
    """Prompts of 256 tokens and responses of 4: n samples of a prompt take little longer than one."""
    monkeypatch.chdir(tmp_path)
    make_all(tmp_path)
    whole = "actor.train(gen, loss=own(old=old))"
    once, each = simulated(tmp_path, 8, whole), simulated(tmp_path, 8, whole, prompts_once=0)
    assert all(4 < b / a < 8 for a, b in zip(once, each, strict=True)), "260 tokens of a row, or 256 / 8 + 4"
    assert simulated(tmp_path, 1, whole) == simulated(tmp_path, 1, whole, prompts_once=0)
    shuffled = simulated(tmp_path, 8, "actor.train(gen, loss=own(old=old), minibatches=8, shuffle=true)")
    assert each[1] / 3 < shuffled[1] < 2 * each[1], "which scatters the rows of a prompt"
    assert once[0] == pytest.approx(shuffled[0], rel=0.01)
