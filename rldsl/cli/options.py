"""Options that several commands of `rlc` have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

FILE = click.Path()  # not checked here: a missing file is a diagnostic. The type makes shells complete file names
FOLDER = click.Path(file_okay=False)


def words_or_files(words: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Completes some words, and names of files."""
    def complete(_: click.Context, __: click.Parameter, begin: str) -> list[CompletionItem]:
        found = [CompletionItem(word) for word in words() if word.startswith(begin)]
        return [*found, CompletionItem(begin, type="file")]

    return complete


def one_of(words: Callable[[], Iterable[str]]) -> Callable[..., list[CompletionItem]]:
    """Completes some words."""
    def complete(_: click.Context, __: click.Parameter, begin: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in words() if word.startswith(begin)]

    return complete


jobs_of_search = click.option(
    "--jobs", type=click.IntRange(1), default=1, show_default=True, metavar="N",
    help="Processes with which a search works out the costs of calls; the result does not depend on it.")


def _modes() -> Iterable[str]:
    from rldsl.search.modes import MODES

    return MODES


def _clusters() -> Iterable[str]:
    from rldsl.clusters.read import presets

    return presets()


on_cluster = words_or_files(_clusters)


def _words(context: click.Context, *names: str) -> list[str]:
    """What the command line has so far for these arguments. An option that waits for its value leaves them unparsed."""
    found: list[str] = []
    for name in names:
        value = context.params.get(name) or ()
        found += [value] if isinstance(value, str) else value
    return [*found, *context.args]


def _params(context: click.Context, _: click.Parameter, begin: str) -> list[CompletionItem]:
    """The `param`s of the program that the command line names so far, with their defaults as help."""
    given = next((word for word in _words(context, "file", "files") if word.endswith(".rlf")), "")
    try:
        text = Path(given).read_text(encoding="utf-8") if given else ""
    except (OSError, UnicodeDecodeError):
        text = ""
    found = re.findall(r"^[ \t]*param[ \t]+(\w+)[ \t]*=[ \t]*([^#\n]*)", text, re.MULTILINE)
    return [CompletionItem(f"{name}=", help=f"default {value.strip()}") for name, value in found
            if f"{name}=".startswith(begin)]


def metrics_of(context: click.Context, _: click.Parameter, begin: str) -> list[CompletionItem]:
    """The metrics of the runs that the command line names so far."""
    from rldsl.diag import Failure
    from rldsl.plan.metrics_file import METRICS, STEP, last

    names: dict[str, None] = {}
    for folder in _words(context, "folders"):
        with suppress(Failure, OSError):
            names |= dict.fromkeys(last(Path(folder) / METRICS))
    return [CompletionItem(name) for name in names if name != STEP and name.startswith(begin)]


def _sets(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form NAME=VALUE")
        if name.strip() in found:
            raise click.BadParameter(f"{name.strip()} is given twice")
        found[name.strip()] = value
    return found


def seconds_by_name(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in _sets(context, option, given).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not a number of seconds") from None
    return found


def together(*options: Callable[..., Any]) -> Callable[..., Any]:
    """One decorator that adds them all, in this order."""
    def add(body: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            body = option(body)
        return body

    return add


class FiniteRange(click.FloatRange):
    """A range of numbers without nan, which is in every range, and infinity."""

    def convert(self, value: Any, option: click.Parameter | None, context: click.Context | None) -> Any:
        found = super().convert(value, option, context)
        if not math.isfinite(found):
            self.fail(f"{found} is not a finite number.", option, context)
        return found


_set = click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", callback=_sets, shell_complete=_params,
                    help="Set a `param` of the program; repeatable.")
_on = click.option("--on", "overrides", multiple=True, metavar="RULE",
                   help="A placement rule that overrides all others, such as \"actor.train on mesh(0:4) dp=2 tp=2\"; "
                        "repeatable.")
chosen = together(
    _set,
    click.option("--place", metavar="FILE|MODE", shell_complete=words_or_files(_modes),
                 help="A file of `place` rules, or a placement mode: manual, heuristic, search, or one pattern for all "
                      "calls (d2p2t2, pipe_data, pipe_model)."),
    _on)
chosen_for_search = together(
    _set, click.option("--place", type=FILE, metavar="FILE", help="A file of `place` rules."), _on)


def lengths(body: Callable[..., Any]) -> Callable[..., Any]:
    """The options for sequence lengths; the command gets one `Lengths`."""
    @wraps(body)
    def gathered(*args: Any, prompt_tokens: float | None, response_tokens: float | None, longest: float | None,
                 **given: Any) -> Any:
        from rldsl.simulate import Lengths

        found = Lengths(prompt_tokens or 0.0, response_tokens or 0.0, longest or 0.0)
        return body(*args, lengths=found, **given)

    options: Callable[..., Any] = together(*(
        click.option(name, type=FiniteRange(0, min_open=True), metavar="N", help=f"{what} (default: the maximum).")
        for name, what in (("--prompt-tokens", "Mean number of tokens per prompt"),
                           ("--response-tokens", "Mean number of tokens per response"),
                           ("--longest", "Number of tokens in the longest response of a batch"))))(gathered)
    return options
