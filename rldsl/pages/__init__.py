"""A plan or a run as a page for a browser, and a dataflow graph as a picture: `page(Given(...))`, `page(Given(...),
RunGiven(...))`, `graph_svg(plan)`.

Pure, and without torch: from a plan, a simulated timeline and, where there is one, a recorded timeline; of a run also
from its record, metrics and samples.
"""

from rldsl.pages.graph import graph_svg
from rldsl.pages.page import Given, page
from rldsl.pages.run import RunGiven

__all__ = ["Given", "RunGiven", "graph_svg", "page"]
