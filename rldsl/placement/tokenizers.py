"""Which models read the tokens of a data source, and whether these mean the same to all of them.

In: a graph and families. Out: nothing, or RL0316; for each data source the model whose tokenizer makes its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

from rldsl.diag import Diagnostic, Failure, Label
from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.placement.model import Call


def _readers(graph: g.Graph) -> dict[str, list[str]]:
    """Fetched frame (or one generated from it) -> the models that read its tokens, in program order."""
    root = {f.id: f.data or f.id for f in graph.frames}
    readers: dict[str, list[str]] = {}
    for node in g.nodes(graph.items):
        if not isinstance(node, Call):
            continue
        frames = ((node.prompts, node.frame) if isinstance(node, g.Generate) else
                  (node.frame,) if isinstance(node, g.Infer) else node.frames)
        for frame in frames:
            names = readers.setdefault(root.get(frame, frame), [])
            if node.model not in names:
                names.append(node.model)
    return readers


def check_tokenizers(graph: g.Graph, families: Mapping[str, Family]) -> None:
    """RL0316: two models read the same tokens with different tokenizers."""
    models = {m.name: m for m in graph.models}
    for names in _readers(graph).values():
        for other in names[1:]:
            if families[other].tokenizer != families[names[0]].tokenizer:
                raise Failure([Diagnostic(
                    "RL0316", f"`{names[0]}` and `{other}` read the same tokens with different tokenizers",
                    models[other].span, f'the tokenizer of "{families[other].path}"',
                    (Label(models[names[0]].span, f'differs from that of "{families[names[0]].path}"'),),
                    help="tokens pass between models as ids: use models with the same tokenizer.json")])


def tokenizers(graph: g.Graph) -> tuple[tuple[str, str], ...]:
    """Data source -> model directory, of the first that reads it; of any where none does."""
    readers, paths = _readers(graph), {m.name: m.path for m in graph.models}
    fallback = next(iter(paths.values()), "")
    return tuple((d.name, paths[readers[d.name][0]] if readers.get(d.name) else fallback) for d in graph.data)
