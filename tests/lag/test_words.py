"""What is said of a lag and of responses that continue: the age of tokens, and warnings where a loss ignores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import rldsl
from rldsl import api
from rldsl.cli import main
from rldsl.diag import Diagnostic
from rldsl.lsp.describe import word
from rldsl.plan.events import Event
from rldsl.plan.spaces import indexed_frames
from rldsl.runtime.metrics.samples import sample_sources, value_names
from rldsl.verify import versions
from rldsl.verify.dataflow import Effects, _BufferTrace
from rldsl.verify.tables import Tables
from rldsl.verify.versions import CopyStates
from tests.tiny import make_all

HEAD = '''use std.correction (truncated)
use std.grpo (group_norm, grpo_free)
use std.ppo (kl_rewards)
use std.sft (sft)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=64)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
model critic = value_model("models/sft") train adamw(lr=1e-3)
model start  = causal_lm("models/sft")
loss pg(logprobs: token; adv: seq) { return -mean(adv * logprobs) }
loss fit(values: token; ret: seq) { return mean((values - ret) ** 2) }
loss better(logprobs: token; low: seq) { return -mean(logprobs * low) }
loss pg_each(logprobs: token; adv: token) { return -mean(adv * logprobs) }
loss ratio(logprobs: token; old: token, adv: seq) { return -mean(exp(logprobs) * exp(-old) * adv) }
loss beside(logprobs: token; old: token, adv: seq) { return mean(old) - mean(adv * logprobs) }
loss logged(logprobs: token; old: token, adv: seq) {
  metric moved = mean(logprobs - old)
  return -mean(adv * logprobs)
}
'''


def program(body: str, flow: str = ", lag=2") -> str:
    used = "\n".join(line for line in HEAD.splitlines() if not any(
        line.startswith(f"model {name}") and name not in body for name in ("critic", "start")))
    return f"{used}\nflow f(steps=4{flow}) {{\n  prompt = prompts.next()\n{body}\n}}\n"


GEN = "  gen = actor.generate(prompt, n=2, max_new_tokens=8{more})\n"
TRAIN = "  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("words"), num_hidden_layers=2)


def rlc(*command: str, code: int = 0) -> str:
    done = CliRunner().invoke(main, command)
    assert done.exit_code == code, done.output
    return done.output


@pytest.mark.parametrize(("flow", "more", "said", "least", "most"), [
    (", lag=2", "", "tokens of gen are 2 steps old", 2, 2), (", lag=1", "", "tokens of gen are 1 step old", 1, 1),
    ("", ", per_step=3", "tokens of gen are 0 to 2 steps old", 0, 2),
    (", lag=2", ", per_step=3", "tokens of gen are 2 to 4 steps old", 2, 4)])
def test_the_proof_says_how_old_tokens_are(flow: str, more: str, said: str, least: int, most: int, folder: Path,
                                           monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    text = program(GEN.format(more=more) + TRAIN + "  eval prompts {\n    p = prompts.next()\n"
                   "    answer = actor.generate(p, max_new_tokens=4)\n    metric answers = mean(len(answer))\n  }", flow)
    Path("p.rlf").write_text(text.replace("eval prompts", "eval held").replace("p = prompts", "p = held").replace(
        "model actor", 'data held = jsonl("data/prompts.jsonl", batch=4)\nmodel actor', 1))
    preview = rlc("compile", "p.rlf")
    assert f"   {said}\n" in rlc("verify", "p.plan")
    assert json.loads(rlc("verify", "p.plan", "--json"))["ages"] == [{"generated": "gen", "least": least, "most": most}]
    waits = " ".join(preview.split())
    assert ("per_step: up to 3 tokens of a response in a step, which ends after at most 3 steps; "
            f"{said}; at most 8 prompts wait" in waits) == bool(more)


def test_without_a_lag_nothing_is_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("p.rlf").write_text(program(GEN.format(more="") + TRAIN, ""))
    rlc("compile", "p.rlf")
    assert "old" not in rlc("verify", "p.plan")


def test_a_difference_of_lags_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for lag in (1, 2):
        Path("p.rlf").write_text(program(GEN.format(more="") + TRAIN, f", lag={lag}"))
        rlc("compile", "p.rlf", "-o", f"lag{lag}.plan")
    found = rlc("diff", "lag1.plan", "lag2.plan", code=1)
    assert "~ plan lag  1 -> 2" in found and "ahead  1 -> 2" in found and "not listed" not in found


WEIGHED = "  w = truncated(actor.logprobs(gen), gen.logprobs)\n"
# body -> the codes of its warnings
LOSSES = {
    "no log-probs": (GEN + "  actor.train(gen, loss=pg(adv=group_norm(len(gen))))", ["RL0909"]),
    "of the current policy": (GEN + "  actor.train(gen, loss=grpo_free(old=actor.logprobs(gen), adv=group_norm(len(gen))))",
                              ["RL0909"]),
    "of a selection": (GEN + "  won = gen where len(gen) > 2\n  actor.train(won, loss=pg(adv=group_norm(len(won))))",
                       ["RL0909"]),
    "by a ratio": (GEN + TRAIN, []),
    "a ratio of a selection": (GEN + "  won = gen where len(gen) > 2\n  actor.train(won, loss=grpo_free("
                               "old=won.logprobs, adv=group_norm(len(won))))", []),
    "by a weight": (GEN + WEIGHED + "  actor.train(gen, loss=pg(adv=group_norm(len(gen)) * mean(w by seq)))", []),
    "in the reward": (GEN + "  adv = group_norm(len(gen)) - 0.1 * mean(gen.logprobs by seq)\n"
                      "  actor.train(gen, loss=pg(adv=adv))", ["RL0909"]),
    "a penalty on a frozen model": (GEN + "  adv = kl_rewards(len(gen), gen.logprobs, start.logprobs(gen), coef=0.1)\n"
                                    "  actor.train(gen, loss=pg_each(adv=adv))", ["RL0909"]),
    "for its shape": (GEN + "  actor.train(gen, loss=pg_each(adv=per_token(group_norm(len(gen)), gen.logprobs)))",
                      ["RL0909"]),
    "beside the loss": (GEN + "  actor.train(gen, loss=beside(old=gen.logprobs, adv=group_norm(len(gen))))", ["RL0909"]),
    "in a metric": (GEN + "  actor.train(gen, loss=logged(old=gen.logprobs, adv=group_norm(len(gen))))", ["RL0909"]),
    "a ratio of products": (GEN + "  actor.train(gen, loss=ratio(old=gen.logprobs, adv=group_norm(len(gen))))", []),
    "by a mask": (GEN + "  near = abs(actor.logprobs(gen) - gen.logprobs) < 1\n  actor.train(gen, loss=pg_each("
                  "adv=where(near, per_token(group_norm(len(gen)), gen.logprobs), 0)))", []),
    "by a copy that follows": (GEN + "  w = truncated(start.logprobs(gen), gen.logprobs)\n  actor.train(gen, loss=pg_each("
                               "adv=group_norm(len(gen)) * w))\n  sync start from actor", []),
    "nothing to correct": (GEN + "  actor.train(gen, loss=sft())", []),
    "another model": (GEN + "  critic.train(gen, loss=fit(ret=len(gen)))", []),
    "in its own step": (GEN.replace("{more}", ", lag=0{more}") + "  other = actor.generate(prompt)\n"
                        "  actor.train(gen, loss=pg(adv=group_norm(len(gen))))\n  metric m = mean(len(other))", []),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("late", [", lag=1", "", "per_step"])
def test_a_loss_that_ignores_age_is_warned_of(name: str, late: str) -> None:
    body, codes = LOSSES[name]
    per_step = late == "per_step"
    text = program(body.format(more=", per_step=4" if per_step else ""), "" if per_step else late)
    if name == "in its own step" and not late.startswith(", lag"):
        text = text.replace(", lag=0", "")
        codes = ["RL0909"] if per_step else []
    found = [d for d in api.examine(text, "p.rlf") if d.code not in ("RL0901",)]
    assert [d.code for d in found] == (codes if late else []), found
    assert all(d.severity == "warning" and "`gen.logprobs`" in d.label and "std.correction" in d.help for d in found)


BODY = "    p = prompts.next()\n    gen = actor.generate(p, n=2)"


def in_block(block: str) -> list[Diagnostic]:
    """What is said of generation inside a block, and training on it there, or below a repeat that collects it."""
    after = "\n  actor.train(kept, loss=sft())" if "until" in block else ""
    text = program("  " + block.format(BODY + ("" if after else "\n    actor.train(gen, loss=sft())")) + after, ", lag=1")
    return [d for d in api.check(text, "p.rlf") if d.code == "RL0223"]


def test_a_repeat_has_a_way_out() -> None:
    found = in_block("repeat 2 {{\n{}\n  }}")
    assert found and "make each iteration a separate step" in found[0].help, found


@pytest.mark.parametrize("block", [
    "every 2 {{\n{}\n  }}", "first 3 {{\n{}\n  }}", "after 1 {{\n{}\n  }}",
    "repeat {{\n{}\n    kept = gen where len(gen) > 1\n  }} until count(len(kept)) >= 4 max 2"])
def test_blocks_in_which_generation_runs_ahead(block: str) -> None:
    assert not in_block(block)


def test_a_lag_that_every_call_refuses() -> None:
    found = api.check(program("  gen = actor.generate(prompt, lag=0)\n" + TRAIN, ", lag=1"), "p.rlf")
    assert [d.code for d in found] == ["RL0223"] and "every call has `lag=0`" in found[0].title


def test_editors_say_when_it_pays() -> None:
    assert "its own devices" in word("lag", False) and "idle" in word("per_step", False)
    assert "how many steps old" in word("version", True)


def test_a_plan_of_python_says_how_old_tokens_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    made = rldsl.compile(program(GEN.format(more=", per_step=3") + TRAIN, ", lag=1"))
    assert made.ages == {"gen": (1, 3)}
    assert rldsl.compile(program(GEN.format(more="") + TRAIN, "")).ages == {}


@pytest.mark.parametrize(("flow", "more", "title", "at"), [
    (", lag=4", "", "this is 4, and the flow has 4 steps", "4"),
    (", lag=1M", "", "this is 1000000, and the flow has 4 steps", "1M"),
    ("", ", lag=4", "this is 4, and the flow has 4 steps", "lag=4")])
def test_a_lag_has_fewer_steps_than_the_flow(flow: str, more: str, title: str, at: str) -> None:
    found = api.check(program(GEN.format(more=more) + TRAIN, flow), "p.rlf")
    assert [d.code for d in found] == ["RL0205"], found
    assert found[0].span.text in (at, at.partition("=")[2]) and found[0].label == title
    assert "use a lag of at most 3" in found[0].help


@pytest.mark.parametrize(("flow", "more"), [(", lag=3", ""), ("", ", lag=3"), (", lag=0", "")])
def test_the_longest_lag(flow: str, more: str) -> None:
    assert not [d for d in api.check(program(GEN.format(more=more) + TRAIN, flow), "p.rlf") if d.severity == "error"]


def test_the_flow_has_a_step_only() -> None:
    text = program(GEN.format(more="") + TRAIN, ", lag=1").replace("steps=4", "steps=1")
    found = api.check(text, "p.rlf")
    assert [d.code for d in found] == ["RL0205"] and "has 1 step" in found[0].label and "no lag" in found[0].help


def test_the_work_of_the_compiler_does_not_grow_with_the_lag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of what waits grows; the events of the turns that the verifier follows do not."""
    monkeypatch.chdir(folder)
    calls, peaks = [], []
    followed, of_copies = _BufferTrace._event, versions._after
    for lag in (3, 100_000):
        count: list[str] = []

        def event(self: _BufferTrace, effects: Effects, count: list[str] = count) -> None:
            count.append(effects.event.at)
            followed(self, effects)

        def after(t: Tables, e: Event, state: CopyStates, count: list[str] = count) -> CopyStates:
            count.append(e.at)
            return of_copies(t, e, state)

        monkeypatch.setattr(_BufferTrace, "_event", event)
        monkeypatch.setattr(versions, "_after", after)
        made = rldsl.compile(program(GEN.format(more="") + TRAIN, f", lag={lag}").replace("steps=4", "steps=2M"))
        calls.append(len(count))
        peaks.append(max(p.bytes for p in made.compiled.peaks.values()))
    assert calls[0] == calls[1] > 0 and peaks[0] < peaks[1]


