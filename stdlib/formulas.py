r"""Mathematical answers in LaTeX or plain text, read into trees. Nothing is ever evaluated as Python.

In: a text. Out: a `Tree`; `Unreadable` when it is no formula of the few forms below, too long or too deeply nested.

    list     = relation {"," relation}                          unordered at the top and in \{ \}, ordered in ( ) [ ]
    relation = union {("=" | "<" | "<=" | "!=" | "in") union}    union = sum {"∪" sum}
    sum      = product {("+" | "-") product}                     product = factor {["*" | "/"] factor}
    factor   = "-" factor | postfix ["^" factor]                 postfix = atom {"!"}
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

LONGEST, DEEPEST = 2000, 40  # characters; brackets in one another


class Unreadable(Exception):
    """No formula that is understood here."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A formula."""

    # "number", "name", an operator (+ - * / ^ ! neg), "list", "set", "tuple", "matrix", "union", "relation", or the
    # name of a function
    kind: str
    args: tuple[Tree, ...] = ()  # operands, arguments or entries
    # of a number or a name; the brackets of a tuple; the signs of a relation
    value: Fraction | str | tuple[str, ...] = ""


FUNCTIONS = frozenset({"sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "ln", "log",
                       "exp", "abs"})
_WORDS = {"pi": "π", "infinity": "∞", "inf": "∞", "oo": "∞", "infty": "∞", "arcsin": "arcsin", "asin": "arcsin",
          "acos": "arccos", "atan": "arctan", "and": ",", "or": ","}
_SIGNS = {"×": "*", "·": "*", "⋅": "*", "÷": "/", "−": "-", "–": "-", "≤": "<=", "≥": ">=", "≠": "!=",
          "²": "^2", "³": "^3", "√": "\\sqrt ", "**": "^", "½": "\\frac{1}{2}", "\\cdot": "*", "\\times": "*",
          "\\div": "/", "\\leqslant": "<=",
          "\\geqslant": ">=", "\\leq": "<=", "\\geq": ">=", "\\le": "<=", "\\ge": ">=", "\\neq": "!=", "\\ne": "!=",
          "\\lt": "<", "\\gt": ">", "\\in": " in ", "∈": " in ", "\\cup": "∪", "\\pm": "±", "\\mp": "∓", "\\pi": "π",
          "\\infty": "∞", "\\lvert": "|", "\\rvert": "|", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\cfrac": "\\frac",
          "\\lbrack": "[", "\\rbrack": "]", "\\lbrace": "\\{", "\\rbrace": "\\}"}
_SIGN = re.compile(r"\\[A-Za-z]+|\*\*|[^\x00-\x7f]")
_SPACE = re.compile(
    r"\\(?:left|right|bigl?|bigr?|Bigl?|Bigr?|displaystyle|quad|qquad)(?![A-Za-z])|\\[,;:! ]|~|\$|\\[()\[\]]")
_DEGREES = re.compile(r"\^?\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|°")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf|mbox|textrm|operatorname)\s*\{([^{}]*)\}(?:\^\s*\{?[23]\}?)?")
_UNITS = re.compile(
    r"(?<=[\d\s})])\s*(?:(?:square|cubic|sq)\.?\s+)?(?:units?|cm|mm|km|kg|meters?|metres?|centimeters?|kilometers?|inch(?:es)?"
    r"|feet|foot|ft|yards?|miles?|grams?|degrees?|radians?|hours?|minutes?|seconds?|days?|weeks?|months?|years?|dollars?"
    r"|cents?|mph|liters?|litres?|ml|people|points?)\s*(?:\^\s*\{?\s*[23]\s*\}?)?$")
_MATRIX = re.compile(r"\\(begin|end)\s*\{[pbvBV]?matrix\}")
_MIXED = re.compile(r"(?<![\d./^_}])(\d+)\s+(\d+)\s*/\s*(\d+)(?!\d)")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_TOKEN = re.compile(r"\s*((?:\d+(?:\.\d*)?|\.\d+)(?:[eE]-?\d{1,3}(?![\d.]))?|\\[A-Za-z]+|\\[{}]|[A-Za-z]+"
                    r"|<=|>=|!=|[-+*/^!()\[\]{}|,;=<>_±∓∪π∞⟦⟧])",
                    re.ASCII)


