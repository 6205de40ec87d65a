"""Files that are whole under their names, whenever the process, the disk or the machine ends."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rldsl.plan.heads import HEADS
from rldsl.runtime import files
from rldsl.runtime.files import replace_text
from rldsl.runtime.metrics.json_lines import truncate
from rldsl.runtime.persist import model_export
from rldsl.runtime.persist.checkpoint_writer import drop_unfinished


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(what, name) of everything that reaches the disk, as it does."""
    seen: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def synced(handle: int) -> None:
        seen.append(("sync", Path(os.readlink(f"/proc/self/fd/{handle}")).name))
        fsync(handle)

    def replaced(old: Any, new: Any) -> None:
        seen.append(("name", Path(new).name))
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    return seen


def test_a_text_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[tuple[str, str]]) -> None:
    replace_text(tmp_path / "a.json", "x\n")
    assert order == [("sync", ".a.json.partial"), ("name", "a.json")]
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"] and (tmp_path / "a.json").read_text() == "x\n"


@pytest.mark.parametrize("when", ["sync", "name"])
def test_what_was_there_stays_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((files, "sync") if when == "sync" else (os, "replace")), full)
    for change in (lambda: replace_text(file, "x"), lambda: truncate(file, 2)):
        with pytest.raises(OSError, match="space"):
            change()
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n' and [p.name for p in tmp_path.iterdir()] == [file.name]


def test_links_and_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("old")
    (tmp_path / "link").symlink_to("there")
    replace_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there").read_text() == "new"
    replace_text(Path("/dev/null"), "nothing")
    assert not Path("/dev/null").is_file()
    with pytest.raises(OSError):
        replace_text(tmp_path, "a directory")
    with pytest.raises(OSError):
        replace_text(tmp_path / "none" / "a", "no directory")


@pytest.mark.parametrize("again", [False, True])
def test_a_model_is_on_the_disk_before_it_has_its_name(tmp_path: Path, order: list[tuple[str, str]],
                                                       again: bool) -> None:
    final, partial, tokenizer = (tmp_path / n for n in ("m", ".m.partial", "t"))
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    config = SimpleNamespace(save_pretrained=lambda place: (place / "config.json").write_text("{}"))
    export = {"config": config, "tokenizer": tokenizer}
    for _ in range(1 + again):
        order.clear()
        model_export._fresh(partial, final)
        model_export._write(partial / "model.safetensors", {})
        model_export._finish(partial, final, SimpleNamespace(lora=None, head=HEADS["causal_lm"]), export,  # type: ignore[arg-type]
                     {"w": "model.safetensors"}, {"step": 1})
    named = order.index(("name", "m"))
    before, after = order[:named], order[named + 1 :]
    kept = {"model.safetensors", "config.json", "tokenizer.json", model_export.MARK, ".m.partial"}
    assert kept <= {name for what, name in before if what == "sync"}
    assert ("sync", tmp_path.name) in after and sorted(p.name for p in final.iterdir()) == sorted(kept - {".m.partial"})
    assert not (tmp_path / ".m.old").exists()


def test_what_starts_that_died_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for name in (".step-000003.0a1b.partial", ".step-000003.ffff.partial", "step-000002", ".other.partial", "mine"):
        (folder / name).mkdir(parents=True)
        (folder / name / "rank-00000.safetensors").touch()
    drop_unfinished(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == [".other.partial", "mine", "step-000002"]
    drop_unfinished(tmp_path / "nothing here")
