"""The command line of `benchmarks/bound.py`, checked before anything is measured."""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.bound_shapes import Shape, drawn


def parse(description: str, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options. Ends the process with status 2 and a message for one that makes no sense."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def option(name: str, default: int, least: int, text: str) -> None:
        parser.add_argument(f"--{name}", type=_at_least(least), default=default, help=f"{text}; default: {default}")

    parser.add_argument("--seed", type=int, default=0, help="of the shapes that are drawn; default: 0")
    option("shapes", 10, 1, "how many shapes are drawn")
    parser.add_argument("--only", type=_at_least(0), nargs="+", help="the numbers of some of them, from 0")
    option("turns", 3, 1, "how often each side runs; what counts is its fastest turn")
    parser.add_argument("--step", action="store_true", help="whole GRPO steps, too")
    parser.add_argument("--peer", help="interpreter that has trl; default: the environment variable RLDSL_TRL_PYTHON")
    parser.add_argument("--ranks", type=_at_least(2), default=0, help="whole GRPO steps on this many ranks, too")
    parser.add_argument("--model", help="a model directory with weights and tokenizer, instead of drawn shapes")
    option("prompts", 8, 1, "with --model: prompts of a step")
    option("n", 4, 1, "with --model: responses to each prompt")
    option("prompt", 32, 1, "with --model: tokens of the longest prompt")
    option("tokens", 64, 1, "with --model: tokens of a response, at most")
    given = parser.parse_args(arguments)
    if given.model is not None:
        _check_model(given, parser.error)
    elif given.only and max(given.only) >= given.shapes:
        parser.error(f"--only: shapes are numbered 0 to {given.shapes - 1}")
    _check_steps(given, parser.error)
    return given


def shapes_of(given: argparse.Namespace) -> dict[int, Shape]:
    """What is measured, by number."""
    if given.model is not None:
        return {0: Shape({}, given.prompts, given.n, given.prompt, given.tokens)}
    every = drawn(given.seed, given.shapes)
    return {i: every[i] for i in given.only or range(len(every))}


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    number.__name__ = "whole number"  # argparse names it in its message
    return number


def _check_model(given: argparse.Namespace, error: Callable[[str], object]) -> None:
    if given.only:
        error("--only chooses from shapes that are drawn, so it has no meaning with --model")
    if not (Path(given.model) / "config.json").is_file() or not given.model:
        error(f"--model: {given.model!r} is no model directory: it has no config.json")
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(given.model).get_text_config()
    except (ValueError, OSError) as reason:
        error(f"--model: {str(reason).splitlines()[0]}")
        return
    limit, longest = getattr(config, "max_position_embeddings", None), given.prompt + given.tokens
    if limit and longest > limit:
        error(f"--prompt and --tokens: sequences of {longest} tokens, and the model has {limit} positions")


def _check_steps(given: argparse.Namespace, error: Callable[[str], object]) -> None:
    cores = len(os.sched_getaffinity(0))
    if given.ranks > cores:
        error(f"--ranks: {given.ranks} ranks need as many cores, and this process has {cores}")
    if given.ranks > (fewest := min(shape.prompts for shape in shapes_of(given).values())):
        error(f"--ranks: {given.ranks} ranks divide {fewest} prompts, so one has none")
    if given.peer is not None and not (given.step or given.ranks):
        error("--peer is for whole steps: give --step, too")
    given.peer = os.environ.get("RLDSL_TRL_PYTHON", "") if given.peer is None else given.peer
    if given.peer and (given.step or given.ranks) and (reason := _why_no_trl(given.peer)):
        error(f"--peer or RLDSL_TRL_PYTHON: {reason}")


def _why_no_trl(python: str) -> str:
    """"" if an interpreter can import trl."""
    try:
        done = subprocess.run([python, "-c", "import importlib.util as u; print('trl', u.find_spec('trl') is not None)"],
                              capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as reason:
        return f"{python} does not run: {reason}"
    if done.stdout.split()[:1] != ["trl"]:
        return f"{python} is no Python interpreter"
    return "" if done.stdout.split()[1] == "True" else f"{python} has no trl"
