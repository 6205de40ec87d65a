"""Offload in plans: what goes and comes back when, what each side holds, and what may not be."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.inspect.diff import diff
from rldsl.inspect.show import show
from rldsl.memory import curves
from rldsl.memory.curve import during, host_peak, peak
from rldsl.plan.events import (
    Checkpoint,
    Event,
    When,
    Generate,
    Infer,
    Item,
    Loop,
    Offload,
    Onload,
    Realloc,
    Save,
    Train,
)
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse
from tests.checked import check_graph
from tests.offload.programs import FOLLOWS, TWO, program
from tests.verify.faults import change, codes, drop, edited, faults, moved, with_body
from tests.verify.plans import folder

OFF = " offload=true"
MORE = "  every 2 { save actor }\n  checkpoint every 2"


@cache
def plan(train: str = "tp=2", generate: str = "dp=2", ref: str = "dp=2", more: str = "", options: str = "") -> Plan:
    with folder() as here:
        (here / "p.rlf").write_text(program(train, generate, ref, more=more, options=options))
        return api.compile("p.rlf")


def both() -> Plan:
    return plan("tp=2" + OFF, "dp=2", "dp=2" + OFF)


def of(p: Plan, *kinds: type[Event]) -> list:
    return [e for e, _ in event_paths(p) if isinstance(e, kinds)]


def walked(items: tuple[Item, ...], away: frozenset[tuple[str, str, str]]) -> frozenset[tuple[str, str, str]]:
    """Go through a block once; what is in host memory at its end."""
    for e in items:
        if isinstance(e, When | Loop):
            assert walked(e.body, away) == away
        elif isinstance(e, Offload):
            assert (e.model, e.layout, e.part) not in away
            away |= {(e.model, e.layout, e.part)}
        elif isinstance(e, Onload):
            assert (e.model, e.layout, e.part) in away
            away -= {(e.model, e.layout, e.part)}
        elif isinstance(e, Generate | Infer | Train | Save):
            assert (e.model, e.layout, "parameters") not in away
            assert not isinstance(e, Train) or (e.model, e.layout, "optimizer") not in away
        elif isinstance(e, Realloc):
            assert (e.model, e.src, "parameters") not in away
    return away


@pytest.mark.parametrize("train, generate, more, options", [
    ("tp=2", "dp=2", "", ""), ("tp=2", "dp=2", MORE, ""), ("tp=2", "tp=2", MORE, ""), ("dp=2 zero=2", "dp=2", "", ""),
    ("tp=2", "dp=2 keep=false", MORE, ', dtype="bfloat16"'), ("tp=2", "dp=2", MORE, ", lora(r=4)")])
def test_everything_is_where_it_is_used(train: str, generate: str, more: str, options: str) -> None:
    p = plan(train + OFF, generate, "dp=2" + OFF, more, options)
    home = p.models[0].train_layout
    assert walked(p.body, frozenset()) >= {("actor", home, "optimizer"), ("actor", home, "parameters")}
    assert {e.model for e in of(p, Offload)} == {"actor", "ref"} and not faults(p)


def test_an_onload_is_issued_behind_the_call_before() -> None:
    """It runs beside what is between calls, and no call of the same ranks needs more memory for it."""
    p = both()
    flat = [e for e, path in event_paths(p) if path]
    for i, e in enumerate(flat):
        if isinstance(e, Onload):
            user = next(x for x in flat[i:] if isinstance(x, Generate | Infer | Train | Realloc)
                        and f"{e.model}@{e.layout}" in x.reads)
            between = flat[i + 1 : flat.index(user)]
            assert not any(isinstance(x, Generate | Infer | Train) for x in between), show(p)
            before = flat[i - 1] if i else None
            assert before is None or isinstance(before, Generate | Infer | Train | Onload | Offload) or \
                type(before).__name__ == "Free" or f"{e.model}@{e.layout}" in (*before.reads, *before.writes), before
    ahead = [e for e in of(p, Onload) if e.model == "ref"]
    at = flat.index(ahead[0])
    assert not isinstance(flat[at + 1], Infer), "transfers of what it reads come meanwhile"


def test_the_device_holds_less() -> None:
    p, plain = both(), plan()
    for mine, other in zip(curves(p), curves(plain)):
        for kind in (Generate, Infer):
            a, b = (dict(during(c, of(x, kind)[0].id)) for c, x in ((mine, p), (other, plain)))
            gone = {"gradients of actor", "optimizer state of actor", "parameters of actor (tp=2)"}
            assert gone <= b.keys() - a.keys()
        train = [dict(during(c, of(x, Train)[0].id)) for c, x in ((mine, p), (other, plain))]
        one, two = ({k: v for k, v in held.items() if "actor" in k} for held in train)
        assert one == two
        assert peak(mine).bytes <= peak(other).bytes
        assert host_peak(mine) >= sum(b for n, b in during(other, of(plain, Train)[0].id) if n.startswith((
            "optimizer", "parameters of actor (tp=2)"))) > host_peak(other)
        cpu = next(c for c in curves(p, "cpu") if c.ranks == mine.ranks)
        assert "optimizer state of actor" in dict(during(cpu, of(p, Generate)[0].id)), "there is one memory"


def test_models_are_loaded_one_after_another() -> None:
    """Each is offloaded before the next is loaded, so that they need not fit together."""
    setup = [type(e).__name__ for e in both().body if not isinstance(e, Loop)]
    assert setup == ["Load", "Offload", "Offload", "Load", "Offload"]


APART = """
use std.ppo (value_clip)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor  = causal_lm("models/sft")
model critic = value_model("models/sft") train adamw(lr=1e-3)
flow f(steps=4, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=6) on mesh(0:2) dp=2
  v      = critic.values(gen)                       on mesh(2:3)
  critic.train(gen, loss=value_clip(old=v, ret=0.9 * v)) on mesh(2:4) zero=3 offload=true
}
"""


def test_nothing_comes_back_before_a_call_of_any_of_its_ranks() -> None:
    """A call on some of the ranks of a training, whose copy comes from it: in the event order the onload of the
    optimizer could have been first."""
    p = made(APART)
    flat = [e for e, path in event_paths(p) if path]
    infer, (train,) = next(e for e in flat if isinstance(e, Infer)), of(p, Train)
    moves = [e for e in flat if isinstance(e, Onload) and e.part == "optimizer"]
    assert len(moves) == 1 and flat.index(infer) < flat.index(moves[0]) < flat.index(train)
    for c in curves(p):
        assert "optimizer state of critic" not in dict(during(c, infer.id)) if infer.id in c.events else True
    assert not faults(p)


def test_optimizer_and_parameters_are_told_apart() -> None:
    p = both()
    changed = diff(plan(), p)
    assert {(c.now.kind, c.now.about) for c in changed.inserted if c.before is None} == {
        (kind, about) for kind in ("offload", "onload") for about in ("actor", "optimizer of actor", "ref")}
    assert "optimizer state in host memory between train calls" in show(p)


def test_what_generates_too_stays() -> None:
    """Where generation works on what is trained under another layout's name, parameters stay, and the rest goes."""
    p = plan("cp=2" + OFF, "dp=2")
    assert {e.part for e in of(p, Offload) if e.model == "actor"} == {"optimizer"} and not faults(p)


