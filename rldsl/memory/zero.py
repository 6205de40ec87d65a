"""What a train call under `zero` needs so that parameters and gradients are whole where they must be.

In: a copy of a trained model under a layout. Out: holders, in bytes, for the passes of a minibatch. The counts follow
`backends/torch/model/zero.py`: layers one by one, and all that belongs to no layer together.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from rldsl.memory.parameters import FLOAT, Copy, boxes, held
from rldsl.plan.model import ParamSpec
from rldsl.sharding.boxes import volume


@cache
def gathered(copy: Copy) -> dict[str, int]:
    level = copy.layout.zero
    if not level:
        return {}
    layers = [s for s in copy.model.params if s.stage == "layer" and held(s, copy)]
    rest = [s for s in copy.model.params if s.stage != "layer" and held(s, copy)]
    layer, last = _bytes(layers, copy, copy.compute), _bytes(rest, copy, FLOAT)
    gradient, others = _bytes(layers, copy, FLOAT), _bytes(rest, copy, FLOAT)  # of a layer; of what belongs to none
    there = last + (copy.layers if level < 3 else min(2, copy.layers)) * layer
    unit = max(gradient, others)
    whole = others + copy.layers * gradient if level == 1 else unit
    # what arrives is copied from where all shards' rows lie; what leaves is put there, and one sum is under way
    return {"gathered parameters": there + max(layer, last), "gradients on their way": whole + 2 * unit}


def _bytes(specs: Iterable[ParamSpec], copy: Copy, matrix: int) -> int:
    """Of one layer, or of what belongs to none. matrix: bytes of an element of a matrix; others are float32."""
    return sum((matrix if len(s.shape) > 1 else FLOAT) * sum(map(volume, boxes(s, copy.layout, copy.cell.part)))
               for s in specs)
