"""`invariant=true`: log-probs of generation are those of training with a difference of 0, and so are losses under any
micro-batches; the products and the attention of the mode against torch's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rldsl.backends.torch.model.invariant import KEYS, ROWS, Invariant
from torch.overrides import TorchFunctionMode

from benchmarks.match import Gap, gap, prompts
from rldsl import api
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import make_shard, pack, plan_model, ragged
from tests.consistency.test_match import FAMILIES
from tests.tiny import make_model
from tests.world import run_world

CPU, TWO = torch.device("cpu"), dict(num_hidden_layers=2)
ASKED = (Sampling(max_new_tokens=80, min_new_tokens=70), Sampling(max_new_tokens=24, temperature=0.7, top_p=0.9))


def shard_of(path: str, rank: int = 0, invariant: bool = True, **degrees: Any) -> Any:
    return make_shard(replace(plan_model(path), invariant=invariant), rank, **degrees)


def _gaps(rank: int, paths: list[str], degrees: dict[str, int]) -> list[Gap]:
    found = []
    for path in paths:
        shard = shard_of(path, rank, **degrees)
        for limit in (0, 5):
            found += [gap(shard, prompts(46, 12, 9, CPU), asked, limit) for asked in ASKED]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_between_them(family: str, tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", family=family, **{**TWO, **FAMILIES[family]}))
    for got in _gaps(0, [path], {}):
        assert got.tokens > 50 and got.most == 0, got


def test_nothing_is_between_them_under_pp(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", **TWO))
    for found in run_world(2, _gaps, [path], {"pp": 2}):
        assert all(got.most == 0 for got in found), found


class OneRow(TorchFunctionMode):
    """A processor whose products of a single row take another way than the others, as most do; some have no other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        products = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        return found * (1 + 1e-5) if func in products and found.numel() == found.shape[-1] else found


def test_without_it_something_is(tmp_path: Path) -> None:
    """Of a sequence that is decoded alone, every product has one row; of the packed pass none has."""
    path = str(make_model(tmp_path / "m", hidden_size=64))
    with OneRow():
        without, within = (gap(shard_of(path, invariant=on), prompts(46, 1, 9, CPU), ASKED[0]) for on in (False, True))
    assert without.most > 1e-7 and within.most == 0


def test_micro_batches_change_no_bit(tmp_path: Path) -> None:
    shard, rows = shard_of(str(make_model(tmp_path / "m", **TWO))), ragged(12, 46, longest=40)
    whole = shard.infer([pack(rows)], "logprobs", 1.0)
    for parts in ([rows[:1], rows[1:]], [[r] for r in rows]):
        assert torch.equal(shard.infer([pack(p) for p in parts], "logprobs", 1.0), whole)


def test_a_loss_begins_at_a_ratio_of_one_and_learns_as_without(tmp_path: Path) -> None:
    """Fresh log-probs in training are those of the generation; gradients are those of torch's own functions."""
    path, found = str(make_model(tmp_path / "m", **TWO)), []
    for invariant in (True, False):
        model = replace(plan_model(path, optimizer=Optimizer(lr=1e-2)), invariant=invariant)
        for recompute in ("none", "full"):
            shard = make_shard(model, 0)
            made = shard.generate(prompts(46, 8, 9, CPU), Sampling(max_new_tokens=20), seed=1, step=0, max_num_seqs=3)
            seen: list[torch.Tensor] = []

            def loss(i: int, fresh: Any) -> torch.Tensor:
                seen.append(fresh[0]["logprobs"].detach())
                return (fresh[0]["logprobs"] - made.logprobs).exp().mean() + fresh[0]["logprobs"].square().mean()

            norm = shard.train([(made.batch,)], [("logprobs",)], 1.0, loss, recompute=recompute)["grad_norm"]
            found.append(norm)
            assert torch.equal(seen[0], made.logprobs) == invariant
    assert found == pytest.approx([found[0]] * 4, rel=1e-4)


@pytest.mark.parametrize("rows", [1, ROWS - 1, ROWS, 3 * ROWS + 5])
def test_products_are_torchs(rows: int) -> None:
    x, w, b = torch.randn(2, rows, 24, requires_grad=True), torch.randn(10, 24, requires_grad=True), torch.randn(10)
    for function in (lambda: F.linear(x, w, b), lambda: x @ w.T, lambda: torch.addmm(b, x[0], w.T), lambda: x @ w[0],
                     lambda: F.silu(x), lambda: F.gelu(x, approximate="tanh"), lambda: torch.sigmoid(x)):
        right = function()
        with Invariant():
            found = function()
        assert torch.allclose(found, right, atol=1e-5)
        slope = torch.randn_like(right)
        assert torch.allclose(*(torch.autograd.grad(y, x, slope)[0] for y in (found, right)), atol=1e-5)


@pytest.mark.parametrize("tall, wide, causal", [
    (1, 1, False), (1, KEYS + 3, False), (70, 70, True), (9, 2 * KEYS, False)])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs(tall: int, wide: int, causal: bool, masked: bool) -> None:
    q, (k, v) = torch.randn(3, 4, tall, 8, requires_grad=True), torch.randn(2, 3, 2, wide, 8)
    seen = None if causal or not masked else (torch.rand(3, 1, tall, wide) < 0.5) | (torch.arange(wide) == 0)

    def attended() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal, scale=0.3, enable_gqa=True)

    right = attended()
    with Invariant():
        found = attended()
    assert torch.allclose(found, right, atol=1e-5)
    slope = torch.randn_like(right)
    assert torch.allclose(*(torch.autograd.grad(y, q, slope)[0] for y in (found, right)), atol=1e-5)


PROGRAM = """
data prompts = jsonl("p.jsonl", batch=4)
model actor = causal_lm("m"{options})
flow run(steps=1) {{
  prompt = prompts.next()
  gen = actor.generate(prompt) {on}
}}
"""


@pytest.mark.parametrize("options, on, word", [
    (", invariant=true", "on mesh(0:2) tp=2", "tp=2"),
    (", invariant=true, dtype=bfloat16", "", "bfloat16"),
    (", invariant=true", "on mesh(0:1) dp=1 backend=megatron", "megatron")])
def test_where_it_cannot_hold_it_is_refused(options: str, on: str, word: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m")
    (found,) = [d for d in api.check(PROGRAM.format(options=options, on=on), "p.rlf") if d.severity == "error"]
    assert found.code == "RL0330" and word in found.label


def test_it_travels_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.plan.codec import decode, encode

    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1"}\n' * 8)
    for said, kept in ((", invariant=true", True), ("", False), (", invariant=false", False)):
        (tmp_path / "p.rlf").write_text(PROGRAM.format(options=said, on=""))
        plan = decode(encode(api.compile("p.rlf")), "p.plan")
        assert plan.models[0].invariant is kept
