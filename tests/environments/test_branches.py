"""Branches of agents' conversations: which sequence a request is in, what its tokens are, that its log-probs are those
of its own context, and that a run is the same under every placement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.diag import Failure
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation
from rldsl.runtime.environments import Arrival
from rldsl.runtime.environments.processes import EnvironmentProcesses
from tests.backend_torch.shards import make_shard, plan_model
from tests.end_to_end.programs import compile_program
from tests.environments import test_endpoint
from tests.environments.envs_agents import CALCULATOR
from tests.environments.programs import folder, source
from tests.environments.test_endpoint import QWEN, TOKENIZER, answered, begin, ids, only, text
from tests.environments.test_processes_of_runs import TEMPLATE, _rank
from tests.tiny import make_model
from tests.world import run_world

TURN = "<|im_start|>assistant\n"
LONG = "x7 " * 1000  # more than there is room for


def messages(*contents: str) -> dict[str, Any]:
    """A request with messages of the user and the model in turns."""
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": c} for i, c in enumerate(contents)]}


@pytest.fixture(scope="module")
def agents() -> Iterator[EnvironmentProcesses]:
    before = test_endpoint.RULES
    test_endpoint.RULES = replace(before, branches=3, max_turns=9)
    try:
        with test_endpoint.opened("scripted") as talk:
            yield talk
    finally:
        test_endpoint.RULES = before


def test_which_branch_a_request_is_in(agents: EnvironmentProcesses) -> None:
    """One that begins anew, one that continues the first, the second sample of a context, and both samples go on."""
    begin(agents, ("ask", messages("a")), ("ask", messages("fresh")), ("ask", messages("a", "A", "b")),
          ("ask", messages("a")), ("ask", messages("a", "A2", "c")), ("ask", messages("fresh", "F", "d")),
          ("ask", messages("a", "A", "b", "B", "e")))
    first = only(agents)
    fresh = answered(agents, "A")
    again = answered(agents, "F")
    sample = answered(agents, "B")
    assert [a.branch for a in (first, fresh, again, sample)] == [0, 1, 0, 2]
    assert text(fresh).endswith(f"fresh<|im_end|>\n{TURN}") and "a<|im_end|>" not in text(fresh)
    assert text(again) == f"\n<|im_start|>user\nb<|im_end|>\n{TURN}"
    assert sample.tokens == first.tokens
    found = [answered(agents, said) for said in ("A2", "C", "D")]
    assert [(a.branch, text(a)) for a in found] == [
        (branch, f"\n<|im_start|>user\n{said}<|im_end|>\n{TURN}") for branch, said in ((2, "c"), (1, "d"), (0, "e"))]
    assert answered(agents, "E").ended


def test_what_a_branch_shares_is_not_rendered_again(agents: EnvironmentProcesses) -> None:
    """A turn whose ids are not those of its text keeps them where another branch continues it."""
    odd = [*ids("o"), *ids("n"), *ids("e")]  # "one" in three pieces
    assert TOKENIZER.decode(odd) == "one" and (odd != ids("one") or len(ids("one")) == 3)
    begin(agents, ("ask", messages("a")), ("ask", messages("a", "one", "b")), ("ask", messages("a", "one", "c")),
          ("ask", messages("a", "two", "c")))
    first = only(agents)
    turn = [*odd, *ids("<|im_end|>")]
    agents.said(0, turn, False, [0.0] * len(turn))
    second = only(agents)
    third = answered(agents, "x")
    assert third.branch == 1 and text(third).endswith(f"\n<|im_start|>user\nc<|im_end|>\n{TURN}")
    assert third.tokens[: len(first.tokens) + len(turn)] == (*first.tokens, *turn)
    assert third.tokens[len(first.tokens) + len(turn):] == (*second.tokens[:-len(ids(f"b<|im_end|>\n{TURN}"))],
                                                            *ids(f"c<|im_end|>\n{TURN}"))
    edited = answered(agents, "y")  # what the model never said is rendered by the template
    assert edited.branch == 2 and "two<|im_end|>" in text(edited) and "one" not in text(edited)
    assert answered(agents, "z").ended


def test_other_tools_and_tokens_are_branches(agents: EnvironmentProcesses) -> None:
    begin(agents, ("ask", messages("a")), ("ask", messages("a", "A", "b") | {"tools": CALCULATOR}),
          ("tokens", {"ids": [5, 6]}), ("tokens", {"ids": [7]}))
    only(agents)
    tools = answered(agents, "A")
    assert tools.branch == 1 and '"name": "add"' in text(tools) and "A<|im_end|>" in text(tools)
    assert answered(agents, "B") == Arrival(0, (5, 6), False, None, None, None, 2)
    assert answered(agents, "C") == Arrival(0, (7,), False, None, None, None, 2)
    assert answered(agents, "D").ended


def test_of_several_branches_the_longest_is_extended(agents: EnvironmentProcesses) -> None:
    """Two samples of one context are equal, and one has gone on."""
    begin(agents, ("ask", messages("a")), ("ask", messages("a", "A", "b")), ("ask", messages("a")),
          ("ask", messages("a", "A", "b", "B", "c")))
    only(agents)
    answered(agents, "A")
    assert answered(agents, "B").branch == 1
    assert answered(agents, "A").branch == 0
    assert answered(agents, "C").ended


def test_more_branches_than_there_are(agents: EnvironmentProcesses, capfd: pytest.CaptureFixture[str]) -> None:
    begin(agents, *(("ask", messages(c)) for c in "abcd"), row=5)
    only(agents)
    for said in "AB":
        answered(agents, said, row=5)
    with pytest.raises(Failure) as caught:
        answered(agents, "C", row=5)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0736" and found.title == (
        "`scripted` asked 3 times for something else than the next turn of its conversation: messages[0] (user) is not "
        "the one that the conversation has")
    assert "branches=6" in found.help and found.notes[0] == "row 5, turn 3"


@pytest.mark.parametrize("more, branch, stopped", [
    ((), None, "max_tokens"),                                          # the reward after the refusal
    ((("ask", messages("summary")),), 1, "done"),                      # begins anew
    ((("ask", messages("a")),), 1, "done"),                            # another sample of what had room
    ((("ask", messages("summary")), ("must ask", messages("a", "A", LONG))), 1, "max_tokens"),
    ((("ask", messages("b", LONG, LONG)), ("ask", messages("summary"))), 1, "done"),  # nor did the first new one fit
    ((("ask", messages("summary")), ("raise", "lost")), 1, "error"),   # not because of the limit
])
def test_a_full_branch_ends_no_conversation(agents: EnvironmentProcesses, monkeypatch: pytest.MonkeyPatch, more: Any,
                                            branch: int | None, stopped: str, capfd: pytest.CaptureFixture[str]
                                            ) -> None:
    """The request is refused and adds nothing: the agent may go on in a branch with room."""
    monkeypatch.setattr(agents, "on_error", "end")
    begin(agents, ("ask", messages("a")), ("ask", messages("a", "A", LONG)), *more)
    only(agents)
    found = answered(agents, "A")
    if branch is not None:
        assert (found.ended, found.branch) == (False, branch)
        assert agents.endpoint is not None and len(agents.endpoint.dialogues[0].branches) == 2
        found = answered(agents, "B")
    assert (found.ended, found.stopped) == (True, stopped)
    assert found.reward == (1.0 if stopped == "done" or not more else None)
    assert "context_length_exceeded" in capfd.readouterr().err


def test_without_branches_left_a_full_one_is_all_there_is(agents: EnvironmentProcesses) -> None:
    """What would be RL0736 is refused as full, too, until the agent has gone on."""
    begin(agents, *(("ask", messages(c)) for c in "abc"), ("ask", messages("c", "C", LONG)), ("ask", messages("d")),
          ("ask", messages("b", "B", "e")), ("ask", messages("d")))
    only(agents)
    for said in "AB":
        assert not answered(agents, said).ended
    found = answered(agents, "C")  # the second and the third request after it were refused
    assert (found.ended, found.branch, text(found)) == (False, 1, f"\n<|im_start|>user\ne<|im_end|>\n{TURN}")
    with pytest.raises(Failure, match="asked 3 times"):
        answered(agents, "E")


# against transformers

LIMITS = Conversation(("f",), max_turns=8, max_tokens=96, turn_timeout=60.0, branches=4)
SAMPLING = Sampling(max_new_tokens=6, temperature=0.7)
ROWS = 6


def with_template(model: Path) -> Path:
    config = model / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    return model


def test_log_probs_of_each_branch_are_those_of_its_own_context(tmp_path: Path) -> None:
    with_template(make_model(tmp_path / "model", num_hidden_layers=2))
    run_world(1, _against_transformers, str(tmp_path / "model"))


def _against_transformers(rank: int, path: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rldsl.runtime.data.tokens import Tokens
    from rldsl.runtime.data.source import WholeRow
    from rldsl.runtime.interpreter.conversations import Environments, RowTalk, open_conversations

    tokens = Tokens(AutoTokenizer.from_pretrained(path), path, {"prompt": "prompt"})
    opened = Environments({0: open_conversations(test_endpoint.function("branches_off"), LIMITS, SAMPLING, tokens, 0)})
    rows = {row: WholeRow(f"row {row}", {"prompt": f"{row} + 1", "number": row}, row) for row in range(ROWS)}
    shard = make_shard(plan_model(path), rank)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    same = None
    for slots, waiting in ((0, "keep"), (2, "keep"), (1, "offload"), (2, "recompute")):
        made = shard.converse(torch.arange(ROWS), SAMPLING, LIMITS, RowTalk(opened, 0, rows, "prompt", 1), seed=5,
                              step=0, max_num_seqs=slots, waiting=waiting)  # type: ignore[arg-type]
        batch, own = made.batch, made.batch.own
        assert own is not None
        assert batch.rows.tolist() == [row * 4 + i for row in range(ROWS) for i in range(row % 4 + 1)]
        assert made.rewards.tolist() == [float(row % 4) for row in range(ROWS) for _ in range(row % 4 + 1)]
        sizes = (batch.prompt_lens + batch.response_lens).tolist()
        expected, sequences = [], list(zip(batch.tokens.split(sizes), own.split(sizes), strict=True))
        for sequence, said in sequences:
            logprobs = (reference(sequence[None]).logits[0] / SAMPLING.temperature).log_softmax(-1)
            expected.append(logprobs[:-1].gather(1, sequence[1:, None])[:, 0][said[1:]])
        torch.testing.assert_close(made.logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(shard.infer([batch], "logprobs", SAMPLING.temperature), torch.cat(expected),
                                   atol=1e-5, rtol=1e-5)
        at = {row: i for i, row in enumerate(batch.rows.tolist())}
        for row in (2, 3):
            (main, said), (sample, drawn) = sequences[at[row * 4]], sequences[at[row * 4 + 2]]
            context = int(drawn.nonzero()[0])
            assert sample[:context].tolist() == main[:context].tolist() and not said[:context].any()
            assert sample.tolist() != main.tolist()[: len(sample)]  # other draws of the same context
        (main, said), (fork, drawn) = sequences[at[12]], sequences[at[15]]
        one = int((~said[int(said.nonzero()[0]):]).nonzero()[0]) + int(said.nonzero()[0])  # where its first turn ends
        assert fork[:one].tolist() == main[:one].tolist() and not drawn[:one].any() and said[:one].any()
        found = [batch.tokens.tolist(), own.tolist(), made.turns.tolist()]
        same = same or found
        assert found == same
    opened.close()


# runs

BODY = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=branches_off, n=2, branches=4, max_turns=8, max_new_tokens=4, max_tokens=96)
  old = actor.logprobs(gen)
  metric gap     = max(abs(gen.logprobs - old))
  metric rows    = count(gen)
  adv = group_norm(gen.reward)
  actor.train(gen, loss=pg(adv=adv + 0.1 * uniform(gen.turns)), minibatches=2)
  metric turns   = sum(gen.turns)
  metric reward  = sum(gen.reward)
  metric runs    = sum(where(gen.branch == 0, gen.reward, 0))
  metric split   = sum(1 / gen.branches)
  metric last    = max(gen.branch)
  metric lp      = sum(gen.logprobs)
  metric drawn   = sum(uniform(gen.logprobs) * gen.logprobs)
  main = gen where gen.branch == 0
  metric main    = count(main)
  metric mean    = mean(main.reward)
  once = group_norm_branches(gen.reward, gen.branch)
  metric once    = sum(where(gen.branch == 0, once * once, 0))
  metric alike   = sum(group_norm(main.reward) * group_norm(main.reward))
"""
NAMES = ("gap", "rows", "turns", "reward", "runs", "split", "last", "lp", "drawn", "main", "mean", "actor/loss",
         "actor/grad_norm")


