"""The verifier against plans with mistakes in them: every mutant that the simulator calls harmful has a code.

The simulator is the measure and the verifier what is measured: they share nothing but the records of a plan and the
pure functions that a rank runs. What the verifier accepts is simulated in every case; of what it rejects, enough to
say how many of its rejections keep harm away."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from functools import lru_cache
from importlib import import_module

import pytest

from rldsl.diag import Failure
from rldsl.memory import reshard_buffers
from rldsl.memory.holder_classes import HolderClass
from rldsl.plan import references
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import EVENTS, Compute, When, Free, Lengths, Loop, Realloc
from rldsl.plan.model import ExpertBlock, Growth, Plan, Recurrence, Sizes, Tower
from rldsl.plan.projection import event_paths
from rldsl.reshard import planning
from rldsl.reshard.records import ReshardPlan
from rldsl.verify import STAGES, issue_order, reshards, saves, verify
from rldsl.verify.tables import tables
from tests.plan.sample import grpo
from tests.samples import thorough_between
from tests.verify.faults import change, codes, faults, row
from tests.verify.mutate import Mutator, at, put, records
from tests.verify.mutate_rows import OPERATORS, row_mutants
from tests.verify.plans import compiled
from tests.verify.stepper import simulate

NAMES = ("sample", "ppo", "dpo", "grpo", "sync", "rows", "replay", "lag", "ahead", "vine", "texts", "eval", "dynamic", "small")
EACH, SEED = 500, 21  # of 10 plans, and a tenth of it of the three with the most events: 5,100 mutants
LARGE = ("vine", "texts", "ahead")
ROWS = 4 * len(OPERATORS)  # of each plan with rows that are made of rows: so many of each operator
LENIENT = (Lengths, Free, Compute)  # lengths and tokens may be read besides, and what a free touches is said twice


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {"sample": grpo(), "sizes": with_sizes(grpo()), **compiled()}


def with_sizes(plan: Plan) -> Plan:
    """The plan with a model that carries states and reads images."""
    grown = Growth(8, 4, 16, 64, 32, 2)
    sizes = Sizes(whole_sequences=True, other_norms=True, uncounted="its router",
                  recurrences=(Recurrence(4, (1,), False, ("mixer",), grown, grown, grown, 64, 32, 96),),
                  towers=(Tower(4, ("visual",), 48, 256, 128, 512, 1000, 64),), composed_scores=True,
                  gated_products=True, capped_logits=True, rotated_halves=True,
                  expert_blocks=(ExpertBlock(4, (0,), True, 256, 128, 512, 300, 64, 32, 96),))
    return replace(plan, models=tuple(replace(m, sizes=sizes) for m in plan.models))


@pytest.fixture(autouse=True)
def once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from layouts and models alone is found once for many mutants."""
    found = lru_cache(None)(planning.plan_reshard)
    for module, name, function in (
            (reshards, "examine_reshard", lru_cache(None)(reshards.examine_reshard)),
            (saves, "examine_save", lru_cache(None)(saves.examine_save)),
            (issue_order, "deadlock_reason", lru_cache(None)(issue_order.deadlock_reason)),
            (planning, "plan_reshard", found), (reshard_buffers, "plan_reshard", found),
            (import_module("rldsl.memory.lifetimes"), "realloc_bytes", moved(reshard_buffers.realloc_bytes))):
        monkeypatch.setattr(module, name, function)
    of_record = of_each(references.references)  # most records of a mutant are the plan's own
    for checks in ("references", "dataflow", "programs", "evaluations"):
        monkeypatch.setattr(import_module(f"rldsl.verify.{checks}"), "references", of_record)


def of_each(find: Callable[[object], Iterable[object]]) -> Callable[[object], tuple[object, ...]]:
    """What is found in each record, once; records do not change."""
    seen: dict[int, tuple[object, tuple[object, ...]]] = {}

    def found(record: object) -> tuple[object, ...]:
        if (known := seen.get(id(record))) is None:
            known = seen[id(record)] = record, tuple(find(record))  # with the record itself: its id is not used again
        return known[1]

    return found


def moved(find: Callable[..., int]) -> Callable[..., int]:
    """`moves.realloc_bytes`, which need not look at the same way twice."""
    seen: dict[object, int] = {}

    def found(plan: Plan, way: tuple[ReshardPlan, ...], e: Realloc, ranks: HolderClass) -> int:
        key = (*map(id, way), e.model, e.source, e.src, e.dst, e.decay, ranks.ranks, plan.models, plan.layouts, plan.meshes)
        if key not in seen:
            seen[key] = find(plan, way, e, ranks)
        return seen[key]

    return found


