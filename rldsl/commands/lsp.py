"""`rlc lsp`: the language server, where its library is installed."""

from __future__ import annotations

from rldsl.diag import fail


def serve() -> None:
    """Until the editor closes the streams. Errors: RL0097 without pygls."""
    try:
        from rldsl.lsp.server import make
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise fail("RL0097", "the language server needs pygls, which is not installed", place="rlc lsp",
                   help="install it with `pip install 'rldsl[lsp]'`") from None
    make().start_io()
