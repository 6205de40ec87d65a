"""Optimizer steps of every layout against one process with plain transformers, autograd and torch's AdamW."""

from __future__ import annotations

from math import prod

import pytest
import torch

from rldsl.plan.model import Layout, Mesh, Optimizer
from rldsl.sharding.boxes import local_slice
from rldsl.sharding.layout import coordinate
from tests.backend_torch.shards import pack, plan_model, ragged
from tests.backend_torch.test_forward import _partial
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

OPTIONS = Optimizer(lr=5e-3, eps=1e-4, weight_decay=0.1, warmup=1, schedule="linear", clip_grad=0.5)
STEPS, UPDATES = 3, 6
RATES = [OPTIONS.lr, OPTIONS.lr, 0.8 * OPTIONS.lr]  # one of warm-up, then 1, 4/5, 3/5, 2/5, 1/5
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (1, 1, 4), (2, 2, 2)]
# every token of the vocabulary occurs in prompts and responses, the padding token and the first row of each shard too
ROWS = [(p + [t, t + 23], r + [45 - t, 22 - t]) for t, (p, r) in zip(range(23), ragged(23, 46))] + [([3], [])]


def minibatch(step: int) -> list[int]:
    """Row numbers; the last step has one row, so that some shards have none."""
    return [step] if step == STEPS - 1 else list(range(step, len(ROWS), 2))


def share(fresh: torch.Tensor) -> torch.Tensor:
    """A sequence's part of the loss; tokens weigh differently, so that a wrong order shows."""
    return (fresh * torch.linspace(0.5, 1.5, max(1, fresh.numel()))[: fresh.numel()]).sum() * 0.05


def reference(path: str, what: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after STEPS, and gradient norms."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    score = torch.nn.Parameter(torch.zeros(1, 32))
    named = dict(model.named_parameters())
    if what == "values":
        named = {n: p for n, p in named.items() if n != "lm_head.weight"} | {"score.weight": score}
    adam = torch.optim.AdamW(named.values(), lr=OPTIONS.lr, betas=OPTIONS.betas, eps=OPTIONS.eps,
                             weight_decay=OPTIONS.weight_decay)
    norms = []
    for step, rate in enumerate(RATES):
        adam.zero_grad()
        for row in minibatch(step):
            prompt, response = ROWS[row]
            hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0][len(prompt) - 1 : -1]
            if what == "values":
                fresh = hidden @ score[0] - 0.1 * row
            else:
                logits = (model.lm_head(hidden) / 0.7).log_softmax(-1)
                fresh = logits.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
            share(fresh.square()).backward()
        for parameter in named.values():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIONS.clip_grad)))
        adam.param_groups[0]["lr"] = rate
        adam.step()
    return {n: p.detach() for n, p in named.items()}, norms


def _steps(rank, path, kind, what, layouts, expected):
    """For each layout with this rank: (layout, largest difference of a parameter, its name, norms, rates)."""
    found = []
    model = plan_model(path, kind, OPTIONS, UPDATES)
    for dp, tp, pp, *more in layouts:
        shard = _partial(model, rank, dp, tp, pp, *more, trainable=True)
        if shard is None:
            continue
        layout = Layout("L0", "m0", dp=dp, tp=tp, pp=pp, cp=prod(more))
        at = coordinate(layout, Mesh("m0", ((0, dp * tp * pp * layout.cp),)), rank)
        norms, seen = [], []
        for step in range(STEPS):
            rows = minibatch(step)[at.dp :: dp]
            parts = [rows[i::2] for i in range(2) if rows[i::2]]  # one sequence after another within a share

            def loss(i, fresh, parts=parts):
                sizes = [len(ROWS[r][1]) for r in parts[i]]
                offset = 0.1 if what == "values" else 0.0
                each = zip(fresh[0][what].split(sizes), parts[i])
                return sum(share((f - offset * r).square()) for f, r in each)

            result = shard.train([(pack([ROWS[r] for r in part]),) for part in parts], [(what,)], 0.7, loss)
            norms.append(result["grad_norm"])
            seen.append(result["lr"])
        worst = max((_difference(shard, name, tensor, expected), name) for name, tensor in shard.state_dict().items()
                    if not shard.stage.held[name][0].spec.buffer)
        found.append(((dp, tp, pp, *more), *worst, norms, seen))
    return found


def _difference(shard, name, tensor, expected):
    parameter, pieces = shard.stage.held[name]
    dim = parameter.spec.split.dim if parameter.spec.split else 0
    return max(float((tensor[local_slice(p, p.box, dim)] - expected[name][tuple(slice(*b) for b in p.box)]).abs().max())
               for p in pieces)


