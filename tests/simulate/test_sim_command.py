"""`rlc sim` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rldsl.cli import main
from rldsl.plan.codec import encode
from tests.simulate.plans import plan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "ppo.plan").write_bytes(encode(plan()))
    (tmp_path / "two.yaml").write_text("preset: h100x8\nnodes: 2\n")
    (tmp_path / "small.yaml").write_text("preset: h100x8\ngpus: 4\n")
    (tmp_path / "bare.yaml").write_text("gpus: 8\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sim(*args: str) -> Result:
    return CliRunner().invoke(main, ["sim", *args])


def test_text(folder: Path) -> None:
    said = sim("ppo.plan", "--cluster", "h100x64.yaml")
    assert said.exit_code == 0, said.output
    for word in ("ppo.plan on h100x64: 8 of 64 devices", "step", "tokens/s", "16 x (8 + 16) tokens (maximum lengths)",
                 "actor.generate",
                 "mesh(0:8) dp=4 pp=2", "ppo.rlf:2", "idle", "ranks 0-7", "critical path", "not measured: actor"):
        assert word in said.output, word
    assert all(len(line) <= 120 for line in said.output.splitlines())
    lines = said.output.partition("critical path")[2].splitlines()
    shares = [int(w[:-1]) for line in lines for w in line.split() if w.endswith("%") and "communication" not in line]
    assert 95 <= sum(shares) <= 105


def test_json_is_the_same(folder: Path) -> None:
    found = json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json").output)
    assert found["format"] == 1 and found["cluster"] == "two" and found["tokens"] == 16 * 24
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / found["seconds"])
    assert sum(p["seconds"] for p in found["critical"]) == pytest.approx(found["seconds"])
    assert {c["call"] for c in found["calls"]} == {"actor.generate", "judge.score", "ref.logprobs", "critic.values",
                                                   "critic.train",
                                                   "actor.train"}
    assert all(0 <= i["share"] < 1 for i in found["idle"]) and found["spans"] and found["estimated"]


def test_a_device_that_is_too_small_is_named(folder: Path) -> None:
    peak = json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json").output)["peak_bytes"]
    text = (folder / "two.yaml").read_text()
    assert peak > 0 and "memory_gb" not in text
    for memory, fits in ((2 * peak, True), (peak // 2, False)):
        (folder / "other.yaml").write_text(f"{text}\nmemory_gb: {memory / 1e9:.9f}\n")
        said = sim("ppo.plan", "--cluster", "other.yaml").output
        assert ("on the fullest rank: it does not fit, a device of" in said) is not fits, said
        found = json.loads(sim("ppo.plan", "--cluster", "other.yaml", "--json").output)
        assert found["peak_bytes"] == peak and found["memory_bytes"] == pytest.approx(memory, abs=1)


def test_lengths_and_trace(folder: Path) -> None:
    full, short = (json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json", *more).output)
                   for more in ((), ("--prompt-tokens", "4", "--response-tokens", "5", "--longest", "8",
                                     "--trace", "t.json")))
    assert short["seconds"] < full["seconds"] and short["tokens"] == 16 * 9
    assert json.loads((folder / "t.json").read_text())["otherData"]["what"] == "simulated"
    line = {"step": 1, "length/response": 5.0, "seconds": 1, "tokens_per_second": 144}
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json", "--lengths", ".").output)["tokens"] == 144


@pytest.mark.parametrize("args, status, word", [
    (("ppo.plan",), 2, "--cluster"), (("none.plan", "--cluster", "h100x8"), 1, "RL0091"),
    (("ppo.plan", "--cluster", "h10x8"), 1, "did you mean `h100x8`"),
    (("ppo.plan", "--cluster", "small.yaml"), 1, "RL0096"),
    (("ppo.plan", "--cluster", "bare.yaml"), 1, "missing, or 0: bfloat16_tflops"),
    (("ppo.plan", "--cluster", "ppo.plan"), 1, "RL0"),
    (("ppo.plan", "--cluster", "h100x8", "--set", "lr=1"), 2, "apply to programs"),
    (("ppo.plan", "--cluster", "h100x8", "--lengths", "nowhere"), 1, "RL0091"),
    (("ppo.plan", "--cluster", "h100x8", "--lengths", ".", "--prompt-tokens", "3"), 2, "omit --prompt-tokens"),
    (("ppo.plan", "--cluster", "h100x8", "--prompt-tokens", "-3"), 2, "-3"),
    (("ppo.plan", "--cluster", "h100x8", "--trace", "none/t.json"), 1, "RL0094"),
    (("two.yaml", "--cluster", "h100x8"), 1, "RL0")])
def test_mistakes(folder: Path, args: tuple[str, ...], status: int, word: str) -> None:
    said = sim(*args)
    assert said.exit_code == status and word in said.output and "Traceback" not in said.output, said.output


def test_messages_for_programs(folder: Path) -> None:
    said = CliRunner().invoke(main, ["sim", "ppo.plan", "--cluster", "bare.yaml", "--output-format", "json"])
    assert json.loads(said.stdout)["diagnostics"][0]["code"] == "RL0215" and said.exit_code == 1


def test_known_durations(folder: Path) -> None:
    """A call takes what is said, and everything else what it takes without; nothing is said to be predicted of it."""
    plain, given = (json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json", *more).output) for more in (
        (), ("--duration", "actor.generate=100", "--duration", "critic.train=0")))
    before, after = ({c["call"]: c["seconds"] for c in found["calls"]} for found in (plain, given))
    assert after["actor.generate"] == pytest.approx(100, rel=1e-3)
    assert after["critic.train"] < 1e-3 < before["critic.train"]  # what is left is waiting
    assert 100 < given["seconds"] and given["given"] == {"actor.generate": 100.0, "critic.train": 0.0}
    assert plain["given"] == {}
    assert "given, not predicted: actor.generate" in sim("ppo.plan", "--cluster", "two.yaml", "--duration",
                                                         "actor.generate=1").output


@pytest.mark.parametrize("name, why", [("actor.generat", "did you mean `actor.generate`?"), ("gradient", "`critic.train`"),
                                       ("actor.generate=-1", "not -1.0"), ("actor.generate=nan", "not nan"),
                                       ("actor.generate=inf", "not inf"), ("actor.generate=2e12", "to 1e+12")])
def test_durations_that_are_none(folder: Path, name: str, why: str) -> None:
    said = sim("ppo.plan", "--cluster", "two.yaml", "--duration", name if "=" in name else f"{name}=1")
    assert said.exit_code == 1 and "RL0205" in said.output and why in said.output, said.output


@pytest.mark.parametrize("text, why", [("actor.generate=soon", "not a number of seconds"), ("3", "NAME=VALUE"),
                                       ("=3", "NAME=VALUE")])
def test_durations_that_cannot_be_read(folder: Path, text: str, why: str) -> None:
    said = sim("ppo.plan", "--cluster", "two.yaml", "--duration", text)
    assert said.exit_code == 2 and why in said.output


def test_a_duration_by_the_name_of_a_result(folder: Path) -> None:
    """`gen` is the call that generates it alone; `actor.generate` all calls that are called so."""
    by_call, by_result = (json.loads(sim("ppo.plan", "--cluster", "two.yaml", "--json", "--duration", name).output)
                          for name in ("actor.generate=7", "gen=7"))
    assert by_call["seconds"] == by_result["seconds"] > 7
    both = sim("ppo.plan", "--cluster", "two.yaml", "--duration", "actor.generate=7", "--duration", "gen=5")
    assert both.exit_code == 1 and "RL0205" in both.output and "are the same call" in both.output


def test_mistakes_of_the_cluster_come_first(folder: Path) -> None:
    said = sim("missing.rlf", "--cluster", "missing.yaml")
    assert said.exit_code == 1 and "no such file: missing.yaml" in said.output
