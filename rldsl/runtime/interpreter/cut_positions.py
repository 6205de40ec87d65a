"""Where a response is cut into prefixes.

In: how to cut (the fields of a `derive` event), the ids of a response, a function that decodes ids. Out: the numbers of
tokens before the cuts, ascending. The first is always 0, and none is the end of the response. If there are more than
allowed, those that stay are spread evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rldsl.plan.events import Derive

Decode = Callable[..., str]


def cuts(event: Derive, own: Sequence[int], decode: Decode, most: int) -> list[int]:
    """At most `most` cuts: number i of these is number floor(i * c / most) of all c. own: the response."""
    found: Sequence[int]
    if event.cut_every:
        found = range(event.cut_every, len(own), event.cut_every)
    elif event.cut_fractions:
        found = [int(share * len(own)) for share in event.cut_fractions]
    else:
        found = behind(event.cut_at, own, decode)
    every = sorted({0, *(at for at in found if at < len(own))})
    return [every[i * len(every) // most] for i in range(most)] if len(every) > most else every


def behind(text: str, own: Sequence[int], decode: Decode) -> list[int]:
    """For each occurrence of `text` in the decoded response, the number of tokens up to the one that completes it.
    Occurrences do not overlap. Special tokens are decoded as nothing, as in what Python functions get."""
    whole, found = decode(own, skip_special_tokens=True), list[int]()
    end = whole.find(text)
    while end >= 0:
        end += len(text)
        found.append(_tokens_for(whole[:end], own, decode, found[-1] if found else 0))
        end = whole.find(text, end)
    return found


def _tokens_for(wanted: str, own: Sequence[int], decode: Decode, low: int) -> int:
    """The least number of tokens, more than `low` or equal, whose text begins with `wanted`. Text grows with tokens, so
    bisection finds it: decoding every prefix would take quadratic time."""
    high = len(own)
    while low < high:
        middle = (low + high) // 2
        if decode(own[:middle], skip_special_tokens=True).startswith(wanted):
            high = middle
        else:
            low = middle + 1
    return low
