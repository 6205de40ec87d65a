"""Retired words stay retired: in what users read, and in the code.

What users read: the message pages, docs, README, help texts of the commands, and the string literals of diagnostics.
What readers of the code read: comments, docstrings and identifiers, which are modules, functions, classes, arguments
and attributes of rldsl/ and backends/. A name that leaves the code for good is added to `IDENTIFIERS` with its
replacement.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from rldsl import explain
from rldsl.cli import main

ROOT = Path(__file__).parents[1]
CODE = [p for top in ("rldsl", "backends") for p in sorted((ROOT / top).rglob("*.py")) if "editors" not in p.parts]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md"]

# A phrase, matched as whole words without regard to case -> what to write instead.
PROSE = {
    "mend": "fix", "mends": "fixes", "mended": "fixed", "mending": "fixing", "mistake of the compiler":
    "internal compiler error", "is told": "is reported", "are told": "are reported", "goes on from": "resumes from",
    "go on from": "resume from", "stands beside": "is next to", "stand beside": "are next to", "side by side with":
    "together with", "by itself": "automatically, or on its own", "shall": "must, or will", "slab": "KV cache",
    "slabs": "KV caches", "desk": "decode state", "desks": "decode states", "of what none is there": "missing",
    "nor does": "and does not", "stood still": "hung", "without a word": "without an error message",
    "sign of life": "heartbeat", "signs of life": "heartbeats", "key-value cache": "KV cache", "for programs":
    "print JSON", "that there is not": "unknown", "whole of it": "all of it", "the one form": "the canonical form",
    "as long as the program lets them be": "at their maximum length", "a number a": "a number per",
    "few rows at once": "micro-batch", "for ever": "forever", "lies beside": "is next to", "no mistakes": "no errors",
    "so many": "the number, by the name of its argument",
}
# of these words "a THING of its own" is "its own THING", or "a separate THING"
OWN = ("call", "calls", "class", "devices", "engine", "environment", "file", "kind", "lag", "loop", "loops", "mesh",
       "module", "modules", "passes", "process", "processes", "ranks", "record", "rule", "seed", "slot",
       "space", "spans", "statement", "step", "stream", "thread", "world")
PROSE |= {f"{thing} of {whose} own": f"{whose} own {thing}, or separate" for thing in OWN for whose in ("its", "their")}

# An identifier, or a part of one between underscores -> the name to use.
IDENTIFIERS = {
    "mended": "fixed", "waist": "plan",
    # rldsl/reshard
    "Hops": "IntraNodeCopy", "Hop": "IntraNodeCopy", "Way": "RankReshard", "Ends": "TransferSlice", "Side": "MeshView",
    "Kin": "NodeGroup", "lanes": "transfer_slices", "Lane": "TransferSlice, or MicroBatchGroup",
    # backends/torch
    "Slab": "KVCache", "slab": "kv_cache", "slabs": "kv_caches", "shades": "mask_values", "Desk": "DecodeState",
    "desk": "decode_state", "desks": "decode_states", "Seats": "SlotState", "Elsewhere": "PassThroughLayer",
    "GatherApart": "gather_from_sequence_parallel_region", "GatherAlike": "gather_from_sequence_parallel_region",
    "SumApart": "reduce_scatter_to_sequence_parallel_region", "PartOf": "scatter_to_sequence_parallel_region",
    "tape": "op_trace", "quicken": "fuse_norms", "grids": "length_buckets", "slope": "grad", "flying": "in_flight",
    # rldsl/runtime
    "Walk": "Interpreter", "Watch": "Watchdog", "Signs": "Heartbeats", "Neighbour": "PeerMonitor",
    "Stillness": "StallDetector",
    # rldsl/search
    "Alone": "IsolatedCall", "Judged": "Evaluation", "Proved": "CompiledPlacement", "Trials": "SettingCompiler",
    "Script": "StepSchedule",
    "Move": "ReshardCost", "Moves": "ReshardCosts", "roughly": "estimate_peak", "Mend": "MemoryAdvice", "mends":
    "memory_advice",
    # rldsl/simulate, rldsl/memory
    "Issued": "PostedOps", "Decoded": "DecodeTime", "givers": "senders",
    "Act": "Op", "Mark": "EventBegin", "Again": "RepeatExtrapolated", "Played": "Timelines",
    # rldsl/commands, rldsl/pages; one spelling
    "Parting": "RunDifference", "told": "what it holds: shown, expected, measured", "beside": "what it holds",
    "colour": "color", "colours": "colors", "neighbour": "neighbor", "neighbours": "neighbors", "centre": "center",
    "centres": "centers",
}

# Where a retired phrase is right. (path or code, phrase): why.
ALLOWED: dict[tuple[str, str], str] = {}


def found(text: str) -> Iterator[str]:
    """The retired phrases of a text."""
    plain = " ".join(text.split())
    for phrase in PROSE:
        if re.search(rf"(?<![\w`-]){re.escape(phrase)}(?![\w-])", plain, re.IGNORECASE):
            yield phrase


def advice(phrases: list[str]) -> str:
    return "; ".join(f'"{p}": write "{PROSE[p]}"' for p in phrases)


def checked(text: str, where: str) -> None:
    bad = [p for p in found(text) if (where, p) not in ALLOWED]
    assert not bad, f"{where}: {advice(bad)}"


def outside_code(text: str) -> str:
    """A page without the programs and outputs in its fences, which other tests hold to what the code does."""
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, text) of every string literal that is not a docstring; of an f-string its fixed parts."""
    docs = {id(n.body[0].value) for n in ast.walk(tree)
            if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and n.body
            and isinstance(n.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring of a file, and of its comments: those on consecutive lines are one text."""
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
    first, text, previous = 0, "", -1
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if line != previous + 1:
                yield first, text
                first, text = line, ""
            text, previous = f"{text} {token.string.lstrip('#: ')}", line
    yield first, text


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a module defines: functions, classes, arguments, variables and attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case ast.arg(arg=name):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name):
                yield node.lineno, name


def retired(name: str) -> str:
    """The retired word in an identifier; "" if there is none."""
    return next((part for part in (name, *name.split("_")) if part in IDENTIFIERS), "")


def help_texts(command: click.Command, path: str) -> Iterator[tuple[str, str]]:
    """(command, text) of a command, its options and its subcommands."""
    yield path, command.help or ""
    for option in command.params:
        yield f"{path} {option.opts[0]}", getattr(option, "help", None) or ""
    if isinstance(command, click.Group):
        for name, child in command.commands.items():
            yield from help_texts(child, f"{path} {name}")


# ------------------------------------------------------------------------------------------------ what users read


@pytest.mark.parametrize("code", sorted(explain.codes()))
def test_message_pages(code: str) -> None:
    page = explain.page(code)
    assert page is not None
    checked(f"{page.title}\n{outside_code(page.text)}", code)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_documentation(page: Path) -> None:
    checked(outside_code(page.read_text("utf-8")), str(page.relative_to(ROOT)))


def test_help_texts() -> None:
    every = list(help_texts(main, "rlc"))
    assert len(every) > 50
    for where, text in every:
        checked(text, where)


def test_string_literals() -> None:
    for path in CODE:
        for line, text in texts(parsed(path)):
            checked(text, f"{path.relative_to(ROOT)}:{line}")


def test_comments_and_docstrings() -> None:
    for path in CODE:
        for line, text in comments(path):
            checked(text, f"{path.relative_to(ROOT)}:{line}")


def test_templates() -> None:
    for path in sorted((ROOT / "rldsl/templates").iterdir()):
        checked(path.read_text("utf-8"), str(path.relative_to(ROOT)))


# ------------------------------------------------------------------------------------------------ identifiers


def test_identifiers() -> None:
    bad = [f"{path.relative_to(ROOT)}:{line}: {name}: write {IDENTIFIERS[word]}" for path in CODE
           for line, name in names(parsed(path)) if (word := retired(name))]
    assert not bad, "\n".join(bad)


def test_modules() -> None:
    bad = [f"{path.relative_to(ROOT)}: write {IDENTIFIERS[word]}" for path in CODE if (word := retired(path.stem))]
    assert not bad, "\n".join(bad)


# ------------------------------------------------------------------------------------------------ the check itself


@pytest.mark.parametrize("text", ["how to mend it", "A run goes on\nfrom step 3", "It shall be so.", "The slab is full",
                                  "`x` is bound by itself", "a mistake of the compiler", "MENDED",
                                  "each has a process of\nits own"])
def test_a_retired_word_is_found(text: str) -> None:
    assert list(found(text))
    with pytest.raises(AssertionError, match="write"):
        checked(text, "here")


@pytest.mark.parametrize("text", ["recommended", "amendment", "shallow", "the desktop", "it goes on", "a number",
                                  "forever", "a slabbed floor", "the helpdesk", "the lengths of its own rows"])
def test_other_words_are_not(text: str) -> None:
    assert not list(found(text))


def test_comments_are_found_across_lines(tmp_path: Path) -> None:
    file = tmp_path / "code.py"
    file.write_text('x = 1  # how to\n# mend it\n\n\ndef f():\n    """It\n    shall be."""\n    return "the slab"\n')
    assert {phrase for _, text in comments(file) for phrase in found(text)} == {"mend", "shall"}


def test_code_in_pages_is_left_alone() -> None:
    assert not list(found(outside_code("fix it\n\n```rlf\nmend = 1\n```\n")))


@pytest.mark.parametrize("name, word", [("mended", "mended"), ("was_mended_by", "mended"), ("Hops", "Hops"),
                                        ("Hop", "Hop"), ("Hopper", ""), ("recommended", ""), ("mends", "mends"),
                                        ("amends", ""), ("kv_cache", "")])
def test_parts_of_identifiers(name: str, word: str) -> None:
    assert retired(name) == word


@pytest.mark.parametrize("word", sorted(IDENTIFIERS))
def test_a_retired_identifier_is_found_wherever_it_is_defined(word: str) -> None:
    for source in (f"class {word}: pass", f"def {word}(): pass", f"def f({word}): pass", f"{word} = 1", f"x.{word} = 1",
                   f"def plan_{word}(): pass"):
        assert word in {retired(name) for _, name in names(ast.parse(source))}, source


@pytest.mark.parametrize("word", sorted(IDENTIFIERS))
def test_a_replacement_is_not_retired_itself(word: str) -> None:
    assert not any(retired(name) for name in re.findall(r"\w+", IDENTIFIERS[word]))


def test_literals_and_names_are_those_of_the_code() -> None:
    lines = ['"""mend"""', "def f(desk):", '    """mend"""', "    self.slab = 1", '    return f"mend {desk}"']
    tree = ast.parse("\n".join(lines))
    assert [t for _, t in texts(tree)] == ["mend "]
    assert {n for _, n in names(tree)} == {"f", "desk", "slab"}
