"""The verifier on plans that the compiler made: as they are, and mutated as in tests/plan."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from rldsl import api
from rldsl.plan.codec import decode, encode
from rldsl.plan.verify import verify
from tests.plan.simulator import runs
from tests.plan.test_verify import faults, mutants
from tests.tiny import make_all

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    tiny = make_all(tmp_path_factory.mktemp("tiny"))
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    rules = tiny / "two.rlf"  # for a program with sync, states and a checkpoint
    rules.write_text("cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) tp=2\nplace slow.* on mesh(0:2) dp=2\n")
    return {
        "ppo": api.compile(str(EXAMPLES / "ppo.rlf"), {**sets, "rm": str(tiny / "models/rm"), "batch": 8}),
        "arithmetic_grpo": api.compile(str(EXAMPLES / "arithmetic_grpo.rlf"), sets),
        "dpo": api.compile(str(EXAMPLES / "dpo.rlf"), {"base": sets["base"]}),
        "small": api.compile(str(EXAMPLES.parent / "tests/checkpoint/small.rlf"), sets, str(rules)),
        "dynamic": api.compile(str(Path(__file__).with_name("dynamic.rlf")), sets),
    }


@pytest.mark.parametrize("name", ["ppo", "arithmetic_grpo", "dpo", "dynamic", "small"])
def test_a_compiled_plan_verifies_after_a_round_trip(plans, name):
    plan = decode(encode(plans[name]), name)
    assert plan == plans[name] and verify(plan).events > 10 and runs(plan)


@pytest.mark.parametrize("name", ["ppo", "arithmetic_grpo", "dynamic", "small"])
def test_mutants_of_a_compiled_plan_are_rejected_or_still_run(plans, name):
    plan, draw = plans[name], random.Random(11)
    found: Counter[str] = Counter()
    for n in range(300):
        mutant = mutants(plan, draw)
        wrong = faults(mutant)
        found.update({d.code for d in wrong} or {"accepted"})
        if not wrong:
            assert runs(mutant), f"mutant {n} is accepted and does not run"
    assert found["accepted"] < 75 and len(found) >= 10, found
