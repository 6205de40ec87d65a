"""The types in the table of built-in functions, tried on the compiler.

In: `clip(x, low, high)` and `L, L, L -> L`. Out: expressions over values of the flow `LEVELS_FLOW`, each with the level
that it must have, or None where it must be refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product

from rldsl import api
from rldsl.plan.expr import LEVELS
from tests.docs.pages import completed

SAMPLE = {"batch": "b", "prompt": "p", "seq": "s", "turn": "u", "token": "t", "entry": "e"}
CHECKS = "".join(f"fn is_{level}(x: {level}) -> {level} {{\n  return x\n}}\n" for level in LEVELS)
VALUES = "b = mean(reward)\np = mean(reward by prompt)\ns = reward + 0\nt = gen.logprobs + 0\nkept = gen where s > 0\n" \
    "best = pick(gen, s)\nworst = pick(gen, -s)\ncuts = prefixes(gen, every=2)\n" \
    "more = actor.generate(gen)\ntalk = actor.generate(prompt, env=Guess, n=4, max_tokens=4096)\n" \
    "u = talk.turn_reward + 0\nw = talk.logprobs + 0\nheld = talk where talk.turns > 1\n" \
    "top = actor.top(gen, k=2)\ne = top.logprobs + 0\nf = actor.top(talk, k=2).logprobs + 0\n"
# arguments that no value of the level alone can be, and constants
SPECIAL = {"over(x, gen, y)": "len(kept)", "along(v, gen)": "cuts.at"}
CONSTANTS = {"at=TEXT": 'at="a"', "every=n": "every=2", "most=m": "most=2"}

Case = tuple[str, str | None]


def cases(call: str, type_: str) -> Iterator[Case]:
    """Every choice of the letters L, F and M."""
    left, _, result = f" {type_}".partition(" -> ")  # a function without arguments has nothing on the left
    left = left.strip()
    letters = sorted(set("LFM") & {*left.split(", "), result, call.partition(" by ")[2][:1]})
    for chosen in product(LEVELS, repeat=len(letters)):
        level = dict(zip(letters, chosen))
        finer = level.get("F", "token") != "batch"
        coarser = "M" not in level or LEVELS.index(level["M"]) < LEVELS.index(level["F"])
        made = expression(call, [level.get(x, x) for x in left.split(", ")], level.get("M", ""))
        if result in ("sequences", "pairs", "prompts"):
            made, result = f"count({made})", "batch"
        if result == "text":
            made, result = f'where({made} == "a", b, b)', "batch"
        fits = "L" not in level or result not in LEVELS or LEVELS.index(level["L"]) <= LEVELS.index(result)
        yield made, level.get(result, result) if finer and coarser and fits else None


def expression(call: str, kinds: list[str], to: str) -> str:
    """The call with a value of the right kind for each argument by position; names of sequences stay."""
    name, inner = re.fullmatch(r"(\w+)\((.*)\)", call).groups()  # type: ignore[union-attr]
    if not inner:
        return f"{name}()"
    made, left = [], list(kinds)
    talks = "turn" in (*kinds, to)  # only conversations have turns
    sample = SAMPLE | ({"token": "w", "entry": "f"} if talks else {})
    for part in inner.split(", "):
        if "=" in part:
            made.append(CONSTANTS.get(part, part))
            continue
        word, by, level = part.partition(" by ")
        word = "held" if talks and word == "kept" else word
        value = {"sequences": word, "prompts": word, "text": '"a"'}.get(kind := left.pop(0)) or sample[kind]
        made.append((f"({value} > 0)" if word == "c" else value) + (f" by {to or level}" if by else ""))
    if call in SPECIAL:
        made[0] = SPECIAL[call]
    return f"{name}({', '.join(made)})"


def accepted(expressions: list[Case]) -> bool:
    """Whether all of them compile, at exactly their levels (None: at any). A function takes no finer value than it
    declares, and of the coarser ones that of the batch alone, where a finer argument stands beside it."""
    checked = [f"is_{level}({text})" if level else text for text, level in expressions]
    body = VALUES + "".join(f"y{i} = {text}\n" for i, text in enumerate(checked))
    return not api.check(CHECKS + completed("flow", body), "page.rlf")


def untrue(call: str, type_: str) -> list[Case]:
    """The cases that the compiler sees otherwise."""
    found = list(cases(call, type_))
    right = [c for c in found if c[1] is not None]
    wrong = [] if accepted(right) else [c for c in right if not accepted([c])]
    return wrong + [c for c in found if c[1] is None and accepted([c])]
