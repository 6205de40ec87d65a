"""A saved model of a run goes to the Hub, with a card that says how it was made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from rldsl.diag import Failure
from rldsl.plan.codec import plan_id
from rldsl.plan.metrics_file import read
from rldsl.python import push as pushing
from rldsl.python.model_card import SHOWN, model_card
from rldsl.python.runs import Run
from tests.hub.server import COMMIT, Hub, serving
from tests.hub.test_hub import RLC, call
from tests.tiny import make_all

PROGRAM = '''use std.sft (sft)
data rows = jsonl("data/answers.jsonl", batch=4, kind="answers", max_prompt_tokens=16, max_answer_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow learn(steps=2, seed=1) {
  row = rows.next()
  actor.train(row, loss=sft())
  every 1 { save actor }
}
'''
TOKEN = "hf_writes"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_all(tmp_path_factory.mktemp("tiny"), num_hidden_layers=2)
    (folder / "data/answers.jsonl").write_text('{"prompt": "ab", "answer": "ba"}\n' * 8)
    (folder / "learn.rlf").write_text(PROGRAM)
    done = call(folder, None, folder / "home", *RLC, "run", "learn.rlf", "--out", "run")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def hub(tiny: Path) -> Iterator[Hub]:
    with serving(Hub({}, token=TOKEN)) as found:
        yield found


def push(tiny: Path, hub: Hub | None, *arguments: str, token: str = TOKEN,
         offline: bool = False) -> subprocess.CompletedProcess:
    code = f"import os; os.environ['HF_TOKEN'] = {token!r}\nfrom rldsl.rlc import main; main()"
    return call(tiny, hub, tiny / "home", "-c", code, "push", *arguments, offline=offline)


def test_what_arrives(tiny: Path, hub: Hub) -> None:
    done = push(tiny, hub, "run", "me/learned", "--private", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["address"] == f"{hub.endpoint}/me/learned/commit/{COMMIT}"
    (sent,), (message,) = hub.folders.values(), hub.commits
    assert hub.private == {"me/learned"} and message == "actor of learn, step 2"
    saved = Run(tiny / "run").saved("actor")
    files = {str(f.relative_to(sent)) for f in sent.rglob("*") if f.is_file()}
    assert files == {f.name for f in saved.iterdir()} | {"README.md", "rldsl/run.plan", "rldsl/metrics.jsonl"}
    for name in files - {"README.md"}:
        mine = tiny / "run" / name.removeprefix("rldsl/") if name.startswith("rldsl/") else saved / name
        assert (sent / name).read_bytes() == mine.read_bytes(), name
    card = (sent / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head == {"library_name": "transformers", "tags": ["rldsl", "reinforcement-learning", "learn"],
                    "pipeline_tag": "text-generation"}
    assert PROGRAM.rstrip() in card, "the program"
    assert f"`{plan_id((sent / 'rldsl/run.plan').read_bytes())}`" in card, "the digest of the plan that was sent"
    first, last = (line["actor/loss"] for line in read(tiny / "run/metrics.jsonl"))
    assert f"| `actor/loss` | {first:.4g} | {last:.4g} | {last:.4g} |" in card
    assert str(tiny) not in card and os.uname().nodename not in card


def test_what_the_user_keeps_with_a_model_stays(tiny: Path, hub: Hub) -> None:
    """The card and the plan of what is sent are ours; the files of the directory are not written through links."""
    saved = Run(tiny / "run").saved("actor")
    (saved / "README.md").write_text("mine\n")
    directory(saved / "rldsl", "mine")
    try:
        done = push(tiny, hub, "run", "me/kept")
        assert done.returncode == 0, done.stderr
        (sent,) = hub.folders.values()
        assert (saved / "README.md").read_text() == "mine\n" and PROGRAM.rstrip() in (sent / "README.md").read_text()
        assert {f.name for f in (sent / "rldsl").iterdir()} == {"run.plan", "metrics.jsonl"}
    finally:
        (saved / "README.md").unlink()
        shutil.rmtree(saved / "rldsl")


def test_again_to_the_same_repository(tiny: Path, hub: Hub) -> None:
    for _ in range(2):
        assert push(tiny, hub, "run", "me/learned", "--model", "actor").returncode == 0
    assert len(hub.commits) == 2 and list(hub.folders) == ["me/learned"]


@pytest.mark.thorough
@pytest.mark.parametrize(("arguments", "token", "code", "words"), [
    (("run", "me/learned"), "hf_reads", "RL0095", "does not let you write"),
    (("run", "learned"), TOKEN, "RL0095", "write OWNER/NAME"),
    (("run", "me/learned@v1"), TOKEN, "RL0095", "`--branch` chooses a branch"),
    (("run", "me/learned", "--model", "critic"), TOKEN, "RL0798", "the run has not saved `critic`"),
    (("none", "me/learned"), TOKEN, "RL0783", "no run in this directory"),
])
def test_what_is_refused(tiny: Path, hub: Hub, arguments: tuple[str, ...], token: str, code: str, words: str) -> None:
    done = push(tiny, hub, *arguments, token=token)
    assert done.returncode == 1 and code in done.stderr and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not hub.commits


@pytest.mark.parametrize("offline", [False, True])
def test_without_a_network(tiny: Path, offline: bool) -> None:
    done = push(tiny, None, "run", "me/learned", offline=offline)
    assert done.returncode == 1 and "RL0095" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert ("HF_HUB_OFFLINE" in done.stderr) is offline


# --------------------------------------------------------------------------------------------- while a run saves


def directory(path: Path, text: str) -> Path:
    path.mkdir()
    for name in "config.json", "model.safetensors":
        (path / name).write_text(text)
    return path


def replaced(target: Path, text: str) -> None:
    """As a save replaces its directory: by renaming."""
    directory(target.parent / "new", text)
    target.rename(target.parent / f"old-{text}")
    (target.parent / "new").rename(target)


def test_a_save_while_the_copy_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, link, times = directory(tmp_path / "actor", "1"), pushing._link, []

    def slow(one: str, two: str) -> None:
        link(one, two)
        times.append(one)
        if len(times) == 1:
            replaced(source, "2")

    monkeypatch.setattr(pushing, "_link", slow)
    pushing._copy(source, tmp_path / "copy")
    assert {f.read_text() for f in (tmp_path / "copy").iterdir()} == {"2"}, "one version, not files of two"
    replaced(source, "3")
    assert {f.read_text() for f in (tmp_path / "copy").iterdir()} == {"2"}, "links keep what was copied"


def test_a_directory_that_changes_all_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, link, count = directory(tmp_path / "actor", "0"), pushing._link, iter(range(100))

    def restless(one: str, two: str) -> None:
        link(one, two)
        replaced(source, str(next(count)))

    monkeypatch.setattr(pushing, "_link", restless)
    with pytest.raises(Failure, match="changes all the time"):
        pushing._copy(source, tmp_path / "copy")


# ------------------------------------------------------------------------------------------------------ the card


def card(tiny: Path, lines: list[dict[str, float]], page: str = "") -> str:
    plan = Run(tiny / "run").plan
    return model_card("me/x", "actor", plan.record, plan.id, {"state": "running"}, lines, page, plan.checks)


def test_a_card_without_metrics_or_program(tiny: Path) -> None:
    text = card(tiny, [])
    assert "no metrics yet" in text and "## Program" not in text and "step 0 of 2" in text


def test_a_card_has_the_metrics_that_a_run_prints_first(tiny: Path) -> None:
    lines = [{"step": s, "seconds": 1.0, **{f"z{i}": s for i in range(20)}, "reward": s / 10} for s in range(1, 21)]
    rows = [line for line in card(tiny, lines).splitlines() if line.startswith("| `")]
    assert rows[0] == "| `reward` | 0.1 | 2 | 1.95 |" and len(rows) == SHOWN, "the mean is of steps 19 and 20"
    assert not any("seconds" in row for row in rows)


def test_a_program_with_fences_does_not_end_its_block(tiny: Path) -> None:
    text = card(tiny, [], "# ```\nflow x() {}\n")
    assert text.count("````") == 2


def test_names_of_the_hub_are_in_the_head(tiny: Path) -> None:
    from dataclasses import replace

    plan = Run(tiny / "run").plan.record
    named = replace(plan, models=tuple(replace(m, path=f"hf:lab/base@{COMMIT}") for m in plan.models),
                    data=tuple(replace(d, path=f"hf:lab/rows@{COMMIT}/main/train") for d in plan.data))
    head = yaml.safe_load(model_card("me/x", "actor", named, "0" * 12, {}, [], "", ()).split("---\n")[1])
    assert (head["base_model"], head["datasets"]) == ("lab/base", ["lab/rows"])
