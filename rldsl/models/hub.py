"""Models of the Hugging Face Hub: `causal_lm("Qwen/Qwen3-0.6B")`.

In: the path of a model as a program gives it. Out: what a plan records, `hf:NAME@COMMIT`, and the directory of the
local cache with its files. The commit is resolved once, when the program is compiled, so all ranks and every later run
read the same files. Compiling reads the small files of a repository, and its weights only if there is no index of them;
a run downloads the rest. Only safetensors are downloaded, no pickled weights and no code. HF_HOME, HF_TOKEN,
HF_ENDPOINT and HF_HUB_OFFLINE work as for other programs.
Errors: RL0095 a model that the Hub does not give.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn

from rldsl.diag import fail, visible
from rldsl.progress import stage
from rldsl.source import Span

PREFIX = "hf:"  # of the paths of models of the Hub in plans
NAME = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
RECORDED = re.compile(rf"{PREFIX}(?P<name>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{{40}})")
INDEX = "model.safetensors.index.json"
SMALL = ("*.json", "*.jinja", "*.txt", "tokenizer.model")  # configuration and tokenizer
WEIGHTS = ("*.safetensors",)
SECONDS = 10.0  # to wait for an answer of the Hub


def resolve(path: str, span: Span | None = None) -> str:
    """What a plan records for a model, as `pinned` has it. Its small files are in the cache then."""
    def find(name: str, revision: str) -> Path:
        folder = _download(name, revision, SMALL, span)
        return folder if (folder / INDEX).is_file() else _download(name, folder.name, SMALL + WEIGHTS, span)

    return pinned(path, "model", find, span)


def pinned(path: str, word: str, find: Callable[[str, str], Path], span: Span | None) -> str:
    """What a plan records for the path of a model or an adapter: `hf:NAME@COMMIT`, or the path itself where it is a
    directory, or cannot be a name on the Hub. word: what it is, for messages. find: of a name and a revision, the
    directory of the cache, whose name is the commit; FileNotFoundError if the Hub cannot be reached. RL0095."""
    found = NAME.fullmatch(path)
    if found is None or Path(path).exists() or Path(path).parent.is_dir():
        return path
    name, revision = found["name"], found["revision"] or "main"
    stage(f"reading {name} from the Hub")
    try:
        folder = find(name, revision)
    except FileNotFoundError as error:
        if offline():
            return path
        raise fail("RL0095", f'no {word} directory "{path}", and the Hub cannot be reached', span, str(error),
                   help=f"give a directory, or download the {word} on a machine with a network: "
                        f"`hf download {name}`") from None
    return f"{PREFIX}{name}@{folder.name}"


def directory(path: str, span: Span | None = None) -> Path:
    """The directory of a model, whether it is local or in the cache of the Hub. What lacks there is downloaded, but no
    weights. RL0095."""
    return _directory(path, SMALL, span)


def download(path: str) -> str:
    """The local directory of a model with all its files. RL0095."""
    return str(_directory(path, SMALL + WEIGHTS, None))


def _directory(path: str, patterns: tuple[str, ...], span: Span | None) -> Path:
    found = RECORDED.fullmatch(path)
    if found is None:
        return Path(path)
    name, commit = found["name"], found["commit"]
    if folder := _cached(name, commit, patterns):
        return folder
    try:
        return _download(name, commit, patterns, span)
    except FileNotFoundError as error:
        raise fail("RL0095", f'"{name}" is not complete in the cache, and the Hub cannot be reached'
                   + reason(str(error), span), span, str(error),
                   help=f"download it first: `hf download {name} --revision {commit}`") from None


def offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids the network."""
    from huggingface_hub import is_offline_mode

    return bool(is_offline_mode())


def reason(text: str, span: Span | None) -> str:
    """The end of a title with what the library says, which is the label where there is a place in a program."""
    return "" if span or not text else f": {visible(text)}"


