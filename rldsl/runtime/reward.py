"""Users' Python functions: loaded once, called with rows, and what they return is checked.

In: a plan's Function record and rows (dicts with "prompt", "completion" and all data columns). Out: one float a row.
Invariant: a mistake of the user's code is a Failure that names the line in it, never a traceback.
Codes: RL0771 the file cannot be read, RL0772 it changed, RL0773 it fails on import, RL0774 no such function,
RL0775 the function raised, RL0776 it returned the wrong thing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rldsl.diag import Failure, fail
from rldsl.plan.model import Function

Row = dict[str, Any]


def load(function: Function) -> Callable[[list[Row]], Any]:
    """Import the file of `function`, as Python runs a script: with its directory first among the places of modules."""
    try:
        text = Path(function.path).read_bytes()
    except OSError as error:
        raise fail("RL0771", f"the Python file cannot be read: {error.strerror}", place=function.path,
                   help="paths are relative to the working directory") from None
    if hashlib.sha256(text).hexdigest() != function.sha256:
        raise fail("RL0772", "this Python file is not the one that the plan was compiled with", place=function.path,
                   help="compile the program again")
    module = _import(function)
    found = getattr(module, function.name, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(function.name, names, n=1)
        raise fail("RL0774", f"there is no function `{function.name}` in this file", place=function.path,
                   help=f"did you mean `{near[0]}`?" if near else "")
    if not callable(found):
        raise fail("RL0774", f"`{function.name}` is {_article(found)}, not a function", place=function.path)
    return found


def _import(function: Function) -> Any:
    path = Path(function.path).resolve()
    name = "rldsl_user_" + hashlib.sha256(f"{path}\n{function.sha256}".encode()).hexdigest()[:16]
    if name in sys.modules:  # several functions of one file share their state
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise fail("RL0771", "this is not a Python file", place=function.path, help="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _raised("RL0773", "this Python file fails on import", function, error) from None
    return module


def call(function: Function, rows: list[Row]) -> Tensor:
    """The function's value for each row: [len(rows)] float32. It is called once, and not at all without rows."""
    if not rows:
        return torch.zeros(0)
    found = _loaded(function)
    try:
        result = found(rows)
    except (Exception, SystemExit) as error:
        raise _raised("RL0775", f"`{function.name}` raised", function, error) from None
    return torch.tensor(_checked(function, rows, result), dtype=torch.float32)


_loaded = functools.lru_cache(maxsize=None)(load)


def _checked(function: Function, rows: list[Row], result: Any) -> list[float]:
    if isinstance(result, Tensor) or type(result).__module__ == "numpy":
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)):
        raise _wrong(function, f"returned {_article(result)}, not one number for each row",
                     help="it is called with a list of rows and returns a list as long")
    if len(result) != len(rows):
        raise _wrong(function, f"returned {len(result)} values for {len(rows)} rows",
                     help="return one number for each row, in their order")
    return [_number(function, i, row, value) for i, (row, value) in enumerate(zip(rows, result))]


def _number(function: Function, index: int, row: Row, value: Any) -> float:
    about = (f"row {index} of {function.name}'s rows", f"prompt: {_short(row.get('prompt', ''))}")
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise _wrong(function, f"returned {_article(value)} for row {index}, not a number", notes=about)
    if not math.isfinite(number) or abs(number) > torch.finfo(torch.float32).max:
        raise _wrong(function, f"returned {number} for row {index}", notes=about,
                     help="every value must be a finite float32")
    return number


def _wrong(function: Function, what: str, *, help: str = "", notes: tuple[str, ...] = ()) -> Failure:
    return fail("RL0776", f"`{function.name}` {what}", place=function.path, help=help, notes=notes)


def _raised(code: str, title: str, function: Function, error: BaseException) -> Failure:
    """The user's own error, at the innermost line of the user's file."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    path = Path(function.path).resolve()
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    step = error.__traceback__
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename).resolve() == path:
            line = step.tb_lineno
        step = step.tb_next
    return fail(code, f"{title}: {text}", place=f"{function.path}:{line}" if line else function.path)


def _article(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 200 else text[:200] + "..."
