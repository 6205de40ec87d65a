"""Syntax errors in words of the language (RL0001 to RL0007): what is here, what was expected, and how to fix common
slips, as an applicable fix if it is certain.
"""

from __future__ import annotations

import re
import unicodedata
from difflib import get_close_matches

from lark.exceptions import UnexpectedCharacters, UnexpectedInput

from rldsl.diag import Diagnostic, Fix, Label
from rldsl.source import Span
from rldsl.syntax.recover import open_brackets, visible

# Terminals as a reader would call them. What is not listed is a keyword and is shown as it is written.
WORDS = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "_NL": "the end of the line", "LPAR": "`(`",
    "RPAR": "`)`", "LSQB": "`[`", "RSQB": "`]`", "LBRACE": "`{`", "RBRACE": "`}`", "EQUAL": "`=`", "COLON": "`:`",
    "COMMA": "`,`", "DOT": "`.`", "SEMICOLON": "`;`", "STAR": "`*`", "AT": "`@`", "$END": "the end of the file",
    "__ANON_0": "`->`", "MINUS": "`-`", "MAYBE": "`?`",
}
OPERATORS = {"OR", "AND", "COMPARE", "PLUS", "SLASH", "POWER"}
VALUE = {"NAME", "NUMBER", "STRING", "LPAR", "LSQB"}  # together: any expression
DECLARATIONS = ("use", "param", "state", "buffer", "cluster", "mesh", "data", "model", "fn", "loss", "place", "flow")
PLACEMENT = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "mbs", "mbt", "recompute", "offload", "keep", "reuse",
             "waiting", "backend")
UNITS = ("prompts", "sequences", "pairs", "tokens")
STATEMENTS = {"METRIC", "SAVE", "EVERY", "REPEAT", "RETURN"}

# What other languages write -> (what to write here, whether that may be put in its place unseen).
CHARACTERS = {
    "&": ("and", "&&"), "|": ("or", "||"), "!": ("not ", "!"), "^": ("**", "^"),
    **{c: ('"', c) for c in "“”„‟«»"},
}
FOREIGN = {
    "def": "a function is written `fn name(x: token) -> token { return ... }`",
    "if": "to choose between values, write `where(condition, a, b)`",
    "else": "to choose between values, write `where(condition, a, b)`",
    "for": "write `repeat 4 { ... }`; arithmetic applies to the whole batch without a loop",
    "while": "write `repeat { ... } until condition max 4`",
    "import": "write `use std.ppo (gae)`, or `use py \"file.py\" (f: gen -> seq)`",
    "from": "write `use std.ppo (gae)`", "class": "programs have no classes; see docs/language.md",
    "lambda": "declare it: `fn name(x: token) -> token { return ... }`", "let": "write `name = value`",
    "var": "write `name = value`", "const": "write `name = value`, or `param name = value`",
    "function": "a function is written `fn name(x: token) -> token { return ... }`",
    "print": "to log a number, write `metric name = value`",
}


def explain(error: UnexpectedInput, span: Span, text: str) -> Diagnostic:
    """One diagnostic for an error at `span` of `text`."""
    if isinstance(error, UnexpectedCharacters):
        return _character(span, text)
    accepted = set(getattr(error, "accepts", None) or getattr(error, "expected", ()) or ())
    token = getattr(error, "token", None)
    kind, word = (token.type, str(token)) if token is not None else ("", "")
    if kind == "RBRACE" and "RBRACE" not in accepted and not VALUE & accepted and not STATEMENTS & accepted:
        return Diagnostic("RL0006", "unmatched `}`", span, "no block is open here", help="remove it",
                          fix=Fix(((span, ""),)))
    if accepted == {"EQUAL"} and (two := _two_words(span, text)):
        return two
    found = WORDS[kind] if kind in ("_NL", "$END") else f"`{word}`"
    help_, fix = _mend(word, accepted, span, text)
    help_ = _unnamed_array(span, text) or _unbracketed_option(span, text) or help_
    return Diagnostic("RL0001", f"unexpected {found}", span, f"expected {expected(accepted)}", help=help_,
                      fix=fix)


def _unnamed_array(span: Span, text: str) -> str:
    """Help for `metric hist gen.logprobs`: only a name is its own name; "" anywhere else."""
    line = text[text.rfind("\n", 0, span.start) + 1 :].partition("\n")[0]
    found = re.match(r"[ \t{]*metric[ \t]+(hist|table)[ \t]+([A-Za-z_]\w*)[.([+*/-]", line)
    if found is None or span.start != text.rfind("\n", 0, span.start) + found.end():
        return ""
    value = line[found.start(2) :].partition("#")[0].split("}")[0].strip()
    if named := re.match(r"([^=<>!]*[^=<>!\s])\s*=(?!=)\s*(.*)", value):
        return f"a name is one word: `metric {found[1]} {re.sub(r'[^A-Za-z0-9_]+', '_', named[1])} = {named[2]}`"
    return f"give it a name: `metric {found[1]} NAME = {value}`"


