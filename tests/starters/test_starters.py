"""`rlc new`: every starter is right as it stands, explains itself, and does what its comments say."""

from __future__ import annotations

import json
import os
import re
import string
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl import api, starters
from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.plan.codec import encode
from rldsl.source import SourceFile
from rldsl.starters import presets
from rldsl.starters.presets import PRESETS
from rldsl.syntax import ast
from rldsl.syntax.format import format
from rldsl.syntax.parse import parse
from rldsl.verify import verify
from tests.end_to_end.programs import run_program
from tests.samples import thorough_between
from tests.tiny import CHAT_TEMPLATE, make_model, make_pairs, make_sums, make_tokenizer, write_jsonl

NAMES = starters.names()
MODELS = ("sft", "base", "teacher", "rm", "rm_start", "chat")
SEVEN_B = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
               num_key_value_heads=4, vocab_size=152064, max_position_embeddings=32768, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with everything that the starters name."""
    root = tmp_path_factory.mktemp("starters")
    for name in MODELS:
        chat = dict(characters=string.printable, chat=CHAT_TEMPLATE, max_position_embeddings=8192)
        make_model(root / "models" / name, head="reward" if "rm" in name else "causal_lm", num_key_value_heads=4,
                   **(chat if name == "chat" else {}))
    write_jsonl(root / "data/prompts.jsonl", make_sums(32))
    write_jsonl(root / "data/answers.jsonl", make_sums(32))
    write_jsonl(root / "data/pairs.jsonl", make_pairs(32))
    for name in NAMES:
        rlc("new", name, "-o", str(root))
    return root


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of 7B models without the weights: enough for the compiler."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    root = tmp_path_factory.mktemp("seven")
    config = AutoConfig.for_model("qwen2", **SEVEN_B, num_labels=1)
    for name in MODELS:
        kind = AutoModelForSequenceClassification if "rm" in name else AutoModelForCausalLM
        with torch.device("meta"):
            weights = [key for key, _ in kind.from_config(config).named_parameters()]
        make_tokenizer(root / "models" / name)
        config.save_pretrained(root / "models" / name)
        (root / "models" / name / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}))
    for name in NAMES:
        rlc("new", name, "-o", str(root))
    return root


def rlc(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def source(name: str) -> SourceFile:
    return SourceFile(f"{name}.rlf", starters.text(name))


@pytest.mark.parametrize("name", NAMES)
def test_is_formatted_and_commented(name: str) -> None:
    text = starters.text(name)
    assert format(source(name)) == text
    assert max(map(len, text.split("\n"))) <= 120
    assert re.fullmatch(r"# [A-Z][^.]*\.", text.split("\n")[0]) and len(starters.line(name)) <= 110
    for command in (f"rlc check {name}.rlf", f"rlc compile {name}.rlf", f"rlc run {name}.rlf --out runs/{name}"):
        assert f"#   {command} " in text
    assert f'#   rlc run {name}.rlf --set gpus=1 --on "*.* on mesh(0:1)"' in text


@pytest.mark.parametrize("name", NAMES)
def test_every_param_is_explained_and_paths_are_params(name: str) -> None:
    file = parse(source(name))
    for item in file.items:
        if isinstance(item, ast.Param) and item.name.name != "gpus":
            assert re.search(r"  # \S", file.source.line(item.span.line)), f"`param {item.name.name}` has no comment"
    strings = re.findall(r'^(?!use|#|param)[^#\n]*"', starters.text(name), re.MULTILINE)
    assert not strings, f"a path that is not a param: {strings}"
    assert {"base", "rows"} <= {i.name.name for i in file.items if isinstance(i, ast.Param)}


@pytest.mark.parametrize("name", NAMES)
def test_check_finds_nothing(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    result = rlc("check", "--strict", f"{name}.rlf")
    assert (result.exit_code, result.output) == (0, f"{name}.rlf: no errors found\n")


@pytest.mark.parametrize("name", thorough_between(NAMES))
def test_compiles_to_a_verified_plan(name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    plan = api.compile(f"{name}.rlf")
    assert plan.header.world == 8 and verify(plan).events
    laptop = api.compile(f"{name}.rlf", {"gpus": 1}, overrides=["*.* on mesh(0:1)"])
    assert laptop.header.world == 1 and verify(laptop).events
    assert encode(plan) != encode(laptop)


@pytest.mark.parametrize("name", thorough_between(NAMES))
def test_seven_billion_parameters_fit(name: str, seven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(seven)
    assert "this placement fits 7B" in starters.text(name)
    api.compile(f"{name}.rlf")  # RL0401 otherwise
    with pytest.raises(Failure) as caught:
        api.compile(f"{name}.rlf", {"gpus": 1}, overrides=["*.* on mesh(0:1)"])
    assert caught.value.diagnostics[0].code == "RL0401"


@pytest.mark.parametrize("name", thorough_between(NAMES))
def test_runs(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny)
    known = {"gpus": 1, "batch": 4, "steps": 2, "new_tokens": 4, "group": 2}
    sets = {k: v for k, v in known.items() if f"param {k} " in starters.text(name)}
    rows = run_program(Path(f"{name}.rlf"), sets, tmp_path, "place *.* on mesh(0:1)\n")
    assert len(rows) == 2 and all(abs(value) < 1e6 for row in rows for value in row.values())


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_base_with_another_algorithm(name: str) -> None:
    """Few lines differ, nothing names the base, and a base that changed under it is seen."""
    base, mine = starters.text(PRESETS[name].base).splitlines(), starters.text(name).splitlines()
    assert 2 <= len(set(mine) - set(base)) <= 14 and len(set(mine) & set(base)) > 15
    assert not re.search(rf"\b{PRESETS[name].base}\.rlf", "\n".join(mine))
    with pytest.raises(ValueError, match="must contain this once"):
        presets.text(name, starters.text("sft"))


def test_list() -> None:
    result = rlc("new")
    assert result.exit_code == 0
    assert [row.split()[0] for row in result.output.splitlines()] == list(NAMES)
    assert {"ppo", "grpo", "dpo", "sft", "rloo", "reward_model"} <= set(NAMES) and len(NAMES) - len(PRESETS) <= 16
    assert {"agent", "async", "dapo_async", "self_rewarding", "replay", "vineppo"} <= set(NAMES)


def test_writes_the_python_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "wrote grpo.rlf and rewards.py; next: rlc check grpo.rlf" in rlc("new", "grpo").output
    (tmp_path / "rewards.py").write_text("mine")
    result = rlc("new", "grpo", "--force")
    assert result.exit_code == 0 and "rewards.py" not in result.output
    assert (tmp_path / "rewards.py").read_text() == "mine"
    (tmp_path / "sub").mkdir()
    assert rlc("new", "grpo", "-o", "sub/mine.rlf").exit_code == 0
    assert sorted(os.listdir("sub")) == ["mine.rlf", "rewards.py"]
    text = (tmp_path / "sub/mine.rlf").read_text()
    assert "rlc check sub/mine.rlf" in text and " grpo.rlf" not in text


def test_the_agent_has_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is right, and is what the environment rewards."""
    monkeypatch.chdir(tmp_path)
    assert rlc("new", "agent").exit_code == 0
    assert sorted(os.listdir()) == ["agent.rlf", "envs.py", "tasks.jsonl"]
    scope: dict = {}
    exec(Path("envs.py").read_text(), scope)
    rows = [json.loads(line) for line in Path("tasks.jsonl").read_text().splitlines()]
    assert len(rows) == 64
    for row in rows:
        a, b, c = (int(x) for x in re.findall(r"\d+", row["prompt"]))
        env = scope["Calculator"]()
        env.reset(**row)
        assert env.get_reward() == 0
        env.submit(env.multiply(env.add(a, b), c))
        env.submit(0)
        assert env.get_reward() == 1


