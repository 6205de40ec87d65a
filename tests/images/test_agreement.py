"""All ranks read the same pictures: a file that differs between machines, or is written while they start, is named."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest

from examples.tiny import make_vision_model
from rldsl.diag import Failure
from rldsl.runtime.data.source import open_source
from rldsl.runtime.interpreter.options import Options
from rldsl.runtime.state.image_agreement import _blocks, check_unchanged
from tests.end_to_end.programs import compile_program
from tests.images.pictures import data_of, make_rows, picture
from tests.images.test_resume import same_size_pixel
from tests.runtime.copies import said_in_copy
from tests.world import run_world

PROGRAM = """
data scenes = jsonl("rows.jsonl", batch=4, images="images", max_prompt_tokens=120, max_answer_tokens=8)
model actor = causal_lm("m") train adamw(lr=1e-3)
loss fit(logprobs: token;) { return -mean(logprobs) }
flow run(steps=1) {
  batch = scenes.next()
  actor.train(batch, loss=fit())
}
"""


def _rank(rank: int, data: bytes, folders: list[str], machines: bool) -> str:
    if machines:  # of one rank each
        os.environ["LOCAL_RANK"] = "0"
    return said_in_copy(rank, data, folders)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "0"
    folder.mkdir()
    make_vision_model(folder / "m")
    make_rows(folder, count=8)
    picture(8, 8, 5).save(folder / "pictures/4_0.bmp")
    shutil.move(folder / "pictures/4_0.bmp", folder / "pictures/4_0.png")  # not compressed, whatever its name
    (folder / "p.rlf").write_text(PROGRAM)
    return folder


def run(place: Path, tmp_path: Path, change: Callable[[Path], object], machines: bool = True) -> list[str]:
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(place, folder)
    with chdir(folders[0]):
        data = compile_program(Path("p.rlf"), {}, "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n", tmp_path)
    change(folders[1])
    return run_world(2, _rank, data, [str(folder) for folder in folders], machines)


def another_pixel(folder: Path) -> None:
    """Of the same size in bytes and the same time."""
    file = folder / "pictures/4_0.png"
    shutil.move(file, folder / "x.bmp")
    same_size_pixel(folder / "x.bmp")
    shutil.move(folder / "x.bmp", file)


@pytest.mark.thorough
@pytest.mark.parametrize("change, said", [
    (lambda folder: None, ["", ""]),
    (another_pixel, ["RL0769 pictures/4_0.png an image of `scenes` (rows.jsonl:5) differs between rank 1 and rank 0", ""]),
])
def test_machines_with_other_pictures(place: Path, tmp_path: Path, change: Callable[[Path], object], said: list[str]) -> None:
    found = run(place, tmp_path, change)
    assert [x for x in found if x.startswith("RL")] == [x for x in said if x], found
    assert any(said) or found == ["", ""]


def test_a_file_that_is_written_while_ranks_start(place: Path, tmp_path: Path) -> None:
    """Whatever it holds then: another rank may have opened it before, or after."""
    shutil.copytree(place, tmp_path / "d")
    source = open_source(data_of(tmp_path / "d/rows.jsonl", tmp_path / "d/m"), 1)
    check_unchanged([source])
    os.utime(tmp_path / "d/pictures/5_1.png", ns=(1, 1))
    with pytest.raises(Failure) as failure:
        check_unchanged([source])
    found = failure.value.diagnostics[0]
    assert found.code == "RL0752" and found.place.endswith("rows.jsonl:6") and "5_1.png" in found.notes[0]


@pytest.mark.parametrize("count, blocks", [(1, 1), (64, 1), (65, 2), (4096 * 64, 4096), (10**6, 4082)])
def test_blocks_are_the_same_on_every_machine(count: int, blocks: int) -> None:
    class Source:
        table = range(count)

    found = _blocks(Source())  # type: ignore[arg-type]
    assert len(found) == blocks and [i for b in found for i in (b.start, b.stop)][1:-1:2] == [b.start for b in found[1:]]
    assert (found[0].start, found[-1].stop) == (0, count)


def _decoded(rank: int, data: bytes, folders: list[str], everything: bool) -> str:
    return said_in_copy(rank, data, folders, Options(check_images=everything))


@pytest.mark.parametrize("everything", [True, False])
def test_every_image_is_decoded_where_it_is_asked_for(place: Path, tmp_path: Path, everything: bool) -> None:
    """A row that the one step does not read has a picture whose pixels are damaged."""
    folder = tmp_path / "0"
    shutil.copytree(place, folder)
    rows = (folder / "rows.jsonl").read_text().splitlines()
    shutil.copy(folder / "pictures/1_0.png", folder / "pictures/hurt.png")
    damaged = folder / "pictures/hurt.png"
    content = damaged.read_bytes()
    at = content.index(b"IDAT") + 8
    damaged.write_bytes(content[:at] + bytes(len(content[at:-20])) + content[-20:])
    rows += [json.dumps(json.loads(rows[0]) | {"images": ["pictures/hurt.png"]})]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    with chdir(folder):
        data = compile_program(Path("p.rlf"), {}, "cluster nodes=1 gpus=2\nplace *.* on mesh(0:2) dp=2\n", tmp_path)
    found = run_world(2, _decoded, data, [str(folder)] * 2, everything)
    if everything:
        assert any(x.startswith(f"RL0740 rows.jsonl:{len(rows)} ") for x in found) and "" not in found, found
    else:
        assert found == ["", ""]
