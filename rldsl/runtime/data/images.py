"""The images of rows: found in a column, checked, and read.

In: a row as it is read, and the name of its column of images. Out: an `ImageFile` for each of its images, whose size is
known from its header alone; its pixels when they are asked for. Pillow reads them, and only these `FORMATS`: nothing is
fetched, and nothing of an image is run. An image is a path (relative to the data file), bytes, or {"bytes", "path"} as
the `datasets` library stores it.
Errors: RL0740 an image cannot be read, RL0752 its file changed during the run, RL0753 Pillow is not installed.
"""

from __future__ import annotations

import io
import stat
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

from rldsl.diag import Diagnostic, Failure, counted, fail
from rldsl.runtime.data.row_schema import Row, kind_of

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX")  # that become RGB without a loss of meaning
MAX_PIXELS = 1 << 26  # of an image, which takes 3 bytes each as RGB, and 12 as numbers
MAX_BYTES = 1 << 28  # of a file
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}  # what is near the end of a complete file
BEGINNINGS = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM")  # of files in these formats
TAIL = 1 << 16  # bytes, among which it is
DEFLATE = 1032  # the most bytes that one byte of a PNG's compressed pixels can hold
ORIENTATION = 0x0112  # the EXIF tag
EXCHANGED = range(5, 9)  # its values that exchange height and width
TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}  # its values -> PIL's Transpose, which undoes them
FORMS = 'an image is a path, or {"bytes": ..., "path": ...} as the `datasets` library stores it'


class ImageProblem(ValueError):
    """What is wrong with an image, for a message; `help` says how to fix it."""

    def __init__(self, what: str, help: str = "replace the file, or remove the row"):
        super().__init__(what)
        self.help = help


