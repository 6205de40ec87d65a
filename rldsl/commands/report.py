"""`rlc report`: a plan as a page for a browser.

In: the path of a plan, a cluster's file or preset, a recorded timeline. Out: the text of one HTML file that needs no
other. Errors: those of reading and verifying a plan, of reading a cluster or a timeline (RL0098), and RL0096 for a plan
that the cluster is not for.
"""

from __future__ import annotations

from rldsl.python.entry import load


def report(file: str, cluster: str | None = None, trace: str | None = None) -> str:
    """cluster: None takes as many nodes of a known kind as the plan needs, and the page says so."""
    return load(file).report(cluster, trace=trace).html
