"""Users' Python functions: loaded once, called with rows, and what they return is checked.

In: a plan's Function record and rows (dicts with "prompt", "completion" and all data columns). Out: for each row one
float, or the prompt that the function writes: a string or a list of chat messages, None where it has none.
Runs in a rank or in a worker of its pool (`runtime/rewards/pool.py`), so it imports nothing heavy.
Invariant: a mistake of the user's code is a Failure that names the line in it and the row, never a traceback.
Codes: RL0770 it imports a local module that the plan does not contain, RL0771 the file cannot be read, RL0772 it
changed, RL0773 it fails on import, RL0774 no such function, RL0775 the function raised, RL0776 it returned the wrong
thing.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any

from rldsl.diag import Failure, fail, present
from rldsl.plan.function import Function, Result, Text
from rldsl.runtime.rewards.hashed_modules import MainSource, installed, raise_refused, read_hashed

Row = dict[str, Any]
LARGEST = 3.4028234663852886e38  # a float32
# what verl passes to a reward function, from the columns of its data
VERL = {"data_source": 'row["data_source"]', "solution_str": 'row["completion"]',
        "ground_truth": 'row["reward_model"]["ground_truth"]', "extra_info": 'row.get("extra_info")'}
SHIPPED, LIBRARY = "std/", "rldsl.stdlib"


def function_path(path: str) -> Path:
    """Where the file of a Function is: `std/...` are the files of this package, all others as given."""
    if path.startswith(SHIPPED) and "/" not in path[len(SHIPPED):]:
        return Path(str(resources.files(LIBRARY))) / path[len(SHIPPED):]
    return Path(os.path.realpath(path))  # links that go round are left to whoever reads it


def load(function: Function) -> Callable[[list[Row]], Any]:
    """Execute the bytes of `function`'s file that were compared with its hash. The local modules that it imports are
    those of the plan (`hashed_modules.py`)."""
    function_object = imported(function, "function", f"`{function.name}` is called with a list of rows")
    if (takes := _wrong_signature(function_object)) is not None:
        raise fail("RL0774", f"`{function.name}{takes}` does not take exactly one list of rows", place=function.path,
                   help=f"write `def {function.name}(rows): return [... for row in rows]`; a row is a dict" +
                        _keeping(takes))
    checked: Callable[[list[Row]], Any] = function_object
    return checked


def imported(function: Function, kind: str, use: str) -> Any:
    """What the file defines under the function's name, which can be called. kind: "function" or "class"; use: how it is
    used, for messages. RL0770 .. RL0774."""
    path = function_path(function.path)
    data = read_hashed(path, function.path, function.sha256)
    if not function.path.startswith(SHIPPED):
        installed().add(function, path)
    module = _import(function, path, data)
    found: Any = getattr(module, function.name, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(function.name, names, n=1)
        raise fail("RL0774", f"this file does not define a {kind} `{function.name}`", place=function.path,
                   help=f"did you mean `{near[0]}`?" if near else "define it at the top of the file")
    if not callable(found):
        raise fail("RL0774", f"`{function.name}` is {type_name(found)}, not a {kind}", place=function.path, help=use)
    return found


def _keeping(takes: inspect.Signature) -> str:
    """How to call a reward function that was written for TRL or verl, which its parameters tell."""
    if "completions" in takes.parameters:
        return ('; to keep a function of TRL, call it there: `f(prompts=[r["prompt"] for r in rows], '
                'completions=[r["completion"] for r in rows])`')
    if "solution_str" in takes.parameters:
        of = [f"{name}={column}" for name, column in VERL.items() if name in takes.parameters]
        return f"; to keep a function of verl, call it there: `f({', '.join(of)})`"
    return ""


def _wrong_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The signature of a function that does not take one list of rows. One of TRL, `f(completions, **columns)`, can be
    called with them, and would give the length of a row for that of a completion."""
    try:
        takes = inspect.signature(function)
    except (TypeError, ValueError):  # some of those written in C do not tell
        return None
    try:
        takes.bind([])
    except TypeError:
        return takes
    return takes if {"completions", "solution_str"} & set(takes.parameters) else None


