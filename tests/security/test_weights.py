"""Safetensors files that somebody else wrote: whatever their headers say, a message, no traceback, little memory."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from rldsl.backends.torch.model.load_weights import open_file, weight_files

from rldsl import api
from rldsl.diag import Failure
from rldsl.runtime.persist.manifest import DIGEST, manifest_text
from tests.backend_torch.shards import plan_model
from tests.checkpoint.runs import run
from tests.end_to_end.programs import compile_program
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """
data sums = jsonl("{folder}/sums.jsonl", batch=4, answer="answer")
model actor = causal_lm("{folder}/model") train adamw(lr=1e-4)
flow tuning(steps=3, seed=1) {{
  batch = sums.next()
  actor.train(batch, loss=fit())
  checkpoint every 1
}}
loss fit(logprobs: token) {{ return -mean(logprobs) }}
"""
ROOM = 1 << 30  # bytes of address space beyond what the process has

Header = dict[str, Any]


def parts(file: Path) -> tuple[Header, bytes]:
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8 : 8 + length]), whole[8 + length :]


def edited(file: Path, edits: Mapping[str, Callable[[Header, bytes], bytes]]) -> list[bytes]:
    return [edit(*parts(file)) for edit in edits.values()]


def join(header: Header | bytes, data: bytes, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def first(edit: Callable[[dict[str, Any]], None]) -> Callable[[Header, bytes], bytes]:
    """One tensor's entry is edited."""
    def work(header: Header, data: bytes) -> bytes:
        edit(next(v for k, v in header.items() if k != "__metadata__"))
        return join(header, data)

    return work


def move(offset: int) -> Callable[[Header, bytes], bytes]:
    return first(lambda t: t.update(data_offsets=[x + offset for x in t["data_offsets"]]))


FILES: dict[str, Callable[[Header, bytes], bytes]] = {
    "nothing": lambda h, d: b"",
    "no header": lambda h, d: b"1234567",
    "2**60": lambda h, d: join(h, d, 1 << 60),
    "2**64-1": lambda h, d: join(h, d, (1 << 64) - 1),
    "the most": lambda h, d: join(h, d, 100_000_000),
    "0": lambda h, d: join(h, d, 0),
    "cut off": lambda h, d: join(h, d[:-5]),
    "too long": lambda h, d: join(h, d + b"12345"),
    "not JSON": lambda h, d: join(b'{"a": ', d),
    "not UTF-8": lambda h, d: join(b"\xff\xfe{}", d),
    "a list": lambda h, d: join(b"[1, 2]", d),
    "deep": lambda h, d: join(b'{"a":' * 200_000, d),
    "negative": move(-8),
    "overlapping": move(-4),
    "beyond the file": move(1 << 40),
    "beyond 64 bits": move(1 << 70),
    "turned round": first(lambda t: t["data_offsets"].reverse()),
    "no offsets": first(lambda t: t.pop("data_offsets")),
    "unknown dtype": first(lambda t: t.update(dtype="X7")),
    "wider dtype": first(lambda t: t.update(dtype="F64")),
    "negative shape": first(lambda t: t.update(shape=[-1, -1])),
    "endless shape": first(lambda t: t.update(shape=[1 << 62, 1 << 62])),
    "text shape": first(lambda t: t.update(shape="many")),
}
HOLDS: dict[str, Callable[[Header, bytes], bytes]] = {  # by itself such a header is right
    "integers": first(lambda t: t.update(dtype="I32")),
    "bits": first(lambda t: t.update(dtype="F4", shape=[8 * t["shape"][0], *t["shape"][1:]])),
    "another shape": first(lambda t: t.update(shape=[*t["shape"], 1])),
    "other names": lambda h, d: join({f"x{k}": v for k, v in h.items() if k != "__metadata__"}, d),
}


def boxed(edit: Callable[[int, int], tuple[str, list[int]]]) -> Callable[[Header, bytes], bytes]:
    """A matrix of a checkpoint gets another box and shape."""
    def work(header: Header, data: bytes) -> bytes:
        name = next(k for k, v in header.items() if len(v.get("shape", ())) == 2)
        text, shape = edit(*header[name]["shape"])
        return join({f"{k.rpartition('|')[0]}|{text}" if k == name else k: v | {"shape": shape} if k == name else v
                     for k, v in header.items()}, data)

    return work


