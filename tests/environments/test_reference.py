"""Conversations of a shard against plain transformers: the same log-probs, and the same gradient of own tokens alone."""

from __future__ import annotations

from pathlib import Path

import torch

from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from rldsl.plan.payloads import Conversation
from rldsl.plan.turns import STOPPED
from rldsl.runtime.backend import ConversationOutput
from tests.backend_torch.shards import make_shard, plan_model
from tests.environments.scripted import Scripted
from tests.tiny import make_model
from tests.world import run_world

LIMITS = Conversation(("Guess",), max_turns=3, max_tokens=40, turn_timeout=60.0)
SAMPLING = Sampling(max_new_tokens=6, temperature=0.7)
PROMPTS = ["2 + 2 = ", "7 + 1 = xx", "x", "9 + 9 = xxxx", "3 + " * 12]


class Rows(Scripted):
    """As the runtime begins conversations: by row alone."""

    def begin(self, row: int) -> None:  # type: ignore[override]
        super().begin(row, {"number": row}, PROMPTS[row], seed=row)


def test_log_probs_and_gradients_are_those_of_a_replay(tmp_path: Path) -> None:
    make_model(tmp_path / "model", num_hidden_layers=2)
    run_world(1, _rank, str(tmp_path / "model"))


def _rank(rank: int, path: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    shard = make_shard(plan_model(path, optimizer=Optimizer(lr=0.01, clip_grad=0.0)), rank)
    talk = Rows(tokenizer, delays=7)
    made = shard.converse(torch.arange(len(PROMPTS)), SAMPLING, LIMITS, talk, seed=5, step=0, max_num_seqs=2)
    own = made.batch.own
    assert own is not None
    _is_what_was_said(talk, made, tokenizer)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    expected, at = [], 0
    for length in (made.batch.prompt_lens + made.batch.response_lens).tolist():
        ids, said = made.batch.tokens[at : at + length], own[at : at + length]
        logprobs = (model(ids[None]).logits[0] / SAMPLING.temperature).log_softmax(-1)
        expected.append(logprobs[:-1].gather(1, ids[1:, None])[:, 0][said[1:]])
        at += length
    found = torch.cat(expected)
    torch.testing.assert_close(made.logprobs, found, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(shard.infer([made.batch], "logprobs", SAMPLING.temperature), found, atol=1e-5, rtol=1e-5)

    weights = torch.linspace(-1, 1, len(found))  # in another order, or with tokens of the environment, this differs
    (found * weights).sum().backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    result = shard.train([(made.batch,)], [["logprobs"]], SAMPLING.temperature,
                         lambda _, outputs: (outputs[0]["logprobs"] * weights).sum())
    assert result is not None
    torch.testing.assert_close(torch.tensor(result["grad_norm"]), norm.double().float(), rtol=1e-4, atol=1e-6)


def _is_what_was_said(talk: Scripted, made: ConversationOutput, tokenizer: object) -> None:
    """Own tokens are those that the environment heard, turn by turn; a row ends with them."""
    at = first = 0
    assert made.batch.own is not None
    for row, (p, r) in enumerate(zip(made.batch.prompt_lens.tolist(), made.batch.response_lens.tolist(), strict=True)):
        ids, own = made.batch.tokens[at : at + p + r], made.batch.own[at : at + p + r]
        heard = [call for call in talk.calls if call[:2] == ("said", row)]
        assert ids[own].tolist() == [t for call in heard for t in call[2]] and len(heard) == made.turns[row]
        starts = int((own[1:] & ~own[:-1]).sum())
        assert starts == len(heard) <= LIMITS.max_turns and p + r <= LIMITS.max_tokens
        assert all(len(call[2]) <= SAMPLING.max_new_tokens for call in heard)
        reasons = [call[2] for call in talk.calls if call[:2] == ("finish", row)]
        assert int(made.stopped[row]) == STOPPED[reasons[0] if reasons else "done"]
        at, first = at + p + r, first + r
    assert {int(x) for x in made.stopped} == {0, 1, 2} and int(made.turns[4]) == 0  # row 4: no room for a response
