"""The compiler as functions: what the command line, tests and other programs call.

In: paths and texts. Out: diagnostics, a graph, a plan with its proof. Every mistake of the user is a `Failure` with
diagnostics; an `InternalError` is ours. torch is imported only by what reads model
directories: `compile` and the functions that it is made of from `draft` on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rldsl.diag import Diagnostic, Failure, fail, internal_error
from rldsl.files import read_bytes
from rldsl.graph.model import Clause, Graph, Rule
from rldsl.plan.expr import Scalar
from rldsl.source import COMMAND_LINE, SourceFile
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.passes.draft import Draft
    from rldsl.passes.pipeline import Compiled
    from rldsl.placement.model import PlacedGraph
    from rldsl.plan.model import Plan


Rewrite = Callable[[ast.File], ast.File]
MANUAL = "manual"  # calls are placed as rules say
# Errors of placement that concern one clause, whatever the others say.
OF_ONE_CLAUSE = frozenset({"RL0304", "RL0305", "RL0306", "RL0310", "RL0311", "RL0312", "RL0314"})


def unchanged(file: ast.File) -> ast.File:
    """The rewriting of a program that leaves it as it is."""
    return file


def read_source(path: str) -> SourceFile:
    """The text of a program. Errors: RL0091 no such file, RL0092 not a file, RL0093 not UTF-8."""
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {path}", place=path, help=_near(path)) from None
    except IsADirectoryError:
        programs = sorted(p.name for p in Path(path).glob("*.rlf"))
        raise fail("RL0092", f"{path} is a directory, not a program", place=path,
                   help=f"programs in this directory: {', '.join(programs)}" if programs else "pass an .rlf file"
                   ) from None
    except OSError as error:
        raise fail("RL0092", f"cannot read {path}: {error.strerror}", place=path) from None
    return decode(path, data)


def decode(name: str, data: bytes) -> SourceFile:
    """The text of a program from its bytes. Errors: RL0093 not UTF-8."""
    try:
        return SourceFile(name, data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise fail("RL0093", f"{name} is not UTF-8 text", place=name,
                   help=f"byte {error.start} is {error.object[error.start]:#04x}; save the file as UTF-8") from None


def _near(path: str) -> str:
    from difflib import get_close_matches

    folder = Path(path).parent
    names = [p.name for p in folder.glob("*.rlf")] if folder.is_dir() else []
    near = get_close_matches(Path(path).name, names, n=1)
    return f"did you mean {folder / near[0]}?" if near else "paths are relative to the working directory"


def build_graph(source: SourceFile, sets: Mapping[str, Scalar] | None = None, place: SourceFile | None = None,
                overrides: Sequence[str] = (), rewrite: Rewrite = unchanged) -> Graph:
    """The dataflow graph. place: a placement file. overrides: rules of the command line
    ("actor.train on mesh(0:4)"). rewrite: what changes the parsed program."""
    from rldsl.graph.build import build
    from rldsl.syntax.parse import parse

    return build(rewrite(parse(source)), dict(sets or {}), _joined([parse(f) for f in _rules(place, overrides)]))


def read_selectors(selectors: Sequence[str]) -> tuple[Rule, ...]:
    """Selectors of the command line, as typed there ("actor.*", `@"mean(r)"`), each as the rule `place SELECTOR auto`.
    Errors: those of the syntax, RL0313 an empty one."""
    from rldsl.syntax.parse import parse

    form = "a selector is `model.call`, where either may be `*`, or `@name`"
    if not all(selector.strip() for selector in selectors):
        raise fail("RL0313", "an empty selector matches no call", place=COMMAND_LINE, help=form)
    try:
        file = parse(SourceFile(COMMAND_LINE, "".join(f"place {selector} auto\n" for selector in selectors)))
    except Failure as failure:
        about = ("a selector of the command line is read as the rule `place SELECTOR auto`",)
        raise Failure([replace(d, notes=(*d.notes, *about),
                               help=d.help or form) for d in failure.diagnostics]) from None
    return tuple(Rule(item.selector, Clause(None, (), item.clause.span, auto=True), item.span)
                 for item in file.items if isinstance(item, ast.PlaceRule))


def _rules(place: SourceFile | None, overrides: Sequence[str]) -> tuple[SourceFile, ...]:
    """The texts of the placement file and of the rules of the command line."""
    line = SourceFile(COMMAND_LINE, "".join(f"place {rule}\n" for rule in overrides))
    return tuple(f for f in (place, line if overrides else None) if f is not None)


def _joined(files: Sequence[ast.File]) -> ast.File | None:
    """One file of rules. A rule is known to be of the command line by the file of its span."""
    return ast.File(files[0].source, tuple(item for file in files for item in file.items)) if files else None


def check(text: str, name: str = "<text>", *, sets: Mapping[str, Scalar] | None = None,
          place: SourceFile | None = None) -> tuple[Diagnostic, ...]:
    """Every mistake that can be found without model directories: syntax, names, types, rules, meshes, degrees."""
    return tuple(d for d in examine(text, name, sets=sets, place=place) if d.severity == "error")


def examine(text: str, name: str = "<text>", *, sets: Mapping[str, Scalar] | None = None,
            place: SourceFile | None = None, read: Callable[[str], str] | None = None,
            overrides: Sequence[str] = ()) -> tuple[Diagnostic, ...]:
    """What `check` finds; of a program without mistakes the warnings (RL09xx). read: where imported files come from.
    overrides: as for `build_graph`."""
    from rldsl.graph.build import build_recovering, read_text
    from rldsl.syntax.parse import parse_recovering

    parsed = [parse_recovering(f) for f in (SourceFile(name, text), *_rules(place, overrides))]
    broken = tuple(d for _, found in parsed for d in found)
    if broken:
        return broken
    files = [file for file, _ in parsed]
    graph, found = build_recovering(files[0], dict(sets or {}), _joined(files[1:]), read or read_text)
    return diagnostics_of(files, graph, found, place.name if place else "")


def diagnostics_of(files: Sequence[ast.File], graph: Graph | None, found: tuple[Diagnostic, ...],
                   rules: str = "") -> tuple[Diagnostic, ...]:
    """What `examine` returns, where `build_recovering` has made `graph` and `found` of `files`. rules: name of the
    placement file."""
    from rldsl.graph.corrections import uncorrected, uncorrected_engines
    from rldsl.graph.unreached import unreached
    from rldsl.placement.engines import other_engines
    from rldsl.placement.invariant import inexact_comparisons, varying_inputs
    from rldsl.placement.lints import lint as lint_rules
    from rldsl.placement.place import placements_of, problems_of
    from rldsl.placement.resident import idle_copies
    from rldsl.semantics.lints import lint

    if graph is None:
        return found
    placed = problems_of(graph, rules)
    if found:  # calls with a mistake are not in the graph, so only the clauses of the others can be checked
        return (*found, *(d for d in placed if d.code in OF_ONE_CLAUSE))
    if placed:
        return placed
    places = placements_of(graph, rules)
    return (*lint(files), *lint_rules(graph, rules), *idle_copies(graph, places), *varying_inputs(graph),
            *inexact_comparisons(graph), *uncorrected(graph),
            *uncorrected_engines(graph, other_engines(graph, places)), *unreached(graph, files))


def draft(path: str, sets: Mapping[str, Scalar] | None = None, place: str | None = None,
          overrides: Sequence[str] = (), mode: str = MANUAL) -> Draft:
    """The ordered events of a program, before they get numbers and short ids."""
    return draft_source(read_source(path), sets, read_source(place) if place else None, overrides, mode)


def draft_source(source: SourceFile, sets: Mapping[str, Scalar] | None = None, place: SourceFile | None = None,
                 overrides: Sequence[str] = (), mode: str = MANUAL, rewrite: Rewrite = unchanged,
                 num_processes: int = 1) -> Draft:
    """The same of a program that need not be in a file. mode: who places its calls (`search/modes.py`); those that are
    `auto` the search places anyway, with `num_processes`. rewrite: as for `build_graph`."""
    from rldsl.passes.pipeline import run

    return run(placed_source(source, sets, place, overrides, mode, rewrite, num_processes))


def placed_source(source: SourceFile, sets: Mapping[str, Scalar] | None = None, place: SourceFile | None = None,
                  overrides: Sequence[str] = (), mode: str = MANUAL, rewrite: Rewrite = unchanged,
                  num_processes: int = 1) -> PlacedGraph:
    """The calls of a program in their places, before any pass."""
    from rldsl.models.families import describe
    from rldsl.placement.place import place_graph, with_commits_of_the_hub

    graph = with_commits_of_the_hub(build_graph(source, sets, place, overrides, rewrite))
    name = place.name if place else ""
    if mode != MANUAL or any(r.clause.auto for r in graph.rules):
        from rldsl.search.modes import place_by_mode

        graph, _ = place_by_mode(graph, name, mode, describe, num_processes)
    return place_graph(graph, name)


def compile_all(path: str, sets: Mapping[str, Scalar] | None = None, place: str | None = None,
                overrides: Sequence[str] = ()) -> Compiled:
    """The plan of a program with its proof and memory. Raises Failure, or InternalError when the proof fails."""
    return finish(draft(path, sets, place, overrides))


def finish(events: Draft) -> Compiled:
    """Memory, emission and proof."""
    from importlib.metadata import PackageNotFoundError, version

    from rldsl.passes import pipeline
    from rldsl.search import memory_check

    try:
        compiler = f"rldsl {version('rldsl')}"
    except PackageNotFoundError:
        compiler = "rldsl"
    plan, curves = pipeline.planned(events, compiler)
    memory_check.check_memory(events.placed, curves)
    try:
        return pipeline.finish(plan, curves)
    except Failure as failure:
        raise internal_error("the verifier rejects the plan that the compiler made", place="verify", notes=tuple(
            f"{d.code} {d.title}" for d in failure.diagnostics[:8])) from failure


def compile(path: str, sets: Mapping[str, Scalar] | None = None, place: str | None = None,
            overrides: Sequence[str] = ()) -> Plan:
    """The verified plan of the program at `path`."""
    return compile_all(path, sets, place, overrides).plan


def read_plan(path: str) -> Plan:
    """A plan file. Errors: RL0091 no such file, RL0601 to RL0607 from the codec."""
    from rldsl.plan.codec import decode

    return decode(read_bytes(path), path)