def run(base: Path, place: str | None, body: str = BODY, options: str = ", invariant=true", steps: str = "2",
        columns: str = "", env: str = "branches_off", name: str = "") -> list[dict[str, float]]:
    text = source(body, steps=steps, options=options).replace(", shuffle=false", f", shuffle=false{columns}")
    text = text.replace("envs_scripted.py", "envs_agents.py")
    text = text.replace("(group_norm)", "(group_norm, group_norm_branches)")
    (base / "program.rlf").write_text(text.replace("Guess: env", f"{env}: env"))
    out, before = base / (name or f"out{len(list(base.glob('out*')))}"), os.getcwd()
    os.chdir(base)
    try:
        data = compile_program(base / "program.rlf", {}, place, base)
        run_world(json.loads(data.splitlines()[0])["world"], _rank, data, str(out), str(base), timeout=240.0)
    finally:
        os.chdir(before)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = folder(tmp_path_factory.mktemp("branches"))
    with_template(base / "model")
    return base


@pytest.fixture(scope="module")
def alone(base: Path) -> list[dict[str, float]]:
    return run(base, None, name="alone")


@pytest.mark.thorough
def test_a_run_trains_on_all_branches(base: Path, alone: list[dict[str, float]]) -> None:
    """Of the rows 0..3 and 4..7, two conversations each: 1 to 4 branches, 2 to 6 turns."""
    for line in alone:
        assert line["gap"] == 0.0 and line["last"] == 3.0
        assert (line["rows"], line["turns"], line["main"]) == (2 * (1 + 2 + 3 + 4), 2 * (2 + 4 + 5 + 6), 8)
        assert line["reward"] == 2 * (0 + 2 + 6 + 12) and line["runs"] == 2 * 6 and line["mean"] == 1.5
        assert line["split"] == pytest.approx(8) and line["conversation/turns"] == 34 / 8
        assert line["actor/grad_norm"] > 0 and line["once"] == line["alike"]
    samples = [json.loads(line) for line in (base / "alone" / "samples" / "gen.jsonl").read_text().splitlines()]
    assert [(s["row"], s["gen.branch"]) for s in samples[:3]] == [(0, 0), (4, 0), (8, 0)], samples


