"""`checkpoint.json`: what a checkpoint holds besides tensors, under its own digest.

In: facts of a run. Out: text whose last field, `sha256`, covers all others (of their canonical JSON: sorted keys, no
spaces); and from the bytes of a file, the same facts, each of the type that it was written with.
Invariant: a manifest with any byte of a value changed, a key missing or a wrong type is damaged, and is never read in
part. The digest detects damage; whoever can edit the file can also compute another one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from rldsl.runtime.data.read_positions import SourceReading

FORMAT = 2
DIGEST = "sha256"
EARLIER = "written by an earlier version, without a digest of its contents"
MAX_COUNT = 1 << 62
KEYS = frozenset({"format", "step", "plan", "sources", "functions", "params", "seed", "files", "states", "data",
                  "readings", "models", DIGEST})
OPTIONAL = "timeouts"  # a key that earlier versions do not write


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest that is as it was written."""

    # the last step that the checkpoint contains
    step: int
    # id of the plan that wrote it
    plan: str
    # sources, functions, params and seed of the program (`run_identity.py`)
    program: Mapping[str, Any]
    # file -> its size in bytes and its sha256
    files: Mapping[str, tuple[int, str]]
    # state -> its value
    states: Mapping[str, float]
    # data source -> the batch read last, from 0
    data: Mapping[str, int]
    # data source -> what its position means
    readings: Mapping[str, SourceReading]
    # trained model -> counts of its schedule
    models: Mapping[str, Mapping[str, int]]
    # conversations that a time limit ended, by the rank that counted them
    timeouts: Mapping[str, int]


def manifest_text(facts: Mapping[str, Any]) -> str:
    """The text of a manifest. facts: all its fields but the digest."""
    return json.dumps({**facts, DIGEST: _digest(facts)}, indent=1) + "\n"


def read_manifest(data: bytes) -> Manifest:
    """The manifest in a text. ValueError if it is damaged; the message says what is wrong."""
    try:
        content = json.loads(data, object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("not an object")
    if content.get("format") == 1 and DIGEST not in content:
        raise ValueError(EARLIER)
    if type(content.get("format")) is not int or content["format"] != FORMAT:
        raise ValueError(f"format {content.get('format')!r}, expected {FORMAT}")
    if content.keys() - {OPTIONAL} != KEYS:
        names = sorted(KEYS ^ (content.keys() - {OPTIONAL}))
        raise ValueError(f"{'missing' if names[0] in KEYS else 'unexpected'} key {names[0]!r}")
    digest = content.pop(DIGEST)
    if digest != _digest(content):
        raise ValueError("it has changed since it was written: its digest does not match")
    program: dict[str, Any] = {"sources": _texts(content, "sources"), "functions": _texts(content, "functions"),
               "params": _object(content, "params"), "seed": content["seed"]}
    if type(content["seed"]) is not int or not isinstance(content["plan"], str):
        raise ValueError("the seed or the plan has a wrong type")
    if not all(isinstance(value, bool | int | float | str | list) for value in program["params"].values()):
        raise ValueError("a parameter has a wrong type")
    models = _object(content, "models")
    return Manifest(
        _count(content["step"]), content["plan"], program,
        {name: _file(value) for name, value in _object(content, "files").items()},
        {name: _number(value) for name, value in _object(content, "states").items()},
        {name: _count(value) for name, value in _object(content, "data").items()},
        {name: _reading(value) for name, value in _object(content, "readings").items()},
        {name: {key: _count(count) for key, count in _object(models, name).items()} for name in models},
        {name: _count(value) for name, value in _object({OPTIONAL: {}, **content}, OPTIONAL).items()})


def _digest(facts: Mapping[str, Any]) -> str:
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _object(content: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = content[name]
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not an object")
    return value


def _texts(content: Mapping[str, Any], name: str) -> dict[str, str]:
    texts = _object(content, name)
    if not all(isinstance(value, str) for value in texts.values()):
        raise ValueError(f"{name} has a value that is not text")
    return texts


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MAX_COUNT:
        raise ValueError(f"{str(value)[:40]!r} is not a count")
    return value


def _number(value: Any) -> float:
    if type(value) is not float and (type(value) is not int or abs(value) >= MAX_COUNT):  # a state may be infinite
        raise ValueError(f"{str(value)[:40]!r} is not a number")
    return float(value)


def _file(value: Any) -> tuple[int, str]:
    if not isinstance(value, dict) or value.keys() != {"bytes", "sha256"} or not isinstance(value["sha256"], str):
        raise ValueError("a file has no size or no digest")
    return _count(value["bytes"]), value["sha256"]


def _reading(value: Any) -> SourceReading:
    try:
        return SourceReading.read(value)
    except TypeError as error:
        raise ValueError(str(error)) from None
