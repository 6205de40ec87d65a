"""The cache of model descriptions: what it gives is what would be made, and nothing that happens to it shows."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from rldsl.diag import Failure
from rldsl.models import cache, directory, families
from rldsl.models.cache import cached_record, entry_key
from rldsl.models.directory import TokenizerDigest
from rldsl.models.families import Family, describe
from tests.tiny import make_model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RLDSL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The directories that transformers has described."""
    seen: list[str] = []
    real = families._described

    def described(path: str, *rest: object) -> Family:
        seen.append(path)
        return real(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(families, "_described", described)
    return seen


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("cached")
    make_model(found / "qwen3")
    make_model(found / "moe", "mixtral")
    make_model(found / "gpt2", "gpt2")
    return found


@pytest.mark.parametrize("name", ["qwen3", "moe", "gpt2"])
@pytest.mark.parametrize("kind", ["causal_lm", "value_model"])
def test_what_is_kept_is_what_was_made(folder: Path, made: list[str], models: Path, name: str, kind: str) -> None:
    first = describe(str(models / name), kind)
    second = describe(str(models / name), kind)
    assert second == first and len(made) == 1
    assert type(second.params[0].shape) is tuple and {p.suffix for p in folder.iterdir()} == {".json"}


def test_the_directory_is_not_part_of_what_is_kept(folder: Path, made: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / name)
    assert describe(str(tmp_path / "a"), "causal_lm").path == str(tmp_path / "a")
    assert describe(str(tmp_path / "b"), "causal_lm").path == str(tmp_path / "b") and len(made) == 1
    assert str(tmp_path) not in "".join(f.read_text() for f in folder.iterdir())


def test_everything_that_matters_is_in_the_key(folder: Path, made: list[str], tmp_path: Path,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "m")
    first = describe(str(model), "causal_lm")
    assert describe(str(model), "value_model").params != first.params
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 64}))
    assert describe(str(model), "causal_lm").intermediate == 64 and len(made) == 3
    monkeypatch.setattr(directory, "tensor_names", lambda *_: frozenset({"other.name"}))
    describe(str(model), "causal_lm")
    monkeypatch.setattr(cache, "version", lambda name: "0.0")
    cache._maker.cache_clear()
    describe(str(model), "causal_lm")
    assert len(made) == 5
    cache._maker.cache_clear()


@pytest.mark.parametrize("damage", [b"", b"{", b"\0" * 100, None, "flip", "other"])
def test_a_damaged_entry_is_made_again(folder: Path, made: list[str], models: Path, damage: bytes | str | None) -> None:
    right = describe(str(models / "qwen3"), "causal_lm")
    entries = sorted(folder.iterdir())
    for file in entries:
        text = file.read_bytes()
        if damage is None:
            file.write_bytes(text[: len(text) // 2])
        elif damage == "flip":  # one bit of a number
            file.write_bytes(text.replace(b'"layers":4', b'"layers":5').replace(b'"layers":2', b'"layers":3'))
        elif damage == "other":  # a whole entry of another kind
            file.write_bytes(entries[0].read_bytes())
        else:
            assert isinstance(damage, bytes)
            file.write_bytes(damage)
    assert describe(str(models / "qwen3"), "causal_lm") == right
    assert describe(str(models / "qwen3"), "causal_lm") == right and len(made) <= 2


def test_concurrent_writers_leave_a_whole_entry(folder: Path) -> None:
    """All write the same entry at once; nobody ever reads half of one."""
    key, wrong = entry_key("x"), []

    def work() -> None:
        for _ in range(50):
            found = cached_record(TokenizerDigest, key, lambda: TokenizerDigest("d" * 10_000))
            if found.digest != "d" * 10_000:
                wrong.append(found)
            (folder / f"{key}.json").unlink(missing_ok=True)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and not [f for f in folder.iterdir() if f.name.startswith(".new")]


def test_a_failure_is_not_kept(folder: Path, tmp_path: Path) -> None:
    model = make_model(tmp_path / "m")
    text = (model / "config.json").read_text()
    (model / "config.json").write_text("{")
    for _ in range(2):
        with pytest.raises(Failure, match="RL0303"):
            describe(str(model), "causal_lm")
    (model / "config.json").write_text(text)
    assert describe(str(model), "causal_lm").layers


def test_it_can_be_switched_off_and_may_be_unwritable(made: list[str], models: Path, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for where in ("off", str(tmp_path / "file" / "below")):
        monkeypatch.setenv("RLDSL_CACHE", where)
        for _ in range(2):
            describe(str(models / "qwen3"), "causal_lm")
    assert len(made) == 4 and not Path("off").exists()


def test_it_does_not_grow_without_end(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_ENTRIES", 3)
    for i in range(9):
        cached_record(TokenizerDigest, entry_key(str(i)), lambda i=i: TokenizerDigest(str(i)))
    assert len(list(folder.glob("*.json"))) == 3


def test_an_entry_that_is_no_file_is_not_read(folder: Path) -> None:
    """Opening a pipe that nobody writes to would wait forever."""
    key = entry_key("a")
    folder.mkdir(parents=True)
    os.mkfifo(folder / f"{key}.json")
    arguments = (TokenizerDigest, key, lambda: TokenizerDigest("1"))
    reader = threading.Thread(target=cached_record, args=arguments, daemon=True)
    reader.start()
    reader.join(20)
    assert not reader.is_alive() and (folder / f"{key}.json").is_file()  # replaced by an entry