@pytest.mark.thorough
@pytest.mark.parametrize("place", [
    "place *.* on mesh(0:2) dp=2", "place *.* on mesh(0:4) dp=4\nplace actor.generate on mesh(0:4) dp=4 mbs=1",
    "place actor.generate on mesh(0:2) tp=2\nplace actor.* on mesh(0:1)",
    "place actor.generate on mesh(0:2) pp=2 mbs=2 waiting=offload\nplace actor.* on mesh(0:2) dp=2"])
def test_a_run_is_the_same_under_every_placement(base: Path, alone: list[dict[str, float]], place: str) -> None:
    """Bit for bit before anything is trained."""
    divided = run(base, place)
    first = [name for name in NAMES if not name.startswith("actor/")]
    assert {name: divided[0][name] for name in first} == {name: alone[0][name] for name in first}
    assert {n: divided[1][n] for n in NAMES} == {n: pytest.approx(alone[1][n], rel=1e-4, abs=1e-6) for n in NAMES}


FULL = """
  prompt = prompts.next()
  gen = actor.generate(prompt, env=fills_up, n=2, branches=2, max_turns=40, max_new_tokens=4, max_tokens=64)
  main = gen where gen.branch == 0
  metric gap     = max(abs(gen.logprobs - actor.logprobs(gen)))
  metric rows    = count(gen)
  metric turns   = sum(gen.turns)
  metric before  = sum(main.reward)
  metric main    = sum(main.turns)
  metric full    = sum(where(gen.branch == 0 and gen.stopped == 2, 1, 0))
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)), minibatches=2)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("place", [None, "place *.* on mesh(0:2) tp=2", "place *.* on mesh(0:2) dp=2"])
def test_an_agent_goes_on_after_a_branch_was_full(base: Path, place: str | None) -> None:
    """It asks until there is no room, then begins anew: each conversation has two branches, and none ended as full."""
    for line in run(base, place, FULL, env="fills_up"):
        assert (line["rows"], line["full"]) == (16, 0) and line["gap"] <= (0.0 if place is None else 1e-5)
        assert line["before"] >= 16 and (line["main"], line["turns"]) == (line["before"], line["before"] + 8)


TALK = "gen = actor.generate(prompt, env=branches_off, n=2, branches=4, max_turns=8, max_new_tokens=4, max_tokens=96)"
AHEAD = f"""
  prompt = prompts.next()
  {TALK}
  metric gap  = max(abs(gen.logprobs - actor.logprobs(gen)))
  metric rows = count(gen)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)))
