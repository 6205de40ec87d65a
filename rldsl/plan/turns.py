"""Rows of conversations: several turns of a model, and what an environment says before each.

The tokens of a row are stored in one array. Those that the environment wrote are stored as ~id, which is below 0, so
that everything that moves, selects or keeps tokens moves the turns with them. In the lengths of such a row, `prompt`
counts what the environment wrote, all pieces together, and `response` what the model wrote: what is divided by tokens,
and every token value, needs no more. A turn is a run of the model's own tokens; there is at least one token of the
environment before each.
"""

from __future__ import annotations

# what `gen.stopped` is, by what ended a conversation (`runtime/environments`): 0 where it ended of itself
STOPPED: dict[str, int] = {"done": 0, "no_call": 0, "max_turns": 1, "max_tokens": 2, "max_new_tokens": 3, "timeout": 4,
                           "error": 5}
