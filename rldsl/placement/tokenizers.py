"""Which models read the tokens of a data source, and whether these mean the same to all of them.

In: a graph and families. Out: nothing, or RL0316; for each data source, and for text that Python functions write, the
model whose tokenizer makes its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rldsl.diag import Diagnostic, Failure, Label
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call


def origins_of(graph: g.Graph) -> dict[str, str]:
    """Frame -> where its tokens come from: the name of a data source, or the frame whose prompts are text that a Python
    function wrote."""
    buffers: dict[str, str] = {}
    while True:  # rows may be sampled above the statement that adds them
        found = _found(graph, buffers)
        first: dict[str, str] = {}
        for node in g.nodes(graph.items):
            if isinstance(node, g.Store):
                first.setdefault(node.buffer, found[node.frame])
        if first == buffers:
            return found
        buffers = first


def _found(graph: g.Graph, buffers: Mapping[str, str]) -> dict[str, str]:
    """`origins_of`, where those of the rows of buffers are known. buffers: buffer -> where their tokens come from."""
    found: dict[str, str] = {}
    for node in g.nodes(graph.items):
        match node:
            case g.Fetch():
                found |= dict.fromkeys(node.frames, node.data)
            case g.Generate():
                found[node.frame] = found[node.prompts]
            case g.Derive(op="text"):
                found[node.frame] = node.frame
            case g.Derive():
                found[node.frame] = found[node.source]
            case g.Collect():
                found[node.into] = found[node.frame]
            case g.Sample():
                found[node.frame] = buffers.get(node.buffer, node.frame)
    return found


def readers_of(graph: g.Graph) -> dict[str, list[str]]:
    """Where tokens come from (`origins_of`) -> the models that read them, in program order."""
    origins = origins_of(graph)
    readers: dict[str, list[str]] = {}
    for node in g.nodes(graph.items):
        if not isinstance(node, Call):
            continue
        frames = ((node.prompts, node.frame) if isinstance(node, g.Generate) else
                  (node.frame,) if isinstance(node, g.Infer) else node.frames)
        for frame in frames:
            names = readers.setdefault(origins.get(frame, frame), [])
            if node.model not in names:
                names.append(node.model)
    for node in g.nodes(graph.items):
        if isinstance(node, g.Derive) and node.op in ("concat", "reprompt"):  # tokens of all parts mean the same
            of = [origins[p] for p in node.parts]
            together = list(dict.fromkeys(name for o in of for name in readers.get(o, [])))
            readers |= dict.fromkeys(of, together)
    return readers


def check_tokenizers(graph: g.Graph, families: Mapping[str, Family]) -> None:
    """RL0316: two models read the same tokens with different tokenizers."""
    models = {m.name: m for m in graph.models}
    for names in readers_of(graph).values():
        for other in names[1:]:
            if families[other].tokenizer != families[names[0]].tokenizer:
                raise Failure([Diagnostic(
                    "RL0316", f"`{names[0]}` and `{other}` read the same tokens with different tokenizers",
                    models[other].span, f'the tokenizer of "{families[other].path}"',
                    (Label(models[names[0]].span, f'differs from that of "{families[names[0]].path}"'),),
                    help="tokens pass between models as ids: use models with the same tokenizer.json, or pass text: "
                         "`asked = ask(gen)` with a Python function that is declared `-> prompts(max_tokens=...)`")])


def tokenizers(graph: g.Graph) -> tuple[tuple[str, str], ...]:
    """Data source -> model directory, of the first that reads it; of any where none does."""
    readers, paths = readers_of(graph), {m.name: m.path for m in graph.models}
    fallback = next(iter(paths.values()), "")
    return tuple((d.name, paths[readers[d.name][0]] if readers.get(d.name) else fallback) for d in graph.data)


def with_tokenizers(graph: g.Graph) -> g.Graph:
    """The graph, whose frames name the tokenizer of their tokens where it is not that of their data source: the one of
    the first model that reads them."""
    origins, readers = origins_of(graph), readers_of(graph)
    texts = {n.frame for n in g.nodes(graph.items) if isinstance(n, g.Derive) and n.op == "text"}
    paths, of_data = {m.name: m.path for m in graph.models}, dict(tokenizers(graph))
    return replace(graph, frames=tuple(
        replace(f, tokenizer=paths[readers[origins[f.id]][0]] if readers.get(origins[f.id]) else of_data[f.data])
        if origins.get(f.id) in texts else f for f in graph.frames))
