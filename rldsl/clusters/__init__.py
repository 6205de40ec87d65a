"""What a program runs on: nodes, devices, and how fast they are. The compiler and the simulator read it."""

from rldsl.clusters.model import Cluster, Measured
from rldsl.clusters.read import find, parse, preset, presets, read

__all__ = ["Cluster", "Measured", "find", "parse", "preset", "presets", "read"]
