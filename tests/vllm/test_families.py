"""Every family that the description names, with vLLM itself: its log-probs are those of the torch backend, before and
after the weights change. And its version of lark parses as ours does."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.backends.vllm.describe import FAMILIES
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Sampling
from tests.backend_torch.shards import layout_of, pack, plan_model, shard_of
from tests.tiny import make_model
from tests.vllm.engines import REAL, use

pytestmark = pytest.mark.skipif(not REAL, reason="RLDSL_VLLM_PYTHON does not name a Python that has vLLM")
ROOT = Path(__file__).parents[2]
SIZES = dict(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_hidden_layers=2)
LLAMA3 = dict(rope_type="llama3", rope_theta=10000.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0,
              original_max_position_embeddings=8)
CASES: dict[str, dict[str, Any]] = {
    "llama": dict(rope_parameters=LLAMA3, attention_bias=True), "mistral": dict(sliding_window=4),
    "qwen2": {}, "qwen3": dict(tie_word_embeddings=True)}


def test_all_families_are_tried() -> None:
    assert set(CASES) == set(FAMILIES)


@pytest.mark.parametrize("family, dtype, close", [*((f, "float32", 3e-5) for f in CASES), ("qwen2", "bfloat16", 0.1)])
def test_log_probs(family: str, dtype: str, close: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "vllm")
    sizes = {k: v for k, v in SIZES.items() if family != "qwen2" or k != "head_dim"}
    path = str(make_model(tmp_path / "m", family, **sizes, **CASES[family]))
    model = replace(plan_model(path, dtype=dtype), sizes=sizes_of(describe(path, "causal_lm")))
    engine, plain = (shard_of(model, layout_of(**where), 0)[0] for where in ({"backend": "vllm"}, {}))  # type: ignore
    prompts = pack([(p, []) for p in ([5, 6, 7, 8, 9, 10], [11, 12], [20] * 9)])
    for step in range(2):
        found = engine.generate(prompts, Sampling(max_new_tokens=12, temperature=0.8), seed=1, step=step,
                                max_num_seqs=0, max_prompt_len=9)
        expected = plain.infer([found.batch], "logprobs", 0.8)
        torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=close)
        assert len(found.logprobs) > 12
        for name, x in engine.state_dict().items():
            x.add_(0.03 * torch.randn(x.shape, generator=torch.Generator().manual_seed(step)))
            plain.state_dict()[name].copy_(x)
    engine.close()


def test_the_grammar_under_the_lark_that_vllm_pins(tmp_path: Path) -> None:
    """All programs of the library and the examples have the same syntax tree."""
    package = tmp_path / "rldsl"  # as a wheel has it
    package.mkdir()
    for place in (*(ROOT / "rldsl").iterdir(), *(ROOT / top for top in ("backends", "grammar", "stdlib"))):
        (package / place.name).symlink_to(place)
    code = ("import sys, hashlib, lark; from pathlib import Path; from rldsl.source import SourceFile\n"
            "from rldsl.syntax.parse import parse\n"
            "trees = [repr(parse(SourceFile(p.name, p.read_text()))) for top in ('stdlib', 'examples', 'rldsl/starters')"
            " for p in sorted(Path(top).glob('*.rlf'))]\n"
            "print(lark.__version__, len(trees), hashlib.sha256(''.join(trees).encode()).hexdigest())")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"}
    ours, theirs = (subprocess.run([python, "-c", code], cwd=ROOT, text=True, capture_output=True, check=True, env=env,
                                   timeout=300).stdout.split() for python in (sys.executable, REAL))
    assert theirs[0] == "1.2.2" and ours[1:] == theirs[1:] and int(ours[1]) > 50
