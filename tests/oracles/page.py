"""The column "compared with" of docs/algorithms.md, which follows from `rows.py` and the pinned versions.

    python -m tests.oracles.page        write it into the page
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.oracles.rows import EVEN, ROWS, SYSTEMS, TRANSCRIBED

PAGE = Path(__file__).parents[2] / "docs/algorithms.md"
LINE = re.compile(r"^\| (?P<variant>[^|]+) \| `(?P<call>[^`]+)` \|(?P<column>[^|\n]*\|)?$", re.M)
ALIASES = {"its repository": "SimPO"}  # how a variant names a system without its name


def named(variant: str) -> set[str]:
    """The systems that a variant names."""
    found = {name for name in (*(s.page for s in SYSTEMS.values()), *TRANSCRIBED) if re.search(rf"\b{name}\b", variant)}
    return found | {name for words, name in ALIASES.items() if words in variant}


def compared(call: str) -> dict[str, list[str]]:
    """Systems whose own functions gave the call's numbers -> their versions, with what limits the comparison."""
    found: dict[str, list[str]] = {}
    for row in ROWS:
        if row.call == call and row.same:
            system = SYSTEMS[row.system]
            text = system.version + (" (equal lengths)" if row.batches == EVEN else "")
            versions = found.setdefault(system.page, [])
            versions += [text] * (text not in versions)
    return found


def column(variant: str, call: str) -> str:
    """In the order in which the page's other columns name the systems."""
    real = compared(call)
    parts = {system: f"{system} {', '.join(versions)}" for system, versions in real.items()}
    parts |= {system: "transcription" for system in named(variant) & set(TRANSCRIBED)}
    order = sorted(parts, key=lambda system: (variant.find(system), system))
    return "; ".join(parts[system] for system in order)


def written(text: str) -> str:
    """The page with its column as it must be."""
    return LINE.sub(lambda m: f"| {m['variant']} | `{m['call']}` | {column(m['variant'], m['call'])} |".replace(
        "|  |", "| |"), text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
