"""Text of a terminal as HTML for a notebook.

In: text, perhaps with the colors of `rldsl/report.py`. Out: an element that fits light and dark pages.
"""

from __future__ import annotations

import re
from html import escape

_STYLES = {"1": "font-weight:600", "31": "color:#d1242f", "32": "color:#2a9d5c", "33": "color:#b7791f",
           "34": "color:#4a86d8"}
_PRE = ("overflow-x:auto;white-space:pre;line-height:1.35;"
        "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace")
_COLOR = re.compile(r"\033\[([\d;]*)m")


def terminal(text: str) -> str:
    """Colors that a terminal would show become styles."""
    parts, open_spans = [], 0
    for i, part in enumerate(_COLOR.split(text)):
        if i % 2 == 0:
            parts.append(escape(part))
        elif part in ("", "0"):
            parts.append("</span>" * open_spans)
            open_spans = 0
        else:
            parts.append(f'<span style="{_STYLES.get(part, "")}">')
            open_spans += 1
    return f'<pre class="rlf" style="{_PRE}">{"".join(parts)}{"</span>" * open_spans}</pre>'


def frame(page: str, title: str, height: int) -> str:
    """A whole page inside another, kept apart from its scripts and styles. height: in pixels."""
    return (f'<iframe title="{escape(title, quote=True)}" srcdoc="{escape(page, quote=True)}" '
            f'style="width:100%;height:{height}px;border:1px solid #8884;border-radius:6px" '
            f'sandbox="allow-scripts"></iframe>')


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Plain cells, numbers as they are written."""
    def line(cells: tuple[str, ...], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="text-align:left">{escape(c)}</{tag}>' for c in cells) + "</tr>"

    return f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(line(r, 'td') for r in rows)}</tbody></table>"
