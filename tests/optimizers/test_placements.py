"""Every optimizer under every kind of layout, and with adapters: complete steps, with the gradients of each layout,
against one process; and resumed in the middle bit for bit.

Layouts round sums of gradients in other orders, so that parameters differ a little. How much each optimizer makes of
that is stated in WORST, as a fraction of how far the parameter that moved furthest has moved. torch's Muon
orthogonalizes in bfloat16, whose rounding the last bit of a gradient changes: percents of an update (docs/language.md).
Here it does the same iterations in float32, so that nothing else can hide behind that.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import _muon

from rldsl.plan.model import Layout, Lora, Model, Optimizer
from rldsl.sharding.boxes import local_slice, slices
from rldsl.sharding.layout import degree_product
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import make_shard, pack, plan_model, shard_of
from tests.backend_torch.test_train import ROWS, share
from tests.lora.adapted import adapted
from tests.samples import thorough_between
from tests.tiny import make_model
from tests.world import run_world

BASE = Optimizer(lr=5e-3, eps=1e-4, weight_decay=0.1, warmup=1, schedule="linear", clip_grad=0.5)
OPTIMIZERS = {
    "adamw": BASE,
    "adamw_8bit": replace(BASE, kind="adamw_8bit"),
    "sgd": replace(BASE, kind="sgd", momentum=0.9, nesterov=True),
    "adafactor": replace(BASE, kind="adafactor", eps=1e-3),
    "muon": replace(BASE, kind="muon", momentum=0.95, nesterov=True),
}
# adamw divides a gradient that nearly cancels by its own size, rounding included; a moment of 8 bits in the middle of
# two codes can become either, and these are up to percents apart
WORST = {"adamw": 3e-4, "adamw_8bit": 3e-2, "sgd": 1e-4, "adafactor": 1e-4, "muon": 1e-4}
STEPS = 4
DENSE = [at(dp=2), at(tp=2), at(pp=2), at(dp=2, zero=1), at(dp=2, zero=2), at(dp=2, zero=3), at(dp=2, tp=2, zero=3)]
CASES = {
    "dense": ("qwen3", dict(num_hidden_layers=2, intermediate_size=144), DENSE),
    "experts": ("mixtral", dict(num_local_experts=4, num_hidden_layers=1, intermediate_size=140),
                [at(dp=2, ep=2), at(tp=2, dp=2, ep=2), at(dp=2, ep=2, zero=1), at(dp=4, ep=2, zero=3)]),
    "adapters": ("qwen3", dict(num_hidden_layers=2, intermediate_size=144), DENSE),
}


def orthogonalized(grad: torch.Tensor, coefficients: tuple[float, float, float], steps: int,
                   eps: float) -> torch.Tensor:
    """Newton-Schulz as torch's Muon does it, without bfloat16."""
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def train(shard: Any, mine: int, dp: int, steps: range) -> None:
    """Some steps with half of the rows each, in two micro-batches."""
    for step in steps:
        rows = range(step % 2, len(ROWS), 2)[mine::dp]

        def loss(i: int, fresh: Any, rows: range = rows) -> torch.Tensor:
            own = fresh[0]["logprobs"].split([len(ROWS[r][1]) for r in rows[i::2]])
            return sum(share(f.square()) for f in own)

        batches = [(pack([ROWS[r] for r in rows[i::2]]),) for i in range(2)]
        shard.train(batches, [("logprobs",)], 0.7, loss)


def resumed(model: Model, layout: Layout, rank: int, shard: Any) -> Any:
    """Another shard with what a checkpoint has of `shard`."""
    made = shard_of(model, layout, rank, True)
    assert made is not None
    other: Any = made[0]
    for mine, theirs in ((other.state_dict(), shard.state_dict()),
                         *((other.optimizer_state()[kind], tensors)
                           for kind, tensors in shard.optimizer_state().items())):
        assert mine.keys() == theirs.keys()
        for name, tensor in theirs.items():
            mine[name].copy_(tensor)
    other.load_schedule_state(shard.schedule_state())
    return other


def placed(rank: int, model: Model, layouts: list[Layout], before: dict[str, torch.Tensor],
           expected: dict[str, torch.Tensor]) -> list[tuple[str, float]]:
    """What is wrong, and the largest difference from one process relative to the largest movement."""
    _muon._zeropower_via_newtonschulz = orthogonalized
    furthest = max(float((expected[n] - before[n]).abs().max()) for n in before)
    found = []
    for layout in layouts:
        made = shard_of(model, layout, rank, True)
        if made is None:
            shard_of(model, layout, rank, True)  # of `resumed`: all ranks make its groups
            continue
        shard: Any = made[0]
        train(shard, made[1], layout.dp, range(STEPS // 2))
        other = resumed(model, layout, rank, shard)
        for continued in (shard, other):
            train(continued, made[1], layout.dp, range(STEPS // 2, STEPS))
        theirs, kept = other.state_dict(), other.optimizer_state()
        same = all(torch.equal(t, theirs[n]) for n, t in shard.state_dict().items()) and all(
            torch.equal(t, kept[kind][n]) for kind, x in shard.optimizer_state().items() for n, t in x.items())
        worst = 0.0
        for name, tensor in shard.state_dict().items():
            record, pieces = shard.stage.held[name]
            for p in pieces:
                off = tensor[local_slice(p, p.box, record.dim)] - expected[name][slices(p.box)]
                worst = max(worst, float(off.abs().max()) / furthest)
        found.append(("" if same else f"{layout} resumed otherwise", worst))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("case", thorough_between(CASES))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_those_of_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str,
                                        case: str) -> None:
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", orthogonalized)
    family, sizes, layouts = CASES[case]
    path = str(make_model(tmp_path / "m", family=family, **sizes))
    if case == "adapters":  # large enough for moments of 8 bits
        model = adapted(path, Lora(128, 128.0, ()), optimizer=OPTIMIZERS[name])
    else:
        model = plan_model(path, "causal_lm", OPTIMIZERS[name])
    one: Any = make_shard(model, 0)
    before = {n: t.clone() for n, t in one.state_dict().items()}
    train(one, 0, 1, range(STEPS))
    expected = {n: t.clone() for n, t in one.state_dict().items()}
    if name == "adamw_8bit":
        assert one.optimizer_state()["exp_avg_codes"]
    for faults in run_world(max(map(degree_product, layouts)), placed, model, layouts, before, expected):
        assert not [fault for fault, _ in faults if fault]
        assert max([worst for _, worst in faults], default=0.0) < WORST[name], faults