TWO = dict(num_hidden_layers=2)
CASES = [("qwen3", {}, "causal_lm", "logprobs", LAYOUTS),
         ("qwen3", TWO | dict(tie_word_embeddings=True), "causal_lm", "logprobs", [(1, 1, 2), (1, 2, 2)]),
         ("llama", TWO | dict(attention_bias=True, mlp_bias=True), "causal_lm", "logprobs", [(1, 4, 1), (2, 2, 1)]),
         ("apertus", TWO, "causal_lm", "logprobs", [(1, 2, 1)]),  # its activation has trained numbers
         ("qwen3", TWO, "value_model", "values", [(2, 1, 1), (1, 2, 2)])]


@pytest.mark.thorough
@pytest.mark.parametrize("family, overrides, kind, what, layouts", thorough_between(CASES), ids=["qwen3", "tied", "llama", "apertus", "values"])
def test_steps_equal_one_process(tmp_path, family, overrides, kind, what, layouts):
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    expected, norms = reference(path, what)
    assert norms[0] > OPTIONS.clip_grad, "the test must clip"
    results = run_world(max(map(prod, layouts)), _steps, path, kind, what, layouts, expected)
    for layout, difference, name, seen, rates in (found for rank in results for found in rank):
        assert difference < 1e-5, f"{layout}: {name} differs by {difference}"
        assert seen == pytest.approx(norms, rel=1e-4), layout
        assert rates == pytest.approx(RATES), layout


def _pairs(rank, path):
    shard = _partial(plan_model(path, "causal_lm", OPTIONS, UPDATES), rank, 1, 1, 2, trainable=True)
    if shard is None:
        return None
    chosen, rejected = pack(ROWS[:4]), pack(ROWS[4:8])
    sizes = []

    def loss(i, fresh):
        sizes.append([f["logprobs"].numel() for f in fresh])
        return fresh[0]["logprobs"].sum() - fresh[1]["logprobs"].sum()

    norm = shard.train([(chosen, rejected)], [("logprobs",), ("logprobs", "entropy")], 1.0, loss)["grad_norm"]
    return sizes, norm


def test_pairs_keep_their_frames_apart(tmp_path):
    found = run_world(2, _pairs, str(make_model(tmp_path / "m")))
    assert found[0][0] == [] and found[1][0] == [[sum(len(r) for _, r in ROWS[:4]), sum(len(r) for _, r in ROWS[4:8])]]
    assert found[0][1] == found[1][1] > 0


def _empty(rank, path):
    """With rows, then the same rows between empty micro-batches, then none at all."""
    found, seen = [], []
    for around in ((), ((pack([]),),)):
        shard = _partial(plan_model(path, "causal_lm", OPTIONS, UPDATES), rank, 1, 1, 2, trainable=True)

        def loss(i, fresh):
            seen.append(i)
            return fresh[0]["logprobs"].sum()

        found.append(shard.train([*around, (pack(ROWS[:4]),), *around], [("logprobs",)], 1.0, loss)["grad_norm"])
    return found, seen, shard.train([], [("logprobs",)], 1.0, loss)["grad_norm"]


def test_empty_micro_batches_change_nothing(tmp_path):
    for (plain, padded), seen, nothing in run_world(2, _empty, str(make_model(tmp_path / "m")), timeout=60):
        assert plain == padded > 0 and nothing == 0 and seen in ([], [0, 1])


def _half(rank, path, layouts):
    found = []
    for dp, tp, pp in layouts:
        model = plan_model(path, "causal_lm", OPTIONS, UPDATES, dtype="bfloat16")
        shard = _partial(model, rank, dp, tp, pp, trainable=True)
        if shard is not None:
            batch = pack(ROWS[:8])
            before = shard.infer([batch], "logprobs", 1.0)
            norm = shard.train([(batch,)], [("logprobs",)], 1.0, lambda i, f: f[0]["logprobs"].mean())["grad_norm"]
            kinds = {t.dtype for t in shard.state_dict().values()}
            found.append((before.numpy(), norm, kinds == {torch.float32}))
    return found


def test_bfloat16_trains_with_float32_parameters(tmp_path):
    results = [f for rank in run_world(4, _half, str(make_model(tmp_path / "m")), [(1, 1, 1), (1, 1, 2), (1, 2, 2)])
               for f in rank]
    first, norm, _ = results[0]
    for logprobs, other, whole in results:
        assert whole and other == pytest.approx(norm, rel=0.05)
        assert abs(logprobs - first).max() < 0.1


def _without_prompt(rank, path):
    from rldsl.diag import Failure

    shard = _partial(plan_model(path, "causal_lm", OPTIONS, UPDATES), rank, 1, 1, 1, trainable=True)
    try:
        shard.train([(pack([([], [3])]),)], [("logprobs",)], 1.0, lambda i, f: f[0]["logprobs"].sum())
    except Failure as failure:
        return failure.diagnostics[0].title
    return None


def test_an_empty_prompt_is_refused(tmp_path):
    assert "empty prompt" in run_world(1, _without_prompt, str(make_model(tmp_path / "m")))[0]
