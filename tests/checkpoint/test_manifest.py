"""What resumes is what was saved: a manifest that is not as it was written is damaged, whatever of it has changed."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.diag import Failure
from rldsl.runtime.checkpoint_files import MANIFEST
from rldsl.runtime.persist.manifest import DIGEST, EARLIER, FORMAT, manifest_text, read_manifest
from tests.checkpoint.test_views import HEADER, checkpoint
from tests.world import run_world

READING = {"format": "jsonl", "path": "rows.jsonl", "kind": "answers", "batch": 4, "shuffle": True, "rows": 21,
           "bytes": 900, "sha256": "cd" * 32}
FACTS: dict[str, Any] = {
    "format": FORMAT, "step": 7, "plan": "0123456789ab", "sources": {"p.rlf": "ab" * 32},
    "functions": {"r.py": "ef" * 32}, "params": {"lr": 1e-3, "n": 4, "on": True, "base": "models/x", "grid": [1, 2.5]},
    "seed": 3, "files": {"rank-00000.safetensors": {"bytes": 120, "sha256": "12" * 32}}, "states": {"beta": 0.1},
    "data": {"sums": 6}, "readings": {"sums": READING}, "models": {"actor": {"made": 7, "done": 6}},
}


def written() -> dict[str, Any]:
    held: dict[str, Any] = json.loads(manifest_text(FACTS))
    return held


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path
    else:
        for key, part in inner:
            yield from leaves(part, (*path, key))


def keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield (*path, key)
            yield from keys(part, (*path, key))


def at(held: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        held = held[key]
    return held


def flipped(value: Any) -> Any:
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case _:
            return chr(ord(value[0]) ^ 1) + value[1:]


def data(held: Any) -> bytes:
    return json.dumps(held).encode()


def test_it_is_read_as_it_was_written() -> None:
    found = read_manifest(manifest_text(FACTS).encode())
    assert (found.step, found.states, found.data) == (7, {"beta": 0.1}, {"sums": 6})
    assert found.files == {"rank-00000.safetensors": (120, "12" * 32)} and found.models == FACTS["models"]
    assert found.program == {k: FACTS[k] for k in ("sources", "functions", "params", "seed")}
    assert found.readings["sums"].rows == 21


def test_its_form_does_not_matter() -> None:
    held = written()
    assert read_manifest(data(dict(reversed(held.items())))) == read_manifest(manifest_text(FACTS).encode())


@pytest.mark.parametrize("path", list(leaves(json.loads(manifest_text(FACTS)))), ids=str)
def test_any_changed_value_is_damage(path: tuple[Any, ...]) -> None:
    held = written()
    at(held, path[:-1])[path[-1]] = flipped(at(held, path))
    with pytest.raises(ValueError):
        read_manifest(data(held))


@pytest.mark.parametrize("path", list(keys(json.loads(manifest_text(FACTS)))), ids=str)
def test_any_missing_or_renamed_key_is_damage(path: tuple[Any, ...]) -> None:
    held = written()
    value = at(held, path[:-1]).pop(path[-1])
    with pytest.raises(ValueError):
        read_manifest(data(held))
    at(held, path[:-1])[f"{path[-1]}x"] = value
    with pytest.raises(ValueError):
        read_manifest(data(held))


TYPED = [path for path in keys(FACTS) if path[0] != "params" or len(path) == 1]


@pytest.mark.parametrize("path", TYPED, ids=str)
def test_a_wrong_type_is_damage_even_under_a_right_digest(path: tuple[Any, ...]) -> None:
    for wrong in (None, [1], {"a": None}, "x" if not isinstance(at(FACTS, path), str) else 1):
        held = copy.deepcopy(FACTS)
        at(held, path[:-1])[path[-1]] = wrong
        with pytest.raises(ValueError):
            read_manifest(manifest_text(held).encode())


@pytest.mark.parametrize("text", [
    b"", b"[]", b"null", b"{}", b"\xff\xfe", b"[" * 100_000, b"1" * 10_000, manifest_text(FACTS).encode()[:-9],
    manifest_text(FACTS).replace('"step": 7', '"step": 9, "step": 7').encode(),
])
def test_what_is_no_manifest(text: bytes) -> None:
    with pytest.raises(ValueError):
        read_manifest(text)


def test_an_earlier_version_is_named() -> None:
    with pytest.raises(ValueError, match=EARLIER):
        read_manifest(data({k: v for k, v in FACTS.items()} | {"format": 1}))


# a run

def _resume(rank: int, out: str) -> tuple[Any, str]:
    import contextlib
    import io

    from rldsl.runtime.persist.checkpoint_reader import load_checkpoint

    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return load_checkpoint(Path(out), HEADER, torch.device("cpu")).step, said.getvalue()
    except Failure as failure:
        return [d.code for d in failure.diagnostics], said.getvalue()


def edit(checkpoint: Path, **values: Any) -> None:
    file = checkpoint / MANIFEST
    file.write_bytes(data(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("values", [{"step": 299}, {"states": {"beta": 1.0}}, {DIGEST: "0" * 64}, {"models": None}])
def test_the_previous_complete_one_is_used_and_named(tmp_path: Path, values: dict[str, Any]) -> None:
    before, last = checkpoint(tmp_path, 200), checkpoint(tmp_path, 300)
    edit(last, **values)
    found = run_world(2, _resume, str(tmp_path), timeout=30)
    assert [step for step, _ in found] == [200, 200]
    assert f"the checkpoint {last} is corrupted" in found[0][1] and f"trying the previous one, {before}" in found[0][1]
    assert found[1][1] == ""  # all ranks read the same manifest: one reports it


def test_without_a_previous_one_the_run_ends_with_a_code(tmp_path: Path) -> None:
    edit(checkpoint(tmp_path, 300), step=299)
    found = run_world(2, _resume, str(tmp_path), timeout=30)
    assert [codes for codes, _ in found] == [["RL0761"], ["RL0761"]]


def test_a_renamed_directory_is_damage(tmp_path: Path) -> None:
    checkpoint(tmp_path, 200)
    checkpoint(tmp_path, 300).rename(tmp_path / "checkpoints/step-000900")
    assert [step for step, _ in run_world(2, _resume, str(tmp_path), timeout=30)] == [200, 200]