@pytest.mark.parametrize("call", [
    "actor.generate(prompt, temperature=prompt)", "actor.generate(prompt, top_p=2)", "actor.generate(nothing)",
    "actor.generate(prompt, per_step=3, per_step=3)"])
def test_a_wrong_call_is_no_missing_call(call: str) -> None:
    found = api.check(program(f"  gen = {call}\n" + TRAIN, ", lag=1"), "p.rlf")
    errors = [d for d in found if d.severity == "error"]
    assert errors and "RL0223" not in [d.code for d in errors], errors


def test_a_flow_that_generates_nothing() -> None:
    text = program("  actor.train(prompt, loss=sft())").replace('.jsonl"', '.jsonl", kind="answers"')
    found = api.check(text, "p.rlf")
    assert "RL0223" in [d.code for d in found], found


def test_the_lag_of_a_flow_that_no_call_takes() -> None:
    found = api.check(program(GEN.format(more=", lag=2") + TRAIN, ", lag=1"), "p.rlf")
    errors = [d for d in found if d.severity == "error"]
    assert [d.code for d in errors] == ["RL0223"] and "every call has its own lag" in errors[0].title
    assert "remove `lag=1`" in errors[0].help


def test_two_lags_are_counted() -> None:
    body = GEN.format(more=", lag=2") + "  more = actor.generate(prompt, lag=1)\n  metric m = mean(len(more))\n" + TRAIN
    titles = [d.title for d in api.check(program(body, ""), "p.rlf") if d.code == "RL0205"]
    assert titles == ["a call runs ahead by 1 step, another one by 2"]


