"""What an editor says about a name: a line of code and a sentence or two, as Markdown.

In: a symbol, and the facts about its program. Out: texts.
"""

from __future__ import annotations

from collections.abc import Callable

from rldsl.lsp.builtins import CALLS, CONSTRUCTORS, FIELDS, FUNCTIONS, OPTIONS
from rldsl.lsp.facts import CallFact, Facts
from rldsl.lsp.index import Symbol
from rldsl.plan.notation import layout_text
from rldsl.syntax import ast

Costs = Callable[[CallFact], list[str]]


def signature(symbol: Symbol) -> tuple[str, tuple[str, ...]]:
    """A function as it is called, and its parameters: "gae(r: token, v: token, lam = 0.95) -> (token, token)"."""
    tree = symbol.tree
    match tree:
        case ast.FnDecl(params=params, returns=returns):
            words = tuple(p.span.text for p in params)
            back = ", ".join(r.name for r in returns)
            tail = f" -> ({back})" if len(returns) > 1 else f" -> {back}" if returns else ""
            return f"{symbol.name}({', '.join(words)}){tail}", words
        case ast.LossDecl(data=data):
            words = tuple(p.span.text for p in data)
            return f"{symbol.name}({', '.join(words)})", words
        case ast.PyFunction(params=params):
            words = tuple(p.name for p in params)
            if tree.returns is None:
                return f"{symbol.name}: env", ()
            return f"{symbol.name}({', '.join(words)}) -> {tree.result}", words
    return symbol.name, ()


def placed(call: CallFact, costs: Costs) -> str:
    """Where a call runs, and what it costs as far as that is known."""
    return " · ".join([f"on {layout_text(call.placement.layout, call.placement.mesh)}", *costs(call)])


def hover(symbol: Symbol, facts: Facts, costs: Costs = lambda _: []) -> str:
    """Markdown."""
    tree = symbol.tree
    match tree:
        case ast.FnDecl(doc=doc):
            return _page(f"fn {signature(symbol)[0]}", doc)
        case ast.LossDecl(doc=doc, model_outputs=model_outputs):
            outputs = ", ".join(p.span.text for p in model_outputs)
            return _page(f"loss {signature(symbol)[0]}", doc,
                         f"takes the outputs `{outputs}` of the model being trained")
        case ast.PyFunction(returns=None):
            return _page(f"py {signature(symbol)[0]}", "An environment: a Python class with which a model talks.")
        case ast.PyFunction():
            return _page(f"py {signature(symbol)[0]}", "A Python function, called with the rows of a batch.")
        case ast.Parameter():
            return _page(tree.span.text, f"parameter of `{symbol.inside}`")
        case ast.Assign(value=value, named=named) if symbol.kind == "field":
            expr = next((e.span.text for ident, e in named if ident.name == symbol.name), "")
            shown = facts.shown(expr) or facts.shown(f"{value.span.text}.{symbol.name}")
            return _page(f"{symbol.name} = {expr}", shown, f"named in `{tree.span.text.splitlines()[0]}`")
        case ast.Assign() if symbol.kind == "value":
            shown = facts.shown(symbol.name) or (facts.shown(tree.value.span.text) if tree.named else "")
            call = next((c for c in facts.calls if c.span == tree.span), None)
            return _page(tree.span.text, shown, placed(call, costs) if call else "")
        case ast.Metric(form=form):
            return _page(tree.span.text, {"number": "logged at every step",
                                          "hist": "the distribution of these elements, logged at every step",
                                          "table": "rows of these sequences, logged at every step"}[form])
        case ast.Flow(name=name, options=options):
            return _page(f"flow {name.name}({', '.join(o.span.text for o in options)})", "the dataflow of one step")
    about = {"state": "a number that persists for the whole run",
             "buffer": "sequences that are kept for later steps: `add` and `sample`"}.get(symbol.kind, "")
    return _page(tree.span.text.splitlines()[0], about)


def word(name: str, called_on: bool) -> str:
    """The hover of a word of the language; "" for any other. called_on: it comes after a dot."""
    table = CALLS | FIELDS if called_on else FUNCTIONS | CONSTRUCTORS | OPTIONS
    return _page(*table[name]) if name in table else ""


def _page(code: str, *texts: str) -> str:
    return "\n\n".join([f"```rlf\n{code}\n```", *(t for t in texts if t)])
