"""What the torch backend can express: everything that placement knows. What it cannot do of a model family,
`placement/` finds in the model itself."""

from __future__ import annotations

from typing import get_args

from rldsl.plan.backends import Description
from rldsl.plan.model import OptimizerKind

DESCRIPTION = Description(invariant=True, reuses_cache=True, conversations=True, images=True, entries=True,
                          first_pass=True, router_bias=True, optimizers=get_args(OptimizerKind),
                          groups=True, freezes=True)