@dataclass(frozen=True, slots=True)
class ImageFile:
    """One image, not read yet."""

    content: bytes | None  # None: it is in a file
    path: str  # of the file; "": it is not in one

    @property
    def shown(self) -> str:
        """For messages."""
        return self.path or "bytes in the row"

    def stamp(self) -> int | None:
        """What changes when its file is written again; None: it has no file, or none that can be read."""
        if self.content is not None:
            return None
        try:
            status = Path(self.path).stat()
        except (OSError, ValueError):  # whoever reads it says why
            return None
        return hash((status.st_size, status.st_mtime_ns))

    def digest(self) -> str:
        """sha256 of its bytes, in hexadecimal. Raises ImageProblem."""
        total = sha256()
        with self._file() as file:
            try:
                while part := file.read(1 << 22):
                    total.update(part)
            except OSError as error:
                raise ImageProblem(f"the file cannot be read: {error.strerror or error}") from None
        return total.hexdigest()

    def size(self) -> tuple[int, int]:
        """(height, width) in pixels, as it is shown. Raises ImageProblem."""
        with self._opened() as (image, file):
            width, height = image.size
            return (width, height) if _orientation(image, file) in EXCHANGED else (height, width)

    def check(self) -> None:
        """What can be known without decoding it. Raises ImageProblem."""
        with self._opened() as (image, file):
            end = ENDS.get(str(image.format))
            file.seek(0, io.SEEK_END)
            file.seek(max(0, file.tell() - TAIL))
            if end is not None and end not in file.read():
                raise ImageProblem("it is truncated")
            if image.format == "PNG" and file.tell() * DEFLATE < image.size[1] * (image.size[0] // 8):  # 1 bit each
                raise ImageProblem(f"its header says {image.size[0]} x {image.size[1]} pixels, which a PNG of "
                                   f"{counted(file.tell(), 'byte')} cannot have")

    def read(self) -> Any:
        """A PIL image in RGB, turned as its EXIF data say. Of an animation the first picture. Raises ImageProblem."""
        with self._opened() as (image, file):
            try:
                orientation = _orientation(image, file)
                read = image.convert("RGB")
                if _said(image.info) != orientation:  # this was not known when its tokens were counted
                    raise ImageProblem("its orientation is written far after its pixels", "save it again with Pillow")
                turn = TURNS.get(orientation)
                return read if turn is None else read.transpose(turn)
            except ImageProblem:
                raise
            except (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError) as error:
                raise ImageProblem(f"it is truncated or corrupted: {_line(error)}") from None

    @contextmanager
    def _opened(self) -> Iterator[tuple[Any, Any]]:
        """The image with its header read, and its file."""
        from PIL import Image, UnidentifiedImageError

        with self._file() as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sizes and metadata: what matters is checked below
            try:
                image = Image.open(file, formats=FORMATS)
            except UnidentifiedImageError:
                raise _unidentified(file) from None
            except Image.DecompressionBombError:
                raise self._too_large() from None
            except (OSError, ValueError, SyntaxError, EOFError, IndexError, OverflowError) as error:
                raise ImageProblem(f"its header cannot be read: {_line(error)}") from None
            if image.size[0] * image.size[1] > MAX_PIXELS:
                raise self._too_large(image.size)
            if min(image.size) < 1:
                raise ImageProblem("it has no pixels")
            if image.mode not in MODES:
                raise ImageProblem(f"its mode is {image.mode}", f"convert it to RGB; known modes: {', '.join(MODES)}")
            yield image, file

    @staticmethod
    def _too_large(size: tuple[int, int] | None = None) -> ImageProblem:
        shown = f"it has {size[0]} x {size[1]} pixels" if size else "it has too many pixels"
        return ImageProblem(f"{shown}, more than the {MAX_PIXELS:,} that are read", "scale it down, or remove the row")

    @contextmanager
    def _file(self) -> Iterator[Any]:
        if self.content is not None:
            yield io.BytesIO(self.content)
            return
        try:
            status = Path(self.path).stat()
            if not stat.S_ISREG(status.st_mode):
                raise ImageProblem("it is not a regular file")
            if status.st_size > MAX_BYTES:
                raise ImageProblem(f"the file has {status.st_size:,} bytes, more than the {MAX_BYTES:,} that are read",
                                   "scale the image down, or remove the row")
            opened = open(self.path, "rb")  # noqa: SIM115  closed below
        except FileNotFoundError:
            raise ImageProblem("there is no such file", "check the path: it is relative to the data file") from None
        except OSError as error:
            raise ImageProblem(f"the file cannot be read: {error.strerror or error}") from None
        except ImageProblem:
            raise
        except ValueError as error:  # a path with a NUL
            raise ImageProblem(f"this is not a path: {error}") from None
        with opened:
            yield opened


def _unidentified(file: Any) -> ImageProblem:
    """Why Pillow does not know what a file is."""
    file.seek(0)
    beginning = file.read(max(map(len, BEGINNINGS)))
    if not beginning:
        return ImageProblem("it is empty")
    if beginning.startswith(BEGINNINGS):
        return ImageProblem("its header cannot be read")
    return ImageProblem(f"it is not an image of a known format ({', '.join(FORMATS)})",
                        "convert it, for example to PNG, or remove the row")


def _orientation(image: Any, file: Any) -> int:
    """What its metadata say, from 1 to 8; 1: it is stored as it is shown. file: whose header the image has read."""
    if image.format == "PNG" and "exif" not in image.info and (late := _late_exif(file)):
        return _said({**image.info, "exif": late})
    return _said(image.info)


def _said(info: Mapping[Any, Any]) -> int:
    """The orientation in the metadata of an image, EXIF or XMP, as `PIL.ImageOps.exif_transpose` reads it."""
    from PIL import Image

    bearer = Image.Image()
    bearer.info = dict(info)
    try:
        return int(bearer.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged metadata: the pixels may be sound
        return 1


def _late_exif(file: Any) -> bytes:
    """The EXIF data of a PNG that are after its pixels, near its end; b"" where there are none."""
    before = file.tell()
    file.seek(0, io.SEEK_END)
    file.seek(max(0, file.tell() - TAIL))
    end = file.read()
    file.seek(before)
    at = end.rfind(b"eXIf")
    size = int.from_bytes(end[at - 4 : at], "big")
    whole = end[at : at + 4 + size]
    right = at >= 4 and end[at + 4 + size : at + 8 + size] == crc32(whole).to_bytes(4, "big")
    return bytes(whole[4:]) if right else b""


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def images_in(row: Row, column: str, folder: Path) -> list[ImageFile]:
    """The images of a row, none where the column is null. folder: to which paths are relative. Raises ImageProblem."""
    value = row.get(column)
    values = [] if value is None else value if isinstance(value, list) else [value]
    return [_image(v, i + 1 if isinstance(value, list) else 0, folder) for i, v in enumerate(values)]


def _image(value: Any, number: int, folder: Path) -> ImageFile:
    """number: in the row, from 1; 0: it is the only one."""
    content: Any = None
    path = value
    if isinstance(value, dict):
        if not value.keys() & {"bytes", "path"}:
            raise ImageProblem(f"{_which(number)}is an object without `bytes` and `path`", FORMS)
        content, path = value.get("bytes"), value.get("path")
    elif isinstance(value, bytes):
        content, path = value, ""
    if content is not None and not isinstance(content, bytes):
        raise ImageProblem(f"{_which(number)}has {kind_of(content)} as `bytes`", FORMS)
    if content is not None:
        return ImageFile(content, str(path or ""))
    if not isinstance(path, str) or not path:
        raise ImageProblem(f"{_which(number)}is {'an empty string' if path == '' else kind_of(path)}", FORMS)
    if "://" in path or path.startswith("data:"):
        raise ImageProblem(f"{_which(number)}is a URL, and nothing is fetched: {path[:80]}",
                           "download it, and write the path of the file")
    return ImageFile(None, str(folder / path))


def _which(number: int) -> str:
    return f"image {number} " if number else "it "


def problem(error: ImageProblem, column: str, place: str, shown: str = "") -> Diagnostic:
    """RL0740. shown: the image."""
    return Diagnostic("RL0740", f"an image of the column `{column}` cannot be read: {error}", place=place,
                      notes=(f"the image: {shown}",) if shown else (), help=error.help)


def check_images(row: Row, column: str, folder: Path, place: str) -> tuple[int, list[Diagnostic]]:
    """How many images a row has, and what is wrong with them."""
    try:
        found = images_in(row, column, folder)
    except ImageProblem as error:
        return 0, [problem(error, column, place)]
    wrong = []
    for image in found:
        try:
            image.check()
        except ImageProblem as error:
            wrong.append(problem(error, column, place, image.shown))
    return len(found), wrong


def import_pillow(place: str) -> None:
    """RL0753 where Pillow is not installed."""
    try:
        import PIL.Image  # noqa: F401  only whether it is there
    except ImportError:
        raise fail("RL0753", "images need Pillow, which is not installed", place=place,
                   help="run `pip install 'rldsl[images]'`") from None


@dataclass(frozen=True, slots=True)
class ImageColumn:
    """The images of a source's rows, and their numbers in the run."""

    column: str  # its name
    folder: Path  # to which paths are relative
    per_row: int  # images of a row, at most
    source: int  # number of the source in the run
    sources: int  # of the run
    # hash of the path of each file read so far -> of its size and time; all are read before the first step
    stamps: dict[int, int] = field(default_factory=dict, compare=False, repr=False)

    def number(self, row: int, image: int) -> int:
        """Of an image in the run. row: of the source. image: of the row, from 0."""
        return (row * self.per_row + image) * self.sources + self.source

    def row_of(self, number: int) -> tuple[int, int]:
        """(row, image of the row); the inverse of `number`."""
        return divmod(number // self.sources, self.per_row)

    def images(self, row: Row, place: str) -> list[ImageFile]:
        """Of a row. Errors: RL0740."""
        try:
            return images_in(row, self.column, self.folder)
        except ImageProblem as error:
            raise Failure([problem(error, self.column, place)]) from None

    def sizes(self, images: Sequence[ImageFile], place: str) -> list[tuple[int, int]]:
        """(height, width) of each. Errors: RL0740."""
        return [self._asked(image, image.size, place) for image in images]

    def read(self, image: ImageFile, place: str) -> Any:
        """A PIL image. Errors: RL0740."""
        return self._asked(image, image.read, place)

    def digest(self, image: ImageFile, place: str) -> str:
        """Of the bytes of its file. Errors: RL0740."""
        return str(self._asked(image, image.digest, place))

    def check_unchanged(self, image: ImageFile, place: str) -> None:
        """RL0752 where its file was written since it was read first."""
        stamp = image.stamp()
        if stamp is not None and self.stamps.setdefault(hash(image.path), stamp) != stamp:
            raise fail("RL0752", "this image changed during the run", place=place, notes=(f"the image: {image.shown}",),
                       help="do not change it while a run reads it; start the run again")

    def _asked(self, image: ImageFile, what: Any, place: str) -> Any:
        self.check_unchanged(image, place)
        try:
            return what()
        except ImageProblem as error:
            raise Failure([problem(error, self.column, place, image.shown)]) from None
