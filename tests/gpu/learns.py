"""The demo of `examples/demo.py` on one GPU: a model learns sums, and plain transformers agrees about it.

    python -m tests.gpu.learns [DIRECTORY]      # it writes there; the default is a temporary directory
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAMS = Path(__file__).parents[2] / "examples"
LEAST = 0.8  # held-out accuracy; on a processor 0.936
ONE = ("--on", "*.* on mesh(0:1)")


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as made:
        os.chdir(arguments[0] if arguments else made)
        sys.path.insert(0, str(PROGRAMS))
        import demo

        def rlc(program: str, out: Path, **sets: object) -> None:
            options = [part for name, value in sets.items() for part in ("--set", f"{name}={value}")]
            subprocess.run([sys.executable, "-m", "rldsl.cli", "run", str(PROGRAMS / program), *options, *ONE, "--plain",
                            "--out", str(out), "--overwrite"], check=True)

        demo.rlc = rlc
        demo.prepare()
        before = demo.evaluate("base")
        rlc("arithmetic_sft.rlf", demo.ROOT / "run_sft", steps=demo.STEPS["sft"])
        rlc("arithmetic_grpo.rlf", demo.ROOT / "run_grpo", steps=demo.STEPS["grpo"])
        after, theirs = demo.evaluate("grpo"), demo.plain_transformers(demo.ROOT / "grpo")
        print(f"held-out accuracy {before:.3f} -> {after:.3f}, plain transformers on the CPU {theirs['accuracy']:.3f}")
        os.chdir("/")
        return int(after < LEAST or abs(after - theirs["accuracy"]) > 0.01)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
