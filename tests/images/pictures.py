"""Pictures, rows and models for tests of images."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from examples.tiny import write_jsonl
from rldsl.plan.model import Data
from rldsl.runtime.data.source import Source, open_source
from rldsl.runtime.state.run_images import RunImages

SIZES = [(8, 8), (16, 24), (33, 17), (70, 40)]  # width and height


def picture(width: int, height: int, seed: int, mode: str = "RGB") -> Image.Image:
    draw = random.Random(seed)
    image = Image.new("RGB", (width, height))
    image.putdata([tuple(draw.randrange(256) for _ in range(3)) for _ in range(width * height)])
    return image.convert(mode)


def make_rows(folder: Path, count: int = 10, seed: int = 0, largest: int = 2, text: str = "abc") -> Path:
    """Rows of chat messages with 0 .. `largest` pictures and an answer."""
    draw = random.Random(seed)
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        names = []
        for j in range(i % (largest + 1)):
            names.append(f"pictures/{i}_{j}.png")
            picture(*draw.choice(SIZES), seed=97 * i + j).save(folder / names[-1])
        parts: list[Any] = [{"type": "image"} for _ in names] + [{"type": "text", "text": f"{text} {i} " * draw.randint(1, 3)}]
        if i % 2:
            draw.shuffle(parts)
        rows.append({"prompt": [{"role": "user", "content": parts}],
                     "answer": "".join(draw.choice("abcdef") for _ in range(draw.randint(0, 6))), "images": names})
    return write_jsonl(folder / "rows.jsonl", rows)


def data_of(path: Path | str, model: Path | str, **other: Any) -> Data:
    given = dict(name="d", format="jsonl", path=str(path), row_format="answers", batch=4,
                 columns=(("prompt", "prompt"), ("answer", "answer")), tokenizer=str(model), shuffle=False,
                 max_prompt_tokens=500, max_answer_tokens=50, over_long="error", images="images") | other
    return Data(**given)


@dataclass
class OneSource:
    """In place of a run's `DataReader`."""

    data: Data
    opened: dict[str, Source] = field(default_factory=dict)

    @property
    def context(self) -> Any:
        return self

    def __post_init__(self) -> None:
        self.record, self.data = self.data, {self.data.name: self.data}  # as of a context

    def source(self, name: str) -> Source:
        if name not in self.opened:
            self.opened[name] = open_source(self.record, 1)
        return self.opened[name]


def run_images(data: Data) -> RunImages:
    """The images of a source as its model reads them."""
    return RunImages(OneSource(data), data.tokenizer)  # type: ignore[arg-type]