def _import(function: Function, path: Path, data: bytes) -> Any:
    """data: the bytes of the file, which are executed."""
    name = "rldsl_user_" + hashlib.sha256(f"{path}\n{function.sha256}".encode()).hexdigest()[:16]
    if name in sys.modules:  # several functions of one file share their state
        return sys.modules[name]
    if path.suffix != ".py":
        raise fail("RL0771", "this is not a Python file", place=function.path, help="the file name must end in .py")
    loader = MainSource(name, str(path), data)
    spec = present(importlib.util.spec_from_file_location(name, path, loader=loader), f"module spec of {path}", "run")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        del sys.modules[name]
        raise_refused()
        raise raised("RL0773", "this Python file fails on import", function, error,
                     help=_without(error, path)) from None
    raise_refused()
    return module


def _without(error: BaseException, path: Path) -> str:
    """What to do about an error of the import of the file at `path`."""
    if not isinstance(error, ImportError):
        return "`python FILE` shows the full traceback"
    modules = [file.stem for file in path.parent.glob("*.py") if file != path]
    near = get_close_matches(error.name or "", modules, n=1) if isinstance(error, ModuleNotFoundError) else []
    return (f"did you mean `{near[0]}`, which is next to this file?" if near else
            "install the missing module in the Python environment of the run")


def call(function: Function, rows: list[Row], names: Sequence[str] = ()) -> list[Result]:
    """The function's result for each row. It is not called at all without rows.

    names: what messages call each row (default: their numbers). What fails is called again row by row, and the first
    row that fails alone is reported, so that it does not matter which rows were called together; all rows if none
    does."""
    if not rows:
        return []
    found, names = loaded(function), names or [str(i) for i in range(len(rows))]
    try:
        return _call_checked(function, found, rows, names)
    except Failure:
        for row, name in zip(rows, names, strict=True) if len(rows) > 1 else ():
            _call_checked(function, found, [row], [name])
        raise


loaded = functools.cache(load)


def _call_checked(function: Function, callable_: Callable[[list[Row]], Any], rows: list[Row],
                  names: Sequence[str]) -> list[Result]:
    try:
        result = callable_([dict(row) for row in rows])  # a function may change what it is given
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise_refused()
        about = describe(rows[0], names[0]) if len(rows) == 1 else ()
        advice = _advice(function, error, rows[0])
        raise raised("RL0775", f"`{function.name}` raised", function, error, about, advice) from None
    raise_refused()
    return _checked(function, rows, names, result)


def _advice(function: Function, error: BaseException, row: Row) -> str:
    """How to fix what raised; for a missing column, the names of those that exist."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in row:
        near = get_close_matches(error.args[0], list(row), n=1)
        return f"did you mean `{near[0]}`?" if near else "a row has " + ", ".join(f"`{k}`" for k in row)
    return f"every row needs a {_wanted(function)}: handle rows that can fail inside the function"


def _wanted(function: Function) -> str:
    """What a function returns for a row."""
    return {"prompts": "prompt", "prompts?": "prompt or None"}.get(function.returns, "number")


def describe(row: Row, name: str) -> tuple[str, ...]:
    """Notes that tell the user which row it is: its name, and its prompt's first words."""
    prompt = row.get("prompt", "")
    text = prompt if isinstance(prompt, str) else repr(prompt)
    text = text if len(text) <= 100 else text[:100].rpartition(" ")[0] or text[:100]
    return f"row {name}", f"prompt: {text}{'' if text == prompt else ' ...'}"


