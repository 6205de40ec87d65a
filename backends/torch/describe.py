"""What the torch backend can express: everything that placement knows. What it cannot do of a model family,
`placement/` finds in the model itself."""

from __future__ import annotations

from rldsl.plan.backends import Description

DESCRIPTION = Description(invariant=True, reuses_cache=True)
