"""The time of a plan on a cluster, without running it: `simulate(plan, cluster, lengths) -> Timeline`.

Pure, and without torch: it reads a plan, a cluster's numbers and expected lengths, nothing else.
"""

from rldsl.simulate.lengths import Lengths, check_lengths, observed_lengths
from rldsl.simulate.model import PathSegment, PeriodicEvents, Span, Timeline
from rldsl.simulate.simulate import simulate

__all__ = ["Lengths", "PathSegment", "PeriodicEvents", "Span", "Timeline", "check_lengths", "observed_lengths",
           "simulate"]
