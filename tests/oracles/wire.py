"""What every oracle server shares. Runs in the environment of one system, with torch and that system alone.

    python serve_verl.py CASES.json RESULTS.json

In: cases, as `tests/oracles/cases.py` writes them: values by name, in float64, flat over the tokens or the sequences of
a batch. Out, for each case: the numbers that the system's own function returns for them, and where that is a loss its
gradient with respect to the fresh values; or the traceback. JSON both ways: a float64 survives it unchanged.

Invariant: the systems compute in float64. Where one of them casts to 32 bits, `widened` makes that cast one to 64 bits,
so that what is compared is the formula and not its rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

Output = Tensor | tuple[Tensor, ...]
Oracle = Callable[["Case"], Output]


class Case:
    """One call with its values.

    options: what the call sets besides the system's defaults. lens: response lengths of each frame. n: responses of a
    prompt. width: words at each token of a value of level `entry`. A name's level (`token`, `seq`, `entry`) says over
    what its numbers run.
    """

    def __init__(self, raw: dict[str, Any]):
        self.id: str = raw["id"]
        self.oracle: str = raw["oracle"]
        self.options: dict[str, Any] = raw["options"]
        self.lens: dict[str, list[int]] = raw["lens"]
        self.n: int = raw["n"]
        self.width: int = raw["width"]
        self.levels: dict[str, tuple[str, str]] = {name: (v["level"], v["frame"]) for name, v in raw["values"].items()}
        self.flat: dict[str, Tensor] = {name: torch.tensor(v["data"], dtype=torch.float64)
                                        for name, v in raw["values"].items()}
        self.leaves: dict[str, Tensor] = {name: self.flat[name].requires_grad_(True) for name in raw["fresh"]}

    @property
    def rows(self) -> int:
        return len(self.main)

    @property
    def main(self) -> list[int]:
        """Response lengths of the first frame."""
        return next(iter(self.lens.values()))

    def mask(self, frame: str = "") -> Tensor:
        """[rows, longest], true where there is a token."""
        lens = self.lens[frame] if frame else self.main
        return torch.arange(max(lens)) < torch.tensor(lens)[:, None]

    def table(self, name: str) -> Tensor:
        """[rows, longest] of a token value, zeros behind each response; differentiable where the value is fresh."""
        lens = self.lens[self.levels[name][1]]
        return torch.nn.utils.rnn.pad_sequence(list(self.flat[name].split(lens)), batch_first=True)

    def words(self, name: str) -> Tensor:
        """[rows, longest, width] of an entry value, zeros behind each response."""
        rows = list(self.flat[name].view(-1, self.width).split(self.lens[self.levels[name][1]]))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    def split(self, name: str) -> list[Tensor]:
        return list(self.flat[name].split(self.lens[self.levels[name][1]]))

    def seq(self, name: str) -> Tensor:
        """One number for each sequence; zeros where the case does not have the name."""
        return self.flat[name].clone() if name in self.flat else torch.zeros(self.rows)

    def at_last(self, name: str) -> Tensor:
        """[rows, longest], a value of sequences at the last token of each, zero elsewhere."""
        last = torch.tensor(self.main)[:, None] - 1
        return torch.zeros(self.rows, max(self.main)).scatter(1, last, self.seq(name)[:, None])

    def groups(self) -> list[int]:
        """The prompt of each sequence."""
        return [row // self.n for row in range(self.rows)]

    def per_seq(self, table: Tensor) -> Tensor:
        """One number per sequence out of a table that repeats it at every token."""
        first = table[:, 0]
        if not torch.equal(torch.where(self.mask(), table, first[:, None]), first[:, None].expand_as(table)):
            raise ValueError("the tokens of a sequence have different numbers")
        return first


def packed(table: Tensor, case: Case) -> Tensor:
    """A table's tokens, sequence after sequence; anything else flat, as it is."""
    return table[case.mask()] if table.dim() == 2 else table.reshape(-1)


@contextlib.contextmanager
def widened() -> Iterator[None]:
    """Casts to 32 bits, as systems write them, are casts to 64 bits; a new tensor of floats has 64 bits."""
    patches = [mock.patch.object(torch, "float32", torch.float64), mock.patch.object(torch, "float", torch.float64),
               mock.patch.object(torch.Tensor, "float", torch.Tensor.double),
               mock.patch.object(torch, "FloatTensor", torch.DoubleTensor)]
    if "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        patches.append(mock.patch.object(numpy, "float32", numpy.float64))
    torch.set_default_dtype(torch.float64)
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield


def answer(case: Case, oracle: Oracle) -> dict[str, Any]:
    """The numbers of one case."""
    with widened():
        found = oracle(case)
    outputs = found if isinstance(found, tuple) else (found,)
    grads: dict[str, list[float]] = {}
    if case.leaves:
        (loss,) = outputs
        total = loss + sum(0 * leaf.sum() for leaf in case.leaves.values())
        made = torch.autograd.grad(total, list(case.leaves.values()))
        grads = {name: grad.tolist() for name, grad in zip(case.leaves, made, strict=True)}
    return {"values": [packed(x.detach().double(), case).tolist() for x in outputs], "grads": grads}


def serve(oracles: dict[str, Oracle], packages: Sequence[str]) -> None:
    """Answer the cases of the first file into the second."""
    parser = argparse.ArgumentParser()
    parser.add_argument("cases", type=Path)
    parser.add_argument("results", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for raw in json.loads(args.cases.read_text()):
        try:
            results[raw["id"]] = answer(Case(raw), oracles[raw["oracle"]])
        except Exception:  # a system's failure is that case's result; the others go on
            results[raw["id"]] = {"error": traceback.format_exc()}
    versions = {name: version(name) for name in (*packages, "torch")}
    args.results.write_text(json.dumps({"versions": versions, "results": results}))


def everything(**known: Any) -> SimpleNamespace:
    """An object with these attributes, for a method that is called without its constructor."""
    return SimpleNamespace(**known)
