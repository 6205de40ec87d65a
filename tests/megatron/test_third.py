"""A third backend of a hundred lines (`third/plain`), written as docs/backends.md says: nothing else knows its name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.plan import backends
from tests.end_to_end.test_invariance import placement
from tests.megatron.test_program import GRPO, alike, compiled
from tests.tiny import make_all, make_model
from tests.world import run_world

HERE = Path(__file__).parent / "third"
ROOT = HERE.parents[2]


@pytest.fixture(autouse=True)
def third() -> Iterator[None]:
    """As if it were installed beside the others."""
    import rldsl.backends

    rldsl.backends.__path__.append(str(HERE))
    backends.described.cache_clear()
    yield
    rldsl.backends.__path__.remove(str(HERE))
    backends.described.cache_clear()


def execute(rank: int, plans: list[bytes], out: str, cwd: str) -> None:
    import rldsl.backends
    from tests.megatron.test_program import execute as run

    rldsl.backends.__path__.append(str(HERE))
    run(rank, plans, out, cwd)


def test_it_is_short() -> None:
    assert sum(len(p.read_text().splitlines()) for p in HERE.rglob("*.py")) < 140
    assert "plain" in backends.names()


def test_it_trains_as_the_others_do(tmp_path: Path) -> None:
    import json
    import os

    from rldsl.runtime.metrics.names import computed

    tiny = make_all(tmp_path / "tiny", tie_word_embeddings=True)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    mesh, found = "on mesh(0:2)", []
    plans = [compiled(GRPO, sets, placement(2, **{"actor_*": f"{mesh} tp=2", "ref_*": f"{mesh} dp=2"}), tmp_path),
             compiled(GRPO, sets, placement(2, actor_generate=f"{mesh} tp=2", actor_train=f"{mesh} dp=2 backend=plain",
                                            **{"ref_*": f"{mesh} dp=2 backend=plain"}), tmp_path)]
    run_world(2, execute, plans, str(tmp_path / "out"), os.getcwd(), timeout=240.0)
    for i in range(2):
        lines = [json.loads(x) for x in (tmp_path / f"out/{i}/metrics.jsonl").read_text().splitlines()]
        found.append([{k: line[k] for k in computed(line)} for line in lines])
    alike(found[1], found[0])


def refused(folder: Path, model: str, call: str) -> Any:
    (folder / "p.rlf").write_text(f'data rows = jsonl("prompts.jsonl", batch=4)\n{model}\nflow run(steps=1) {{\n'
                                  f"  p = rows.next()\n  {call}\n  metric x = mean(x)\n}}\n")
    with pytest.raises(Failure) as caught:
        api.compile(str(folder / "p.rlf"), {}, None)
    (d,) = caught.value.diagnostics
    return d.code, d.label


@pytest.mark.parametrize("model, call, words", [
    ('model m = causal_lm("PATH")', "g = m.generate(p) on mesh(0:2) dp=2 backend=plain\n  x = g.logprobs",
     "no `generate`"),
    ('model m = causal_lm("PATH")',
     "g = m.generate(p) on mesh(0:2) dp=2\n  x = m.logprobs(g) on mesh(0:2) tp=2 backend=plain", "no `tp`"),
    ('model m = causal_lm("PATH")\nmodel j = reward_model("RM")',
     "g = m.generate(p)\n  x = j.score(g) on mesh(0:2) dp=2 backend=plain", "the head of a reward_model")])
def test_what_it_cannot_do_is_refused(model: str, call: str, words: str, tmp_path: Path) -> None:
    text = model.replace("PATH", str(make_model(tmp_path / "m")))
    if "RM" in text:
        text = text.replace("RM", str(make_model(tmp_path / "rm", head="reward_model")))
    code, label = refused(tmp_path, text, call)
    assert code == "RL0327" and words in label


@pytest.mark.parametrize("name", ["torch", "megatron"])
def test_descriptions_are_light(name: str) -> None:
    """What the compiler imports of a backend imports neither torch nor the library behind it."""
    code = (f"import sys; from rldsl.plan.backends import described; assert described({name!r}) is not None; "
            "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'megatron', 'transformers'}))")
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "[]"


def test_no_backend_is_known_by_name() -> None:
    """Neither the compiler nor the plan nor the runtime asks which backend it is; the usual one is named once."""
    found = []
    for top in ("graph", "placement", "passes", "plan", "runtime", "simulate", "semantics"):
        for file in (ROOT / "rldsl" / top).rglob("*.py"):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if 'megatron' in line or 'backend == "torch"' in line or 'backend != "torch"' in line:
                    found.append(f"{file.name}:{number}: {line.strip()}")
    assert not [x for x in found if "arXiv" not in x and "#" not in x], found
