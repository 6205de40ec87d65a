"""The names of a file: every name that is bound, and every place where it is used.

In: a syntax tree, perhaps of a broken text, and a way to the index of an imported file. Out: an `Index`. Nothing is
judged here; a name that is bound nowhere has no occurrence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rldsl.plan.operators import BUILTINS
from rldsl.source import Span
from rldsl.syntax import ast

FRAMES = frozenset(b.name for b in BUILTINS.values() if b.form == "frames")  # functions that make sequences


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that a program binds."""

    name: str  # as written
    # "param", "state", "mesh", "data", "model", "fn", "loss", "flow", "python", "parameter", "local", "value", "metric"
    # or "field" (of `with`)
    kind: str
    span: Span  # of the name where it is bound
    tree: ast.Tree  # what binds it
    inside: str = ""  # name of the fn, loss or flow around it; "": top level

    @property
    def key(self) -> tuple[str, int]:
        """The identity of the symbol: its file and place."""
        return self.span.file.name, self.span.start


@dataclass(frozen=True, slots=True)
class Occurrence:
    """A place in the text that names a symbol."""

    span: Span           # of the name
    symbol: Symbol       # what it names
    binds: bool = False  # whether this is where the symbol is bound


Fields = dict[str, Symbol]  # field -> where it is named; of pairs "chosen.NAME" and "rejected.NAME"


@dataclass(frozen=True, slots=True)
class Index:
    """The names of one file, and where they occur."""

    file: ast.File                       # its syntax tree
    symbols: tuple[Symbol, ...]          # those bound in this file
    occurrences: tuple[Occurrence, ...]  # in the order of the text
    names: dict[str, Symbol]             # what another file may import from it
    always: dict[str, Symbol]            # names of the library that need no import
    fields: dict[str, Fields]            # value of the flow, or buffer -> what `with` named on its sequences

    def at(self, offset: int) -> Occurrence | None:
        """The name at an offset, or just before it."""
        found = [o for o in self.occurrences if o.span.start <= offset <= o.span.end]
        return min(found, key=lambda o: o.span.end - o.span.start, default=None)

    def uses(self, symbol: Symbol) -> tuple[Occurrence, ...]:
        return tuple(o for o in self.occurrences if o.symbol.key == symbol.key)

    def scope(self, offset: int) -> dict[str, Symbol]:
        """The names that can be used at an offset: those of the file, of its imports, and of the body around it."""
        around = next((i.name.name for i in self.file.items if isinstance(i, ast.FnDecl | ast.LossDecl | ast.Flow)
                       and i.span.start <= offset <= i.span.end), None)
        own = {s.name: s for s in self.symbols
               if s.inside == around and around is not None and s.span.start < offset and s.kind != "metric"}
        return {**self.always, **self.names, **own}


Importer = Callable[[str, str], Index | None]  # (module, the file that imports it) -> its index


def index(file: ast.File, importer: Importer) -> Index:
    walker = _Walker(file, importer)
    for item in file.items:
        walker.declare(item)
    for item in file.items:
        walker.body(item)
    return Index(file, tuple(walker.symbols), tuple(walker.united()), walker.module, walker.always,
                 walker.fields)


