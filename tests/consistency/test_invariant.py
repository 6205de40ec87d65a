"""`invariant=true`: tokens and log-probs have the same bits under every placement, log-probs of generation are those of
training with a difference of 0, and so are losses under any micro-batches; the products and the attention of the mode
against torch's own; kernels that break it are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from benchmarks.match import Gap, gap, prompts
from rldsl import api
from rldsl.backends.torch.kernels.ordered_kernels import KEYS
from rldsl.backends.torch.model import invariant_probe, invariant_products
from rldsl.backends.torch.model.invariant import Invariant
from rldsl.backends.torch.model.invariant_products import ROWS
from rldsl.backends.torch.model.tree_sums import row_parallel_product, tree_sum
from rldsl.diag import Failure
from rldsl.plan.events import Sampling
from rldsl.plan.model import Lora, Model, Optimizer
from rldsl.sharding.sum_blocks import local_cuts, num_blocks
from tests.backend_torch.shards import layout_of, make_shard, pack, plan_model, ragged
from tests.backend_torch.shards import shard_of as placed_shard
from tests.consistency.test_match import FAMILIES
from tests.families.tiny_configs import make
from tests.lora.adapted import adapted, make_adapter
from tests.tiny import make_model
from tests.world import run_world

CPU, TWO = torch.device("cpu"), dict(num_hidden_layers=2)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ASKED = (Sampling(max_new_tokens=80, min_new_tokens=70), Sampling(max_new_tokens=12, temperature=0.7, top_p=0.9))


def shard_of(path: str, rank: int = 0, invariant: bool = True, **degrees: Any) -> Any:
    return make_shard(replace(plan_model(path), invariant=invariant), rank, **degrees)


def _gaps(rank: int, paths: list[str], degrees: dict[str, int]) -> list[Gap]:
    found = []
    for path in paths:
        shard = shard_of(path, rank, **degrees)
        for limit in (0, 5):
            found += [gap(shard, prompts(46, 12, 9, CPU), asked, limit) for asked in ASKED]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_is_between_them(family: str, tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", family=family, **{**TWO, **FAMILIES[family]}))
    for got in _gaps(0, [path], {}):
        assert got.tokens > 50 and got.most == 0, got


@pytest.mark.thorough
def test_nothing_is_between_them_under_pp(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "m", **TWO))
    for found in run_world(2, _gaps, [path], {"pp": 2}):
        assert all(got.most == 0 for got in found), found


# placements of a world of 4 ranks; a generate has nothing for cp to divide
PLACEMENTS: list[dict[str, int]] = [{}, {"tp": 2, "pp": 2}, {"tp": 4}, {"cp": 2, "tp": 2}]
EXPERT_PLACEMENTS: list[dict[str, int]] = [{}, {"dp": 2, "ep": 2, "tp": 2}, {"cp": 2}]
# 7 heads that share one key: 1 or 2 on a rank of tp=4; a vocabulary and a width that no degree divides
ODD = dict(family="qwen2", num_attention_heads=7, num_key_value_heads=1, hidden_size=56, intermediate_size=90, **TWO)


def _digests(rank: int, cases: list[tuple[Model, list[dict[str, int]]]]) -> list[dict[str, str]]:
    """For each case the digests of what this rank computes, by what it is and where."""
    found = []
    for model, placements in cases:
        here: dict[str, str] = {}
        for degrees in placements:
            made = placed_shard(replace(model, invariant=True), layout_of(**degrees), rank)
            if made is None:
                continue
            shard, where = made[0], str(degrees)
            batch = pack(ragged(9, 46, longest=70))
            if "cp" not in degrees:
                sampled = shard.generate(prompts(46, 4, 9, CPU), Sampling(max_new_tokens=6, min_new_tokens=6),
                                         seed=1, step=0, max_num_seqs=3)
                again = shard.infer([sampled.batch], "logprobs", 1.0)
                here[f"gen {where}"] = _digest(sampled.batch.tokens, sampled.logprobs)
                here[f"gap {where}"] = str(Gap.of(sampled.logprobs, again).most)
            here[f"infer {where}"] = _digest(*(shard.infer([batch], x, 0.7) for x in ("logprobs", "entropy")))
        found.append(here)
    return found


def _digest(*tensors: torch.Tensor) -> str:
    return sha256(b"".join(x.contiguous().numpy().tobytes() for x in tensors)).hexdigest()


@pytest.mark.thorough
def test_every_placement_has_the_same_bits(tmp_path: Path) -> None:
    dense, mixed = (str(make_model(tmp_path / name, **more)) for name, more in (
        ("odd", ODD), ("moe", dict(family="qwen3_moe", **MIXTURE, **TWO))))
    lora = Lora(4, 8.0, targets=("q_proj", "o_proj", "down_proj"))
    make_adapter(tmp_path / "adapter", dense, lora)
    lora = replace(lora, path=str(tmp_path / "adapter"))
    cases = [(plan_model(dense), PLACEMENTS), (plan_model(dense, dtype="bfloat16"), PLACEMENTS),
             (plan_model(mixed), EXPERT_PLACEMENTS), (plan_model(mixed, dtype="bfloat16"), EXPERT_PLACEMENTS),
             (adapted(dense, lora), PLACEMENTS[:2])]
    ranks = run_world(4, _digests, cases)
    for i, (_, placements) in enumerate(cases):
        found = {f"{key} rank {r}": value for r, here in enumerate(ranks) for key, value in here[i].items()}
        for what in ("gen", "infer", "gap"):
            values = {key: value for key, value in found.items() if key.startswith(what)}
            assert len(values) >= len(placements) and len({*values.values()}) == 1, (i, values)
        assert "0.0" in found.values(), (i, found)


@pytest.mark.parametrize("units, size", [(14, 64), (7, 8), (4864, 1), (46, 1), (3, 5), (1, 9)])
def test_cuts_of_a_placement_are_those_of_one_rank(units: int, size: int) -> None:
    whole, blocks = local_cuts(units, size, 1, 0), num_blocks(units, size)
    assert len(whole) == blocks + 1 and whole[-1] == units * size
    for tp in (d for d in (1, 2, 4, 8) if blocks % d == 0):
        found, start = [0], 0
        for index in range(tp):
            cuts = local_cuts(units, size, tp, index)
            found += [start + at for at in cuts[1:]]
            start += cuts[-1]
        assert tuple(found) == whole


def test_a_tree_adds_neighbors_first() -> None:
    asked: list[int] = []

    def part(i: int) -> torch.Tensor:
        asked.append(i)
        return torch.tensor([[1e8, 1.0, -1e8, 1.0][i]])

    assert tree_sum(4, part).item() == 0.0 and asked == [0, 1, 2, 3]  # one after the other they give 1


def test_a_row_parallel_product_is_torchs() -> None:
    x, w = torch.randn(2, 9, 24, requires_grad=True), torch.randn(10, 24, requires_grad=True)
    found, right = row_parallel_product(x, w, (0, 5, 12, 18, 24)), F.linear(x, w)
    assert torch.allclose(found, right, atol=1e-5)
    slope = torch.randn_like(right)
    for a, b in zip(*(torch.autograd.grad(y, (x, w), slope) for y in (found, right)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


class OneRow(TorchFunctionMode):
    """A processor whose products of a single row take another way than the others, as most do; some have no other."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        products = (F.linear, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
        return found * (1 + 1e-5) if func in products and found.numel() == found.shape[-1] else found


