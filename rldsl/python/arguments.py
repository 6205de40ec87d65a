"""Arguments of the Python API are held against what they may be, before anything is compiled or started.

In: arguments of `train`, `compile` and `Plan.run`. Errors: RL0099, which names the argument, what it is, and what to
write.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rldsl.diag import fail


def check_program_arguments(program: Any, params: Any, place: Any, on: Any, rewards: Any) -> None:
    """Those that say what is compiled."""
    _need(_is_path(program), "program", program, "the path or the text of a program")
    _need(params is None or isinstance(params, Mapping), "params", params, "a dict",
          'write `{"steps": 3}`, or pass params by name: `steps=3`')
    _need(place is None or _is_path(place), "place", place, 'a file of `place` rules, their text, or a mode',
          'for example `place="search"`; the number of ranks follows from the meshes')
    _need(isinstance(on, str) or _all(on, str), "on", on, "a rule or a list of rules",
          'for example `on="*.* on mesh(0:1)"`')
    name = getattr(rewards, "__name__", "exact") if callable(rewards) else "exact"
    _need(rewards is None or isinstance(rewards, Mapping) and all(isinstance(key, str) for key in rewards), "rewards",
          rewards, "a dict from names of the program to functions", f'write `rewards={{"{name}": {name}}}`')


def check_run_arguments(out: Any, resume: Any, nproc: Any, callbacks: Any, log_samples: Any, options: Any) -> None:
    """Those that say how it is run."""
    _need(out is None or _is_path(out), "out", out, "the directory of the run")
    _need(isinstance(resume, bool) or _is_path(resume), "resume", resume, "True, False or the directory of a run")
    _need(nproc is None or _is_count(nproc), "nproc", nproc, "a number of ranks", "omit it: the plan says how many")
    alone = f"write `callbacks=[{getattr(callbacks, '__name__', 'callback')}]`"
    _need(isinstance(callbacks, Sequence) and not isinstance(callbacks, str), "callbacks", callbacks,
          "a list of functions", alone if callable(callbacks) else "each gets the metrics of a step")
    for callback in callbacks:
        _need(callable(callback), "callbacks", callback, "a list of functions", "each gets the metrics of a step")
    _need(_is_count(log_samples), "log_samples", log_samples, "a number of sequences, 0 or more")
    _need(_all(options, str), "options", options, "a list of texts",
          f"write `options=[{options!r}]`" if isinstance(options, str) else
          'each option and each value is a text: `options=["--reward-workers", "4"]`')


def _need(holds: bool, name: str, value: Any, wanted: str, help: str = "") -> None:
    if not holds:
        kind = "a function" if callable(value) and not isinstance(value, type) else f"a `{type(value).__name__}`"
        shown = repr(value) if isinstance(value, str | int | float) else kind
        raise fail("RL0099", f"`{name}` cannot be {shown}", place=name, notes=(f"it takes {wanted}",), help=help)


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _all(values: Any, kind: type) -> bool:
    return isinstance(values, Sequence) and not isinstance(values, str) and all(isinstance(v, kind) for v in values)
