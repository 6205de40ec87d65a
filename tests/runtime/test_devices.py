"""Every tensor is made on a device that its maker names: one made on the CPU beside others on a GPU works in every test
without a GPU. Read from the sources."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

from rldsl.diag import InternalError
from rldsl.runtime.store import RaggedRows

ROOT = Path(__file__).parents[2]
MAKERS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "randperm", "tensor",
          "zeros"}
# file, function -> why a tensor there may be on the CPU
ALLOWED = {
    ("rldsl/runtime/data/source.py", "read"): "rows of the data are read by the host; `fetch` moves them",
    ("rldsl/runtime/state/data_reader.py", "number_column"): "numbers of the rows of the data, for the host's sampling",
    ("rldsl/runtime/interpreter/row_states.py", "_weights"): "weights of the rows of the data, for the host's sampling",
    ("rldsl/runtime/state/replay.py", "draw"): "a replay buffer is in host memory",
    ("rldsl/runtime/state/replay.py", "ragged"): "a replay buffer is in host memory; what is drawn is moved at the end",
    ("rldsl/runtime/state/replay.py", "share"): "a replay buffer is in host memory",
    ("rldsl/runtime/state/replay.py", "restore"): "a replay buffer is in host memory",
    ("rldsl/runtime/state/replay.py", "_check_kind"): "a replay buffer is in host memory, and so are checkpoints",
    ("backends/torch/model/invariant_probe.py", "_cancelling"): "numbers from the host's generator, moved by the caller",
    ("backends/torch/model/invariant_probe.py", "_attention_varies"): "numbers from the host's generator, then moved",
    ("backends/torch/model/invariant_probe.py", "_attention_gradient_varies"): "as `_attention_varies`",
    ("backends/torch/model/invariant_probe.py", "_sum_varies"): "numbers from the host's generator, then moved",
    ("rldsl/runtime/interpreter/minibatch_loss.py", "__init__"): "a vector of partials, which `partials` moves",
    ("backends/torch/model/lora.py", "_draw"): "numbers for which no GPU is asked, so that they are the same everywhere",
    ("backends/torch/train/optimizer.py", "optimizer_state"): "AdamW counts its steps on the host",
    ("backends/torch/model/model_inputs.py", ""): "a micro-batch of one token; `pack_inputs` moves it",
    ("backends/torch/kernels/length_buckets.py", "__init__"): "places are worked out by the host, and moved at the end",
    ("backends/torch/kernels/rms_norms.py", "_is_plain_rms_norm"): "a trial of a module on a few numbers of the host",
    ("backends/torch/kernels/products.py", "has_onednn"): "a trial of what this build has for the host",
    ("backends/vllm/shard.py", "generate"): "which rows the host reads",
    ("rldsl/runtime/host_numbers.py", "on_device"): "pinned memory of the host, from which the device copies",
    ("rldsl/measure/call_costs.py", "random_batch"): "tokens from the host's generator, moved at the end",
    ("rldsl/measure/call_costs.py", "_loss"): "one zero without dimensions goes with any device",
    ("rldsl/measure/call_costs.py", "fit_costs"): "least squares of a few timings",
}


def made(tree: ast.AST) -> list[tuple[str, int]]:
    """(function, line) of every tensor that is made without a device."""
    found: list[tuple[str, int]] = []

    def visit(node: ast.AST, function: str) -> None:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef) else function
            if (isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute) and child.func.attr in MAKERS
                    and isinstance(child.func.value, ast.Name) and child.func.value.id == "torch"
                    and not any(k.arg == "device" for k in child.keywords)):
                found.append((name, child.lineno))
            visit(child, name)

    visit(tree, "")
    return found


def files() -> list[str]:
    found = (p for folder in ("rldsl/runtime", "rldsl/measure", "backends") for p in (ROOT / folder).rglob("*.py"))
    return sorted(str(p.relative_to(ROOT)) for p in found)


@pytest.mark.parametrize("file", files())
def test_tensors_are_made_on_a_device(file: str) -> None:
    found = [(name, line) for name, line in made(ast.parse((ROOT / file).read_text())) if (file, name) not in ALLOWED]
    assert not found, f"{file}: without `device=`: {found}"


@pytest.mark.parametrize("text", ["torch.arange(3)", "def f(): return [torch.zeros(2, dtype=torch.int64)]",
                                  "x = torch.tensor([1.0],\n dtype=torch.float64).to('cuda')"])
def test_the_reader_finds_them(text: str) -> None:
    assert made(ast.parse(text))


@pytest.mark.parametrize("text", ["torch.arange(3, device=d)", "torch.zeros_like(x)", "x.new_zeros(3)", "arange(3)"])
def test_and_nothing_else(text: str) -> None:
    assert not made(ast.parse(text))


def test_a_column_is_on_one_device() -> None:
    there, elsewhere = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64, device="meta")
    for parts in ((there, elsewhere, there), (elsewhere, there, there), (there, there, elsewhere)):
        with pytest.raises(InternalError, match="tensors of one value on the devices"):
            RaggedRows(*parts)


def column(ids: list[int]) -> RaggedRows:
    rows = torch.tensor(ids)
    return RaggedRows(rows, torch.ones_like(rows), torch.arange(len(ids), dtype=torch.float32))


@pytest.mark.parametrize("held, wanted", [([0, 1], [2, 3]), ([0, 1, 2], [1, 3]), ([0, 2, 4], [1, 2]), ([0, 1], [0, 2])])
def test_rows_that_are_not_held_are_refused(held: list[int], wanted: list[int]) -> None:
    with pytest.raises(InternalError, match="rows"):
        column(held).select(torch.tensor(wanted))


@pytest.mark.parametrize("wanted", [[], [0], [4], [0, 4], [0, 2, 4]])
def test_rows_that_are_held_come_in_their_order(wanted: list[int]) -> None:
    assert column([0, 2, 4]).select(torch.tensor(wanted, dtype=torch.int64)).data.tolist() == [i / 2 for i in wanted]
