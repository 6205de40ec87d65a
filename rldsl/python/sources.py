"""The texts that a plan was compiled from, where they can still be found.

In: a path with its digest, as a plan's header has them. Out: the text with exactly this digest, or "".
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from importlib import resources
from pathlib import Path

from rldsl.plan.model import Plan
from rldsl.plan.naming import quote
from rldsl.plan.projection import event_paths


def source_text(path: str, digest: str, folder: Path) -> str:
    """The text of a source with this sha256, or "". folder: that of the plan, which is searched, too."""
    name = Path(path).name
    candidates = [Path(path), folder / name, folder / "sources" / f"{digest[:12]}-{name}"]  # the last is that of a run
    if path.startswith("std/"):
        candidates.append(Path(str(resources.files("rldsl.stdlib").joinpath(name))))
    for file in candidates:
        try:
            data = file.read_bytes()
            if sha256(data).hexdigest() == digest:
                return data.decode()
        except (OSError, ValueError):
            continue
    return ""


def sources_of(plan: Plan, folder: Path) -> dict[str, str]:
    """Path -> text of the sources that are still those that were compiled."""
    texts = ((path, source_text(path, digest, folder)) for path, digest in plan.header.sources)
    return {path: text for path, text in texts if text}


def event_quote(plan: Plan, event: int, texts: Mapping[str, str]) -> str:
    """The line of the program that asked for an event; "" where its source is not among `texts`."""
    return quote(texts, next((e.at for e, _ in event_paths(plan) if e.id == event), ""))
