"""A run whose responses continue in later steps resumes exactly, under any placement."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from rldsl.runtime.files import digest
from rldsl.runtime.checkpoint_files import MANIFEST
from rldsl.runtime.persist.manifest import DIGEST, manifest_text
from tests.carried.programs import MORE, grpo
from tests.checkpoint.runs import copy_first_steps, held, lines, run, steps
from tests.end_to_end.programs import compile_program
from tests.end_to_end.test_invariance import HERE, everywhere, placement
from tests.samples import thorough_between, thorough_unless
from tests.tiny import make_all

SAVES = "checkpoint every 1 keep=9"
PLACES = {
    "one": "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n",
    "apart": placement(4, actor_generate="on mesh(0:2) dp=2", actor_train="on mesh(2:4) dp=2", **{
        "ref_*": "on mesh(1:2)"}),
    "together": everywhere(3, "dp=3", "actor", "ref"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("resumed")
    make_all(folder, tie_word_embeddings=True, num_hidden_layers=2)
    (folder / "recorder.py").write_text((HERE / "rewards_small.py").read_text())
    texts = {"lag0": MORE.format(flow="", more=SAVES), "lag1": MORE.format(flow=", lag=1", more=SAVES),
             "shorter": MORE.format(flow="", more=SAVES).replace("per_step=3", "per_step=5"),
             "whole": MORE.format(flow="", more=SAVES).replace(", per_step=3", "").replace(
                 "  metric late = mean(gen.version)\n", "")}
    for name, text in texts.items():
        (folder / f"{name}.rlf").write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def plan(base: Path, place: str, program: str) -> bytes:
    folder = base / "plans" / f"{place}{program}"
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(base / f"{program}.rlf", {}, PLACES[place], folder)


@pytest.fixture(scope="module", params=["lag0", "lag1"])
def whole(request: pytest.FixtureRequest, base: Path) -> Path:
    """A run that nothing interrupts."""
    out = base / f"whole-{request.param}"
    assert set(run(plan(base, "apart", request.param), out)) == {""}
    assert steps(out) == [f"step-{i:06}" for i in range(1, 7)]
    return out


def assert_same_end(mine: Path, theirs: Path) -> None:
    found, expected = (held(x / "checkpoints/step-000006") for x in (mine, theirs))
    assert found.keys() == expected.keys() and all(found[key].equal(expected[key]) for key in found)


@pytest.fixture(scope="module")
def stopped(base: Path, whole: Path) -> Path:
    """A run that was asked to stop in its last step but one."""
    out = base / f"stopped-{whole.name}"
    assert set(run(plan(base, "apart", whole.name.partition("-")[2]), out, stop_after=5)) == {""}
    assert [line["step"] for line in lines(out)] == [1, 2, 3, 4, 5]
    return out


@pytest.fixture(scope="module")
def alike(base: Path, whole: Path) -> Path:
    """A run with the responses of the whole one that was asked to stop in its third step."""
    out = base / f"alike-{whole.name}"
    assert set(run(plan(base, "apart", whole.name.partition("-")[2]), out, stop_after=3, like=whole)) == {""}
    return out


@pytest.mark.thorough
@pytest.mark.parametrize("after", thorough_unless(lambda after: after in (2, 5), [1, 2, 3, 4, 5]))
def test_it_goes_on_as_if_nothing_had_happened(after: int, base: Path, whole: Path, stopped: Path) -> None:
    program, out = whole.name.partition("-")[2], base / f"{whole.name}-{after}"
    copy_first_steps(stopped, out, after)
    assert set(run(plan(base, "apart", program), out, resume=out)) == {""}
    assert lines(out) == lines(whole)
    assert_same_end(out, whole)


@pytest.mark.thorough
@pytest.mark.parametrize("other", ["one", "together"])
def test_under_another_placement(other: str, base: Path, whole: Path, alike: Path) -> None:
    program, out = whole.name.partition("-")[2], base / f"{whole.name}-{other}"
    copy_first_steps(alike, out, 3)
    assert set(run(plan(base, other, program), out, resume=out, like=whole)) == {""}
    for mine, theirs in zip(lines(out), lines(whole), strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


@pytest.mark.thorough
@pytest.mark.parametrize(("first", "then"), [("lag0", "shorter"), ("lag0", "whole"), ("whole", "lag0")])
def test_another_per_step_is_refused(first: str, then: str, base: Path) -> None:
    out = base / f"changed-{first}-{then}"
    assert set(run(plan(base, "one", first), out, stop_after=2)) == {""}
    assert run(plan(base, "one", then), out, resume=out) == ["RL0762"]


@pytest.mark.parametrize("what", thorough_between(["tokens|ids", "tokens|data", "finished|sizes", "settings|data"]))
def test_a_damaged_checkpoint_is_refused(what: str, base: Path) -> None:
    """Also where a forger has made its digests again."""
    out = base / f"damaged-{what.replace('|', '-')}"
    assert set(run(plan(base, "one", "lag0"), out, stop_after=2)) == {""}
    folder = out / "checkpoints/step-000002"
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (key,) = [k for k in tensors if k.startswith(f"carried|gen.rollouts|{what}.")]
    shorter = tensors.pop(key)[:-1].contiguous()
    tensors[f"{key.rpartition('|')[0]}|0:{shorter.numel()}"] = shorter
    save_file(tensors, file)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][file.name] |= {"bytes": file.stat().st_size, "sha256": digest(file)}
    manifest.pop(DIGEST)
    (folder / MANIFEST).write_text(manifest_text(manifest))
    assert run(plan(base, "one", "lag0"), out, resume=out) == ["RL0761"]
