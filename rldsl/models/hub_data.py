"""Data of the Hugging Face Hub: `hf("trl-lib/tldr", split="train")`.

In: the name, subset and split of a dataset as a program gives them. Out: what a plan records,
`hf:NAME@COMMIT/SUBSET/SPLIT`, and a local directory with its rows. The commit is resolved once, when the program is
compiled, so all ranks and every later run read the same rows. The library `datasets` reads the files of the repository,
without executing code of it; the rows are then kept as `Dataset.save_to_disk` writes them, next to the library's own
cache, which need not be kept. HF_HOME, HF_DATASETS_CACHE, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE work as for other
programs.
Errors: RL0095 data that the Hub does not give, RL0097 `datasets` is not installed.
"""

from __future__ import annotations

import glob
import os
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from urllib.parse import quote, unquote

from rldsl.diag import Failure, fail, visible
from rldsl.extras import missing_package
from rldsl.models import hub
from rldsl.progress import stage
from rldsl.source import Span

RECORDED = re.compile(rf"{hub.PREFIX}(?P<name>[\w.-]+/[\w.-]+)@(?P<commit>[0-9a-f]{{40}})"
                      r"/(?P<subset>[^/]+)/(?P<split>.+)")
CARD = ("README.md", ".gitattributes")  # the first says which files are of which subset and split
SHOWN = 20  # subsets of a message
STATE, SPLITS = "state.json", "dataset_dict.json"  # of directories that `save_to_disk` writes


@dataclass(frozen=True, slots=True)
class _Chosen:
    """Rows of a dataset at a commit."""

    name: str    # of the repository
    commit: str  # 40 hex digits
    subset: str  # "default" where a dataset has no others
    split: str   # may be a slice, such as "train[:100]"

    def recorded(self) -> str:
        return f"{hub.PREFIX}{self.name}@{self.commit}/{self.subset}/{self.split}"


def resolve(path: str, subset: str, split: str, span: Span | None = None) -> str:
    """What a plan records for `hf(path, subset=, split=)`: the directory where it is one, else
    `hf:NAME@COMMIT/SUBSET/SPLIT`. No rows are downloaded yet. subset, split: "" if the program omits them."""
    found = hub.NAME.fullmatch(path)
    if found is None or Path(path).exists() or Path(path).parent.is_dir():
        return _local(path, subset, split, span)
    name, revision = found["name"], found["revision"] or "main"
    stage(f"reading {name} from the Hub")
    try:
        commit = hub.snapshot(name, revision, CARD, span, "dataset").name
    except FileNotFoundError as error:
        raise fail("RL0095", f'no data directory "{path}", and the Hub cannot be reached', span, str(error),
                   help="give a directory, or compile once with a network and the same HF_HOME") from None
    if not split:
        known = _splits(name, commit, _known_subset(name, commit, subset, span), span)
        raise fail("RL0095", f'"{name}" needs a split', span, "which rows?",
                   help=f'write `hf("{path}", split="{known[0] if known else "train"}", ...)`'
                        + (f"; splits: {', '.join(known)}" if known else ""))
    if not subset and hub.offline():
        subset = _only_kept(name, commit, split)
    chosen = _Chosen(name, commit, subset or "default", split)
    if _kept(chosen).is_dir():
        return chosen.recorded()
    bases = _bases(name, split, span)
    chosen = _Chosen(name, commit, _known_subset(name, commit, subset, span), split)
    known = _splits(name, commit, chosen.subset, span)
    for base in bases if known else ():
        if base not in known:
            near = get_close_matches(base, known, n=1)
            _refused(f'"{name}" has no split "{base}"', f"splits: {', '.join(known)}",
                     f"did you mean `split=\"{near[0]}\"`?" if near else f'write `split="{known[0]}"`', span)
    return chosen.recorded()


def download(path: str) -> str:
    """The directory with the rows that a plan records, in the format of `save_to_disk`; a path that is no recorded
    dataset is itself. RL0095, RL0097."""
    found = RECORDED.fullmatch(path)
    if found is None:
        return path
    chosen = _Chosen(**found.groupdict())
    folder = _kept(chosen)
    if not folder.is_dir():
        _keep(chosen, folder)
    return str(folder)


def _local(path: str, subset: str, split: str, span: Span | None) -> str:
    """A directory: that of a split, where it has several. A missing directory is left to the run that reads it."""
    folder = Path(path)
    if not folder.is_dir() or not (subset or split):
        return path
    if subset:
        _refused(f'"{path}" is a directory, which has no subsets', "only datasets of the Hub have them",
                 "omit `subset`", span)
    if not (folder / SPLITS).is_file():
        _refused(f'"{path}" has no splits', "a directory of one dataset", "omit `split`", span)
    known = sorted(p.parent.name for p in folder.glob(f"*/{STATE}"))
    if split not in known:
        _refused(f'"{path}" has no split "{split}"', f"splits: {', '.join(known)}",
                 "name one of them; slices such as `train[:100]` are for datasets of the Hub", span)
    return str(folder / split)


