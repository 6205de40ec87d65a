"""Placements by search: `find(prepared, cluster, ...) -> Answer`, with a proof of how good the one found is.

Pure Python, and without torch. The calls of a step get blocks of ranks and strategies; the costs are those of the
simulator and of the memory estimate, the plan of what is found comes from the whole compiler.
"""

from rldsl.search.answer import Answer, Options, find
from rldsl.search.prepare import Prepared, locked, prepared

__all__ = ["Answer", "Options", "Prepared", "find", "locked", "prepared"]
