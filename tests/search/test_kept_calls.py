"""Calls that `rlc search` leaves where the program, a rule or the command line has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.search.commands import PROGRAM, folder, rlc, searched


def test_a_lock_keeps_a_call_where_the_program_has_it(folder: Path) -> None:
    (folder / "own.rlf").write_text(PROGRAM + "place ref.* on mesh(1:2) mbs=4\n")
    free = json.loads(searched("--json", program="own.rlf"))
    kept = json.loads(searched("--json", "--lock", "ref.*", program="own.rlf"))
    (ref,) = [c for c in kept["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert ref["ranks"] == [1, 2] and ref["how"] == "dp=1 mbs=4" and "as in the program" in ref["why"]
    assert kept["best"][0]["seconds"] >= free["best"][0]["seconds"] * (1 - 1e-9)


def test_a_mesh_on_the_command_line_keeps_a_call(folder: Path) -> None:
    """As when compiling; a rule without a mesh says what may be tried, and a comparison frees all calls."""
    found = json.loads(searched("--json", "--on", "ref.* on mesh(1:2) mbs=4"))
    (ref,) = [c for c in found["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert ref["ranks"] == [1, 2] and ref["how"] == "dp=1 mbs=4" and "as in the program" in ref["why"]
    assert "place ref.logprobs" in (folder / "grpo.place.rlf").read_text()
    tried = json.loads(searched("--json", "--on", "ref.* mbs=4"))
    (ref,) = [c for c in tried["best"][0]["calls"] if c["call"] == "ref.logprobs"]
    assert "mbs=4" in ref["how"] and "as in the program" not in ref["why"]
    compared = rlc("explain-placement", "grpo.rlf", "--cluster", "two.yaml", "--on", "ref.* on mesh(1:2) mbs=4", "--json")
    assert compared.exit_code == 0, compared.output


@pytest.mark.parametrize("how", ["rule", "line"])
def test_what_is_kept_is_in_the_file_wherever_it_was_said(folder: Path, how: str) -> None:
    rule = "ref.* on mesh(0:1) mbs=8"
    (folder / "rules.rlf").write_text(f"place {rule}\n")
    more = ("--place", "rules.rlf") if how == "rule" else ("--on", rule)
    found = json.loads(searched("--json", "--lock", "ref.*", "-o", "p.rlf", *more))
    assert "place ref.logprobs" in (folder / "p.rlf").read_text()
    assert (done := rlc("compile", "grpo.rlf", "--place", "p.rlf", "-o", "grpo.plan")).exit_code == 0, done.output
    told = json.loads(rlc("sim", "grpo.plan", "--cluster", "two.yaml", "--json").output)
    assert told["seconds"] == pytest.approx(found["best"][0]["seconds"], rel=1e-9)


def test_a_lock_of_a_call_that_follows_another(folder: Path) -> None:
    """It has no clause of its own: the program places it as the training of its model, which is free."""
    (folder / "own.rlf").write_text(PROGRAM + "place actor.train on mesh(0:1) mbs=2 recompute=full\n")
    found = json.loads(searched("--json", "--lock", "actor.generate", program="own.rlf"))
    (gen,) = [c for c in found["best"][0]["calls"] if c["call"] == "actor.generate"]
    assert gen["ranks"] == [0, 1]


def test_a_lock_with_a_bound_of_tokens(folder: Path) -> None:
    """One micro-batch of all rows would not fit."""
    (folder / "own.rlf").write_text(PROGRAM + "place actor.train on mesh(0:2) dp=2 zero=1 mbt=1536 recompute=full\n")
    found = json.loads(searched("--json", "--lock", "actor.train", "-o", "p.rlf", program="own.rlf"))
    (train,) = [c for c in found["best"][0]["calls"] if c["call"] == "actor.train"]
    assert "mbt=1536" in train["how"] and "mbt=1536" in (folder / "p.rlf").read_text()


def test_what_is_kept_may_be_what_does_not_fit() -> None:
    """More nodes would not help."""
    said = rlc("search", "grpo.rlf", "--cluster", "two.yaml", "--memory", "30", "--lock", "actor.train",
               "--on", "actor.train on mesh(0:1) dp=1")
    assert said.exit_code == 1 and "RL0402" in said.output
    assert "if the search may also place" in said.output and "actor.train" in said.output, said.output
