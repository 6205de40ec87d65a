"""Commands that look at a plan before it runs: show, diff, emit, verify, report."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from rldsl.cli.options import FILE, FOLDER, on_cluster
from rldsl.cli.printing import say
from rldsl.cli.shell import Settings, command, print_result, report_diagnostics
from rldsl.commands import Usage
from rldsl.diag import Failure, counted, fail
from rldsl.files import read_bytes
from rldsl.garbage_collection import never_collect


@command
@click.argument("plan", type=FILE)
@click.option("--rank", type=int, metavar="R", help="Show only the events of this rank.")
@click.option("--event", type=int, metavar="N",
              help="Show all details of one event: its ranks, its inputs and outputs, and why it exists.")
@click.option("--paths", "touched", is_flag=True,
              help="Show only the files that a run reads, the Python code that it runs, and where it writes.")
def show(settings: Settings, plan: str, rank: int | None, event: int | None, touched: bool) -> None:
    """Print PLAN as text or JSON. For the fields of the JSON, see docs/plans.md."""
    from rldsl.commands.show import show

    say(show(plan, rank, event, touched, settings.output == "json"))


@command
@click.argument("before", type=FILE, metavar="A.plan")
@click.argument("after", type=FILE, metavar="B.plan")
@click.option("--cluster", shell_complete=on_cluster, metavar="FILE|PRESET",
              help="Also predict the time of a step on this cluster.")
def diff(settings: Settings, before: str, after: str, cluster: str | None) -> int:
    """Show the differences between two plans. Compares calls, layouts, inserted events, bytes, memory and time.

    Exit status, as for diff(1): 0 if nothing differs, 1 if something does, 2 if the plans cannot be compared."""
    from rldsl.commands.diff import diff

    try:
        text, same = diff(before, after, cluster, settings.output == "json")
    except Failure as failure:
        report_diagnostics(failure.diagnostics, settings)
        return 2
    say(text)
    return int(not same)


def _rank(_: click.Context, __: click.Parameter, given: str) -> int | None:
    if given != "all" and not given.isdecimal():
        raise click.BadParameter(f"{given!r} is neither a rank nor `all`")
    return None if given == "all" else int(given)


@command
@click.argument("plan", type=FILE)
@click.option("--rank", required=True, metavar="R|all", callback=_rank, help="The rank to emit, or `all`.")
@click.option("-o", "target", type=FILE, metavar="FILE", help="Output file (default: standard output).")
def emit(settings: Settings, plan: str, rank: int | None, target: str | None) -> None:
    """Write PLAN as a Python program. It has one line per event, to run under torchrun and step through."""
    from rldsl.commands.emit import emit
    from rldsl.files import write

    text = emit(plan, rank, target)
    if target is None:
        print_result(settings, text, program=text)
        return
    write(target, text.encode())
    print_result(settings, f"wrote {target}", wrote=target)


@command
@click.argument("plan", type=FILE)
def verify(settings: Settings, plan: str) -> None:
    """Prove that PLAN can run. Checks that it cannot deadlock, that its data flow is sound, that it fits into memory,
    and that its models match their directories."""
    from rldsl.plan.codec import decode, plan_id
    from rldsl.verify import verify as prove
    from rldsl.verify.model_tables import check_model_tables

    never_collect()
    data = read_bytes(plan)
    decoded = decode(data, plan)
    proof = prove(decoded)
    models = check_model_tables(decoded)
    if models.faults:
        raise Failure(models.faults)
    lines = [f"ok {plan}  plan {plan_id(data)}  {counted(proof.events, 'event')}, {counted(proof.entries, 'entry')}: "
             f"{', '.join(proof.checks)}"]
    lines += [f"   {age}" for age in proof.ages]
    if models.compared:
        lines.append(f"   models compared with their directories: {', '.join(models.compared)}")
    lines += [f"   model {name} not compared: {path} cannot be read here; each rank that holds it compares it at its "
              "start" for name, path in models.unreadable]
    print_result(settings, "\n".join(lines), plan=plan, id=plan_id(data), events=proof.events, entries=proof.entries,
                 checks=proof.checks, ages=[asdict(age) for age in proof.ages], models_compared=models.compared,
                 models_not_compared=[name for name, _ in models.unreadable])


@command
@click.argument("plan", type=FILE, metavar="PLAN|RUN_DIR")
@click.option("-o", "target", type=FILE, metavar="FILE",
              help="Output file (default: PLAN with the extension .html, or report.html in RUN_DIR).")
@click.option("--cluster", shell_complete=on_cluster, metavar="CLUSTER",
              help="The cluster to simulate a step on: a cluster file or a built-in cluster (default: as many h100x8 "
                   "nodes as the plan needs).")
@click.option("--trace", type=FILE, metavar="FILE",
              help="A recorded timeline (`rlc run --trace`), to show next to the simulated one (default: trace.json in "
                   "RUN_DIR, if it exists).")
@click.option("--against", type=FOLDER, metavar="RUN_DIR", help="Another run, to show how it differs from this one.")
@click.option("--watch", is_flag=True, help="Keep writing the page while the run is active; the page reloads itself.")
@click.option("--every", type=click.IntRange(1), default=5, show_default=True, metavar="SECONDS",
              help="How often, with --watch.")
def report(settings: Settings, plan: str, target: str | None, cluster: str | None, trace: str | None,
           against: str | None, watch: bool, every: int) -> None:
    """Write a plan or a run as an HTML page. Of a plan: dataflow, time, memory, and the reason for each event. Of a run
    also its metrics, samples and settings."""
    from rldsl.commands.report_run import PAGE, is_run, run_page
    from rldsl.commands.report_run import watch as follow
    from rldsl.files import write

    if not is_run(plan):
        if against is not None or watch:
            if not os.path.exists(plan):
                raise fail("RL0091", f"no such directory: {plan}", place=plan,
                           help=f"it is there as soon as `rlc run PROGRAM --out {plan}` has started its ranks; `rlc "
                                "runs` lists what there is")
            read_bytes(plan)  # what cannot be read is neither a run nor a plan
            raise Usage(f"{'--watch' if watch else '--against'} needs the directory of a run as the first argument; "
                        f"`{plan}` is a file")
        from rldsl.commands.report import report

        target = target or f"{plan.removesuffix('.plan')}.html"
        write(target, report(plan, cluster, trace).encode())
        print_result(settings, f"wrote {target}", wrote=target)
        return
    made, file = run_page(plan, cluster, trace, against), target or str(Path(plan) / PAGE)
    if watch and made.running():
        if settings.output == "text":
            click.echo(f"writing {file} until the run ends (Ctrl-C stops writing)", err=True)
        follow(made, every, lambda text: write(file, text.encode()))
    else:
        write(file, made.html().encode())
    print_result(settings, f"wrote {file}", wrote=file)
