"""Ordered events as text, for `--emit events`. In: a draft. Out: one line for each event, blocks indented."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rldsl.passes.draft import Draft
from rldsl.plan.events import Item, Loop, When


def show(draft: Draft) -> str:
    steps = draft.placed.graph.steps
    return "\n".join([*_lines(draft.setup, ""), f"loop {steps} {{", *_lines(draft.body, "  "), "}"]) + "\n"


def _lines(items: Iterable[Item], indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, When | Loop):
            over = f" over {item.over}" if isinstance(item, Loop) and item.over else ""
            yield f"{indent}{item.head if isinstance(item, When) else f'loop {item.trips}{over}'} {{"
            yield from _lines(item.body, indent + "  ")
            yield f"{indent}}}"
            continue
        reads = item.frees or item.reads
        name = "" if item.display_name == item.kind else f" {item.display_name}"
        flow = f"{', '.join(reads)} -> {', '.join(item.writes)}" if item.writes else ", ".join(reads)
        yield f"{indent}{item.kind}{name}  on {item.mesh}  {flow}" + (f"  # {item.because}" if item.because else "")
