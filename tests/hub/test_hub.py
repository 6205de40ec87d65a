"""Models of the Hub: a program names one, the plan records its commit, a run reads the files of that commit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest

from rldsl.plan.codec import decode
from tests.forked import command as forked
from tests.fresh import read_environment
from tests.hub.server import COMMIT, Hub, serving
from tests.tiny import make_all

PROGRAM = '''use std.sft (sft)
data rows = jsonl("data/answers.jsonl", batch=4, kind="answers", max_prompt_tokens=16, max_answer_tokens=16)
model actor = causal_lm("{name}") train adamw(lr=1e-3)
flow run(steps=1, seed=1) {{
  row = rows.next()
  actor.train(row, loss=sft())
}}
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_all(tmp_path_factory.mktemp("tiny"))
    (folder / "data/answers.jsonl").write_text('{"prompt": "ab", "answer": "ba"}\n' * 8)
    pickled = folder / "models/pickled"
    pickled.mkdir()
    for file in (folder / "models/sft").iterdir():
        if file.suffix != ".safetensors":
            (pickled / file.name).write_bytes(file.read_bytes())
    (pickled / "pytorch_model.bin").write_bytes(b"no")
    shutil.copytree(folder / "models/sft", folder / "models/damaged")
    (folder / "models/damaged/model.safetensors.index.json").write_text('{"weight_map": ["a"]}')
    return folder


@pytest.fixture(scope="module")
def hub(tiny: Path) -> Iterator[Hub]:
    folders = {"lab/tiny": tiny / "models/sft", "lab/gated": tiny / "models/sft", "lab/pickled": tiny / "models/pickled",
               "lab/damaged": tiny / "models/damaged"}
    with serving(Hub(folders, gated={"lab/gated"})) as found:
        yield found


def call(tiny: Path, hub: Hub | None, cache: Path, *command: str, offline: bool = False,
         fresh: bool = False) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE ...` or `python -c CODE ...` on a machine with this cache. fresh: in an interpreter of its own,
    and not in a process that is forked with the libraries loaded."""
    own = {"HF_HOME": str(cache), "HF_ENDPOINT": hub.endpoint if hub else "http://127.0.0.1:9",
           "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT,
           "HF_HUB_OFFLINE": str(int(offline))}
    with pytest.MonkeyPatch.context() as patch, chdir(tiny):
        for name in [name for name in os.environ if name.startswith("HF_")]:
            patch.delenv(name)
        if fresh:
            line = command if command[0] == "-c" else ("-m", "tests.fresh", *command)
            return subprocess.run([sys.executable, *line], env=os.environ | own, capture_output=True, text=True,
                                  timeout=300)
        if command[0] == "-c":
            code = cache.parent / f"{cache.name}.py"
            code.write_text(command[1])
            command = (str(code), *command[2:])
        return forked(*command, timeout=300, env=own, before=read_environment)


ROOT = str(Path(__file__).parents[2])
RLC = ("rldsl.cli",)
RUN = ("rldsl.runtime.launch", "--nproc-per-node", "2", "-m", "rldsl.run")


@pytest.mark.thorough
def test_from_the_program_to_the_run(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    (tiny / "p.rlf").write_text("cluster nodes=1 gpus=2\n" + PROGRAM.format(name="lab/tiny@v1")
                                + "place actor.train on mesh(0:2) dp=2\n")
    done = call(tiny, hub, tmp_path / "a", *RLC, "compile", "p.rlf", "-o", "p.plan")
    assert done.returncode == 0, done.stderr
    (model,) = decode((tiny / "p.plan").read_bytes(), "p.plan").models
    assert model.path == f"hf:lab/tiny@{COMMIT}"
    hub.sent.clear()
    done = call(tiny, hub, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "out"), fresh=True)  # another machine
    assert done.returncode == 0 and "run: 1 step in" in done.stderr, done.stderr
    assert hub.sent.count("model.safetensors") == 1, "the first rank of a node downloads, and nobody else"
    assert not any(f.endswith((".bin", ".py")) for f in hub.sent)
    hub.sent.clear()
    done = call(tiny, None, tmp_path / "b", *RUN, "p.plan", "--out", str(tmp_path / "again"), offline=True)
    assert done.returncode == 0 and not hub.sent, done.stderr
    done = call(tiny, None, tmp_path / "empty", *RLC, "run", "p.plan", "--out", str(tmp_path / "none"), offline=True)
    assert done.returncode and "RL0095" in done.stderr and f"--revision {COMMIT}" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_index(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    (tiny / "damaged.rlf").write_text(PROGRAM.format(name="lab/damaged"))
    done = call(tiny, hub, tmp_path, *RLC, "run", "damaged.rlf", "--out", str(tmp_path / "out"))
    assert done.returncode == 1 and "cannot read the index of the weights" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


TRIES = '''
import sys
from rldsl.diag import Failure
from rldsl.models import hub
for name in sys.argv[1:]:
    try:
        print(name, "->", hub.resolve(name))
    except Failure as failure:
        d = failure.diagnostics[0]
        print(name, "->", d.code, d.title, "|", d.help)
'''


def tried(tiny: Path, hub: Hub | None, cache: Path, *names: str, offline: bool = False) -> dict[str, str]:
    done = call(tiny, hub, cache, "-c", TRIES, *names, offline=offline)
    assert done.returncode == 0, done.stderr
    return dict(line.split(" -> ", 1) for line in done.stdout.splitlines())


def test_what_the_hub_does_not_give(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    found = tried(tiny, hub, tmp_path, "lab/tiny", f"lab/tiny@{COMMIT}", "lab/none", "lab/gated", "lab/tiny@v9",
                  "lab/pickled", "models/sft", "models/none", "./lab/tiny", "actor", "a/b/c")
    assert found["lab/tiny"] == found[f"lab/tiny@{COMMIT}"] == f"hf:lab/tiny@{COMMIT}"
    assert "no such model on the Hub" in found["lab/none"] and "hf auth login" in found["lab/none"]
    assert "gated" in found["lab/gated"] and "ask for access" in found["lab/gated"]
    assert 'no revision "v9"' in found["lab/tiny@v9"]
    assert "no safetensors" in found["lab/pickled"]
    for local in ("models/sft", "models/none", "./lab/tiny", "actor", "a/b/c"):
        assert found[local] == local, "a path, for which nobody is asked"


def test_without_a_network(tiny: Path, hub: Hub, tmp_path: Path) -> None:
    assert "hf:" in tried(tiny, hub, tmp_path, "lab/tiny")["lab/tiny"]
    for offline in (False, True):
        found = tried(tiny, None, tmp_path, "lab/tiny", "lab/other", offline=offline)
        assert found["lab/tiny"] == f"hf:lab/tiny@{COMMIT}", "the cache is enough"
        assert ("cannot be reached" in found["lab/other"]) is not offline
    assert found["lab/other"] == "lab/other", "the compiler then says that there is no such directory"