"""
REPEAT = f"""
  repeat {{
    prompt = prompts.next()
    {TALK}
    kept = gen where gen.branches > 2
  }} until count(kept) >= 20 max 3
  metric gap  = max(abs(kept.logprobs - actor.logprobs(kept)))
  metric rows = count(kept)
  actor.train(kept, loss=pg(adv=per_token(kept.reward, kept.logprobs)))
"""
SELECTED = f"""
  all = prompts.next()
  prompt = all where all.number == 3 or all.number == 1 or all.number == 6
  {TALK}
  metric gap  = max(abs(gen.logprobs - actor.logprobs(gen)))
  metric rows = count(gen)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)), minibatches=2)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("body, rows, lag", [
    (AHEAD, [20, 20, 20], ", lag=1"), (REPEAT, [28, 28, 28], ""), (SELECTED, [12, 6, 0], "")])
def test_ahead_of_the_step_collected_and_of_selected_prompts(base: Path, body: str, rows: list[int], lag: str) -> None:
    """Conversations of the rows 0 to 3 of 4 have 1 to 4 branches."""
    found = run(base, "place *.* on mesh(0:2) dp=2", body, ", invariant=true", f"3{lag}", ', numbers=["number"]')
    assert [line["rows"] for line in found] == rows
    assert all(line.get("gap", 0.0) == 0.0 for line in found) or lag


