"""Trials of modules of transformers without storage: what their operations hold, and how much work they are.

In: a module on the meta device. Out: bytes that live, and floating-point operations, of passes that compute no numbers.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rldsl.models.rotary import forward_rotates_halves

FLOAT = 4  # bytes of a float32 number
ITEMSIZES = (FLOAT, 2)  # bytes of an element in layers of float32 and of half precision
PROJECTIONS = ("q_proj", "k_proj", "v_proj")  # of attention whose rotary embedding backends may replace
GATED = ("gate_proj", "up_proj", "down_proj", "act_fn")  # all modules of a feed-forward layer with a gate


@contextmanager
def without_storage(item: int, device: str = "meta") -> Iterator[None]:
    """New tensors are shapes alone. item: bytes of an element; 2: under autocast, as models of half precision run
    (`backends/torch/model/autocast.py`). device: "cpu": tensors say that they are there; the meta device knows no
    autocast, so with `item` 2 they do in any case."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode

    if item == FLOAT and device == "meta":
        with torch.device("meta"):
            yield
    else:
        with (FakeTensorMode(allow_non_fake_inputs=True),
              torch.autocast("cpu", torch.bfloat16, enabled=item != FLOAT, cache_enabled=False)):
            yield


def renew(module: Any) -> None:
    """Give a module on the meta device new tensors."""
    import torch

    for inner in module.modules():
        for name, x in [(n, x) for n, x in inner._parameters.items() if x is not None]:
            inner._parameters[name] = torch.nn.Parameter(torch.empty(x.shape, dtype=torch.float32))
        for tensors in (inner._buffers, inner.__dict__):
            for name, x in [(n, x) for n, x in tensors.items() if isinstance(x, torch.Tensor)]:
                tensors[name] = torch.empty(x.shape, dtype=x.dtype)


def fuse_norms(module: Any) -> None:
    """Let root-mean-square norms keep what they keep in the backend, whose own gradient needs their normed numbers
    alone (`backends/torch/kernels/rms_norms.py`). Before `renew`."""
    import torch

    class Norm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            normed = x * x.sum(-1, keepdim=True)
            ctx.save_for_backward(normed, weight)
            return normed * weight

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            normed, weight = ctx.saved_tensors
            product = grad * normed
            return product, product.flatten(0, -2).sum(0)

    def forward(norm: Any) -> Callable[[Any], Any]:
        return lambda x: Norm.apply(x, norm.weight)  # type: ignore[no-untyped-call]

    for norm in module.modules():
        if is_plain_norm(norm):
            norm.forward = forward(norm)


def is_plain_norm(module: Any) -> bool:
    """Whether a module on the meta device computes weight * x / rms(x), of numbers."""
    import torch

    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(eps, float) or [*module._parameters] != ["weight"] or module.weight is None or \
            module.weight.dim() != 1:
        return False
    trial = copy.copy(module)
    size = len(module.weight)
    weight, x = torch.linspace(0.5, 2.0, size, device="cpu"), torch.linspace(-2, 3, size, device="cpu")
    trial._parameters = {"weight": torch.nn.Parameter(weight)}
    with torch.no_grad():
        right = weight * x * torch.rsqrt((x * x).mean() + eps)
        return bool(torch.allclose(trial(x[None])[0], right, 1e-5, 1e-6))


def fuse_gates(module: Any) -> list[int]:
    """Let feed-forward layers with a gate keep what they keep where a kernel computes the gated product
    (`backends/torch/model/fused_layers.py`): its two factors and the product. Before `renew`. Returns a list to which
    every forward pass adds the bytes of silu(gate), which torch's operators keep besides."""
    import torch

    left_out: list[int] = []

    class GatedProduct(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gate: Any, up: Any) -> Any:
            ctx.save_for_backward(gate, up)
            left_out.append(gate.nbytes)
            return gate * up

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            gate, up = ctx.saved_tensors
            return grad * up, grad * gate

    def forward(layer: Any) -> Callable[[Any], Any]:
        return lambda x: layer.down_proj(
            GatedProduct.apply(layer.gate_proj(x), layer.up_proj(x)))  # type: ignore[no-untyped-call]

    for layer in module.modules():
        if is_gated_product(layer):
            layer.forward = forward(layer)
    return left_out


