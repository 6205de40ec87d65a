"""How long the sequences of a step are expected to be: by default as long as the program lets them be.

In: means that a user gives, or the metrics of an earlier run. Out: `Lengths`.
Errors: RL0091 no metrics there, RL0205 metrics without lengths, RL0784 metrics that cannot be read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rldsl.diag import fail
from rldsl.plan.metrics_file import METRICS, read
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths, times
from rldsl.plan.spaces import IndexedFrame, indexed_frames


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of a row of a frame, on average."""

    prompt: float  # tokens
    response: float  # tokens
    longest: float  # response of a batch, which generation lasts as long as

    @property
    def tokens(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Lengths:
    """The expected lengths of a run, in tokens."""

    prompt: float = 0.0  # mean; 0: the maximum
    response: float = 0.0  # mean; 0: the maximum
    longest: float = 0.0  # longest response of a batch; 0: the maximum

    def of(self, frame: IndexedFrame) -> Row:
        bound = frame.max_response_tokens
        response = min(self.response or bound, bound)
        longest = max(min(self.longest or bound, bound), response)
        return Row(min(self.prompt or frame.max_prompt_tokens, frame.max_prompt_tokens), response, longest)


AT_MOST = Lengths()  # every sequence as long as its bounds allow


def observed_lengths(plan: Plan, folder: str) -> Lengths:
    """The mean lengths of an earlier run of the program, from the metrics in its directory."""
    file = Path(folder) / METRICS if Path(folder).is_dir() else Path(folder)
    try:
        lines = read(file)
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {file}", place=str(file),
                   help="give the directory of a run (--out)") from None
    measured = [x for x in lines if isfinite(x.get("length/response", float("nan")))]
    if not measured:
        raise fail("RL0205", f"{file} contains no lengths", place=str(file),
                   help="only programs that generate record lengths; use --prompt-tokens and --response-tokens")
    response = sum(x["length/response"] for x in measured) / len(measured)
    rows = sum(f.count * times for f, times in token_frames(plan))
    counted = [x.get("tokens_per_second", 0.0) * x.get("seconds", 0.0) for x in measured]
    finite = [x for x in counted if isfinite(x)]
    tokens = sum(finite) / len(finite) if finite else 0.0
    return Lengths(max(tokens / rows - response, 1.0) if rows and tokens else 0.0, response)


def token_frames(plan: Plan) -> tuple[tuple[IndexedFrame, int], ...]:
    """The frames whose tokens a step makes or reads, and how often: not what happens in some steps alone, as an
    evaluation does, and of a loop that ends early as many iterations as it may have."""
    frames = indexed_frames(plan)
    found: Counter[str] = Counter()
    for event, path in event_paths(plan):
        for name in event.new_rows:
            found[name] += times(path[1:])
    return tuple((frames[name], count) for name, count in found.items()
                 if count and frames[name].max_response_tokens)

