"""What the image files of a source hold, so that a run resumes with the images that it began with.

In: an open source. Out: a digest of all its image files, and a short mark of each, by which the one that changed is
found. Images whose bytes are in their rows are part of the data file, which has its own digest.
Errors: RL0740 an image cannot be read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256

from rldsl.runtime.data.images import ImageFile
from rldsl.runtime.data.source import Source

MARK = 8  # hexadecimal digits of a file's digest that tell which of many files changed
ROWS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class ImageDigests:
    """Of the image files of a source, in the order of its rows."""

    sha256: str = ""  # of the digests of all files; "": there are none
    marks: str = ""  # the first `MARK` digits of the digest of each file

    @classmethod
    def of(cls, source: Source) -> ImageDigests:
        """Reads every file once."""
        if not source.data.images:
            return cls()
        known: dict[str, str] = {}
        whole, marks = sha256(), []
        for place, image in image_files(source):
            if image.path not in known:
                known[image.path] = source.image_column.digest(image, place)
            whole.update(known[image.path].encode())
            marks.append(known[image.path][:MARK])
        return cls(whole.hexdigest(), "".join(marks)) if marks else cls()


def image_files(source: Source, rows: range | None = None) -> Iterator[tuple[str, ImageFile]]:
    """(place of its row, image) of each image that is a file, in the order of the rows. rows: of the source; None: all
    of them."""
    return ((place, image) for place, image in images_of(source, rows) if image.content is None)


def images_of(source: Source, rows: range | None = None) -> Iterator[tuple[str, ImageFile]]:
    """The same of all images."""
    every = range(len(source.table)) if rows is None else rows
    for first in range(every.start, every.stop, ROWS_AT_ONCE):
        numbers = range(first, min(first + ROWS_AT_ONCE, every.stop))
        for number, row in zip(numbers, source.table.read(numbers), strict=True):
            place = source.table.place(number)
            yield from ((place, image) for image in source.image_column.images(row, place))


def changed_image(source: Source, then: ImageDigests, now: ImageDigests) -> tuple[str, str]:
    """(place of the row, file) of the first image that is another one; ("", "") where none is found. The source names
    the same files as then."""
    for number, (place, image) in enumerate(image_files(source)):
        at = slice(number * MARK, (number + 1) * MARK)
        if then.marks[at] != now.marks[at]:
            return place, image.shown
    return "", ""