@pytest.mark.thorough
def test_an_agent_without_branches_is_the_same_with_room_for_them(base: Path) -> None:
    body = BODY.replace("env=branches_off", "env=asks_twice").replace(" + 0.1 * uniform(gen.turns)", "")
    lines = [[{n: x for n, x in line.items() if n in NAMES and n != "drawn"} for line in run(
        base, None, body.replace("branches=4", f"branches={b}").replace("gen.reward)", "len(gen))", 1), env="asks_twice")]
        for b in (1, 3)]
    assert lines[0] == lines[1] and all(line["rows"] == 8 and line["last"] == 0 for line in lines[0])


def test_forged_plans(base: Path) -> None:
    """Rows of branches that nobody knows, that are divided by what there is of them, or are too few."""
    from rldsl.plan.codec import decode
    from rldsl.verify import verify

    text = source(BODY).replace("envs_scripted.py", "envs_agents.py").replace("Guess: env", "branches_off: env")
    (base / "program.rlf").write_text(text.replace("(group_norm)", "(group_norm, group_norm_branches)"))
    before = os.getcwd()
    os.chdir(base)
    try:
        plan = decode(compile_program(base / "program.rlf", {}, None, base), "p.plan")
    finally:
        os.chdir(before)
    verify(plan)
    frame = next(f for f in plan.frames if f.id == "gen")
    spread = next(s for s in plan.spreads if s.frames == ("gen",) and s.balance_by == "slot")
    space = next(s for s in plan.spaces if s.id == "gen")
    assert (frame.present_in, space.fan) == ("gen", 8)
    for name, old, change, code in (
            ("frames", frame, {"present_in": ""}, "RL0615"), ("spreads", spread, {"balance_by": "count"}, "RL0518"),
            ("spaces", space, {"fan": 2, "count": 8}, "RL0612")):
        rows = tuple(replace(x, **change) if x is old else x for x in getattr(plan, name))
        with pytest.raises(Failure) as caught:
            verify(replace(plan, **{name: rows}))
        assert code in {d.code for d in caught.value.diagnostics}, name
