"""What feed-forward blocks with experts in a special form need in memory (gpt-oss, Llama 4), found by trials of
their code without storage, as of recurrent modules (`recurrence.py`).

In: a model of transformers on the meta device. Out: `ExpertBlock`s for each kind of such layers: for each size of an
element, with and without gradients of the parameters. Which experts a token chooses decides nothing of the bytes:
products of groups are counted as one product of all rows with one expert, and the gradient of all of them.
Invariant: a block that fails in a trial has no `ExpertBlock`, and `uncounted` names it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rldsl.models import experts
from rldsl.models.execution import Execution
from rldsl.models.trials import FLOAT, ITEMSIZES, backward_pass, fuse_norms, quiet, renew, storages, without_storage
from rldsl.plan.model import ExpertBlock

MANY = 1 << 20  # tokens of a trial, of which the second has twice as many: more than any weight has elements


def expert_blocks(body: Any, how: Execution, width: int) -> tuple[ExpertBlock, ...]:
    """body: the model below its head. width: of its hidden states."""
    kinds: dict[Any, list[int]] = {}
    blocks: dict[Any, str] = {}
    for number in range(0 if how.by_rows else how.num_layers):
        layer = body.get_submodule(f"{how.layers}.{number}")
        found = experts.other_form(layer)
        if found:
            block = found.rpartition(".")[0]
            key = tuple((n, tuple(p.shape)) for n, p in layer.get_submodule(block).named_parameters())
            kinds.setdefault(key, []).append(number)
            blocks.setdefault(key, block)
    made = []
    with quiet():
        for key, numbers in kinds.items():
            module = body.get_submodule(f"{how.layers}.{numbers[0]}.{blocks[key]}")
            made += [t for item in ITEMSIZES for trained in (True, False)
                     if (t := _trial(module, item, trained, width, tuple(numbers)))]
    return tuple(made)


def uncounted(body: Any, how: Execution, found: Sequence[ExpertBlock]) -> str:
    """The first module of experts in a special form whose trial fails, for messages; "": there is none."""
    counted = {number for block in found for number in block.layers}
    for number in range(how.num_layers):
        name = experts.other_form(body.get_submodule(f"{how.layers}.{number}")) if number not in counted else ""
        if name:
            return f"{how.layers}.{number}.{name}, which has a form of its own"
    return ""


def _trial(block: Any, item: int, trained: bool, width: int, layers: tuple[int, ...]) -> ExpertBlock | None:
    import torch

    try:
        with torch.device("meta"):
            part = copy.deepcopy(block)
        fuse_norms(part)
        with without_storage(item, "cpu"), _products_of_groups():
            renew(part)
            part.requires_grad_(trained)
            if item != FLOAT:
                _round_parameters(part)
            few, more = (_passes(part, n, width) for n in (MANY, 2 * MANY))
    except Exception:  # a family's code may need anything at all
        return None
    saved, forward, backward, outputs = each = [(b - a) // MANY for a, b in zip(few, more, strict=True)]
    fixed = [max(a - MANY * b, 0) for a, b in zip(few, each, strict=True)]
    return ExpertBlock(item, layers, trained, saved, forward, backward, outputs, fixed[0], fixed[1], fixed[3])


def _passes(block: Any, tokens: int, width: int) -> tuple[int, int, int, int]:
    """(saved, peak of the forward pass without saving, peak of the backward pass, outputs of all operations), in
    bytes, with the input."""
    import torch

    def run() -> Any:
        out = block(torch.empty(1, tokens, width, requires_grad=True).clone())
        return out[0] if isinstance(out, tuple) else out

    with storages() as count, torch.no_grad():
        run()
        forward, outputs = count.most, count.made
    saved, backward = backward_pass(run)
    block.zero_grad()
    return saved, forward, backward, outputs


@contextmanager
def _products_of_groups() -> Iterator[None]:
    """torch's products of groups of rows, which know no autocast, for tensors without storage of every dtype."""
    import torch

    def product(rows: Any, weights: Any, offs: Any = None, **_: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return rows @ weights[0]

    functions: Any = torch.nn.functional
    plain = functions.grouped_mm
    functions.grouped_mm = product
    try:
        yield
    finally:
        functions.grouped_mm = plain


def _round_parameters(block: Any) -> None:
    """Let modules that are no linear layers read their parameters rounded to half precision, as in the backend
    (`backends/torch/model/autocast.py`)."""
    import torch

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.bfloat16().float()

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad

    def read(name: str) -> Callable[[Any], Any]:
        return lambda module: Rounded.apply(module._parameters[name])  # type: ignore[no-untyped-call]

    for module in block.modules():
        if not isinstance(module, torch.nn.Linear):
            names = [n for n, p in module._parameters.items() if p is not None]
            kind = type(module)
            module.__class__ = type(kind.__name__, (kind,), {n: property(read(n)) for n in names})
