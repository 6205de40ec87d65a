"""Plans with models that follow others: what the compiler writes, what the verifier refuses, and the messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.graph import picture
from rldsl.inspect.show import show
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, Infer, Item, Load, Loop, Offload, Onload, Realloc, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import rank_classes, walk
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import summary
from rldsl.source import SourceFile
from rldsl.verify import verify
from tests.tiny import make_model

PROGRAM = """
use std.sft (sft)
cluster nodes=1 gpus=4
data rows = jsonl("rows.jsonl", batch=6)
model actor = causal_lm("{base}") train adamw(lr=0.02)
model ref   = causal_lm("{base}")
model slow  = causal_lm("{base}")
{top}
flow f(steps=3) {{
  row = rows.next()
  r = ref.logprobs(row)    on mesh(0:2) dp=2
  s = ref.logprobs(row)    on mesh(2:4) tp=2
  q = slow.logprobs(row)   on mesh(2:4) dp=2 offload=true
  metric m = mean(r) + mean(s) + mean(q)
  actor.train(row, loss=sft())   on mesh(0:2) pp=2
  {moves}
}}
"""
MOVES = "sync ref from actor every 2\n  ema slow from actor 0.9\n  save slow to \"x\""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "sft")


def text(base: Path, moves: str = MOVES, top: str = "") -> str:
    return PROGRAM.format(base=base, moves=moves, top=top)


def compiled(base: Path, folder: Path, moves: str = MOVES, top: str = "") -> Plan:
    (folder / "sync.rlf").write_text(text(base, moves, top))
    return api.compile(str(folder / "sync.rlf"))


@pytest.fixture(scope="module")
def plan(base, tmp_path_factory) -> Plan:
    return compiled(base, tmp_path_factory.mktemp("plan"))


def syncs(plan: Plan) -> list[Realloc]:
    return [e for e, _ in walk(plan.body) if isinstance(e, Realloc)]


def test_what_the_plan_says(plan):
    both = {m.name: m for m in plan.models}
    assert (both["ref"].updated_from, both["slow"].updated_from, both["actor"].updated_from) == (("actor",), ("actor",), ())
    ema, first, follow = sorted(syncs(plan), key=lambda e: (e.model != "slow", not e.source))
    train = next(e for e, _ in walk(plan.body) if isinstance(e, Train))
    assert (ema.source, ema.decay, ema.source_version) == ("actor", 0.9, train.at)
    assert ema.reads == (f"actor@{ema.src}", f"slow@{ema.dst}") and ema.writes == (f"slow@{ema.dst}",)
    assert (first.model, first.source, first.decay) == ("ref", "actor", 0.0)
    assert (follow.model, follow.source, follow.src) == ("ref", "", first.dst) and first.bytes > 0
    assert "`ema slow from actor 0.9`" in ema.because and "`sync ref from actor`" in first.because
    assert "updated from actor" in show(plan)
    assert decode(encode(plan), "x.plan") == plan


def test_an_offloaded_target_comes_and_goes(base, tmp_path):
    plan = compiled(base, tmp_path, "ema slow from actor 0.9")
    slow = [type(e) for e, _ in walk(plan.body) if getattr(e, "model", "") == "slow"]
    assert slow == [Load, Offload, Onload, Infer, Realloc, Offload], "it stays until its ranks have other calls"


def test_the_nearest_copy_gives_the_parameters(base, tmp_path):
    """ref lies as generation's copy of the actor does, so its new version does not move at all."""
    program = text(base, "").replace("  r = ref", "  sync ref from actor\n  a = actor.logprobs(row) on mesh(0:2) dp=2\n"
                                     "  metric a = mean(a)\n  sync ref from actor\n  r = ref")
    (tmp_path / "near.rlf").write_text(program)
    first, second = [e for e in syncs(api.compile(str(tmp_path / "near.rlf"))) if e.source]
    assert first.bytes > 0 and second.bytes == 0 and second.src == second.dst != first.src


def test_the_order_of_old_and_new_versions_is_kept(base, tmp_path):
    """Calls with old copies on idle ranks come before the train that makes them old."""
    old = """  a = actor.logprobs(row) on mesh(2:4) dp=2
  b = actor.entropy(row) on mesh(2:4) dp=2
  metric a = mean(a) + mean(b)
  r = ref"""
    (tmp_path / "old.rlf").write_text(text(base, "").replace("  r = ref", old))
    verify(api.compile(str(tmp_path / "old.rlf")))


