"""Reading the documentation as a test does: programs in fences, tables, links, long lines.

A fence ```rlf is a whole program, or the comment before it names what completes it: `<!-- rlf: declarations -->`,
`<!-- rlf: placement -->` (rules for the calls of `FLOW`) or `<!-- rlf: flow -->` (statements of it). With `fails
RL0218` in the comment the program is wrong, and has exactly that mistake.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from rldsl import api

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

_FILE = re.compile(r"<!-- file: (\S+) -->\n(?:<!--[^\n]*-->\n)?```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FENCE = re.compile(r"(?:<!-- rlf: (\w+)(?: fails (RL\d{4}))? -->\n)?^```rlf\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_PICTURE = re.compile(r'<img src="([^"]+)"')
_CODE = re.compile(r"`[^`\n]*`")
_MARK = "<!-- table: {} -->\n"



def files(text: str) -> dict[str, str]:
    """Name -> text of what a page asks to write: fences after `<!-- file: NAME -->`."""
    return {name: body for name, body in _FILE.findall(text)}


FILES = {  # what programs of the documentation read
    **files((ROOT / "docs/tutorial.md").read_text()),
    "rewards.py": "def exact_match(rows):\n    return [0.0 for _ in rows]\n\n\n"
                  "def checked(rows):\n    return [0.0 for _ in rows]\n\n\n"
                  "def prefers(rows):\n    return [0.0 for _ in rows]\n",
    "agent.py": "async def solve(row, base_url, api_key):\n    return 0.0\n",
    "envs.py": "".join(f"class {name}:\n    def reset(self, **row):\n        return None\n\n\n"
                       for name in ("Guess", "Calculator", "WordGame")),
    "hints.py": "def with_example(rows):\n    return ['?' for _ in rows]\n",
    "judge.py": "def ask(rows):\n    return ['?' for _ in rows]\n\n\ndef grade(rows):\n    return [0.0 for _ in rows]\n",
    "objectives.rlf": "loss careful(logprobs: token) {\n  return -mean(logprobs)\n}\n",
}
DECLARED = """
data  any_rows  = jsonl("rows.jsonl", batch=8)
model any_model = causal_lm("m")
flow any_flow(steps=1) {
  any_prompt = any_rows.next()
  any_gen    = any_model.generate(any_prompt)
  metric any_length = mean(len(any_gen))
}
"""
FLOW = """
use std.ppo (gae, kl_rewards, ppo_clip, value_clip)
use std.grpo (group_norm, grpo_free)
use std.simpo (simpo)
use py "rewards.py" (exact_match: gen -> seq, prefers: a, b -> seq)
use py "envs.py" (Guess: env)
cluster nodes=1 gpus=8
data prompts = jsonl("p.jsonl", batch=8)
model actor  = causal_lm("m")    train adamw(lr=1e-6)
model critic = value_model("m")  train adamw(lr=1e-6)
model judge  = reward_model("m")
model ref    = causal_lm("m")
model slow   = causal_lm("m")
flow some(steps=10) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=4)
  ref_lp = ref.logprobs(gen)
  v      = critic.values(gen)
  reward = exact_match(gen)
  adv    = group_norm(reward)
  ret    = v + reward
%s}
"""


@dataclass(frozen=True, slots=True)
class Program:
    """page: below docs/. text: completed. fails: the code of its one mistake, "" for a right one."""

    page: str
    line: int
    text: str
    fails: str = ""


def programs(page: str, text: str) -> Iterator[Program]:
    """Raises ValueError where a fragment has no context, or one that does not exist."""
    for found in _FENCE.finditer(text):
        context, fails, body = found.groups()
        yield Program(page, text[: found.start()].count("\n") + 1, completed(context, body), fails or "")


def completed(context: str | None, body: str) -> str:
    indented = "".join(f"  {line}\n" for line in body.splitlines())
    match context:
        case "flow":
            return FLOW % indented
        case "placement":
            return body + FLOW % "  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=adv))\n"
        case "declarations":
            return body + DECLARED
        case None if re.search(r"^flow\b", body, re.MULTILINE):
            return body
    raise ValueError(f"a program without a flow, in the context {context!r}:\n{body}")


def mistakes(program: Program, folder: Path) -> list[str]:
    """Codes of what `rlc check` finds in `folder`."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with chdir(folder):
        return [d.code for d in api.check(program.text, "page.rlf")]


def block(text: str, name: str) -> str:
    """What stands after `<!-- table: NAME -->`, up to an empty line. Raises ValueError where there is none."""
    _, mark, after = text.partition(_MARK.format(name))
    if not mark:
        raise ValueError(f"no table {name}")
    return after.partition("\n\n")[0]


def table(text: str, name: str) -> list[tuple[str, ...]]:
    """The cells of each row of a table, without its head."""
    rows = block(text, name).splitlines()[2:]
    return [tuple(cell.strip() for cell in row.strip().strip("|").split("|")) for row in rows]


def words(text: str) -> list[str]:
    """What stands in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def options(text: str, name: str) -> dict[str, str]:
    """Option -> default, as the table writes it."""
    return {word: row[1].strip("`") for row in table(text, name) for word in words(row[0])}


def anchors(text: str) -> set[str]:
    """What `#...` in a link may name: the headings outside fences, as GitHub writes them."""
    plain = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", plain, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}


def dead_links(page: Path, text: str) -> list[str]:
    """Relative links to files, pictures or headings of a page that do not exist."""
    dead = []
    for link in _LINK.findall(text) + _PICTURE.findall(_CODE.sub("", text)):
        path, _, heading = link.partition("#")
        target = page.parent / path if path else page
        if link.startswith(("http://", "https://")):
            continue
        if not target.exists() or heading and heading not in anchors(target.read_text() if path else text):
            dead.append(link)
    return dead


def long_lines(text: str) -> list[int]:
    """Numbers of lines over 120 columns, tables apart."""
    return [i for i, line in enumerate(text.splitlines(), 1) if len(line) > 120 and not line.startswith("|")]
