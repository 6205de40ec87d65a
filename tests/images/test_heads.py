"""Value and reward models of the families that read images, and these families in bfloat16: as plain transformers
computes them, on one rank and on two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.plan.model import Layout
from rldsl.runtime.image_tokens import ids_of
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import plan_model, shard_of
from tests.backend_torch.steps import difference
from tests.backend_torch.test_train import share
from tests.images.checks import SGD, Expected, inputs_of, model_of, pack, rows_of
from tests.images.models import MAKERS, make
from tests.images.pictures import data_of, make_rows, run_images
from tests.samples import thorough_between
from tests.world import run_world

LIMIT = 1e-5
HEADS = (("value_model", "values"), ("reward_model", "scores"))
LAYOUTS = [at(), at(tp=2), at(pp=2), at(dp=2, zero=2)]


def with_head(directory: Path) -> torch.Tensor:
    """Give the model a score head. Returns its weight."""
    file = directory / "model.safetensors"
    draw = torch.Generator().manual_seed(3)
    head = torch.randn(1, 32, generator=draw) * 0.3
    save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"} | {"score.weight": head}, file,
              metadata={"format": "pt"})
    return head


def expected(data: Any, model: Any, head: torch.Tensor, what: str) -> tuple[list[torch.Tensor], Expected]:
    """What the head gives of each row, and parameters before and after a step of gradient descent. model: with its
    language head, which is not used."""
    head = torch.nn.Parameter(head.clone())
    named = {n: p for n, p in model.named_parameters() if n != "lm_head.weight"} | {"score.weight": head}
    stored, found = {n: p.detach().clone() for n, p in named.items()}, []
    for row in rows_of(data):
        ids = ids_of(row.tokens)
        hidden = model.model(**inputs_of(row, data.tokenizer, ids), use_cache=False).last_hidden_state[0]
        read = hidden[row.prompt - 1 : -1] if what == "values" else hidden[-1:]
        found.append(read @ head[0])
    for one in found:
        share(one.square()).backward()
    with torch.no_grad():
        for p in named.values():
            if p.grad is not None:
                p -= p.grad
    return [x.detach() for x in found], Expected([], [], {n: p.detach() for n, p in named.items()}, stored)


def check(rank: int, data: Any, kind: str, what: str, layouts: list[Layout], right: list[torch.Tensor], step: Expected
          ) -> list[tuple[str, str, float]]:
    rows, found = rows_of(data), []
    for layout in layouts:
        made = shard_of(plan_model(data.tokenizer, kind, SGD), layout, rank, True, images=run_images(data))
        if made is None:
            continue
        shard, mine = made
        own = list(range(mine, len(rows), layout.dp))
        if not layout.zero:
            found.append((str(layout), "load", difference(shard, step.stored)))
            got = shard.infer([pack([rows[i] for i in own])], what, 1.0)
            found.append((str(layout), what, float((got - torch.cat([right[i] for i in own])).abs().max())))

        def loss(i: int, fresh: Any, own: list[int] = own) -> torch.Tensor:
            sizes = [len(rows[r].tokens) - rows[r].prompt if what == "values" else 1 for r in own[i::2]]
            return sum((share(f.square()) for f in fresh[0][what].split(sizes)), torch.zeros(()))

        shard.train([(pack([rows[r] for r in own[i::2]]),) for i in range(2)], [(what,)], 1.0, loss, None, "full")
        found.append((str(layout), "train", difference(shard, step.stepped) / max(1.0, step.largest)))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("family", MAKERS)
@pytest.mark.parametrize("kind, what", HEADS)
def test_heads_equal_transformers(tmp_path, family, kind, what):
    path = make(tmp_path / "m", family)
    model = model_of(str(path))  # before its language head goes
    head = with_head(path)
    data = data_of(make_rows(tmp_path), path)
    right, step = expected(data, model, head, what)
    assert step.largest > 1e-2 and any("vis" in n and not torch.equal(x, step.stored[n]) for n, x in step.stepped.items())
    for layout, name, error in sum(run_world(2, check, data, kind, what, LAYOUTS, right, step), []):
        assert error == 0 if name == "load" else error < LIMIT, f"{family}: {name} under {layout} differs by {error}"


def test_a_head_is_read_by_the_class_of_transformers(tmp_path):
    """Gemma 3 has one."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    path = make(tmp_path / "m", "gemma3")
    model = model_of(str(path))
    head = with_head(path)
    config = AutoConfig.from_pretrained(path)
    config.num_labels = config.text_config.num_labels = 1
    theirs, unread = AutoModelForSequenceClassification.from_pretrained(path, config=config, dtype=torch.float32,
                                                                        output_loading_info=True)
    assert not unread["missing_keys"] and torch.equal(theirs.score.weight, head)
    data = data_of(make_rows(tmp_path), path)
    right, _ = expected(data, model, head, "scores")
    for row, score in zip(rows_of(data), right, strict=True):
        with torch.no_grad():
            given = inputs_of(row, str(path), ids_of(row.tokens))
            found = theirs.eval().model(**given).last_hidden_state[0, -1] @ theirs.score.weight[0]
        assert abs(float(found - score[0])) < LIMIT


@pytest.mark.parametrize("family", thorough_between(MAKERS))
def test_bfloat16_is_as_near_to_float32_as_transformers_is(tmp_path, family):
    """Log-probs of answers, with weights in bfloat16: ours and those of transformers against float32 numbers of the
    same weights; and the loss falls when it is trained."""
    from transformers import AutoModelForImageTextToText

    path = make(tmp_path / "m", family)
    file = path / "model.safetensors"
    save_file({k: v.bfloat16() for k, v in load_file(file).items()}, file, metadata={"format": "pt"})
    data = data_of(make_rows(tmp_path), path)
    rows = rows_of(data)

    def logprobs(dtype: torch.dtype) -> torch.Tensor:
        model, found = AutoModelForImageTextToText.from_pretrained(path, dtype=dtype).eval(), []
        for row in rows:
            ids = ids_of(row.tokens)
            given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs_of(row, str(path), ids).items()}
            with torch.no_grad():
                made = model(**given, use_cache=False).logits[0].float().log_softmax(-1)[row.prompt - 1 : -1]
            found.append(made.gather(1, ids[row.prompt :, None])[:, 0])
        return torch.cat(found)

    exact, theirs = logprobs(torch.float32), logprobs(torch.bfloat16)
    shard, _ = shard_of(plan_model(str(path), "causal_lm", SGD, dtype="bfloat16"), at(), 0, True, images=run_images(data))
    batch = pack(rows)
    ours = shard.infer([batch], "logprobs", 1.0)
    assert float((ours - exact).abs().mean()) < 1.5 * float((theirs - exact).abs().mean()) + 1e-4

    def loss(_: int, fresh: Any) -> torch.Tensor:
        return -fresh[0]["logprobs"].mean() * 0.02

    for _ in range(3):
        shard.train([(batch,)], [("logprobs",)], 1.0, loss, None, "none")
    assert float(shard.infer([batch], "logprobs", 1.0).mean()) > float(ours.mean()) + 1e-3
