"""Hidden states divided by tokens beside tensor parallelism: which families can, and what is kept between layers."""

from __future__ import annotations

import pytest
from rldsl.backends.torch.model.sequence_parallel import gathered_children

from rldsl.plan.model import ParamSpec, Split
from tests.backend_torch.shards import pack, plan_model, ragged
from tests.backend_torch.test_forward import _partial
from tests.tiny import make_model
from tests.world import run_world


def spec(name: str, style: str = "replicated", partial_grad: bool = False) -> ParamSpec:
    split = Split({"colwise": 0, "rowwise": 1}[style], ((4, 1),)) if style != "replicated" else None
    return ParamSpec(f"model.layers.{{}}.{name}", (4, 4), "layer", 2, split, style, partial_grad)


IN, OUT = spec("attn.q.weight", "colwise"), spec("attn.o.weight", "rowwise")
NORM = spec("norm.weight")


def test_sublayers_with_divided_weights_begin_with_a_gather() -> None:
    mlp = (spec("mlp.up.weight", "colwise"), spec("mlp.down.weight", "rowwise"))
    assert gathered_children((NORM, IN, OUT, *mlp)) == ("attn", "mlp")
    assert gathered_children((IN, OUT, spec("attn.o.bias"), spec("attn.q_norm.weight", partial_grad=True))) == ("attn",)


@pytest.mark.parametrize("specs", [
    (), (NORM,), (NORM, IN), (IN, OUT, spec("attn.gate.weight")), (IN, OUT, spec("attn.q.bias")),
    (IN, OUT, spec("mlp.up.weight", "colwise"))])
def test_a_family_that_cannot(specs: tuple[ParamSpec, ...]) -> None:
    assert gathered_children(specs) == ()


def _between(rank: int, path: str, rows: list) -> tuple[list[int], list[int], bool]:
    """Tokens that the second layer's norm sees, in inference and in generation, and tokens of the row."""
    from rldsl.plan.events import Sampling

    shard, seen = _partial(plan_model(path), rank, 1, 2, 1), []
    norm = next(m for n, m in shard.stage.chunks[0].body.named_modules() if n.endswith("layers.1.input_layernorm"))
    norm.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    shard.infer([pack(rows)], "logprobs", 1.0)
    inferred, seen[:] = list(seen), []
    shard.generate(pack([(p, []) for p, _ in rows]), Sampling(max_new_tokens=2), seed=0, step=0, max_num_seqs=0)
    return inferred, list(seen), shard.stage.sequence_parallel.available


def test_a_rank_keeps_its_tokens_between_sublayers(tmp_path) -> None:
    rows = ragged(5, 46, seed=2)
    tokens, prompts = sum(len(p) + len(r) for p, r in rows), sum(len(p) for p, _ in rows)
    for inferred, generated, able in run_world(2, _between, str(make_model(tmp_path / "m")), rows):
        assert able and inferred == [-(-tokens // 2)]
        assert generated[0] == prompts  # one token after the other gives nothing to divide
