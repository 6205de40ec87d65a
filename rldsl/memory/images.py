"""What the images of a call need: the vision tower of the first stage, and its inputs.

In: a copy of a model, and the frames of a call. Out: bytes. The compiler reads no rows: a prompt counts as one that has
as many tokens of images as its data allows (`plan/image_limits.py`), and those with more text have fewer. An image that
several sequences of a pass have runs through the tower once. Like the layers', the counts are those of transformers'
own code (`models/tower.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rldsl.memory.activations import gates_are_fused
from rldsl.memory.parameters import Copy, any_trained
from rldsl.memory.values import Tables
from rldsl.plan.spaces import IndexedFrame


@dataclass(frozen=True, slots=True)
class ImageBytes:
    """Of the images of one micro-batch; 0 on later stages, and without images."""

    forward: int = 0  # peak of a forward pass that saves nothing, with the pixels
    kept: int = 0  # for the backward pass, until it is over
    backward: int = 0  # peak of the backward pass besides what is kept

    @staticmethod
    def of(t: Tables, copy: Copy, tokens: int, device: str, recompute: bool = False) -> ImageBytes:
        """tokens: of all images together. device: "cuda" or "cpu". recompute: whether the backward pass runs the tower
        again."""
        tower = next((x for x in copy.model.sizes.towers if x.itemsize == copy.compute), None)
        if tower is None or not t.images or not copy.first:
            return ImageBytes()
        forward = tokens * (tower.pixels + tower.forward)
        if not any_trained(copy, tower.modules):
            return ImageBytes(forward)
        gates = 0 if gates_are_fused(copy.model.invariant, copy.compute, device) else tower.gates
        saved = tokens * (tower.pixels + tower.saved + gates)
        backward = tokens * max(tower.backward - tower.saved, 0)
        kept = tokens * tower.pixels if recompute else saved
        return ImageBytes(forward, kept, backward + saved - kept)


def image_tokens(t: Tables, frames: Sequence[IndexedFrame], rows: int, consecutive: bool) -> int:
    """Tokens of the images that `rows` rows of each frame have, at most; those of the same prompt count once.
    consecutive: whether they follow one another in their frames."""
    most: dict[str, int] = {}  # of each source of prompts
    for frame in frames:
        source = t.prompts.get(frame.id)
        name, run = (source.frame, source.run) if source is not None else (frame.id, 1)
        several = 1 + -(-(rows - 1) // run) if consecutive else rows
        prompts = min(rows, several, -(-frame.count // run))
        most[name] = max(most.get(name, 0), prompts * min(frame.max_prompt_tokens, t.images))
    return sum(most.values())
