"""RLHF and LLM-RL as a language. What Python programs and notebooks use; docs/api.md is its page.

    import rldsl

    rldsl.check(text)                          # what is wrong with a program; needs no model
    plan = rldsl.compile("ppo.rlf", lr=1e-6)   # a verified plan, which shows itself in a notebook
    plan.simulate("h100x8").seconds
    rldsl.load("ppo.plan")
    run = rldsl.train("ppo.rlf", lr=1e-6)      # compile and run on this machine; run.metrics is a table

`import rldsl` itself loads nothing; every name here is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rldsl.python.entry import check, compile, load
    from rldsl.python.errors import DiagnosticError
    from rldsl.python.messages import Diagnostics
    from rldsl.python.plan import Plan
    from rldsl.python.runs import Run, runs
    from rldsl.python.train import RunError, train
    from rldsl.python.views import Graph, Memory, Report, Simulation

_PLACES = {
    "check": "entry", "compile": "entry", "load": "entry", "DiagnosticError": "errors",
    "Diagnostics": "messages", "Plan": "plan", "Graph": "views", "Memory": "views", "Report": "views",
    "Simulation": "views", "Run": "runs", "runs": "runs", "train": "train", "RunError": "train",
}

__all__ = ["check", "compile", "load", "train", "runs", "Plan", "Run", "Graph", "Memory", "Report", "Simulation",
           "Diagnostics", "DiagnosticError", "RunError"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("rldsl")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rldsl.python.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
