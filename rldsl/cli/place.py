"""Commands about step time and placement: profile, sim, search, explain-placement."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from rldsl.cli.options import (
    FILE,
    FOLDER,
    FiniteRange,
    chosen,
    chosen_for_search,
    jobs_of_search,
    lengths,
    on_cluster,
    seconds_by_name,
    together,
)
from rldsl.cli.printing import say
from rldsl.cli.shell import Settings, command, print_result

if TYPE_CHECKING:
    from rldsl.simulate import Lengths


@command
@click.argument("file", type=FILE)
@chosen
@click.option("-o", "target", type=FILE, default="profile.yaml", show_default=True, metavar="FILE", help="Output file.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="Device to measure (default: cuda if available).")
@click.option("--tp", "degrees", multiple=True, type=click.IntRange(1), metavar="N",
              help="Also measure the models with this degree of tensor parallelism, if they support it, for "
                   "`rlc search`; repeatable.")
@click.option("--fresh", is_flag=True, help="Measure everything again, including cached measurements.")
def profile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str, device: str | None, degrees: tuple[int, ...], fresh: bool) -> None:
    """Measure this machine and the models of FILE. The result is a cluster file for `rlc sim` and `rlc search`."""
    from rldsl.commands.profile import profile as work
    from rldsl.files import cache_folder

    print_result(settings, work(file, sets, place, overrides, target, cache_folder(), device, fresh, degrees),
                 wrote=target)


@command
@click.argument("file", type=FILE)
@click.option("--cluster", shell_complete=on_cluster, required=True, metavar="CLUSTER",
              help="A cluster file, or a built-in cluster such as h100x8 or h100x64.")
@chosen
@lengths
@click.option("--lengths", "like", type=FOLDER, metavar="RUN_DIR",
              help="Take the mean lengths from the metrics of an earlier run.")
@click.option("--duration", "durations", multiple=True, metavar="CALL=SECONDS", callback=seconds_by_name,
              help="Seconds that a call is known to take, such as actor.generate=321, instead of a prediction; "
                   "repeatable.")
@click.option("--trace", type=FILE, metavar="FILE",
              help="Write the timeline of the step to this file (Chrome trace JSON).")
def sim(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
        overrides: tuple[str, ...], lengths: Lengths, like: str | None, durations: dict[str, float],
        trace: str | None) -> None:
    """Predict the step time of FILE on a cluster. FILE is a plan or a program. Also reports what limits the time."""
    from rldsl.commands.sim import sim as work

    say(work(file, cluster, sets, place, overrides, lengths, like, durations, settings.output == "json", trace))


_asked = together(
    click.argument("file", type=FILE),
    click.option("--cluster", shell_complete=on_cluster, required=True, metavar="CLUSTER",
                 help="A cluster file, or a built-in cluster such as h100x64."),
    chosen_for_search,
    click.option("--seconds", type=FiniteRange(0, min_open=True), default=None, metavar="SECONDS",
                 help="CPU seconds after which the search stops and reports its best result."),
    click.option("--memory", type=FiniteRange(1e-9, 1e9), metavar="GB",
                 help="Memory per device in GB (default: from the cluster)."),
    click.option("--gap", type=FiniteRange(0), default=0.01, show_default=True, metavar="FRACTION",
                 help="Accepted gap of the estimated step to the lower bound; 0 searches until the optimum is proved."),
    jobs_of_search,
    lengths)


@command
@_asked
@click.option("-o", "target", type=FILE, metavar="FILE",
              help="Output file (default: FILE with the extension .place.rlf).")
@click.option("--lock", "locks", multiple=True, metavar="CALL",
              help="Keep the program's placement of these calls, for example actor.generate or ref.*; repeatable.")
def search(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
           overrides: tuple[str, ...], seconds: float | None, memory: float | None, gap: float, jobs: int,
           lengths: Lengths, target: str | None, locks: tuple[str, ...]) -> None:
    """Find the fastest placement of FILE on a cluster. Also proves a lower bound on the step time."""
    from rldsl.commands import search as work

    asked = work.SearchRequest(file, cluster, sets, place, overrides, locks, seconds or 0.0, memory or 0.0, gap,
                               lengths, jobs)
    say(work.search(asked, target or work.default_target(file), settings.output == "json"))


@command
@_asked
def explain_placement(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
                      overrides: tuple[str, ...], seconds: float | None, memory: float | None, gap: float,
                      jobs: int, lengths: Lengths) -> None:
    """Compare a placement of FILE with the best one. The placement is that of FILE, --place and --on. Reports time,
    memory, and why it is slower than the best one."""
    from rldsl.commands import search as work

    asked = work.SearchRequest(file, cluster, sets, place, overrides, (), seconds or 0.0, memory or 0.0, gap, lengths,
                               jobs)
    say(work.explain(asked, settings.output == "json"))