def test_a_target_that_is_only_saved_lies_with_its_source(base, tmp_path):
    plan = compiled(base, tmp_path, 'ema mine from actor 0.5\n  save mine to "x"',
                    f'model mine = causal_lm("{base}", dtype="bfloat16")')
    (event,) = syncs(plan)
    assert event.bytes == 0 and event.src == event.dst
    assert [e.layout for e, _ in walk(plan.body) if isinstance(e, Load) and e.model == "mine"] == [event.dst]


def test_pictures(base):
    graph = api.build_graph(SourceFile("sync.rlf", text(base)))
    assert "ref from actor" in picture.mermaid(graph) and "ema 0.9" in picture.dot(graph)
    assert "ref.sync = sync(ref from actor)" in picture.text(graph)
    versions = [(a, b, label) for a, b, label, version in picture.edges(graph) if version]
    assert ("actor.train", "ref.sync", "actor") in versions and ("ref.sync", "r", "ref") in versions
    assert ("slow.ema", "slow.ema", "slow") in versions and ("slow.ema", "slow.save", "slow") in versions


# ----------------------------------------------------------------------------------------------- mutated plans


def edited(items: tuple[Item, ...], edit: Callable[[Event], tuple[Event, ...]]) -> tuple[Item, ...]:
    return tuple(y for x in items for y in (edit(x) if isinstance(x, Event) else
                                            (replace(x, body=edited(x.body, edit)),)))


def mutant(plan: Plan, edit: Callable[[Event], tuple[Event, ...]]) -> Plan:
    body = edited(plan.body, edit)
    return replace(plan, body=body, classes=rank_classes(plan.meshes, body, plan.header.world, {}))


def on_sync(model: str, **new: object) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        return mutant(plan, lambda e: (replace(e, **new),) if isinstance(e, Realloc) and e.model == model and e.source
                      else (e,))
    return change


def without(model: str, source: str) -> Callable[[Plan], Plan]:
    return lambda plan: mutant(plan, lambda e: () if isinstance(e, Realloc) and (e.model, e.source) == (model, source)
                               else (e,))


def before_the_train(plan: Plan) -> Plan:
    event = next(e for e in syncs(plan) if e.model == "ref" and e.source)
    follow = next(e for e in syncs(plan) if e.model == "ref" and not e.source)
    rest = without("ref", "")(without("ref", "actor")(plan))
    return mutant(rest, lambda e: (event, follow, e) if isinstance(e, Train) else (e,))


def other_source(plan: Plan) -> Plan:
    """ref from slow, with everything that goes with it."""
    slow = next(e for e in syncs(plan) if e.model == "slow")
    return on_sync("ref", source="slow", src=slow.dst, reads=(f"slow@{slow.dst}",), source_version=slow.at,
                   **moved(plan, slow.dst))(plan)


def trained_too(plan: Plan) -> Plan:
    return replace(plan, models=tuple(replace(m, updated_from=("ref",)) if m.name == "actor" else m for m in plan.models))


def wrong_layout(plan: Plan) -> Plan:
    ref = next(e for e in syncs(plan) if e.model == "ref" and e.source)
    return on_sync("ref", src=ref.dst, reads=(f"actor@{ref.dst}",), **moved(plan, ref.dst))(plan)


def moved(plan: Plan, src: str) -> dict[str, object]:
    """What the sync of ref would say if it came from layout `src`."""
    ref = next(e for e in syncs(plan) if e.model == "ref" and e.source)
    layouts, meshes = {x.id: x for x in plan.layouts}, {m.id: m for m in plan.meshes}
    a, b = layouts[src], layouts[ref.dst]
    model = next(m for m in plan.models if m.name == "ref")
    total = summary(plan_reshard(model, a, meshes[a.mesh], b, meshes[b.mesh], plan.header.devices_per_node), model)
    mesh = next(m.id for m in plan.meshes if {*m.members()} == {*meshes[a.mesh].members(), *meshes[b.mesh].members()})
    return dict(mesh=mesh, bytes=total.bytes, messages=total.messages, digest=total.digest)


def mean(model: str, layout: str) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, models=tuple(replace(m, ema_layout=layout) if m.name == model else m
                                                   for m in plan.models))


def other_shapes(plan: Plan) -> Plan:
    return replace(plan, models=tuple(replace(m, params=m.params[1:]) if m.name == "ref" else m for m in plan.models))


