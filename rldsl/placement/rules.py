"""Which placement clause holds for each node.

In: a graph with inline clauses and `place` rules. Out: node id -> `Choice` (mesh and options, not yet checked).
Precedence: command line > placement file > inline > rules of the program itself; inside one of these, the more
specific selector wins: `@name`, then `model.method`, then one wildcard, then `*.*`, which `*` is short for. A clause
that names a mesh, or `auto`, is complete; one that names options only changes these and leaves the rest to the next.
Errors: RL0313 a selector that matches nothing, RL0314 two rules with equal right.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from rldsl.diag import Diagnostic, Failure, Fix, Label
from rldsl.graph.model import Clause, Compute, Generate, Graph, Infer, MeshRef, Node, Rule, Train, nodes
from rldsl.plan.expr import Scalar
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.naming import label_text
from rldsl.source import COMMAND_LINE, Span

Option = tuple[str, Scalar, Span]


@dataclass(frozen=True, slots=True)
class Choice:
    """What the program and its rules ask for one node."""

    mesh: MeshRef | None  # None: not given
    options: tuple[Option, ...]  # (name, value, where)
    span: Span  # of the clause that decided the mesh
    why: str = "inline"  # the kind of clause that decided the mesh
    auto: bool = False  # the compiler chooses the mesh, and what the options leave open


def resolve_choices(graph: Graph, place_file: str = "") -> dict[str, Choice]:
    """Choices of all nodes that have one. place_file: the name of the placement file, to tell its rules apart."""
    found, problems = collect_choices(graph, place_file)
    if problems:
        raise Failure(problems)
    return found


def collect_choices(graph: Graph, place_file: str = "") -> tuple[dict[str, Choice], tuple[Diagnostic, ...]]:
    """The choices, and what is wrong with the rules."""
    every = tuple(nodes(graph.items))
    problems = [d for rule in graph.rules if (d := check_selector(rule, every))]
    found: dict[str, Choice] = {}
    for node in every:
        clauses = _clauses(node, graph.rules, place_file, every, problems)
        if clauses:
            found[node.id] = _merge(clauses)
    return found, tuple(dict.fromkeys(problems))


def selector_of(node: Node, every: Iterable[Node]) -> str:
    """The selector of one node among `every`, as a program writes it: `@name`, and for a computation that the program
    gives no name, its source text, with its line where several have that text."""
    return written_selector(_selector_of(node, every))


def _selector_of(node: Node, every: Iterable[Node]) -> str:
    """The same without quotes and escapes."""
    if not isinstance(node, Compute) or not node.source:
        return f"@{node.id}"
    text = label_text(node.source)
    sources = {n.source for n in every if isinstance(n, Compute) and text in _texts(n)}
    return f"@{text if len(sources) < 2 else node.source}"


def _texts(node: Node) -> set[str]:
    """By which texts `@"text"` selects a computation: whole or elided, with its line or without."""
    return {x for label in (node.source, node.label) for x in (label, label_text(label))} - {""} \
        if isinstance(node, Compute) else set()


def names_of(node: Node) -> tuple[str, tuple[str, ...]]:
    """(model, methods) that selectors know a call by; ("", ()) for what is not a call."""
    match node:
        case Generate():
            return node.model, ("generate",)
        case Infer():
            return node.model, tuple(dict.fromkeys((OUTPUTS[node.output_name].call, node.output_name)))
        case Train():
            return node.model, ("train",)
        case _:
            return "", ()


def specificity(selector: str, node: Node) -> int:
    """3 for `@name`, 2 for `model.method`, 1 for one wildcard, 0 for `*.*`; -1 when it does not match."""
    if selector.startswith("@"):
        return 3 if selector[1:] == node.id or " ".join(selector[1:].split()) in _texts(node) else -1
    model, _, method = ("*.*" if selector == "*" else selector).partition(".")
    name, methods = names_of(node)
    if not name or model not in ("*", name) or not (method == "*" or method in methods):
        return -1
    return (model != "*") + (method != "*")


def tier(rule: Rule, place_file: str) -> int:
    """3 for a rule of the command line, 2 of the placement file, 0 of the program; a clause at the call is 1."""
    name = rule.span.file.name
    return 3 if name == COMMAND_LINE else 2 if place_file and name == place_file else 0


def clauses_of(node: Node, rules: Iterable[Rule], place_file: str) -> list[Clause]:
    """The clauses for a node, the strongest first."""
    return [clause for clause, _ in _clauses(node, rules, place_file, (), [])]


def _clauses(node: Node, rules: Iterable[Rule], place_file: str, every: Iterable[Node],
             problems: list[Diagnostic]) -> list[tuple[Clause, str]]:
    """All clauses for a node of `every`, the strongest first."""
    ranked: dict[tuple[int, int], list[tuple[Clause, str, Span]]] = {}
    if node.clause is not None:
        ranked[1, 3] = [(node.clause, "inline", node.clause.span)]
    for rule in rules:
        special = specificity(rule.selector, node)
        if special >= 0:
            rank = tier(rule, place_file)
            why = ("rule in the program", "", "placement file", "command line")[rank]
            ranked.setdefault((rank, special), []).append((rule.clause, why, rule.span))
    for same in ranked.values():
        if len(same) > 1 and (len([1 for c, _, _ in same if c.mesh or c.auto]) > 1 or _overlap(c for c, _, _ in same)):
            first, second = same[0][2], same[1][2]
            problems.append(Diagnostic("RL0314", "two placement rules of equal precedence match one call", second,
                                       f"also places `{selector_of(node, every)}`",
                                       (Label(first, "the other rule"),),
                                       help="remove one, or make one more specific: `@name` takes precedence over "
                                            "`model.call`, and that over `model.*` and `*.call`"))
    return [(c, why) for key in sorted(ranked, reverse=True) for c, why, _ in ranked[key]]


def _overlap(clauses: Iterable[Clause]) -> bool:
    names = [name for c in clauses for name, _, _ in c.options]
    return len(set(names)) < len(names)


def _merge(clauses: list[tuple[Clause, str]]) -> Choice:
    """Options of clauses without a mesh, down to the first clause that names one and ends the list."""
    options: dict[str, Option] = {}
    for clause, why in clauses:
        if _overlap([clause]):  # an option given twice: `read_options` says so
            return Choice(clause.mesh, clause.options, clause.span, why)
        own = tuple(o for o in clause.options if o[0] not in options)
        if clause.mesh is not None or clause.auto:
            return Choice(clause.mesh, (*options.values(), *own), clause.span, why, clause.auto)
        options |= {o[0]: o for o in own}
    clause, why = clauses[0]
    return Choice(None, tuple(options.values()), clause.span, why)


def check_selector(rule: Rule, every: tuple[Node, ...]) -> Diagnostic | None:
    """RL0313 where the selector of a rule matches no node of `every`, or a text matches several computations."""
    if rule.selector == "@":
        return Diagnostic("RL0313", "the selector `@` names nothing", selector_span(rule), "an empty text",
                          help='write a name, `@gen`, or the source text of a computation, `@"mean(r)"`')
    matched = [node for node in every if specificity(rule.selector, node) >= 0]
    if matched:
        return _ambiguity(rule, matched)
    calls = [f"{m}.{w}" for n in every for m, ws in (names_of(n),) for w in ws[:1]]
    named = [_selector_of(n, every) for n in every if isinstance(n, Compute) and n.source or "#" not in n.id]
    known = named if rule.selector.startswith("@") else calls
    near = [written_selector(s) for s in get_close_matches(rule.selector, sorted(set(known)), n=1)]
    advice = f"did you mean `{near[0]}`?" if near else \
        f"calls of the program: {', '.join(map(written_selector, dict.fromkeys(known)))}"
    span = selector_span(rule)
    typed = written_selector(rule.selector) if span is rule.span else span.text
    fix = Fix(((span, near[0]),)) if near and typed.replace(" ", "") == written_selector(rule.selector) else None
    return Diagnostic("RL0313", f"`{typed}` matches no call of this program", span, "no match",
                      help=advice, fix=fix)


def _ambiguity(rule: Rule, matched: list[Node]) -> Diagnostic | None:
    """RL0313 where the text of a rule is that of several computations. Equal texts in one line count as one."""
    text = " ".join(rule.selector[1:].split())
    sources = dict.fromkeys(n.source for n in matched if isinstance(n, Compute) and text in _texts(n))
    if not rule.selector.startswith("@") or len(sources) < 2:
        return None
    each = ", ".join(f"`{written_selector('@' + x)}`" for x in sources)
    return Diagnostic("RL0313", f"`{written_selector(rule.selector)}` matches {len(sources)} computations",
                      selector_span(rule), "which of them?", help=f"write one of {each}")


def written_selector(selector: str) -> str:
    """A selector as a program writes it: a text that is not a name needs quotes, and escapes inside them."""
    if not selector.startswith("@") or selector[1:].isidentifier():
        return selector
    text = selector[1:].replace("\\", "\\\\").replace('"', '\\"')
    return f'@"{text}"'


def selector_span(rule: Rule) -> Span:
    """The span of the selector, between `place` and the clause."""
    start, stop = rule.span.start + len("place"), rule.clause.span.start
    text = rule.span.file.text[start:stop]
    if stop <= start or not text.strip():
        return rule.span
    return Span(rule.span.file, start + len(text) - len(text.lstrip()), start + len(text.rstrip()))


def option_span(clause: Span | None, name: str) -> Span | None:
    """The span of an option in its clause."""
    found = re.search(rf"\b{name}[ \t]*=[ \t]*\w+", clause.text) if clause else None
    return Span(clause.file, clause.start + found.start(), clause.start + found.end()) if clause and found else clause
