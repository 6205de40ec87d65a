"""Cluster files: YAML with the names of `FIELDS`, `preset` to begin from, and what `rlc profile` measured.

In: a text, a path or the name of a preset. Out: a `Cluster`. Every mistake is found and points into the file.
Errors: RL0091, RL0092 no such file, RL0103 no YAML, RL0107 an unknown key, RL0205 a wrong value, RL0215 missing or
given twice.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rldsl.clusters.model import FIELDS, LEAST, PASSES, Cluster, Distribution, Field, Measured
from rldsl.diag import Diagnostic, Failure, fail
from rldsl.source import SourceFile, Span

if TYPE_CHECKING:
    from yaml.nodes import MappingNode, Node

NAMED = re.compile(r"([a-z]\w*?)x(\d{1,30})(?:\.ya?ml)?")
MEASURED: dict[str, Field] = {
    "config": Field("text", ""), "head": Field("text", ""), "dtype": Field("text", ""), "tp": Field("int", "", 1),
    "threads": Field("int", "", 1),
}


def presets() -> tuple[str, ...]:
    """The names of the nodes that are known."""
    return tuple(sorted(f.name.removesuffix(".yaml") for f in files(__package__).joinpath("presets").iterdir()
                        if f.name.endswith(".yaml")))


def preset(name: str) -> Cluster | None:
    """A known node ("h100x8"), or several of one kind by the number of their devices ("h100x64": eight nodes); None
    where the name is neither, or means more nodes than a cluster may have. A file's name stands for the same
    ("h100x64.yaml")."""
    found = NAMED.fullmatch(name)
    if found is None:
        return None
    for known in presets():
        kind, _, gpus = known.rpartition("x")
        nodes, rest = divmod(int(found[2]), int(gpus))
        if kind == found[1] and not rest and 1 <= nodes <= FIELDS["nodes"].high:
            text = files(__package__).joinpath("presets", f"{known}.yaml").read_text()
            return replace(parse(SourceFile(f"{known}.yaml", text)), nodes=nodes,
                           name=f"{kind}x{int(found[2])}", file="")
    return None


def find(name: str) -> Cluster:
    """The file of this path or, where there is none, the preset of this name."""
    if not name:
        raise fail("RL0091", "the name of the cluster is empty", place="--cluster",
                   help=f"pass a cluster file, or a built-in node type: {', '.join(presets())}")
    if not os.path.exists(name) and (known := preset(name)) is not None:
        return known
    return read(name)


def read(path: str) -> Cluster:
    """The cluster of a file."""
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {path}", place=path, help=_near(path)) from None
    except OSError as error:
        raise fail("RL0092", f"cannot read {path}: {error.strerror}", place=path,
                   help=f"pass a readable file, or a built-in node type: {', '.join(presets())}") from None
    except UnicodeDecodeError as error:
        raise fail("RL0103", f"`{path}` is not valid YAML", place=path,
                   help=f"byte {error.start} is not UTF-8") from None
    return parse(SourceFile(path, text))


def _near(name: str) -> str:
    """Help for a name that is no file and no preset."""
    found = NAMED.fullmatch(name)
    kinds = {known.rpartition("x")[0]: known for known in presets()}
    if found is not None and found[1] in kinds:
        known = kinds[found[1]]
        gpus = int(known.rpartition("x")[2])
        return (f"the number counts all devices, {gpus} per node: `{known}`, `{found[1]}x{2 * gpus}`, and so on up to "
                f"{FIELDS['nodes'].high:,.0f} nodes; for other nodes write a file with `preset: {known}` and `gpus:`")
    near = get_close_matches(name, presets(), n=1)
    return f"did you mean `{near[0]}`?" if near else f"built-in node types: {', '.join(presets())}"


def parse(file: SourceFile) -> Cluster:
    """The cluster that a text describes; what it does not say stays unknown (0)."""
    import yaml

    try:
        tree = yaml.compose(file.text, yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        at = min(mark.index if mark else 0, max(len(file.text) - 1, 0))
        raise fail("RL0103", f"`{file.name}` is not valid YAML", Span(file, at, at + 1), error.problem or "") from None
    except RecursionError:
        raise fail("RL0103", f"`{file.name}` is not valid YAML", place=file.name,
                   help="its values are nested too deeply") from None
    except yaml.YAMLError as error:
        raise fail("RL0103", f"`{file.name}` is not valid YAML", place=file.name,
                   help=" ".join(str(error).split())) from None
    reader = _Reader(file)
    if not isinstance(tree, yaml.MappingNode):
        raise fail("RL0205", f"`{file.name}` must contain named values", Span(file, 0, len(file.text)),
                   help="for example `nodes: 1`, `gpus: 8`, `memory_gb: 80`")
    found = reader.cluster(tree)
    if reader.found or found is None:
        raise Failure(reader.found)
    return found


class _Reader:
    """One file's values and the mistakes in it."""

    def __init__(self, file: SourceFile):
        self.file = file
        self.found: list[Diagnostic] = []

    def say(self, code: str, title: str, node: Node, label: str = "", help: str = "") -> None:
        start, stop = node.start_mark.index, node.end_mark.index
        stop = start + len(self.file.text[start:stop].split("\n", 1)[0].rstrip())
        self.found.append(Diagnostic(code, title, Span(self.file, start, max(stop, start + 1)), label, help=help))

    def pairs(self, tree: MappingNode, known: tuple[str, ...]) -> dict[str, Node]:
        """Key -> value, of the keys that are allowed here."""
        kept: dict[str, Node] = {}
        for key, value in tree.value:
            name = key.value
            if not isinstance(name, str):
                self.say("RL0107", "keys must be strings", key, help=f"one of: {', '.join(known)}")
            elif name not in known:
                near = get_close_matches(name, known, n=1)
                self.say("RL0107", f"unknown cluster setting `{name}`", key,
                         help=f"did you mean `{near[0]}`?" if near else f"one of: {', '.join(known)}")
            elif name in kept:
                self.say("RL0215", f"`{name}` is passed twice", key, help="remove one of the two")
            else:
                kept[name] = value
        return kept

    def cluster(self, tree: MappingNode) -> Cluster | None:
        given = self.pairs(tree, ("preset", *FIELDS, "measured"))
        base: Cluster | None = None
        if "preset" in given:
            node = given.pop("preset")
            base = preset(str(node.value)) if isinstance(node.value, str) else None
            if base is None:
                near = get_close_matches(str(node.value), presets(), n=1)
                self.say("RL0205", "unknown preset", node, help=f"did you mean `{near[0]}`?" if near else
                         f"one of: {', '.join(presets())}")
                return None
        measured = given.pop("measured", None)
        values: dict[str, Any] = {k: self.value(k, FIELDS[k], v) for k, v in given.items()}
        if measured is not None:
            values["measured"] = self.measured(measured)
        if self.found:
            return None
        values.setdefault("name", Path(self.file.name).stem)
        values["file"] = self.file.name
        found = Cluster(**values) if base is None else replace(base, **values)
        if 0 < found.memory_gb < found.cache_gb:
            at = given.get("cache_gb", given.get("memory_gb", tree))
            self.say("RL0205", "`cache_gb` must be at most `memory_gb`", at,
                     f"{found.cache_gb:g} of {found.memory_gb:g} GB", help="both are per device, in 10^9 bytes")
        return found

    def value(self, name: str, field: Field, node: Node) -> Any:
        """One value of the right type and range; None after a mistake."""
        if field.kind == "distribution":
            return self.distribution(name, field, node)
        plain = _scalar(node)
        number = isinstance(plain, int | float) and not isinstance(plain, bool) and plain == plain
        if field.kind == "text":
            if isinstance(plain, str):
                return plain
            return self.say("RL0205", f"`{name}` must be a string", node, help=f"for example `{name}: \"mine\"`")
        if not number or field.kind == "int" and abs(plain) <= field.high and plain != int(plain):
            what, like = ("an integer", "8") if field.kind == "int" else ("a number", "0.75")
            return self.say("RL0205", f"`{name}` must be {what}", node, help=f"for example `{name}: {like}`")
        if not (field.low < plain or plain == field.low and not field.above) or not plain <= field.high:
            low = f"more than {field.low:g}" if field.above else f"at least {field.low:g}"
            return self.say("RL0205", f"`{name}` must be {low} and at most {field.high:g}", node, _shown(plain))
        if 0 < plain < LEAST:
            zero = "" if field.above or field.low else ", or 0"
            return self.say("RL0205", f"`{name}` must be at least {LEAST:g}{zero}", node, _shown(plain))
        return int(plain) if field.kind == "int" else float(plain)

    def distribution(self, name: str, field: Field, node: Node) -> Distribution | None:
        """A number, `{mean: 4, deviation: 2}`, or a list of measured values."""
        import yaml

        each = Field("float", "", field.low)
        if isinstance(node, yaml.SequenceNode):
            if not node.value:
                self.say("RL0205", f"`{name}` has no values", node, help=f"for example `{name}: [1, 2, 5]`")
            values = [self.value(name, each, n) for n in node.value]
            return None if self.found else Distribution(sum(values) / len(values), values=tuple(sorted(values)))
        if isinstance(node, yaml.MappingNode):
            given = self.pairs(node, ("mean", "deviation"))
            if "mean" not in given:
                self.say("RL0215", f"`{name}` needs `mean`", node,
                         help=f"for example `{name}: {{mean: 4, deviation: 2}}`")
            mean = self.value("mean", each, given["mean"]) if "mean" in given else 0.0
            deviation = self.value("deviation", Field("float", ""), given["deviation"]) if "deviation" in given else 0.0
            return None if self.found else Distribution(mean, deviation)
        found = self.value(name, each, node)
        return None if found is None else Distribution(found)

    def measured(self, tree: Node) -> tuple[Measured, ...]:
        import yaml

        if not isinstance(tree, yaml.SequenceNode) or not all(isinstance(n, yaml.MappingNode) for n in tree.value):
            self.say("RL0205", "`measured` must be a list as written by `rlc profile`", tree)
            return ()
        found = []
        for node in tree.value:
            given = self.pairs(node, (*MEASURED, *PASSES))
            values = {k: self.value(k, MEASURED[k], v) for k, v in given.items() if k in MEASURED}
            values |= {k: self.rates(k, v) for k, v in given.items() if k in PASSES}
            if missing := [k for k in MEASURED if k not in values]:
                self.say("RL0215", f"an entry of `measured` needs `{missing[0]}`",
                         node, help="`rlc profile` writes this list")
            elif not self.found:
                found.append(Measured(**values))
                if any(all(getattr(m, k) == values[k] for k in MEASURED) for m in found[:-1]):
                    self.say("RL0215", "an entry of `measured` is there twice", node,
                             help=f"remove one of those with the same {', '.join(MEASURED)}")
        return tuple(found)

    def rates(self, name: str, node: Node) -> tuple[tuple[str, float], ...]:
        import yaml

        if not isinstance(node, yaml.MappingNode):
            self.say("RL0205", f"`{name}` must map names to microseconds", node)
            return ()
        given = self.pairs(node, PASSES[name])
        if not self.found and (missing := [k for k in PASSES[name] if k not in given]):
            self.say("RL0215", f"`{name}` needs `{missing[0]}`", node, help="`rlc profile` writes this list")
        return tuple((k, self.value(k, Field("float", ""), v)) for k, v in given.items())


def _shown(number: float) -> str:
    """A number as a label shows it; one of hundreds of digits has no float."""
    digits = len(str(abs(number))) if isinstance(number, int) else 0
    return f"this has {digits} digits" if digits > 300 else f"this is {number:g}"


def _scalar(node: Node) -> Any:
    """The value of a plain node as YAML means it; None of a list or a table. What only YAML 1.1 reads as a number, 010
    as 8 and 1:30 as 90, is a text."""
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        return None
    try:
        plain = yaml.SafeLoader("").construct_object(node)
    except (yaml.YAMLError, ValueError):
        return None
    if isinstance(plain, int | float) and re.search(r":|^[-+]?0[\d_xXbo]", node.value):
        return str(node.value)
    if isinstance(plain, str) and re.fullmatch(r"[-+]?\d+(\.\d*)?e[-+]?\d+", plain):
        return float(plain)  # YAML 1.1 wants a dot in 1e-6; people do not
    return plain