def made(text: str) -> Plan:
    with folder() as here:
        (here / "p.rlf").write_text(text)
        return api.compile("p.rlf")


def test_two_that_are_trained_are_not_there_together() -> None:
    p = made(TWO)
    there, most = {"actor", "critic"}, 0
    for e in of(p, Offload, Onload):
        if e.part == "optimizer":
            there = there - {e.model} if isinstance(e, Offload) else there | {e.model}
        most = max(most, len(there)) if isinstance(e, Onload) else most
    assert most == 1 and not faults(p), show(p)


def test_what_would_come_back_before_another_call_stays() -> None:
    """`critic.values` and `critic.train` follow each other, and the critic is on the device for both."""
    flat = [e for e, path in event_paths(made(TWO))
            if path and isinstance(e, Generate | Infer | Train | Offload | Onload)]
    values = next(i for i, e in enumerate(flat) if isinstance(e, Infer))
    between = flat[values + 1 : next(i for i, e in enumerate(flat) if isinstance(e, Train))]
    assert [(type(e), e.part) for e in between] == [(Onload, "optimizer")]


def test_what_follows_a_model_and_is_saved_is_away_too() -> None:
    """A save brings it back, a checkpoint is written from whichever side."""
    p = made(FOLLOWS)
    assert {e.model for e in of(p, Offload)} == {"slow"} and not faults(p)
    flat = [e for e, _ in event_paths(p)]
    at = next(i for i, e in enumerate(flat) if isinstance(e, Save))
    assert isinstance(flat[at - 1], Onload) and isinstance(flat[at + 1], Offload)


# ------------------------------------------------------------------------------------------------ mistakes in plans


def sides(p: Plan, kind: type[Event], what: str, model: str = "actor") -> list:
    return [e for e, path in event_paths(p) if isinstance(e, kind) and path and e.part == what and e.model == model]


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
@pytest.mark.parametrize("kind", [Offload, Onload])
def test_a_lost_side_is_rejected(kind: type[Event], what: str) -> None:
    p = both()
    assert "RL0525" in codes(drop(p, sides(p, kind, what)[-1].id))


