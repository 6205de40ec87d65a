"""The library, and our transcriptions, against the numbers that the systems themselves computed (`recorded.json`,
written by `make oracles RECORD=--record`). No system is needed here."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.library.harness import Given
from tests.library.more_systems import SYSTEMS as FORMULAS
from tests.library.systems import table
from tests.library.test_algorithms_page import LOSSES
from tests.oracles.__main__ import compare, stale
from tests.oracles.cases import BATCHES, Numbers, case, case_id, difference, fresh_of, ours, values_of
from tests.oracles.record import load
from tests.oracles.rows import POLICY, ROWS, Row
from tests.samples import thorough_between

RECORDED = load()
EACH = [pytest.param(row, id=f"{row.name} {sorted(row.options)}") for row in ROWS]
TRANSCRIBED = [pytest.param(row, id=row.name) for row in POLICY if row.same and row.call in FORMULAS]
WHOLE_GROUPS = ("ragged 1", "ragged 2", "far", "long")  # what the transcriptions are written for


def test_every_comparison_is_recorded_and_no_other() -> None:
    assert set(RECORDED) == {case_id(row, name) for row in ROWS for name in row.batches}


@pytest.mark.parametrize("row", thorough_between(EACH))
def test_the_call_gives_the_numbers_of_the_system(row: Row) -> None:
    for name in row.batches:
        theirs, mine = RECORDED[case_id(row, name)], ours(row, name)
        assert set(theirs.grads) == set(mine.grads) == set(fresh_of(row))
        found = max([*map(difference, mine.values, theirs.values),
                     *(difference(mine.grads[n], theirs.grads[n]) for n in theirs.grads)])
        assert len(mine.values) == len(theirs.values)
        assert (found <= row.tolerance) if row.same else (found > 1e-3), f"{name}: {found}"


@pytest.mark.parametrize("row", TRANSCRIBED)
def test_our_transcription_gives_the_numbers_of_the_system(row: Row) -> None:
    for name in set(row.batches) & set(WHOLE_GROUPS):
        b, given = BATCHES[name], values_of(row, name)
        given.setdefault("chosen", Given("token", "gen", torch.zeros(sum(b.lens["gen"]), dtype=torch.float64)))
        x = given["x"].data.clone().requires_grad_(True)  # type: ignore[union-attr]
        found = FORMULAS[row.call](table(b, given, x))
        parts = found if isinstance(found, tuple) else (found,)
        lens = b.lens["gen"]
        flat = [torch.cat([seq[:n] for seq, n in zip(p, lens, strict=True)]) if p.dim() == 2 else p.reshape(-1)
                for p in parts]
        theirs = RECORDED[case_id(row, name)]
        for mine, values in zip(flat, theirs.values, strict=True):
            assert difference(mine.detach().tolist(), values) <= row.tolerance
        if row.call.partition("(")[0] in LOSSES:
            (grad,) = torch.autograd.grad(found + 0 * x.sum(), x)
            largest = max(1.0, *map(abs, theirs.grads["x"]))  # terms of e ** 60 cancel in "far"
            scaled = [v / largest for v in theirs.grads["x"]]
            assert difference((grad / largest).tolist(), scaled) <= row.tolerance


@pytest.mark.parametrize("row", EACH)
def test_other_numbers_would_be_seen(row: Row) -> None:
    """No recorded answer is so flat that everything agrees with it."""
    found = [RECORDED[case_id(row, name)] for name in row.batches]
    assert any(v for numbers in found for values in [*numbers.values, *numbers.grads.values()] for v in values)


@pytest.mark.parametrize(("system", "right", "wrong"), [
    ("verl", 'grpo_free(old=old, adv=adv, dual=3, bound=20, agg="seq-mean-token-sum-norm", horizon=512)',
     "dr_grpo(old=old, adv=adv, horizon=512)"),
    ("verl", "grpo(old=old, adv=adv, ref=ref, beta=0.001, dual=3, bound=20, kl_bound=20, kl_most=10, kl_through=true, "
             'agg="token-mean")', "grpo(old=old, adv=adv, ref=ref, beta=0.001, kl_through=true)"),
    ("verl", 'gspo(old=old, adv=r, low=0.2, high=0.2, most=10, agg="token-mean")',
     "gspo(old=old, adv=r, low=0.2, high=0.2, most=10)"),
    ("verl", "gmpo(old=old, adv=r, low=0.2, high=0.2)", "gmpo(old=old, adv=r)"),
    ("verl", "group_norm(r, by_std=false, alone=true)", "group_norm(r, by_std=false)"),
    ("verl", "optimal_baseline(r, len(gen), alone=true)", "optimal_baseline(r, len(gen))"),
    ("verl", "dppo_tv(old=old, adv=adv, most=3)", "dppo_tv(old=old, adv=adv)"),
    ("verl", "best_of_group(r)", "best_of_group(r, by_std=false)"),
    ("TRL", "opsm(old=old, adv=r, sampled=old, most_kl=0.05)", "ppo_clip(old=old, adv=r)"),
    ("TRL", "wpo(ref_chosen=rw, ref_rejected=rl, weight=wt, beta=0.3, most=1e30)",
     "wpo(ref_chosen=rw, ref_rejected=rl, weight=wt, beta=0.3)"),
    ("TRL", "grpo_entropy(old=old, adv=adv)", "grpo_entropy(old=old, adv=adv, share=0.5)"),
    ("TRL", "aot(ref_chosen=rw, ref_rejected=rl, beta=0.3)", "dpo(ref_chosen=rw, ref_rejected=rl, beta=0.3)"),
    ("OpenRLHF", "dapo(old=old, adv=adv, bound=20)", "dapo(old=old, adv=adv)"),
    ("OpenRLHF", "clip(leave_one_out(r), -10, 10)", "leave_one_out(r)"),
    ("TRL", 'grpo(old=old, adv=adv, ref=ref, beta=0.04, kl_by_ratio=true, agg="token-mean")',
     'grpo(old=old, adv=adv, ref=ref, beta=0.04, agg="token-mean")')])
def test_a_call_without_one_of_its_options_is_seen(system: str, right: str, wrong: str) -> None:
    """Calls that a page once gave for a system differ from its numbers on some batch."""
    row = next(r for r in ROWS if r.system == system and r.call == right)
    far = [max(map(difference, ours(replace(row, call=wrong), name).values, RECORDED[case_id(row, name)].values))
           for name in row.batches]
    assert max(far) > 1e-4


def told(row: Row, **changes: Any) -> dict[str, Any]:
    """Results as a server gives them, from the recorded numbers."""
    found = {name: RECORDED[case_id(row, name)] for name in row.batches}
    return {case_id(row, name): {"values": n.values, "grads": n.grads} | changes for name, n in found.items()}


def test_a_comparison_sees_values_gradients_and_errors() -> None:
    row = next(r for r in ROWS if fresh_of(r))
    value, grad, problem = compare(row, told(row))
    assert max(value, grad or 0) < 1e-12 and not problem
    assert compare(row, told(row, values=[[1e9]]))[0] > 0.5
    assert compare(row, told(row, grads={"x": [0.0]}))[1] == float("inf")
    assert compare(row, told(row, values=[[1.0], [2.0]]))[2] and compare(row, told(row, error="no"))[2] == "no"


def test_answers_that_changed_are_told() -> None:
    row = ROWS[0]
    assert stale(told(row)) == [] and stale(told(row, error="no")) == []
    assert "RECORD=--record" in stale(told(row, values=[[1e9]]))[0]
    assert stale({"a new case": {"values": [[1.0]], "grads": {}}})


def test_a_case_survives_json() -> None:
    row = ROWS[0]
    there = case(row, "far")
    assert json.loads(json.dumps(there)) == there
    assert there["values"]["x"]["data"] == values_of(row, "far")["x"].data.tolist()  # type: ignore[union-attr]


@pytest.mark.parametrize(("one", "other", "far"), [
    ([1.0, 2.0], [1.0, 2.0], 0.0), ([1.0], [1.0, 2.0], float("inf")), ([float("nan")], [1.0], float("inf")),
    ([2e6], [1e6], 1.0), ([0.0], [1e-3], 1e-3), ([], [], 0.0)])
def test_difference(one: list[float], other: list[float], far: float) -> None:
    assert difference(one, other) == pytest.approx(far)


def test_a_changed_number_is_a_difference() -> None:
    row = ROWS[0]
    mine = ours(row, "far")
    moved = replace(mine, values=[[mine.values[0][0] * (1 + 1e-8)]])
    assert isinstance(moved, Numbers) and difference(moved.values[0], mine.values[0]) > row.tolerance
