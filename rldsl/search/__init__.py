"""Placements by search: `find_placement(prepared, cluster, ...) -> Answer`, with a proof of how good the one found is.

Pure Python, and without torch. The calls of a step get blocks of ranks and strategies; the costs are those of the
simulator and of the memory estimate, the plan of what is found comes from the whole compiler.
"""

from rldsl.search.answer import Answer, Options, find_placement
from rldsl.search.prepared_program import PreparedProgram, prepare_program, unless_locked

__all__ = ["Answer", "Options", "PreparedProgram", "find_placement", "prepare_program", "unless_locked"]
