"""The compiled functions of `cpu_kernels.c`, and calls of them, many at a time.

In: a kernel's name and arguments. Out: a `KernelCall`; of a list with calls next to one another, `joined` makes one in
which a run of them is a single call, since a decode step of a small model is a hundred kernels that take less time than
Python takes to call them.

The sources include one another, take one to two seconds to compile at their first use (`c_compiler.py`), and need a
compiler and a cache folder: without there are none (`available`).
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.kernels import c_compiler

SOURCE = Path(__file__).with_name("cpu_kernels.c")

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
ARGUMENTS = {
    "rms_norm": (POINTER, POINTER, INT, INT, FLOAT, POINTER, POINTER),
    "rms_norm_backward": (POINTER, POINTER, POINTER, POINTER, INT, INT, POINTER, POINTER),
    "rotary": (POINTER, INT, INT, POINTER, POINTER, INT, INT, INT, ctypes.c_int, POINTER),
    "rotary_angles": (POINTER, POINTER, INT, INT, FLOAT, POINTER, POINTER),
    "gated_product": (POINTER, POINTER, INT, POINTER),
    "gated_product_backward": (POINTER, POINTER, POINTER, INT, POINTER, POINTER),
    "exp_sums": (POINTER, POINTER, INT, INT, POINTER),
    "softmax_sums": (POINTER, INT, INT, ctypes.c_int, POINTER, POINTER),
    "scaled_probabilities": (POINTER, POINTER, POINTER, INT, INT),
    "sample": (POINTER, POINTER, INT, INT, FLOAT, POINTER, POINTER),
    "decode_attention": (POINTER, INT, INT, POINTER, INT, INT, POINTER, INT, INT, POINTER, POINTER, INT, POINTER, INT,
                         INT, INT, INT, INT, FLOAT, INT, POINTER),
    "few_row_product": (POINTER, INT, POINTER, POINTER, INT, INT, INT, POINTER),
    "few_row_sample": (POINTER, INT, POINTER, POINTER, INT, INT, INT, FLOAT, POINTER, POINTER),
    "add_transposed": (POINTER, INT, INT, POINTER),
    "add": (POINTER, POINTER, INT, POINTER),
    "add_integers": (POINTER, POINTER, INT, POINTER),
    "select_rows": (POINTER, INT, INT, POINTER, INT, POINTER),
    "select_columns": (POINTER, INT, POINTER, INT, POINTER),
    "write_tokens": (POINTER, INT, INT, INT, POINTER, POINTER, POINTER, INT, INT, INT, POINTER, INT, INT),
    "adamw": (*(POINTER,) * 4, INT, POINTER),
    "panel_products": (POINTER, INT, INT, POINTER, INT, INT, POINTER, INT, INT, INT, ctypes.c_int, POINTER),
    "linear_layers_backward": (POINTER, INT, INT, INT, POINTER, INT, POINTER),
    "head_statistics": (POINTER, POINTER, POINTER, INT, INT, INT, FLOAT, *(POINTER,) * 5),
    "head_gradients": (*(POINTER,) * 6, INT, INT, INT, FLOAT, POINTER, POINTER, POINTER),
    "head_memory": (INT, INT, ctypes.c_int),
    "append_sampled": (POINTER, POINTER, INT, INT, *(POINTER,) * 7, INT, INT, *(POINTER,) * 4),
    "run_calls": (POINTER, INT),
    "attention": (*(POINTER, INT, INT) * 3, POINTER, POINTER, *(INT,) * 5, FLOAT, INT, POINTER, POINTER),
    "attention_backward": (*(POINTER, INT, INT) * 4, POINTER, POINTER, *(INT,) * 5, FLOAT, INT, *(POINTER,) * 4),
}
CANNOT_FAIL = ("rms_norm", "rotary", "rotary_angles", "gated_product", "gated_product_backward", "add", "add_integers",
               "add_transposed", "adamw", "head_statistics", "head_gradients", "exp_sums",
               "softmax_sums", "scaled_probabilities")


@cache
def library() -> Any:
    """The compiled functions; None if they cannot be had."""
    found = c_compiler.load(SOURCE, c_compiler.FAST_FLAGS, ARGUMENTS)
    for name in CANNOT_FAIL if found is not None else ():
        getattr(found, name).restype = None
    if found is not None:
        found.append_sampled.restype = INT  # how many sequences have stopped
    return found


def available() -> bool:
    """Whether there are any. The first call may compile them."""
    return library() is not None


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether they are float32 tensors on a CPU, and no tensors of a kind that computes otherwise."""
    for x in tensors:  # before each call of a kernel, so no generator
        if type(x) not in (torch.Tensor, nn.Parameter) or x.dtype is not torch.float32 or not x.is_cpu:
            return False
    return True


