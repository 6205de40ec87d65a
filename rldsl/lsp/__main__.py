"""`python -m rldsl.lsp`: the language server on standard input and output."""

from rldsl.lsp.server import make

make().start_io()
