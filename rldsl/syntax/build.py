"""Lark's tree -> `ast.File`. No Lark type leaves this package."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

from lark import Token, Transformer, Tree, v_args

from rldsl.diag import present
from rldsl.source import SourceFile, Span
from rldsl.syntax import ast

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", '"': '"', "\\": "\\"}
Children = list[Any]  # built nodes, tokens, and None for optional parts that are absent
Tokens = list[Token]

_SUFFIX = {"k": 1_000, "M": 1_000_000}


def build(tree: Tree[Token], source: SourceFile, docs: dict[int, str]) -> ast.File:
    """docs: line of a declaration -> the comment block that ends on the line above."""
    made: ast.File = _Builder(source, docs).transform(tree)
    return made


def number(text: str) -> int | float:
    """12, 1_000, 1e-6, 4k, 2M; infinity where it is too large for a float."""
    if len(text) > 300:
        return math.inf
    scale = _SUFFIX.get(text[-1], 1)
    digits = text.rstrip("kM").replace("_", "")
    value = float(digits) if any(c in digits for c in ".eE") else int(digits)
    scaled = value * scale
    return int(scaled) if scale > 1 and scaled == int(scaled) else scaled


def token_offsets(token: Token) -> tuple[int, int]:
    """(start, end) of a token in the text, which the lexer sets."""
    return present(token.start_pos, "start of a token"), present(token.end_pos, "end of a token")


@v_args(meta=True)
class _Builder(Transformer[Token, Any]):
    """One method for each rule; children arrive built, `None` where an optional part is absent."""

    def __init__(self, source: SourceFile, docs: dict[int, str]):
        super().__init__()
        self.source, self.docs = source, docs

    def _span(self, meta: Any) -> Span:
        return Span(self.source, meta.start_pos, meta.end_pos)

    def _token(self, token: Token) -> Span:
        return Span(self.source, *token_offsets(token))

    def _ident(self, token: Token) -> ast.Ident:
        return ast.Ident(span=self._token(token), name=str(token))

    def _doc(self, meta: Any) -> str:
        return self.docs.get(meta.line, "")

    # declarations

    def start(self, meta: Any, items: Sequence[ast.Declaration]) -> ast.File:
        return ast.File(self.source, tuple(items))

    def use(self, meta: Any, children: Children) -> ast.Use:
        module = _text(children[0]) if isinstance(children[0], Token) else children[0]
        return ast.Use(span=self._span(meta), module=module, names=children[1])

    def dotted(self, meta: Any, parts: Tokens) -> str:
        return ".".join(parts)

    def use_py(self, meta: Any, children: Children) -> ast.UsePy:
        return ast.UsePy(span=self._span(meta), path=_text(children[0]), functions=tuple(children[1:]))

    def py_function(self, meta: Any, children: Children) -> ast.PyFunction:
        return ast.PyFunction(span=self._span(meta), name=self._ident(children[0]), params=children[1],
                              returns=self._ident(children[2]), optional=children[3] is not None,
                              options=tuple(c for c in children[4:] if c is not None))

    def py_class(self, meta: Any, children: Children) -> ast.PyFunction:
        return ast.PyFunction(span=self._span(meta), name=self._ident(children[0]), params=(), returns=None,
                              optional=False, options=())

    def names(self, meta: Any, tokens: Tokens) -> tuple[ast.Ident, ...]:
        return tuple(map(self._ident, tokens))

    imports = names

    def param(self, meta: Any, children: Children) -> ast.Param:
        name, type_, default = children
        return ast.Param(span=self._span(meta), name=self._ident(name), type=self._ident(type_) if type_ else None,
                         default=default)

    def state(self, meta: Any, children: Children) -> ast.State:
        name, data, initial = children
        return ast.State(span=self._span(meta), name=self._ident(name), data=self._ident(data) if data else None,
                         initial=initial)

    def buffer(self, meta: Any, children: Children) -> ast.Buffer:
        return ast.Buffer(span=self._span(meta), name=self._ident(children[0]), value=children[1])

    def cluster(self, meta: Any, children: Children) -> ast.Cluster:
        path = _text(children[0]) if isinstance(children[0], Token) else None
        return ast.Cluster(span=self._span(meta), path=path, options=() if path is not None else tuple(children))

    def mesh_decl(self, meta: Any, children: Children) -> ast.MeshDecl:
        return ast.MeshDecl(span=self._span(meta), name=self._ident(children[0]), value=children[1])

    def data_decl(self, meta: Any, children: Children) -> ast.DataDecl:
        return ast.DataDecl(span=self._span(meta), name=self._ident(children[0]), value=children[1])

    def model_decl(self, meta: Any, children: Children) -> ast.ModelDecl:
        optimizer = children[2] if len(children) > 2 else None
        return ast.ModelDecl(span=self._span(meta), name=self._ident(children[0]), value=children[1],
                             optimizer=optimizer)

    def fn_decl(self, meta: Any, children: Children) -> ast.FnDecl:
        name, params, returns, body = children
        return ast.FnDecl(span=self._span(meta), name=self._ident(name), params=params or (), returns=returns or (),
                          body=body, doc=self._doc(meta))

    def loss_decl(self, meta: Any, children: Children) -> ast.LossDecl:
        name, model_outputs, data, body = children
        return ast.LossDecl(span=self._span(meta), name=self._ident(name), model_outputs=model_outputs or (),
                            data=data or (), body=body, doc=self._doc(meta))

    def params(self, meta: Any, children: Children) -> tuple[ast.Parameter, ...]:
        return tuple(children)

    def parameter(self, meta: Any, children: Children) -> ast.Parameter:
        name, level, default = children
        return ast.Parameter(span=self._span(meta), name=self._ident(name),
                             level=self._ident(level) if level else None, default=default)

    def returns(self, meta: Any, tokens: Tokens) -> tuple[ast.Ident, ...]:
        return tuple(map(self._ident, tokens))

    def place(self, meta: Any, children: Children) -> ast.PlaceRule:
        return ast.PlaceRule(span=self._span(meta), selector=children[0], clause=children[1])

    def selector(self, meta: Any, children: Children) -> str:
        """As one word; `@"reward#1"` without its quotes, which keep `#` from beginning a comment."""
        before, quote, name = self._span(meta).text.partition('"')
        return before.replace(" ", "") + (_unquoted(quote + name) if quote else "")

    def flow(self, meta: Any, children: Children) -> ast.Flow:
        name, *arguments, body = children
        options = tuple(ast.Option(span=a.span, name=a.name or ast.Ident(span=a.span, name=""), value=a.value)
                        for a, _ in filter(None, arguments))
        return ast.Flow(span=self._span(meta), name=self._ident(name), options=options, body=body)

    # statements

    def block(self, meta: Any, children: Children) -> tuple[ast.Statement, ...]:
        return tuple(children)

    def assign(self, meta: Any, children: Children) -> ast.Assign:
        targets, value, named, where, clause = children
        return ast.Assign(span=self._span(meta), targets=targets, value=value, named=named or (), where=where,
                          clause=clause)

    def update(self, meta: Any, children: Children) -> ast.Update:
        return ast.Update(span=self._span(meta), target=children[0], value=children[1])

    def named(self, meta: Any, children: Children) -> tuple[tuple[ast.Ident, ast.Expr], ...]:
        return tuple(children)

    def named_value(self, meta: Any, children: Children) -> tuple[ast.Ident, ast.Expr]:
        name, value = children
        return self._ident(name), value

    def do(self, meta: Any, children: Children) -> ast.Do:
        return ast.Do(span=self._span(meta), value=children[0], clause=children[1])

    def metric(self, meta: Any, children: Children) -> ast.Metric:
        return ast.Metric(span=self._span(meta), name=self._ident(children[0]), value=children[1])

    def metric_hist(self, meta: Any, children: Children) -> ast.Metric:
        name, value, *options = children
        return self._array(meta, "hist", name, [value], options)

    def metric_table(self, meta: Any, children: Children) -> ast.Metric:
        name, *more = children
        values = [x for x in more if not isinstance(x, ast.Option)]
        return self._array(meta, "table", name, values, [x for x in more if isinstance(x, ast.Option)])

    def _array(self, meta: Any, form: Literal["hist", "table"], token: Token, values: Children,
               options: Children) -> ast.Metric:
        """A metric of several numbers. Without a value it is of the value that has its name."""
        name, given = self._ident(token), [x for x in values if x is not None]
        value = given[0] if given else ast.Name(span=name.span, name=name.name)
        return ast.Metric(span=self._span(meta), name=name, value=value, form=form, columns=tuple(given[1:]),
                          options=tuple(o for o in options if o is not None))

    def return_stmt(self, meta: Any, children: Children) -> ast.Return:
        return ast.Return(span=self._span(meta), values=tuple(children))

    def save(self, meta: Any, children: Children) -> ast.Save:
        return ast.Save(span=self._span(meta), models=children[0], path=children[1])

    def every(self, meta: Any, children: Children) -> ast.WhenBlock:
        return self._when("every", meta, children)

    def first(self, meta: Any, children: Children) -> ast.WhenBlock:
        return self._when("first", meta, children)

    def after(self, meta: Any, children: Children) -> ast.WhenBlock:
        return self._when("after", meta, children)

    def _when(self, word: Literal["every", "first", "after"], meta: Any, children: Children) -> ast.WhenBlock:
        return ast.WhenBlock(span=self._span(meta), word=word, count=children[0], body=children[1])

    def repeat(self, meta: Any, children: Children) -> ast.RepeatBlock:
        return ast.RepeatBlock(span=self._span(meta), times=children[0], body=children[1])

    def repeat_until(self, meta: Any, children: Children) -> ast.RepeatUntil:
        body, condition, max_iterations = children
        return ast.RepeatUntil(span=self._span(meta), body=body, condition=condition, max_iterations=max_iterations)

    def eval(self, meta: Any, children: Children) -> ast.EvalBlock:
        data, max_iterations, body = children
        return ast.EvalBlock(span=self._span(meta), data=self._ident(data), max_iterations=max_iterations, body=body)

    def stop(self, meta: Any, children: Children) -> ast.Stop:
        return ast.Stop(span=self._span(meta), condition=children[0])

    def sync(self, meta: Any, children: Children) -> ast.Sync:
        target, source, period = children
        return ast.Sync(span=self._span(meta), target=self._ident(target), source=self._ident(source), period=period)

    def ema(self, meta: Any, children: Children) -> ast.Ema:
        target, source, decay, period = children
        return ast.Ema(span=self._span(meta), target=self._ident(target), source=self._ident(source), decay=decay,
                       period=period)

    def checkpoint(self, meta: Any, children: Children) -> ast.Checkpoint:
        return ast.Checkpoint(span=self._span(meta), period=children[0], options=tuple(children[1:]))

    def clause(self, meta: Any, children: Children) -> ast.Clause:
        mesh = None if isinstance(children[0], ast.Option) else children[0]
        return ast.Clause(span=self._span(meta), mesh=mesh, options=tuple(children[mesh is not None :]))

    def auto(self, meta: Any, children: Children) -> ast.Clause:
        return ast.Clause(span=self._span(meta), mesh=None, options=(), auto=True)

    def option(self, meta: Any, children: Children) -> ast.Option:
        return ast.Option(span=self._span(meta), name=self._ident(children[0]), value=children[1])

    metric_option = option

    # expressions

    def _binary(self, meta: Any, children: Children) -> ast.Binary:
        left, op, right = children
        return ast.Binary(span=self._span(meta), op=str(op), left=left, right=right)

    or_expr = and_expr = comparison = sum = product = power = _binary

    def not_expr(self, meta: Any, children: Children) -> ast.Unary:
        return ast.Unary(span=self._span(meta), op="not", operand=children[0])

    def negative(self, meta: Any, children: Children) -> ast.Unary:
        return ast.Unary(span=self._span(meta), op="-", operand=children[-1])

    def number(self, meta: Any, children: Children) -> ast.Number:
        return ast.Number(span=self._span(meta), value=number(children[0]), unit=str(children[1] or ""))

    def string(self, meta: Any, children: Tokens) -> ast.String:
        return ast.String(span=self._span(meta), value=_text(children[0]))

    def list(self, meta: Any, children: Children) -> ast.ListOf:
        return ast.ListOf(span=self._span(meta), items=tuple(c for c in children if c is not None))

    def name(self, meta: Any, children: Tokens) -> ast.Expr:
        if children[0] in ("true", "false"):
            return ast.Bool(span=self._span(meta), value=children[0] == "true")
        return ast.Name(span=self._span(meta), name=str(children[0]))

    def attribute(self, meta: Any, children: Children) -> ast.Attribute:
        return ast.Attribute(span=self._span(meta), value=children[0], name=self._ident(children[1]))

    def call(self, meta: Any, children: Children) -> ast.Call:
        func, *arguments = children
        built = [a for a in arguments if a is not None]
        by = next((level for _, level in built if level), None)
        return ast.Call(span=self._span(meta), func=func, args=tuple(a for a, _ in built), by=by)

    def paren(self, meta: Any, children: Children) -> ast.Expr:
        inner: ast.Expr = children[0]
        return inner

    def argument(self, meta: Any, children: Children) -> tuple[ast.Argument, ast.Ident | None]:
        name, value, level = children
        made = ast.Argument(span=self._span(meta), name=self._ident(name) if name else None, value=value)
        return made, self._ident(level) if level else None

    def range(self, meta: Any, children: Children) -> ast.Range:
        return ast.Range(span=self._span(meta), start=children[0], stop=children[1])

    def selection(self, meta: Any, children: Children) -> ast.Selection:
        return ast.Selection(span=self._span(meta), value=children[0], condition=children[1])


def _text(token: Token) -> str:
    """The value of a string literal. A backslash before another character than those of _ESCAPES is itself."""
    return _unquoted(str(token))


def _unquoted(literal: str) -> str:
    return re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], m[0]), literal[1:-1], flags=re.DOTALL)
