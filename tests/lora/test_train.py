"""Adapters under every layout against one process: transformers with B A x added by hand, autograd, torch's AdamW."""

from __future__ import annotations

import pytest
import torch

from rldsl.plan.model import Layout, Lora, Mesh
from rldsl.sharding.boxes import local_slice
from rldsl.sharding.layout import coordinate
from tests.backend_torch.shards import pack
from tests.backend_torch.test_forward import _partial
from tests.backend_torch.test_train import OPTIONS, RATES, ROWS, STEPS, TWO, UPDATES, minibatch, share
from tests.lora.adapted import adapted, by_hand, make_adapter
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 4, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)]
SOME = Lora(4, 8.0, ("q_proj", "v_proj", "o_proj", "mlp.up_proj", "down_proj"))
ALL = Lora(3, 6.0, ())


def reference(path, what, factors, scale):
    """Adapters after STEPS, gradient norms, and the first log-probs or values."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    named = by_hand(model, factors, scale)
    if what == "values":
        named["score.weight"] = torch.nn.Parameter(factors["score.weight"].clone())
    adam = torch.optim.AdamW(named.values(), lr=OPTIONS.lr, betas=OPTIONS.betas, eps=OPTIONS.eps,
                             weight_decay=OPTIONS.weight_decay)
    norms, first = [], []
    for step, rate in enumerate(RATES):
        adam.zero_grad()
        for row in minibatch(step):
            prompt, response = ROWS[row]
            body = getattr(model, model.base_model_prefix)
            hidden = body(torch.tensor([prompt + response])).last_hidden_state[0][len(prompt) - 1 : -1]
            if what == "values":
                fresh = hidden @ named["score.weight"][0]
            else:
                logits = (model.lm_head(hidden) / 0.7).log_softmax(-1)
                fresh = logits.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0]
            if step == 0:
                first.append(fresh.detach())
            share(fresh.square()).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), OPTIONS.clip_grad)))
        adam.param_groups[0]["lr"] = rate
        adam.step()
    return {n: p.detach() for n, p in named.items()}, norms, torch.cat(first)


def _steps(rank, path, adapter, kind, what, layouts, expected):
    found = []
    model = adapted(path, Lora(0, 0.0, (), path=adapter), kind, OPTIONS, UPDATES)
    for dp, tp, pp in layouts:
        shard = _partial(model, rank, dp, tp, pp, trainable=True)
        if shard is None:
            continue
        base = {n: p.data.clone() for n, p in shard.stage.base.items()}
        at = coordinate(Layout("L0", "m0", dp=dp, tp=tp, pp=pp), Mesh("m0", ((0, dp * tp * pp),)), rank)
        batches = [[ROWS[r] for r in minibatch(0)[i : i + 4]] for i in range(0, len(minibatch(0)), 4)]
        first = shard.infer([pack(rows) for rows in batches], what, 0.7).numpy()
        norms = []
        for step in range(STEPS):
            rows = minibatch(step)[at.dp :: dp]
            parts = [rows[i::2] for i in range(2) if rows[i::2]]

            def loss(i, fresh, parts=parts):
                return sum(share(f.square()) for f in fresh[0][what].split([len(ROWS[r][1]) for r in parts[i]]))

            norms.append(shard.train([(pack([ROWS[r] for r in p]),) for p in parts], [(what,)], 0.7, loss)["grad_norm"])
        worst = max((_difference(shard, name, tensor, expected), name) for name, tensor in shard.state_dict().items())
        same = all(torch.equal(base[n], p.data) and p.grad is None for n, p in shard.stage.base.items())
        lean = shard.optimizer_state()["exp_avg"].keys() == shard.state_dict().keys() == shard.stage.parameters.keys()
        found.append(((dp, tp, pp), *worst, norms, first, same, lean))
    return found


def _difference(shard, name, tensor, expected):
    parameter, pieces = shard.stage.held[name]
    dim = parameter.spec.split.dim if parameter.spec.split else 0
    return max(float((tensor[local_slice(p, p.box, dim)] - expected[name][tuple(slice(*b) for b in p.box)]).abs().max())
               for p in pieces)


CASES = {
    "qwen3": ("qwen3", {}, "causal_lm", "logprobs", SOME, LAYOUTS),
    "tied": ("qwen3", TWO | dict(tie_word_embeddings=True), "causal_lm", "logprobs", ALL, [(1, 1, 2), (1, 4, 1)]),
    "llama": ("llama", TWO | dict(attention_bias=True, mlp_bias=True), "causal_lm", "logprobs", ALL,
              [(1, 4, 1), (2, 2, 1)]),
    "gpt2": ("gpt2", {}, "causal_lm", "logprobs", ALL, [(1, 1, 1), (2, 1, 1)]),
    "values": ("qwen3", TWO, "value_model", "values", ALL, [(2, 1, 1), (1, 2, 2)]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_between(CASES))
def test_steps_equal_one_process(tmp_path, name):
    family, overrides, kind, what, lora, layouts = CASES[name]
    path = str(make_model(tmp_path / "m", family=family, **overrides))
    factors = make_adapter(tmp_path / "a", path, lora, kind)
    expected, norms, first = reference(path, what, factors, lora.alpha / lora.r)
    moved = max(float((expected[n] - factors[n]).abs().max()) for n in factors)
    assert moved > 1e-3 and norms[0] > OPTIONS.clip_grad, "the test must change something, and clip"
    results = run_world(max(dp * tp * pp for dp, tp, pp in layouts), _steps, path, str(tmp_path / "a"), kind, what,
                        layouts, expected)
    for layout, difference, worst, seen, mine, same, moments in (found for rank in results for found in rank):
        assert difference < 1e-5, f"{layout}: {worst} differs by {difference}"
        assert seen == pytest.approx(norms, rel=1e-4), layout
        assert torch.allclose(torch.from_numpy(mine), first, atol=1e-5), layout
        assert same, f"{layout}: the base changed"
        assert moments, f"{layout}: the optimizer holds more than adapters"
