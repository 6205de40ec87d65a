"""What a family makes of an image: the placeholder tokens that stand for it in a prompt, and the numbers that its
vision tower reads.

In: a model's directory. Out: an `ImageProcessor`. The directory's own image processor of transformers does the work, in
its form for Pillow, so that the same image is the same numbers on every rank whatever else is installed; no code of the
directory runs.
Errors: RL0768 the directory has no image processor, or one that cannot be used.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rldsl.diag import Failure, fail
from rldsl.plan.processor_files import PROCESSORS

Size = tuple[int, int]  # height and width of an image in pixels


class ImageProcessor(ABC):
    """How one model reads images."""

    marker: str  # what stands for an image in a prompt, once for each
    token_id: int  # of the placeholder tokens
    video: str  # the placeholder token of videos, which rows do not have; "": there is none
    video_id: int | None  # of this token

    def __init__(self, directory: str, processor: Any, config: Any, tokenizer: Any):
        """processor: the image processor of transformers. tokenizer: of the same directory."""
        self.directory, self.processor, self.config, self.tokenizer = directory, processor, config, tokenizer
        self.token_id = int(config.image_token_id)
        self.placeholder = str(tokenizer.convert_ids_to_tokens(self.token_id))
        self.marker = self.placeholder
        video = getattr(config, "video_token_id", None)  # a model may know videos; rows have none
        self.video = "" if video is None else str(tokenizer.convert_ids_to_tokens(int(video)))
        self.video_id = None if video is None else int(video)

    @abstractmethod
    def count(self, size: Size) -> int:
        """How many placeholder tokens an image has. ValueError: no image of this size is read."""

    def expanded(self, size: Size) -> str:
        """What takes the place of the marker of an image."""
        return self.placeholder * self.count(size)

    def grid(self, size: Size) -> Size | None:
        """Rows and columns of its placeholder tokens, if positions count them."""
        return None

    @abstractmethod
    def inputs(self, images: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        """What the model's `get_image_features` is given. images: of PIL, in RGB."""


class _Patches(ImageProcessor):
    """Of the Qwen families: as many patches as an image of its size needs."""

    def grid(self, size: Size) -> Size:
        processor = self.processor
        factor = processor.patch_size * processor.merge_size
        resize = sys.modules[type(processor).__module__].smart_resize
        low, high = (processor.size[name] for name in ("shortest_edge", "longest_edge"))
        height, width = resize(*size, factor=factor, min_pixels=low, max_pixels=high) if processor.do_resize else size
        return height // factor, width // factor

    def count(self, size: Size) -> int:
        rows, columns = self.grid(size)
        return rows * columns

    def inputs(self, images: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        made = self.processor(images=list(images), return_tensors="pt")
        return {"pixel_values": made["pixel_values"], "image_grid_thw": made["image_grid_thw"]}


class _Fixed(ImageProcessor):
    """Of families whose images all have the same size."""

    def inputs(self, images: Sequence[Any]) -> Mapping[str, torch.Tensor]:
        return {"pixel_values": self.processor(images=list(images), return_tensors="pt")["pixel_values"]}


class _Llava(_Fixed):
    def count(self, size: Size) -> int:
        processor, vision = self.processor, self.config.vision_config
        shape = processor.crop_size if getattr(processor, "do_center_crop", False) else processor.size
        patches = (shape["height"] // vision.patch_size) * (shape["width"] // vision.patch_size)
        leading = int(str(vision.model_type).startswith("clip"))  # the vector of the whole image, before the patches
        return int(patches) + leading - int(self.config.vision_feature_select_strategy == "default")


class _Gemma(_Fixed):
    def __init__(self, directory: str, processor: Any, config: Any, tokenizer: Any):
        super().__init__(directory, processor, config, tokenizer)
        begin, self.end = map(str, tokenizer.convert_ids_to_tokens([config.boi_token_index, config.eoi_token_index]))
        self.marker = begin
        if processor.do_pan_and_scan:
            raise ValueError("it cuts an image into several (do_pan_and_scan), which is not supported")

    def count(self, size: Size) -> int:
        return int(self.config.mm_tokens_per_image)

    def expanded(self, size: Size) -> str:
        return f"\n\n{self.marker}{super().expanded(size)}{self.end}\n\n"


PROCESSOR_OF: Mapping[str, type[ImageProcessor]] = {
    "qwen2_vl": _Patches, "qwen2_5_vl": _Patches, "qwen3_vl": _Patches, "gemma3": _Gemma, "llava": _Llava}


@cache
def image_processor(directory: str) -> ImageProcessor:
    """Of the model in a directory."""
    from transformers import AutoConfig, AutoImageProcessor, AutoTokenizer

    if not any((Path(directory) / name).is_file() for name in PROCESSORS):
        raise fail("RL0768", "this model directory has no image processor", place=directory,
                   notes=(f"looked for: {', '.join(PROCESSORS)}",),
                   help="the directory needs the files written by `processor.save_pretrained`")
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        processor = AutoImageProcessor.from_pretrained(directory, local_files_only=True, trust_remote_code=False,
                                                       backend="pil")
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        if str(config.model_type) not in PROCESSOR_OF:
            raise ValueError(f"models of the family {config.model_type} do not read images")
        return PROCESSOR_OF[str(config.model_type)](directory, processor, config, tokenizer)
    except Failure:
        raise
    except Exception as error:  # transformers raises whatever its readers meet
        line = (str(error).strip().splitlines() or [""])[0]
        raise fail("RL0768", "the image processor cannot be loaded", place=directory,
                   notes=(f"{type(error).__name__}: {line}",),
                   help="the directory needs the files written by `processor.save_pretrained`") from None
