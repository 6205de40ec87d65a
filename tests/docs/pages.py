"""Reading the documentation as a test does: programs in fences, tables, links.

A fence ```rlf is a whole program when it has a flow; else its declarations are put before, and after the comment
`<!-- rlf: flow -->` its statements into, a flow that has the usual names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rldsl import api

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_FENCE = re.compile(r"(<!-- rlf: flow -->\n)?```rlf\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")

MODELS = """
data prompts = jsonl("p.jsonl", batch=8)
model actor  = causal_lm("m") train adamw(lr=1e-6)
model ref    = causal_lm("m")
model slow   = causal_lm("m")
"""
FLOW = """
flow some(steps=10) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  ref_lp = ref.logprobs(gen)
  metric drift = mean(gen.logprobs - ref_lp)
%s}
"""
USES = """use std.ppo (ppo_clip)
use std.grpo (group_norm, grpo_free)
use py "rewards.py" (exact_match: gen -> seq)
"""
VALUES = """  reward = exact_match(gen)
  adv    = group_norm(reward)
"""


@dataclass(frozen=True, slots=True)
class Program:
    page: str
    line: int
    text: str


def programs(page: str, text: str) -> Iterator[Program]:
    for found in _FENCE.finditer(text):
        inside, body = found.groups()
        if inside:
            body = USES + MODELS + FLOW % (VALUES + "".join(f"  {line}\n" for line in body.splitlines()))
        elif not re.search(r"^flow\b", body, re.MULTILINE):
            body = body + MODELS + FLOW % ""
        yield Program(page, text[: found.start()].count("\n") + 1, body)


def mistakes(program: Program, folder: Path) -> list[str]:
    """Codes of what `rlc check` finds in `folder`, where there is a `rewards.py`."""
    (folder / "rewards.py").write_text("def exact_match(rows):\n    return [0.0 for _ in rows]\n")
    return [d.code for d in api.check(program.text, str(folder / "page.rlf"))]


def table(text: str, name: str) -> list[tuple[str, str]]:
    """The first two cells of each row of the table after `<!-- table: NAME -->`, or the words in backquotes there."""
    after = text.partition(f"<!-- table: {name} -->\n")[2].partition("\n\n")[0]
    if not after.startswith("|"):
        return [(word, "") for word in re.findall(r"`([^`]+)`", after)]
    rows = [line.strip("|").split("|") for line in after.splitlines()[2:]]
    return [(cells[0].strip(), cells[1].strip()) for cells in rows]


def options(text: str, name: str) -> dict[str, str]:
    """Option -> default, as the table writes it."""
    return {word: default.strip("`") for cell, default in table(text, name) for word in re.findall(r"`([^`]+)`", cell)}


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links to files, or to headings of this page, that are not there."""
    heads = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-")
             for h in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    links = [x for x in _LINK.findall(text) if not x.startswith(("http://", "https://"))]
    return [x for x in links if (x[1:] not in heads if x.startswith("#") else
                                 not (page.parent / x.partition("#")[0]).exists())]


def long_lines(text: str) -> list[int]:
    """Numbers of lines over 120 columns, tables apart."""
    return [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 120 and not line.startswith("|")]
