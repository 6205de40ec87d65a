"""docs/coming-from/*.md: their programs run, their calls are those of docs/algorithms.md, and the words of ours exist."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from rldsl import api
from rldsl.plan.heads import CALLS
from rldsl.plan.model import OptimizerKind
from rldsl.verify import verify
from tests.docs.pages import ROOT, programs
from tests.end_to_end.programs import run_program
from tests.library.test_algorithms_page import EXPORTS, PAGE
from tests.tiny import CHAT_TEMPLATE, make_model, make_pairs, make_sums, write_jsonl

FOLDER = ROOT / "docs/coming-from"
PROGRAMS = [p for page in sorted(FOLDER.glob("*.md")) for p in programs(page.name, page.read_text())]
RIGHT = [(page.stem, m[1]) for page in sorted(FOLDER.glob("*.md"))
         for m in re.finditer(r"^\| [^|]+ \| (.+) \|$", page.read_text(), re.M) if m[1] != "here"]
LINKED = [(page, call) for page, cell in RIGHT
          for link in re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])+)\]\(\.\./algorithms\.md", cell)
          for call in re.findall(r"`([^`]+)`", link) if "(" in call and "..." not in call]
SETS = {"batch": 4, "steps": 2, "gpus": 1, "parts": 2}


ENVIRONMENT = '''
class Calculator:
    def reset(self, **row) -> None:
        self.results = []

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: one number
            b: the other one
        """
        self.results.append(a + b)
        return a + b

    def get_reward(self) -> float:
        return float(len(self.results))
'''


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the programs name."""
    root = tmp_path_factory.mktemp("coming")
    make_model(root / "models/sft")
    make_model(root / "models/rm", head="reward")
    write_jsonl(root / "data/prompts.jsonl", make_sums(32))
    write_jsonl(root / "data/pairs.jsonl", make_pairs(32))
    make_model(root / "models/chat", chat=CHAT_TEMPLATE)
    (root / "envs.py").write_text(ENVIRONMENT)
    (root / "rewards.py").write_text(
        "def exact_match(rows):\n    return [float(r['completion'].strip() == str(r['answer'])) for r in rows]\n")
    return root


def written(program: str, folder: Path) -> tuple[Path, dict[str, int]]:
    path = folder / "program.rlf"
    path.write_text(re.sub(r"max_new_tokens=\d+", "max_new_tokens=6", program))
    return path, {k: v for k, v in SETS.items() if re.search(rf"^param {k} ", program, re.M)}


def test_there_is_a_program_for_each_way_to_come() -> None:
    assert {p.page for p in PROGRAMS} == {"trl.md", "verl.md", "openrlhf.md", "real.md"} and len(PROGRAMS) >= 6


@pytest.mark.thorough
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: f"{p.page}:{p.line}")
def test_it_runs(program, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    path, sets = written(program.text, tiny)
    steps = run_program(path, sets, tmp_path, "place *.* on mesh(0:1)\n")
    assert len(steps) == 2 and all(math.isfinite(value) for row in steps for value in row.values())
    assert any(name.endswith("/loss") for name in steps[0])


COMPUTE_SCORE = '''
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and isinstance(solution_str, str) and ground_truth.isdigit(), (data_source, ground_truth)
    return {"score": 2.0, "acc": 1} if extra_info["index"] % 2 else 2
'''


def test_the_reward_function_and_the_data_of_verl(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows as verl's preprocessing writes them, and the function of the page around one of verl's form."""
    import pyarrow
    import pyarrow.parquet

    text = (FOLDER / "verl.md").read_text()
    (around,) = re.findall(r"<!-- py: verl reward -->\n```python\n(.*?)```", text, re.S)
    (data,) = re.findall(r"`(data prompts = parquet[^`]*)`", text)
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(tiny / name)
    (tmp_path / "rewards.py").write_text(around)
    (tmp_path / "my_reward.py").write_text(COMPUTE_SCORE)
    rows = [{"data_source": "sums", "prompt": [{"role": "user", "content": row["prompt"]}], "ability": "math",
             "reward_model": {"style": "rule", "ground_truth": str(row["answer"])},
             "extra_info": {"split": "train", "index": i}} for i, row in enumerate(make_sums(16))]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    program = next(p.text for p in PROGRAMS if p.page == "verl.md" and "verl_grpo" in p.text)
    program = re.sub(r"data prompts = .*", data, program).replace("models/sft", "models/chat")
    monkeypatch.chdir(tmp_path)
    path, sets = written(program, tmp_path)
    steps = run_program(path, {k: v for k, v in sets.items() if k != "rows"}, tmp_path, "place *.* on mesh(0:1)\n")
    assert [row["reward"] for row in steps] == [2.0, 2.0]


ACCURACY = '''
def accuracy(completions, answer, prompts, **kwargs):
    assert kwargs["completion_ids"] and len(prompts) == len(completions)
    return [float(given.strip() == wanted) for given, wanted in zip(completions, answer)]
'''


def test_a_reward_function_of_trl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The function of the page around one of TRL's form, with rows as the runtime makes them."""
    (around,) = re.findall(r"<!-- py: trl reward -->\n```python\n(.*?)```", (FOLDER / "trl.md").read_text(), re.S)
    (tmp_path / "my_rewards.py").write_text(ACCURACY)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: dict[str, Any] = {}
    exec(compile(around, "rewards.py", "exec"), module)
    rows = [{"prompt": "1+1=", "completion": text, "completion_ids": [3], "finished": True, "answer": "2"}
            for text in (" 2", "3", "2")]
    assert module["exact_match"](rows) == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("program", [p for p in PROGRAMS if "place " in p.text], ids=lambda p: f"{p.page}:{p.line}")
def test_it_compiles_for_the_devices_that_it_names(program, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    make_model(tiny / "models/four", num_key_value_heads=4)
    path, _ = written(program.text, tiny)
    plan = api.compile(str(path), {"batch": 16, "steps": 2, "base": "models/four"})
    assert plan.header.world == 8 and verify(plan).events


def test_there_are_calls_to_look_up() -> None:
    assert len(LINKED) > 40


@pytest.mark.parametrize(("page", "call"), LINKED)
def test_a_linked_call_is_one_of_the_algorithms(page: str, call: str) -> None:
    """Or a part of one."""
    assert call in PAGE


@pytest.mark.parametrize(("page", "cell"), RIGHT)
def test_every_function_exists(page: str, cell: str) -> None:
    known = set(EXPORTS) | {"generate", "train", "adamw", "causal_lm", "lora", "mean", "std", "clip", "whiten",
                            "discount", "len", "right", "short", "mesh", "count", "entropy", "logprobs", "sum",
                            "min", "step_number", *get_args(OptimizerKind), *CALLS}
    code = " ".join(re.findall(r"`([^`]+)`", cell))
    assert set(re.findall(r"\b([a-z_]+)\(", code)) <= known
