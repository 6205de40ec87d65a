"""Data of the Hub: a program names a dataset, the plan records commit, subset and split, a run reads these rows."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rldsl import api
from rldsl.models.hub_data import RECORDED
from rldsl.plan.codec import decode
from rldsl.plan.metrics_file import read
from tests.hub.server import COMMIT, Hub, serving
from tests.hub.test_hub import RLC, RUN, call
from tests.tiny import make_all

PROGRAM = '''cluster nodes=1 gpus=2
use std.sft (sft)
data rows = {rows}, batch=4, kind="answers", max_prompt_tokens=16, max_answer_tokens=16)
model actor = causal_lm("models/sft") train adamw(lr=1e-3)
flow run(steps=3, seed=1) {{
  row = rows.next()
  actor.train(row, loss=sft())
}}
place actor.train on mesh(0:2) dp=2
'''
CARD = """---
configs:
- config_name: {first}
  data_files:
  - {{split: train, path: train.jsonl}}
  - {{split: test, path: test.jsonl}}
{more}---
Rows.
"""
MORE = "- config_name: hard\n  data_files:\n  - {split: train, path: test.jsonl}\n"


def rows(first: int, count: int) -> list[dict[str, str]]:
    return [{"prompt": "ab" * (i % 3 + 1), "answer": "ba" * (i % 5 + 1)} for i in range(first, first + count)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_all(tmp_path_factory.mktemp("tiny"))
    for name, card in (("plain", CARD.format(first="main", more="")), ("two", CARD.format(first="easy", more=MORE)),
                       ("script", "Rows.\n")):
        made = folder / "hub" / name
        made.mkdir(parents=True)
        (made / "README.md").write_text(card)
        (made / ".gitattributes").write_text("")
        for split, part in (("train", rows(0, 24)), ("test", rows(100, 8))):
            (made / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    (folder / "hub/script/script.py").write_text("raise SystemExit('executed')")
    (folder / "data/train.jsonl").write_text((folder / "hub/plain/train.jsonl").read_text())
    return folder


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[Hub]:
    datasets = {f"lab/{name}": tiny / "hub" / name for name in ("plain", "two", "script")}
    with serving(Hub({}, datasets | {"lab/gated": tiny / "hub/plain"}, gated={"lab/gated"})) as found:
        yield found


def losses(out: Path) -> list[float]:
    return [line["actor/loss"] for line in read(out / "metrics.jsonl")]


@pytest.mark.thorough
def test_from_the_program_to_the_run(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    (tiny / "p.rlf").write_text(PROGRAM.format(rows='hf("lab/plain@v1", split="train"'))
    (tiny / "q.rlf").write_text(PROGRAM.format(rows='jsonl("data/train.jsonl"'))
    done = call(tiny, hub, tmp_path / "a", *RLC, "compile", "p.rlf", "-o", "p.plan")
    assert done.returncode == 0, done.stderr
    (data,) = decode((tiny / "p.plan").read_bytes(), "p.plan").data
    assert data.path == f"hf:lab/plain@{COMMIT}/main/train"
    hub.sent.clear()
    done = call(tiny, hub, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "out"))  # another machine
    assert done.returncode == 0 and "run: 3 steps in" in done.stderr, done.stderr
    assert hub.sent.count("train.jsonl") == 1, "the first rank of a node downloads, and nobody else"
    done = call(tiny, None, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "again"), offline=True)
    assert done.returncode == 0, done.stderr
    done = call(tiny, None, tmp_path / "a", *RLC, "run", "q.rlf", "--out", str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "out") == losses(tmp_path / "again") == losses(tmp_path / "file"), "the same rows"
    done = call(tiny, None, tmp_path / "empty", *RLC, "run", "p.plan", "--out", str(tmp_path / "none"), offline=True)
    assert done.returncode and "RL0095" in done.stderr and "the Hub cannot be reached" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_slice(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    code = """
import json, sys
from rldsl.models import hub_data
from rldsl.runtime.data import hf, row_schema
needs = row_schema.RowNeeds({"prompt": "prompt", "answer": "answer"})
folder = hub_data.download(hub_data.resolve("lab/plain", "", "train[4:12]"))
print(json.dumps(hf.scan(folder, needs).table.read(range(8))))
"""
    done = call(tiny, hub, tmp_path, "-c", code)
    assert done.returncode == 0 and json.loads(done.stdout) == rows(4, 8), done.stderr


TRIES = '''
import json, sys
from rldsl.diag import Failure
from rldsl.models import hub_data
for name, subset, split in json.loads(sys.argv[1]):
    try:
        print(hub_data.resolve(name, subset, split))
    except Failure as failure:
        d = failure.diagnostics[0]
        print(d.code, d.title, "|", d.label, "|", d.help)
'''


def tried(tiny: Path, hub: Hub | None, cache: Path, *asked: tuple[str, str, str], offline: bool = False) -> list[str]:
    done = call(tiny, hub, cache, "-c", TRIES, json.dumps(asked), offline=offline)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_what_a_name_means(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    found = tried(tiny, hub, tmp_path, ("lab/plain", "", "test"), (f"lab/plain@{COMMIT}", "main", "train[10%:]"),
                  ("lab/two", "hard", "train"), ("data/train.jsonl", "", ""), ("data/none", "", ""))
    assert found == [f"hf:lab/plain@{COMMIT}/main/test", f"hf:lab/plain@{COMMIT}/main/train[10%:]",
                     f"hf:lab/two@{COMMIT}/hard/train", "data/train.jsonl", "data/none"]
    assert all(RECORDED.fullmatch(path) for path in found[:3])


@pytest.mark.thorough
def test_what_the_hub_does_not_give(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    cases = {
        ("lab/plain", "", ""): 'split="train"', ("lab/plain", "", "trian"): 'did you mean `split="train"`?',
        ("lab/plain", "", "dev[:3]"): "splits: train, test", ("lab/plain", "mian", "train"): 'write `subset="main"`',
        ("lab/two", "", "train"): "subsets: easy, hard", ("lab/none", "", "train"): "no such dataset on the Hub",
        ("lab/gated", "", "train"): "is gated", ("lab/plain@v9", "", "train"): 'no revision "v9"',
        ("lab/script", "", "train"): "a program, which is not executed",
        ("lab/plain", "", "train[:10"): "Unrecognized instruction format: train[:10",
        ("lab/plain", "", "train[:200%]"): "Percent slice boundaries", ("lab/plain", "", "train+"): "not a split",
        ("lab/plain", "", "train[:3]+dev"): 'no split "dev"',
    }
    for (case, expected), answer in zip(cases.items(), tried(tiny, hub, tmp_path, *cases), strict=True):
        assert answer.startswith("RL0095") and expected in answer, (case, answer)


def test_a_run_says_why_rows_cannot_be_read(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    """The plan names the slice, and no place in a program; the library has a reason, which must not get lost."""
    code = f"""
