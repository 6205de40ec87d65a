"""The size of a message, in bytes, that decides how a collective sends it, for the runtime and the memory estimate."""

from __future__ import annotations

# bytes of a message from rank to rank up to which a collective over gloo is an exchange of all with all, which is
# cheaper there than a ring (`runtime/collectives.py`)
MAX_EXCHANGED = 1 << 17
