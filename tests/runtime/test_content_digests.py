"""All ranks read the same: copies that differ are found before the first step, with the file and the ranks."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rldsl.runtime.comm.content_digests import HALF, ContentDigest, differences
from tests.end_to_end.programs import compile_program
from tests.runtime.copies import said_in_copy
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """
data sums = jsonl("rows.jsonl", batch=4, answer="answer")
model actor = causal_lm("model") train adamw(lr=1e-3)
flow tuning(steps=1, seed=1) {
  batch = sums.next()
  actor.train(batch, loss=fit())
}
loss fit(logprobs: token) { return -mean(logprobs) }
"""


def table(*entries: ContentDigest, count: int = 2) -> bytes:
    return b"".join(e.key + e.content for e in entries).ljust(2 * HALF * count, b"\0")


def test_a_difference_is_reported_by_the_first_reader_and_names_the_minority() -> None:
    same, other = (ContentDigest.of("rows.jsonl", "data `d`", text) for text in (b"a", b"b"))
    fourth = ContentDigest.of("x", "data `x`", b"c")
    tables = [table(fourth), table(other), table(same), table(same, fourth), table(same)]
    said = [list(differences(mine, tables, rank)) for rank, mine in
            enumerate([[fourth], [other], [same], [same, fourth], [same]])]
    assert [len(x) for x in said] == [0, 1, 0, 0, 0]
    assert (said[1][0].code, said[1][0].place) == ("RL0769", "rows.jsonl")
    assert said[1][0].title == "data `d` differs between rank 1 and ranks 2-4"


def test_other_parts_of_a_file_are_not_compared() -> None:
    one, two = (ContentDigest.of("w", "weights", part, part) for part in (b"a", b"b"))
    assert not list(differences([one], [table(one), table(two)], 0))


# runs on two machines, each with copies of its own

@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "0"
    folder.mkdir()
    make_model(folder / "model", num_hidden_layers=1)
    write_jsonl(folder / "rows.jsonl", make_sums(12))
    (folder / "p.rlf").write_text(PROGRAM)
    return folder


def run(place: Path, tmp_path: Path, change: Any, rules: str = "dp=2", world: int = 2) -> list[str]:
    before = Path.cwd()
    folders = [tmp_path / str(rank) for rank in range(world)]
    for folder in folders:
        shutil.copytree(place, folder)
    try:
        os.chdir(folders[0])
        rules = f"cluster nodes=1 gpus={world}\nplace *.* on mesh(0:{world}) {rules}\n"
        data = compile_program(Path("p.rlf"), {}, rules, tmp_path)
    finally:
        os.chdir(before)
    change(folders[-1])
    return run_world(world, said_in_copy, data, [str(folder) for folder in folders])


def reverse(folder: Path) -> None:
    file = folder / "rows.jsonl"
    file.write_text("".join(reversed(file.read_text().splitlines(keepends=True))))


def swap_vocabulary(folder: Path) -> None:
    file = folder / "model/tokenizer.json"
    held = json.loads(file.read_text())
    vocabulary = held["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(held))


def template(folder: Path) -> None:
    (folder / "model/chat_template.jinja").write_text("{{ messages }}")


def flip(folder: Path, tensor: str, value: float | None = None) -> None:
    file = folder / "model/model.safetensors"
    held = load_file(file)
    name = next(n for n in held if tensor in n)
    flat = held[name].view(-1)
    flat[-1] = flat[-1] + 1e-3 if value is None else value
    save_file(held, file, metadata={"format": "pt"})


@pytest.mark.parametrize("rules, tensor", [("dp=2", "q_proj"), ("tp=2", "norm")])
def test_one_changed_weight_is_found_where_several_ranks_read_it(place: Path, tmp_path: Path, rules: str, tensor: str
                                                                  ) -> None:
    said = run(place, tmp_path, lambda folder: flip(folder, tensor), rules)
    assert "RL0769 model/model.safetensors a slice of the weights differs between rank 1 and rank 0" in said[0]


def test_another_header_is_found_whatever_the_slices(place: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        file = folder / "model/model.safetensors"
        save_file(load_file(file), file, metadata={"format": "pt", "of": "another"})

    assert "RL0769 model/model.safetensors the header of the weights differs" in run(place, tmp_path, change, "tp=2")[0]


@pytest.mark.parametrize("value, word", [(float("nan"), "NaN"), (float("-inf"), "an infinite number")])
def test_weights_that_are_not_finite_are_named(place: Path, tmp_path: Path, value: float, word: str) -> None:
    said = run(place, tmp_path, lambda folder: flip(folder, "k_proj", value), "dp=1", world=1)
    assert said[0].startswith(f"RL0729 model/model.safetensors the weights contain {word}: ") and "k_proj" in said[0]


@pytest.mark.parametrize("change, place_named", [
    (reverse, "rows.jsonl"), (swap_vocabulary, "model"), (template, "model"),
])
def test_a_copy_that_differs_ends_the_run_before_any_work(place: Path, tmp_path: Path, change: Any, place_named: str
                                                          ) -> None:
    said = run(place, tmp_path, change)
    assert said[0].startswith(f"RL0769 {place_named} ") and said[0].endswith("differs between rank 1 and rank 0")
    assert said[1] == "another rank"
    assert not (tmp_path / "0/out/metrics.jsonl").exists()


def test_equal_copies_run(place: Path, tmp_path: Path) -> None:
    assert run(place, tmp_path, lambda _: None) == ["", ""]
