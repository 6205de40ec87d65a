"""Where the Python API begins: a program or a plan file -> diagnostics, or a plan that can show itself.

A program is a path, or its text: a `str` with a line break in it is text, any other a path, as a `Path` always is.
Values of its `param`s come by name; those whose names Python or this API needs for itself (`place`, `lambda`) come in
a mapping.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rldsl import api
from rldsl.files import read_bytes
from rldsl.plan.expr import Scalar
from rldsl.python.arguments import check_program_arguments
from rldsl.python.errors import reports_failures
from rldsl.python.messages import Diagnostics
from rldsl.python.plan import Plan, opened
from rldsl.python.redirect import Rewards, redirect
from rldsl.source import SourceFile

Program = str | os.PathLike[str]
Param = Scalar | os.PathLike[str]
TEXT = "<text>"


@reports_failures
def check(program: Program, params: Mapping[str, Param] | None = None, /, *, place: Program | None = None,
          **named: Param) -> Diagnostics:
    """All errors of a program that can be found without its models; if there are none, the warnings.

    params, named: values of its `param`s. place: a file of `place` rules, or their text.
    Raises DiagnosticError where a file cannot be read (RL0091 to RL0093): all else is returned."""
    return check_source(source_of(program), values(params, named), rules(place))


@reports_failures
def compile(program: Program, params: Mapping[str, Param] | None = None, /, *, place: Program | None = None,
            on: str | Sequence[str] = (), rewards: Rewards | None = None, **named: Param) -> Plan:
    """The verified plan of a program, as `rlc compile` makes it. Models must be there: their shapes are read.

    params, named: values of its `param`s. place: a file of `place` rules, their text, or who places the calls:
    "heuristic", "search", a pattern such as "d2p2t2". on: rules that are stronger than all others, "actor.train on
    mesh(0:4) dp=2 tp=2". rewards: Python functions, by name, which replace those that the program's `use py` declares.
    Paths in the program are relative to the working directory.
    Raises DiagnosticError with all mistakes."""
    check_program_arguments(program, params, place, on, rewards)
    mode, file = placing(place)
    rules = (on,) if isinstance(on, str) else on
    redirection = redirect(rewards or {})
    plan = compile_source(source_of(program), values(params, named), file, rules, mode, redirection)
    return replace(plan, redirection=redirection)


@reports_failures
def load(path: Program) -> Plan:
    """The plan of a file that `rlc compile` or `Plan.save` wrote, verified again.

    Raises DiagnosticError: RL0091 no such file, RL06xx no sound plan, RL05xx a plan that its verifier rejects."""
    name = os.fspath(path)
    return opened(read_bytes(name), name)


def check_source(source: SourceFile, params: Mapping[str, Scalar], place: SourceFile | None = None,
                 on: Sequence[str] = ()) -> Diagnostics:
    """`check` of a text with a name. on: rules, as for `compile`."""
    return Diagnostics(api.examine(source.text, source.name, sets=params, place=place, overrides=on))


def compile_source(source: SourceFile, params: Mapping[str, Scalar], place: SourceFile | None = None,
                   on: Sequence[str] = (), mode: str = api.MANUAL, rewrite: api.Rewrite = api.unchanged,
                   num_processes: int = 1) -> Plan:
    """`compile` of a text with a name. mode: who places its calls. rewrite: what changes the parsed program.
    num_processes: of a search. Raises Failure."""
    compiled = api.finish(api.draft_source(source, params, place, on, mode, rewrite, num_processes))
    texts = tuple((file.name, file.text) for file in (source, *([place] if place else [])))
    return Plan(compiled, source.name, Path(source.name).parent, texts)


def source_of(program: Program) -> SourceFile:
    """The program's text, with the name that messages give it."""
    if isinstance(program, str) and "\n" in program:
        return SourceFile(TEXT, program)
    return api.read_source(os.fspath(program))


def rules(place: Program | None) -> SourceFile | None:
    """The text of placement rules, as a separate file."""
    if isinstance(place, str) and "\n" in place:
        return SourceFile("<place>", place)
    return None if place is None else api.read_source(os.fspath(place))


def placing(place: Program | None) -> tuple[str, SourceFile | None]:
    """(who places the calls, the rules): a mode, where there is no such file."""
    if place is not None and not (isinstance(place, str) and "\n" in place) and not os.path.exists(place):
        from rldsl.search.modes import is_mode

        if is_mode(os.fspath(place)):
            return os.fspath(place), None
    return api.MANUAL, rules(place)


def values(params: Mapping[str, Param] | None, named: Mapping[str, Param]) -> dict[str, Scalar]:
    """Paths become texts; a name that is given twice has the value that was given by name."""
    return {name: os.fspath(value) if isinstance(value, os.PathLike) else value
            for name, value in {**(params or {}), **named}.items()}
