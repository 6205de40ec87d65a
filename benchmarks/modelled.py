"""Reallocations that others have published, on the link speeds of their clusters. Exact traffic; nothing is sent.

    python -m benchmarks.modelled

The bound is the ingest bound: what a rank lacks, at its network card's speed (400 Gb/s, 50 GB/s), had it all come over
the network. A rank's time is the larger of what it sends and what it receives over the network and inside its node
(NVLink, 450 GB/s each way); the slowest rank's is the time, and rounds that only fill and drain relays are added in
proportion. Gates: DeepSeek-V3 / bound 1.5 (goal 1.2); bytes of the 70B switch / HybridFlow's formula 1.000. Beside them
what the systems' authors measured.

Shapes: DeepSeek-V3 (arXiv:2412.19437 and its configuration), Llama-3 70B. Published times: NeMo-RL's refit of
DeepSeek-V3 from 256 GPUs to 256 others, 2.39 to 2.83 s; formula: table 2 of HybridFlow (arXiv:2409.19256).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.layouts import LLAMA_70B
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec, Split
from rldsl.reshard.device_order import reorder_devices
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.records import ReshardPlan
from rldsl.reshard.rounds import num_buckets, num_rounds
from rldsl.reshard.summary import summary
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.sharding.boxes import itemsize, parameters, volume

NODE, NETWORK, NVLINK = 8, 50e9, 450e9  # ranks; bytes a second in each direction


def deepseek_v3() -> Model:
    """61 layers, three of them dense; 256 experts and a shared one in the others; latent attention."""
    h, heads, vocab = 7168, 128, 129280

    def layers(count: int, *found: tuple[str, tuple[int, ...], Split | None, int]) -> Iterator[ParamSpec]:
        for name, shape, split, experts in found:
            style = "experts" if experts else "colwise" if split else "replicated"
            yield ParamSpec(f"layers.{{}}.{name}", shape, "layer", count, split, style, experts=experts)

    def mlp(name: str, inner: int) -> tuple[tuple[str, tuple[int, ...], Split | None, int], ...]:
        wide, back = Split(0, ((inner, 1),)), Split(1, ((inner, 1),))
        return ((f"{name}.gate", (inner, h), wide, 0), (f"{name}.up", (inner, h), wide, 0),
                (f"{name}.down", (h, inner), back, 0))

    attention = layers(
        61, ("q_a", (1536, h), None, 0), ("q_b", (heads * 192, 1536), Split(0, ((heads, 192),)), 0),
        ("kv_a", (576, h), None, 0), ("kv_b", (heads * 256, 512), Split(0, ((heads, 256),)), 0),
        ("o", (h, heads * 128), Split(1, ((heads, 128),)), 0), ("norm1", (h,), None, 0), ("norm2", (h,), None, 0),
        ("q_norm", (1536,), None, 0), ("kv_norm", (512,), None, 0))
    experts = layers(
        58, ("experts.gate_up", (256, 2 * 2048, h), Split(1, ((2048, 1), (2048, 1))), 256),
        ("experts.down", (256, h, 2048), Split(2, ((2048, 1),)), 256), ("router", (256, h), None, 0),
        ("router.bias", (256,), None, 0), *mlp("shared", 2048))
    ends = (ParamSpec("embed", (vocab, h), "first", split=Split(0, ((vocab, 1),)), style="vocab"),
            ParamSpec("norm", (h,), "last"),
            ParamSpec("head", (vocab, h), "last", split=Split(0, ((vocab, 1),)), style="head"))
    every = (*attention, *experts, *layers(3, *mlp("mlp", 18432)), *ends)
    return Model("actor", "causal_lm", "", "bfloat16", every, 61, "")


def layout(name: str, ranks: tuple[int, int], tp: int = 1, pp: int = 1, ep: int = 1) -> tuple[Layout, Mesh]:
    dp = (ranks[1] - ranks[0]) // (tp * pp)
    return Layout(name, name, dp=dp, tp=tp, pp=pp, ep=ep), Mesh(name, (ranks,))


def seconds(p: ReshardPlan, size: int, ranks: range) -> float:
    """Of the slowest rank."""
    worst = 0.0
    for rank in ranks:
        for side in rank_slices(p, rank):
            far, near = 0, 0
            for lane in side:
                if lane.peer // NODE == rank // NODE:
                    near += lane.stop - lane.start
                else:
                    far += lane.stop - lane.start
            worst = max(worst, far * size / NETWORK, near * size / NVLINK)
    number = num_buckets(p, size)
    return worst * num_rounds(p, number) / number


def lacking(p: ReshardPlan, size: int, ranks: range) -> int:
    """Bytes that come to the rank that lacks most."""
    return max(sum(lane.stop - lane.start for lane in rank_slices(p, rank)[1]) for rank in ranks) * size


def refit() -> None:
    model = deepseek_v3()
    total = sum(volume(tuple((0, n) for n in x.spec.shape)) for x in parameters(model))
    src, dst = layout("PP16 EP16", (0, 256), pp=16, ep=16), layout("TP32 DP8", (256, 512), tp=32)
    p = plan_reshard(model, *src, *dst, NODE)
    needs = lacking(p, itemsize(model), range(256, 512))
    bound, time = needs / NETWORK, seconds(p, itemsize(model), range(512))
    print(f"DeepSeek-V3 ({total / 1e9:.0f}e9 parameters, bfloat16), PP16 EP16 on 256 ranks -> TP32 DP8 on 256 others\n"
          f"  a rank lacks {needs / 1e9:.1f} GB, bound {bound:.2f} s, modelled {time:.2f} s, ratio {time / bound:.2f} "
          f"(gate 1.5, goal 1.2)\n"
          f"  published: 2.39 to 2.83 s, {2.39 / bound:.1f} to {2.83 / bound:.1f} of the bound")


def switch() -> None:
    """HybridFlow: a rank of tp*pp = t that generates with g gets (t - g) / (g t) of the model."""
    print("\nLlama-3 70B on 128 ranks, from training to generation: bytes of all ranks")
    for tp, pp, wide in ((8, 4, 8), (8, 4, 4), (8, 2, 4), (8, 2, 2), (4, 4, 2)):
        src, (dst, on) = layout("train", (0, 128), tp, pp), layout("generate", (0, 128), wide)
        free = reorder_devices(LLAMA_70B, *src, dst, on.ranks, NODE)
        fixed, moved = (summary(plan_reshard(LLAMA_70B, *src, replace(dst, mesh=m.id), m, NODE), LLAMA_70B).bytes
                        for m in (on, free))
        size = 2 * sum(volume(tuple((0, n) for n in x.spec.shape)) for x in parameters(LLAMA_70B))
        formula = 128 * size * (tp * pp - wide) / (wide * tp * pp)
        print(f"  tp{tp} pp{pp} -> tp{wide}: {moved / 1e9:7.1f} GB, / formula {moved / formula:.3f}; in the order as given "
              f"{fixed / 1e9:7.1f} GB, every rank the whole of its shard {128 * size / wide / 1e9:7.1f} GB")


def main() -> None:
    refit()
    switch()


if __name__ == "__main__":
    main()
