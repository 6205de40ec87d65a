"""Where responses are cut into prefixes.

In: a derive event of the operation "prefixes", the tokens of one response. Out: the numbers of tokens of its prefixes,
ascending. Invariant: the first is 0, none is the whole response unless that is empty, and there are at most as many as
the frame has rows for each response: of more, the evenly spaced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rldsl.diag import internal_error
from rldsl.plan.events import Derive

Decode = Callable[[list[int]], str]


def cut_positions(event: Derive, response: Sequence[int], most: int, decode: Decode | None) -> list[int]:
    """decode: text of token ids, where the event cuts at a text."""
    length = len(response)
    if event.cut_every:
        inner = list(range(event.cut_every, length, event.cut_every))
    elif event.cut_fractions:
        inner = [int(x * length) for x in event.cut_fractions]
    elif decode is not None:
        inner = list(behind_text(response, event.cut_at, decode))
    else:
        raise internal_error(f"derive {event.frame} does not say where to cut", "run")
    found = sorted({0, *(c for c in inner if 0 < c < length)})
    return found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]


def behind_text(response: Sequence[int], text: str, decode: Decode) -> Iterator[int]:
    """The positions behind the tokens that complete `text`. A token that completes it twice counts once, and what one
    occurrence has used belongs to no other."""
    window = 4 * len(text) + 4  # tokens that `text` may be spread over: its bytes, and those of a letter cut in two
    used = 0
    for i in range(len(response)):
        if text in decode(list(response[max(used, i + 1 - window) : i + 1])):
            used = i + 1
            yield used