def _unbracketed_option(span: Span, text: str) -> str:
    """Help for `low=edge - 0.5` or `dp=2 * n`: the value of an option ends before an operator; "" anywhere else."""
    line = text[text.rfind("\n", 0, span.start) + 1 :].partition("\n")[0].partition("#")[0]
    before = line[: span.start - (text.rfind("\n", 0, span.start) + 1)]
    option = re.search(r"[ \t]([A-Za-z_]\w*)[ \t]*=[ \t]*(-?[\w.]+)[ \t]*$", before)
    rest = re.match(r"(\*\*|[-+*/])[ \t]*[\w.(][^=]*?(?=[ \t]+[A-Za-z_]\w*=|[ \t]*$)", line[len(before) :])
    if option is None or rest is None:
        return ""
    return f"put brackets around the value: `{option[1]}=({option[2]}{before[option.end(2) :]}{rest[0]})`"


def _two_words(span: Span, text: str) -> Diagnostic | None:
    """`x = a b`: the grammar takes `b` for an option of a placement, and misses its `=`. Two names in a row are meant
    by nobody; a word of another language at the head of the line explains them."""
    line = text[text.rfind("\n", 0, span.start) + 1 : span.start]
    last = re.search(r"[\w\])\"][ \t]+([A-Za-z_]\w*)[ \t]*$", line)
    head = re.match(r"[ \t{]*([A-Za-z_]\w*)", line)
    start = span.start - len(line)
    if head and head[1] in FOREIGN:
        return Diagnostic("RL0001", f"unexpected `{head[1]}`",
                          Span(span.file, start + head.start(1), start + head.end(1)), "expected a statement",
                          help=f"there is no `{head[1]}`: {FOREIGN[head[1]]}")
    if not last or get_close_matches(last[1], PLACEMENT, n=1, cutoff=0.7):
        return None
    return Diagnostic("RL0001", f"unexpected `{last[1]}`",
                      Span(span.file, start + last.start(1), start + last.end(1)),
                      "expected an operator or the end of the line",
                      help=_rlf(last[1], line[: last.start(1)].rstrip(), False))


def unclosed_bracket(span: Span, text: str) -> Diagnostic:
    """The line of the bracket is whole but for its partner: then that goes to the end of the line."""
    close = {"(": ")", "[": "]"}[span.text]
    stop = text.find("\n", span.start)
    line = visible(text)[span.start : stop if stop >= 0 else len(text)].rstrip()
    sure = line[-1].isalnum() or line[-1] in "_)]\"" or text[span.start + len(line) - 1] == '"'
    end = Span(span.file, span.start + len(line), span.start + len(line))
    inside = [c for c in line if c in "()[]{}"]
    fix = Fix(((end, close),)) if sure and inside.count(span.text) == inside.count(close) + 1 else None
    return Diagnostic("RL0005", f"unclosed `{span.text}`", span, "opened here", help=f"add `{close}`", fix=fix)


def unclosed_block(span: Span, next_: Span | None, sure: bool) -> Diagnostic:
    """next_: where the next declaration begins; None at the end of the file. sure: a brace at the end fixes it."""
    end = Span(span.file, len(span.file.text), len(span.file.text))
    text = span.file.text
    fix = Fix(((end, "}\n" if text.endswith("\n") else "\n}\n"),)) if sure else None
    labels = (Label(next_, "this is still inside the block"),) if next_ else ()
    label = "opened here" if next_ else "opened here, but never closed"
    return Diagnostic("RL0004", "unclosed block", span, label, labels, help="add `}`", fix=fix)


def too_deep(span: Span) -> Diagnostic:
    return Diagnostic("RL0007", "too deeply nested", span, "here", help="split it and give names to its parts")


