"""A run writes where its user lets it, whatever a plan says; docs/security.md has the rule.

In: a plan, the run's directory, the directories that `--allow-write` names. Out: nothing, or a Failure before the
first step. A place is allowed that lies inside the run's directory, the working directory or one of those named, after
`..` and symbolic links are resolved.
Errors: RL0712 a save outside of these, over what the plan reads, or over what no save has written.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.disk_paths import OUT, STEP, paths, shown
from rldsl.plan.function import Function
from rldsl.plan.local_modules import local_modules
from rldsl.plan.model import Plan
from rldsl.runtime.rewards.user_functions import SHIPPED, function_path

MARK = "rldsl.json"  # in every directory that a save has written


def check_writes(plan: Plan, out: Path, allowed: Sequence[str] = (), only: str = "", step: int = 1) -> None:
    """Check every place that a save of `plan` names, as it will be at `step`. only: one of them."""
    targets = paths(plan)
    run_directory, working_directory = (p.resolve() for p in (out, Path(".")))
    named = [Path(a).resolve() for a in allowed]
    read = {path: p for _, path in targets.reads if (p := _resolved(path)) is not None}
    problems = []
    for path in (only,) if only else targets.writes:
        place = _resolved(path.replace(OUT, str(out)).replace(STEP, str(step)))
        if place is None:
            problems.append(_refused(path, "invalid path in a save", "choose another path"))
        elif not (run_directory in place.parents or working_directory in place.parents
                  or any(n in (place, *place.parents) for n in named)):
            problems.append(_refused(
                path, f"a save would write outside the run and working directories, to {shown(str(place))}",
                f"allow it with `--allow-write {shown(str(place.parent))}`, or save inside these directories"))
        elif over := [p for p, real in read.items() if place == real or place in real.parents]:
            problems.append(_refused(path, f"a save would replace {shown(over[0])}, which the plan reads",
                                     "save to another directory"))
        elif is_foreign(Path(path.replace(OUT, str(out)).replace(STEP, str(step)))):
            problems.append(_refused(path, f"a save would replace {shown(str(place))}, which was not written by a save",
                                     "save to another directory, or delete that one; directories written by a save "
                                     f"contain {MARK}"))
    if problems:
        raise Failure(problems)


def _refused(path: str, title: str, help: str) -> Diagnostic:
    return Diagnostic("RL0712", title, place=shown(path), help=help)


def _resolved(path: str) -> Path | None:
    try:
        return Path(path).resolve()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL in it, links that go round
        return None


def is_foreign(final: Path) -> bool:
    """Whether there is something at `final` that no save has written, or that cannot be read: it would be lost."""
    try:
        if final.is_symlink() or not final.is_dir():
            return final.is_symlink() or final.exists()
        return not (final / MARK).is_file() and any(final.iterdir())
    except OSError:
        return True


def with_python_as_it_is(plan: Plan) -> tuple[Plan, tuple[str, ...]]:
    """`--allow-changed-python`: the plan with the hashes of the files that are there, and the paths that changed. A
    file that cannot be read keeps its hash, and is reported by who loads it."""
    functions = tuple(_as_it_is(f) for f in plan.functions)
    changed = dict.fromkeys(path for new, old in zip(functions, plan.functions, strict=True)
                            for path in _changed(old, new))
    return replace(plan, functions=functions), tuple(changed)


def _as_it_is(function: Function) -> Function:
    try:
        data = function_path(function.path).read_bytes()
    except (OSError, ValueError):
        return function
    function = replace(function, sha256=hashlib.sha256(data).hexdigest())
    try:
        return function if function.path.startswith(SHIPPED) else \
            replace(function, modules=local_modules(function.path, ast.parse(data)))
    except (SyntaxError, ValueError):
        return function


def _changed(old: Function, new: Function) -> Iterator[str]:
    """The files of a function that have changed."""
    if new.sha256 != old.sha256:
        yield new.path
    before = {path: digest for _, path, digest in old.modules}
    yield from (path for _, path, digest in new.modules if before.get(path) != digest)
