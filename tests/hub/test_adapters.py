"""Adapters of the Hub: `lora("owner/name")` is pinned to a commit, and trains as the same adapter of a directory does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rldsl.plan.codec import decode
from rldsl.plan.model import Lora
from tests.hub.server import COMMIT, Hub, serving
from tests.hub.test_hub import RLC, RUN, call
from tests.lora.adapted import make_adapter
from tests.tiny import make_all

PROGRAM = '''use std.sft (sft)
cluster nodes=1 gpus=2
data rows = jsonl("data/answers.jsonl", batch=4, kind="answers", max_prompt_tokens=16, max_answer_tokens=16)
model actor = causal_lm("{base}", lora("{adapter}")) train adamw(lr=1e-3)
flow run(steps=2, seed=1) {{
  row = rows.next()
  actor.train(row, loss=sft())   on mesh(0:2) dp=2
}}
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_all(tmp_path_factory.mktemp("tiny"))
    (folder / "data/answers.jsonl").write_text('{"prompt": "ab", "answer": "ba"}\n' * 8)
    adapter = folder / "models/adapter"
    make_adapter(adapter, str(folder / "models/sft"), Lora(4, 8.0, ("q_proj", "v_proj")))
    (adapter / "README.md").write_text("not asked for")
    for name, dropped in (("bin", "adapter_model.safetensors"), ("other", "adapter_config.json")):
        shutil.copytree(adapter, folder / f"models/{name}", ignore=shutil.ignore_patterns(dropped))
    return folder


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[Hub]:
    names = {"lab/base": "sft", "lab/adapter": "adapter", "lab/gated": "adapter", "lab/bin": "bin", "lab/other": "other"}
    with serving(Hub({name: tiny / f"models/{folder}" for name, folder in names.items()}, gated={"lab/gated"})) as found:
        yield found


def compiled(tiny: Path, hub: Hub | None, cache: Path, adapter: str, base: str = "models/sft", offline: bool = False):
    (tiny / "p.rlf").write_text(PROGRAM.format(base=base, adapter=adapter))
    return call(tiny, hub, cache, *RLC, "compile", "p.rlf", "-o", "p.plan", offline=offline)


def losses(out: Path) -> list[float]:
    return [json.loads(line)["actor/loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.thorough
def test_from_the_program_to_the_run(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    done = compiled(tiny, hub, tmp_path / "a", "lab/adapter", "lab/base")
    assert done.returncode == 0, done.stderr
    (model,) = decode((tiny / "p.plan").read_bytes(), "p.plan").models
    assert (model.path, model.lora.path, model.lora.r) == (f"hf:lab/base@{COMMIT}", f"hf:lab/adapter@{COMMIT}", 4)
    assert "README.md" not in hub.sent
    hub.sent.clear()
    done = call(tiny, hub, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "hub"))  # another machine
    assert done.returncode == 0, done.stderr
    assert hub.sent.count("adapter_model.safetensors") == 1, "the first rank of a node downloads, and nobody else"
    hub.sent.clear()
    done = call(tiny, None, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "cached"), offline=True)
    assert done.returncode == 0 and not hub.sent, done.stderr
    done = call(tiny, None, tmp_path / "none", *RLC, "run", "p.plan", "--out", str(tmp_path / "x"), offline=True)
    assert done.returncode and "RL0095" in done.stderr and f"--revision {COMMIT}" in done.stderr, done.stderr
    assert compiled(tiny, None, tmp_path / "c", "models/adapter").returncode == 0
    done = call(tiny, None, tmp_path / "c", *RUN, "p.plan", "--out", str(tmp_path / "local"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "hub") == losses(tmp_path / "cached") == losses(tmp_path / "local")


@pytest.mark.parametrize("adapter, words", [
    ("lab/none", ('no adapter directory "lab/none", and no such adapter on the Hub', "hf auth login")),
    ("lab/gated", ('"lab/gated" is gated', "ask for access")),
    ("lab/adapter@v9", ('no revision "v9"',)),
    ("lab/bin", ('has no adapter_model.safetensors', "save_pretrained")),
    ("lab/base", ('has no adapter_config.json', 'causal_lm("lab/base")')),
])
def test_what_the_hub_does_not_give(tiny: Path, hub: Hub, tmp_path: Path, adapter: str, words: tuple[str, ...]) -> None:
    done = compiled(tiny, hub, tmp_path, adapter)
    assert done.returncode and "RL0095" in done.stderr and "Traceback" not in done.stderr
    assert "p.rlf:4:" in done.stderr and all(w in done.stderr for w in words), done.stderr


def test_without_a_network(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    assert compiled(tiny, hub, tmp_path, "lab/adapter").returncode == 0
    for offline in (False, True):
        assert compiled(tiny, None, tmp_path, "lab/adapter", offline=offline).returncode == 0, "the cache is enough"
    done = compiled(tiny, None, tmp_path, "lab/unknown")
    assert "the Hub cannot be reached" in done.stderr and "hf download lab/unknown" in done.stderr
    done = compiled(tiny, None, tmp_path, "lab/unknown", offline=True)
    assert "RL0342" in done.stderr and "no adapter in" in done.stderr
    assert "HF_HUB_OFFLINE forbids to download it" in done.stderr
    done = compiled(tiny, None, tmp_path, "lab/adapter", "lab/unknown", offline=True)
    assert "RL0301" in done.stderr and "HF_HUB_OFFLINE forbids to download it" in done.stderr
    done = compiled(tiny, None, tmp_path, "lab/adapter", "models/unknown", offline=True)
    assert "RL0301" in done.stderr and "HF_HUB_OFFLINE" not in done.stderr, "a path in a directory that is there"
