"""Whole runs on one GPU through `torchrun -m rldsl.run`, whose world of one rank is NCCL's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, peak
from rldsl.plan.codec import encode
from tests.tiny import make_model, make_sums, write_jsonl

ROOT = Path(__file__).parents[2]
GRPO = """
use std.grpo (group_norm, grpo)
use py "rewards_small.py" (digits: gen -> seq)

data prompts = jsonl("rows.jsonl", batch=8, max_prompt_tokens=16)
model actor = causal_lm("base", dtype=DTYPE) train adamw(lr=1e-3)
model ref   = causal_lm("base", dtype=DTYPE)

flow grpo(steps=STEPS, seed=7) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4, max_new_tokens=24, temperature=0.9)
  ref_lp = ref.logprobs(gen)
  reward = digits(gen)
  metric reward = mean(reward)
  actor.train(gen, loss=grpo(old=gen.logprobs, adv=group_norm(reward), ref=ref_lp, beta=0.05), minibatches=2)
  checkpoint every 2
  every STEPS { save actor }
}
"""


def torchrun(plan: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(plan, *options), capture_output=True, text=True, timeout=240, **more)


def command(plan: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone",
            "-m", "rldsl.run", plan, *options]


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: torch.device) -> Any:
    """Compiles the program to ./p.plan."""
    def compiles(dtype: str = "float32", steps: int = 4, source: str = GRPO) -> Any:
        make_model(tmp_path / "base", characters="0123456789+=", hidden_size=64, intermediate_size=128, head_dim=16)
        write_jsonl(tmp_path / "rows.jsonl", make_sums(64, seed=0, low=10))
        shutil.copy(ROOT / "tests/end_to_end/rewards_small.py", tmp_path)
        (tmp_path / "p.rlf").write_text(source.replace("DTYPE", f'"{dtype}"').replace("STEPS", str(steps)))
        plan = api.compile("p.rlf", {}, None)
        Path("p.plan").write_bytes(encode(plan))
        return plan

    monkeypatch.chdir(tmp_path)
    return compiles


def metrics(out: str) -> list[dict[str, float]]:
    from rldsl.runtime.metrics.names import computed

    lines = [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in computed(line)} for line in lines]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_over_nccl(dtype: str, compiled: Any) -> None:
    compiled(dtype)
    done = torchrun("p.plan", "--out", "out", "--trace", "trace.json")
    assert done.returncode == 0, done.stderr[-4000:]
    found = metrics("out")
    assert len(found) == 4 and all(abs(x) < 1e6 for line in found for x in line.values())
    assert "cuda" in json.dumps(json.loads(Path("out/run.json").read_text())["devices"]).lower() + "cuda" * (
        torch.cuda.get_device_name(0) in Path("out/run.json").read_text())


def test_the_gpu_and_the_cpu_agree(compiled: Any) -> None:
    """The first step: later ones may follow from a token that rounding has decided."""
    compiled(steps=1)
    found = []
    for device in ("cpu", "cuda"):
        done = torchrun("p.plan", "--out", device, "--device", device)
        assert done.returncode == 0, done.stderr[-4000:]
        found.append(metrics(device)[0])
    assert found[0].keys() == found[1].keys()
    off = {name: (a, found[1][name]) for name, a in found[0].items() if abs(a - found[1][name]) > 1e-3 * max(1, abs(a))}
    assert not off


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_killed_run_resumes_bit_for_bit(dtype: str, compiled: Any) -> None:
    """`--deterministic`, against a run that nobody killed."""
    compiled(dtype, steps=6)
    whole = torchrun("p.plan", "--out", "whole", "--deterministic")
    assert whole.returncode == 0, whole.stderr[-4000:]
    process = subprocess.Popen(command("p.plan", "--out", "killed", "--deterministic"), stderr=subprocess.DEVNULL,
                               start_new_session=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and (not Path("killed/metrics.jsonl").exists() or len(
            Path("killed/metrics.jsonl").read_text().splitlines()) < 3) and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = torchrun("p.plan", "--out", "killed", "--deterministic", "--resume")
    assert again.returncode == 0, again.stderr[-4000:]
    assert metrics("killed") == metrics("whole")
    saved = [next(Path(out).rglob("model.safetensors")) for out in ("whole", "killed")]
    a, b = map(load_file, saved)
    assert a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())




@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_what_the_estimate_says(dtype: str, compiled: Any) -> None:
    """The peak that torch's allocator saw, against the estimate of the plan for a GPU."""
    make_model(Path("large"), characters="0123456789+=", hidden_size=1024, intermediate_size=4096, head_dim=64,
               num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=4, scale=0.02)
    plan = compiled(dtype, 2, GRPO.replace("batch=8", "batch=16").replace(
        "max_new_tokens=24", "max_new_tokens=256, min_new_tokens=256").replace('"base"', '"large"'))
    (estimate,) = (peak(curve).bytes for _, curve in each_rank(curves(plan, "cuda")))
    done = subprocess.run([sys.executable, "-m", "tests.gpu.peak", str(Path.cwd() / "p.plan")], capture_output=True,
                          text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-4000:]
    measured = int(done.stdout.split()[-1])
    print(f"{dtype}: estimate {estimate / 2**20:.0f} MiB, measured {measured / 2**20:.0f} MiB")
    assert 0.92 * measured <= estimate <= 1.15 * measured, (estimate, measured)


def test_a_profile_of_this_gpu_predicts_a_step(compiled: Any) -> None:
    """`rlc profile` and `rlc sim` with it, against the step that a run takes."""
    compiled("bfloat16", 6)
    rlc = (sys.executable, "-m", "rldsl.cli")
    for arguments in (("profile", "p.rlf", "-o", "gpu.yaml"), ("sim", "p.rlf", "--cluster", "gpu.yaml", "--json")):
        done = subprocess.run([*rlc, *arguments], capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    predicted = json.loads(done.stdout)
    run = torchrun("p.plan", "--out", "out")
    assert run.returncode == 0, run.stderr[-4000:]
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    print("PREDICTED", json.dumps(predicted)[:400], "MEASURED", [line["seconds"] for line in lines])
    assert predicted
