"""`reuse=true`: continuations that start from the KV cache of what they continue."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, Free, Generate, Item, Loop, Train
from rldsl.plan.model import Plan
from rldsl.verify import verify
from rldsl.verify.tables import tables
from rldsl.verify.versions import check_versions
from tests.derive.test_forged import changed, events
from tests.samples import thorough_between
from tests.selection.programs import folder, numbers, run
from tests.verify.plans import folder as plan_folder

BODY = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=6)
  kept   = gen where parity(gen) + spread(gen) > 0.3
  more   = actor.generate(kept, n=2, max_new_tokens=4)
  tail   = actor.generate(more, max_new_tokens=3)
  side   = actor.generate(gen, max_new_tokens=2)
  vine   = actor.generate(prefixes(gen, every=2), n=2, max_new_tokens=2)
  r      = spread(tail)
  metric number = mean(column(tail)) + mean(column(side))
  metric lens   = mean(len(tail)) + 10 * mean(len(side)) + 100 * mean(len(vine))
  metric sum    = sum(tail.logprobs) + sum(side.logprobs) + sum(vine.logprobs)
  actor.train(tail, loss=pg(adv=r, weight=r), minibatches=2)
  metric after  = mean(mean(actor.logprobs(tail) by seq))
"""
PLACES = {
    "one rank": "place actor.* on mesh(0:1)",
    "dp": "place actor.* on mesh(0:4) dp=4",
    "tp": "place actor.* on mesh(0:2) tp=2",
    "pp": "place actor.* on mesh(0:2) pp=2",
    "all": "place actor.generate on mesh(0:4) dp=2 tp=2\nplace actor.train on mesh(0:4) dp=2 pp=2",
    "apart": "place actor.generate on mesh(0:2) dp=2 mbs=2\nplace actor.train on mesh(2:4) dp=2 zero=2",
}


def reusing(place: str) -> str:
    """The placement in which all generate calls have `reuse=true`."""
    lines = [f"{x} reuse=true" if "generate" in x else x for x in place.splitlines()]
    if not any("generate" in x for x in lines):
        lines.append(lines[0].replace("actor.*", "actor.generate") + " reuse=true")
    return "\n".join(lines)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("reuse"))


@pytest.fixture(scope="module")
def naive(base: Path) -> Any:
    return run(base, BODY, steps=2, place=PLACES["one rank"])


@pytest.mark.thorough
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_no_number_changes(base: Path, naive: Any, place: str) -> None:
    found = numbers(run(base, BODY, steps=2, place=reusing(place), like=naive))
    assert len(found) == 2
    for mine, theirs in zip(found, numbers(naive), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between(["one rank", "pp", "apart"]))
def test_invariant_is_bitwise(base: Path, place: str) -> None:
    top = 'loss pg2(logprobs: token; adv: seq) { return -mean(adv * mean(logprobs by seq)) }\n' \
        'model fixed = causal_lm("model", invariant=true) train adamw(lr=0.01)'
    body = BODY.replace("actor.", "fixed.").replace("pg(adv=r, weight=r)", "pg2(adv=r)")
    where = PLACES[place].replace("actor.", "fixed.")
    one, two = (numbers(run(base, body, top=top, steps=2, place=p)) for p in (where, reusing(PLACES[place]).replace(
        "actor.", "fixed.")))
    assert one == two


# --------------------------------------------------------------------------------------------------- plans

PROGRAM = """
use py "rewards.py" (size: gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model other = causal_lm("models/sft")
loss nll(logprobs: token;) { return -mean(mean(logprobs by seq)) }
flow f(steps=2) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  again  = actor.generate(prompt, n=4, max_new_tokens=6)   on mesh(0:4) dp=4
  kept   = gen where size(gen) > 1
  more   = actor.generate(kept, n=2, max_new_tokens=4)     on mesh(0:4) dp=4 REUSE
  metric len = mean(len(more)) + mean(len(again))
  actor.train(more, loss=nll())                            on mesh(0:4) dp=4
  end    = actor.generate(gen, max_new_tokens=2)           on mesh(0:4) dp=4
  metric end = mean(len(end))
}
"""


def compiled(text: str) -> Plan:
    with plan_folder() as here:
        (here / "f.rlf").write_text(text)
        return api.compile("f.rlf")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return compiled(PROGRAM.replace("REUSE", "reuse=true"))


def generated(frame: str, **changes: Any) -> Callable[[Plan], Plan]:
    return lambda plan: changed(plan, lambda e: replace(e, **changes)
                                if isinstance(e, Generate) and e.frame == frame else e)


def cache(plan: Plan) -> str:
    (found,) = [b for e in events(plan) if isinstance(e, Generate) for b in e.writes if b.startswith("gen.cache@")]
    return found


def trained_before(plan: Plan) -> Plan:
    """The training comes before the call that reads the cache."""
    def block(items: tuple[Item, ...]) -> tuple[Item, ...]:
        items = tuple(replace(i, body=block(i.body)) if isinstance(i, Loop) else i for i in items)
        at = next((n for n, i in enumerate(items) if isinstance(i, Generate) and i.cache_of), None)
        if at is None:
            return items
        trains = tuple(i for i in items if isinstance(i, Train))
        return (*items[:at], *trains, *(i for i in items[at:] if i not in trains))
    return replace(plan, body=block(plan.body))


def test_a_cache_of_an_earlier_version_is_refused(plan: Plan) -> None:
    assert not list(check_versions(tables(plan)))
    found = list(check_versions(tables(trained_before(plan))))
    assert {d.code for d in found} == {"RL0521"} and "KV cache of gen" in found[0].title