def _datasets() -> ModuleType:
    """The library. RL0097: not installed."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        if (found := missing_package(error, 'hf("NAME/DATA")')) is None:
            raise
        raise Failure([found]) from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets  # type: ignore[no-any-return]  # has no annotations


def _kept(chosen: _Chosen) -> Path:
    """Where the rows are kept. It exists only with all of them."""
    from huggingface_hub.constants import HF_HOME

    cache = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    return cache / "rldsl" / chosen.name.replace("/", "___") / chosen.commit / quote(chosen.subset, safe="") / quote(
        chosen.split, safe="")


def _only_kept(name: str, commit: str, split: str) -> str:
    """The subset of which this split is kept, if it is one; else ""."""
    folder = _kept(_Chosen(name, commit, "any", split))
    found = [path.parent.name for path in folder.parents[1].glob(f"*/{glob.escape(folder.name)}")]
    return unquote(found[0]) if len(found) == 1 else ""


def _keep(chosen: _Chosen, folder: Path) -> None:
    """Read the rows with `datasets` and write them to the directory, which appears once they are complete."""
    library = _datasets()
    stage(f"downloading {chosen.name} from the Hub")
    try:
        rows = library.load_dataset(chosen.name, chosen.subset, split=chosen.split, revision=chosen.commit)
    except Exception as error:  # whatever its readers and its HTTP client raise
        _explain(error, chosen)
    # without a network the library takes the newest rows that it has, of whatever commit
    if any(chosen.commit not in Path(file["filename"]).parts for file in rows.cache_files):
        _unreachable(chosen, "the cache has another commit")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", dir=folder.parent) as temporary:
            rows.save_to_disk(f"{temporary}/rows")
            Path(f"{temporary}/rows").rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another process was faster
            raise fail("RL0095", f'the rows of "{chosen.name}" cannot be written: {error.strerror or error}',
                       place=str(folder), help="free disk space there, or set HF_DATASETS_CACHE to another "
                                               "directory") from None


def _known_subset(name: str, commit: str, subset: str, span: Span | None) -> str:
    """The subset that a program means: the one that it names, or the only one."""
    library = _datasets()
    try:
        known = list(library.get_dataset_config_names(name, revision=commit))
    except Exception as error:  # whatever the library and its HTTP client raise
        _explain(error, _Chosen(name, commit, subset, ""), span)
    if subset in known:
        return subset
    if not subset and (len(known) == 1 or "default" in known):
        return str(known[0]) if len(known) == 1 else "default"
    near, more = get_close_matches(subset, known, n=1), len(known) - SHOWN
    raise fail("RL0095", f'"{name}" has no subset "{subset}"' if subset else f'"{name}" needs a subset', span,
               f"subsets: {', '.join(known[:SHOWN])}" + (f" and {more} more" if more > 0 else ""),
               help=f'write `subset="{(near or known or ["..."])[0]}"`')


def _bases(name: str, split: str, span: Span | None) -> tuple[str, ...]:
    """The splits of which an expression such as "train[:100]+test" takes rows. RL0095: it is none."""
    try:
        _datasets().ReadInstruction.from_spec(split)
    except (ValueError, AssertionError) as error:
        _refused(f'"{split}" is not a split or slice of "{name}"', visible(str(error).splitlines()[0]),
                 'write a split, `"train"`, or a slice of one: `"train[:1000]"`, `"train[10%:20%]"`', span)
    return tuple(re.split(r"\[", part.strip())[0] for part in split.split("+"))


def _splits(name: str, commit: str, subset: str, span: Span | None) -> Sequence[str]:
    """The splits of a subset; empty where only the files themselves would tell."""
    library = _datasets()
    try:
        builder: Any = library.load_dataset_builder(name, subset, revision=commit)
    except Exception as error:  # whatever the library and its HTTP client raise
        _explain(error, _Chosen(name, commit, subset, ""), span)
    return [str(split) for split in builder.info.splits or builder.config.data_files or ()]


def _explain(error: Exception, chosen: _Chosen, span: Span | None = None) -> NoReturn:
    text = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if "scripts are no longer supported" in text:
        _refused(f'"{chosen.name}" is a program, which is not executed', "a script of the repository makes its rows",
                 f'use a revision with data files: "{chosen.name}@refs/convert/parquet"', span)
    if isinstance(error, ConnectionError) or hub.offline():
        _unreachable(chosen, text, span)
    raise fail("RL0095", f'"{chosen.name}" cannot be read' + hub.reason(text, span), span, text,
               place="" if span else chosen.recorded(),
               help="`datasets.load_dataset` says the same; read its card on the Hub for subsets, splits and files"
               ) from None


def _unreachable(chosen: _Chosen, text: str, span: Span | None = None) -> NoReturn:
    raise fail("RL0095", f'"{chosen.name}" is not complete in the cache, and the Hub cannot be reached'
               + hub.reason(text, span), span, text, place="" if span else chosen.recorded(),
               help="run once with a network and the same HF_HOME, which keeps the rows, then with "
                    "HF_HUB_OFFLINE=1") from None


def _refused(title: str, label: str, help: str, span: Span | None) -> NoReturn:
    raise fail("RL0095", title, span, label, help=help) from None