BOXES = {
    "no box": boxed(lambda n, m: ("", [n, m])),
    "words": boxed(lambda n, m: ("a:b,c:d", [n, m])),
    "a smaller box": boxed(lambda n, m: (f"0:1,0:{m}", [n, m])),
    "a box without end": boxed(lambda n, m: (f"0:{1 << 80},0:{m}", [n, m])),
    "before the start": boxed(lambda n, m: (f"-1:{n - 1},0:{m}", [n, m])),
    "turned box": boxed(lambda n, m: (f"{n}:0,{m}:0", [n, m])),
    "another place": boxed(lambda n, m: (f"1:{n + 1},0:{m}", [n, m])),
    "fewer dimensions": boxed(lambda n, m: (f"0:{n * m}", [n * m])),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, a plan, and a run of it that stopped."""
    folder = tmp_path_factory.mktemp("weights")
    make_model(folder / "model")
    write_jsonl(folder / "sums.jsonl", make_sums(12))
    (folder / "p.rlf").write_text(PROGRAM.format(folder=folder))
    data = compile_program(folder / "p.rlf", {}, "cluster nodes=1 gpus=1\nplace *.* on mesh(0:1)\n", folder)
    (folder / "p.plan").write_bytes(data)
    assert run(data, folder / "out", stop_after=1) == [""]
    return folder


def confined() -> None:
    """What a file says must not become an allocation."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, resource.RLIM_INFINITY))


def code(work: Callable[[], Any]) -> str:
    try:
        work()
        return ""
    except Failure as failure:
        return failure.diagnostics[0].code


# --------------------------------------------------------------------------------------------------- a model


def _load(rank: int, program: str, model: str, texts: list[bytes]) -> list[tuple[str, str]]:
    """The codes of the compiler and of the run time for each text of the weights."""
    from rldsl.backends.torch import build

    from rldsl.plan.model import Layout, Mesh
    from rldsl.runtime.backend import Axes, Axis

    made, alone, found = plan_model(model), Axis((0,), 0, None), []
    confined()
    for text in texts:
        (Path(model) / "model.safetensors").write_bytes(text)
        found.append((code(lambda: api.compile(program, {})), code(lambda: build(
            made, Layout("L0", "m0"), Mesh("m0", ((0, 1),)), Axes(alone, alone, alone, alone, alone), torch.device("cpu"),
            load=True, trainable=False))))
    return found


@pytest.mark.thorough
def test_a_models_weights(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source / "model", tmp_path / "model")
    text = (source / "p.rlf").read_text()
    (tmp_path / "p.rlf").write_text(text.replace(str(source / "model"), str(tmp_path / "model")))
    edits = FILES | HOLDS
    texts = edited(tmp_path / "model/model.safetensors", edits)
    found = run_world(1, _load, str(tmp_path / "p.rlf"), str(tmp_path / "model"), texts)[0]
    for name, (compiled, loaded) in zip(edits, found, strict=True):
        expected = {"another shape": "RL0723", "other names": "RL0722"}.get(name, "RL0721")
        assert (name, loaded) == (name, expected) and compiled in ("", "RL0302"), name
    assert sum(bool(compiled) for compiled, _ in found) >= 8


def test_weights_that_are_no_file(source: Path, tmp_path: Path) -> None:
    """A pipe would never end."""
    shutil.copytree(source / "model", tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    weights.unlink()
    for make, remove in ((os.mkfifo, os.unlink), (os.mkdir, os.rmdir)):
        make(weights)
        with pytest.raises(Failure, match="RL0721 .*not a regular file"):
            open_file(weights)
        (tmp_path / "p.rlf").write_text(PROGRAM.format(folder=tmp_path))
        assert code(lambda: api.compile(str(tmp_path / "p.rlf"), {})) == "RL0302"
        remove(weights)


@pytest.mark.parametrize("text", ["", "[", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', "[" * 200_000,
                                  '{"weight_map": {"a": "../x.safetensors"}}', "\udcff"])
def test_an_index(source: Path, tmp_path: Path, text: str) -> None:
    shutil.copytree(source / "model", tmp_path / "model")
    (tmp_path / "model/model.safetensors.index.json").write_bytes(text.encode(errors="surrogateescape"))
    (tmp_path / "p.rlf").write_text(PROGRAM.format(folder=tmp_path))
    assert code(lambda: api.compile(str(tmp_path / "p.rlf"), {})) in ("", "RL0302")
    assert code(lambda: weight_files(str(tmp_path / "model"))) == "RL0721"


# ---------------------------------------------------------------------------------------------- a checkpoint

OTHERS = ("other names", "another place", "fewer dimensions")  # whole, and of another program


def _resume(rank: int, data: bytes, out: str, texts: list[tuple[bytes | None, bytes]]) -> list[str]:
    """The code for each pair of a file of tensors (None: as it was) and a manifest."""
    from rldsl.runtime.interpreter.interpreter import execute
    from rldsl.runtime.interpreter.options import Options
    from rldsl.runtime.plan_file import PlanFile

    held, found = next(Path(out).glob("checkpoints/*")), []
    file = next(held.glob("*.safetensors"))
    whole = file.read_bytes()
    confined()
    for tensors, manifest in texts:
        file.write_bytes(whole if tensors is None else tensors)
        (held / "checkpoint.json").write_bytes(manifest)
        found.append(code(lambda: execute(PlanFile.from_bytes(data, "p.plan"), out,
                                          options=Options(resume=held, continues=True))))
    return found


@pytest.fixture
def out(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source / "out", tmp_path / "out"))


def test_the_tensors_of_a_checkpoint(source: Path, out: Path) -> None:
    """The manifest says of them what is true."""
    file = next(out.glob("checkpoints/*/*.safetensors"))
    manifest = json.loads((file.parent / "checkpoint.json").read_text())
    edits, texts = FILES | HOLDS | BOXES, []
    for text in edited(file, edits):
        manifest["files"] = {file.name: {"bytes": len(text), "sha256": sha256(text).hexdigest()}}
        texts.append((text, signed(manifest)))
    found = run_world(1, _resume, (source / "p.plan").read_bytes(), str(out), texts)[0]
    for name, told in zip(edits, found, strict=True):
        assert (name, told) == (name, "RL0762" if name in OTHERS else "RL0761")


def signed(manifest: dict[str, Any]) -> bytes:
    """With the digest that fits, so that what is tested is everything else."""
    return manifest_text({k: v for k, v in manifest.items() if k != DIGEST}).encode()


MANIFESTS: dict[str, Any] = {
    "step": [-1, 1e400, 1 << 70, "1", None, [], True], "format": [1, 3, None, "1", []],
    "files": [[], None, "x", {"": {}}, {"..": {}}, {"../x": {"bytes": 0, "sha256": ""}}],
    "states": [[1], {"a": []}, {"a": 10**400}],
    "data": [{"sums": -5}, {"sums": 1 << 70}, {"sums": "1"}, {"sums": 0.5}, 3],
    "readings": [{"sums": 1}, {"sums": {}}, [1], {"sums": {"batch": 4}}],
    "models": [{"actor": {"done": -1, "made": 0}}, {"actor": {}}, {"actor": []}, {},
               {"actor": {"done": 1 << 70, "made": 1}}],
    "params": [[], None, 3], "sources": [None, 3, [1], {"p.rlf": 3}], "functions": [None, {"r.py": []}],
    "plan": [None, 3, {}], "seed": [..., None, "1", 1.0, True], "other": [1],
}


@pytest.mark.thorough
def test_the_manifest_of_a_checkpoint(source: Path, out: Path) -> None:
    true = json.loads(next(out.glob("checkpoints/*/checkpoint.json")).read_text())
    cases = [(name, value) for name, values in MANIFESTS.items() for value in values]
    edits = [{k: v for k, v in (true | dict([case])).items() if v is not ...} for case in cases]
    texts = [signed(edit) for edit in edits]
    texts += [b"", b"[]", b"{}", b"null", b'"x"', b"\xff\xfe", b"[" * 200_000, b"1" * 10_000, texts[0][:-9]]
    found = run_world(1, _resume, (source / "p.plan").read_bytes(), str(out), [(None, text) for text in texts])[0]
    told = dict(zip(map(repr, [*cases, *texts[len(cases):]]), found, strict=True))
    assert {case: code for case, code in told.items() if code != "RL0761"} == {}
    assert next(out.glob("checkpoints/*")).is_dir()