def is_gated_product(module: Any) -> bool:
    """Whether a module on the meta device computes down(silu(gate(x)) * up(x)), tried with small matrices in place
    of its weights."""
    import torch

    if {*module._modules} != {*GATED}:
        return False
    trial = copy.copy(module)
    sizes = dict(zip(GATED, ((4, 6), (4, 6), (6, 4)), strict=False))
    linears = {name: torch.nn.Linear(*size, bias=False, device="meta") for name, size in sizes.items()}
    for number, linear in enumerate(linears.values()):
        values = torch.linspace(-1, 1 + number, linear.weight.numel(), device="cpu").cos()
        linear.weight = torch.nn.Parameter(values.view_as(linear.weight))
    trial._modules = {**linears, "act_fn": module._modules["act_fn"]}
    x = torch.linspace(-2, 3, 20, device="cpu").view(5, 4)
    with torch.no_grad():
        try:
            found = trial(x)
        except Exception:  # a module that needs more
            return False
        right = linears["down_proj"](torch.nn.functional.silu(linears["gate_proj"](x)) * linears["up_proj"](x))
    return isinstance(found, torch.Tensor) and found.shape == right.shape and torch.allclose(found, right, 1e-5, 1e-6)


def backward_pass(run: Callable[[], Any]) -> tuple[int, int]:
    """(bytes kept for the backward pass, peak of that pass, with what is kept). run: returns the output of a forward
    pass."""
    import torch

    with storages() as count:
        out = run()
        node, gradient = out.grad_fn, torch.empty_like(out)
        del out  # what reads it keeps what it needs of it
        saved = count.now - gradient.nbytes
        count.most = count.now
        edge = torch.autograd.graph.GradientEdge(node, 0)
        del node
        torch.autograd.backward(edge, gradient)
        return saved, count.most


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' messages about kernels that are not installed."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


def storages() -> Any:
    """A mode of torch that counts the bytes of new storages. now: alive; most: at once; made: of all; calls: of
    operations of torch; operations: those with floating-point numbers in products of matrices and in convolutions."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Storages(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.now = self.most = self.made = self.calls = self.operations = 0
            self.live: dict[int, int] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = {x.untyped_storage()._cdata for x in _tensors((*args, *(kwargs or {}).values()))}
            self.calls += 1
            out = func(*args, **(kwargs or {}))
            if (count := flop_registry.get(func._overloadpacket)) is not None:
                self.operations += int(count(*args, **(kwargs or {}), out_val=out))
            for x in _tensors((out,)):
                storage = x.untyped_storage()
                if storage._cdata not in self.live and storage._cdata not in given:
                    self.see(storage)
            return out

        def see(self, storage: Any) -> None:
            key, size = storage._cdata, storage.nbytes()
            self.live[key] = size
            self.now, self.made = self.now + size, self.made + size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, key)

        def gone(self, key: int) -> None:
            self.now -= self.live.pop(key)

    return Storages()


def _tensors(values: Iterable[Any]) -> Iterator[Any]:
    """Those among an operator's arguments or results, which are tensors and lists of them: torch's walk over any
    nesting takes a good part of a trial."""
    from torch import Tensor

    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def has_other_norms(layer: Any) -> bool:
    """Whether a norm of a layer is a root-mean-square norm of another form, as Gemma's with 1 + weight: torch keeps its
    input, too."""
    return any(type(m).__name__.endswith("RMSNorm") and [*m._parameters] == ["weight"] and not is_plain_norm(m)
               for m in layer.modules())


def has_gated_products(layers: Iterable[Any]) -> bool:
    """Whether all feed-forward layers with a gate compute what `is_gated_product` says, of modules with just these
    parts."""
    found = {type(m): m for layer in layers for m in layer.modules() if {*GATED[:3]} <= {*m._modules}}
    return bool(found) and all(map(is_gated_product, found.values()))


def has_projections(module: Any) -> bool:
    """Whether queries, keys and values each have a linear layer, by the usual names."""
    import torch

    return all(isinstance(getattr(module, p, None), torch.nn.Linear) for p in PROJECTIONS)


def rotates_halves(layers: Iterable[Any]) -> bool:
    """Whether the rotary embedding of all attention rotates halves of what it gets, by a function of the usual name,
    for which backends have kernels (`backends/torch/model/fused_layers.py`)."""
    forwards = {type(m).forward for layer in layers for m in layer.modules() if has_projections(m)}
    return bool(forwards) and all(map(forward_rotates_halves, forwards))
