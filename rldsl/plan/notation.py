"""How ranks and layouts are written for a person, the same everywhere.

In: ranks or ranges of them, and layouts. Out: short texts. Ranges are never expanded: a text of two ranges costs the
same for 8 ranks and for 10,240.
"""

from __future__ import annotations

from collections.abc import Iterable

from rldsl.plan.model import DEFAULT_BACKEND, Layout, Mesh, Ranges
from rldsl.plan.projection import to_ranges


def ranks_text(ranks: Iterable[int]) -> str:
    """0,1,2,5 -> "0-2,5"."""
    return ranges_text(to_ranges(ranks))


def ranges_text(ranges: Ranges) -> str:
    """(0, 3), (5, 6) -> "0-2,5"."""
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in joined(ranges))


def mesh_text(ranges: Ranges) -> str:
    """As a program writes it, "mesh(0:8)"; ranks that are not one run, which a program writes by nodes and devices:
    "ranks 0-3,8-11"."""
    runs = joined(ranges)
    return f"mesh({runs[0][0]}:{runs[0][1]})" if len(runs) == 1 else f"ranks {ranges_text(runs)}"


def count(ranges: Ranges) -> int:
    """How many ranks."""
    return sum(stop - start for start, stop in ranges)


def joined(ranges: Ranges) -> Ranges:
    """The same ranks in the same order, in as few ranges as possible: (0, 4), (4, 8) -> (0, 8)."""
    runs: list[tuple[int, int]] = []
    for start, stop in ranges:
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], stop)
        else:
            runs.append((start, stop))
    return tuple(runs)


def degrees_text(dp: int = 1, tp: int = 1, pp: int = 1, cp: int = 1, zero: int = 0, ep: int = 1,
                 vpp: int = 1) -> str:
    """"dp=4 pp=2"; "dp=1" when nothing is divided."""
    degrees = (("dp", dp, 1), ("tp", tp, 1), ("pp", pp, 1), ("vpp", vpp, 1), ("cp", cp, 1), ("ep", ep, 1),
               ("zero", zero, 0))
    return " ".join(f"{name}={n}" for name, n, none in degrees if n > none) or "dp=1"


def degrees_of(layout: Layout) -> str:
    """The same of a layout, with its backend where it is not the usual one."""
    degrees = degrees_text(layout.dp, layout.tp, layout.pp, layout.cp, layout.zero, layout.ep, layout.vpp)
    return degrees if layout.backend == DEFAULT_BACKEND else f"{degrees} backend={layout.backend}"


def layout_text(layout: Layout, mesh: Mesh) -> str:
    """Where and how a call runs: "mesh(0:8) dp=4 pp=2"."""
    return f"{mesh_text(mesh.ranks)} {degrees_of(layout)}"


def human(bytes: int) -> str:
    """Bytes in binary units: 1536 -> "1.5 KiB". -1, known at run time only, is "?"."""
    if bytes < 0:
        return "?"
    size = float(bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def cut(text: str, room: int) -> str:
    """At most `room` letters, with an ellipsis where some are left out."""
    return text if len(text) <= room else text[: max(room - 1, 0)] + "…"


def seconds_text(seconds: float) -> str:
    """Three digits and a unit: 0.0123 -> "12.3 ms"."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if abs(seconds) * factor >= 0.9995:
            return f"{_three(seconds * factor)} {unit}"
    return f"{_three(seconds * 1e6)} µs" if seconds else "0 s"


def _three(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