def unasked(path: str) -> str:
    """For the help of a message that there is no such directory: that it may be a name on the Hub, which was not asked
    because HF_HUB_OFFLINE is set; "" if it was, or if the path is no name."""
    if not NAME.fullmatch(path) or Path(path).parent.is_dir() or not offline():
        return ""
    return "the cache of the Hub does not have it, and HF_HUB_OFFLINE forbids to download it"


def _download(name: str, revision: str, patterns: tuple[str, ...], span: Span | None) -> Path:
    """The directory of the cache with the files of a branch, tag or commit, whose name is the commit; those that lack
    are downloaded. Without a network what the cache has is enough.
    Errors: RL0095; FileNotFoundError if the Hub cannot be reached and the cache lacks files."""
    folder = snapshot(name, revision, patterns, span)
    if not _has(folder, patterns):
        if offline() or (folder / INDEX).is_file():
            raise FileNotFoundError(f"{folder} lacks files")
        lacking = "safetensors" if (folder / "config.json").is_file() else "config.json"
        _refused(f'"{name}" has no {lacking}', "the Hub has it in another format only",
                 "convert it with transformers' `save_pretrained`, which writes both", span)
    return folder


def snapshot(name: str, revision: str, patterns: tuple[str, ...], span: Span | None,
             kind: Literal["model", "dataset"] = "model", word: str = "") -> Path:
    """The directory of the cache for a branch, tag or commit of a repository, whose name is the commit. Files that fit
    the patterns and lack there are downloaded. word: what messages call its content.
    Errors: RL0095 the Hub refuses; FileNotFoundError it cannot be reached, and the cache does not know the revision."""
    from huggingface_hub import errors, snapshot_download

    try:
        with _bars(large=WEIGHTS[0] in patterns):
            return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=list(patterns),
                                          etag_timeout=SECONDS))
    except errors.GatedRepoError:
        _refused(f'"{name}" is gated', "its owner decides who may read it",
                 "ask for access on its page, then log in with `hf auth login` or set HF_TOKEN", span)
    except errors.RevisionNotFoundError:
        _refused(f'"{name}" has no revision "{revision}"', "no such branch, tag or commit",
                 f'leave "@{revision}" out for its newest files', span)
    except errors.RepositoryNotFoundError:
        _refused(f'no {word or ("model" if kind == "model" else "data")} directory "{name}", and no such '
                 f"{word or kind} on the Hub",
                 "not found, or private",
                 f"check the name; for a private {word or kind} log in with `hf auth login` or set HF_TOKEN", span)
    except Exception as error:  # the library passes on whatever its HTTP client raises
        raise FileNotFoundError(next(iter(str(error).splitlines()), type(error).__name__)) from None


@contextmanager
def _bars(large: bool) -> Iterator[None]:
    """The library's progress bars where somebody sees them and they last: of weights, on a terminal. Its warnings are
    left out, as what lacks is an error here. large: weights are among the files."""
    from huggingface_hub.utils import logging as messages
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    level = messages.get_verbosity()
    hidden = not (large and sys.stderr.isatty()) and not are_progress_bars_disabled()
    messages.set_verbosity(logging.ERROR)
    if hidden:
        disable_progress_bars()
    try:
        yield
    finally:
        messages.set_verbosity(level)
        if hidden:
            enable_progress_bars()


def _refused(title: str, label: str, help: str, span: Span | None) -> NoReturn:
    raise fail("RL0095", title, span, label, help=help) from None


def _cached(name: str, commit: str, patterns: tuple[str, ...]) -> Path | None:
    """The directory of the cache, if it has these files of a commit."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(name, revision=commit, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if _has(folder, patterns) else None


def _has(folder: Path, patterns: tuple[str, ...]) -> bool:
    """Whether the small files are there, and all weights if they are asked for."""
    if not (folder / "config.json").is_file():
        return False
    if WEIGHTS[0] not in patterns:
        return True
    if (folder / INDEX).is_file():
        try:
            files = json.loads((folder / INDEX).read_text())["weight_map"].values()
            return all((folder / file).is_file() for file in files)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return True  # whoever reads the weights says what is wrong with it
    return any(folder.glob(WEIGHTS[0]))
