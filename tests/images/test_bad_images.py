"""What is wrong with an image, or with the images of a row: a message with the file and the row, before the run where it
can be known; nothing is fetched, and nothing hangs."""

from __future__ import annotations

import io
import os
import struct
import zlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.tiny import make_vision_model, write_jsonl
from rldsl.diag import Failure
from rldsl.runtime.data.source import open_source
from tests.images.pictures import data_of, picture

PROMPT = [{"role": "user", "content": "what?"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("model") / "m")


def png(width: int, height: int) -> bytes:
    """A PNG whose header says so, and whose pixels are missing."""
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def encoded(image: Image.Image, format: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, format)
    return out.getvalue()


GOOD = encoded(picture(8, 8, 0))
FILES = {  # name of the file -> its bytes, and what is said of it
    "text.png": (b"hello", "it is not an image of a known format (PNG, JPEG, WEBP, BMP, GIF)"),
    "empty.png": (b"", "it is empty"), "flat.png": (png(0, 0), "its header cannot be read"),
    "page.html": (b"<html><img src='http://x/y.png'></html>", "it is not an image of a known format"),
    "drawing.svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "it is not an image of a known format"),
    "script.eps": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", "it is not an image of a known format"),
    "scan.tiff": (encoded(picture(8, 8, 0), "TIFF"), "it is not an image of a known format"),
    "cut.png": (encoded(picture(40, 40, 0))[:900], "it is truncated"),
    "cut.jpg": (encoded(picture(40, 40, 0), "JPEG")[:900], "it is truncated"),
    "header.png": (GOOD[:20], "its header cannot be read"),
    "bomb.png": (png(60_000, 60_000), "more than the 67,108,864 that are read"),
    "hollow.png": (png(4_000, 4_000), "its header says 4000 x 4000 pixels, which a PNG of 65 bytes cannot have"),
    "large.png": (png(9_000, 9_000), "it has 9000 x 9000 pixels, more than the 67,108,864 that are read"),
    "cmyk.jpg": (encoded(picture(8, 8, 0).convert("CMYK"), "JPEG"), "its mode is CMYK"),
    "deep.png": (encoded(Image.new("I;16", (8, 8))), "its mode is I;16"),
}
VALUES = [  # what the column has, and what is said of it
    ("nowhere.png", "there is no such file"),
    ("http://127.0.0.1:9/a.png", "it is a URL, and nothing is fetched: http://127.0.0.1:9/a.png"),
    ("https://example.com/a.png", "it is a URL, and nothing is fetched"),
    ("data:image/png;base64,iVBORw0KGgo=", "it is a URL, and nothing is fetched"),
    ("file:///etc/passwd", "it is a URL, and nothing is fetched"),
    ("", "it is an empty string"), (7, "it is a number"), (True, "it is a boolean"),
    ({"url": "a.png"}, "it is an object without `bytes` and `path`"), ({"bytes": None, "path": None}, "it is null"),
    ({"bytes": "abc", "path": ""}, "it has a string as `bytes`"), ("a\0b", "this is not a path"),
    (".", "cannot be read: it is not a regular file"),
    (["good.png", "nowhere.png"], "there is no such file"), (["good.png", 3], "image 2 is a number"),
]


def refused(folder, model, value) -> tuple[str, str]:
    """(title, place)"""
    (folder / "good.png").write_bytes(GOOD)
    path = write_jsonl(folder / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": "good.png"},
                                               {"prompt": PROMPT, "answer": "a", "images": value}] * 2)
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model), 1)
    (first,) = failure.value.diagnostics
    assert first.code == "RL0740" and first.help and first.notes[-1] == f"the same in 1 other row: {path}:4"
    return first.title, first.place.removeprefix(f"{folder}/")


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_refused_before_the_run(tmp_path, model, name):
    content, why = FILES[name]
    (tmp_path / name).write_bytes(content)
    title, place = refused(tmp_path, model, name)
    assert why in title and place == "rows.jsonl:2"


@pytest.mark.parametrize("value, why", VALUES)
def test_a_value_that_is_no_image_is_refused(tmp_path, model, value, why):
    title, place = refused(tmp_path, model, value)
    assert why in title and place == "rows.jsonl:2"


def test_a_pipe_does_not_hang(tmp_path, model):
    os.mkfifo(tmp_path / "pipe.png")
    assert "it is not a regular file" in refused(tmp_path, model, "pipe.png")[0]


def test_a_missing_column_is_named(tmp_path, model):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "image": "x.png"}] * 4)
    with pytest.raises(Failure) as failure:
        open_source(data_of(path, model), 1)
    found = failure.value.diagnostics[0]
    assert found.code == "RL0746" and "did you mean `image`" in found.help and found.place == f"{path}:1"