FORGED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "a cache of other prompts": (generated("more", cache_of="again"), "RL0614"),
    "a cache that is not read": (generated("more", cache_of=""), "RL0614"),
    "a cache of a frame that nothing generates": (generated("more", cache_of="prompt"), "RL0614"),
    "a cache that nobody writes": (lambda p: changed(p, lambda e: replace(
        e, writes=tuple(b for b in e.writes if b != cache(p))) if isinstance(e, Generate) else e), "RL0521"),
    "a cache of another extent": (lambda p: replace(p, values=tuple(
        replace(v, extent="row") if v.id == "gen.cache" else v for v in p.values)), "RL0615"),
    "a cache at another level": (lambda p: replace(p, values=tuple(
        replace(v, level="token") if v.id == "gen.cache" else v for v in p.values)), "RL0612"),
    "a cache of another dtype": (lambda p: replace(p, values=tuple(
        replace(v, dtype="i64") if v.id == "gen.cache" else v for v in p.values)), "RL0612"),
}


def test_the_plan_is_good(plan: Plan) -> None:
    assert verify(decode(encode(plan), "f.plan")).events == len(events(plan))
    (freed,) = [e for e in events(plan) if isinstance(e, Free) and cache(plan) in e.buffers]
    assert [e for e in events(plan) if isinstance(e, Train)][0].id > 0 and freed.because.endswith("actor.generate")


@pytest.mark.parametrize("forge, code", FORGED.values(), ids=FORGED.keys())
def test_a_forged_plan_is_refused(plan: Plan, forge: Callable[[Plan], Plan], code: str) -> None:
    with pytest.raises(Failure) as refused:
        verify(forge(plan))
    assert code in {d.code for d in refused.value.diagnostics}, [str(d) for d in refused.value.diagnostics][:4]


def test_memory_counts_the_cache(plan: Plan) -> None:
    without = compiled(PROGRAM.replace("REUSE", ""))
    ours, theirs = (max(c.peak_bytes for c in p.classes) for p in (plan, without))
    model = next(m for m in plan.models if m.name == "actor")
    kept = 8 * (22 - 1) * 2 * model.sizes.kv_heads * model.sizes.head_dim * 4 * model.layers
    held = [h for h in curves(plan, "cpu")[0].holdings if h.what == "gen.cache"]
    assert [h.bytes for h in held] == [kept], "as many bytes as a cache of so many tokens has (test_kept_cache.py)"
    assert ours >= theirs and not any(v.id == "gen.cache" for v in without.values)


REFUSED = {
    "another model": ("more   = actor", "more   = other", "another model"),
    "another layout": ("4 REUSE", "2 tp=2 REUSE", "another layout"),
    "trained in between": ("end    = actor.generate(gen, max_new_tokens=2)           on mesh(0:4) dp=4",
                           "end    = actor.generate(gen, max_new_tokens=2) on mesh(0:4) dp=4 reuse=true", "changes"),
    "new prompts": ("more   = actor.generate(kept,", "more   = actor.generate(prompt,", "not generated"),
    "a pick": ("more   = actor.generate(kept,", "more   = actor.generate(pick(gen, size(gen)),", "made by `pick`"),
    "others": ("more   = actor.generate(kept,", "more   = actor.generate(others(gen),", "made by `others`"),
    "another call": ("metric end = mean(len(end))", "lp = actor.logprobs(end) on mesh(0:4) dp=4 reuse=true\n"
                     "  metric end = mean(lp)", "only to `generate`"),
    "another block": ("end    = actor.generate(gen, max_new_tokens=2)           on mesh(0:4) dp=4",
                      "every 2 {\n  end    = actor.generate(gen, max_new_tokens=2) on mesh(0:4) dp=4 reuse=true\n"
                      "  metric end = mean(len(end))\n  }", "block"),
}


@pytest.mark.parametrize("old, new, why", REFUSED.values(), ids=REFUSED.keys())
def test_no_cache_to_reuse(old: str, new: str, why: str) -> None:
    text = PROGRAM.replace(old, new, 1)
    if why == "block":
        text = text.replace("  }\n  metric end = mean(len(end))\n", "  }\n")
    with pytest.raises(Failure) as refused:
        compiled(text.replace("REUSE", "reuse=true" if "end  " not in old else ""))
    (found,) = refused.value.diagnostics
    assert found.code == "RL0332" and why in found.label and found.help


def test_a_default_placement_is_without_it() -> None:
    """Calls without a placement follow the only one that has one, but its KV cache is its own."""
    text = re.sub(r" +on mesh\(0:4\) dp=4\n", "\n", PROGRAM).replace("REUSE", "reuse=true")
    assert text.count("on mesh") == 1
    generates = {e.frame: e for e in events(compiled(text)) if isinstance(e, Generate)}
    assert {f: e.cache_of for f, e in generates.items() if e.cache_of} == {"more": "gen"}


EVALUATED = """
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=3)
  actor.train(gen, loss=pg(adv=spread(gen), weight=parity(gen)))
  every 1 {
    eval tests {
      try   = tests.next()
      begun = actor.generate(try, max_new_tokens=5)
      rest  = actor.generate(begun, n=2, max_new_tokens=4)
      metric sum = mean(len(rest)) + mean(rest.logprobs)
    }
  }
"""


@pytest.mark.thorough
def test_in_an_evaluation(base: Path) -> None:
    top = 'data tests = jsonl("answers.jsonl", batch=5, max_prompt_tokens=16, shuffle=false, kind="prompts")'
    one = run(base, EVALUATED, top=top, place=PLACES["apart"])
    two = run(base, EVALUATED, top=top, place=reusing(PLACES["apart"]), like=one)
    for mine, theirs in zip(numbers(two), numbers(one), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
