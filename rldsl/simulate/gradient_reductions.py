"""What a minibatch moves besides its passes: parameters and gradients over dp, and what ends it.

In: a stage, the level of `zero`. Out: seconds, and the ops of the reductions.
"""

from __future__ import annotations

from rldsl.sharding.boxes import itemsize
from rldsl.simulate.engine import Op
from rldsl.simulate.stage import Stage


def gather_seconds(stage: Stage) -> float:
    """Seconds of gathering the layers' parameters, in the dtype in which they multiply."""
    s = stage.shard
    return stage.over_dp(stage.machine.all_gather, itemsize(s.model), s.trained - s.outside_layers - s.local_experts,
                         s.local_experts)


def scatter_seconds(stage: Stage, share: float) -> float:
    """Seconds of the reduce-scatter of gradients, in float32: of a share of the layers, and of what is outside them."""
    s = stage.shard
    return stage.over_dp(stage.machine.reduce_scatter, 4,
                         share * (s.trained - s.outside_layers - s.local_experts) + s.outside_layers,
                         share * s.local_experts)


def gradient_reductions(stage: Stage, zero: int) -> list[Op]:
    """Gradients: tied embeddings over the ends of the pipeline, all over cp and dp; then the norm over the mesh. Under
    `zero` parameters outside the layers are gathered once per minibatch in float32, and so are the layers, except at
    level 3, which gathers them in each pass. Only level 1 scatters gradients here."""
    ops: list[Op] = []
    model = stage.shard.model
    tied = next((s for s in model.params if s.stage == "ends"), None)
    if tied is not None and stage.groups.sizes["pp"] > 1:
        size = 4 * model.sizes.vocab * model.sizes.hidden / stage.shard.tp
        ops += stage.collective_ops("pp", "tied", stage.all_reduce("pp", size))
    if stage.groups.sizes["cp"] > 1:
        ops += stage.collective_ops("cp", "gradients", stage.all_reduce("cp", 4 * stage.shard.trained))
    if stage.groups.sizes["dp"] > 1:
        common = stage.all_reduce("dp", 4 * (stage.shard.trained - stage.shard.local_experts))
        if stage.groups.sizes.get("expert_dp", 1) > 1:
            common += stage.all_reduce("expert_dp", 4 * stage.shard.local_experts)
        if zero:
            common = stage.over_dp(stage.machine.all_gather, 4, stage.shard.outside_layers)
            common += gather_seconds(stage) if zero < 3 else 0.0
            common += scatter_seconds(stage, 1.0) if zero == 1 else 0.0
        ops += stage.collective_ops("dp", "gradients", common)
    if stage.groups.sizes["mesh"] > 1:
        ops += stage.collective_ops("mesh", "norm", stage.all_reduce("mesh", 8))
    return ops
