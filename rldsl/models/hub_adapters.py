"""Adapters of the Hugging Face Hub: `lora("owner/name")`.

In: the path of an adapter as a program gives it. Out: what a plan records, `hf:NAME@COMMIT`, and the directory of the
local cache with its two files, PEFT's configuration and the weights as safetensors. As for models (`hub.py`), the
commit is resolved once, when the program is compiled; that also downloads both files, which are small.
Errors: RL0095 an adapter that the Hub does not give.
"""

from __future__ import annotations

from pathlib import Path

from rldsl.diag import fail
from rldsl.models.hub import RECORDED, offline, pinned, snapshot
from rldsl.plan.adapter_names import CONFIG, WEIGHTS
from rldsl.source import Span

FILES = (CONFIG, WEIGHTS)


def resolve(path: str, span: Span | None = None) -> str:
    """What a plan records for an adapter, as `pinned` has it. Afterwards both files are in the cache."""
    return pinned(path, "adapter", lambda name, revision: _with_both_files(name, revision, span), span)


def directory(path: str, span: Span | None = None) -> Path:
    """The directory of an adapter, whether it is local or in the cache of the Hub; what is missing there is
    downloaded. RL0095."""
    found = RECORDED.fullmatch(path)
    if found is None:
        return Path(path)
    name, commit = found["name"], found["commit"]
    try:
        return _with_both_files(name, commit, span)
    except FileNotFoundError as error:
        raise fail("RL0095", f'the adapter "{name}" is not complete in the cache, and the Hub cannot be reached', span,
                   str(error), help=f"download it first: `hf download {name} --revision {commit}`") from None


def _with_both_files(name: str, revision: str, span: Span | None) -> Path:
    """The directory of the cache with both files. Errors: RL0095; FileNotFoundError if the Hub cannot be reached and
    one is missing in the cache."""
    folder = snapshot(name, revision, FILES, span, word="adapter")
    missing = [file for file in FILES if not (folder / file).is_file()]
    if not missing:
        return folder
    if offline():
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}")
    if CONFIG in missing:
        raise fail("RL0095", f'"{name}" has no {CONFIG}', span, "it is not the repository of an adapter",
                   help=f'a complete model is given as itself: `causal_lm("{name}")`')
    raise fail("RL0095", f'"{name}" has no {WEIGHTS}', span, "the Hub has it in another format only",
               help="load it with PEFT and save it with `save_pretrained`, which writes safetensors")
