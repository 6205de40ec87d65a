"""Every family under every division, and one dense and one of experts under every two of them: log-probs and the
gradient of each parameter are those of plain transformers, and tensors are the boxes of the directory, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.model import Layout
from rldsl.sharding.boxes import local_slice, slices
from rldsl.sharding.layout import degree_product
from tests.backend_torch.shards import pack, plan_model
from tests.backend_torch.test_train import OPTIONS, ROWS, UPDATES, minibatch, share
from tests.megatron.shards import layout_of as at
from tests.megatron.shards import make, needed, shard_of
from tests.samples import thorough_unless
from tests.world import run_world

needed()
Tensors = Mapping[str, torch.Tensor]
NEAR = 1e-5
DIVIDED = (axes for count in range(3) for axes in combinations(("dp", "tp", "pp", "cp"), count))
PAIRS = [at(**dict.fromkeys(axes, 2)) for axes in DIVIDED]
SOME = [*PAIRS[:5], at(tp=2, pp=2), at(dp=2, cp=2)]
EXPERTS = [at(dp=2, ep=2), at(dp=2, tp=2, ep=2), at(dp=2, pp=2, ep=2)]
LAYOUTS = {
    "llama": SOME, "mistral": SOME, "qwen2": SOME,
    # and fewer heads of keys than ranks, many stages, chunks of layers, the distributed optimizer, three degrees
    "qwen3": [*PAIRS, at(tp=4), at(pp=4), at(pp=2, vpp=2), at(dp=2, zero=1), at(dp=2, tp=2, zero=1),
              at(dp=2, tp=2, pp=2)],
    "mixtral": [*PAIRS, *EXPERTS, at(dp=4, ep=2), at(dp=4, ep=4), at(dp=2, zero=1), at(dp=4, ep=2, zero=1)],
    "qwen3_moe": [*SOME, EXPERTS[0], at(dp=2, tp=2, pp=2, ep=2)],
    "linear": [at(tp=2)], "llama3": [at(tp=2)], "yarn": [at(tp=2)],
}


@dataclass(frozen=True, slots=True)
class Seen:
    """exact: its tensors are the directory's boxes. one: Megatron's tensors are the same memory. logprobs, gradients:
    the largest difference of an element; of gradients as a part of the parameter's largest, since those of embeddings
    reach 13, where transformers in float32 is 3e-5 from itself in float64."""

    layout: Layout
    exact: bool
    one: bool
    logprobs: float
    gradients: float


def plainly(path: str) -> tuple[Tensors, torch.Tensor, Tensors]:
    """Parameters, log-probs of all rows, and gradients of the loss over the first minibatch."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), []
    for row, (prompt, response) in enumerate(ROWS):
        hidden = model.model(torch.tensor([prompt + response])).last_hidden_state[0][len(prompt) - 1 : -1]
        every, targets = (model.lm_head(hidden) / 0.7).log_softmax(-1), torch.tensor(response, dtype=torch.long)
        mine = every.gather(1, targets[:, None])[:, 0]
        found.append(mine.detach())
        if row in minibatch(0):
            share(mine.square()).backward()
    named = dict(model.named_parameters())
    return {n: p.detach() for n, p in named.items()}, torch.cat(found), {n: p.grad for n, p in named.items()}


def seen(rank: int, path: str, layouts: list[Layout], whole: Tensors, logprobs: torch.Tensor,
         gradients: Tensors) -> list[Seen]:
    options = replace(OPTIONS, kind="sgd", clip_grad=0.0)  # AdamW would clear the gradients
    model, found = plan_model(path, "causal_lm", options, UPDATES), []
    for layout in layouts:
        made = shard_of(model, layout, rank, True)
        if made is None:
            continue
        shard, mine = made
        exact, apart = largest(shard, shard.state_dict(), whole) == 0.0, 0.0
        if layout.zero == 0 and layout.vpp == 1:  # which are of training alone
            halves = [pack(ROWS[:11]), pack(ROWS[11:])]
            apart = float((shard.infer(halves, "logprobs", 0.7) - logprobs).abs().max())
        backward(shard, minibatch(0)[mine :: layout.dp])
        worst = largest(shard, {n: p.grad for n, p in shard.stage.parameters.items()}, gradients, relative=True)
        found.append(Seen(layout, exact, layout.zero > 0 or one_memory(shard), apart, worst))
    return found


def backward(shard: Any, rows: list[int]) -> None:
    parts = [rows[i::2] for i in range(2)]  # as many on every shard

    def loss(i: int, fresh: Any) -> torch.Tensor:
        sizes = [len(ROWS[r][1]) for r in parts[i]]
        return sum(share(f.square()) for f in fresh[0]["logprobs"].split(sizes))

    shard.train([(pack([ROWS[r] for r in part]),) for part in parts], [("logprobs",)], 0.7, loss)


def largest(shard: Any, mine: Tensors, whole: Tensors, relative: bool = False) -> float:
    """The largest difference between the boxes of this rank and those of whole tensors."""
    worst = 0.0
    for name, (parameter, pieces) in shard.stage.held.items():
        scale = float(whole[name].abs().max()) if relative else 1.0
        for p in (p for p in pieces if mine[name].numel()):
            apart = mine[name][local_slice(p, p.box, parameter.dim)] - whole[name][slices(p.box)]
            worst = max(worst, float(apart.abs().max()) / scale)
    return worst


def one_memory(shard: Any) -> bool:
    for tensor in shard.state_dict().values():
        tensor.fill_(7.0)
    inside = [p for chunk in shard.stage.chunks for p in chunk.model.parameters()]
    return len(inside) > 4 and all(bool((p == 7.0).all()) for p in inside)


@pytest.mark.thorough
@pytest.mark.parametrize("name", thorough_unless(lambda name: name in ("qwen3", "qwen3_moe"), LAYOUTS))
def test_numbers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, layouts = make(tmp_path, name), LAYOUTS[name]
    found = sum(run_world(max(map(degree_product, layouts)), seen, path, layouts, *plainly(path)), [])
    assert {str(x.layout) for x in found} == set(map(str, layouts))
    for x in found:
        assert x.exact and x.one and x.logprobs <= NEAR and x.gradients <= NEAR, x
