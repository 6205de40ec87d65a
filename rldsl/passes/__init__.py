"""Passes: small functions from a placed graph to events, in one total order, with everything that was inserted
explained (`Event.because`). `pipeline.py` runs them."""
