"""Commands that look at a plan before it runs: show, diff, emit, verify, report."""

from __future__ import annotations

import click

from rldsl.cli.shell import Settings, command, report_diagnostics, say
from rldsl.diag import Failure


@command
@click.argument("plan")
@click.option("--rank", type=int, metavar="R", help="Only what this rank does.")
@click.option("--event", type=int, metavar="N", help="One event in full: who takes part, what it touches, and why.")
@click.option("--paths", "touched", is_flag=True, help="Only what a run reads, which Python it runs, where it writes.")
@click.option("--json", "as_json", is_flag=True, help="For programs (docs/plans.md describes it).")
def show(settings: Settings, plan: str, rank: int | None, event: int | None, touched: bool, as_json: bool) -> None:
    """Print PLAN as text."""
    from rldsl.commands.show import show

    say(show(plan, rank, event, touched, as_json))


@command
@click.argument("before", metavar="A.plan")
@click.argument("after", metavar="B.plan")
@click.option("--cluster", metavar="FILE|PRESET", help="Predict the time of a step on these machines, too.")
@click.option("--json", "as_json", is_flag=True, help="For programs (docs/plans.md describes it).")
def diff(settings: Settings, before: str, after: str, cluster: str | None, as_json: bool) -> int:
    """What changed from A.plan to B.plan: calls, layouts, inserted events, bytes, memory, time.

    Exit status as diff(1): 0 nothing changed, 1 something did, 2 a file that cannot be compared."""
    from rldsl.commands.diff import diff

    try:
        text, same = diff(before, after, cluster, as_json)
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
@click.argument("plan")
@click.option("--rank", required=True, metavar="R|all", callback=_rank, help="Whose list; `all`: everyone's.")
@click.option("-o", "target", metavar="FILE", help="Where the program goes (default: standard output).")
def emit(settings: Settings, plan: str, rank: int | None, target: str | None) -> None:
    """Write PLAN as a Python program, one line an event, to be run under torchrun and stepped through."""
    from rldsl.commands.emit import emit
    from rldsl.files import write

    text = emit(plan, rank, target)
    if target is None:
        say(text)
        return
    write(target, text.encode())
    say(f"wrote {target}")


@command
@click.argument("plan")
def verify(settings: Settings, plan: str) -> None:
    """Prove that PLAN can run."""
    from rldsl import api
    from rldsl.plan.codec import decode, plan_id
    from rldsl.verify import verify as prove

    data = api.read_bytes(plan)
    proof = prove(decode(data, plan))
    say(f"ok {plan}  plan {plan_id(data)}  {proof.events} events, {proof.entries} entries: {', '.join(proof.checks)}")


@command
@click.argument("plan")
@click.option("-o", "target", metavar="FILE", help="Where the page goes (default: PLAN with .html for .plan).")
@click.option("--cluster", metavar="CLUSTER", help="A cluster's file, or a known one, to simulate a step on (default: "
              "as many nodes of h100x8 as PLAN needs).")
@click.option("--trace", metavar="FILE", help="A recorded timeline of PLAN (`rlc run --trace`), to stand beside the "
              "simulated one.")
def report(settings: Settings, plan: str, target: str | None, cluster: str | None, trace: str | None) -> None:
    """Write PLAN as a page for a browser: dataflow, time, memory, and why each event is there."""
    from rldsl.commands.report import report
    from rldsl.files import write

    target = target or f"{plan.removesuffix('.plan')}.html"
    write(target, report(plan, cluster, trace).encode())
    say(f"wrote {target}")