def test_damage_that_only_pixels_show_names_the_row_when_it_is_read(tmp_path, model):
    content = encoded(picture(40, 40, 0))
    at = content.index(b"IDAT") + 40
    (tmp_path / "hurt.png").write_bytes(content[:at] + bytes(200) + content[at + 200 :])
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": "hurt.png"}] * 4)
    source = open_source(data_of(path, model), 1)
    column = source.image_column
    (image,) = column.images(source.table.read([1])[0], source.table.place(1))
    with pytest.raises(Failure) as failure:
        column.read(image, source.table.place(1))
    found = failure.value.diagnostics[0]
    assert found.code == "RL0740" and "truncated or corrupted" in found.title and found.place == f"{path}:2"
    assert found.notes == (f"the image: {tmp_path}/hurt.png",)


def test_a_picture_of_one_color_is_no_hollow_file(tmp_path, model):
    """Nothing is smaller for its size."""
    white = encoded(Image.new("1", (8_000, 8_000), 1))
    (tmp_path / "white.png").write_bytes(white)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": "white.png"}] * 4)
    (image,) = (column := open_source(data_of(path, model), 1).image_column).images({"images": "white.png"}, "")
    assert len(white) < 30_000 and column.read(image, "").size == (8_000, 8_000)


@pytest.mark.parametrize("other", [encoded(picture(8, 8, 1)), encoded(picture(40, 8, 1))])
def test_an_image_that_changes_during_the_run_ends_it(tmp_path, model, other):
    """Whether or not it has as many tokens as before."""
    (tmp_path / "good.png").write_bytes(GOOD)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": "good.png"}] * 4)
    source = open_source(data_of(path, model), 1)
    source.read([1])
    (tmp_path / "good.png").write_bytes(other)
    os.utime(tmp_path / "good.png", ns=(0, 7))
    with pytest.raises(Failure) as failure:
        source.read([1])
    found = failure.value.diagnostics[0]
    assert found.code == "RL0752" and found.place == f"{path}:2" and found.notes == (f"the image: {tmp_path}/good.png",)


def test_an_image_that_is_gone_during_the_run_names_the_row(tmp_path, model):
    (tmp_path / "good.png").write_bytes(GOOD)
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": "good.png"}] * 4)
    source = open_source(data_of(path, model), 1)
    (tmp_path / "good.png").unlink()
    with pytest.raises(Failure) as failure:
        source.read([2])
    assert "there is no such file" in failure.value.diagnostics[0].title
    assert failure.value.diagnostics[0].place == f"{path}:3"


# ---------------------------------------------------------------------------------------------- what can be read


