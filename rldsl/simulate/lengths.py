"""How long the sequences of a step are expected to be: by default of maximum length.

In: means that a user gives, or the metrics of an earlier run. Out: `Lengths`.
Errors: RL0091 no metrics there, RL0205 metrics without lengths, or lengths that no row can have, RL0784 metrics that
cannot be read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

from rldsl.diag import counted, fail
from rldsl.plan.metrics_file import METRICS, read
from rldsl.plan.model import Plan
from rldsl.plan.payloads import ROLLOUTS, WINDOW
from rldsl.plan.projection import event_paths, times
from rldsl.plan.spaces import IndexedFrame, indexed_frames


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of a row of a frame, on average."""

    prompt: float  # tokens
    response: float  # tokens
    longest: float  # response of a batch, which generation lasts as long as
    log_std: float = 0.0  # standard deviation of the logarithm of the responses' lengths; 0: from mean and longest

    @property
    def tokens(self) -> float:
        return self.prompt + self.response


@dataclass(frozen=True, slots=True)
class Lengths:
    """The expected lengths of a run, in tokens."""

    prompt: float = 0.0  # mean; 0: the maximum
    response: float = 0.0  # mean; 0: the maximum
    longest: float = 0.0  # longest response of a batch; 0: the maximum
    log_std: float = 0.0  # standard deviation of the logarithm of the responses' lengths; 0: from mean and longest

    def of(self, frame: IndexedFrame) -> Row:
        bound = frame.max_response_tokens
        response = min(self.response or bound, bound)
        longest = max(min(self.longest or bound, bound), response)
        prompt = min(self.prompt or frame.max_prompt_tokens, frame.max_prompt_tokens)
        if not frame.id.endswith(ROLLOUTS):
            return Row(prompt, response, longest, self.log_std)
        parts, each = self.parts(frame), bound / frame.steps_of_a_response
        return Row(prompt + (parts - 1) / 2 * each, response / parts, min(longest, each), self.log_std)

    def parts(self, frame: IndexedFrame) -> float:
        """In how many steps a response is sampled, on average: of lengths that are spread about evenly between the
        cuts, a mean response ends in the middle of its last part."""
        most, bound = frame.steps_of_a_response, frame.max_response_tokens
        if most == 1 or not self.response or self.response >= bound:
            return float(most)
        return min(max(self.response / (bound / most) + 0.5, 1.0), float(most))

    def share(self, frame: IndexedFrame) -> float:
        """Which part of the rows of a frame there are in a step, on average: with `per_step` those that are sampled in
        it, of what has ended those of one batch."""
        if frame.id.endswith(WINDOW):
            return 1.0
        return (self.parts(frame) if frame.id.endswith(ROLLOUTS) else 1.0) / frame.steps_of_a_response


AT_MOST = Lengths()  # every sequence as long as its bounds allow


def check_lengths(given: Lengths, frames: Iterable[IndexedFrame], place: str) -> None:
    """Check that rows of some frames can have the lengths that a user gives. place: of the message. Errors: RL0205."""
    known = tuple(frames)
    prompt = max((f.max_prompt_tokens for f in known), default=0)
    response = max((f.max_response_tokens for f in known), default=0)
    for tokens, most, of, what in ((given.prompt, prompt, "prompt", "prompts of {} tokens on average"),
                                   (given.response, response, "response", "responses of {} tokens on average"),
                                   (given.longest, response, "response", "a longest response of {} tokens")):
        if not 0 <= tokens <= most:
            raise fail("RL0205", f"no row can have {what.format(f'{tokens:g}')}", place=place, help=(
                f"the program allows at most {counted(most, 'token')} per {of}" if most else
                f"the program has no {of}s"))
    if given.longest and given.response > given.longest:
        raise fail("RL0205", f"the longest response of a batch cannot have {given.longest:g} tokens where the mean is "
                   f"{given.response:g}", place=place, help="omit the longest, or make it at least the mean")


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
    rows = sum(count for _, count in token_frames(plan))
    counted = [x.get("tokens_per_second", 0.0) * x.get("seconds", 0.0) for x in measured]
    finite = [x for x in counted if isfinite(x)]
    tokens = sum(finite) / len(finite) if finite else 0.0
    return Lengths(max(tokens / rows - response, 1.0) if rows and tokens else 0.0, response)


def token_frames(plan: Plan) -> tuple[tuple[IndexedFrame, int], ...]:
    """The frames whose tokens a step makes or reads, and how many of their rows: not what happens in some steps alone,
    as an evaluation does, and of a loop that ends early as many iterations as it may have. Of responses that several
    steps sample as many as begin in one, complete."""
    frames = indexed_frames(plan)
    found: Counter[str] = Counter()
    for event, path in event_paths(plan):
        for name in event.new_rows:
            found[name] += times(path[1:])
    return tuple((replace(f, id=name.removesuffix(ROLLOUTS)), count * f.count // f.steps_of_a_response)
                 for name, count in found.items() if count and (f := frames[name]).max_response_tokens)

