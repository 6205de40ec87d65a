"""A third backend (`third/plain`), written as docs/backends.md says: nothing else knows its name."""

from __future__ import annotations

import re
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
from tests.megatron import programs
from tests.megatron.programs import GRPO, alike, compiled, results
from tests.tiny import make_all, make_model

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


def execute(rank: int, *given: Any) -> Any:
    import rldsl.backends

    rldsl.backends.__path__.append(str(HERE))
    return programs.execute(rank, *given)


def test_it_is_short() -> None:
    assert sum(len(p.read_text().splitlines()) for p in HERE.rglob("*.py")) < 140
    assert "plain" in backends.names()


def test_it_has_what_the_protocol_asks_for() -> None:
    """But for the call that its description leaves out."""
    from rldsl.backends.plain import Plain, build

    from rldsl.runtime.backend import Shard

    asked = {name for name in vars(Shard) if not name.startswith("_")}
    assert asked - set(vars(Plain)) == {"generate"} and callable(build)


def test_it_trains_as_the_others_do(tmp_path: Path) -> None:
    tiny = make_all(tmp_path / "tiny", tie_word_embeddings=True, num_hidden_layers=2)
    sets = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")}
    mesh = "on mesh(0:2)"
    plans = [compiled(GRPO, sets, placement(2, **{"actor_*": f"{mesh} tp=2", "ref_*": f"{mesh} dp=2"}), tmp_path),
             compiled(GRPO, sets, placement(2, actor_generate=f"{mesh} tp=2", actor_train=f"{mesh} dp=2 backend=plain",
                                            **{"ref_*": f"{mesh} dp=2 backend=plain"}), tmp_path)]
    (usual, drawn), (plain, sampled) = results(plans, tmp_path, 2, execute)
    alike(plain, usual)
    assert drawn and sampled == drawn


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
    """Nothing asks which backend it is; the usual one is named once."""
    asking = re.compile(r"""\bmegatron\b|\bbackend\b\s*(?:[!=]=|\bin\b)\s*["'(\[]|=\s*"torch"$""")
    found = [f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
             for file in sorted((ROOT / "rldsl").rglob("*.py"))
             for number, line in enumerate(file.read_text().splitlines(), 1)
             if asking.search(line.partition("  # ")[0])]
    assert [x.partition(": ")[2] for x in found] == ['DEFAULT_BACKEND = "torch"  # where a layout names none'], found
