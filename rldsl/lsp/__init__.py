"""The language server: what an editor asks about a program.

In: texts, saved or not, and positions in them. Out: diagnostics, completions, hovers, places. `server` speaks the
protocol by pygls; everything it says is computed by the pure modules next to it, which know nothing of the protocol.
"""
