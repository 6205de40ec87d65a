"""The functions of an invariant model on a GPU, on a CPU: reductions as they are, products in Triton's interpreter, in a
process of its own, since what Triton defines is interpreted or compiled from the moment that it is imported.

The interpreter multiplies tiles with numpy, whose library sums an element in an order that its place in the tile
decides. A GPU's instructions treat all elements of a tile alike; here terms are added one after the other instead.

    TRITON_INTERPRET=1 python -m tests.consistency.fixed_order_check      # one line of JSON
    RLDSL_TEST_DEVICE=cuda python -m tests.consistency.fixed_order_check  # on a GPU, with its own instructions
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from rldsl.backends.torch import shard
from rldsl.backends.torch.kernels import fixed_order, ordered_products
from rldsl.backends.torch.model import invariant, invariant_attention, invariant_probe, invariant_products
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from rldsl.plan.model import Optimizer
from tests.backend_torch.shards import DEVICE, layout_of, pack, plan_model, ragged, shard_of
from tests.tiny import make_model


def in_order(self: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
    """In place of the interpreter's product of tiles."""
    terms = a.data[:, :, None] * b.data[None]
    out = np.concatenate([total.data[:, None], terms], 1).cumsum(1)[:, -1]
    return TensorHandle(out, total.dtype.scalar)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def products() -> Iterator[tuple[str, bool]]:
    """Rows and columns of products, alone and among others."""
    for terms, columns in ((48, 37), (33, 50)):
        x, w = drawn(80, terms), drawn(columns, terms, seed=1)
        whole = invariant_products.multiply(x, w.T)
        yield f"{terms} near torch's", torch.allclose(whole, x @ w.T, atol=1e-4)
        yield f"{terms} rows", all(torch.equal(invariant_products.multiply(x[a:b], w.T), whole[a:b])
                                   for a, b in ((0, 1), (7, 9), (31, 34), (5, 80)))
        yield f"{terms} columns", all(torch.equal(invariant_products.multiply(x, w[a:b].T), whole[:, a:b])
                                      for a, b in ((0, 1), (columns // 2, columns), (3, 20)))
        yield f"{terms} batches", torch.equal(fixed_order.products(x.view(4, 20, terms), w.T), whole.view(4, 20, -1))
        yield f"{terms} gradient", torch.allclose(invariant_products.weight_gradient(x, whole), whole.T @ x, atol=1e-2)


def reductions() -> Iterator[tuple[str, bool]]:
    """Rows of reductions, alone and among others, and those of torch in double precision."""
    x = drawn(9, 1001) * 3
    wide = x.double()
    layer = torch.nn.LayerNorm(1001, device=DEVICE)
    cases: dict[str, tuple[Any, torch.Tensor]] = {
        "sum": (lambda y: y.sum(-1, keepdim=True), wide.sum(-1, keepdim=True)),
        "mean": (lambda y: torch.mean(y, 1), wide.mean(-1)),
        "cumsum": (lambda y: y.cumsum(-1, dtype=torch.float64), wide.cumsum(-1)),
        "softmax": (lambda y: F.softmax(y, dim=-1), wide.softmax(-1)),
        "log_softmax": (lambda y: y.log_softmax(-1), wide.log_softmax(-1)),
        "layer_norm": (layer, F.layer_norm(wide, (1001,))),
        "not the last": (lambda y: y.sum(0), wide.sum(0))}
    for name, (function, right) in cases.items():
        with invariant.Invariant():
            found = function(x)
            if name != "not the last":
                yield f"{name} alone", torch.equal(function(x[3:4].clone()), found[3:4])
        yield f"{name} near torch's", torch.allclose(found.double(), right, atol=1e-3, rtol=1e-4)


def attention() -> Iterator[tuple[str, bool]]:
    """The gradient of attention against torch's: grouped heads, causal or under a mask."""
    q, k, v, grad = (drawn(1, heads, 70, 8, seed=seed) for seed, heads in enumerate((6, 2, 2, 6)))
    mask = drawn(1, 1, 70, 70, seed=9) < 0
    mask |= torch.eye(70, dtype=torch.bool, device=DEVICE)
    for name, options in (("causal", {"is_causal": True}), ("mask", {"attn_mask": mask}), ("all", {})):
        both = []
        for function, more in ((invariant_attention.attend, {}), (F.scaled_dot_product_attention, {"enable_gqa": True})):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            out = function(*inputs, **options, **more)  # type: ignore[operator]
            both.append([out, *torch.autograd.grad(out, inputs, grad)])
        yield f"attention {name}", all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*both, strict=True))


def model(path: str) -> Iterator[tuple[str, bool]]:
    """Generation is inference, bit for bit; log-probs and gradients are torch's but for rounding."""
    found = []
    for ordered in (True, False):
        # AdamW would clear the gradients on a CPU
        record = replace(plan_model(path, optimizer=Optimizer(kind="sgd", lr=1e-2, clip_grad=0.0)), invariant=ordered,
                         invariant_training=ordered, sizes=sizes_of(describe(path, "causal_lm")))
        fixed_order.needed = lambda _, on=ordered: on  # type: ignore[assignment]
        made = shard_of(record, layout_of(), 0, trainable=True)
        assert made is not None
        one, rows = made[0], ragged(4, 46, longest=8)
        if ordered:
            batch = one.generate(pack(rows), Sampling(max_new_tokens=3, min_new_tokens=3), seed=1, step=0, max_num_seqs=2)
            again = one.infer([batch.batch], "logprobs", 1.0)
            yield "generation is inference", torch.equal(batch.logprobs, again) and len(again) > 5
            alone = torch.cat([one.infer([pack([row])], "logprobs", 1.0) for row in rows])
            yield "a row alone", torch.equal(alone, one.infer([pack(rows)], "logprobs", 1.0))
        lasting = one.infer([pack(rows)], "logprobs", 1.0)
        one.train([(pack(rows),)], [("logprobs",)], 1.0, lambda _, fresh: -fresh[0]["logprobs"].mean(),
                    leaves=[1] + [0] * 7 if ordered else ())
        found.append([lasting, *(p.grad.clone() for p in one.stage.parameters.values())])
    yield "near torch's", all(torch.allclose(a, b, atol=1e-5, rtol=1e-3) for a, b in zip(*found, strict=True))


def main() -> None:
    if DEVICE.type == "cpu":
        InterpreterBuilder.create_dot = in_order
        ordered_products.ROWS, ordered_products.COLUMNS, ordered_products.TERMS = 32, 16, 16  # less to interpret
        fixed_order.needed = lambda _: True  # type: ignore[assignment]  # as on a GPU
        shard.check_kernels = lambda *_: None  # tries every shape, which takes the interpreter minutes
    found = [*products(), *reductions(), *attention()]
    where = str(DEVICE)
    found += [("probe", not invariant_probe._product_varies(12, 20, 0, torch.float32, where, 1)),
              ("probe of gradients", not invariant_probe._gradient_varies(12, 20, torch.float32, where, 1)),
              ("probe of attention", not invariant_probe._attention_varies(8, where, 1)),
              ("probe of its gradient", not invariant_probe._attention_gradient_varies(8, where, 1)),
              ("probe of sums", not invariant_probe._sum_varies(where, 1))]
    with tempfile.TemporaryDirectory() as place:
        found += model(str(make_model(Path(place) / "m", num_hidden_layers=1)))
    print(json.dumps(dict(found)))


if __name__ == "__main__":
    main()
