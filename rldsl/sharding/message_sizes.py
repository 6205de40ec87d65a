"""Sizes of messages that decide which way they go: the runtime sends them so, and the memory estimate counts it."""

from __future__ import annotations

# bytes of a message from rank to rank up to which a collective over gloo is an exchange of all with all, which is
# cheaper there than a ring (`runtime/collectives.py`)
MAX_EXCHANGED = 1 << 17
