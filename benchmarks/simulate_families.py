"""How far `rlc sim` is from real runs for the families of models that are no plain transformers: hybrids, latent
attention, experts, sinks, windows, and models that read images.

    python benchmarks/simulate_families.py               # all of them: a quarter of an hour
    python benchmarks/simulate_families.py --only qwen   # those whose names contain a word

Each is a GRPO step on one rank with a reference model: generation, log-probs and training. A step's time is the median
over the steps of a run, without the first two. Gates, as of `benchmarks/simulate.py`: median error 15 %, Kendall's tau
of the order 0.8. `generate`, `infer` and `train` are the errors of these calls alone. The machine must have nothing
else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.simulate import GATES, WARM, measured, tau
from rldsl import api
from rldsl.clusters import read
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.simulate import Lengths, simulate

STEPS = 8
WIDE: dict[str, Any] = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=4, vocab_size=2048,
                            max_position_embeddings=512, sliding_window=32, attention_chunk_size=32)
HEADS: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=32)
LATENT: dict[str, Any] = dict(num_attention_heads=8, num_key_value_heads=8, q_lora_rank=96, kv_lora_rank=64,
                              qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32, qk_head_dim=48)
EXPERTS: dict[str, Any] = dict(moe_intermediate_size=128, n_routed_experts=8, num_experts=8, num_local_experts=8)
LINEAR: dict[str, Any] = dict(linear_num_value_heads=8, linear_num_key_heads=4, linear_key_head_dim=32,
                              linear_value_head_dim=32,
                              layer_types=["linear_attention"] * 3 + ["full_attention"])
TEXT: dict[str, dict[str, Any]] = {
    "llama": HEADS, "deepseek_v3": LATENT | EXPERTS, "qwen3_next": HEADS | LINEAR | EXPERTS,
    "qwen3_5_text": HEADS | LINEAR, "gpt_oss": HEADS | EXPERTS, "gemma3_text": HEADS,
    "llama4_text": HEADS | EXPERTS | dict(intermediate_size_mlp=512, intermediate_size=192,
                                          interleave_moe_layer_step=2),
    "glm4_moe": HEADS | EXPERTS, "minimax_m2": HEADS | EXPERTS | dict(intermediate_size=128),
    "falcon_h1": HEADS | dict(mamba_d_ssm=256, mamba_n_heads=4, mamba_d_head=64, mamba_d_state=16,
                              mamba_chunk_size=32)}
VISION = ("qwen2_5_vl", "gemma3")


def make(name: str, folder: Path) -> Path:
    """The program of a family, with a model and data in `folder`, which is the working directory."""
    from tests.families.tiny_configs import make as make_text
    from tests.memory.plans import GRPO
    from tests.memory.vision import vision_program
    from tests.tiny import write_jsonl

    if name in VISION:
        program = vision_program(folder, name, batch=16, n=2, response=24, images=2, limited=True)
    else:
        make_text(folder / "m", name, **WIDE | TEXT[name])
        write_jsonl(folder / "prompts.jsonl", [{"prompt": f"{i:03d}" + "7" * 37} for i in range(64)])
        program = folder / "run.rlf"
        program.write_text("cluster nodes=1 gpus=1\n" + GRPO.format(
            batch=16, prompt=40, dtype="float32", adapters="", n=2, response=24, sampling="temperature=1",
            minibatches=1, more=""))
    program.write_text(program.read_text().replace("steps=2", f"steps={STEPS}"))
    return program


def by_call(plan: Plan, spans: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Seconds of a step by kind of call. spans: (id of an event, seconds)."""
    kinds = {e.id: type(e).__name__.lower() for e, _ in event_paths(plan) if isinstance(e, Generate | Infer | Train)}
    found: dict[str, float] = defaultdict(float)
    for event, seconds in spans:
        if event in kinds:
            found[kinds[event]] += seconds
    return found


def compared(name: str, folder: Path) -> tuple[float, float, dict[str, float]]:
    """Seconds of a step, simulated and measured, and the errors of its calls."""
    plan = api.compile(str(make(name, folder)))
    Path("case.plan").write_bytes(encode(plan))
    subprocess.run([sys.executable, "-m", "rldsl.cli", "profile", "case.plan", "-o", "profile.yaml", "--device", "cpu",
                    "--fresh"], check=True, capture_output=True)
    guess = simulate(plan, read("profile.yaml"), Lengths())
    real = measured(Path("case.plan"), 1, STEPS)
    events = [s for s in json.loads(Path("run.json").read_text())["traceEvents"] if s["ph"] == "X"]
    ran = by_call(plan, ((s["args"]["event"], s["args"]["busy"] / (STEPS - WARM)) for s in events
                         if s["args"]["step"] > WARM))
    said = by_call(plan, ((s.event, s.busy) for s in guess.spans))
    return guess.seconds, real.seconds, {kind: said[kind] / ran[kind] - 1 for kind in ran}


def main() -> int:
    """0 where the gates are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families whose names contain this")
    parser.add_argument("--folder", type=Path, default=Path("runs/simulate-families"))
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    root, pairs = given.folder.absolute(), []
    print(f"{'simulated':>10} {'measured':>10} {'error':>7} {'generate':>9} {'infer':>7} {'train':>7}  family",
          flush=True)
    for name in (*TEXT, *VISION):
        if given.only not in name:
            continue
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
        said, real, calls = compared(name, folder)
        pairs.append((said, real))
        print(f"{said:>9.3f}s {real:>9.3f}s {said / real - 1:>+7.1%} {calls.get('generate', 0):>+9.1%} "
              f"{calls.get('infer', 0):>+7.1%} {calls.get('train', 0):>+7.1%}  {name}", flush=True)
    if not pairs:
        print("no family has such a name")
        return 2
    error, order = statistics.median(abs(s / r - 1) for s, r in pairs), tau(pairs)
    good = error <= GATES["median error"] and order >= GATES["tau"]
    print(f"{len(pairs)} families: median error {error:.1%} (gate {GATES['median error']:.0%}), "
          f"Kendall's tau {order:.3f} (gate {GATES['tau']}): gates {'met' if good else 'NOT met'}")
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
