"""Log-probs, generation and gradients of rows with images under some layouts against plain transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import load_file

from rldsl.plan.events import Sampling
from rldsl.plan.model import Data, Layout, Optimizer
from rldsl.runtime.backend import PackedBatch
from rldsl.runtime.data.image_processor import image_processor
from rldsl.runtime.image_tokens import ids_of, image_of
from rldsl.runtime.data.source import open_source
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import difference
from tests.backend_torch.test_train import share
from tests.images.pictures import run_images

SGD = Optimizer(lr=1.0, kind="sgd", clip_grad=0.0)  # whose update is the gradient
NEW = 6  # tokens that are generated


@dataclass(frozen=True)
class VisionRow:
    """One row, as it is read and as transformers wants it."""

    tokens: torch.Tensor  # with the numbers of images
    prompt: int  # tokens of its prompt
    images: list[Any]  # of PIL


@dataclass(frozen=True)
class Expected:
    """What plain transformers computes."""

    logprobs: list[torch.Tensor]  # of the answers
    greedy: list[list[int]]  # what is generated
    stepped: dict[str, torch.Tensor]  # parameters after one update
    stored: dict[str, torch.Tensor]  # and before

    @property
    def largest(self) -> float:
        """The largest number of a gradient."""
        return max(float((x - self.stored[n]).abs().max()) for n, x in self.stepped.items())


def rows_of(data: Data) -> list[VisionRow]:
    source = open_source(data, 1)
    count = len(source.table)
    frame = source.read(list(range(count)))[""]
    folder = Path(data.path).parent
    pictures = [[Image.open(folder / name) for name in row["images"]] for row in source.table.read(range(count))]
    return [VisionRow(*x) for x in zip(frame.tokens, frame.prompt_lens, pictures, strict=True)]


def inputs_of(row: VisionRow, directory: str, ids: torch.Tensor) -> dict[str, Any]:
    """What transformers' model is given. ids: [T]."""
    made: dict[str, Any] = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids)[None]}
    if row.images:
        read = dict(image_processor(directory).processor(images=row.images, return_tensors="pt"))
        made |= {name: x for name, x in read.items() if name != "num_crops"}
    kinds = torch.zeros_like(ids)
    kinds[: len(row.tokens)] = (image_of(row.tokens) >= 0).long()
    name = "mm_token_type_ids" if "image_grid_thw" in made else "token_type_ids"
    return made | ({name: kinds[None]} if row.images and _typed(directory) else {})


def _typed(directory: str) -> bool:
    return image_processor(directory).config.model_type != "llava"


def model_of(path: str) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()


def expected(data: Data) -> Expected:
    path = data.tokenizer
    model, rows = model_of(path), rows_of(data)
    stored = {n: x.detach().clone() for n, x in model.state_dict().items()}
    found, greedy = [], []
    for row in rows:
        ids = ids_of(row.tokens)
        logits = model(**inputs_of(row, path, ids), use_cache=False).logits[0]
        picked = logits.float().log_softmax(-1)[row.prompt - 1 : -1]
        found.append(picked.gather(1, ids[row.prompt :, None])[:, 0])
    for one in found:
        share(one.square()).backward()
    for row in rows:
        prompt = VisionRow(row.tokens[: row.prompt], row.prompt, row.images)
        made = model.generate(**inputs_of(prompt, path, ids_of(prompt.tokens)), max_new_tokens=NEW, do_sample=False)
        greedy.append(made[0, row.prompt :].tolist())
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= p.grad
    return Expected([x.detach() for x in found], greedy, {n: x.detach() for n, x in model.state_dict().items()}, stored)


def pack(rows: Sequence[VisionRow], prompts: bool = False) -> PackedBatch:
    """prompts: without the answers."""
    tokens = [row.tokens[: row.prompt] if prompts else row.tokens for row in rows]
    return PackedBatch(torch.arange(len(rows)), torch.tensor([row.prompt for row in rows]),
                       torch.tensor([len(t) - row.prompt for t, row in zip(tokens, rows, strict=True)]), torch.cat(tokens))


def check(rank: int, data: Data, layouts: Sequence[Layout], right: Expected) -> list[tuple[str, str, float]]:
    """(layout, what, error) on this rank; what: load, logprobs, greedy (how many sequences differ), generate, shared
    (tokens of prompts that were run again), train: relative to the largest number of a gradient, if that is above 1."""
    rows = rows_of(data)
    found: list[tuple[str, str, float]] = []
    for layout in layouts:
        made = shard_of(plan_model(data.tokenizer, "causal_lm", SGD), layout, rank, True, images=run_images(data))
        if made is None:
            continue
        shard, mine = made
        name = str({k: getattr(layout, k) for k in ("dp", "tp", "pp", "zero", "vpp") if getattr(layout, k) > 1 or k == "zero"})
        if layout.zero == 0:
            found.append((name, "load", difference(shard, right.stored)))
        own = list(range(mine, len(rows), layout.dp))
        if layout.zero == 0 and layout.vpp == 1:  # other layouts only train
            got = shard.infer([pack([rows[i] for i in own])], "logprobs", 1.0)
            found.append((name, "logprobs", float((got - torch.cat([right.logprobs[i] for i in own])).abs().max())))
            twice = [rows[i] for i in own for _ in range(2)]
            out = shard.generate(pack(twice, prompts=True), Sampling(max_new_tokens=NEW, greedy=True), seed=3, step=5,
                                 max_num_seqs=4)
            again = shard.infer([out.batch], "logprobs", 1.0)
            found.append((name, "generate", float((again - out.logprobs).abs().max())))
            lens = out.batch.prompt_lens + out.batch.response_lens
            texts = [t[p:].tolist() for t, p in zip(out.batch.tokens.split(lens.tolist()), out.batch.prompt_lens.tolist(),
                                                    strict=True)]
            found.append((name, "greedy", sum(text != right.greedy[own[i // 2]] for i, text in enumerate(texts))))
            found.append((name, "shared", abs(out.num_prefilled - sum(rows[i].prompt for i in own))))

        def loss(i: int, fresh: Sequence[Any], own: list[int] = own) -> torch.Tensor:
            each = fresh[0]["logprobs"].split([len(rows[r].tokens) - rows[r].prompt for r in own[i::2]])
            return sum((share(f.square()) for f in each), torch.zeros(()))

        shard.train([(pack([rows[r] for r in own[i::2]]),) for i in range(2)], [("logprobs",)], 1.0, loss, None, "full")
        found.append((name, "train", difference(shard, right.stepped) / max(1.0, right.largest)))
    return found


def stored(path: str) -> dict[str, torch.Tensor]:
    """The tensors of a directory."""
    return {k: v for file in sorted(Path(path).glob("*.safetensors")) for k, v in load_file(file).items()}