@pytest.mark.parametrize("change, code", [
    (wrong_layout, "RL0521"),
    (without("ref", "actor"), "RL0528"),
    (without("slow", "actor"), "RL0528"),
    (without("ref", ""), "RL0521"),
    (before_the_train, "RL0528"),
    (other_source, "RL0528"),
    (on_sync("ref", source_version=""), "RL0528"),
    (on_sync("ref", source_version="elsewhere"), "RL0528"),
    (on_sync("ref", source=""), "RL0614"),
    (on_sync("slow", decay=0.0), "RL0614"),
    (on_sync("slow", decay=1.5), "RL0615"),
    (on_sync("slow", source="slow"), "RL0615"),
    (on_sync("slow", source="nobody"), "RL0610"),
    (on_sync("ref", bytes=12), "RL0526"),
    (on_sync("ref", digest="0"), "RL0526"),
    (trained_too, "RL0612"),
    (other_shapes, "RL0615"),
    (mean("slow", ""), "RL0615"),
    (mean("slow", "nowhere"), "RL0610"),
    (mean("actor", "L0"), "RL0612"),
])
def test_the_verifier_refuses(change, code, plan):
    verify(plan)
    with pytest.raises(Failure) as caught:
        verify(change(plan))
    assert code in {d.code for d in caught.value.diagnostics}, [d.title for d in caught.value.diagnostics]


def test_a_step_loop_is_all_there_is(plan):
    assert [type(i) for i in plan.body].count(Loop) == 1


# --------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("moves, code, underlined, words", [
    ("sync actor from ref", "RL0221", "actor", "is trained"),
    ("ema actor from ref 0.5", "RL0221", "actor", "is trained"),
    ("sync ref from ref", "RL0222", "ref", "copied to itself"),
    ("sync ref from judge", "RL0222", "sync ref from judge", "reward_model"),
    ("sync ref from actr", "RL0101", "actr", "unknown name `actr`"),
    ("sync row from actor", "RL0203", "row", "expected a model"),
    ("sync ref from rows", "RL0203", "rows", "expected a model"),
    ("ema ref from actor 1.5", "RL0205", "1.5", "between 0 and 1"),
    ("ema ref from actor -0.1", "RL0205", "-0.1", "between 0 and 1"),
    ("ema ref from actor true", "RL0205", "true", "between 0 and 1"),
    ("ema ref from actor mean(r)", "RL0211", "mean(r)", "constant"),
    ("sync ref from actor every 0", "RL0205", "0", "at least 1"),
    ("sync ref from actor every 1.5", "RL0205", "1.5", "at least 1"),
    ("sync a from b", "RL0319", "sync a from b", "no call uses either"),
])
def test_mistakes(moves, code, underlined, words, base):
    top = f'model judge = reward_model("{base}")\nmodel a = causal_lm("{base}")\nmodel b = causal_lm("{base}")'
    (found,) = api.check(text(base, moves, top), "sync.rlf")
    assert (found.code, found.span.text) == (code, underlined) and words in found.title


@pytest.mark.parametrize("body", ["fn g(x: token) {\n  sync ref from actor\n  return x\n}",
                                  "loss g(logprobs: token;) {\n  ema ref from actor 0.5\n  return mean(logprobs)\n}"])
def test_only_in_the_flow(body, base):
    (found,) = api.check(text(base, top=body), "sync.rlf")
    assert found.code == "RL0212" and "is not allowed" in found.title


@pytest.mark.parametrize("sizes, words", [
    (dict(num_hidden_layers=2), "layers: 2 in `mine`, 4 in `actor`"),
    (dict(intermediate_size=40), "40 × 32 in `mine`"),
    (dict(rms_norm_eps=1e-3), "rms_norm_eps in config.json: 0.001 in `mine`"),
    (dict(family="llama"), "family: llama in `mine`, qwen3 in `actor`"),
])
def test_models_of_other_architectures(sizes, words, base, tmp_path):
    other = make_model(tmp_path / "other", **sizes)
    with pytest.raises(Failure) as caught:
        compiled(base, tmp_path, "ema mine from actor 0.5\n  save mine", f'model mine = causal_lm("{other}")')
    (found,) = caught.value.diagnostics
    assert found.code == "RL0321" and words in found.label, found.label
    assert [x.span.text.split()[1] for x in found.labels] == ["mine", "actor"]


@pytest.mark.parametrize("moves, warned", [
    ("sync ref from still", ["still"]), ("sync ref from actor\n  sync ref from still", []),
    ("sync slow from ref", ["ref"]), ("sync ref from actor\n  sync slow from ref", []),
])
def test_following_what_never_changes(moves, warned, base):
    said = api.examine(text(base, moves, f'model still = causal_lm("{base}")'), "sync.rlf")
    assert [d.span.text for d in said if d.code == "RL0904"] == warned