Argument = torch.Tensor | int | float | None

# what a run of calls may have: its number is the kernel's in `cpu_calls.c`
IN_RUNS = ("rms_norm", "rotary", "gated_product", "add", "decode_attention", "few_row_product", "few_row_sample",
           "rotary_angles", "add_integers", "select_rows", "select_columns")
OUT_OF_RANGE = 2  # what a kernel returns that reads no row of a table
SLOTS = 24  # of a call in a run: the kernel's number and its arguments


@dataclass(frozen=True, slots=True, repr=False)  # tensors are long to print
class KernelCall:
    """A kernel with its arguments, as the function in C has them."""

    kernel: str
    arguments: tuple[Argument, ...]  # a tensor stands for where its memory is

    def __call__(self) -> None:
        """Errors: MemoryError if there is none for what the kernel computes with."""
        given = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in self.arguments]
        check(getattr(library(), self.kernel)(*given))


@dataclass(slots=True, repr=False)
class KernelRun:
    """Calls that one call of C makes. Tensors may have other memory each time. Whoever moves those of `announced` calls
    `locate`, since it takes longer to look where all tensors are than to run some of the kernels."""

    calls: Sequence[KernelCall]
    announced: Collection[int] = ()  # `_cdata` of the storages of tensors that move when somebody says so
    tensors: list[torch.Tensor] = field(init=False)  # arguments of all calls
    watched: list[torch.Tensor] = field(init=False)  # those that are looked at each time
    slots: list[tuple[int, int]] = field(init=False)  # (slot, tensor) of all pointers
    pointers: list[int] = field(init=False)  # of what is watched, as they are in the table
    table: Any = field(init=False)  # [calls * SLOTS] int64

    def __post_init__(self) -> None:
        self.table = (INT * (len(self.calls) * SLOTS))()
        number: dict[int, int] = {}  # id of a tensor -> its place in `tensors`
        self.tensors, self.slots = [], []
        for i, call in enumerate(self.calls):
            self.table[i * SLOTS] = IN_RUNS.index(call.kernel)
            for j, (x, kind) in enumerate(zip(call.arguments, ARGUMENTS[call.kernel], strict=True), i * SLOTS + 1):
                if isinstance(x, torch.Tensor):
                    if id(x) not in number:
                        number[id(x)] = len(self.tensors)
                        self.tensors.append(x)
                    self.slots.append((j, number[id(x)]))
                else:
                    self.table[j] = _bits(x or 0) if kind is FLOAT else int(x or 0)
        self.watched = [x for x in self.tensors if x.untyped_storage()._cdata not in self.announced]
        self.locate()

    def locate(self) -> None:
        """Find out where all tensors are."""
        pointers = [x.data_ptr() for x in self.tensors]
        for slot, tensor in self.slots:
            self.table[slot] = pointers[tensor]
        self.pointers = [x.data_ptr() for x in self.watched]

    def __call__(self) -> None:
        """Errors: as those of the calls."""
        if [x.data_ptr() for x in self.watched] != self.pointers:
            self.locate()
        check(library().run_calls(self.table, len(self.calls)))


def joined(steps: Sequence[Callable[[], Any]], announced: Collection[int] = ()) -> list[Callable[[], Any]]:
    """The steps, with one `KernelRun` in place of kernels that follow one another. announced: see there."""
    found: list[Callable[[], Any]] = []
    for runs, group in groupby(steps, lambda x: isinstance(x, KernelCall) and x.kernel in IN_RUNS):
        members = list(group)
        calls = [x for x in members if isinstance(x, KernelCall)]
        found += [KernelRun(calls, announced)] if runs and len(calls) > 1 else members
    return found


def _bits(x: float) -> int:
    """Of a float32."""
    bits: int = struct.unpack("<i", struct.pack("<f", x))[0]
    return bits


def check(failed: object) -> None:
    """failed: what a kernel returns, None if it cannot fail. Errors: IndexError if it was to look up what a table does
    not have; MemoryError if it has failed otherwise."""
    if failed == OUT_OF_RANGE:
        raise IndexError("an index is out of range")
    if failed:
        raise MemoryError("no memory for what a kernel computes with")
