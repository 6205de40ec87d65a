"""Elements of HTML and SVG as text in which everything is escaped.

In: names, attributes and children. Out: `Markup`, which Jinja takes as it is. What is no `Markup` is text, whatever it
holds.
"""

from __future__ import annotations

from markupsafe import Markup, escape

Attribute = str | float | int | None


def element(name: str, *children: str, **attributes: Attribute) -> Markup:
    """`element("rect", x=1.5, class_="bar")`: `_` stands for `-`, one at the end is dropped; None leaves an attribute
    out."""
    pairs = "".join(f' {_name(key)}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    inner = "".join(map(escape, children))
    return Markup(f"<{name}{pairs}>{inner}</{name}>" if inner else f"<{name}{pairs}/>")


def number(value: float, digits: int = 2) -> str:
    """As short as it can be: 3.0 -> "3", 0.126 -> "0.13"."""
    text = f"{value:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def percent(share: float) -> str:
    return f"{number(100 * share, 3)}%"


def _name(key: str) -> str:
    return "viewBox" if key == "view_box" else key.rstrip("_").replace("_", "-")


def _value(value: str | float) -> str:
    return escape(value if isinstance(value, str) else number(float(value)))
