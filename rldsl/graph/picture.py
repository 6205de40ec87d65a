"""Pictures of a graph: Mermaid, DOT and plain text. Solid edges are values, dashed edges parameter versions.

In: a Graph. Out: text. Two equal graphs give the same picture.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from rldsl.graph import model as g
from rldsl.plan.derive_ops import DERIVE_OPS
from rldsl.plan.heads import OUTPUTS
from rldsl.plan.naming import Labels, collected

NO_LABELS = Labels({})
STORES = (g.Fetch, g.Store, g.Sample)  # of rows: drawn as data


def edges(graph: g.Graph, reduce: bool = False) -> list[tuple[str, str, str, bool]]:
    """(from, to, label, parameter version). reduce: without those that follow from others."""
    from rldsl.graph.dataflow import dataflow, reduced

    made = dataflow(graph)
    order = {id: i for i, id in enumerate(made)}
    shown = reduced(made) if reduce else made
    name = labels_of(graph).name
    found = ((a, b, name(str(key)) + " (step before)" * bool(data["carried"] and not data["version"]),
              bool(data["version"])) for a, b, key, data in shown.edges(keys=True, data=True))
    return sorted(found, key=lambda e: (e[3], order[e[1]]))


def title(node: g.Node, labels: Labels = NO_LABELS) -> tuple[str, str]:
    """(what it does, on which frame)."""
    name = labels.name
    match node:
        case g.Fetch(data=data):
            return f"{data}.next", ", ".join(node.frames)
        case g.Draw(data=data, inputs=inputs, columns=columns):
            return f"draw {data}", ", ".join(name(v) for _, v in (*inputs, *columns))
        case g.Lookup(frame=frame):
            return "look up", name(frame)
        case g.Update(state=state, frame=frame):
            return f"update {state}", name(frame)
        case g.Generate(model=model, sampling=s):
            return f"{model}.generate", f"{name(node.prompts)} × {s.n}"
        case g.Infer(model=model, output_name=what):
            return f"{model}.{OUTPUTS[what].call}", name(node.frame)
        case g.Train(model=model, loss=loss):
            return f"{model}.train", f"{', '.join(map(name, node.frames))}; loss {loss.rpartition('/')[2]}"
        case g.Compute():
            return "compute", ", ".join(name(made) for _, made in node.outputs)
        case g.Broadcast(writes=(kept,)):
            return "broadcast", name(kept)
        case g.Derive(op=op, frame=frame):
            return DERIVE_OPS[op].verb, name(frame)
        case g.Collect(frame=frame, into=into):
            return "collect", f"{name(frame)} as {into}" if labels is NO_LABELS else name(frame)
        case g.Store(buffer=buffer, frame=frame):
            return f"{buffer}.add", name(frame)
        case g.Sample(buffer=buffer, frame=frame):
            return f"{buffer}.sample", name(frame)
        case g.Save(model=model):
            return f"save {model}", ""
        case g.Sync(model=model, source=source, decay=decay):
            return (f"ema {decay:g}" if decay else "sync"), f"{model} from {source}"
    return node.id, ""


def labels_of(graph: g.Graph) -> Labels:
    return Labels.of(graph.values, graph.frames)


def label_lines(node: g.Node, labels: Labels) -> tuple[str, ...]:
    """What a picture writes in a node: its name where it has one, what it does, on which frame."""
    what, on = title(node, labels)
    return tuple(dict.fromkeys(line for line in (name_of(node, labels), what, on) if line))


def name_of(node: g.Node, labels: Labels) -> str:
    """What people call a node."""
    if isinstance(node, g.Broadcast):
        return labels.name(node.writes[0])
    if isinstance(node, g.Collect):
        return collected(labels.name(node.frame))
    return labels.name(node.id)


def mermaid(graph: g.Graph, reduce: bool = False) -> str:
    """A Mermaid flowchart."""
    labels = labels_of(graph)
    ids = {n.id: f"n{i}" for i, n in enumerate(g.nodes(graph.items))}
    lines = ["flowchart TD"]
    for node in g.nodes(graph.items):
        text = "<br/>".join(_mermaid(line) for line in label_lines(node, labels))
        left, right = ("([", "])") if isinstance(node, g.Compute) else ("[(", ")]") if isinstance(node, STORES) else (
            "[", "]")
        lines.append(f'  {ids[node.id]}{left}"{text}"{right}')
    for src, dst, label, version in edges(graph, reduce):
        lines.append(f'  {ids[src]} {"-.->" if version else "-->"}|"{_mermaid(label)}"| {ids[dst]}')
    return "\n".join(lines) + "\n"


def dot(graph: g.Graph, reduce: bool = False) -> str:
    """A DOT digraph."""
    labels = labels_of(graph)
    lines = [f"digraph {_quoted(graph.flow)} {{", '  node [shape=box, fontname="sans-serif"];']
    for node in g.nodes(graph.items):
        shape = "ellipse" if isinstance(node, g.Compute) else "cylinder" if isinstance(node, STORES) else "box"
        label = "\n".join(label_lines(node, labels))
        lines.append(f"  {_quoted(node.id)} [label={_quoted(label)}, shape={shape}];")
    for src, dst, label, version in edges(graph, reduce):
        style = ", style=dashed" if version else ""
        lines.append(f"  {_quoted(src)} -> {_quoted(dst)} [label={_quoted(label)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def text(graph: g.Graph) -> str:
    """One line for each frame and node, as `--emit graph` prints it."""
    lines = [f"flow {graph.flow} steps={graph.steps} seed={graph.seed}"]
    lines += [f"model {m.name} = {m.head_name}({m.path!r}) {m.dtype}{' trained' if m.optimizer else ''}"
              for m in graph.models]
    lines += [f"state {s.name} = {s.initial:g}" for s in graph.states]
    lines += [f"buffer {b.name} = rows(capacity={b.capacity})" for b in graph.buffers]
    lines += [f"data {d.name} = {d.format}({d.path!r}) {d.row_format}" for d in graph.data]
    lines += [f"frame {f.id}: {f.count} rows, {f.per_prompt} per prompt, at most {f.max_prompt_tokens} + "
              f"{f.max_response_tokens} tokens, temperature {f.temperature:g}" for f in graph.frames]
    lines += _block(graph.items, "")
    lines += [f"metric {name} = {value}" for name, value in graph.metrics]
    return "\n".join(lines) + "\n"


def _block(items: tuple[g.Item, ...], indent: str) -> Iterator[str]:
    for item in items:
        match item:
            case g.When(body=body):
                yield f"{indent}{item.head}"
                yield from _block(body, indent + "  ")
            case g.Repeat(iterations=k, body=body):
                yield f"{indent}repeat {k}"
                yield from _block(body, indent + "  ")
            case g.Until(max_iterations=k, condition=condition, body=body):
                yield f"{indent}repeat until {condition}, at most {k}"
                yield from _block(body, indent + "  ")
            case g.Eval(data=data, max_iterations=k, body=body):
                yield f"{indent}eval {data}, at most {k} batches"
                yield from _block(body, indent + "  ")
            case _:
                what, on = title(item)
                arrow = f" : {', '.join(item.reads)} -> {', '.join(item.writes)}" if item.reads or item.writes else ""
                yield f"{indent}{item.id} = {what}({on}){arrow}"


def _mermaid(text: str) -> str:
    """Text of a label: Mermaid reads `"`, `<` and `#` in it as its own."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
