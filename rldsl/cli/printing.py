"""Printing to standard output: characters that a terminal must not get."""

from __future__ import annotations

import click


def say(text: str, styled: bool = False) -> None:
    """Print to standard output. What does not print as itself is escaped, in a form that JSON reads, too: names in
    plans come from elsewhere, and a terminal obeys control characters. styled: the text is ours, with colors."""
    if not (styled or text.isprintable()):
        text = "".join(c if c.isprintable() or c in "\n\t" else json_escape(c) for c in text)
    click.echo(text, nl=not text.endswith("\n"))


def json_escape(character: str) -> str:
    """As a JSON string may write it: \\u001b; two of them beyond the basic plane."""
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))
