"""The files of a model directory: whether all are there, the names of its tensors, and what its tokenizer does.

In: a directory. Out: names, a digest. No weight is read.
Errors: RL0301 no directory, RL0302 a file or tensor is missing.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import Failure, fail
from rldsl.models.cache import cached_record, entry_key
from rldsl.models.hub import unasked
from rldsl.plan.heads import HEADS, SCORE_WEIGHT
from rldsl.source import Span

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
MAX_HEADER = 100_000_000  # bytes that the library takes, too
HEADER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error)


def check(directory: Path, path: str, kind: str, span: Span | None, trained: bool) -> frozenset[str]:
    """The names of its tensors."""
    if not (directory / "config.json").is_file():
        what = "config.json is missing" if directory.is_dir() else "no such directory"
        raise fail("RL0301", f'no model directory "{path}"', span, what,
                   help="give a HuggingFace directory (config.json, tokenizer, *.safetensors), relative to the working "
                        f"directory {Path.cwd()}, or the name of a model on the Hub: \"Qwen/Qwen3-0.6B\"",
                   notes=tuple(filter(None, [unasked(path)])))
    if not any((directory / name).is_file() for name in TOKENIZERS):
        raise fail("RL0302", f'the model directory "{path}" has no tokenizer', span, "tokenizer.json is missing",
                   help="save one to the directory: `AutoTokenizer.from_pretrained(...).save_pretrained(directory)`")
    names = tensor_names(directory, path, span)
    if not names:
        raise fail("RL0302", f'the model directory "{path}" has no weights', span, "no *.safetensors file",
                   help="save the model with `save_pretrained`, which writes safetensors")
    if HEADS[kind].needs_trained_head and not trained and SCORE_WEIGHT not in names:
        raise fail("RL0302", f'the reward model "{path}" has no score head', span, f"no tensor {SCORE_WEIGHT!r}",
                   help="a reward model is an AutoModelForSequenceClassification with one label, or a directory that "
                        "a program with `train` and `save` of a reward model wrote, as for families with images that "
                        "have no such class; only a reward model that the program trains can start with a new head")
    return names


def tensor_names(directory: Path, path: str, span: Span | None = None) -> frozenset[str]:
    """Names in the index, or in the headers of the safetensors files (8 bytes of length, then JSON)."""
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            return frozenset(json.loads(index.read_text())["weight_map"])
        names: set[str] = set()
        for file in sorted(f for f in directory.glob("*.safetensors") if f.is_file()):
            names |= _header(file).keys()
        return frozenset(names)
    except HEADER_ERRORS as error:
        raise _unreadable(error, directory, path, span) from None


def tensor_shapes(file: Path, path: str, span: Span | None = None) -> dict[str, tuple[int, ...]]:
    """Name -> shape of the tensors of a safetensors file, from its header. path: as the program has it."""
    try:
        return {name: tuple(tensor["shape"]) for name, tensor in _header(file).items()}
    except HEADER_ERRORS as error:
        raise _unreadable(error, file, path, span) from None


def _header(file: Path) -> dict[str, Any]:
    """Name -> type, shape and place of each tensor of a safetensors file."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > min(MAX_HEADER, file.stat().st_size - 8):
            raise ValueError(f"{file.name} has a header of {length} bytes")
        return {name: tensor for name, tensor in json.loads(stream.read(length)).items() if name != "__metadata__"}


def _unreadable(error: Exception, file: Path, path: str, span: Span | None) -> Failure:
    """RL0302 for one of HEADER_ERRORS. file: which, if the error does not say."""
    if isinstance(error, OSError):
        return fail("RL0302", f'the weights in "{path}" cannot be read', span,
                    f"{Path(error.filename or file).name}: {error.strerror}", help="check the permissions of the files")
    return fail("RL0302", f'the weights in "{path}" cannot be read', span, f"{type(error).__name__}: {error}",
                help="the safetensors files or their index are corrupted; copy them again")


def tokenizer(directory: Path) -> str:
    """Equal for tokenizers that make equal ids of a text, with the tokens that they put around it; settings of padding,
    truncation and offsets do not count."""
    file = directory / "tokenizer.json"
    if file.is_file():
        data = file.read_bytes()
        key = entry_key("tokenizer", sha256(data).hexdigest())
        return cached_record(TokenizerDigest, key, lambda: TokenizerDigest(_tokenizer_digest(data))).digest
    found = [(directory / name) for name in TOKENIZERS if (directory / name).is_file()]
    return sha256(b"\0".join(f.read_bytes() for f in found)).hexdigest()


@dataclass(frozen=True, slots=True)
class TokenizerDigest:
    """What the cache keeps of a tokenizer.json, whose tables are long."""

    digest: str  # sha256 of what decides token ids


def _tokenizer_digest(data: bytes) -> str:
    """data: of tokenizer.json."""
    try:
        whole = json.loads(data)
        parts = {k: whole.get(k) for k in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        parts["around"] = _around(whole.get("post_processor"))
        return sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    except (ValueError, AttributeError):
        return sha256(data).hexdigest()


def _around(processor: Any) -> list[Any]:
    """What adds tokens before and after a text: [BOS] and the like. A `ByteLevel` one moves offsets only."""
    if not isinstance(processor, dict) or processor.get("type") == "ByteLevel":
        return []
    if processor.get("type") == "Sequence":
        return [found for one in processor.get("processors", ()) for found in _around(one)]
    return [{k: v for k, v in processor.items() if k not in ("trim_offsets", "add_prefix_space")}]