def expected(accepted: set[str]) -> str:
    """The terminals that are allowed here, an expression and operators as one word each."""
    rest = accepted - {"UNIT"}
    words = []
    if {"FLOW", "MODEL"} <= rest:
        return "a declaration"
    if rest >= VALUE:
        words, rest = ["a statement" if STATEMENTS & rest else "a value"], rest - VALUE - {"MINUS", "NOT"}
        rest = {t for t in rest if t in WORDS} if words == ["a statement"] else rest
    elif OPERATORS & rest:
        rest = rest - {"STAR", "MINUS", "LPAR", "LSQB", "DOT"}
    words += sorted({"an operator" if t in OPERATORS else WORDS.get(t, f"`{t.lower()}`") for t in rest})
    if len(words) > 7:
        words = [w for w in words if w != "an operator"][:6] + ["…"]
    if not words:
        return "something else"
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _character(span: Span, text: str) -> Diagnostic:
    """The diagnostic for a character that no token begins with."""
    c = text[span.start : span.start + 1]
    line_end = text.find("\n", span.start)
    rest = text[span.start : line_end if line_end >= 0 else len(text)]
    if c == '"':
        plain = re.fullmatch(r'"([\w./\- ]*[\w./\-])([)\],]*[ \t\r]*)', rest)  # a path, then only closing brackets
        below = text[span.start + len(rest) + 1 :].split("\n", 1)[0]
        plain = plain if below.count('"') % 2 == 0 else None  # the text may end on the next line
        at = span.start + plain.end(1) if plain else 0
        return Diagnostic("RL0002", "unterminated string", span, "opened here",
                          help="close it with `\"` on the same line",
                          fix=Fix(((Span(span.file, at, at), '"'),)) if plain else None)
    if c == "'":
        quoted = re.match(r"'([^'\"\\\n]*)'", rest)
        ends = [span.start, span.start + quoted.end() - 1] if quoted else []
        return Diagnostic("RL0003", "invalid character `'`", span, "not part of the language",
                          help="strings use double quotes: `\"...\"`",
                          fix=Fix(tuple((Span(span.file, i, i + 1), '"') for i in ends)) if ends else None)
    if not c.isprintable() or unicodedata.category(c) in ("Zs", "Cf"):
        space = unicodedata.category(c) == "Zs"
        return Diagnostic("RL0003", f"invalid invisible character U+{ord(c):04X}", span,
                          unicodedata.name(c, "a control character").lower(),
                          help="replace it with a regular space" if space else "delete it",
                          fix=Fix(((span, " " if space else ""),)))
    if number := re.match(r"([0-9][0-9_]*(?:\.[0-9_]+)?(?:[eE][+-]?[0-9]+)?[kM]?)(\w+)", rest):
        digits, name = number.groups()
        whole = Span(span.file, span.start, span.start + number.end())
        if half := re.match(r"[eE][+-]?(?![0-9\w])", rest[number.end(1):]):
            return Diagnostic("RL0003", f"invalid number `{digits}{half.group()}`",
                              Span(span.file, span.start, span.start + number.end(1) + half.end()),
                              "digits of the exponent are missing", help=f"write a whole exponent, as in `{digits}e-6`")
        return Diagnostic("RL0003", f"invalid number `{digits}{name}`", whole, f"`{name}` cannot follow `{digits}`",
                          help=f"put a space between a number and a name: `{digits} {name}`; the only suffixes of "
                               "numbers are `k` (1,000) and `M` (1,000,000)")
    word, written = CHARACTERS.get(c, ("", ""))
    if word == '"':
        marks = [span.start + i for i, x in enumerate(rest) if x in "“”„‟«»"]
        return Diagnostic("RL0003", f"invalid operator `{c}`", span, "not part of the language",
                          help="strings use straight double quotes: `\"...\"`",
                          fix=Fix(tuple((Span(span.file, i, i + 1), '"') for i in marks)) if len(marks) == 2 else None)
    if word and rest.startswith(written):
        whole = Span(span.file, span.start, span.start + len(written))
        return Diagnostic("RL0003", f"invalid operator `{written}`", whole, "not part of the language",
                          help=f"write `{word.strip()}`", fix=Fix(((whole, word),)))
    help_ = "write it as a fraction: 95% is 0.95" if c == "%" else ""
    return Diagnostic("RL0003", f"invalid operator `{c}`", span, "not part of the language", help=help_)


