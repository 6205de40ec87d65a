"""Where responses are cut into prefixes.

In: a derive event of the operation "prefixes", the tokens of one response. Out: the numbers of tokens of its prefixes,
ascending. Invariant: the first is 0, none is the whole response unless that is empty, and there are at most as many as
the frame has rows for each response: of more, the evenly spaced ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rldsl.plan.payloads import DeriveSpec

Decode = Callable[[list[int]], str]


def cut_positions(event: DeriveSpec, response: Sequence[int], most: int, decode: Decode) -> list[int]:
    """most: prefixes of a response. decode: the text of token ids, without special tokens."""
    length = len(response)
    if event.cut_every:
        inner = list(range(event.cut_every, length, event.cut_every))
    elif event.cut_fractions:
        inner = [int(x * length) for x in event.cut_fractions]
    else:
        inner = list(behind_text(response, event.cut_at, decode))
    found = sorted({0, *(c for c in inner if 0 < c < length)})
    return found if len(found) <= most else [found[i * len(found) // most] for i in range(most)]


def behind_text(response: Sequence[int], text: str, decode: Decode) -> Iterator[int]:
    """For each occurrence of `text` in the decoded response, the number of tokens up to the one that completes it.
    Occurrences do not overlap; a token that completes two counts once."""
    whole, at = decode(list(response)), 0
    tokens = last = 0
    while (at := whole.find(text, at)) >= 0:
        at += len(text)
        tokens = _tokens_for(whole[:at], response, decode, tokens)
        if tokens > last:
            yield (last := tokens)


def _tokens_for(beginning: str, response: Sequence[int], decode: Decode, low: int) -> int:
    """The least number of tokens, at least `low`, whose text begins with `beginning`. Text grows with tokens, so
    bisection finds it; tokens are decoded from the first on, since the text of some depends on what comes before."""
    high = len(response)
    while low < high:
        middle = (low + high) // 2
        if decode(list(response[:middle])).startswith(beginning):
            high = middle
        else:
            low = middle + 1
    return low