@pytest.mark.parametrize("name", thorough_between(NAMES))
def test_a_plan_verifies_after_a_round_trip_and_runs(name: str, plans: dict[str, Plan]) -> None:
    plan = decode(encode(plans[name]), name)
    assert plan == plans[name] and verify(plan).events > 10
    verdicts = [simulate(plan, random.Random(i)) for i in range(5)]
    assert all(v.ends for v in verdicts), verdicts
    assert len({v.meaning for v in verdicts}) == 1, "what a plan means does not depend on who comes first"


def test_the_plans_have_every_kind_of_event_and_record(plans: dict[str, Plan]) -> None:
    """So the mutants reach every field of every record."""
    found = {type(r) for plan in plans.values() for _, r in records(plan)}
    assert {*EVENTS.values(), Loop, When} <= found
    nested = {f.type for cls in found for f in fields(cls)}
    assert found >= {cls for cls in vars(__import__("rldsl.plan.model", fromlist=["x"])).values()
                     if is_dataclass(cls) and cls is not Plan}, nested


@pytest.mark.many
@pytest.mark.thorough
def test_every_harmful_mutant_is_rejected(plans: dict[str, Plan], capsys: pytest.CaptureFixture[str]) -> None:
    table: Counter[tuple[str, str]] = Counter()
    by_check: dict[str, Counter[str]] = defaultdict(Counter)
    touched: set[str] = set()
    holes: list[str] = []
    for name in NAMES:
        plan = plans[name]
        meaning, mutator = simulate(plan, random.Random(0)).meaning, Mutator(plan, random.Random(SEED))
        for n in range(EACH // 10 if name in LARGE else EACH):
            told, mutant = mutator.mutant()
            touched.update(told.split("; "))
            found = {d.code for d in faults(mutant)}  # a traceback would end the test here
            if found and n % 4:
                table["not simulated", "rejected"] += 1
                continue
            verdict = simulate(mutant, random.Random(n))
            kind = "harmful" if not verdict.ends else "same" if verdict.meaning == meaning else "other"
            table[kind, "rejected" if found else "accepted"] += 1
            for check in checks(mutant) if found and kind == "harmful" else ():
                by_check[check]["harmful"] += 1
            if kind == "harmful" and not found:
                holes.append(f"{name} {n}: {told}: {verdict.why}")
    lines = [f"{count:6} {kind} {done}" for (kind, done), count in sorted(table.items())]
    lines += [f"{count['harmful']:6} harmful mutants rejected by {check}" for check, count in sorted(by_check.items())]
    with capsys.disabled():
        print("", f"{sum(table.values())} mutants of {len(NAMES)} plans", *lines, sep="\n")
    assert not holes, holes
    assert sum(table.values()) >= 5000 and table["harmful", "rejected"] > 500
    assert table["same", "accepted"] > 200, "what does no harm is let through"
    assert len(by_check) >= 12 and len({t.split(".")[0] for t in touched if "." in t}) >= 30


@pytest.mark.thorough
@pytest.mark.many
def test_every_mistake_with_rows_is_rejected(plans: dict[str, Plan]) -> None:
    """Consistent mistakes with rows, buffers and tokenizers; every operator makes harmful ones."""
    harmful: Counter[str] = Counter()
    for name in ("rows", "replay", *LARGE):
        for n, (told, mutant) in enumerate(row_mutants(plans[name], random.Random(SEED), ROWS)):
            found = faults(mutant)
            if found and harmful[told]:
                continue  # the simulator has confirmed this operator
            verdict = simulate(mutant, random.Random(n))
            assert found or verdict.ends, f"{name} {n}: {told}: {verdict.why}"
            harmful[told] += not verdict.ends
    assert all(harmful[told] for told in OPERATORS), harmful


def test_a_computation_works_on_the_rows_of_its_event(plans: dict[str, Plan]) -> None:
    """Its spread divides them, and its program names no others, not even such as have a name or numbers in common."""
    vine, replay = plans["vine"], plans["replay"]
    tokens = next(e for e, _ in event_paths(vine) if isinstance(e, Compute) and e.frames == ("gen",) and e.inputs)
    assert codes(change(vine, tokens.id, frames=("cuts",))) == {"RL0617"}, "`gen` is a prompt space of `cuts`, too"
    at, p = next((i, p) for i, p in enumerate(vine.programs) if any(n.attr("frame") == "full" for n in p.nodes))
    other = [replace(n, attrs=(("frame", "more"),)) if n.attr("frame") == "full" else n for n in p.nodes]
    assert codes(row(vine, "programs", at, nodes=tuple(other))) == {"RL0617"}, "`more` has the rows of `full`"
    means = next(e for e, _ in event_paths(replay) if isinstance(e, Compute) and e.frames == ("first",))
    number = next(i for i, s in enumerate(replay.spreads) if s.id == means.spread)
    assert "RL0538" in codes(row(replay, "spreads", number, frames=("gen",)))


def checks(plan: Plan) -> list[str]:
    """The checks of the first stage that find something."""
    t = tables(plan)
    for stage in STAGES:
        if found := [name for name, check in stage if any(True for _ in check(t))]:
            return found
    return []


@pytest.mark.many
def test_every_field_of_every_record_is_mutated_and_no_mutant_makes_a_traceback(plans: dict[str, Plan]) -> None:
    """Each field twice, in files: what the reader refuses has a code as well."""
    draw, done = random.Random(3), Counter[str]()
    for plan in plans.values():
        mutator = Mutator(plan, draw)
        for cls, places in mutator.places.items():
            for f in fields(cls):
                if cls is Plan or f.name == "body" or done[f"{cls.__name__}.{f.name}"] >= 2:
                    continue
                done[f"{cls.__name__}.{f.name}"] += 1
                mutant = mutator.field(plan, draw.choice(places), f.name)
                try:
                    verify(decode(encode(mutant), "x.plan"))
                except Failure as wrong:
                    assert wrong.diagnostics and all(d.code.startswith("RL0") for d in wrong.diagnostics)
    assert min(done.values()) >= 1 and len(done) > 180, len(done)


@pytest.mark.parametrize("name", ["ppo", "dynamic"])
def test_the_simulator_sees_plain_harm(name: str, plans: dict[str, Plan]) -> None:
    """It is a measure only if it tells good from bad by itself."""
    plan = plans[name]
    a, *rest = plan.classes
    assert not simulate(replace(plan, classes=(replace(a, events=a.events[::-1]), *rest)), random.Random(0)).ends
    assert not simulate(replace(plan, classes=(replace(a, events=a.events[1:]), *rest)), random.Random(0)).ends
    assert not simulate(replace(plan, classes=rest), random.Random(0)).ends
    assert not simulate(replace(plan, groups=()), random.Random(0)).ends
    assert not simulate(replace(plan, values=plan.values[:3]), random.Random(0)).ends
    mutator = Mutator(plan, random.Random(5))
    frees = [p for p in mutator.places[Free]]
    harmless = mutator.field(plan, frees[-1], "because")
    assert simulate(harmless, random.Random(0)) == simulate(plan, random.Random(1))


def test_a_buffer_of_another_kind_anywhere_has_a_code(plans: dict[str, Plan]) -> None:
    """Parameters where values stand, and values where parameters do."""
    for name in ("sample", "dynamic", "sync"):
        plan = plans[name]
        mutator = Mutator(plan, random.Random(1))
        model = f"{plan.models[0].name}@{plan.layouts[0].id}"
        value = f"{plan.values[0].id}@{plan.spreads[0].id}"
        for cls in EVENTS.values():
            for path in mutator.places[cls][:1]:
                for field, extra in (("reads", model), ("writes", model), ("reads", value), ("writes", value)):
                    held = at(plan, (*path, field))
                    wrong = put(plan, (*path, field), (*held, extra))
                    assert faults(wrong) or extra in held or cls in LENIENT, (name, cls.__name__, field, extra)


def test_the_offline_simulator_is_not_fooled_by_text(plans: dict[str, Plan]) -> None:
    """What only people read changes nothing, for the verifier and for the simulator."""
    plan = plans["grpo"]
    mutator = Mutator(plan, random.Random(2))
    right = simulate(plan, random.Random(0))
    for path in mutator.places[Free]:
        for field in ("at", "because"):
            mutant = put(plan, (*path, field), "something else")
            assert not faults(mutant) and simulate(mutant, random.Random(0)) == right