@pytest.mark.parametrize("mode, format", [("RGB", "PNG"), ("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("LA", "PNG"),
                                          ("RGBA", "PNG"), ("RGB", "JPEG"), ("L", "JPEG"), ("RGB", "WEBP"),
                                          ("RGB", "BMP"), ("P", "GIF")])
def test_known_modes_and_formats_become_rgb(tmp_path, model, mode, format):
    made = picture(16, 8, 3).convert(mode)
    (tmp_path / "x").write_bytes(encoded(made, format))
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": ["x"]}] * 4)
    source = open_source(data_of(path, model), 1)
    column = source.image_column
    (image,) = column.images(source.table.read([0])[0], "")
    assert image.size() == (8, 16) and column.read(image, "").tobytes() == Image.open(tmp_path / "x").convert("RGB").tobytes()


# ------------------------------------------------------------------------------------- animations, orientation


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def late(content: bytes, chunk: bytes, before: bytes = b"IEND", extra: bytes = b"") -> bytes:
    """A PNG with one more chunk, and another one behind it."""
    at = content.rindex(before) - 4
    return content[:at] + b"".join(struct.pack(">I", len(x) - 4) + x + struct.pack(">I", zlib.crc32(x))
                                   for x in (chunk, extra) if x) + content[at:]


def xmp(orientation: int) -> bytes:
    return f'<x:xmpmeta><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()


def saved(format: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture(16, 8, 3).save(out, format, **options)
    return out.getvalue()


TURNED = {
    **{f"jpeg {n}": saved("JPEG", exif=exif_of(n)) for n in range(10)}, "png": saved("PNG", exif=exif_of(6)),
    "webp": saved("WEBP", exif=exif_of(8)), "jpeg xmp": saved("JPEG", xmp=xmp(6)),
    "png late": late(encoded(picture(16, 8, 3)), b"eXIf" + exif_of(6).tobytes()),
    "png late, wrong sum": encoded(picture(16, 8, 3)) + b"eXIf" + exif_of(6).tobytes(),
    "png xmp": late(saved("PNG"), b"iTXtXML:com.adobe.xmp\0\0\0\0\0" + xmp(5), b"IDAT"),
    "gif": saved("GIF", save_all=True, append_images=[picture(16, 8, 4), picture(16, 8, 5)]),
    "webp animation": saved("WEBP", save_all=True, append_images=[picture(16, 8, 4)], lossless=True),
    "png animation": saved("PNG", save_all=True, append_images=[picture(16, 8, 4)]),
    "jpeg of several": saved("MPO", save_all=True, append_images=[picture(16, 8, 4)], exif=exif_of(6)),
    "alpha": encoded(picture(16, 8, 3).convert("RGBA")), "palette": encoded(picture(16, 8, 3).convert("P")),
}


@pytest.mark.parametrize("name", TURNED)
def test_pixels_are_those_of_datasets_and_transformers(tmp_path, name):
    """An animation is its first picture, and a picture is turned as its metadata say."""
    datasets = pytest.importorskip("datasets")
    from transformers.image_utils import load_image

    from rldsl.runtime.data.images import ImageFile

    (tmp_path / "x").write_bytes(TURNED[name])
    decoded = datasets.Image().decode_example({"bytes": TURNED[name], "path": None}).convert("RGB")
    for image in (ImageFile(None, str(tmp_path / "x")), ImageFile(TURNED[name], "")):
        found = image.read()
        assert found.tobytes() == decoded.tobytes() == load_image(str(tmp_path / "x")).tobytes()
        assert image.size() == found.size[::-1] == decoded.size[::-1]
        image.check()
    turned = name in ("png", "webp", "jpeg xmp", "png late", "png xmp", "jpeg of several", *(f"jpeg {n}" for n in (5, 6, 7, 8)))
    assert decoded.size == ((8, 16) if turned else (16, 8))


@pytest.mark.parametrize("chunk", [b"eXIf" + exif_of(6).tobytes(), b"iTXtXML:com.adobe.xmp\0\0\0\0\0" + xmp(5)])
def test_an_orientation_that_is_known_too_late_is_refused(tmp_path, chunk):
    """Far behind the pixels, where only reading all of the file finds it: never silently another picture."""
    from rldsl.runtime.data.images import ImageFile, ImageProblem

    padding = b"teXt" + bytes(1 << 17)
    (tmp_path / "x.png").write_bytes(late(encoded(picture(16, 8, 3)), chunk, extra=padding))
    image = ImageFile(None, str(tmp_path / "x.png"))
    with pytest.raises(ImageProblem, match="its orientation is written far after its pixels"):
        image.read()


def test_damaged_metadata_do_not_hide_a_sound_picture(tmp_path):
    from rldsl.runtime.data.images import ImageFile

    content = saved("JPEG", exif=exif_of(6))
    at = content.index(b"Exif") + 6
    (tmp_path / "x.jpg").write_bytes(content[:at] + b"XX" + content[at + 2 :])
    image = ImageFile(None, str(tmp_path / "x.jpg"))
    assert image.size() == (8, 16) and image.read().size == (16, 8)


@pytest.mark.parametrize("format", ["jsonl", "parquet", "hf"])
def test_paths_bytes_and_what_datasets_stores_are_the_same_images(tmp_path, model, format):
    (tmp_path / "good.png").write_bytes(GOOD)
    if format == "jsonl":
        values = ["good.png", ["good.png"], {"path": "good.png"}, [{"path": "good.png"}]]
        path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": v} for v in values])
    elif format == "parquet":
        path = tmp_path / "rows.parquet"
        rows = [{"prompt": "<|image_pad|>", "answer": "a", "images": {"bytes": b, "path": p}}
                for b, p in ((GOOD, None), (None, "good.png"), (GOOD, "elsewhere.png"), (GOOD, ""))]
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        datasets = pytest.importorskip("datasets")
        made = datasets.Dataset.from_dict({"prompt": [PROMPT] * 4, "answer": ["a"] * 4,
                                           "images": [[Image.open(tmp_path / "good.png")]] * 4})
        path = tmp_path / "saved"
        made.save_to_disk(str(path))
    source = open_source(data_of(path, model, format=format), 1)
    column = source.image_column
    for number in range(4):
        (image,) = column.images(source.table.read([number])[0], "")
        assert image.size() == (8, 8) and column.read(image, "").tobytes() == picture(8, 8, 0).tobytes()
    assert len({tuple(t.tolist()) for t in source.read([0, 1, 2, 3])[""].tokens}) == 4  # each its own image


def test_a_column_of_bytes(tmp_path, model):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["<|image_pad|>?"] * 4, "answer": ["a"] * 4, "images": [GOOD] * 4}), path)
    source = open_source(data_of(path, model, format="parquet"), 1)
    assert source.read([3])[""].prompt_lens == [2]  # an image of 8 x 8 pixels is one token


def test_rows_without_images(tmp_path, model):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": PROMPT, "answer": "a", "images": v}
                                                 for v in (None, [], None, [])])
    source = open_source(data_of(path, model), 1)
    assert len({len(t) for t in source.read([0, 1, 2, 3])[""].tokens}) == 1


@pytest.mark.parametrize("name", FILES)
def test_wrong_bytes_in_a_row_are_refused_as_a_wrong_file_is(tmp_path, model, name):
    content, why = FILES[name]
    rows = [{"prompt": "<|image_pad|>", "answer": "a", "images": [{"bytes": b, "path": name}]}
            for b in (GOOD, GOOD, content, GOOD)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    with pytest.raises(Failure) as failure:
        open_source(data_of(tmp_path / "rows.parquet", model, format="parquet"), 1)
    (found,) = failure.value.diagnostics
    assert found.code == "RL0740" and why in found.title and found.place.endswith("rows.parquet:3") and found.help