def _checked(function: Function, rows: list[Row], names: Sequence[str], result: Any) -> list[Result]:
    if hasattr(result, "tolist"):  # an array or a tensor
        result = result.tolist()
    if not isinstance(result, Sequence) or isinstance(result, (str, bytes)):
        raise _wrong(function, f"returned {type_name(result)}, not one {_wanted(function)} per row",
                     help="it receives a list of rows and must return a list of the same length")
    if len(result) != len(rows):
        many, (first, prompt) = len(rows) > 1, describe(rows[0], names[0])
        raise _wrong(function, f"returned {len(result)} values for {f'{len(rows)} rows' if many else first}",
                     notes=(f"{first} is the first", prompt) if many else (prompt,),
                     help=f"return one {_wanted(function)} per row, in order")
    one = _text if function.returns_text else _number
    return [one(function, row, name, value) for row, name, value in zip(rows, names, result, strict=True)]


def _text(function: Function, row: Row, name: str, value: Any) -> Text | None:
    """A prompt, checked."""
    if value is None and function.returns == "prompts?":
        return None
    if isinstance(value, str):
        fault = "" if value else "an empty string"
        text = [value]
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        fault = "" if value else "an empty list"
        fault = next(filter(None, (_message_fault(i, m) for i, m in enumerate(value))), fault)
        text = [] if fault else [part for m in value for part in (m["role"], m["content"])]
    else:
        fault, text = type_name(value), []
    if not fault and any("\ud800" <= letter <= "\udfff" for part in text for letter in part):
        fault = "a string with half of a character (a lone surrogate)"
    if fault:
        more = "" if function.returns == "prompts?" or value is not None else \
            "; to return None for rows without a prompt, declare `-> prompts?(...)`, unless a call takes these " \
            "prompts as `prompt=`, which needs one for each response: return the question itself there"
        raise _wrong(function, f"returned {fault} for row {name}, not a prompt", notes=describe(row, name)[1:],
                     help="return a string, or a list of messages {'role': ..., 'content': ...}, for every row" + more)
    return value if isinstance(value, str) else [dict(m) for m in value]


def _message_fault(number: int, message: Any) -> str:
    """What is wrong with a message of a list; "" for nothing."""
    if not isinstance(message, Mapping):
        return f"a list whose item {number} is {type_name(message)}"
    for key in ("role", "content"):
        if not isinstance(message.get(key), str):
            found = type_name(message[key]) if key in message else "missing"
            return f"a list whose item {number} has a wrong '{key}' ({found})"
    return ""


def _number(function: Function, row: Row, name: str, value: Any) -> float:
    """A number, checked."""
    about = describe(row, name)
    try:
        number = None if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = None
    if number is None:
        raise _wrong(function, f"returned {type_name(value)} for row {name}, not a number", notes=about[1:],
                     help="return a float, an int or a bool for every row")
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise _wrong(function, f"returned {number} for row {name}", notes=about[1:],
                     help="every value must be a finite float32")
    return number


def _wrong(function: Function, what: str, *, help: str = "", notes: tuple[str, ...] = ()) -> Failure:
    return fail("RL0776", f"`{function.name}` {what}", place=function.path, help=help, notes=notes)


def raised(code: str, title: str, function: Function, error: BaseException, notes: tuple[str, ...] = (),
           help: str = "") -> Failure:
    """The user's own error, at the innermost line of the user's file."""
    path = function_path(function.path)
    line = error.lineno if isinstance(error, SyntaxError) and error.filename == str(path) else None
    step = error.__traceback__
    while step is not None:
        if Path(step.tb_frame.f_code.co_filename).resolve() == path:
            line = step.tb_lineno
        step = step.tb_next
    return fail(code, f"{title}: {error_text(error)}", place=f"{function.path}:{line}" if line else function.path,
                notes=notes, help=help)


def error_text(error: BaseException) -> str:
    """The type and the text of an error, shortened."""
    try:
        text = str(error)
    except Exception:  # an exception of the user's own class may fail to say anything
        text = ""
    text = text if len(text) <= 500 else text[:500] + " ..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def type_name(value: Any) -> str:
    """What messages call the type of a value, with its article."""
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
