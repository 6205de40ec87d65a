"""A metric runs where its inputs are, and what is only logged holds up no rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from rldsl import api
from rldsl.clusters import Cluster
from rldsl.diag import Diagnostic, Failure
from rldsl.plan.codec import decode
from rldsl.plan.events import Compute, Event, Generate, Log, Train, Transfer
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.simulate import simulate
from rldsl.source import SourceFile
from tests.end_to_end.programs import compile_program
from tests.tiny import make_all

# `roll` samples with weights that are two steps old at most, so its ranks may run ahead of those that train
PROGRAM = """
use std.grpo (group_norm, grpo_free)
use py "rewards.py" (digits: gen -> seq)
cluster nodes=1 gpus=4
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
model roll  = causal_lm("models/sft")
flow f(steps=4) {
  prompt = prompts.next()
  gen    = roll.generate(prompt, n=2, max_new_tokens=5)   on mesh(0:2) dp=2
  reward = digits(gen)
METRICS
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(reward)))  on mesh(2:4) dp=2
  sync roll from actor every 8
}
"""
LOGGED = ("  metric reward = mean(reward)\n  metric best = mean(max(reward by prompt))\n"
          "  metric spread = std(reward - mean(reward by prompt))")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("metric_places")
    make_all(folder)
    (folder / "rewards.py").write_text("def digits(rows):\n    return [1.0] * len(rows)\n")
    return folder


def made(base: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, place: str | None = None) -> Plan:
    monkeypatch.chdir(base)
    (base / "p.rlf").write_text(PROGRAM.replace("METRICS", metrics))
    return decode(compile_program(base / "p.rlf", {}, place, base), "p")


def ranks(plan: Plan, event: Event) -> set[int]:
    return set(next(m for m in plan.meshes if m.id == event.mesh).members())


def met(plan: Plan) -> list[str]:
    """The events of a step in which a rank that generates waits for one that trains."""
    return [e.kind for e, path in event_paths(plan) if path and ranks(plan, e) & {0, 1} and ranks(plan, e) & {2, 3}
            and not isinstance(e, Log | Transfer) and e.kind not in ("fetch", "realloc")]


def test_metrics_of_a_reward_are_computed_where_the_reward_is(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = made(base, monkeypatch, LOGGED)
    computed = [e for e, _ in event_paths(plan) if isinstance(e, Compute)]
    [generate] = [e for e, _ in event_paths(plan) if isinstance(e, Generate)]
    [train] = [e for e, _ in event_paths(plan) if isinstance(e, Train)]
    assert ranks(plan, generate) == {0, 1} and ranks(plan, train) == {2, 3}
    assert len(computed) >= 4 and all(ranks(plan, e) == {2, 3} for e in computed)


def test_metrics_add_no_event_in_which_generating_ranks_wait_or_receive(base: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    bare, plan = made(base, monkeypatch, ""), made(base, monkeypatch, LOGGED)
    assert met(plan) == met(bare)
    into = [sorted(ranks(p, e)) for p in (bare, plan) for e, _ in event_paths(p) if isinstance(e, Transfer)]
    spreads = {s.id: s.mesh for s in plan.spreads}
    meshes = {m.id: set(m.members()) for m in plan.meshes}
    assert into and not any(meshes[spreads[e.dst]] & {0, 1} for e, _ in event_paths(plan) if isinstance(e, Transfer))


def test_a_log_takes_no_time_of_the_ranks_that_generate(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(gpus=4, nodes=1, name="round", bfloat16_tflops=1e-3, float32_tflops=1e-3, memory_gb_s=1.0,
                      link_gb_s=0.1, network_gb_s=0.01, link_us=10.0, network_us=20.0, host_gb_s=1.0, disk_gb_s=1.0,
                      kernel_us=1.0, event_us=10.0, row_us=1.0)
    plan = made(base, monkeypatch, LOGGED)
    [generate] = [e for e, _ in event_paths(plan) if isinstance(e, Generate)]
    timeline = simulate(plan, cluster)
    spans = [s for s in timeline.spans if s.event == generate.id]
    assert {timeline.classes[s.rank_class] for s in spans} == {((0, 1),), ((1, 2),)}
    assert all(s.start < 0 for s in spans), "rank 0, which logs, samples for the next step while others train"
    assert timeline.seconds == pytest.approx(simulate(made(base, monkeypatch, ""), cluster).seconds, rel=0.02)


@pytest.mark.parametrize("name", ["metric reward = mean(reward)", "reward#1"])  # what people see; the plan's id
def test_a_rule_may_name_what_has_no_name_of_its_own(base: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    plan = made(base, monkeypatch, LOGGED, f'place @"{name}" on mesh(1:2)\n')
    [moved] = [e for e, _ in event_paths(plan)
               if isinstance(e, Compute) and any(w.startswith("reward#1@") for w in e.writes)]
    assert ranks(plan, moved) == {1}


LONG = "mean(reward + 1 + 1 + 1 + {} + 1 + 1 + 1 + 1 + 1)"
TWO = f"  metric a = {LONG.format(2)}\n  metric a2 = {LONG.format(3)}"
WHOLE = f"metric a = {LONG.format(2)}"


def moved_lines(plan: Plan) -> list[str]:
    return [e.at for e, _ in event_paths(plan) if isinstance(e, Compute) and ranks(plan, e) == {1}]


@pytest.mark.parametrize("text", [WHOLE, WHOLE.replace(" + ", "  +   "), f"{WHOLE} (p.rlf:12)"])
def test_the_whole_text_selects_a_computation(base: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    [at] = moved_lines(made(base, monkeypatch, TWO, f'place @"{text}" on mesh(1:2)\n'))
    assert "p.rlf:12" in at


def test_a_shortened_text_of_several_computations_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"metric averaged_rewards_{x}_of_all_the_rows = mean(reward)" for x in "xy"]
    short = f"{texts[0][:20]}…{texts[0][-19:]}"
    with pytest.raises(Failure) as caught:
        made(base, monkeypatch, "\n".join(texts), f'place @"{short}" on mesh(1:2)\n')
    [d] = caught.value.diagnostics
    assert d.code == "RL0313" and "matches 2 computations" in d.title
    assert f'`@"{texts[0]} (p.rlf:12)"`' in d.help and f'`@"{texts[1]} (p.rlf:13)"`' in d.help


def test_an_empty_text_is_refused_as_such(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Failure) as caught:
        made(base, monkeypatch, LOGGED, 'place @"" on mesh(1:2)\n')
    [d] = caught.value.diagnostics
    assert d.code == "RL0313" and "names nothing" in d.title and "did you mean" not in d.help


@pytest.mark.parametrize(("rule", "typed", "help_"), [
    ('place @"metric rewards = mean(reward)" on mesh(0:1)', '@"metric rewards = mean(reward)"',
     '`@"metric reward = mean(reward)"`'),
    ("place @rewart on mesh(0:1)", "@rewart", "`@reward`"),
    ("place actor . trian on mesh(0:1)", "actor . trian", "`actor.train`"),
])
def test_a_rule_that_matches_nothing_quotes_what_was_typed(base: Path, monkeypatch: pytest.MonkeyPatch, rule: str,
                                                          typed: str, help_: str) -> None:
    with pytest.raises(Failure) as caught:
        made(base, monkeypatch, LOGGED, rule + "\n")
    [d] = caught.value.diagnostics
    assert d.code == "RL0313" and d.title == f"`{typed}` matches no call of this program" and help_ in d.help


def test_quotes_inside_a_text_are_escaped(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "metric other = mean(where(choice(\"mean\", \"mean\", \"sum\") == \"mean\", reward, 0))"
    escaped = program.replace('"', '\\"')
    [at] = moved_lines(made(base, monkeypatch, program, f'place @"{escaped}" on mesh(1:2)\n'))
    assert "p.rlf:12" in at


TEXT = 'group_norm(where(choice("a", "a", "b") == "a", reward, 0))'
TWICE = "\n".join([f"  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv={TEXT}))  on mesh(2:4) dp=2"] * 2)
ESCAPED = TEXT.replace('"', '\\"')


def shown(text: str | None) -> list[str]:
    """The quoted selectors in a message."""
    return [x.removeprefix("place ").removesuffix(" on mesh(...)") for x in (text or "").split("`") if '@"' in x]


def problem(base: Path, monkeypatch: pytest.MonkeyPatch, metrics: str, place: str) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        made(base, monkeypatch, metrics, place)
    [d] = caught.value.diagnostics
    return d


def test_a_suggestion_for_a_text_that_occurs_twice_names_its_line(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    d = problem(base, monkeypatch, TWICE, f'place @"{ESCAPED.replace("0", "1")}" on mesh(3:4)\n')
    [near] = shown(d.help)
    assert d.code == "RL0313" and near in (f'@"{ESCAPED} (p.rlf:12)"', f'@"{ESCAPED} (p.rlf:13)"')
    plan = made(base, monkeypatch, TWICE, f"place {near} on mesh(3:4)\n")
    [at] = [e.at for e, _ in event_paths(plan) if isinstance(e, Compute) and ranks(plan, e) == {3}]
    assert Path(at).name.startswith(near.rpartition("(")[2].removesuffix(')"'))


def test_selectors_in_messages_can_be_pasted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = f'place @"{ESCAPED} (p.rlf:12)"'
    d = problem(base, monkeypatch, TWICE, f"{rule} on mesh(2:3)\n{rule} on mesh(3:4)\n")
    assert d.code == "RL0314" and [f"place {x}" for x in shown(d.label)] == [rule]
    monkeypatch.chdir(base)
    (base / "p.rlf").write_text(PROGRAM.replace("METRICS", TWICE))
    [d] = [d for d in api.examine((base / "p.rlf").read_text(), "p.rlf", place=SourceFile("q.rlf", f"{rule} mbs=2\n"))
           if d.code == "RL0902"]
    assert [f"place {x}" for x in shown(d.help)] == [rule]
