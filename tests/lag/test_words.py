"""What is said of a lag and of responses that continue: the age of tokens, and warnings where a loss ignores it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import rldsl
from rldsl import api
from rldsl.cli import main
from rldsl.lsp.describe import word
from tests.tiny import make_all

HEAD = '''use std.correction (truncated)
use std.grpo (group_norm, grpo_free)
use std.sft (sft)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=64)
model actor  = causal_lm("models/sft") train adamw(lr=1e-3)
model critic = value_model("models/sft") train adamw(lr=1e-3)
loss pg(logprobs: token; adv: seq) { return -mean(adv * logprobs) }
loss fit(values: token; ret: seq) { return mean((values - ret) ** 2) }
loss better(logprobs: token; low: seq) { return -mean(logprobs * low) }
'''


def program(body: str, flow: str = ", lag=2") -> str:
    unused = "\n".join(line for line in HEAD.splitlines() if not (line.startswith("model critic") and "critic" not in body))
    return f"{unused}\nflow f(steps=4{flow}) {{\n  prompt = prompts.next()\n{body}\n}}\n"


GEN = "  gen = actor.generate(prompt, n=2, max_new_tokens=8{more})\n"
TRAIN = "  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))))\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("words"))


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


BLOCKS = {
    "repeat 2 {{\n{}\n  }}": "make each iteration a step of its own",
    "every 2 {{\n{}\n  }}": "give the call `lag=0`",
    "first 3 {{\n{}\n  }}": "give the call `lag=0`",
    "repeat {{\n{}\n    kept = gen where len(gen) > 1\n  }} until count(len(kept)) >= 4 max 2": "with `where`",
}


@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_has_a_way_out(block: str) -> None:
    body = "    p = prompts.next()\n    gen = actor.generate(p, n=2)"
    after = "\n  actor.train(kept, loss=sft())" if "until" in block else ""
    text = program("  " + block.format(body + ("" if after else "\n    actor.train(gen, loss=sft())")) + after, ", lag=1")
    found = [d for d in api.check(text, "p.rlf") if d.code == "RL0223"]
    assert found and BLOCKS[block] in found[0].help, found


def test_a_lag_that_every_call_refuses() -> None:
    found = api.check(program("  gen = actor.generate(prompt, lag=0)\n" + TRAIN, ", lag=1"), "p.rlf")
    assert [d.code for d in found] == ["RL0223"] and "every call has `lag=0`" in found[0].title


def test_editors_say_when_it_pays() -> None:
    assert "devices of its own" in word("lag", False) and "idle" in word("per_step", False)
    assert "how many steps old" in word("version", True)


def test_a_plan_of_python_says_how_old_tokens_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    made = rldsl.compile(program(GEN.format(more=", per_step=3") + TRAIN, ", lag=1"))
    assert made.ages == {"gen": (1, 3)}
    assert rldsl.compile(program(GEN.format(more="") + TRAIN, "")).ages == {}
