"""What `rlc search`, `rlc explain-placement` and their neighbors refuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.samples import thorough_between
from tests.search.commands import EIGHT, PROGRAM, folder, rlc


@pytest.mark.parametrize("args, status, word", thorough_between([
    (("grpo.rlf",), 2, "--cluster"),
    (("none.rlf", "--cluster", "two.yaml"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "h10x8"), 1, "did you mean `h100x8`"),
    (("grpo.rlf", "--cluster", "none.yaml"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "bare.yaml"), 1, "RL0215"),
    (("grpo.rlf", "--cluster", "two.yaml", "--place", "none.rlf"), 1, "RL0091"),
    (("grpo.rlf", "--cluster", "two.yaml", "--on", "ref.* on"), 1, "RL00"),
    (("grpo.rlf", "--cluster", "two.yaml", "--on", "critic.* on mesh(0:2)"), 1, "RL0313"),
    (("grpo.rlf", "--cluster", "two.yaml", "--set", "batch=x"), 1, "RL0"),
    (("grpo.rlf", "--cluster", "two.yaml", "--seconds", "0"), 2, "--seconds"),
    (("grpo.rlf", "--cluster", "two.yaml", "--memory", "-1"), 2, "--memory"),
    (("grpo.rlf", "--cluster", "two.yaml", "--gap", "-0.1"), 2, "--gap"),
    (("grpo.rlf", "--cluster", "two.yaml", "--memory", "0.5"), 1, "RL0402"),
    (("grpo.rlf", "--cluster", "two.yaml", "--response-tokens", "0"), 2, "--response-tokens")]))
@pytest.mark.parametrize("command", ["search", "explain-placement"])
def test_mistakes(command: str, args: tuple[str, ...], status: int, word: str) -> None:
    said = rlc(command, *args)
    assert said.exit_code == status and word in said.output and "Traceback" not in said.output, said.output


@pytest.mark.parametrize("args, word", [
    (("--lock", "critic.*"), "calls of the program: actor.generate"), (("--lock", ""), "RL0313"),
    (("-o", "none/p.rlf"), "RL0094"),
    (("--lock", "actor.train", "--on", "actor.train on mesh(0:9)"), "RL0305"),
    (("--lock", "actor.train", "--on", "actor.train on mesh(0:2) tp=3"), "RL0304")])
def test_mistakes_of_a_search(args: tuple[str, ...], word: str) -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", *args)
    assert said.exit_code == 1 and word in said.output and "Traceback" not in said.output, said.output


def test_too_small_a_cluster_says_how_many_nodes_it_would_take() -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", "10")
    assert said.exit_code == 1 and "RL0402" in said.output
    assert "2 devices of" in said.output and "the smallest cluster that fits:" in said.output, said.output
    gib = float(re.search(r"With about ([\d.]+) GiB on each device", said.output)[1])  # type: ignore[index]
    for gb, fits in ((gib * 1.0738, True), (gib * 1.0737 / 1.06, False)):
        again = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", f"{gb:.3f}")
        assert (again.exit_code == 0) == fits and ("RL0402" in again.output) != fits, again.output


@pytest.mark.parametrize("option, value", [
    ("--gap", "nan"), ("--gap", "inf"), ("--seconds", "nan"), ("--seconds", "inf"), ("--memory", "nan"),
    ("--memory", "inf"), ("--memory", "1e300"), ("--memory", "1e-300"), ("--memory", "0.9e-9"), ("--memory", "0")])
def test_numbers_that_are_none_are_refused(folder: Path, option: str, value: str) -> None:
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", option, value)
    assert said.exit_code == 2 and f"'{option}'" in said.output, said.output
    assert not (folder / "grpo.place.rlf").exists()


@pytest.mark.parametrize("arguments", [
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "grpo.rlf"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "two.yaml"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "./grpo.rlf"),
    ("search", "grpo.rlf", "--cluster", "two.yaml", "-o", "link.rlf"),
    ("compile", "grpo.rlf", "-o", "grpo.rlf"),
    ("compile", "grpo.rlf", "--place", "two.rlf", "-o", "two.rlf"),
    ("sim", "grpo.rlf", "--cluster", "two.yaml", "--trace", "grpo.rlf"),
    ("sim", "grpo.rlf", "--cluster", "two.yaml", "--trace", "two.yaml"),
    ("profile", "grpo.rlf", "-o", "grpo.rlf")])
def test_no_output_replaces_what_the_command_reads(folder: Path, arguments: tuple[str, ...]) -> None:
    (folder / "two.rlf").write_text("place * on mesh(0:2) dp=2\n")
    (folder / "link.rlf").symlink_to("grpo.rlf")
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    said = rlc(*arguments)
    assert said.exit_code == 1 and "error[RL0094]" in said.output and "this command reads it" in said.output
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


@pytest.mark.parametrize("command", ["search", "explain-placement"])
@pytest.mark.parametrize("mode", ["heuristic", "d2"])
def test_a_mode_is_no_file_of_rules(folder: Path, command: str, mode: str) -> None:
    said = rlc(command, "grpo.rlf", "--cluster", "two.yaml", "--place", mode)
    assert said.exit_code == 2 and f"`{mode}` is a mode" in said.output, said.output
    assert "FILE|MODE" not in rlc(command, "--help").output


@pytest.mark.parametrize("memory", ["1e-12", "1e300", "0"])
def test_a_program_has_at_least_a_byte_of_memory_and_a_finite_number(folder: Path, memory: str) -> None:
    (folder / "grpo.rlf").write_text(PROGRAM.replace(EIGHT, f"cluster nodes=1 gpus=8 memory_gb={memory}\n"))
    said = rlc("compile", "grpo.rlf")
    assert said.exit_code == 1 and "error[RL0205]" in said.output and "`memory_gb`" in said.output, said.output


@pytest.mark.parametrize("options, said", [
    (("--response-tokens", "513"), "no row can have responses of 513 tokens on average"),
    (("--prompt-tokens", "1e9"), "no row can have prompts of 1e+09 tokens on average"),
    (("--longest", "600"), "no row can have a longest response of 600 tokens"),
    (("--response-tokens", "300", "--longest", "200"), "cannot have 200 tokens where the mean is 300")])
@pytest.mark.parametrize("command", ["search", "explain-placement", "sim"])
def test_lengths_that_no_row_can_have(command: str, options: tuple[str, ...], said: str) -> None:
    found = rlc(command, "grpo.rlf", "--cluster", "two.yaml" if command != "sim" else "h100x8",
                *(("--on", "actor.train mbs=16") if command == "sim" else ()), *options)
    assert found.exit_code == 1 and "RL0205" in found.output and said in found.output, found.output


@pytest.mark.parametrize("options", [("--response-tokens", "inf"), ("--longest", "nan"), ("--prompt-tokens", "0")])
def test_lengths_that_are_no_numbers(options: tuple[str, ...]) -> None:
    assert rlc("search", "grpo.rlf", "--cluster", "two.yaml", *options).exit_code == 2
