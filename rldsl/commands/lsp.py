"""`rlc lsp`: the language server."""

from __future__ import annotations


def serve() -> None:
    """Until the editor closes the streams."""
    from rldsl.lsp.server import make

    make().start_io()
