"""Completions at a place in a text that is being written.

In: the text before the place, the index of the file, the facts. Out: `Item`s, the likeliest kind first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rldsl.lsp.builtins import CALLS, CONSTRUCTORS, FIELDS, FUNCTIONS
from rldsl.lsp.describe import signature
from rldsl.lsp.facts import Facts
from rldsl.lsp.index import FRAMES, Index, Symbol
from rldsl.lsp.library import Library
from rldsl.placement.degrees import OPTIONS
from rldsl.plan.expr import LEVELS
from rldsl.plan.heads import HEADS, INFERENCE_CALLS, TRAIN
from rldsl.semantics import options
from rldsl.semantics.modules import library
from rldsl.syntax import ast
from rldsl.syntax.parse import accepted
from rldsl.syntax.recover import open_brackets, visible

PLACED = {"dp": "data-parallel degree", "tp": "tensor-parallel degree", "pp": "pipeline stages",
          "vpp": "train only: chunks of layers per pipeline rank (interleaved schedule)",
          "cp": "context-parallel degree: divides the tokens of each sequence",
          "ep": "expert-parallel degree, along dp",
          "zero": "train only: 1 shards the optimizer state over dp, 2 also gradients, 3 also parameters",
          "mbs": "maximum number of sequences per micro-batch (0: no limit)",
          "mbt": "maximum number of tokens per micro-batch (0: no "
                                                                    "limit)",
          "offload": "keep parameters in host memory between calls",
          "recompute": "full: recompute activations in the backward pass instead of keeping them",
          "keep": "false: free a copy after its last use in a step",
          "reuse": "generate only: continue from the KV cache of the sequences",
          "waiting": "generate with an environment only: offload or recompute gives slots away that wait for answers",
          "backend": "the library that executes the call"}
TABLES = {"generate": options.GENERATE, "train": options.TRAIN, "group": options.GROUP, "lora": options.LORA,
          "jsonl": options.DATA, "parquet": options.DATA, "hf": options.DATA | options.HF,
          "rows": options.BUFFER, "prefixes": options.PREFIXES,
          **{name: options.OPTIMIZER | own for name, own in options.OPTIMIZERS.items()},
          **dict.fromkeys(HEADS, options.MODEL)}
SEQUENCES = {"generated": ("logprobs", "finished"), "pairs": ("chosen", "rejected"), "prefixes": ("at",)}


COLUMN = r"(?!(tokens|lengths|columns)$)\w+"  # a value of a batch of data that is a column


@dataclass(frozen=True, slots=True)
class Item:
    """One completion."""

    text: str  # what is inserted at the cursor
    kind: str  # "keyword", "function", "method", "variable", "option", "field", "module", "class" or "level"
    detail: str = ""  # shown next to the text
    doc: str = ""  # shown when the item is selected
    more: tuple[tuple[int, str], ...] = ()  # further insertions: (offset in the file, text)


@dataclass(frozen=True, slots=True)
class CallAt:
    """The call that is being written at the cursor."""

    name: str               # what is called, as written
    given: tuple[str, ...]  # names of the options so far
    position: int           # of the argument at the cursor, from 0
    option: str             # name of the option at the cursor; "": a positional argument


def complete(text: str, offset: int, index: Index, facts: Facts, files: Library) -> list[Item]:
    """Everything that fits, whatever has been typed of the word already."""
    start = offset
    while start and (text[start - 1].isalnum() or text[start - 1] == "_"):
        start -= 1
    before = text[:start]
    written = before[before.rfind("\n") + 1 :]
    line = visible(written)
    if written.count('"') % 2 or written.count("#") > line.count("#"):  # in a string or a comment
        return []
    if re.search(r"\buse\s+std\.$", line):
        return [Item(m, "module") for m in library() if m != "prelude"]
    if used := re.search(r"\buse\s+(std\.\w+|\"[^\"]*\")\s*\(([^)]*)$", written):
        found = files.names(used[1].strip('"'), index.file.source.name)
        return [_function(s) for s in found if s.name not in re.findall(r"\w+", used[2])]
    if owner := re.search(r"([A-Za-z_]\w*)\s*\.\s*((?:chosen|rejected)\s*\.\s*)?$", line):
        within = call_at(text, start)
        return list(_members(owner[1], owner[2].rstrip(" .") if owner[2] else "", index, facts, start,
                             within is not None and within.option == "weight"))
    if re.search(r"\bby\s+$", line):
        return [Item(x, "level") for x in LEVELS[:4]]
    scope = index.scope(start)
    if re.search(r"\bon\s+$", line):
        meshes = [Item(s.name, "variable", "mesh") for s in scope.values() if s.kind == "mesh"]
        return [*meshes, Item("mesh", "function", *FUNCTIONS["mesh"])]
    if clause := re.search(r"\bon\s+(?:mesh\([^)]*\)|\w+)((?:\s+\w+=\S+)*)\s+$", line):
        given = re.findall(r"(\w+)=", clause[1])
        return [Item(f"{n}=", "option", PLACED.get(n, "")) for n in OPTIONS if n not in given]
    known = [*_options(text, start, scope), *_words(before), *_names(scope), *_builtins()]
    return [*known, *_elsewhere(index.file, {i.text for i in known}, files)] if _inside(index, start) else known


def _members(name: str, side: str, index: Index, facts: Facts, offset: int, weighs: bool) -> Iterator[Item]:
    """What may follow `name.`, or `name.side.` of pairs. weighs: in a weight, which is made of numbers of all rows."""
    scope = index.scope(offset)
    symbol = scope.get(name)
    if symbol is None:
        return
    if isinstance(symbol.tree, ast.ModelDecl) and isinstance(symbol.tree.value.func, ast.Name):
        head = HEADS.get(symbol.tree.value.func.name)
        for call in head.calls if head is not None else ():
            if call != TRAIN or symbol.tree.optimizer is not None:
                yield Item(call, "method", *CALLS[call])
    elif symbol.kind == "data" and weighs:
        yield from (Item(n, "field", d) for n, d in (_row_states(name, index) | _columns(symbol)).items())
    elif symbol.kind == "data":
        yield Item("next", "method", *CALLS["next"])
    elif symbol.kind == "buffer" and weighs:
        yield from (Item(n, "field", _named(f)) for n, f in index.fields.get(name, {}).items())
        yield Item("finished", "field", FIELDS["finished"][1])
    elif symbol.kind == "buffer":
        yield from (Item(n, "method", *CALLS[n]) for n in ("add", "sample"))
    elif isinstance(symbol.tree, ast.Assign):
        source = _source(symbol.tree.value, scope)
        paired = f"{name}.chosen" in facts.batches or any(n.startswith("chosen.") for n in index.fields.get(name, {}))
        kind = "pairs" if paired and not side else \
            "prefixes" if source.startswith("prefixes(") else \
            "generated" if ".generate(" in source or f"{name}.logprobs" in facts.levels else ""
        columns = {v.rpartition(".")[2]: f"{level}: a column of the data" for v, (level, _) in facts.levels.items()
                   if ".next(" in source and re.match(rf"{name}\.(chosen\.|rejected\.)?{COLUMN}$", v)}
        fields = {n.removeprefix(f"{side}."): f for n, f in index.fields.get(name, {}).items() if n.startswith(side)}
        named = {n: _named(f) for n, f in fields.items() if "." not in n}
        states = _row_states(source.partition(".next(")[0], index) if ".next(" in source else {}
        known = {n: FIELDS[n][1] for n in SEQUENCES.get(kind, ())}
        yield from (Item(n, "field", d) for n, d in (columns | states | known | named).items())


def _named(field: Symbol) -> str:
    return f"named in `{field.tree.span.text.splitlines()[0]}`"


def _row_states(data: str, index: Index) -> dict[str, str]:
    """The states of the rows of a data source, and what they are."""
    return {s.name: "a number for each row, which a program may assign" for s in index.symbols
            if isinstance(s.tree, ast.State) and s.tree.data is not None and s.tree.data.name == data}


def _columns(data: Symbol) -> dict[str, str]:
    """The number columns of a data source, and what they are."""
    args = data.tree.value.args if isinstance(data.tree, ast.DataDecl) and isinstance(data.tree.value, ast.Call) else ()
    numbers = next((a.value for a in args if a.name is not None and a.name.name == "numbers"), None)
    items = numbers.items if isinstance(numbers, ast.ListOf) else ()
    return {i.value: "a column of the data" for i in items if isinstance(i, ast.String)}


def _source(tree: ast.Tree, scope: dict[str, Symbol]) -> str:
    """The text of the call that gives the sequences of an expression, however they were selected and picked since."""
    for _ in scope:  # each name leads to an earlier one
        while isinstance(tree, ast.Call) and isinstance(tree.func, ast.Name) and tree.func.name in FRAMES \
                and tree.func.name != "prefixes" and tree.args:
            tree = tree.args[0].value
        while isinstance(tree, ast.Attribute):
            tree = tree.value
        known = scope.get(tree.name) if isinstance(tree, ast.Name) else None
        if known is None or not isinstance(known.tree, ast.Assign):
            break
        tree = known.tree.value
    return tree.span.text


def _options(text: str, offset: int, scope: dict[str, Symbol]) -> Iterator[Item]:
    """Options of the call around the place."""
    found = call_at(text, offset)
    if found is None:
        return
    name, given = found.name, found.given
    if name in scope and scope[name].kind in ("fn", "loss"):
        for word in signature(scope[name])[1]:
            key = re.split(r"[:=\s]", word)[0]
            if key not in given:
                yield Item(f"{key}=", "option", word)
        return
    for key, option in TABLES.get(name, {}).items():
        if key not in given:
            yield Item(f"{key}=", "option", "needed" if option.needed else _default(option))
    if name == "train" and "loss" not in given:
        yield Item("loss=", "option", "needed")
    if name in INFERENCE_CALLS and "prompt" not in given:
        yield Item("prompt=", "option", "default: the prompts of the sequences")
    if name in ("next", "sample") and "weight" not in given:
        yield Item("weight=", "option", "default: all rows are equally likely" if name == "sample" else
                   "default: the next rows")


def option(text: str, start: int, end: int, scope: dict[str, Symbol]) -> str:
    """What the word from `start` to `end` means as the name of an option or argument, as Markdown; "" if it is none."""
    name = text[start:end]
    if not re.match(r"\s*=(?!=)", text[end:]):
        return ""
    found = call_at(text, end)
    known = next((i for i in _options(text, start, scope) if i.text == f"{name}="), None)
    if found is None and name in PLACED:
        return f"```rlf\n{name}=\n```\n\n{PLACED[name]}"
    if found is None or known is None:
        return ""
    return f"```rlf\n{name}=\n```\n\noption of `{found.name}`" + (f": {known.detail}" if known.detail else "")


def _default(option: options.Opt) -> str:
    return "" if option.default is None else f"default {options.shown(option.default)}"


def call_at(text: str, offset: int) -> CallAt | None:
    """The call whose brackets are open at an offset."""
    for at in reversed(open_brackets(text, offset)):
        name = re.search(r"([A-Za-z_]\w*)\s*$", text[:at])
        if text[at] == "(" and name:
            parts = _outside_brackets(visible(text)[at + 1 : offset]).split(",")
            options = [re.match(r"\s*(\w+)\s*=(?!=)", p) for p in parts]
            last = options[-1]
            return CallAt(name[1], tuple(o[1] for o in options if o), len(parts) - 1, last[1] if last else "")
    return None


def _outside_brackets(text: str) -> str:
    """`text` without what is inside its brackets."""
    depth, kept = 0, []
    for c in text:
        depth += c in "([{"
        kept.append("" if depth else c)
        depth -= c in ")]}"
    return "".join(kept)


def _words(before: str) -> Iterator[Item]:
    """Keywords that the grammar takes here."""
    return (Item(w, "keyword") for w in accepted(before))


def _names(scope: dict[str, Symbol]) -> Iterable[Item]:
    kinds = {"fn": "function", "loss": "function", "python": "function", "model": "class", "data": "class"}
    for s in scope.values():
        detail = signature(s)[0] if s.kind in ("fn", "loss", "python") else s.kind
        yield Item(s.name, kinds.get(s.kind, "variable"), detail, getattr(s.tree, "doc", ""))


def _function(symbol: Symbol, module: str = "", more: tuple[tuple[int, str], ...] = ()) -> Item:
    detail = signature(symbol)[0] + (f"  ({module})" if module else "")
    return Item(symbol.name, "function", detail, getattr(symbol.tree, "doc", ""), more)


def _inside(index: Index, offset: int) -> bool:
    """Whether the place is in a body, where functions are called."""
    return any(i.span.start <= offset <= i.span.end for i in index.file.items
               if isinstance(i, ast.FnDecl | ast.LossDecl | ast.Flow))


def _elsewhere(file: ast.File, known: set[str], files: Library) -> Iterator[Item]:
    """Functions of the library that are not imported yet, with what imports them."""
    for module, symbols in files.shelf().items():
        for symbol in symbols:
            if symbol.name not in known:
                yield _function(symbol, module, (_import(file, module, symbol.name),))


def _import(file: ast.File, module: str, name: str) -> tuple[int, str]:
    """Into the `use` of the module, else as a line after the last `use`, else before the first declaration and the
    comment that documents it."""
    uses = [i for i in file.items if isinstance(i, ast.Use | ast.UsePy)]
    own = next((u for u in uses if isinstance(u, ast.Use) and u.module == module and u.names), None)
    if own is not None:
        return own.names[-1].span.end, f", {name}"
    if uses:
        return uses[-1].span.end, f"\nuse {module} ({name})"
    documented = not file.items or isinstance(file.items[0], ast.FnDecl | ast.LossDecl)
    return (0 if documented else file.items[0].span.start), f"use {module} ({name})\n"


def _builtins() -> Iterable[Item]:
    return (Item(n, "function", sig, doc) for n, (sig, doc) in (FUNCTIONS | CONSTRUCTORS).items())
