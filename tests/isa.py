"""Tests with another instruction set than the processor's best one, whose products round differently.

    python -m tests.isa [default|avx2|avx512] [ARGUMENT OF PYTEST ...]

Without a name it is the next smaller one that processors in use have as their best. What passes with one and fails with another hangs on the last bit: compare
runs that share their responses (`tests/responses.py`), use `invariant=true`, or state what rounding cannot break. A
processor that has none of these, or AVX2 as its best, has nothing to do here: with nothing smaller are models trained.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

# torch's kernels, oneDNN's and MKL's; from the smallest to the largest, by the name that torch gives them
SETS: Mapping[str, Mapping[str, str]] = {
    "DEFAULT": {"ATEN_CPU_CAPABILITY": "default", "DNNL_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "DNNL_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX512": {"ATEN_CPU_CAPABILITY": "avx512", "DNNL_MAX_CPU_ISA": "AVX512_CORE", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}


def smaller(best: str) -> str | None:
    """The name of the set below the processor's best one; none below AVX2."""
    names = [*SETS][1:]
    return names[names.index(best) - 1] if best in names[1:] else None


def main(arguments: Sequence[str]) -> int:
    """The exit status of pytest; 0 where there is no other set, 2 where the named one is not the processor's."""
    import torch

    best = torch.backends.cpu.get_cpu_capability()
    asked = arguments[0].upper() if arguments and arguments[0].upper() in SETS else None
    name = asked or smaller(best)
    if name is None:
        print(f"{best}: this processor has no smaller instruction set that others have as their best")
        return 0
    if best in SETS and [*SETS].index(name) > [*SETS].index(best):
        print(f"this processor has {best}, and not {name}", file=sys.stderr)
        return 2
    print(f"instruction set {name}, where {best} is the processor's best", flush=True)
    line = [sys.executable, "-m", "pytest", *arguments[1 if asked else 0 :]]
    return subprocess.call(line, env={**os.environ, **SETS[name]})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
