"""Where the lines of a run's metrics go besides `metrics.jsonl`: TensorBoard and Weights & Biases.

In: a step and its numbers. Out: files (and, with `--wandb online`, messages to their service). Both are optional
packages: RL0782 one is asked for and not installed, RL0787 it refuses to begin. A run that resumes continues the same
curves.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from secrets import token_hex
from types import ModuleType
from typing import Any, Protocol

from rldsl.diag import fail
from rldsl.runtime.files import written

TENSORBOARD, WANDB = "tensorboard", "wandb"


class MetricWriter(Protocol):
    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self, ok: bool) -> None:
        """ok: the run was not ended by an error."""


def import_optional(module: str, option: str, extra: str) -> ModuleType:
    """An optional package. RL0782: not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise fail("RL0782", f"{option} needs the package {error.name or module}, which is not installed",
                   place=option, help=f"pip install 'rldsl[{extra}]'") from None


def check_packages(tensorboard: bool, wandb: str) -> None:
    """Check that the packages of what is asked for are installed."""
    if tensorboard:
        import_optional("tensorboard", "--tensorboard", TENSORBOARD)
    if wandb:
        import_optional("wandb", "--wandb", WANDB)


class TensorBoard:
    """Event files under OUT/tensorboard, which `tensorboard --logdir OUT` shows."""

    def __init__(self, out: Path, step: int):
        """step: the first that will be written; what an earlier start wrote from that step on is dropped."""
        import_optional("tensorboard", "--tensorboard", TENSORBOARD)
        made = import_optional("torch.utils.tensorboard", "--tensorboard", TENSORBOARD)
        self._folder = out / TENSORBOARD
        with written(self._folder):
            self._writer = made.SummaryWriter(str(self._folder), purge_step=step if step > 1 else None)

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        with written(self._folder):
            for name, value in numbers.items():
                self._writer.add_scalar(name, value, step)
            self._writer.flush()

    def close(self, ok: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases; its files lie under OUT/wandb, from where `wandb sync` sends offline runs."""

    def __init__(self, out: Path, step: int, mode: str, project: str, config: Mapping[str, Any]):
        """step: the first that will be written. project: the flow. config: parameters of the program."""
        wandb = import_optional("wandb", "--wandb", WANDB)
        (out / WANDB).mkdir(parents=True, exist_ok=True)
        id = _id(out / WANDB / "id", again=step > 1)
        try:
            self._run = wandb.init(project=project, name=out.name, dir=str(out), mode=mode, id=id, resume="allow",
                                   config=dict(config), settings=wandb.Settings(console="off", silent=True))
        except Exception as error:  # whatever a library of this size brings: no network, no key, a full disk
            message = " ".join(str(error).split())[:300] or type(error).__name__
            raise fail("RL0787", f"Weights & Biases cannot start: {message}", place=f"--wandb {mode}",
                       help="`--wandb offline` needs no network access and no API key") from None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


def _id(file: Path, again: bool) -> str:
    """The id of this run at the service: the same when the run is resumed."""
    with written(file):
        if not (again and file.exists()):
            file.write_text(token_hex(4))
        return file.read_text().strip()
