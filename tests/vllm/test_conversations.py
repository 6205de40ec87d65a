"""Conversations whose turns vLLM samples: the log-probs of training, what ends a turn, and what goes wrong in one."""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.torch.generate.stop_conditions import tokenizer_of
from rldsl.backends.vllm import process
from rldsl.backends.vllm.answers import responses
from rldsl.backends.vllm.process import EngineProcess
from rldsl.diag import Diagnostic, Failure
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from rldsl.plan.payloads import Conversation
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import ConversationOutput
from rldsl.runtime.interpreter.conversations import Environments, RowTalk, open_conversations
from tests.backend_torch.shards import layout_of, plan_model, shard_of
from tests.environments import test_endpoint
from tests.environments.scripted import Scripted
from tests.environments.test_branches import with_template
from tests.tiny import make_model
from tests.vllm.engines import BOTH, use

LIMITS = Conversation(("Guess",), max_turns=3, max_tokens=48, turn_timeout=60.0)
SAMPLING = Sampling(max_new_tokens=6, temperature=0.9)
ROWS = 5


class Rows(Scripted):
    """As the runtime begins conversations: by row alone. Row 4 leaves no room for a response."""

    def begin(self, row: int) -> None:  # type: ignore[override]
        super().begin(row, {"number": row}, "12 + 3 " * (row % 4 + 1) if row != 4 else "9 " * 30, seed=row)


def shards(path: str) -> tuple[Any, Any]:
    """A shard with an engine, and one of the torch backend, of one model."""
    model = replace(plan_model(path), sizes=sizes_of(describe(path, "causal_lm")))
    found = shard_of(model, layout_of(backend="vllm"), 0), shard_of(model, layout_of(), 0)
    assert found[0] and found[1]
    return found[0][0], found[1][0]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(with_template(make_model(tmp_path_factory.mktemp("vllm") / "model", head_dim=32, num_hidden_layers=2)))


