"""A saved model of a run is sent to the Hub, with a card that says how it was made.

In: a run, the name of a repository. Out: the address of the commit. The directory is copied by links first, so that a
run which saves the same model meanwhile changes nothing of what is sent. HF_TOKEN and HF_ENDPOINT work as for other
programs.
Errors: RL0095 the Hub refuses, RL0798 the run has saved no such model.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import NoReturn

from rldsl.diag import Failure, fail
from rldsl.files import read_bytes
from rldsl.models import hub
from rldsl.plan.metrics_file import METRICS
from rldsl.progress import stage
from rldsl.python.model_card import FOLDER, model_card
from rldsl.python.runs import Run
from rldsl.runtime.metrics.run_record import PLAN

CARD = "README.md"  # of a repository
TRIES = 5  # to copy a directory that is being replaced


def push(run: Run, name: str, model: str = "", private: bool = False, branch: str = "") -> str:
    """Send the newest saved `model` of a run to the repository `name` ("owner/name"), which is created if it is not
    there. model: "" if the program saves one model only. branch: "" is the main one. Returns the commit's address."""
    found = hub.NAME.fullmatch(name)
    if found is None or found["revision"]:
        raise fail("RL0095", f'"{name}" is not a name of the Hub', place=name,
                   help="write OWNER/NAME" + ("; `--branch` chooses a branch" if found else ""))
    run.record  # noqa: B018 # RL0783 where there is no run
    plan = run.plan
    model = model or _only_saved(run)
    source = run.saved(model)
    program = Path(plan.record.header.program).name
    page = next((text for path, text in plan.sources.items() if Path(path).name == program), "")
    with tempfile.TemporaryDirectory(prefix="rldsl-") as temporary:
        folder = Path(temporary) / "model"
        _copy(source, folder)
        (folder / CARD).write_text(model_card(name, model, plan.record, plan.id, run.record, run.lines, page,
                                                     plan.checks), encoding="utf-8")
        (folder / FOLDER).mkdir()
        (folder / FOLDER / PLAN).write_bytes(read_bytes(str(run.folder / PLAN)))
        if (run.folder / METRICS).is_file():
            shutil.copyfile(run.folder / METRICS, folder / FOLDER / METRICS)
        stage(f"sending {model} to {name}")
        return _send(folder, name, f"{model} of {plan.record.header.flow}, step {run.step}", private, branch)


def _only_saved(run: Run) -> str:
    """The model that a program saves, if it is one."""
    from rldsl.plan.projection import event_paths

    saved = sorted({e.subject for e, _ in event_paths(run.plan.record) if e.saves_to is not None})
    if len(saved) == 1:
        return saved[0]
    raise fail("RL0798", "the program saves several models" if saved else "the program saves no model",
               place=str(run.folder), help=f"choose one with `--model`: {', '.join(saved)}" if saved else
               "add `every 100 { save actor }`")


def _copy(source: Path, target: Path) -> None:
    """Copy a directory by links where that is possible. A save that replaces it meanwhile makes it another directory:
    then it is copied again."""
    for _ in range(TRIES):
        try:
            before = source.stat().st_ino
            shutil.copytree(source, target, copy_function=_link, ignore=lambda folder, names: (
                {CARD, FOLDER} if Path(folder) == source else set()))  # ours take their place, and links are the files
            if source.stat().st_ino == before:
                return
        except (FileNotFoundError, shutil.Error):
            pass  # it is being replaced
        shutil.rmtree(target, ignore_errors=True)
    raise fail("RL0798", "the saved model changes all the time", place=str(source),
               help="try again, or save to a path with `{step}` in it")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def _send(folder: Path, name: str, message: str, private: bool, branch: str) -> str:
    from huggingface_hub import HfApi, errors

    if hub.offline():
        raise fail("RL0095", "HF_HUB_OFFLINE forbids to send anything", place=name, help="unset HF_HUB_OFFLINE")
    api = HfApi()
    try:
        api.create_repo(name, private=private, exist_ok=True)
        if branch:
            api.create_branch(name, branch=branch, exist_ok=True)
        return str(api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message,
                                     revision=branch or None).commit_url)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else 0
        _refused(name, status, error)
    except (OSError, ValueError) as error:  # no network, no token
        raise _failed(name, error) from None
    except Exception as error:  # whatever the library's HTTP client raises
        raise _failed(name, error) from None


def _refused(name: str, status: int, error: Exception) -> NoReturn:
    if status in (401, 403):
        raise fail("RL0095", f'the Hub does not let you write to "{name}"', place=name,
                   help="log in with `hf auth login`, or set HF_TOKEN to a token that may write there") from None
    raise _failed(name, error) from None


def _failed(name: str, error: Exception) -> Failure:
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return fail("RL0095", f'the model cannot be sent to "{name}"', place=name, notes=(text,),
                help="nothing of the run is lost: repeat the command")
