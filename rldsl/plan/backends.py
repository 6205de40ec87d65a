"""The backends that compute calls: what each can express, and what its calls cost.

In: the name of a backend, as a layout carries it. Out: its `Description`, which the module `describe` of its package
exports as `DESCRIPTION`. The package is `rldsl.backends.NAME`, or that of the entry point NAME in the group
`rldsl.backends` of an installed distribution. Its `describe` imports neither torch nor the library behind the backend.
The compiler, the verifier, the memory estimate, the simulator and the search know a backend by its
description alone; the runtime knows it by the one function of `rldsl.runtime.backend.Build`.
Errors: RL0326 a description that is missing, incomplete or contradicts itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, TypeVar

from rldsl.diag import Failure, fail
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Optimizer, ParamSpec
from rldsl.plan.payloads import WAITING, Waiting

CALLS = ("generate", "infer", "train")
GROUP = "rldsl.backends"  # our package of backends, and the group of entry points by which others add theirs
DIVISIONS = ("dp", "tp", "pp", "vpp", "cp", "ep")


class Facts(Protocol):
    """What is known of a model when its program is compiled."""

    @property
    def name(self) -> str:
        """The model's family, for instance "qwen3"."""

    @property
    def head_name(self) -> str:
        """The model's head, for instance "causal_lm"."""

    @property
    def params(self) -> Sequence[ParamSpec]: ...

    @property
    def config(self) -> Sequence[tuple[str, str]]:
        """(key, value as JSON) of config.json."""


def runs_every_model(facts: Facts, layout: Layout) -> str:
    """The `problem` of a backend without limits."""
    return ""


def without_limit(facts: Facts) -> int:
    """The `positions` of a backend that adds no limit to that of the model."""
    return 0


@dataclass(frozen=True, slots=True)
class Description:
    """What a backend can express, and what its calls cost.

    The costs are objects of classes that live above this package, so the types here say `object`; each consumer checks
    the class (`memory_costs`, `time_costs`, `issue_order`). None means the costs of the torch backend, which are the
    base classes that other backends derive theirs from."""

    calls: tuple[str, ...] = CALLS  # kinds of call
    divisions: tuple[str, ...] = DIVISIONS  # degrees that may be above 1
    undivided: str = ""  # why the others may not, for the message
    zero: int = 3  # the highest `zero` level; 0: none
    adapters: bool = True  # whether models may have LoRA adapters
    optimizers: tuple[str, ...] = ("adamw",)  # that models may be trained with
    groups: bool = False  # whether parameters may differ in learning rate and weight decay
    freezes: bool = False  # whether some parameters of a trained model may be frozen
    needs: tuple[str, str] | None = None  # (a module that must be importable, the command that installs it)
    versions: tuple[str, str, str] | None = None  # (distribution, first supported version, first unsupported one)
    # the environment variable that may name another Python, in which the package is then
    interpreter: str = ""
    own_environment: str = ""  # the command that makes such a Python
    invariant: bool = False  # whether it can run models with `invariant=true`
    images: bool = False  # whether models may read images; then `build` takes `images`
    reuses_cache: bool = False  # whether `generate` can keep its KV cache for a call that continues
    conversations: bool = False  # whether `generate` can talk with an environment
    waiting: tuple[Waiting, ...] = WAITING  # what a conversation may do with its slot while it waits
    per_step: bool = True  # whether `generate` can continue the responses of an earlier call (`per_step=`)
    # whether the log-probs of `generate` are computed by another engine than those of training, which differ by more
    # than rounding
    other_logprobs: bool = False
    entries: bool = False  # whether it has `Shard.top`, and the output "logprobs_at"
    first_pass: bool = False  # whether `train` can make a pass without gradient before those of a minibatch
    router_bias: bool = False  # whether `train` can move router biases by the load of the experts
    positions: Callable[[Facts], int] = without_limit  # tokens of a sequence, at most; 0: as many as the model has
    problem: Callable[[Facts, Layout], str] = runs_every_model  # the feature it cannot express; "" if there is none
    memory: object = None  # what a call holds: a `rldsl.memory.call_memory.MemoryCosts`
    time: object = None  # what passes a call makes, and their seconds: a `rldsl.simulate.time_costs.TimeCosts`
    issue_order: object = None  # its communication inside calls: a `rldsl.verify.issue_order.IssueOrder`