def test_training_without_the_state_is_rejected() -> None:
    p = both()
    (back,), (train,) = sides(p, Onload, "optimizer"), of(p, Train)
    after = edited(drop(p, back.id).body, lambda e: (e, back) if e.id == train.id else (e,))
    assert "RL0525" in codes(with_body(p, after))


def test_gradients_without_parameters_are_rejected() -> None:
    p = both()
    (back,) = sides(p, Onload, "optimizer")
    assert "RL0525" in codes(moved(p, back.id, sides(p, Onload, "parameters")[-1].id))


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_going_twice_is_rejected(what: str) -> None:
    p = both()
    gone = sides(p, Offload, what)[-1]
    twice = faults(with_body(p, edited(p.body, lambda e: (e, replace(e, id=900)) if e.id == gone.id else (e,))))
    assert any(d.code == "RL0525" and d.title.endswith("is already in host memory") for d in twice)


@pytest.mark.parametrize("what", ["optimizer", "parameters"])
def test_coming_back_twice_is_rejected(what: str) -> None:
    p = both()
    back = sides(p, Onload, what)[-1]
    twice = faults(with_body(p, edited(p.body, lambda e: (e, replace(e, id=900)) if e.id == back.id else (e,))))
    assert any(d.code == "RL0525" and d.title.endswith("is already on the device") for d in twice)


def test_a_frozen_model_has_no_optimizer() -> None:
    p = both()
    assert "RL0615" in codes(change(p, sides(p, Offload, "parameters", "ref")[0].id, part="optimizer", writes=()))


def test_a_copy_has_no_optimizer() -> None:
    p = both()
    layout = of(p, Generate)[0].layout
    gone = sides(p, Offload, "optimizer")[-1]
    assert "RL0615" in codes(change(p, gone.id, layout=layout, reads=(f"actor@{layout}",)))


def test_a_checkpoint_is_written_from_either_side_but_only_of_what_is_current() -> None:
    p = plan("tp=2" + OFF, "dp=2", "dp=2", MORE)
    assert isinstance(p.body[-1].body[-1], Checkpoint) and not faults(p)
    (train,) = of(p, Train)
    assert codes(change(p, of(p, Checkpoint)[0].id, reads=(f"actor@{of(p, Generate)[0].layout}",)))
    assert codes(drop(p, train.id))


@pytest.mark.parametrize("train, generate, code", [
    ("tp=2", "dp=2" + OFF, "RL0317"), ("tp=2", "tp=2" + OFF, "RL0317"), ("tp=2" + OFF, "dp=2" + OFF, "RL0317"),
    ("tp=2 offload=1", "dp=2", "RL0311"),
    ("tp=2 offload=full", "dp=2", "RL0101"), ("tp=2" + OFF + OFF, "dp=2", "RL0311")])
def test_mistakes(train: str, generate: str, code: str) -> None:
    with pytest.raises(Failure) as caught:
        check_graph(build(parse(SourceFile("p.rlf", program(train, generate))), {}))
    assert caught.value.diagnostics[0].code == code


TWICE = """  again = ref.entropy(gen) on mesh(0:2) {second}
  metric entropy = mean(again)"""


@pytest.mark.parametrize("first, second, warned", [
    ("dp=2" + OFF, "dp=2", 1), ("dp=2", "dp=2" + OFF, 1), ("dp=2" + OFF, "dp=2" + OFF, 0), ("dp=2", "dp=2", 0),
    ("dp=2" + OFF, "tp=2", 0)])
def test_one_call_of_a_frozen_model_alone_is_told(first: str, second: str, warned: int) -> None:
    """Under the same layout: it stays on the device; the other one's own copy is another matter."""
    found = api.examine(program("tp=2", "dp=2", first, more=TWICE.format(second=second)))
    assert [d.code for d in found] == ["RL0907"] * warned
    for d in found:
        assert d.severity == "warning" and d.span is not None and d.span.text == "offload=true"
        assert "ref.*" in d.help and len(d.labels) == 1


def test_what_is_trained_twice_goes_only_if_both_say_so() -> None:
    loss = "grpo(old=gen.logprobs, adv=group_norm(len(gen)), ref=ref_lp, beta=0.1)"
    again = f"  actor.train(gen, loss={loss}) on mesh(0:2) tp=2"
    text = program("tp=2" + OFF, more=again)
    (d,) = api.examine(text)
    assert d.code == "RL0317" and d.labels and "train call" in d.help
    assert not api.examine(program("tp=2" + OFF, more=again + OFF))


def test_what_calls_share_with_the_training_may_be_said_of_all() -> None:
    check_graph(build(parse(SourceFile("p.rlf", program("tp=2" + OFF, "tp=2" + OFF))), {}))