class _Walker:
    def __init__(self, file: ast.File, importer: Importer):
        self.file, self.importer = file, importer
        self.symbols: list[Symbol] = []
        self.occurrences: list[Occurrence] = []
        self.module: dict[str, Symbol] = {}
        prelude = importer("std.prelude", file.source.name)
        self.always = dict(prelude.names) if prelude is not None else {}
        self.local: dict[str, Symbol] = {}
        self.fields: dict[str, Fields] = {}
        self.row_states: dict[str, Symbol] = {}  # fields of batches that are states of their rows
        self.buffers: set[str] = set()
        self.same: dict[tuple[str, int], Symbol] = {}  # key of a field -> one that has to have the same name
        self.inside = ""

    def united(self) -> Iterator[Occurrence]:
        """The occurrences; fields that meet in a buffer or a `concat` are one symbol."""
        for o in self.occurrences:
            symbol = o.symbol
            while symbol.key in self.same:
                symbol = self.same[symbol.key]
            yield o if symbol is o.symbol else replace(o, symbol=symbol)

    def unite(self, fields: Fields, others: Fields) -> Fields:
        """Those that both have, which are one symbol from now on."""
        for name in fields.keys() & others.keys():
            a, b = fields[name], others[name]
            while a.key in self.same:
                a = self.same[a.key]
            while b.key in self.same:
                b = self.same[b.key]
            if a.key != b.key:
                self.same[b.key] = a
        return {n: f for n, f in fields.items() if n in others}

    # --------------------------------------------------------------------------------------------- binding

    def bind(self, ident: ast.Ident, kind: str, tree: ast.Tree) -> Symbol:
        symbol = Symbol(ident.name, kind, ident.span, tree, self.inside)
        self.symbols.append(symbol)
        self.occurrences.append(Occurrence(ident.span, symbol, True))
        (self.local if self.inside else self.module).setdefault(ident.name, symbol)
        return symbol

    def meant(self, name: str) -> Symbol | None:
        return self.local.get(name) or self.module.get(name) or self.always.get(name)

    def see(self, name: str, span: Span) -> Symbol | None:
        symbol = self.meant(name)
        if symbol is not None:
            self.occurrences.append(Occurrence(span, symbol))
        return symbol

    def declare(self, item: ast.Declaration) -> None:
        match item:
            case ast.Use(module=module, names=names):
                other = self.importer(module, self.file.source.name)
                for ident in names:
                    symbol = other.names.get(ident.name) if other is not None else None
                    if symbol is not None:
                        self.occurrences.append(Occurrence(ident.span, symbol))
                        self.module.setdefault(ident.name, symbol)
            case ast.UsePy(functions=functions):
                for function in functions:
                    self.bind(function.name, "python", function)
            case ast.Param():
                self.bind(item.name, "param", item)
            case ast.State(data=ast.Ident() as data):
                self.see(data.name, data.span)
                symbol = Symbol(item.name.name, "state", item.name.span, item, self.inside)
                self.symbols.append(symbol)
                self.occurrences.append(Occurrence(item.name.span, symbol, True))
                self.row_states.setdefault(item.name.name, symbol)
            case ast.State():
                self.bind(item.name, "state", item)
            case ast.Buffer():
                self.bind(item.name, "buffer", item)
                self.buffers.add(item.name.name)
            case ast.MeshDecl():
                self.bind(item.name, "mesh", item)
            case ast.DataDecl():
                self.bind(item.name, "data", item)
            case ast.ModelDecl():
                self.bind(item.name, "model", item)
            case ast.FnDecl():
                self.bind(item.name, "fn", item)
            case ast.LossDecl():
                self.bind(item.name, "loss", item)
            case ast.Flow():
                self.bind(item.name, "flow", item)

    # ---------------------------------------------------------------------------------------------- bodies

    def body(self, item: ast.Declaration) -> None:
        self.local = {}
        match item:
            case ast.FnDecl(name=name, params=params, body=body):
                self._function(name.name, params, body)
            case ast.LossDecl(name=name, model_outputs=model_outputs, data=data, body=body):
                self._function(name.name, model_outputs + data, body)
            case ast.Flow(name=name, options=options, body=body):
                for option in options:
                    self.expr(option.value)
                self.inside = name.name
                if self.buffers:  # what rows are added with is known above the `add`, too
                    symbols, occurrences = list(self.symbols), list(self.occurrences)
                    self._statements(body, "value")
                    self.symbols, self.occurrences, self.local = symbols, occurrences, {}
                    self.fields = {n: f for n, f in self.fields.items() if n in self.buffers}
                self._statements(body, "value")
                self.inside = ""
            case ast.PlaceRule(clause=clause):
                self._selector(item)
                self._clause(clause)
            case ast.Use() | ast.UsePy():
                pass
            case _:
                for tree in _children(item):
                    self.expr(tree)

    def _function(self, name: str, params: tuple[ast.Parameter, ...], body: tuple[ast.Statement, ...]) -> None:
        for p in params:
            if p.default is not None:
                self.expr(p.default)
        self.inside = name
        for p in params:
            self.bind(p.name, "parameter", p)
        self._statements(body, "local")
        self.inside = ""

    def _selector(self, place: ast.PlaceRule) -> None:
        start = place.span.start + len("place")
        text = place.span.file.text
        while text[start : start + 1].isspace() or text[start : start + 1] == "@":
            start += 1
        word = place.selector.lstrip("@").split(".")[0]
        flows = [s for s in self.symbols if s.kind == "value" and s.name == word]
        if place.selector.startswith("@") and flows:
            self.occurrences.append(Occurrence(Span(place.span.file, start, start + len(word)), flows[0]))
        else:
            self.see(word, Span(place.span.file, start, start + len(word)))

    def _statements(self, body: tuple[ast.Statement, ...], kind: str) -> None:
        for s in body:
            match s:
                case ast.Assign(targets=targets, value=value, named=named, where=where, clause=clause):
                    self.expr(value)
                    fields = self._fields_of(value)
                    for ident, expr in named:
                        self.expr(expr)
                        fields[ident.name] = field = Symbol(ident.name, "field", ident.span, s, self.inside)
                        self.occurrences.append(Occurrence(ident.span, field, True))
                    if where is not None:
                        self.expr(where)
                    if len(targets) == 1 and fields:
                        self.fields[targets[0].name] = fields
                    for ident in targets:
                        known = self.module.get(ident.name)
                        if known is not None and known.kind == "state":
                            self.see(ident.name, ident.span)
                        else:
                            self.bind(ident, kind, s)
                    self._clause(clause)
                case ast.Do(value=value, clause=clause):
                    self.expr(value)
                    self._added(value)
                    self._clause(clause)
                case ast.Metric(name=name, value=value, columns=columns, options=options):
                    if value.span == name.span:  # `metric hist x`: the name is that of a value
                        self.see(name.name, name.span)
                        continue
                    for expr in (value, *columns, *(o.value for o in options)):
                        self.expr(expr)
                    symbol = Symbol(name.name, "metric", name.span, s, self.inside)
                    self.symbols.append(symbol)
                    self.occurrences.append(Occurrence(name.span, symbol, True))
                case ast.Save(models=models, path=path):
                    for ident in models:
                        self.see(ident.name, ident.span)
                    if path is not None:
                        self.expr(path)
                case ast.Sync(target=target, source=source) | ast.Ema(target=target, source=source):
                    self.see(target.name, target.span)
                    self.see(source.name, source.span)
                    for tree in _children(s):
                        self.expr(tree)
                case ast.WhenBlock(count=number, body=inner) | ast.RepeatBlock(times=number, body=inner):
                    self.expr(number)
                    self._statements(inner, kind)
                case ast.EvalBlock(data=data, max_iterations=limit, body=inner):
                    self.see(data.name, data.span)
                    if limit is not None:
                        self.expr(limit)
                    self._statements(inner, kind)
                case ast.RepeatUntil(body=inner, condition=condition, max_iterations=limit):
                    self._statements(inner, kind)
                    self.expr(condition)
                    self.expr(limit)
                case _:
                    for tree in _children(s):
                        self.expr(tree)

    def _added(self, tree: ast.Expr) -> None:
        """What `good.add(gen)` says of the fields of a buffer."""
        match tree:
            case ast.Call(func=ast.Attribute(value=ast.Name(name=owner), name=ast.Ident(name="add")), args=(given,)) \
                    if owner in self.buffers:
                fields = self._fields_of(given.value)
                self.unite(self.fields.setdefault(owner, fields), fields)

    def _clause(self, clause: ast.Clause | None) -> None:
        if clause is not None:
            for tree in _children(clause):
                self.expr(tree)
            for option in clause.options:
                self.expr(option.value)

    def expr(self, tree: ast.Tree) -> None:
        if isinstance(tree, ast.Name):
            self.see(tree.name, tree.span)
            return
        if isinstance(tree, ast.Call):
            self.expr(tree.func)
            called = self.meant(tree.func.name) if isinstance(tree.func, ast.Name) else None
            for arg in tree.args:
                self.expr(arg.value)
                parameter = _parameter(called, arg.name.name) if called and arg.name else None
                if parameter is not None and arg.name is not None:
                    self.occurrences.append(Occurrence(arg.name.span, parameter))
            return
        for child in _children(tree):
            self.expr(child)
        if isinstance(tree, ast.Attribute) and (field := self._fields_of(tree.value).get(tree.name.name)) is not None:
            self.occurrences.append(Occurrence(tree.name.span, field))
        elif isinstance(tree, ast.Attribute) and tree.name.name in self.row_states:
            self.occurrences.append(Occurrence(tree.name.span, self.row_states[tree.name.name]))

    def _fields_of(self, tree: ast.Tree) -> Fields:
        """The fields of the sequences or pairs that an expression gives. They come along from one to the other."""
        match tree:
            case ast.Name(name=name):
                return dict(self.fields.get(name, {}))
            case ast.Attribute(value=value, name=side):
                start = f"{side.name}."
                return {n.removeprefix(start): f for n, f in self._fields_of(value).items() if n.startswith(start)}
            case ast.Selection(value=value):
                return self._fields_of(value)
            case ast.Call(func=ast.Name(name="pair"), args=(a, b)):
                sides = (("chosen", a), ("rejected", b))
                return {f"{side}.{n}": f for side, x in sides for n, f in self._fields_of(x.value).items()}
            case ast.Call(func=ast.Attribute(value=ast.Name(name=owner), name=ast.Ident(name="sample"))) \
                    if owner in self.buffers:
                return dict(self.fields.get(owner, {}))
            case ast.Call(func=ast.Name(name="concat"), args=(first, *rest)):
                found = self._fields_of(first.value)
                for other in rest:
                    found = self.unite(found, self._fields_of(other.value))
                return found
            case ast.Call(func=ast.Name(name="prefixes")):
                return {}
            case ast.Call(func=ast.Name(name=name), args=(first, *_)) if name in FRAMES:
                return self._fields_of(first.value)
        return {}


def _parameter(called: Symbol, name: str) -> Symbol | None:
    tree = called.tree
    params = tree.params if isinstance(tree, ast.FnDecl) else tree.data if isinstance(tree, ast.LossDecl) else ()
    for p in params:
        if p.name.name == name:
            return Symbol(name, "parameter", p.name.span, p, called.name)
    return None


def _children(tree: ast.Tree) -> Iterator[ast.Tree]:
    """The expressions directly below a node."""
    for name in tree.__dataclass_fields__:
        value = getattr(tree, name)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, ast.Expr | ast.Option) and not isinstance(item, ast.Ident):
                yield item.value if isinstance(item, ast.Option) else item