def names() -> tuple[str, ...]:
    """The installed backends, in alphabetical order."""
    return tuple(sorted({*_own(), *_entry_points()}))


def package(name: str) -> str:
    """The package of a backend; "" if there is none of this name. Nothing is imported, and no installed distribution is
    looked at for a backend of ours. Errors: RL0326, if several distributions provide it."""
    if name in _own():
        return f"{GROUP}.{name}"
    found = sorted(_entry_points().get(name, ()))
    if len(found) > 1:
        raise unusable(name, f"several packages provide it: {', '.join(found)}", place=found[0],
                       fix="uninstall all of them but one (`pip uninstall`)")
    return found[0] if found else ""


def _entry_points() -> dict[str, set[str]]:
    """The packages that installed distributions provide, by the name of the backend."""
    from importlib.metadata import entry_points  # late: it imports for longer than most plans are read

    found: dict[str, set[str]] = {}
    for e in entry_points(group=GROUP):
        found.setdefault(e.name, set()).add(e.value)
    return found


def _own() -> list[str]:
    return [found.name for found in pkgutil.iter_modules(importlib.import_module(GROUP).__path__) if found.ispkg]


@cache
def described(name: str) -> Description | None:
    """The description of a backend; None if there is no backend of this name, in which case nothing is imported.
    Errors: RL0326."""
    home = package(name)
    if not home:
        return None
    module = f"{home}.describe"
    try:
        found = getattr(importlib.import_module(module), "DESCRIPTION", None)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise unusable(name, "the package has no module `describe`") from None
        if error.name and f"{home}.".startswith(f"{error.name}."):
            raise unusable(name, f"its package {home} cannot be imported",
                           fix=f"install {home} again, or uninstall what declares it (`pip uninstall`)") from None
        raise unusable(name, f"its description cannot be imported: {error}", fix="install what is missing") from None
    except Exception as error:  # of the authors' code, which may do anything
        raise unusable(name, f"its description cannot be imported: {type(error).__name__}: {error}") from None
    if not isinstance(found, Description):
        raise unusable(name, "`describe.py` exports no `DESCRIPTION` of class `rldsl.plan.backends.Description`")
    if why := _contradiction(found):
        raise unusable(name, why)
    return found


def _contradiction(found: Description) -> str:
    if unknown := [c for c in found.calls if c not in CALLS]:
        return f"`calls` names {unknown[0]!r}; the kinds of call are {', '.join(CALLS)}"
    if unknown := [d for d in found.divisions if d not in DIVISIONS]:
        return f"`divisions` names {unknown[0]!r}; the degrees are {', '.join(DIVISIONS)}"
    return "" if found.zero in range(4) else f"`zero` is {found.zero!r}; the levels are 0 to 3"


Costs = TypeVar("Costs")


def costs(name: str, field: str, kind: type[Costs]) -> Costs:
    """The costs that a backend states in a field of its description; those of the base class if it states none.
    Errors: RL0326 if they are not of the class, or lack one of its methods."""
    found = getattr(described(name), field, None)  # the verifier refuses plans whose backend does not exist
    if found is None:
        base: type = kind
        found = _base(base)
    if not isinstance(found, kind):
        raise unusable(name, f"`{field}` must be an object of a class derived from `{kind.__module__}.{kind.__name__}`"
                             f", not {found!r}")
    return found


@cache
def _base(kind: Callable[[], object]) -> object:
    """The torch backend's costs, one object per class."""
    return kind()


def unusable(name: str, why: str, place: str = "", fix: str = "fix the description, or report this to the authors of "
                                                              "the backend") -> Failure:
    """RL0326 for a backend that is there and cannot be used. fix: by default of a description that is wrong: its
    authors must fix it, the user can only avoid it."""
    instead = "" if name == DEFAULT_BACKEND else f", or place the calls with `backend={DEFAULT_BACKEND}`"
    return fail("RL0326", f"the backend `{name}` cannot be used", place=place or f"{package(name)}.describe",
                notes=(why,), help=f"{fix}{instead}")


