"""Declarations of a program: states, cluster, meshes, models, data, place rules.

In: declarations and a Scope. Out: records of the graph, and meanings bound in the module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, cast

from rldsl import clusters
from rldsl.diag import Failure, Label, internal_error
from rldsl.graph import lora as adapters
from rldsl.graph import model as g
from rldsl.graph.optimizer import DeclaredOptimizer, read_optimizer
from rldsl.plan.expr import Scalar
from rldsl.plan.heads import HEADS
from rldsl.plan.model import INDEX, PICKED
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad, Errors, suggest
from rldsl.semantics.expressions import ExpressionBuilder
from rldsl.semantics.scope import Scope
from rldsl.semantics.terms import Term
from rldsl.semantics.values import DataRef, MeshValue, describe
from rldsl.source import COMMAND_LINE, SourceFile, Span
from rldsl.syntax import ast

FORMATS = ("jsonl", "parquet", "hf")
ONLY_HF = {name: f"only `hf` has `{name}`" for name in options.HF}
# what a batch has anyway
FIELDS = ("tokens", "lengths", "columns", "logprobs", "finished", "chosen", "rejected", "row_numbers", "prompts",
          INDEX, PICKED)


def state(decl: ast.State, exprs: ExpressionBuilder, scope: Scope) -> float:
    """The initial value; 0 after an error."""
    value = exprs.constant(decl.initial, scope)
    if isinstance(value, Bad):
        return 0.0
    if value.dtype != "f32":
        exprs.errors.add("RL0205", f"the state `{decl.name.name}` must be a number", decl.initial.span,
                         f"this is {describe(value)}", help=f"for example `state {decl.name.name} = 0.1`")
        return 0.0
    return float(value.value)


def row_state(decl: ast.State, data: Mapping[str, g.Data], states: Mapping[str, g.State], exprs: ExpressionBuilder,
              scope: Scope) -> g.State | Bad:
    """`state NAME of DATA = initial`. data, states: what is declared so far."""
    if decl.data is None:
        raise internal_error("a state of rows without a data source")
    ref, name = exprs.name(ast.Name(name=decl.data.name, span=decl.data.span), scope), decl.name.name
    initial = state(decl, exprs, scope)
    if not isinstance(ref, DataRef):
        return BAD if isinstance(ref, Bad) else exprs.errors.add(
            "RL0203", f"a state belongs to the rows of data, not to {describe(ref)}", decl.data.span,
            help="write `state NAME of DATA = 0`, with the name of a `data` declaration")
    id_ = f"{ref.name}.{name}"
    if id_ in states:
        return exprs.errors.add("RL0102", f"the state `{name}` of `{ref.name}` is defined twice", decl.name.span,
                                labels=(Label(states[id_].span, "the first definition"),), help="choose another name")
    if name in FIELDS or name in data[ref.name].numbers or name == "next":
        return exprs.errors.add("RL0111", f"the rows of `{ref.name}` have a field `{name}` already", decl.name.span,
                                help="choose another name")
    return g.State(id_, initial, decl.span, ref.name)


def unknown_sets(sets: Mapping[str, Scalar], declared: set[str], errors: Errors) -> None:
    for name in sets:
        if name not in declared:
            typed = SourceFile(COMMAND_LINE, f"--set {name}={sets[name]}")
            errors.add("RL0106", f"the program has no `param {name}`", Span(typed, 6, 6 + len(name)),
                       help=suggest(name, declared))


def named(call: ast.Call, exprs: ExpressionBuilder, what: str, positional: int = 0) -> list[tuple[ast.Ident, ast.Expr]]:
    """The arguments given by name; extra positional ones are errors."""
    for arg in [a for a in call.args if a.name is None][positional:]:
        exprs.errors.add("RL0204", f"the options of {what} must be named", arg.span, help="write `option=value`")
    return [(a.name, a.value) for a in call.args if a.name is not None]


def _source(call: ast.Expr, allowed: tuple[str, ...], word: str, exprs: ExpressionBuilder,
            scope: Scope) -> tuple[str, str] | Bad:
    """(function, path) of `jsonl("path", ...)` or `causal_lm("path")`."""
    if not isinstance(call, ast.Call):
        return exprs.errors.add("RL0203", f"a {word} is written `{allowed[0]}(\"path\", ...)`", call.span,
                                "expected a call")
    name = call.func.name if isinstance(call.func, ast.Name) else ""
    if name not in allowed:
        return exprs.errors.add("RL0101", f"unknown {word} `{call.func.span.text}`", call.func.span,
                                help=suggest(name, allowed))
    if not call.args or call.args[0].name is not None:
        return exprs.errors.add("RL0215", f"`{name}` needs a path", call.func.span, help=f'write `{name}("path")`')
    path = exprs.constant(call.args[0].value, scope)
    if isinstance(path, Term) and path.dtype != "text":
        return exprs.errors.add("RL0205", "a path must be a string", call.args[0].span, f"this is {describe(path)}",
                                 help="strings use double quotes: `\"path\"`")
    return (name, str(path.value)) if isinstance(path, Term) else BAD


def model(decl: ast.ModelDecl, exprs: ExpressionBuilder, scope: Scope) -> g.Model | Bad:
    source = _source(decl.value, tuple(HEADS), "model", exprs, scope)
    if isinstance(source, Bad):
        return BAD
    if not isinstance(decl.value, ast.Call):
        raise internal_error("a model without a call, which `_source` lets pass")
    call, lora = adapters.taken(decl.value, exprs, scope)
    what = f"`{source[0]}`"
    given = options.read(options.MODEL, named(call, exprs, what, 1), what, call.span, exprs, scope)
    optimizer: DeclaredOptimizer | None | Bad = None
    if decl.optimizer is not None:
        optimizer = read_optimizer(decl.optimizer, exprs, scope)
    if isinstance(given, Bad) or isinstance(optimizer, Bad) or isinstance(lora, Bad):
        return BAD
    record, patterns = (optimizer.record, optimizer.patterns) if optimizer else (None, ())
    return g.Model(decl.name.name, source[0], source[1], record, str(given["dtype"]), decl.span,
                   lora, next((a.span for a in decl.value.args if a not in call.args), None), bool(given["invariant"]),
                   call.args[0].value.span, patterns, given["invariant"] == "training")


def data(decl: ast.DataDecl, exprs: ExpressionBuilder, scope: Scope) -> g.Data | Bad:
    """The format of its rows is "" where the program states none: its uses decide."""
    source = _source(decl.value, FORMATS, "data source", exprs, scope)
    if isinstance(source, Bad):
        return BAD
    written = named(decl.value, exprs, f"`{source[0]}`", 1)
    table = options.DATA | options.HF if source[0] == "hf" else options.DATA
    given = options.read(table, written, f"`{source[0]}`", decl.value.func.span, exprs, scope, elsewhere=ONLY_HF)
    if isinstance(given, Bad):
        return BAD
    if given.pop("streaming", False):
        return exprs.errors.add("RL0205", "rows cannot be streamed", decl.value.span,
                                "each batch is drawn from all rows, by their number",
                                help="omit `streaming`: the rows are downloaded once per machine, and read from disk; "
                                     "`split=\"train[:10000]\"` keeps a part")
    kind, answers = str(given.pop("kind") or ""), cast("int | None", given.pop("answers")) or 0
    if answers and kind not in ("", "answers"):
        at = next(value.span for name, value in written if name.name == "answers")
        return exprs.errors.add("RL0205", f"rows of kind `{kind}` do not have {answers} answers", at,
                                help="remove `answers`, or declare `kind=\"answers\"`")
    numbers = cast(tuple[str, ...], given.pop("numbers"))
    for name in numbers:
        if not name.isidentifier() or name in FIELDS or numbers.count(name) > 1:
            return exprs.errors.add("RL0205", f"the column `{name}` cannot be used as a value", decl.value.span,
                                    "listed twice" if numbers.count(name) > 1 else "",
                                    help="the name of a number column must be unique and consist of letters, digits "
                                         "and `_`")
    given["images"] = given["images"] or ""
    if given["images"]:
        stated = next((value.span for name, value in written if name.name == "over_long"), None)
        if stated is None:
            given["over_long"] = "error"
        elif given["over_long"] == "truncate":
            return exprs.errors.add("RL0205", "rows with images cannot be truncated", stated,
                                    "truncation could remove a part of an image",
                                    help='write `over_long="drop"` or `over_long="error"`')
    given["max_image_tokens"] = given["max_image_tokens"] or 0
    if wrong := _image_limit(given):
        at = next(value.span for name, value in written if name.name == "max_image_tokens")
        return exprs.errors.add("RL0205", wrong[0], at, help=wrong[1])
    scalars = tuple((k, cast(Scalar, v)) for k, v in given.items())
    return g.Data(decl.name.name, source[0], source[1], "answers" if answers else kind, scalars, decl.span,
                  options.given_unit("batch", written, exprs, scope), numbers, answers, decl.value.args[0].value.span)


def _image_limit(given: Mapping[str, Any]) -> tuple[str, str] | None:
    """Why `max_image_tokens` cannot be what it is, and what to do. given: the options of a source."""
    most, prompt = given["max_image_tokens"], given["max_prompt_tokens"]
    if most and not given["images"]:
        return "rows without images have no `max_image_tokens`", 'name the column of images, `images="..."`, or omit it'
    if most > prompt:
        return (f"images of up to {most} tokens do not fit into a prompt of up to {prompt}",
                "image tokens count in `max_prompt_tokens`: raise that, or lower `max_image_tokens`")
    return None


def cluster(decl: ast.Cluster, exprs: ExpressionBuilder, scope: Scope, read: Callable[[str], str]) -> g.Cluster | Bad:
    given = [(o.name, o.value) for o in decl.options]
    if decl.path is not None:
        loaded = _cluster_file(decl.path, decl.span, read, exprs)
        if isinstance(loaded, Bad):
            return BAD
        own = {i.name for i, _ in given}
        given = [(i, v) for i, v in loaded if i.name not in own] + given
    values = options.read(options.CLUSTER, given, "`cluster`", decl.span, exprs, scope)
    return values if isinstance(values, Bad) else g.Cluster(**cast(dict[str, Any], values), span=decl.span,
                                                            path=decl.path or "")


def _cluster_file(path: str, span: Span, read: Callable[[str], str],
                  exprs: ExpressionBuilder) -> list[tuple[ast.Ident, ast.Expr]] | Bad:
    """The options in the file of this path, or else those of the known node of this name, without their speeds, which
    are for the simulator."""
    try:
        text = read(path)
    except OSError as error:
        found = clusters.preset(path) if isinstance(error, FileNotFoundError) else None
        if found is None:
            near = get_close_matches(path, clusters.presets(), n=1)
            return exprs.errors.add("RL0103", f"cannot read `{path}`", span, error.strerror or str(error),
                                    help=f"did you mean `{near[0]}`?" if near else "")
    except UnicodeDecodeError as error:
        return exprs.errors.add("RL0103", f"`{path}` is not valid YAML", span, " ".join(str(error).split()))
    else:
        try:
            found = clusters.parse(SourceFile(path, text))
        except Failure as failure:
            return exprs.errors.extend(failure)
    stated = {k: getattr(found, k) for k in options.CLUSTER}
    return [(ast.Ident(name=k, span=span), ast.Number(value=v, span=span)) for k, v in stated.items() if v]


def clause(tree: ast.Clause, exprs: ExpressionBuilder, scope: Scope) -> g.Clause | Bad:
    """A placement with its constants evaluated, and nothing validated."""
    mesh: g.MeshRef | None = None
    bad = False
    if tree.mesh is not None:
        value = exprs.build(tree.mesh, scope)
        if isinstance(value, MeshValue):
            mesh = g.MeshRef(value.nodes, value.devices, tree.mesh.span, value.free)
        elif not isinstance(value, Bad):
            exprs.errors.add("RL0203", f"`on` needs a mesh, not {describe(value)}", tree.mesh.span,
                             help="write `on mesh(0:8)` or the name of a `mesh`")
        bad = mesh is None
    found: list[tuple[str, Scalar, Span]] = []
    for option in tree.options:
        name, given = option.name.name, option.value
        word = given.name if isinstance(given, ast.Name) and scope.find(given.name) is None else ""
        scalar = word if word and name in ("backend", "recompute", "waiting") else exprs.scalar(given, scope)
        unit = {"mbs": "sequences", "mbt": "tokens"}.get(name, "")
        if isinstance(scalar, (Bad, tuple)) or not word and options.counts(
                name, unit, options.unit_of(given, exprs, scope), given.span, exprs):
            bad = True
        else:
            found.append((name, scalar, option.span))
    return BAD if bad else g.Clause(mesh, tuple(found), tree.span, tree.auto)
