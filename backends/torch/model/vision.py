"""Images inside a forward pass: what the vision tower makes of them takes the place of the embeddings of their tokens,
and positions count them by rows and columns where the family does (M-RoPE; Wang et al. 2024, arXiv:2409.12191, section
2.1).

In: stored tokens, whose image tokens carry the numbers of their images. Out: embeddings on the first stage, positions
on every stage. An image that several sequences of a pass have runs through the tower once.
Invariant: a pass has all tokens of an image that it has one of, one after the other: sequences are complete, or what
a pass has of them begins after an image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from rldsl.backends.torch.model.attention import PackedAttention, VarlenAttention
from rldsl.backends.torch.model.sequence_parallel import PaddedAttention
from rldsl.diag import fail, internal_error
from rldsl.models.vision import VisionFamily
from rldsl.runtime.backend import Images
from rldsl.runtime.image_tokens import ids_of, image_of


@dataclass(frozen=True, slots=True)
class ImageRuns:
    """The images of some packed sequences: R runs of tokens of one image each."""

    at: torch.Tensor  # [N] int64, the image tokens
    run: torch.Tensor  # [N] int64, the run of each
    offset: torch.Tensor  # [N] int64, its place in its image
    starts: torch.Tensor  # [R] int64, the first token of each run
    lengths: torch.Tensor  # [R] int64
    numbers: tuple[int, ...]  # [R] of the images

    @staticmethod
    def of(tokens: torch.Tensor, offsets: torch.Tensor) -> ImageRuns:
        """tokens: [T]. offsets: [T] of each in what the pass has of its sequence."""
        image = image_of(tokens)
        before = torch.cat([image.new_full((1,), -1), image[:-1]])[: len(image)]
        begins = (image >= 0) & ((image != before) | (offsets == 0))
        at, starts = (image >= 0).nonzero()[:, 0], begins.nonzero()[:, 0]
        run = begins.long().cumsum(0)[at] - 1
        return ImageRuns(at, run, at - starts[run], starts, torch.bincount(run, minlength=len(starts)),
                         tuple(image[starts].tolist()))


@runtime_checkable
class ContinuedAttention(Protocol):
    """Attention of tokens after what earlier passes have kept, with images among them."""

    offsets: torch.Tensor  # [T] int64, of each in what the pass has of its sequence
    blocks: torch.Tensor | None  # [T]: as of a `VarlenAttention`


def offsets_of(attention: PackedAttention) -> torch.Tensor | None:
    """[T] of each token in what a pass has of its sequence; None: no token is one of an image."""
    if attention.complete:
        return attention.positions
    return attention.offsets if isinstance(attention, ContinuedAttention) else None


class Vision:
    """The images of one stage."""

    def __init__(self, images: Images | None, family: VisionFamily, features: Callable[..., Any] | None,
                 embed: Callable[[torch.Tensor], torch.Tensor] | None, device: torch.device, path: str):
        """images: None where there are none. features: of the family; makes vectors of the inputs of its vision tower.
        embed: its input embedding; both only on the first stage. path: of the model, for messages."""
        self.images, self.device, self.path = images, device, path
        self.by_grid, self.bidirectional = family.positions == "grid", family.bidirectional
        self._features, self._embed = features, embed

    def mark(self, attention: PackedAttention, tokens: torch.Tensor) -> None:
        """Let the tokens of an image see one another, where the family does. tokens: [T] of the pass."""
        inner = attention.inner if isinstance(attention, PaddedAttention) else attention
        if not self.bidirectional or not isinstance(inner, VarlenAttention | ContinuedAttention):
            return
        tokens = tokens[: len(inner.positions)]
        runs = ImageRuns.of(tokens, inner.positions if isinstance(inner, VarlenAttention) else inner.offsets)
        if runs.numbers:
            inner.blocks = torch.full_like(tokens, -1).index_copy(0, runs.at, runs.run)

    def positions(self, tokens: torch.Tensor, positions: torch.Tensor, offsets: torch.Tensor | None = None,
                  shift: torch.Tensor | None = None) -> torch.Tensor:
        """[T] in their sequences -> as the family's rotary embeddings read them: the same, or [3, T] by time, height
        and width where there are images. tokens: [T]. offsets: [T] of each in what the pass has of its sequence; None:
        all of it. shift: [T] what the images of earlier passes add to the position of a token after them."""
        if not self.by_grid:
            return positions
        offsets = positions if offsets is None else offsets
        positions = positions if shift is None else positions + shift
        runs = ImageRuns.of(tokens, offsets)
        if not runs.numbers:
            return positions
        columns, shift = self._shifts(runs)
        # what the images before a token take away from its place: of all before it, less those before its sequence
        taken = torch.zeros(len(tokens) + 1, dtype=torch.long, device=tokens.device)
        taken[runs.starts + runs.lengths] = shift  # counts after its image; two images never end at the same place
        own_first = torch.arange(len(tokens), device=tokens.device) - offsets  # the first token of its sequence
        taken = taken.cumsum(0)
        moved = positions + taken[:-1] - taken[own_first]
        found = moved.expand(3, -1).clone()
        start = moved[runs.starts][runs.run]
        found[0, runs.at] = start
        found[1, runs.at] = start + runs.offset // columns[runs.run]
        found[2, runs.at] = start + runs.offset % columns[runs.run]
        return found

    def shifts(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """[S] what is added to the place of a token after each of S packed sequences, so that it is its position.
        tokens: [T]; lengths: [S]."""
        found = torch.zeros_like(lengths)
        if not self.by_grid:
            return found
        starts = lengths.cumsum(0) - lengths
        sequence = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        runs = ImageRuns.of(tokens, torch.arange(len(tokens), device=lengths.device) - starts[sequence])
        return found.index_add(0, sequence[runs.starts], self._shifts(runs)[1]) if runs.numbers else found

    def ends(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """Of each image in some tokens, from the first: how many tokens there are up to its end, and what it adds to
        the place of a token after it."""
        at = torch.arange(len(tokens), device=self.device)
        if not self.by_grid or not (runs := ImageRuns.of(torch.tensor(tokens, device=self.device), at)).numbers:
            return []
        return list(zip((runs.starts + runs.lengths).tolist(), self._shifts(runs)[1].tolist(), strict=True))

    def embeddings(self, tokens: torch.Tensor, offsets: torch.Tensor | None
                   ) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """[T, H] what the first layer reads, and what the text model is given besides. tokens: [T]. offsets: [T] of
        each in what the pass has of its sequence; None: no token is one of an image."""
        if self._embed is None:
            raise internal_error("embeddings are asked for on a later stage", "forward")
        if offsets is None:
            return self._embed(tokens), {}
        runs = ImageRuns.of(tokens, offsets)
        ids = ids_of(tokens)
        if not runs.numbers:
            return self._embed(ids), {}
        # a placeholder may have no embedding at all
        embedded = self._embed(ids.index_fill(0, runs.at, 0))
        numbers = sorted(set(runs.numbers))
        vectors, of_layers = self._vectors(numbers)
        of_run = torch.tensor([numbers.index(n) for n in runs.numbers], device=self.device)
        sizes = torch.tensor([len(v) for v in vectors], device=self.device)
        wrong = (sizes[of_run] != runs.lengths).nonzero()[:, 0].tolist()
        if wrong:
            tokens_of, vectors_of = int(runs.lengths[wrong[0]]), int(sizes[of_run[wrong[0]]])
            raise fail("RL0768", f"the image processor counts {tokens_of} tokens for an image of which the vision "
                       f"tower makes {vectors_of} vectors", place=self.path,
                       help="preprocessor_config.json and config.json are not of the same model: compare their patch "
                            "and merge sizes")
        begin = sizes.cumsum(0) - sizes
        rows = begin[of_run[runs.run]] + runs.offset
        read = embedded.index_copy(0, runs.at, torch.cat(vectors)[rows].to(embedded.dtype))
        if not of_layers:
            return read, {}
        mask = torch.zeros(1, len(tokens), dtype=torch.bool, device=tokens.device).index_fill(1, runs.at, True)
        return read, {"visual_pos_masks": mask, "deepstack_visual_embeds": [torch.cat(x)[rows] for x in of_layers]}

    def _vectors(self, numbers: Sequence[int]) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        """[n, H] of each image; and for each of the first layers whose outputs read images, too, what is added there
        (DeepStack; Meng et al. 2024, arXiv:2406.04334)."""
        if self._features is None:
            raise internal_error("images are asked for on a later stage", "forward")
        inputs = {name: x.to(self.device) for name, x in self._source().inputs(numbers).items()}
        vectors, *of_layers = self._features(inputs)
        return list(vectors), [list(x) for x in of_layers]

    def _shifts(self, runs: ImageRuns) -> tuple[torch.Tensor, torch.Tensor]:
        """[R] columns of each image, and what it adds to the places after it: it takes as many positions as the longer
        of its sides."""
        shapes = [self._source().grid(number) or (1, 1) for number in runs.numbers]
        rows, columns = torch.tensor(shapes, dtype=torch.long, device=runs.lengths.device).unbind(1)
        if bool((rows * columns != runs.lengths).any()):
            raise internal_error("an image has another number of tokens than its size needs", "forward")
        return columns, torch.maximum(rows, columns) - runs.lengths

    def _source(self) -> Images:
        if self.images is None:
            raise internal_error("a model without images gets image tokens", "forward")
        return self.images


def features_of(root: Any) -> Callable[[Mapping[str, torch.Tensor]], Any]:
    """What makes vectors of the inputs of a vision tower: of each image, then for each of the first layers that reads
    images of each image. root: the family's model without its head."""
    def features(inputs: Mapping[str, torch.Tensor]) -> Any:
        made = root.get_image_features(**inputs, return_dict=True)
        return made.pooler_output, *(getattr(made, "deepstack_features", None) or ())

    return features
