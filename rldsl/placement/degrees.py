"""From a clause to a layout: options read, the missing degree inferred, everything checked.

In: a mesh and options as written, the cluster, and the model's family. Out: a `Placement`.
Errors: RL0304 to RL0312 and RL0323 to RL0325, each underlining what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import gcd, prod
from typing import cast

from rldsl.diag import Diagnostic, Failure, Fix, Label, counted, fail
from rldsl.graph.model import MeshRef
from rldsl.models.families import Family
from rldsl.placement.backends import check_backend_name
from rldsl.placement.model import Placement, layout_of, mesh_of_set
from rldsl.placement.rules import Choice, Option
from rldsl.plan.expr import Scalar
from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh
from rldsl.plan.payloads import WAITING, Waiting
from rldsl.sharding.layout import stage_layers
from rldsl.sharding.rank_sets import union_of_ranges
from rldsl.source import Span

DEGREES = ("dp", "tp", "pp", "cp")
# of a computation, if not 0, 1 or none
NOTHING = {"zero": (0,), "keep": (True,), "waiting": ("keep",), "backend": (DEFAULT_BACKEND,)}
INFERRED = ("dp", "tp", "pp")  # cp is 1 where it is not given
OPTIONS = ("dp", "tp", "pp", "vpp", "cp", "ep", "zero", "mbs", "mbt", "recompute", "offload", "keep", "reuse",
           "waiting", "backend")
SWITCHES = ("offload", "keep", "reuse")
RECOMPUTE = ("none", "full")
CHOICES: dict[str, tuple[str, ...]] = {"recompute": RECOMPUTE, "waiting": WAITING}  # words that an option may be
ZERO = "0 shards nothing over dp; 1 shards the optimizer state, 2 also gradients, 3 also parameters"


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster that meshes must fit."""

    nodes: int  # number of machines
    gpus: int  # per node
    declared: bool  # by the program; else it is one node, as large as the largest rank named

    @property
    def world(self) -> int:
        return self.nodes * self.gpus


def mesh_ranks(ref: MeshRef, cluster: Cluster) -> Mesh:
    """The ranks of `mesh(a:b)` or `mesh(n:m, a:b)`, or the first n for `mesh(n)`; inside the cluster, and whole nodes
    or a part of one node."""
    start, stop = ref.devices
    if stop <= start or start < 0 or (ref.nodes and not 0 <= ref.nodes[0] < ref.nodes[1]):
        raise fail("RL0305", "empty mesh", ref.span, f"{start}:{stop} has no ranks",
                   help="mesh(a:b) is the ranks a to b-1, so b must be larger than a")
    if ref.nodes is None:
        if stop > cluster.world:
            raise fail("RL0305", "the mesh extends beyond the cluster", ref.span,
                       counted(stop, "rank") if ref.free else
                       f"needs rank {stop - 1}; the cluster has ranks 0 to {cluster.world - 1}",
                       help=f"cluster nodes={cluster.nodes} gpus={cluster.gpus} is {counted(cluster.world, 'rank')}; "
                            f"to place every call there, whatever the rules say: "
                            f"--on \"*.* on mesh(0:{cluster.world})\"")
        ranges = [(start, stop)]
    else:
        if not cluster.declared:
            raise fail("RL0306", "a mesh over nodes needs a cluster", ref.span,
                       "the number of devices per node is unknown",
                       help="declare it: `cluster nodes=2 gpus=8`")
        if ref.nodes[1] > cluster.nodes or stop > cluster.gpus:
            raise fail("RL0305", "the mesh extends beyond the cluster", ref.span,
                       f"the cluster has nodes 0:{cluster.nodes} and devices 0:{cluster.gpus}",
                       help="mesh(n0:n1, d0:d1) is nodes n0 to n1-1 and devices d0 to d1-1 of each")
        ranges = [(n * cluster.gpus + start, n * cluster.gpus + stop) for n in range(*ref.nodes)]
    mesh = mesh_of_set(union_of_ranges(ranges))
    if cluster.declared and not _check_mesh_shape(mesh, cluster.gpus):
        raise fail("RL0306", "a mesh must be whole nodes or an even fraction of one node", ref.span,
                   f"{counted(stop, 'rank')} on nodes of {cluster.gpus}" if ref.free else
                   f"ranks {mesh.id} on nodes of {cluster.gpus}",
                   help=f"use a multiple of {cluster.gpus}, or a number that divides it" if ref.free else
                        f"use whole nodes (a multiple of {cluster.gpus} ranks, starting at a node boundary), or "
                        f"consecutive ranks of one node whose number divides {cluster.gpus}")
    return mesh