@pytest.mark.parametrize(("block", "refused"), [("repeat 2", True), ("every 2", False)])
def test_a_block_that_reads_the_same_source(block: str, refused: bool) -> None:
    body = (GEN.format(more="") + f"  {block} {{\n    q = prompts.next()\n    more = actor.generate(q, lag=0)\n"
            "    metric m = mean(len(more))\n  }\n" + TRAIN)
    found = [d for d in api.check(program(body, ", lag=1"), "p.rlf") if d.code == "RL0223"]
    assert len(found) == refused
    assert all("declare a second `data`" in d.help and "`prompts`" in d.help for d in found)


def test_a_conversation_with_per_step_has_bounds_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("envs.py").write_text("class Talk:\n    pass\n")
    text = program("  gen = actor.generate(prompt, env=Talk, max_new_tokens=9, max_tokens=99, max_turns=2, "
                   "per_step=3)\n" + TRAIN, ", lag=1")
    found = [d for d in api.check('use py "envs.py" (Talk: env)\n' + text, "p.rlf") if d.severity == "error"]
    assert [d.code for d in found] == ["RL0205"], found
    assert found[0].help.startswith("remove `per_step`: ")


def test_samples_with_per_step_are_of_what_has_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    body = GEN.format(more=", per_step=3") + "  r = len(gen) / 8 tokens\n" + TRAIN.replace("len(gen)", "r")
    plan = rldsl.compile(program(body, "")).record
    source, = sample_sources(plan)
    assert source.frame == "gen"
    frames = {f.id: f for f in indexed_frames(plan).values()}
    assert "r" in value_names(plan, {frames["gen"].row_space})
    assert [s.frame for s in sample_sources(rldsl.compile(program(GEN.format(more="") + TRAIN, "")).record)] == ["gen"]
