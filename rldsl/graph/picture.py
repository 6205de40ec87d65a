"""Pictures of a graph: Mermaid, DOT and plain text. Solid edges are values, dashed edges parameter versions.

In: a Graph. Out: text. Two equal graphs give the same picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from rldsl.graph import model as g


def _models(node: g.Node) -> tuple[str, ...]:
    """The models whose parameters a node reads."""
    match node:
        case g.Generate() | g.Infer() | g.Train() | g.Save():
            return (node.model,)
        case g.Sync():
            return (node.source, node.model) if node.decay else (node.source,)
    return ()


def edges(graph: g.Graph) -> list[tuple[str, str, str, bool]]:
    """(from, to, label, parameter version). A model's first calls of a step read what the
    last train or sync of the step before made."""
    every = list(g.nodes(graph.items))
    writer = {v: n.id for n in every for v in n.writes}
    found = [(writer[v], n.id, v, False) for n in every for v in n.reads if v in writer and v not in n.writes]
    last = {n.model: n.id for n in every if isinstance(n, g.Train | g.Sync)}
    made: dict[str, str] = {}
    for node in every:
        found += [(made.get(model, last[model]), node.id, model, True) for model in _models(node) if model in last]
        if isinstance(node, g.Train | g.Sync):
            made[node.model] = node.id
    return list(dict.fromkeys(found))


def title(node: g.Node) -> tuple[str, str]:
    """(what it does, on which frame)."""
    match node:
        case g.Fetch(data=data):
            return f"{data}.next", ", ".join(node.frames)
        case g.Generate(model=model, sampling=s):
            return f"{model}.generate", f"{node.prompts} × {s.n}"
        case g.Infer(model=model, what=what):
            return f"{model}.{what}", node.frame
        case g.Train(model=model, loss=loss):
            return f"{model}.train", f"{', '.join(node.frames)}; loss {loss.rpartition('/')[2]}"
        case g.Compute():
            return "compute", ", ".join(node.outputs[i][1] for i in range(len(node.outputs)))
        case g.Keep(writes=(name,)):
            return "keep", name
        case g.Select(frame=frame):
            return "select", frame
        case g.Collect(frame=frame, into=into):
            return "collect", f"{frame} as {into}"
        case g.Save(model=model):
            return f"save {model}", ""
        case g.Sync(model=model, source=source, decay=decay):
            return (f"ema {decay:g}" if decay else "sync"), f"{model} from {source}"
    return node.id, ""


def mermaid(graph: g.Graph) -> str:
    """A Mermaid flowchart."""
    ids = {n.id: f"n{i}" for i, n in enumerate(g.nodes(graph.items))}
    lines = ["flowchart TD"]
    for node in g.nodes(graph.items):
        what, on = title(node)
        text = "<br/>".join(p.replace('"', "#quot;") for p in (node.id, what, on) if p)
        shape = ("([", "])") if isinstance(node, g.Compute) else ("[(", ")]") if isinstance(node, g.Fetch) else "[]"
        left, right = shape
        lines.append(f'  {ids[node.id]}{left}"{text}"{right}')
    for src, dst, label, version in edges(graph):
        lines.append(f'  {ids[src]} {"-.->" if version else "-->"}|"{label}"| {ids[dst]}')
    return "\n".join(lines) + "\n"


def dot(graph: g.Graph) -> str:
    """A DOT digraph."""
    quote = lambda s: json.dumps(s, ensure_ascii=False)  # noqa: E731
    lines = [f"digraph {quote(graph.flow)} {{", '  node [shape=box, fontname="sans-serif"];']
    for node in g.nodes(graph.items):
        shape = "ellipse" if isinstance(node, g.Compute) else "cylinder" if isinstance(node, g.Fetch) else "box"
        label = "\n".join(p for p in (node.id, *title(node)) if p)
        lines.append(f"  {quote(node.id)} [label={quote(label)}, shape={shape}];")
    for src, dst, label, version in edges(graph):
        style = ", style=dashed" if version else ""
        lines.append(f"  {quote(src)} -> {quote(dst)} [label={quote(label)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def text(graph: g.Graph) -> str:
    """One line for each frame and node, as `--emit graph` prints it."""
    lines = [f"flow {graph.flow} steps={graph.steps} seed={graph.seed}"]
    lines += [f"model {m.name} = {m.kind}({m.path!r}) {m.dtype}{' trained' if m.optimizer else ''}"
              for m in graph.models]
    lines += [f"state {s.name} = {s.initial:g}" for s in graph.states]
    lines += [f"data {d.name} = {d.format}({d.path!r}) {d.kind}" for d in graph.data]
    lines += [f"frame {f.id}: {f.count} rows, {f.per_prompt} a prompt, at most {f.max_prompt_tokens} + "
              f"{f.max_response_tokens} tokens, temperature {f.temperature:g}" for f in graph.frames]
    lines += _block(graph.items, "")
    lines += [f"metric {name} = {value}" for name, value in graph.metrics]
    return "\n".join(lines) + "\n"


def _block(items: tuple[g.Item, ...], indent: str) -> Iterator[str]:
    for item in items:
        match item:
            case g.Every(period=k, body=body):
                yield f"{indent}every {k}"
                yield from _block(body, indent + "  ")
            case g.Repeat(times=k, body=body):
                yield f"{indent}repeat {k}"
                yield from _block(body, indent + "  ")
            case g.Until(most=k, condition=condition, body=body):
                yield f"{indent}repeat until {condition}, at most {k}"
                yield from _block(body, indent + "  ")
            case g.Eval(data=data, most=k, body=body):
                yield f"{indent}eval {data}, at most {k} batches"
                yield from _block(body, indent + "  ")
            case _:
                what, on = title(item)
                arrow = f" : {', '.join(item.reads)} -> {', '.join(item.writes)}" if item.reads or item.writes else ""
                yield f"{indent}{item.id} = {what}({on}){arrow}"
