"""Syntax errors in words of the language. Every code of syntax (RL00xx below 0090) stands in CODES."""

from __future__ import annotations

from lark.exceptions import UnexpectedCharacters, UnexpectedInput

from rldsl.diag import Diagnostic
from rldsl.source import Span

CODES = {
    "RL0001": "something else was expected here",
    "RL0002": "a string is not closed",
    "RL0003": "a character that has no meaning",
    "RL0004": "a block is not closed",
    "RL0005": "a bracket is not closed",
    "RL0006": "a brace that closes nothing",
    "RL0007": "too deeply nested",
}

# Terminals as a reader would call them. What is not listed is a keyword and is shown as it is written.
WORDS = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "_NL": "the end of the line", "LPAR": "`(`",
    "RPAR": "`)`", "LSQB": "`[`", "RSQB": "`]`", "LBRACE": "`{`", "RBRACE": "`}`", "EQUAL": "`=`", "COLON": "`:`",
    "COMMA": "`,`", "DOT": "`.`", "SEMICOLON": "`;`", "STAR": "`*`", "AT": "`@`", "$END": "the end of the file",
    "__ANON_0": "`->`", "MINUS": "`-`",
}
OPERATORS = {"OR", "AND", "COMPARE", "PLUS", "SLASH", "POWER"}
VALUE = {"NAME", "NUMBER", "STRING", "LPAR", "LSQB"}  # together: any expression


def explain(error: UnexpectedInput, span: Span, text: str) -> Diagnostic:
    """One diagnostic: what stands here, what was expected, and the mend of common slips."""
    if isinstance(error, UnexpectedCharacters):
        character = text[span.start : span.start + 1]
        if character == '"':
            return Diagnostic("RL0002", "string is not closed", span, "opened here", help='end it with `"` on this line')
        help = 'strings stand in double quotes: `"..."`' if character == "'" else ""
        return Diagnostic("RL0003", f"`{character}` has no meaning here", span, "not part of the language", help=help)
    accepted = set(getattr(error, "accepts", None) or getattr(error, "expected", ()) or ())
    token = getattr(error, "token", None)
    if token is not None and token.type == "RBRACE" and "RBRACE" not in accepted and not VALUE & accepted:
        return Diagnostic("RL0006", "`}` closes nothing", span, "no block is open here", help="remove it")
    found = WORDS.get(token.type, f"`{token}`") if token is not None and token.type in ("_NL", "$END") else f"`{token}`"
    return Diagnostic("RL0001", f"{found} is not expected here", span, f"expected {expected(accepted)}",
                      help=_mend(str(token), accepted, text[span.start - 1 : span.start]))


def unclosed_bracket(span: Span) -> Diagnostic:
    close = {"(": ")", "[": "]"}[span.text]
    return Diagnostic("RL0005", f"`{span.text}` is not closed", span, "opened here", help=f"add `{close}`")


def unclosed_block(span: Span) -> Diagnostic:
    return Diagnostic("RL0004", "block is not closed", span, "opened here; the file ends first", help="add `}`")


def too_deep(span: Span) -> Diagnostic:
    return Diagnostic("RL0007", "too deeply nested", span, "here", help="give parts of it names of their own")


def expected(accepted: set[str]) -> str:
    """The terminals that may stand here, an expression and operators as one word each."""
    rest = set(accepted)
    words = []
    if VALUE <= rest:
        words, rest = ["a value"], rest - VALUE - {"MINUS", "NOT"}
    elif OPERATORS & rest:
        rest -= {"STAR", "MINUS", "LPAR", "LSQB", "DOT"}
    words += sorted({"an operator" if t in OPERATORS else WORDS.get(t, f"`{t.lower()}`") for t in rest})
    if len(words) > 7:
        words = [w for w in words if w != "an operator"][:6] + ["…"]
    if not words:
        return "something else"
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _mend(token: str, accepted: set[str], before: str) -> str:
    if token == "=" and before == "=" or token == "==":
        return "one `=` binds a name; `==` compares"
    if token == "=" and "COMPARE" in accepted:
        return "`=` binds a name; compare with `==`"
    if token in ("if", "for", "while", "def", "import", "class"):
        return f"the language has no `{token}`; see docs/language.md"
    if "COMMA" in accepted and "RPAR" in accepted and token.isidentifier():
        return "is a `,` missing before it?"
    return ""