def _check_mesh_shape(mesh: Mesh, gpus: int) -> bool:
    if len(mesh.ranks) != 1:
        return False
    start, stop = mesh.ranks[0]
    size = stop - start
    return (start % gpus == 0 and size % gpus == 0) or (start // gpus == (stop - 1) // gpus and gpus % size == 0)


def read_options(options: Sequence[Option]) -> dict[str, tuple[Scalar, Span]]:
    """Options by name, each of the right type, known, and given once."""
    found: dict[str, tuple[Scalar, Span]] = {}
    for name, value, span in options:
        if name not in OPTIONS:
            near = get_close_matches(name, OPTIONS, n=1)
            at = Span(span.file, span.start, span.start + len(name)) if span.text.startswith(name) else span
            raise Failure([Diagnostic(
                "RL0310", f"unknown placement option `{name}`", at, "not a placement option",
                help=f"did you mean `{near[0]}`?" if near else f"options: {', '.join(OPTIONS)}",
                fix=Fix(((at, near[0]),)) if near and at is not span else None)])
        if name in found:
            raise fail("RL0311", f"`{name}` is passed twice", span, "given again here", help="remove one of the two")
        least = 0 if name in ("mbs", "mbt", "zero") else 1
        right = (isinstance(value, bool) if name in SWITCHES else isinstance(value, str) if name == "backend"
                 else value in CHOICES[name] if name in CHOICES else type(value) is int and value >= least)
        if not right:
            wanted = {**dict.fromkeys(SWITCHES, "true or false"), "backend": 'a name such as "torch"',
                      **{k: f"{', '.join(v[:-1])} or {v[-1]}" for k, v in CHOICES.items()}
                      }.get(name, f"an integer of at least {least}")
            example = {"offload": "true", "keep": "false", "reuse": "true", "backend": "torch",
                       **{k: v[-1] for k, v in CHOICES.items()}}.get(name, max(least, 1))
            shown = str(value).lower() if isinstance(value, bool) else repr(value)
            raise fail("RL0311", f"`{name}` must be {wanted}", span, f"this is {shown}",
                       help=f"write `{name}={example}`")
        if name == "zero" and value not in range(4):
            raise fail("RL0311", "`zero` must be an integer from 0 to 3", span, f"this is {value!r}", help=ZERO)
        if name == "backend":
            check_backend_name(str(value), span)
        found[name] = (value, span)
    return found


def placement_of(choice: Choice, mesh: Mesh, family: Family | None, cluster: Cluster, call: str,
                 compute: bool = False) -> Placement:
    """The placement of one call, or of a computation, where dp=|mesh| always. family: None when no model directory has
    been read (`rlc check`). call: its name, for messages."""
    given = read_options(choice.options)
    size = mesh.size
    if compute:
        for name in ("tp", "pp", "vpp", "cp", "ep", "zero", "offload", "keep", "reuse", "mbs", "mbt", "recompute",
                     "waiting", "backend"):
            if name in given and given[name][0] not in NOTHING.get(name, (0, 1, "none")):
                raise fail("RL0311", f"`{name}` does not apply to a computation", given[name][1],
                           f"`{call}` does not run a model",
                           help="give only a mesh; rows are divided over all its ranks")
    degrees = {k: int(given[k][0]) for k in DEGREES if k in given}
    dp, tp, pp, cp = infer_degrees(degrees, size, mesh, choice, given, call)
    layout = layout_of(mesh, dp, tp, pp, cp, str(given.get("backend", (DEFAULT_BACKEND,))[0]),
                       int(given.get("zero", (0,))[0]), int(given.get("ep", (1,))[0]),
                       int(given.get("vpp", (1,))[0]))
    spans = {k: given[k][1] for k in (*DEGREES, "ep", "vpp") if k in given}
    check_experts(family, layout, spans, choice.span, call)
    check_sequences(family, layout, spans, choice.span, call)
    if family is not None:
        check_chunks(family, layout, spans, choice.span)
    if family is not None:
        check_family(family, tp, pp, cp, spans, choice.span, cluster, call)
    return Placement(mesh, layout, int(given.get("mbs", (0,))[0]), bool(given.get("offload", (False,))[0]), choice.span,
                     choice.why, "full" if given.get("recompute", ("none",))[0] == "full" else "none",
                     bool(given.get("keep", (True,))[0]),
                     reuse=bool(given.get("reuse", (False,))[0]), mbt=int(given.get("mbt", (0,))[0]),
                     waiting=cast(Waiting, given.get("waiting", ("keep",))[0]))


def infer_degrees(given: dict[str, int], size: int, mesh: Mesh, choice: Choice,
                  written: dict[str, tuple[Scalar, Span]], call: str) -> tuple[int, int, int, int]:
    """(dp, tp, pp, cp) whose product is `size`; one that is left out is inferred: dp first, else the only one
    missing of dp, tp and pp."""
    product = 1
    for value in given.values():
        product *= value
    missing = [k for k in INFERRED if k not in given]
    if product != size and missing and size % product == 0 and ("dp" in missing or len(missing) == 1):
        given = given | {("dp" if "dp" in missing else missing[0]): size // product}
        product = size
    if product != size:
        spans = [written[k][1] for k in DEGREES if k in written]
        sum_ = f"{' x '.join(str(given[k]) for k in DEGREES if k in given)} = {product} rank{'s' * (product != 1)}"
        where = choice.mesh.span if choice.mesh else None
        first = min(spans, key=lambda s: s.start)
        label = Label(where, f"{size} rank{'s' * (size != 1)}") if where else None
        raise Failure([Diagnostic(
            "RL0304", "degrees do not fill the mesh", first.to(max(spans, key=lambda s: s.end)), sum_,
            (label,) if label else (), (f"`{call}` runs on mesh {mesh.id}, {counted(size, 'rank')}",),
            _advice(given, size, missing), fix=_only_one(given, size, written))])
    return given.get("dp", 1), given.get("tp", 1), given.get("pp", 1), given.get("cp", 1)


def _only_one(given: dict[str, int], size: int, written: dict[str, tuple[Scalar, Span]]) -> Fix | None:
    """The one degree that another number would make right; None where two could be."""
    product = prod(given.values())
    fits = [k for k, v in given.items() if size % (product // v) == 0]
    if len(fits) != 1 or len(given) < 2 or not written[fits[0]][1].text.startswith(fits[0]):
        return None
    (name,) = fits
    return Fix(((written[name][1], f"{name}={size // (product // given[name])}"),))


def _advice(given: dict[str, int], size: int, missing: list[str]) -> str:
    rest = {k: v for k, v in given.items() if k != "dp"}
    other = 1
    for value in rest.values():
        other *= value
    if size % other == 0:
        degrees = " ".join(f"{k}={v}" for k, v in ({"dp": size // other} | rest).items())
        return f"`{degrees}` fills it" + (f"; or also give {' and '.join(missing)}" if len(missing) == 2 else "")
    return f"the product of {'dp, tp, pp and cp' if 'cp' in given else 'dp, tp and pp'} must be {size}"


def check_family(family: Family, tp: int, pp: int, cp: int, spans: dict[str, Span], span: Span, cluster: Cluster,
                 call: str) -> None:
    """tp, pp and cp against the model: heads, layers, what its config declares, and the size of a node."""
    if tp > 1:
        at = spans.get("tp", span)
        if family.tp_problem:
            raise fail("RL0307", f"{family.name} models do not support tensor parallelism here", at,
                       family.tp_problem, help=f"use tp=1 for {call}, with dp or pp instead")
        if family.heads % tp:
            raise fail("RL0307", "tp does not divide the attention heads", at,
                       f'"{family.path}" has {family.heads} heads',
                       help=f"tp must be one of {_divisors(family.heads)}")
        if family.kv_heads % tp and tp % family.kv_heads:
            raise fail("RL0307", "tp does not fit the number of key-value heads", at,
                       f'"{family.path}" has {family.kv_heads} key-value heads',
                       help=f"tp must divide {family.kv_heads} or be a multiple of it")
        if family.experts and tp > family.expert_width:
            raise fail("RL0307", "tp exceeds the width of an expert", at,
                       f'each expert of "{family.path}" has {family.expert_width} columns',
                       help=f"tp can be at most {family.expert_width}; to divide experts among ranks, use ep")
        if tp > cluster.gpus or cluster.gpus % tp:
            raise fail("RL0309", "a tensor-parallel group extends beyond a node", at,
                       f"a node has {cluster.gpus} device{'s' * (cluster.gpus > 1)}",
                       help=f"tp must divide {cluster.gpus}; dp and pp may span several nodes" if cluster.declared else
                       "the highest rank that a placement names says how many devices there are: declare them, for "
                       f"example `cluster gpus={-(-cluster.gpus // tp) * tp}`")
    if pp > 1:
        at = spans.get("pp", span)
        if family.pp_problem:
            raise fail("RL0308", f"{family.name} models do not support pipeline parallelism here", at,
                       family.pp_problem, help=f"use pp=1 for {call}")
        if pp > family.layers:
            raise fail("RL0308", "more pipeline stages than layers", at, f'"{family.path}" has {family.layers} layers',
                       help=f"pp can be at most {family.layers}")
        _check_image_layers(family, pp, at, "pipeline stages")


def check_sequences(family: Family | None, x: Layout, spans: dict[str, Span], span: Span, call: str) -> None:
    """cp against what a family needs of a sequence."""
    if x.cp == 1 or family is None or not (family.recurrent or family.by_rows or family.reads_images):
        return
    why = "its layers carry a state from token to token" if family.recurrent else family.by_rows or \
        "an image belongs to one rank"
    raise fail("RL0318", f"{family.name} models do not support context parallelism", spans.get("cp", span), why,
               help=f"use cp=1 for {call}, with dp or pp instead")


def check_experts(family: Family | None, x: Layout, spans: dict[str, Span], span: Span, call: str) -> None:
    """ep against the other degrees and, where it is known, the model."""
    if x.ep == 1:
        return
    at = spans.get("ep", span)
    if x.cp > 1:
        raise fail("RL0325", "ep and cp cannot be combined", at, f"combined with cp={x.cp}",
                   help=f"`{call}` can have ep or cp, not both: use cp=1, or remove ep")
    if family is not None and not family.experts:
        raise fail("RL0323", f"`{family.name}` models have no experts that ep can divide", at,
                   f"\"{family.path}\" has no mixture-of-experts layers in a supported form",
                   help="remove ep; use tp and pp, and zero in training")
    experts, path = (family.experts, family.path) if family is not None else (0, "")
    if x.dp % x.ep or experts % x.ep:
        what = "the dp degree" if x.dp % x.ep else "the experts"
        about = f"dp is {x.dp}" if x.dp % x.ep else f"\"{path}\" has {experts} experts per layer"
        raise fail("RL0324", f"ep does not divide {what}", at, about,
                   help=f"ranks along dp share the experts: ep must be one of {_divisors(gcd(x.dp, experts))}")


def check_chunks(family: Family, x: Layout, spans: dict[str, Span], span: Span) -> None:
    """Each chunk of layers must have one; how many stages there may be at all, `check_family` says."""
    if x.vpp > 1 and x.pp <= family.layers < x.pp * x.vpp:
        raise fail("RL0308", "more chunks of layers than layers", spans.get("vpp", span),
                   f"pp={x.pp} with {x.vpp} chunks each makes {x.pp * x.vpp} chunks; \"{family.path}\" has "
                   f"{family.layers} layers",
                   help=f"vpp can be at most {family.layers // x.pp} with pp={x.pp}")
    if x.vpp > 1:
        _check_image_layers(family, x.pp * x.vpp, spans.get("vpp", span), "chunks of layers")


def _check_image_layers(family: Family, count: int, at: Span, what: str) -> None:
    """The layers that read images are with the vision tower, and one more layer too. count: parts of the layers."""
    own = len(stage_layers(family.layers, count, 0))
    if 0 < family.layers_with_images >= own:
        raise fail("RL0308", f"too many {what} for the layers that read images", at,
                   f"the first {family.layers_with_images} layers and the next one must be in one part; the first "
                   f"part would have {own}", help="use a smaller pp or vpp")


def _divisors(number: int) -> str:
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)
