"""Distributions in programs: several tokens at each token of a response."""
