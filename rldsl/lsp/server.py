"""The protocol: pygls calls handlers, and they turn answers of the pure modules into its records.

In: an editor's requests. Out: answers, each worked out from the newest text. Diagnostics follow a change after a
moment's quiet; an old text's are never shown with a new one. What helps to write a text is in writing.py, what helps to
read one in reading.py.
"""

from __future__ import annotations

import asyncio

from lsprotocol import types as t

from rldsl.lsp.reading import reading
from rldsl.lsp.session import Server, diagnostic, path_of
from rldsl.lsp.writing import writing
from rldsl.semantics.modules import library

PAUSE = 0.05  # seconds between two files that nobody has asked for
QUIET = 0.15  # seconds without a change before a text is looked at


def publish(server: Server, uri: str) -> None:
    found = [diagnostic(server, d) for d in server.analysis(uri).diagnostics]
    document = server.workspace.get_text_document(uri)
    server.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, found, document.version))


async def later(server: Server, uri: str) -> None:
    await asyncio.sleep(QUIET)
    publish(server, uri)


def publish_all(server: Server) -> None:
    """Analyze all open files again: what they import may have changed."""
    server.analyses.clear()
    server.forecasts.clear()
    for uri in list(server.workspace.text_documents):
        publish(server, uri)


def make() -> Server:
    """A server with all its handlers."""
    server = Server()
    feature = server.feature

    @feature(t.INITIALIZE)
    def begun(params: t.InitializeParams) -> None:
        server.configure(params.initialization_options)

    @feature(t.INITIALIZED)
    async def idle(params: t.InitializedParams) -> None:
        """Look at the library, a file at a time, so that its functions can be offered."""
        for module in library():
            server.files.load(f"std.{module}", "")
            await asyncio.sleep(PAUSE)

    @feature(t.WORKSPACE_DID_CHANGE_CONFIGURATION)
    def configured(params: t.DidChangeConfigurationParams) -> None:
        server.configure(params.settings)

    @feature(t.SHUTDOWN)
    async def ended(params: None) -> None:
        await server.forecasts.close()

    @feature(t.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: t.DidOpenTextDocumentParams) -> None:
        publish(server, params.text_document.uri)

    @feature(t.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(params: t.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        if uri in server.waiting:
            server.waiting[uri].cancel()
        server.waiting[uri] = asyncio.create_task(later(server, uri))

    @feature(t.TEXT_DOCUMENT_DID_SAVE)
    def saved(params: t.DidSaveTextDocumentParams) -> None:
        publish_all(server)

    @feature(t.WORKSPACE_DID_CHANGE_WATCHED_FILES)
    def watched(params: t.DidChangeWatchedFilesParams) -> None:
        """Files were changed by another program than the editor."""
        publish_all(server)

    @feature(t.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: t.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        if uri in server.waiting:
            server.waiting.pop(uri).cancel()
        server.analyses.pop(path_of(uri), None)
        server.text_document_publish_diagnostics(t.PublishDiagnosticsParams(uri, []))

    writing(server, feature)
    reading(server, feature)
    return server