def lacking(description: Description) -> str:
    """The command that installs the package behind a backend, if that is missing or of an unsupported version; else
    "". Another Python is looked for, but not asked: who runs the backend finds out."""
    if description.needs is None:
        return ""
    module, command = description.needs
    if python := _own_python(description):
        return "" if shutil.which(python) else command
    try:
        installed = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package around the module
        return command
    return "" if installed and not unfit(description) else command


def how_to_install(description: Description) -> str:
    """The commands that install the package behind a backend, for a message."""
    _, command = description.needs or ("", "")
    if not description.interpreter:
        return f"`{command}`"
    if python := _own_python(description):
        return f"`{command}` after `unset {description.interpreter}`, or name the Python of a separate environment " \
               f"instead of {python}: `{description.own_environment}`"
    return f"`{command}`, or in a separate environment with `{description.own_environment}`"


def _own_python(description: Description) -> str:
    """The Python that the user names for the package of a backend; "" if there is none."""
    return os.environ.get(description.interpreter, "") if description.interpreter else ""


def unfit(description: Description) -> str:
    """The unsupported version of its package that is installed, or the Python that does not exist; "" if there is none,
    or if the version is unknown. A release candidate counts as the release."""
    if python := _own_python(description):
        return "" if shutil.which(python) else f"{description.interpreter} names {python}, which cannot be run"
    if description.versions is None:
        return ""
    from importlib import metadata

    name, first, end = description.versions
    try:
        found = metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
    return "" if not found or release(first) <= release(found) < release(end) else (
        f"{name} {found} is installed, but version {first} or later, before {end}, is required")


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: 0.17.0rc0 is (0, 17, 0); () if it has none."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[a-zA-Z+!-]", version)[0])))


def unable(description: Description, call: str, layout: Layout, adapters: bool,
           optimizer: Optimizer | None = None, talks: bool = False, entries: bool = False,
           first_pass: bool = False, per_step: bool = False, waiting: Waiting = "keep",
           router_bias: bool = False) -> str:
    """Why a backend cannot run a call under a layout, whatever the model; "" if it can. optimizer: of the model.
    talks: whether environments answer a `generate`. entries: whether the call is about several tokens at each token.
    first_pass: whether a pass without gradient comes before each minibatch of a `train`. per_step: whether a `generate`
    continues responses of earlier steps. waiting: what conversations do with their slots while they wait.
    router_bias: whether a `train` moves router biases."""
    if call not in description.calls:
        return f"it does not support `{call}`"
    if talks and not description.conversations:
        return "it cannot talk with environments"
    if talks and waiting not in description.waiting:
        return f"it does not support `waiting={waiting}`, only {' and '.join(f'`{w}`' for w in description.waiting)}"
    if per_step and not description.per_step:
        return "it cannot continue the responses of earlier steps (`per_step`)"
    divided = next((d for d in DIVISIONS if getattr(layout, d) > 1 and d not in description.divisions), "")
    if divided:
        return f"it does not support `{divided}`" + (f": {description.undivided}" if description.undivided else "")
    if layout.zero > description.zero:
        return f"it supports `zero` only up to {description.zero}" if description.zero else "it does not support `zero`"
    if entries and not description.entries:
        return "it does not give the log-probs of several tokens at each token"
    if first_pass and not description.first_pass:
        return "it cannot make a pass before each minibatch, which this loss needs"
    if router_bias and not description.router_bias:
        return "it cannot move router biases (`router_bias_update_rate`)"
    if adapters and not description.adapters:
        return "it does not support adapters"
    if call != "train" or optimizer is None:
        return ""
    if optimizer.kind not in description.optimizers:
        return f"it does not support the optimizer `{optimizer.kind}`"
    if (optimizer.groups or optimizer.decay != "all") and not description.groups:
        return "it does not support groups of parameters"
    return "it does not support `freeze`" if optimizer.freeze and not description.freezes else ""
