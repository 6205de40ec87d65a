"""Highlighting of .rlf for Pygments, and so for documentation tools, rich and terminals. Found by its entry point.

In: text. Out: Pygments' tokens; every character of a valid program gets one, none an error.
"""

from __future__ import annotations

from pygments.lexer import RegexLexer, bygroups
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
LEVEL = r"(?:batch|prompt|seq|turn|token|entry|any)\b"


class RlfLexer(RegexLexer):
    """Words are keywords only where the grammar expects them: `actor.train(...)` is a name."""

    name = "rlf"
    aliases = ["rlf", "rldsl"]
    filenames = ["*.rlf"]
    url = ""

    tokens = {
        "root": [
            (r"\n[ \t]*", Whitespace, "line"),
            (r"(?=.)", Whitespace, "line"),
        ],
        # the beginning of a statement
        "line": [
            (r"\s+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r"(use)([ \t]+)(py)\b(?=[ \t]*\")", bygroups(Keyword.Namespace, Whitespace, Keyword.Namespace), "inside"),
            (r"use\b(?=[ \t]+[A-Za-z_\"])", Keyword.Namespace, "inside"),
            (rf"(fn|loss|flow)(\s+)({NAME})", bygroups(Keyword.Declaration, Whitespace, Name.Function), "inside"),
            (rf"(state)([ \t]+)({NAME})([ \t]+)(of)\b",
             bygroups(Keyword.Declaration, Whitespace, Name.Variable, Whitespace, Keyword.Declaration), "inside"),
            (rf"(param|state|buffer|mesh|data|model)(\s+)({NAME})",
             bygroups(Keyword.Declaration, Whitespace, Name.Variable), "inside"),
            (r"(cluster|place)(\s+)", bygroups(Keyword.Declaration, Whitespace), "inside"),
            (rf"(metric)([ \t]+)(hist|table)([ \t]+)({NAME})",
             bygroups(Keyword, Whitespace, Keyword, Whitespace, Name.Variable), "inside"),
            (rf"(metric)(\s+)({NAME})", bygroups(Keyword, Whitespace, Name.Variable), "inside"),
            (r"(return|save|every|repeat|eval|stop|sync|ema|checkpoint)\b(?!\s*[=,.])", Keyword, "inside"),
            (r"(first|after)\b(?=[ \t]+\w)", Keyword, "inside"),
            (r"", Whitespace, "inside"),
        ],
        "inside": [
            (r"\n", Whitespace, "#pop"),
            (r"[ \t\f\r]+", Whitespace),
            (r"#[^\n]*", Comment.Single),
            (r'"(?:\\.|[^"\\\n])*"', String.Double),
            (r"(\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?[kM]?)([ \t]+)(prompts|sequences|pairs|tokens)\b",
             bygroups(Number, Whitespace, Keyword.Type)),
            (r"\d[\d_]*(?:\.[\d_]+)?(?:[eE][+-]?\d+)?[kM]?", Number),
            (r"(?:true|false)\b", Keyword.Constant),
            (r"(?:and|or|not)\b", Operator.Word),
            (rf"(by)([ \t]+)({LEVEL})", bygroups(Operator.Word, Whitespace, Keyword.Type)),
            (rf"(:|->)([ \t]*\(?[ \t]*)({LEVEL})", bygroups(Punctuation, Whitespace, Keyword.Type)),
            (r"(\})([ \t]*)(until)\b", bygroups(Punctuation, Whitespace, Keyword)),
            (r"(?:on|train|where|with|until|when|from|to|max|every)\b(?=[ \t]+[A-Za-z0-9_\"])", Keyword),
            (r"(:)([ \t]*)(env)\b", bygroups(Punctuation, Whitespace, Keyword.Type)),
            (r"auto\b(?=[ \t]*(?:#|\n|$))", Keyword),
            (rf"(\.)([ \t]*)({NAME})(?=[ \t]*\()", bygroups(Punctuation, Whitespace, Name.Function)),
            (rf"(\.)([ \t]*)({NAME})", bygroups(Punctuation, Whitespace, Name.Attribute)),
            (rf"{NAME}(?=[ \t]*\()", Name.Function),
            (rf"{NAME}(?=[ \t]*=[^=])", Name.Variable),
            (NAME, Name),
            (r"\{", Punctuation, ("#pop", "line")),
            (r"\*\*|->|<=|>=|==|!=|[-+*/<>=]|(?<=prompts)\?", Operator),
            (r"[\[\](){},;:@.]", Punctuation),
        ],
    }