from rldsl.diag import Failure
from rldsl.models import hub_data
try:
    hub_data.download("hf:lab/plain@{COMMIT}/main/train[:10")
except Failure as failure:
    print(failure.diagnostics[0].code, failure.diagnostics[0].title)
"""
    done = call(tiny, hub, tmp_path, "-c", code)
    assert done.stdout.startswith('RL0095 "lab/plain" cannot be read: Unrecognized instruction'), done.stderr


@pytest.mark.thorough
def test_a_pipe_gets_no_progress_of_the_library(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "p.rlf").write_text(PROGRAM.format(rows='hf("lab/plain", split="train"'))
    done = call(tiny, hub, tmp_path, *RLC, "compile", str(tmp_path / "p.rlf"), "-o", str(tmp_path / "p.plan"),
                fresh=True)
    assert (done.returncode, done.stderr) == (0, "")
    shown = call(tiny, hub, tmp_path, *RLC, "show", str(tmp_path / "p.plan"))
    assert f"data rows  hf  hf:lab/plain@{COMMIT}/main/train  batch 4  answers\n" in shown.stdout
    record = json.loads(call(tiny, hub, tmp_path, *RLC, "--json", "show", str(tmp_path / "p.plan")).stdout)
    assert record["data"][0]["path"] == f"hf:lab/plain@{COMMIT}/main/train"


def test_without_a_network(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    for offline in (False, True):
        (found,) = tried(tiny, None, tmp_path / "empty", ("lab/plain", "", "train"), offline=offline)
        assert found.startswith("RL0095") and "the Hub cannot be reached" in found
    keep = "from rldsl.models import hub_data as h; print(h.download(h.resolve('lab/plain', '', 'train')))"
    assert call(tiny, hub, tmp_path / "full", "-c", keep).returncode == 0
    found = tried(tiny, None, tmp_path / "full", ("lab/plain", "", "train"), ("lab/plain", "main", "train"), offline=True)
    assert found == [f"hf:lab/plain@{COMMIT}/main/train"] * 2, "the cache is enough"


def test_the_cache_has_another_commit(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    """`datasets` takes the newest rows in its cache if the Hub cannot be reached: they may be others than planned."""
    other = COMMIT[::-1]
    keep = f"from rldsl.models import hub_data as h; h.download('hf:lab/plain@{COMMIT}/main/train')"
    assert call(tiny, hub, tmp_path, "-c", keep).returncode == 0
    done = call(tiny, None, tmp_path, "-c", keep.replace(COMMIT, other), offline=True)
    assert done.returncode and "RL0095" not in done.stdout and "another commit" in done.stderr, done.stderr


def test_directories_with_splits(tiny: Path, tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    split = Dataset.from_list(rows(0, 8))
    DatasetDict(train=split, test=split).save_to_disk(str(tmp_path / "both"))
    split.save_to_disk(str(tmp_path / "one"))
    both, one = str(tmp_path / "both"), str(tmp_path / "one")
    found = tried(tiny, None, tmp_path, (both, "", "train"), (both, "", "dev"), (one, "", "train"), (one, "main", ""))
    assert found[0] == f"{both}/train"
    for answer, expected in zip(found[1:], ('no split "dev"', "has no splits", "has no subsets"), strict=True):
        assert answer.startswith("RL0095") and expected in answer


@pytest.mark.parametrize(("source", "code", "words"), [
    ('jsonl("a.jsonl", split="train"', "RL0107", "only `hf` has `split`"),
    ('parquet("a.parquet", subset="main"', "RL0107", "only `hf` has `subset`"),
    ('hf("lab/plain", split="train", streaming=true', "RL0205", "rows cannot be streamed"),
    ('hf("lab/plain", spilt="train"', "RL0107", "split"),
])
def test_options(source: str, code: str, words: str) -> None:
    (found,) = api.check(PROGRAM.format(rows=source))
    assert found.code == code and words in f"{found.title} {found.help}"


def test_streaming_false_is_what_happens_anyway() -> None:
    assert not api.check(PROGRAM.format(rows='hf("lab/plain", split="train", streaming=false'))


def test_without_the_library(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['datasets'] = None\n"
    done = call(tiny, hub, tmp_path, "-c", hide + TRIES, json.dumps([("lab/plain", "", "train")]), fresh=True)
    assert "RL0097 datasets is not installed" in done.stdout and "rldsl[datasets]" in done.stdout, done.stderr


def test_importing_does_not_load_it() -> None:
    code = "import sys, rldsl.models.hub_data; sys.exit('datasets' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