def test_the_python_is_right(tiny: Path) -> None:
    scope: dict = {}
    exec((tiny / "rewards.py").read_text(), scope)
    rows = [{"completion": " 46 ", "answer": 46}, {"completion": "45", "answer": "46"}]
    assert scope["exact_match"](rows) == [1.0, 0.0]
    exec((tiny / "judge.py").read_text(), scope)
    said = ["Clear.\nScore: 4", "score: 2, no: Score: 3", "Score: 10", "great", "Score: 7"]
    assert scope["points"]([{"completion": x} for x in said]) == [4.0, 3.0, -1.0, -1.0, -1.0]
    (asked,) = scope["review"]([{"prompt": "2+2=", "completion": "{4}"}])
    assert "Question: 2+2=\nResponse: {4}\n" in asked and asked.endswith("Review: ")


def test_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert rlc("new", "ppo", "-o", "-").output == starters.text("ppo")
    assert not list(tmp_path.iterdir())


def test_does_not_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ppo.rlf").write_text("mine")
    result = rlc("new", "ppo")
    assert result.exit_code == 1 and "RL0094" in result.stderr and "--force" in result.stderr
    assert rlc("new", "ppo", "-o", ".").exit_code == 1
    assert (tmp_path / "ppo.rlf").read_text() == "mine"
    assert rlc("new", "ppo", "--force").exit_code == 0
    assert (tmp_path / "ppo.rlf").read_text() == starters.text("ppo")


@pytest.mark.parametrize("name, words", [
    ("pppo", "did you mean ppo?"), ("reward-model", "did you mean reward_model?"), ("GRPO", "did you mean grpo?"),
    ("zzz", "starters: "), ("../ppo", "no such starter"), ("", "no such starter"), ("rewards", "no such starter")])
def test_unknown_names(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = rlc("new", name)
    assert result.exit_code == 2 and words in result.output and not list(tmp_path.iterdir())


def test_a_place_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = rlc("new", "ppo", "-o", "nowhere/ppo.rlf")
    assert result.exit_code == 1 and "RL0094" in result.stderr
