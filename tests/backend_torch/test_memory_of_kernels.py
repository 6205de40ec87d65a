"""Compiled kernels without memory for what they compute with: each says so, and none reads or writes what is not there.

Their sources are compiled with functions that never give memory. The kernels run in another process, which a crash
ends.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rldsl.backends.torch.kernels import (
    c_compiler,
    cpu_attention,
    cpu_kernels,
    cpu_sampling,
    few_row_products,
    kernel_library,
    linear_layers,
    ordered_kernels,
    panel_products,
)
from rldsl.backends.torch.kernels.cpu_attention import Segments
from tests.world import run_world

NO_MEMORY = """#include <stdlib.h>
#include "{header}"
#define malloc(size) ((void *)0)
#define calloc(count, size) ((void *)0)
#define aligned_alloc(alignment, size) ((void *)0)
#include "{source}"
"""
BLOCKS = 513 * 256  # tokens of a vocabulary that has more blocks than the stack of `sample` takes


def decode_attention(kernels: object, sequences: int) -> None:
    """Of several threads where there are many sequences."""
    q, k, v = (torch.randn(n, sequences, 32) for n in (4, 2, 2))
    keys, values = (torch.randn(sequences, 2, 64, 32).transpose(1, 2) for _ in range(2))
    positions = torch.full((sequences,), 40)
    if kernels is cpu_kernels:
        cpu_kernels.decode_attention(q, k, v, keys, values, positions, 0.3, None)
    else:
        ordered_kernels.decode_attention(q, k, v, keys, values, positions, 64, 0.3, None)


def attention() -> None:
    q, k, v = (torch.randn(n, 9, 16) for n in (4, 2, 2))
    cpu_attention.attend(q, k, v, Segments.of_lengths([4, 5]), 0.3, None)


def norm_backward() -> None:
    x, weight = torch.randn(5, 16), torch.rand(16)
    cpu_kernels.rms_norm_backward(x, x, torch.rand(5, 1), weight, True, True)


def sample() -> None:
    cpu_sampling._sample_from_table((torch.zeros(2, dtype=torch.long), torch.zeros(2)), torch.randn(2, 4),
                                    torch.randn(BLOCKS, 4), torch.rand(2, dtype=torch.float64), 1.0)


def few_row_sample() -> None:
    cpu_sampling.sample(torch.randn(2, 16), torch.randn(40, 16), torch.rand(2, dtype=torch.float64), 1.0)


def few_row_product() -> None:
    few_row_products.product_call(torch.empty(16, 8), torch.randn(16, 32), torch.randn(8, 32), None)()


def gradients_of_layers() -> None:
    x, weight = torch.randn(40, 16), torch.randn(8, 16)
    linear_layers._add_gradients(x, [weight], [torch.randn(40, 8)], [torch.zeros(8, 16)], True)


CALLS: dict[str, Callable[[], object]] = {
    "decode_attention": lambda: decode_attention(cpu_kernels, 2),
    "decode_attention, threads": lambda: decode_attention(cpu_kernels, 40),
    "decode_scores": lambda: decode_attention(ordered_kernels, 2),
    "decode_scores, threads": lambda: decode_attention(ordered_kernels, 40),
    "attention": attention,
    "rms_norm_backward": norm_backward,
    "sample": sample,
    "few_row_sample": few_row_sample,
    "few_row_product": few_row_product,
    "linear_layers_backward": gradients_of_layers,
    "panel_products": lambda: panel_products.panel_product(torch.randn(40, 16), torch.randn(40, 16)),
}


def without_memory(source: Path, header: str, folder: Path) -> Path:
    """The shared library of a source whose allocations fail."""
    text, made = folder / f"{source.stem}_without_memory.c", folder / f"{source.stem}.so"
    text.write_text(NO_MEMORY.format(header=header, source=source))
    flags = c_compiler.FAST_FLAGS if source == kernel_library.SOURCE else ordered_kernels.FLAGS
    c_compiler._run(c_compiler.COMPILER, *flags, f"-I{source.parent}", "-o", str(made), str(text), "-lm")
    return made


def outcome(_: int, name: str, fast: str, ordered: str) -> str:
    """What a call raises in a process with these libraries."""
    libraries = []
    for path, arguments in ((fast, kernel_library.ARGUMENTS), (ordered, ordered_kernels.ARGUMENTS)):
        library = ctypes.CDLL(path)
        for function, types in arguments.items():
            getattr(library, function).argtypes = types
        libraries.append(library)
    for function in kernel_library.CANNOT_FAIL:
        getattr(libraries[0], function).restype = None
    for module in (kernel_library, cpu_kernels, cpu_sampling, linear_layers, panel_products):
        module.library = lambda: libraries[0]  # type: ignore[attr-defined]
    ordered_kernels._library = lambda: libraries[1]
    torch.set_num_threads(2)
    try:
        CALLS[name]()
    except MemoryError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("kernels")
    return (str(without_memory(kernel_library.SOURCE, "cpu_vectors.h", folder)),
            str(without_memory(ordered_kernels.SOURCE, "math.h", folder)))


@pytest.mark.skipif(not kernel_library.available(), reason="no C compiler")
@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_without_memory_says_so(name: str, libraries: tuple[str, str]) -> None:
    assert run_world(1, outcome, name, *libraries) == ["no memory for what a kernel computes with"]
