"""What a position in a data source means: the number of the batch that was read last, of which rows.

In: a source as a run reads it, and as the run of a checkpoint did. Out: whether the position still means the same rows.
A batch is known by its size, by the order of the rows and by how many there are (`data/source.py`); so none of these
may change on the way. The same rows in a file of another name are the same; a file that was edited under its name is
taken, with a warning. Images belong to the rows that name them: rows that the run has read, and keeps, must show what
they showed.
Codes: RL0764 the position would mean other rows or images, RL0765 (a warning) the file is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from rldsl.diag import Diagnostic
from rldsl.plan.disk_paths import shown
from rldsl.plan.model import Data
from rldsl.runtime.data import Source, hf, parquet
from rldsl.runtime.data.image_digests import ImageDigests, changed_image
from rldsl.runtime.files import digest

FILES: Mapping[str, Callable[[str], list[str]]] = {"jsonl": lambda path: [path], "parquet": parquet.files_of,
                                                   "hf": hf.files_of}


@dataclass(frozen=True, slots=True)
class SourceReading:
    """How a run reads a source. Written into checkpoints."""

    format: str    # "jsonl", "parquet", "hf"
    path: str      # as the program names it
    kind: str      # `plan.model.Data.row_format`
    batch: int     # rows of a step
    shuffle: bool  # whether each epoch has its own order
    rows: int      # of an epoch
    bytes: int     # of its file, or of all of them together
    sha256: str    # of its file, or of all of them together
    # of the files of its images, as `ImageDigests`; "" without any, and in checkpoints of earlier versions
    images: str = ""
    image_marks: str = ""

    @property
    def image_digests(self) -> ImageDigests:
        return ImageDigests(self.images, self.image_marks)

    @classmethod
    def of(cls, source: Source, digest: str = "") -> SourceReading:
        """How `source` is read. digest: of its files, if it is known already."""
        data, files = source.data, [Path(f) for f in FILES[source.data.format](source.data.path)]
        size, images = sum(f.stat().st_size for f in files), ImageDigests.of(source)
        return cls(data.format, data.path, data.row_format, data.batch, data.shuffle, len(source.table), size,
                   digest or content_digest(data), images.sha256, images.marks)

    @classmethod
    def read(cls, record: Any) -> SourceReading:
        """A record from JSON. TypeError or ValueError if it is something else."""
        reading = cls(**record)
        wrong = [f.name for f in fields(cls) if type(getattr(reading, f.name)).__name__ != f.type]
        if wrong:
            raise ValueError(f"{wrong[0]} is {getattr(reading, wrong[0])!r}")
        return reading


def content_digest(data: Data) -> str:
    """The digest of a source's files: of the bytes of a single file, or of the digests of several."""
    digests = [digest(Path(f)) for f in FILES[data.format](data.path)]
    return digests[0] if len(digests) == 1 else sha256("".join(digests).encode()).hexdigest()


def compare_readings(name: str, then: SourceReading, now: SourceReading, begun: bool,
                     has_states: bool = False) -> Diagnostic | None:
    """What the user must know of a source. begun: the run has read it, so that it has a position. has_states: its rows
    have states. An error where position or states mean other rows, a warning where the file is another one."""
    if has_states and then.rows != now.rows:
        return Diagnostic("RL0764", f"the states of the rows of `{name}` belong to other rows", place=shown(now.path),
                          notes=(f"rows: {then.rows} -> {now.rows}",),
                          help="resume with the original data, or start a new run from the saved models")
    same_rows = (then.sha256, then.rows) == (now.sha256, now.rows)
    declared = [f for f in ("format", "path", "kind") if getattr(then, f) != getattr(now, f)]
    changed = [f for f in ("batch", "shuffle") if getattr(then, f) != getattr(now, f)]
    if not same_rows and (declared or then.sha256 == now.sha256):  # it is the program that names other rows
        changed = [*declared, *changed, *(["rows"] if then.rows != now.rows else [])]
    changes = tuple(f"{f}: {_text(getattr(then, f))} -> {_text(getattr(now, f))}" for f in changed)
    if changed and begun:
        return Diagnostic("RL0764", f"the position in `{name}` is no longer valid", place=shown(now.path),
                          notes=changes,
                          help="rows would be skipped or read twice: resume with the original data settings, or start "
                               "a new run from the saved models")
    if then.sha256 == now.sha256:
        return None
    sizes = "; ".join(f"{unit}: {a} -> {b}" for unit, a, b in (("bytes", then.bytes, now.bytes),
                                                               ("rows", then.rows, now.rows)) if a != b)
    return Diagnostic("RL0765", f"the data of `{name}` changed since the checkpoint"
                      + (": some rows of this epoch may be read twice or skipped" if begun else ""),
                      place=shown(now.path), severity="warning", notes=(sizes,) if sizes else ())


def compare_images(source: Source, then: SourceReading, now: SourceReading, begun: bool) -> Diagnostic | None:
    """An image of a source that is another one than it was, of rows that are the same. An error where the run has read
    rows of the source, a warning where only evaluations do."""
    if not then.images or then.images == now.images or (then.sha256, then.rows) != (now.sha256, now.rows):
        return None
    place, file = changed_image(source, then.image_digests, now.image_digests)
    title = f"an image of `{source.data.name}` changed since the checkpoint"
    notes = (f"the image: {shown(file)}",) if file else ()
    place = place or shown(now.path)
    if not begun:
        return Diagnostic("RL0765", title, place=place, severity="warning", notes=notes)
    return Diagnostic("RL0764", title, place=place, notes=notes,
                      help="rows that the run has read would show something else: put the earlier file back, or start "
                           "a new run from the saved models")


def unknown_source(name: str, now: SourceReading) -> Diagnostic:
    """A source that the run of the checkpoint did not have."""
    return Diagnostic("RL0765", f"`{name}` is not in the checkpoint: reading starts at its first row",
                      severity="warning",
                      place=shown(now.path), help="to keep the position of a renamed source, use its old name")


def unknown_position(name: str, now: SourceReading) -> Diagnostic:
    """A source whose position is in the checkpoint, but not what the position means. No run writes that."""
    return Diagnostic("RL0764", f"the checkpoint does not say which rows its position in `{name}` counts",
                      place=shown(now.path), help="it was not written by a run, or it was edited: resume from another "
                                                  "checkpoint, or start a new run from the saved models")


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(str(value))
