"""A plan as a page for a browser, and its dataflow graph as a picture: `page(Given(...))`, `graph_svg(plan)`.

Pure, and without torch: from a plan, a simulated timeline and, where there is one, a recorded timeline.
"""

from rldsl.pages.graph import graph_svg
from rldsl.pages.page import Given, page

__all__ = ["Given", "graph_svg", "page"]