def clean(text: str) -> str:
    """One way to write it: no dollars, spaces of LaTeX, units and full stop; the signs of the grammar."""
    text = " ".join(text.split()).rstrip(".").replace("\\$", "").replace("{,}", "")
    text = text.replace(",\\!", "").replace("\\%", "%")
    text = _MATRIX.sub(lambda m: "⟦" if m.group(1) == "begin" else "⟧", text)
    if "⟦" in text:
        text = text.replace("\\\\", ";").replace("&", ",")
    text = _SPACE.sub(" ", text)
    text = _SIGN.sub(lambda m: _SIGNS.get(m.group(), m.group()), _DEGREES.sub("", text)).strip()
    bare = _TEXT.sub(lambda m: " , " if m.group(1).strip() in ("and", "or") else " ", text).strip()
    text = bare if bare and re.search(r"[\dA-Za-zπ∞]", bare) else _TEXT.sub(r"\1", text)
    text = re.sub(r"\s*percent$", "%", _UNITS.sub("", text.strip()))
    if not re.search(r"[(\[]|\\\{", text):
        text = _GROUPED.sub(lambda m: m.group().replace(",", ""), text)
    return _MIXED.sub(r"(\1+\2/\3)", text).strip()


def read(text: str) -> Tree:
    """The tree of a cleaned text. a ± b is the set of both."""
    if len(text) > LONGEST:
        raise Unreadable("too long")
    if "±" in text or "∓" in text:
        both = (read(text.replace("±", "+").replace("∓", "-")), read(text.replace("±", "-").replace("∓", "+")))
        return Tree("list", tuple(x for t in both for x in (t.args if t.kind == "list" else (t,))))
    return _Reader(_tokens(text)).whole()


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text):
        token = _TOKEN.match(text, at)
        if token is None:
            raise Unreadable(text[at : at + 10])
        found.append(token.group(1))
        at = token.end()
    return found