@pytest.fixture(scope="module", params=BOTH)
def both(request: pytest.FixtureRequest, path: str) -> Iterator[tuple[Any, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        use(patch, request.param)
        found = shards(path)
        yield found
        found[0].close()


def talked(shard: Any, sampling: Sampling = SAMPLING, delays: int | None = None, rows: tuple[int, ...] = tuple(range(ROWS)),
           slots: int = 0, waiting: str = "keep", step: int = 2) -> tuple[ConversationOutput, Rows]:
    tokenizer, _ = tokenizer_of(shard.model.path)
    talk = Rows(tokenizer, delays)
    return shard.converse(torch.tensor(rows, dtype=torch.int64), sampling, LIMITS, talk, seed=3, step=step,
                          max_num_seqs=slots, waiting=waiting), talk


def said(made: ConversationOutput) -> list[tuple[list[int], list[bool]]]:
    """Of each row the tokens, and which are the model's own."""
    b, sizes = made.batch, (made.batch.prompt_lens + made.batch.response_lens).tolist()
    assert b.own is not None
    return [(t.tolist(), o.tolist()) for t, o in zip(b.tokens.split(sizes), b.own.split(sizes), strict=True)]


def test_log_probs_are_those_of_training_and_turns_those_that_the_environment_heard(both: tuple[Any, Any]) -> None:
    made, talk = talked(both[0], replace(SAMPLING, top_k=12))
    expected = both[1].infer([made.batch], "logprobs", SAMPLING.temperature)
    torch.testing.assert_close(made.logprobs, expected, rtol=0, atol=2e-5)
    assert len(made.logprobs) > 12
    for row, (tokens, own) in enumerate(said(made)):
        heard = [call for call in talk.calls if call[:2] == ("said", row)]
        assert [t for t, o in zip(tokens, own, strict=True) if o] == [t for call in heard for t in call[2]]
        assert made.turn_sizes[row].tolist() == [len(c[2]) for c in heard] + [0] * (3 - len(heard))
        assert all(len(c[2]) <= 6 for c in heard) and len(tokens) <= LIMITS.max_tokens
        reasons = [call[2] for call in talk.calls if call[:2] == ("finish", row)]
        assert int(made.stopped[row]) == STOPPED[reasons[0] if reasons else "done"]
    assert {int(x) for x in made.stopped} == {0, 1, 2} and int(made.turns[4]) == 0
    assert made.lasted >= made.waited > 0 and made.given_away == 0


def test_greedy_conversations_are_those_of_the_torch_backend(both: tuple[Any, Any]) -> None:
    (found, _), (expected, _) = (talked(shard, replace(SAMPLING, greedy=True)) for shard in both)
    assert said(found) == said(expected)
    for name in ("rewards", "turns", "turn_sizes", "turn_rewards", "stopped"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=2e-5)


def test_when_environments_answer_and_how_many_slots_there_are_decides_nothing(both: tuple[Any, Any]) -> None:
    engine, _ = both
    right = said(talked(engine)[0])
    for delays, slots, waiting in ((1, 2, "keep"), (2, 2, "recompute")):
        assert said(talked(engine, delays=delays, slots=slots, waiting=waiting)[0]) == right, (delays, slots, waiting)
    assert said(talked(engine, rows=(1, 3))[0]) == [right[1], right[3]]
    assert said(talked(engine, step=3)[0]) != right
    nothing, _ = talked(engine, rows=())
    assert len(nothing.batch) == 0 and nothing.rewards.numel() == 0


@pytest.mark.thorough
def test_what_ends_a_turn(both: tuple[Any, Any]) -> None:
    """An end-of-sequence token or a stop string; a limit otherwise, which the environment hears of."""
    engine, _ = both
    tokenizer, (eos, *_) = tokenizer_of(engine.model.path)
    warm = replace(SAMPLING, temperature=3.0)
    _, talk = talked(engine, warm)
    turns = [call for call in talk.calls if call[0] == "said"]
    assert {by_limit for *_, by_limit in turns} == {True, False}
    assert all(by_limit == (ids[-1] != eos) for *_, ids, by_limit in turns)
    letter = tokenizer.decode([turns[0][2][1]])
    _, talk = talked(engine, replace(warm, stop=(letter,)))
    stopped = [call for call in talk.calls if call[0] == "said"]
    assert any(letter in tokenizer.decode(ids) for *_, ids, _ in stopped)
    for *_, ids, by_limit in stopped:
        assert by_limit == (letter not in tokenizer.decode(ids) and ids[-1] != eos)
        assert letter not in tokenizer.decode(ids[:-1])
    _, talk = talked(engine, replace(warm, min_new_tokens=6))
    assert all(eos not in call[2] for call in talk.calls if call[0] == "said")


@pytest.mark.thorough
def test_branches_of_an_agent(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a prompt of its own for vLLM; its log-probs are those of its own context."""
    from transformers import AutoTokenizer

    from rldsl.runtime.data.source import WholeRow
    from rldsl.runtime.data.tokens import Tokens

    use(monkeypatch, "standin")
    engine, plain = shards(path)
    limits = replace(LIMITS, max_turns=8, max_tokens=96, branches=4)
    sampling = Sampling(max_new_tokens=4)
    tokens = Tokens(AutoTokenizer.from_pretrained(path), path, {"prompt": "prompt"})
    opened = Environments({0: open_conversations(test_endpoint.function("branches_off"), limits, sampling, tokens, 0)})
    rows = {row: WholeRow(f"row {row}", {"prompt": f"{row} + 1", "number": row}, row) for row in range(4)}
    found = []
    for slots, waiting in ((0, "keep"), (1, "recompute")):
        made = engine.converse(torch.arange(4), sampling, limits, RowTalk(opened, 0, rows, "prompt", 1), seed=5,
                               step=0, max_num_seqs=slots, waiting=waiting)
        assert made.batch.rows.tolist() == [row * 4 + i for row in range(4) for i in range(row % 4 + 1)]
        torch.testing.assert_close(made.logprobs, plain.infer([made.batch], "logprobs", 1.0), rtol=0, atol=2e-5)
        found.append(said(made))
    assert found[0] == found[1]
    opened.close()
    engine.close()


# ------------------------------------------------------------------------------------------------ what goes wrong


@pytest.fixture
def alone(path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A shard whose engine has not begun."""
    use(monkeypatch, "standin")
    shard, _ = shards(path)
    yield shard
    shard.close()


def failed(shard: Any) -> Any:
    with pytest.raises(Failure) as caught:
        talked(shard)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


def test_an_engine_that_dies_in_a_turn(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STANDIN_DIE_AT", "20")
    d = failed(alone)
    assert (d.code, d.title) == ("RL0801", "the vLLM engine of `m` ended with exit status 3")
    assert d.notes[-1] == "the stand-in ends here" and "--resume" in d.help


@pytest.mark.thorough
def test_an_engine_that_hangs_in_a_turn(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    talked(alone)
    monkeypatch.setattr(process, "SILENCE_LIMIT", 0.2)
    os.kill(alone.engine.process.pid, signal.SIGSTOP)
    d = failed(alone)
    assert d.code == "RL0801" and "could not begin conversations" in d.title and "no progress for 0.2 s" in d.notes[0]


def answered(**changed: Any) -> dict[str, Any]:
    """An answer for the rows 2 and 5, of 2 and 1 tokens."""
    right = {"rows": [2, 5], "lens": [2, 1], "finished": [1, 0], "tokens": [7, 8, 9], "logprobs": [-1.0, -2.0, -3.0]}
    return {name: array("f" if name == "logprobs" else "q", x) for name, x in {**right, **changed}.items()}


class Asked:
    """Stands for the process that answered."""

    def failed(self, verb: str, *notes: str) -> Failure:
        return Failure([Diagnostic("RL0801", verb, notes=notes)])


@pytest.mark.parametrize("changed, note", [
    (dict(tokens=[7, 8]), "2 tokens and 3 log-probs, but its responses have 3 tokens"),
    (dict(logprobs=[-1.0]), "3 tokens and 1 log-probs"),
    (dict(lens=[2, 2]), "but its responses have 4 tokens"),
    (dict(lens=[3]), "1 lengths and 2 flags for 2 rows"),
    (dict(finished=[1]), "2 lengths and 1 flags"),
    (dict(rows=[2, 6]), "it answered for the rows 2, 6, but 2, 3, 5 were asked for"),
    (dict(rows=[2, 2]), "it answered for the rows 2, 2"),
    (dict(lens=[3, 0]), "0 tokens for row 5, which may have 1 to 4"),
    (dict(lens=[-1, 4]), "-1 tokens for row 2"),
    (dict(lens=[1, 5], tokens=[7] * 6, logprobs=[-1.0] * 6), "5 tokens for row 5, which may have 1 to 4")])
def test_a_wrong_number_of_tokens(changed: dict[str, Any], note: str) -> None:
    """No row gets the tokens of another."""
    most = {2: 4, 3: 4, 5: 4}
    right = responses(Asked(), "turns", answered(), most)  # type: ignore[arg-type]
    assert right == {2: ([7, 8], [-1.0, -2.0], True), 5: ([9], [-3.0], False)}
    with pytest.raises(Failure) as caught:
        responses(Asked(), "turns", answered(**changed), most)  # type: ignore[arg-type]
    assert note in caught.value.diagnostics[0].notes[0]


@pytest.mark.thorough
def test_a_wrong_number_of_tokens_ends_the_call(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = EngineProcess.ask

    def changed(self: EngineProcess, verb: str, *args: Any, **named: Any) -> Any:
        answer, arrays = ask(self, verb, *args, **named)
        return answer, {**arrays, "tokens": arrays["tokens"][:-1]} if arrays.get("rows") else arrays

    monkeypatch.setattr(EngineProcess, "ask", changed)
    d = failed(alone)
    assert (d.code, d.title) == ("RL0801", "the vLLM engine of `m` could not generate a turn")
    assert "its responses have" in d.notes[0]


@pytest.mark.thorough
def test_an_environment_that_fails_is_named_and_the_engine_stays(alone: Any) -> None:
    class Fails(Rows):
        def said(self, *args: Any) -> None:
            raise ValueError("the environment is broken")

    tokenizer, _ = tokenizer_of(alone.model.path)
    with pytest.raises(ValueError, match="is broken"):
        alone.converse(torch.arange(3), SAMPLING, LIMITS, Fails(tokenizer), seed=3, step=0, max_num_seqs=0)
    alone.close()
    assert said(talked(alone)[0]), "a new engine"
