"""The images of a run as its models read them.

In: numbers of images (`runtime/image_tokens.py`). Out: the grid of an image's tokens, and the numbers that a vision
tower reads. This rank reads the image from its file each time it is not among those read last; nothing is sent.
Errors: RL0740 an image cannot be read any more.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rldsl.runtime.data.image_processor import ImageProcessor, image_processor
from rldsl.runtime.data.images import ImageColumn, ImageFile
from rldsl.runtime.state.data_reader import DataReader

KEPT_BYTES = 1 << 28  # of what vision towers read, for each model directory


@dataclass
class RunImages:
    """See `rldsl.runtime.backend.Images`, whose methods these are."""

    reader: DataReader  # the sources of the run
    directory: str  # of the model
    # image -> the grid of its tokens
    shapes: dict[int, tuple[int, int] | None] = field(default_factory=dict)
    # image -> what the vision tower reads of it, those asked for last at the end
    kept: OrderedDict[int, Mapping[str, torch.Tensor]] = field(default_factory=OrderedDict)

    @property
    def processor(self) -> ImageProcessor:
        return image_processor(self.directory)

    def grid(self, number: int) -> tuple[int, int] | None:
        if number not in self.shapes:
            column, image, place = self._found(number)
            self.shapes[number] = self.processor.grid(column.sizes([image], place)[0])
        return self.shapes[number]

    def inputs(self, numbers: Sequence[int]) -> Mapping[str, torch.Tensor]:
        found = [self._inputs(number) for number in numbers]
        self._forget()
        return {name: torch.cat([of[name] for of in found]) for name in found[0]}

    def _inputs(self, number: int) -> Mapping[str, torch.Tensor]:
        if number not in self.kept:
            column, image, place = self._found(number)
            self.kept[number] = self.processor.inputs([column.read(image, place)])
        self.kept.move_to_end(number)
        return self.kept[number]

    def _forget(self) -> None:
        """Drop what was asked for longest ago."""
        size = sum(x.nbytes for of in self.kept.values() for x in of.values())
        while size > KEPT_BYTES and len(self.kept) > 1:
            _, dropped = self.kept.popitem(last=False)
            size -= sum(x.nbytes for x in dropped.values())

    def _found(self, number: int) -> tuple[ImageColumn, ImageFile, str]:
        """The column of an image, the image, and the place of its row for messages."""
        names = list(self.reader.context.data)
        source = self.reader.source(names[number % len(names)])
        column = source.image_column
        row, image = column.row_of(number)
        place = source.table.place(row)
        return column, column.images(source.table.read([row])[0], place)[image], place
