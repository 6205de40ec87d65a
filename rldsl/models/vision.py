"""Families that read images: the names of their parts, and how they differ from a text model.

In: a config of transformers. Out: a `VisionFamily`, or None. A model of such a family is a vision tower and a language
model below one head; the tower turns an image into as many vectors as the prompt has placeholder tokens for it, and
these vectors are what the language model reads in place of their embeddings.
Invariant: only families whose numbers a test has compared with transformers are here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from rldsl.plan.processor_files import PROCESSORS

# settings of an image processor, and those of a vision tower that must be equal
CUTS = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size", "merge_size": "spatial_merge_size"}
LANGUAGE = "language_model"  # the module of the text model, below the model without its head


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """How a family with images differs from a text model."""

    tower: tuple[str, ...]  # its vision modules, below the model without its head
    # positions of image tokens: "text" as of any token; "grid" by time, height and width (M-RoPE)
    positions: Literal["text", "grid"]
    # (beginning of names in directories of an earlier format, the same in the model)
    earlier_names: tuple[tuple[str, str], ...]
    bidirectional: bool = False  # whether the tokens of an image see one another


_LLAVA = (("language_model.model.", "model.language_model."), ("language_model.lm_head.", "lm_head."),
          ("vision_tower.vision_model.", "model.vision_tower."), ("vision_tower.", "model.vision_tower."),
          ("multi_modal_projector.", "model.multi_modal_projector."))
_QWEN = (("visual.", "model.visual."), ("model.", "model.language_model."))
FAMILIES: dict[str, VisionFamily] = {
    "qwen2_vl": VisionFamily(("visual",), "grid", _QWEN),
    "qwen2_5_vl": VisionFamily(("visual",), "grid", _QWEN),
    "qwen3_vl": VisionFamily(("visual",), "grid", _QWEN),
    "gemma3": VisionFamily(("vision_tower", "multi_modal_projector"), "text", _LLAVA, bidirectional=True),
    "llava": VisionFamily(("vision_tower", "multi_modal_projector"), "text", _LLAVA),
}


def vision_family(config: Any) -> VisionFamily | None:
    """How the family of a config differs from a text model; None if it is one."""
    return FAMILIES.get(str(config.model_type))


def layers_with_images(config: Any) -> int:
    """How many of the first layers get features of images added to their outputs (deepstack of Qwen3-VL)."""
    vision = getattr(config, "vision_config", None) if vision_family(config) else None
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def only_with_images(model_type: str) -> bool:
    """Whether transformers knows models of this type only with images, so that none is a causal language model."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )

    return model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES and \
        model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def auto_class(config: Any) -> Any:
    """The class of transformers that makes the model of `config`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if vision_family(config) else AutoModelForCausalLM


def supported_families() -> str:
    """The families with images, for messages."""
    return ", ".join(sorted(FAMILIES))


def earlier_names(config: Any, name: str) -> Iterator[str]:
    """The names that a parameter has in directories of an earlier format. name: as in `ParamSpec`."""
    family = vision_family(config)
    return (old + name.removeprefix(new) for old, new in family.earlier_names if name.startswith(new)) \
        if family else iter(())


def processor_problem(directory: Path) -> str:
    """How the image processor of a directory cuts an image in another way than its vision tower reads it, as after
    files of two models were mixed; "" if nothing says so."""
    try:
        tower = json.loads((directory / "config.json").read_text()).get("vision_config") or {}
        files = [(name, json.loads((directory / name).read_text())) for name in PROCESSORS
                 if (directory / name).is_file()]
    except (OSError, ValueError, AttributeError):
        return ""  # what cannot be read is refused where it is used
    for name, found in files:
        settings = (found.get("image_processor") or found) if isinstance(found, dict) else {}
        for ours, theirs in CUTS.items():
            wanted, given = tower.get(theirs), settings.get(ours)
            if isinstance(wanted, int) and isinstance(given, int) and wanted != given:
                return f"{name} has {ours}={given}, and the vision tower in config.json has {theirs}={wanted}"
    return ""


def processor_digest(directory: Path) -> str:
    """Equal for directories that preprocess images in the same way; "" if none of their files says how."""
    found = [directory / name for name in PROCESSORS if (directory / name).is_file()]
    return sha256(b"\0".join(file.read_bytes() for file in found)).hexdigest() if found else ""
