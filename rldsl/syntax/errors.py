"""Syntax errors in words of the language."""

from __future__ import annotations

from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from rldsl.diag import Diagnostic
from rldsl.source import Span

# Terminals as a reader would call them. What is not listed is a keyword and is shown as it is written.
WORDS = {
    "NAME": "a name", "NUMBER": "a number", "STRING": "a string", "_NL": "the end of the line", "LPAR": "`(`",
    "RPAR": "`)`", "LSQB": "`[`", "RSQB": "`]`", "LBRACE": "`{`", "RBRACE": "`}`", "EQUAL": "`=`", "COLON": "`:`",
    "COMMA": "`,`", "DOT": "`.`", "SEMICOLON": "`;`", "STAR": "`*`", "AT": "`@`", "$END": "the end of the file",
    "__ANON_0": "`->`",
}
OPERATORS = {"OR", "AND", "COMPARE", "PLUS", "MINUS", "STAR", "SLASH", "POWER"}


def explain(error: UnexpectedInput, span: Span, text: str) -> Diagnostic:
    """One diagnostic: what stands here and what was expected."""
    if isinstance(error, UnexpectedCharacters):
        character = text[span.start : span.start + 1]
        if character == '"':
            return Diagnostic("RL0002", "string is not closed", span, "opened here", help='end it with `"` on this line')
        return Diagnostic("RL0003", f"character `{character}` has no meaning here", span, "not part of the language")
    accepted = set(getattr(error, "accepts", None) or getattr(error, "expected", ()) or ())
    if isinstance(error, UnexpectedToken) and error.token.type == "$END" and "RBRACE" in accepted:
        return Diagnostic("RL0004", "block is not closed", span, "the file ends here", help="add `}`")
    found = _found(error)
    return Diagnostic("RL0001", f"{found} is not expected here", span, f"expected {expected(accepted)}")


def _found(error: UnexpectedInput) -> str:
    token = getattr(error, "token", None)
    if token is None or token.type in ("_NL", "$END"):
        return WORDS.get(token.type if token is not None else "$END", "this")
    return f"`{token}`"


def expected(accepted: set[str]) -> str:
    """The terminals that may stand here, shortest description first, operators as one word."""
    words = sorted({"an operator" if t in OPERATORS else WORDS.get(t, f"`{t.lower()}`") for t in accepted})
    if len(words) > 6:
        words = [w for w in words if w != "an operator"][:5] + ["…"]
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