class _Reader:
    """Recursive descent over tokens."""

    def __init__(self, tokens: list[str]):
        self.tokens, self.at, self.depth = tokens, 0, 0

    def whole(self) -> Tree:
        items = self.items()
        if self.at < len(self.tokens):
            raise Unreadable(self.tokens[self.at])
        return items[0] if len(items) == 1 else Tree("list", items)

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *wanted: str) -> str:
        """The next token, when it is one of `wanted` (or when nothing is said)."""
        token = self.next
        if not token or wanted and token not in wanted:
            return ""
        self.at += 1
        return token

    def need(self, *wanted: str) -> str:
        found = self.take(*wanted)
        if not found:
            raise Unreadable(f"{self.next} where {wanted} was expected")
        return found

    def items(self) -> tuple[Tree, ...]:
        found = [self.relation()]
        while self.take(",", "and", "or"):
            found.append(self.relation())
        return tuple(found)

    def relation(self) -> Tree:
        sides, signs = [self.union()], []
        while sign := self.take("=", "<", ">", "<=", ">=", "!=", "in"):
            signs.append(sign)
            sides.append(self.union())
        if not signs:
            return sides[0]
        if all(s in (">", ">=") for s in signs):
            return Tree("relation", tuple(reversed(sides)), tuple(s.replace(">", "<") for s in reversed(signs)))
        return Tree("relation", tuple(sides), tuple(signs))

    def union(self) -> Tree:
        found = [self.sum()]
        while self.take("∪"):
            found.append(self.sum())
        return found[0] if len(found) == 1 else Tree("union", tuple(found))

    def sum(self) -> Tree:
        found = self.product()
        while sign := self.take("+", "-"):
            found = Tree(sign, (found, self.product()))
        return found

    def product(self) -> Tree:
        found = self.factor()
        while True:
            if sign := self.take("*", "/"):
                found = Tree(sign, (found, self.factor()))
            elif self._begins():
                found = Tree("*", (found, self.factor()))
            else:
                return found

    def _begins(self) -> bool:
        """Whether a factor may begin here. `|` only closes here: |a||b| is not read."""
        token = self.next
        return bool(token) and (token[0].isalnum() or token[0] in "({[.π∞" or token[0] == "\\" and token != "\\}") \
            and token not in ("in", "and", "or")

    def factor(self) -> Tree:
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("too deep")
        try:
            if self.take("-"):
                return Tree("neg", (self.factor(),))
            self.take("+")
            found = self.atom()
            while self.take("!"):
                found = Tree("!", (found,))
            return Tree("^", (found, self.factor())) if self.take("^") else found
        finally:
            self.depth -= 1

    def atom(self) -> Tree:
        token = self.need()
        if token[0].isdigit() or token[0] == ".":
            return self._number(token)
        if token == "{":
            return self._inside("}")
        if token in "([":
            inner, end = self.items(), self.need(")", "]")
            if len(inner) == 1 and token + end in ("()", "[]"):
                return inner[0]
            return Tree("tuple", inner, token + end)
        if token == "\\{":
            inner = () if self.next == "\\}" else self.items()
            self.need("\\}")
            return Tree("set", inner)
        if token == "|":
            inside = self.sum()
            self.need("|")
            return Tree("abs", (inside,))
        if token == "⟦":
            return self._matrix()
        if token in ("π", "∞"):
            return Tree("name", value=token)
        if token[0] == "\\" or token[0].isalpha():
            return self._word(token)
        raise Unreadable(token)

    def _inside(self, end: str) -> Tree:
        inner = self.items()
        self.need(end)
        return inner[0] if len(inner) == 1 else Tree("list", inner)

    def _matrix(self) -> Tree:
        rows = [Tree("tuple", self.items(), "row")]
        while self.take(";"):
            if self.next != "⟧":
                rows.append(Tree("tuple", self.items(), "row"))
        self.need("⟧")
        return Tree("matrix", tuple(rows))

    def _number(self, token: str) -> Tree:
        found = Tree("number", value=Fraction(token))
        if self.next == "_":
            return Tree("number", value=self._in_base(token))
        if token.isdigit() and self.next == "\\frac":  # a mixed number, if the fraction is one of numbers
            at = self.at
            part = self.atom()
            if all(x.kind == "number" for x in part.args):
                return Tree("+", (found, part))
            self.at = at
        return found

    def _in_base(self, digits: str) -> Fraction:
        self.need("_")
        base = self._argument()
        if base.kind != "number" or not isinstance(base.value, Fraction):
            raise Unreadable("not a number of this base")
        try:
            return Fraction(int(digits, int(base.value)))
        except ValueError:
            raise Unreadable("not a number of this base") from None

    def _word(self, token: str) -> Tree:
        name = _WORDS.get(token.removeprefix("\\"), token.removeprefix("\\"))
        if name in ("π", "∞"):
            return Tree("name", value=name)
        if token in ("\\frac", "\\binom"):
            kind = "/" if token == "\\frac" else "binom"
            return Tree(kind, (self._argument(), self._argument()))
        if name == "sqrt" and self.take("["):
            degree = self._inside("]")
            return Tree("root", (self._argument(), degree))
        if name in FUNCTIONS:
            return self._applied(name)
        if token[0] != "\\" and len(name) == 2:  # letters side by side; longer ones are a word
            first, second = name[0], name[1]
            self.at -= 1
            self.tokens[self.at] = second
            return Tree("name", value=first)
        if self.take("_"):
            name += f"_{_plain(self._argument())}"
        return Tree("name", value=name)

    def _applied(self, name: str) -> Tree:
        base = (self._argument(),) if name == "log" and self.take("_") else ()
        power = self._argument() if self.take("^") else None  # sin^2 x
        argument = self._argument() if self.next == "{" or name == "sqrt" else self.factor()
        found = Tree(name, (argument, *base))
        return Tree("^", (found, power)) if power is not None else found

    def _argument(self) -> Tree:
        r"""{...}, or one token; of \frac12 one digit."""
        if self.take("{"):
            return self._inside("}")
        token = self.next
        if token.isdigit() and len(token) > 1 and self.tokens[self.at - 1] in ("\\frac", "\\binom"):
            self.tokens[self.at] = token[1:]
            self.tokens.insert(self.at, token[0])
        self.depth += 1
        if self.depth > DEEPEST:
            raise Unreadable("too deep")
        try:
            return self.atom()
        finally:
            self.depth -= 1


def _plain(tree: Tree) -> str:
    """A subscript as text."""
    return str(tree.value) if not tree.args else f"{tree.kind}({','.join(map(_plain, tree.args))})"
