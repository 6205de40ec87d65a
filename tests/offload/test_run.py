"""Offload in runs: the same numbers and the same moments, bit for bit; memory of gradients is given back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.plan.codec import encode
from rldsl.plan.events import Generate
from rldsl.plan.projection import event_paths
from tests.end_to_end.programs import Metrics
from tests.memory.accounting import measured
from tests.offload import elsewhere
from tests.offload.programs import program
from tests.tiny import make_all

MORE = "  every 2 { save actor }\n  checkpoint every 2 keep=2"
OFF = " offload=true"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def run(folder: Path, train: str, off: str, generate: str) -> tuple[Metrics, dict[str, torch.Tensor]]:
    """What the run computes, and all of its checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "p.rlf").write_text(program(train + off, generate + off * (generate == train), "dp=2" + off, more=MORE))
    found = elsewhere.run(folder / "p.rlf", folder / "run", bool(off))
    files = sorted((folder / "run/out/checkpoints").glob("*/*.safetensors"))
    return found, {f"{f.parent.name}/{f.name}/{k}": v for f in files for k, v in load_file(f).items()}


@pytest.mark.thorough
@pytest.mark.parametrize("train, generate", [("tp=2", "dp=2"), ("dp=2 zero=2", "dp=2"), ("tp=2", "tp=2")])
def test_numbers_and_moments_are_the_same(train: str, generate: str, tiny: Path, tmp_path: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """Though tensors are others each time that they come back, and what they were before is NaN."""
    monkeypatch.chdir(tiny)
    stays, mine = run(tmp_path / "stays", train, "", generate)
    goes, theirs = run(tmp_path / "goes", train, OFF, generate)
    assert stays == goes and len(stays) == 4
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    moments = [v for k, v in mine.items() if "|exp_avg|" in k]
    assert moments and any(bool(v.abs().max() > 0) for v in moments)


def test_gradients_give_their_memory_back(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device is the host, that is all that an offload frees."""
    monkeypatch.chdir(tiny)
    held = []
    for off in ("", OFF):
        (tmp_path / "p.rlf").write_text(program("tp=2" + off).replace("steps=4", "steps=2"))
        p = api.compile(str(tmp_path / "p.rlf"))
        found = measured(encode(p), tmp_path / f"out{len(off)}", 2)
        generate = next(e for e, _ in event_paths(p) if isinstance(e, Generate))
        held.append([m.events[generate.id][0] for m in found])
    assert all(a - b > 0 for a, b in zip(*held)), held


def test_host_memory_is_the_same_where_there_is_one() -> None:
    from rldsl.runtime.host_memory import HostMemory

    host, tensors = HostMemory(torch.device("cpu")), {"a": torch.arange(4.0), "b": torch.zeros(0, 3)}
    there = host.offload(tensors)
    back, finish = host.onload(there)
    finish()
    assert all(back[k] is tensors[k] for k in tensors) and not host.pinned


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a device with memory of its own")
def test_host_memory_on_cuda() -> None:
    from rldsl.runtime.host_memory import HostMemory

    device = torch.device("cuda", 0)
    host = HostMemory(device)
    tensors = {"a": torch.randn(1 << 20, device=device), "b": torch.randn(3, 5, device=device).t()}
    expected = {k: v.cpu() for k, v in tensors.items()}
    for _ in range(3):
        there = host.offload(tensors)
        assert all(t.is_pinned() and torch.equal(t, expected[k]) for k, t in there.items())
        tensors, finish = host.onload(there)
        finish()
        assert all(t.device == device and torch.equal(t.cpu(), expected[k]) for k, t in tensors.items())
        assert tensors["b"].stride() == expected["b"].stride()


def test_the_other_memory_of_these_tests_catches_mistakes() -> None:
    """Who keeps a tensor that went, or takes one before it has come, reads NaN."""
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    kept = tensors["a"]
    there = elsewhere.offload(None, tensors)
    assert kept.isnan().all() and torch.equal(there["a"], torch.arange(4.0))
    come, finish = elsewhere.onload(None, there)
    assert come["b"].isnan().all() and there["b"].isnan().all()
    finish()
    assert torch.equal(come["a"], torch.arange(4.0)) and torch.equal(come["b"], torch.ones(2, 3))