def _rlf(token: str, line: str, inside: bool) -> str:
    """Advice on a form of the language that is in the wrong place. line: its line up to `token`. inside: in round
    or square brackets."""
    name = re.search(r"(?<![\w.])([A-Za-z_]\w*)$", line)
    if token == "where":
        given = name[1] if name else "gen"
        return f"a selection is a statement or an argument: write `kept = {given} where ...`, then use `kept`"
    if token == "with":
        given = name[1] if name else "gen"
        return f"values are named in a statement: write `scored = {given} with ...`, then use `scored`"
    if token in UNITS and line and (line[-1].isalnum() or line[-1] in "_)"):
        return f"a unit follows a number: `param {name[1] if name else 'size'} = 8 {token}`"
    ema = re.match(r"[ \t{]*ema[ \t]+(\w+)[ \t]+from[ \t]+(\w+)[ \t]*(every|[A-Za-z_]\w*)?$", line)
    if ema and (ema[3] in (None, "every") or token == "="):
        return f"add a decay: `ema {ema[1]} from {ema[2]} 0.99{' every ...' * (ema[3] == 'every')}`"
    option = re.search(r"([A-Za-z_]\w*)[ \t]*=$", line)
    if option and (token.strip() in ("", ")", ",", "}") or "\n" in token):
        return f"give `{option[1]}` a value: `{option[0]}{' ' * (option[0][-2] == ' ')}...`"
    ranks = re.search(r"\bmesh\([ \t]*(\d+)$", line)
    if ranks and token.isdigit():
        return f"a range of ranks is written `mesh({ranks[1]}:{token})`"
    if token == "," and not inside and re.match(r"[ \t{]*[A-Za-z_]\w*([ \t]*,[ \t]*[A-Za-z_]\w*)*[ \t]*=(?!=)", line):
        return "write one statement per value: `name = value`"
    return ""


def _mend(token: str, accepted: set[str], span: Span, text: str) -> tuple[str, Fix | None]:
    """(advice, and what to do where it is sure)"""
    before = text[: span.start].rstrip(" \t")
    inside = any(text[i] in "([" for i in open_brackets(text, span.start)[-1:])
    if re.match(r"[ \t]*repeat[ \t]+(until|while)\b", text[before.rfind("\n") + 1 :]):
        return "the condition goes at the end: `repeat { ... } until condition max 4`", None
    if advice := _rlf(token, before[before.rfind("\n") + 1 :], inside):
        return advice, None
    back = Span(span.file, span.start - 1, span.end)
    if token == "=" and text[span.start - 1 : span.start] == "=":
        return "`=` assigns; `==` compares", Fix(((back, "="),))
    if token == "==":
        return "`=` assigns; `==` compares", Fix(((span, "="),)) if "EQUAL" in accepted else None
    if token == "=" and before[-1:] == ":" and before.endswith(":"):
        return "write `name = value`", None
    if token == "=" and before[-1:] in "+-*/":
        return "a name can be assigned only once: assign the sum to a new name", None
    if token == "=" and "__ANON_0" in accepted:
        both = Span(span.file, span.start, span.end + 1)
        return "write `->`", Fix(((both, "->"),)) if both.text == "=>" else None
    if token == "=" and "COMPARE" in accepted:
        return "`=` assigns; use `==` to compare", Fix(((span, "=="),))
    if token == "." and (digits := re.match(r"[0-9]+", text[span.end :])) and not before[-1:].isalnum():
        return f"a number begins with a digit: write `0.{digits[0]}`", Fix(((span, "0."),))
    if token == "/" and before[-1:] == "/":
        return "comments start with `#`", Fix(((back, "#"),))
    if token == "/" and text[span.start : span.start + 2] in ("//", "/*"):
        return "comments start with `#`", None
    if token == ";" and not text[span.end :].split("\n", 1)[0].strip():
        return "the end of the line ends a statement; remove it", Fix(((span, ""),))
    if token == ":" and "EQUAL" in accepted:
        walrus = text[span.end : span.end + 1] == "="
        return "write `=`", Fix(((Span(span.file, span.start, span.end + walrus), "="),))
    if token == "[":
        return "values cannot be indexed; reduce them, for example with `mean(x by prompt)`", None
    if token in FOREIGN and "WHEN" not in accepted:
        return f"there is no `{token}`: {FOREIGN[token]}" if token != "from" else FOREIGN[token], None
    if not token.isidentifier():
        return "", None
    words = {t.lower() for t in accepted if t not in WORDS and t not in OPERATORS}
    if len(accepted) == 1 and words:
        only = words.pop()
        return f"write `{only}`", Fix(((span, only),))
    near = get_close_matches(token, sorted(words | {"data"} if "DATA" in accepted else words), n=1, cutoff=0.6)
    if near and {"FLOW", "MODEL"} & accepted:
        return f"did you mean `{near[0]}`?", Fix(((span, near[0]),))
    if "COMMA" in accepted and {"RPAR", "RSQB"} & accepted:
        named = re.match(r"[ \t]*=(?!=)", text[span.end :])
        at = Span(span.file, len(before), len(before))
        return "is a `,` missing before it?", Fix(((at, ","),)) if named else None
    return "", None