@pytest.mark.thorough
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
    for on in (True, False):
        model = replace(plan_model(path, optimizer=Optimizer(lr=1e-2)), invariant=on)
        for recompute in ("none", "full"):
            shard = make_shard(model, 0)
            made = shard.generate(prompts(46, 8, 9, CPU), Sampling(max_new_tokens=20), seed=1, step=0, max_num_seqs=3)
            seen: list[torch.Tensor] = []

            def loss(i: int, fresh: Any) -> torch.Tensor:
                seen.append(fresh[0]["logprobs"].detach())
                return (fresh[0]["logprobs"] - made.logprobs).exp().mean() + fresh[0]["logprobs"].square().mean()

            norm = shard.train([(made.batch,)], [("logprobs",)], 1.0, loss, recompute=recompute)["grad_norm"]
            found.append(norm)
            assert torch.equal(seen[0], made.logprobs) == on
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
    (", invariant=true", "on mesh(0:3) dp=1 tp=3", "tp=3"),
    (", invariant=training", "on mesh(0:3) dp=1 tp=3", "tp=3"),
    (", invariant=true", "on mesh(0:1) dp=1 backend=megatron", "megatron")])
def test_where_it_cannot_hold_it_is_refused(options: str, on: str, word: str, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m")
    (found,) = [d for d in api.check(PROGRAM.format(options=options, on=on), "p.rlf") if d.severity == "error"]
    assert found.code == "RL0330" and word in found.label and f"remove `{options[2:]}` from `actor`" in found.help


def test_each_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first problem of each, and of a family at its declaration."""
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "m", "gpt_oss")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1"}\n' * 8)
    (tmp_path / "p.rlf").write_text("""data prompts = jsonl("prompts.jsonl", batch=4)
model actor = causal_lm("m", invariant=true)
model ref = causal_lm("m", invariant=true)
flow run(steps=2) {
  prompt = prompts.next()
  gen = actor.generate(prompt, max_new_tokens=4) on mesh(0:2) dp=2
  old = ref.logprobs(gen) on mesh(0:2) dp=2
}
""")
    with pytest.raises(Failure) as caught:
        api.compile("p.rlf")
    found = caught.value.diagnostics
    assert [(d.code, d.span and d.span.line) for d in found] == [("RL0330", 2), ("RL0330", 3)]
    assert all("sinks" in d.label for d in found)


def test_it_travels_in_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rldsl.plan.codec import decode, encode

    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m")
    (tmp_path / "p.jsonl").write_text('{"prompt": "1"}\n' * 8)
    for said, kept in ((", invariant=true", True), ("", False), (", invariant=false", False)):
        (tmp_path / "p.rlf").write_text(PROGRAM.format(options=said, on=""))
        plan = decode(encode(api.compile("p.rlf")), "p.plan")
        assert plan.models[0].invariant is kept


def test_a_backend_is_underlined_where_it_is_written() -> None:
    """Not the call that has its placement from there."""
    program = """use std.grpo (grpo)
data prompts = jsonl("prompts.jsonl", batch=4)
model actor = causal_lm("models/tiny", invariant=training) train adamw(lr=1e-3)
flow run(steps=2) {
  prompt = prompts.next()
  gen = actor.generate(prompt)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=0.1, ref=gen.logprobs))
}
"""
    (inherits,) = api.check(program + "place actor.train on mesh(0:2) dp=2 backend=megatron\n")
    assert inherits.code == "RL0330" and inherits.span is not None and inherits.span.text == "backend=megatron"
    assert [x.text for x in inherits.labels] == ["`actor.generate` runs where `actor.train` does"]
    (own,) = api.check(program.replace("generate(prompt)", "generate(prompt) on mesh(0:2) dp=2 backend=megatron"))
    assert own.span is not None and own.span.text == "backend=megatron" and not own.labels


@pytest.mark.parametrize("value", ["yes", "trainig"])
def test_a_wrong_value_lists_the_accepted_ones(value: str) -> None:
    found = next(d for d in api.check(f'model actor = causal_lm("models/tiny", invariant={value})\n') if d.code == "RL0101")
    assert "`invariant` is one of: true, false, training" in found.help


@pytest.mark.parametrize("broken", ["rows", "columns", "bfloat16"])
def test_kernels_that_break_it_are_refused(broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a processor sums products of few rows, of few columns or of few numbers in another order."""
    plain = invariant_products.multiply

    def multiply(x: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        out = plain(x, right)
        few = {"rows": len(x) < 8, "columns": right.shape[1] < 24, "bfloat16": x.dtype == torch.bfloat16 and
               len(x) * x.shape[1] < 900}[broken]
        return plain(x.flip(1), right.flip(0)) if few else out

    model = replace(plan_model(str(make_model(tmp_path / "m", hidden_size=64)),
                               dtype="bfloat16" if broken == "bfloat16" else "float32"), invariant=True)
    check: Callable[..., str] = invariant_probe._product_varies.__wrapped__
    monkeypatch.setattr(invariant_probe, "_product_varies", check)  # what was found before does not count
    invariant_probe.check_kernels(model, CPU)
    monkeypatch.setattr(invariant_products, "multiply", multiply)
    with pytest.raises(Failure) as raised:
        invariant_probe.check_kernels(model, CPU)
    assert raised.value.diagnostics[0].code == "RL0734"
