"""One division for all calls alike, by name: `d2p2t2`, `pipe_data`, `pipe_model`.

In: a name, the shape of a cluster. Out: degrees of all calls, on all ranks. The last two are ReaL's names: a stage on
each node, and in it data or tensor parallelism.
Errors: RL0304 degrees that do not fill the cluster.
"""

from __future__ import annotations

import re

from rldsl.diag import fail

FORM, PART = re.compile(r"(?:[dptc][1-9]\d{0,5}){1,4}"), re.compile(r"([dptc])(\d+)")
WORDS = {"d": "dp", "p": "pp", "t": "tp", "c": "cp"}
NAMED = ("pipe_data", "pipe_model")


def is_pattern(text: str) -> bool:
    return text in NAMED or _parse_pattern(text) is not None


def _parse_pattern(text: str) -> dict[str, int] | None:
    if FORM.fullmatch(text) is None:
        return None
    found = PART.findall(text)
    return {WORDS[k]: int(n) for k, n in found} if len({k for k, _ in found}) == len(found) else None


def pattern_degrees(name: str, nodes: int, gpus: int) -> dict[str, int]:
    """name: for which `is_pattern` holds."""
    if name in NAMED:
        return {"pp": nodes, "dp" if name == "pipe_data" else "tp": gpus}
    found = _parse_pattern(name)
    assert found is not None, name
    product = 1
    for value in found.values():
        product *= value
    if product != nodes * gpus:
        rest = product // found.get("dp", 1)
        fits = f"`d{nodes * gpus // rest}" + "".join(f"{k[0]}{v}" for k, v in found.items() if k != "dp") + "` does"
        raise fail("RL0304", "degrees do not fill the cluster", place=name,
                   notes=(f"{name} is {product} rank{'s' * (product != 1)}; the cluster has {nodes * gpus}",),
                   help=fits if nodes * gpus % rest == 0 else f"their product must be {nodes * gpus}")
    return found
