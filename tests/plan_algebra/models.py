"""Small models and layouts that the tests of the layout algebra share."""

from itertools import product

from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split


def model(kind: str = "gqa", layers: int = 3) -> Model:
    """gqa: 4 query heads, 2 kv heads, vocabulary of 13, tied embeddings. fused: one qkv and one gate_up tensor,
    untied."""

    def layer(name: str, shape: tuple[int, ...], split: Split | None = None) -> ParamSpec:
        return ParamSpec("layers.{}." + name, shape, "layer", layers, split)

    vocab = Split(0, ((13, 1),))
    norm = layer("norm.weight", (8,))
    if kind == "gqa":
        specs = (
            ParamSpec("embed.weight", (13, 8), "ends", split=vocab, style="vocab"),
            layer("q.weight", (16, 8), Split(0, ((4, 4),))), layer("q.bias", (16,), Split(0, ((4, 4),))),
            layer("k.weight", (8, 8), Split(0, ((2, 4),))), layer("o.weight", (8, 16), Split(1, ((4, 4),))),
            norm, ParamSpec("norm.weight", (8,), "last"), ParamSpec("score.weight", (1, 8), "last"),
        )
    else:
        specs = (
            ParamSpec("embed.weight", (13, 8), "first", split=vocab, style="vocab"),
            layer("qkv.weight", (32, 8), Split(0, ((4, 4), (2, 4), (2, 4)))),
            layer("gate_up.weight", (24, 8), Split(0, ((12, 1), (12, 1)))),
            layer("down.weight", (8, 12), Split(1, ((12, 1),))), norm,
            ParamSpec("rotary.inv_freq", (2,), "all"),
            ParamSpec("lm_head.weight", (13, 8), "last", split=vocab, style="head"),
        )
    return Model("m", "causal_lm", "", "float32", specs, layers, "")


def mesh(*ranges: tuple[int, int]) -> Mesh:
    return Mesh("m" + str(ranges), ranges)


def layout(on: Mesh, pp: int = 1, dp: int = 1, tp: int = 1, cp: int = 1) -> Layout:
    return Layout(f"pp{pp}dp{dp}cp{cp}tp{tp}", on.id, dp=dp, tp=tp, pp=pp, cp=cp)


def layouts(on: Mesh, most_pp: int = 3, most_tp: int = 4) -> list[Layout]:
    """Every combination of pp, dp and tp that fills the mesh."""
    size = len(on.members())
    return [layout(on, pp, size // (pp * tp), tp) for pp, tp in product(range(1, most_pp + 1), range(1, most_tp + 1))
            if size % (pp * tp) == 0]
