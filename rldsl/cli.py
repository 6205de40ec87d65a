"""`rlc`: the command line. Exit status: 0 ok, 1 errors in the program or the run, 2 usage, 3 a mistake of the compiler.
Warnings do not count, except with `rlc check --strict`.

Every command imports what it needs when it runs, so that `rlc --help` and `rlc check` stay quick.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Any

import click

from rldsl.commands import Usage
from rldsl.diag import Diagnostic, Failure

BUG = ("this is a mistake of the compiler, not of your program: "
       "please report it, with the program or plan and this message")


@dataclass(frozen=True, slots=True)
class Settings:
    output: str = "human"
    verbose: bool = False


def _say(text: str) -> None:
    click.echo(text, nl=not text.endswith("\n"))


def _colour(stream: Any) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def _report(diagnostics: Iterable[Diagnostic], settings: Settings) -> None:
    """Diagnostics to stderr (human) or stdout (for machines)."""
    from rldsl import report

    found = tuple(diagnostics)
    if settings.output == "json":
        _say(report.to_json(found))
    elif settings.output == "github":
        _say(report.to_github(found))
    else:
        click.echo(report.render(found, _colour(sys.stderr)).rstrip("\n"), err=True)


def _guarded(settings: Settings, body: Callable[[], int | None]) -> None:
    """Run a command; turn what it raises into messages and the exit status."""
    from rldsl.api import CompilerBug

    start = time.process_time()
    try:
        code = body() or 0
    except Failure as failure:
        _report(failure.diagnostics, settings)
        code = 1
    except KeyboardInterrupt:
        code = 130
    except Usage as error:
        raise click.UsageError(str(error)) from None
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if settings.verbose:
            import traceback

            traceback.print_exc()
        text = str(error) if isinstance(error, CompilerBug) else f"{type(error).__name__}: {error}"
        more = "" if settings.verbose else "\n(`rlc -v ...` shows the traceback)"
        click.echo(f"internal error: {text}\n{BUG}{more}", err=True)
        code = 3
    if settings.verbose:
        click.echo(f"{time.process_time() - start:.2f} s of CPU", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Choice(["human", "json", "github"]), default="human", show_default=True,
              help="How to show errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show timings, and tracebacks of internal errors.")
@click.version_option(package_name="rldsl", prog_name="rlc")
@click.pass_context
def main(context: click.Context, output: str, verbose: bool) -> None:
    """Compile, check, look at and run .rlf programs."""
    context.obj = Settings(output, verbose)
    if context.invoked_subcommand in ("check", "compile", "explain-placement", "fmt", "graph", "lsp", "run",
                                      "search", "sim", "profile"):
        from rldsl.syntax.parse import warm

        warm(_cache())


def _cache() -> Path:
    """Where the tables of the grammar are kept between starts."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "rldsl"


def _choose(context: click.Context, output: str | None) -> None:
    """`rlc check --output json` means what `rlc --output json check` does."""
    if output is not None:
        context.obj = replace(context.obj, output=output)


_output = click.option("--output", type=click.Choice(["human", "json", "github"]), expose_value=False,
                       callback=lambda context, _, value: _choose(context, value), help="How to show errors.")


def _command(body: Callable[..., int | None]) -> click.Command:
    """A command of `rlc`: what it raises becomes messages, what it returns the exit status; `--output` says how."""
    @wraps(body)
    def guarded(settings: Settings, **given: Any) -> None:
        _guarded(settings, lambda: body(settings, **given))

    return main.command()(_output(click.pass_obj(guarded)))


def _sets(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form name=value")
        if name.strip() in found:
            raise click.BadParameter(f"{name.strip()} is given twice")
        found[name.strip()] = value
    return found


_set = click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", callback=_sets,
                    help="Give a `param` of the program another value.")
_place = click.option("--place", metavar="FILE|MODE", help="A file of `place` rules; or who places the calls: "
                      "heuristic, search, or a pattern for all alike (d2p2t2, pipe_data, pipe_model).")
_on = click.option("--on", "overrides", multiple=True, metavar="RULE",
                   help='A placement rule, stronger than all others: "actor.train on mesh(0:4) dp=2 tp=2".')


@_command
@click.argument("file")
@_set
@_place
@_on
@click.option("-o", "target", metavar="PLAN", help="Where the plan goes (default: beside the program, as .plan).")
@click.option("--emit", type=click.Choice(["graph", "events", "plan"]), help="Print a stage of compilation instead.")
def compile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str | None, emit: str | None) -> None:
    """Compile FILE to a verified plan, and show what it will do."""
    from rldsl.commands import compile as work

    if emit and target:
        raise Usage("--emit prints a stage and writes no plan: leave -o out")
    _say(work.stage(emit, file, sets, place, overrides) if emit else
         work.compile(file, sets, place, overrides, target))


@_command
@click.argument("files", nargs=-1, required=True)
@_set
@_place
@_on
@click.option("--fix", is_flag=True, help="Apply the fixes that are sure, then check again.")
@click.option("--strict", is_flag=True, help="Warnings count as errors.")
def check(settings: Settings, files: tuple[str, ...], sets: dict[str, Any], place: str | None,
          overrides: tuple[str, ...], fix: bool, strict: bool) -> int:
    """Find the mistakes in FILES without writing a plan; needs no model."""
    from rldsl.commands.check import check

    done = {file: check(file, sets, place, fix, overrides) for file in dict.fromkeys(files)}
    found = tuple(d for now in done.values() for d in now.found)
    for file, now in done.items():
        if now.mended:
            click.echo(f"{file}: {now.mended} mistake{'s' * (now.mended > 1)} mended", err=True)
    if found or settings.output == "json":
        _report(found, settings)
    for file, now in done.items() if settings.output == "human" else ():
        if now.sure and not fix:
            click.echo(f"\n`rlc check --fix {file}` mends {now.sure} of {len(now.found)}", err=True)
        if not now.errors:
            count = len(now.found)
            _say(f"{file}: no mistakes found" + (f", {count} warning{'s' * (count > 1)}" if count else ""))
    return int(any(now.errors > 0 for now in done.values()) or strict and bool(found))


@_command
def lsp(settings: Settings) -> int:
    """Speak to an editor: the language server, on standard input and output."""
    from rldsl.commands.lsp import serve

    serve()
    return 0


@_command
@click.argument("files", nargs=-1, required=True)
@click.option("--check", "ask", is_flag=True, help="Write nothing; name what would change, exit with 1 if anything.")
@click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
def fmt(settings: Settings, files: tuple[str, ...], ask: bool, diff: bool) -> int:
    """Put FILES into the one form: programs, directories of programs, or - (standard input to standard output)."""
    from rldsl.files import write
    from rldsl.commands.fmt import SHOWN, STDIN, formatted

    done, broken = formatted(files, sys.stdin.buffer.read() if STDIN in files else b"")
    if broken:
        _report(broken, settings)
    changed = [one for one in done if one.changed]
    for one in changed if ask or diff else done:
        if ask or diff:
            _say(one.diff if diff else one.path)
        elif one.path == SHOWN:
            click.echo(one.after, nl=False)
        elif one.changed:
            write(one.path, one.after.encode(), "")
    return int(bool(broken) or ask and bool(changed))


@_command
@click.argument("name", required=False)
@click.option("-o", "target", metavar="FILE", help="Where the program goes (default: NAME.rlf; - is standard output).")
@click.option("--force", is_flag=True, help="Overwrite the program if it is there.")
def new(settings: Settings, name: str | None, target: str | None, force: bool) -> None:
    """Write a commented program to begin with; without NAME, list what there is."""
    from rldsl.commands import new as work
    from rldsl.files import write

    if name is None:
        if target or force:
            raise Usage("NAME is missing: which program is written? `rlc new` lists them")
        return _say(work.listing())
    if target == "-" and force:
        raise Usage("--force overwrites a file, and `-o -` writes none")
    if target == "-":
        return _say(work.program(name))
    made = work.files(name, target, force)
    for path, text in made:
        write(path, text.encode())
    _say(f"wrote {' and '.join(path for path, _ in made)}; next: rlc check {made[0][0]}")


@_command
@click.argument("code", required=False)
def explain(settings: Settings, code: str | None) -> None:
    """What a message means, by its CODE; without one, all codes."""
    from rldsl import explain as pages
    from rldsl.explain.show import listing, show

    if code is None:
        return _say(listing(pages.codes()))
    page = pages.page(pages.normal(code))
    if page is None:
        near = ", ".join(pages.nearest(pages.normal(code)))
        raise Usage(f"there is no code {code!r}; " + (f"did you mean {near}?" if near else "`rlc explain` lists all"))
    _say(show(page, _colour(sys.stdout)))


@_command
@click.argument("plan")
@click.option("--rank", type=int, metavar="R", help="Only what this rank does.")
@click.option("--event", type=int, metavar="N", help="One event in full: who takes part, what it touches, and why.")
@click.option("--paths", "touched", is_flag=True, help="Only what a run reads, which Python it runs, where it writes.")
@click.option("--json", "as_json", is_flag=True, help="For programs (docs/plans.md describes it).")
def show(settings: Settings, plan: str, rank: int | None, event: int | None, touched: bool, as_json: bool) -> None:
    """Print PLAN as text."""
    from rldsl.commands.show import show

    _say(show(plan, rank, event, touched, as_json))


@_command
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
        _report(failure.diagnostics, settings)
        return 2
    _say(text)
    return int(not same)


def _rank(_: click.Context, __: click.Parameter, given: str) -> int | None:
    if given != "all" and not given.isdecimal():
        raise click.BadParameter(f"{given!r} is neither a rank nor `all`")
    return None if given == "all" else int(given)


@_command
@click.argument("plan")
@click.option("--rank", required=True, metavar="R|all", callback=_rank, help="Whose list; `all`: everyone's.")
@click.option("-o", "target", metavar="FILE", help="Where the program goes (default: standard output).")
def emit(settings: Settings, plan: str, rank: int | None, target: str | None) -> None:
    """Write PLAN as a Python program, one line an event, to be run under torchrun and stepped through."""
    from rldsl.commands.emit import emit
    from rldsl.files import write

    text = emit(plan, rank, target)
    if target is None:
        return _say(text)
    write(target, text.encode())
    _say(f"wrote {target}")


@_command
@click.argument("plan")
def verify(settings: Settings, plan: str) -> None:
    """Prove that PLAN can run."""
    from rldsl import api
    from rldsl.plan.codec import decode, plan_id
    from rldsl.plan.verify import verify as prove

    data = api.read_bytes(plan)
    proof = prove(decode(data, plan))
    _say(f"ok {plan}  plan {plan_id(data)}  {proof.events} events, {proof.entries} entries: {', '.join(proof.checks)}")


@_command
@click.argument("file")
@_set
@_place
@_on
@click.option("--format", "form", type=click.Choice(["mermaid", "dot", "svg"]), default="mermaid", show_default=True)
def graph(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
          form: str) -> None:
    """Draw the dataflow graph of FILE."""
    from rldsl.commands.graph import draw

    _say(draw(form, file, sets, place, overrides))


@_command
@click.argument("file", metavar="FILE", required=False)
@_set
@_place
@_on
@click.option("--out", default="runs/out", show_default=True, metavar="DIR", help="Where logs and checkpoints go.")
@click.option("--resume", is_flag=False, flag_value="", metavar="[DIR]", help="Go on from the newest checkpoint of the "
              "run DIR, or from the checkpoint DIR (without a value: of the run in OUT).")
@click.option("--trace", metavar="FILE", help="Write the recorded timeline to this file (Chrome trace JSON).")
@click.option("--nproc", type=click.IntRange(1), help="Processes to start; must be what the plan needs.")
@click.option("--reward-workers", type=click.IntRange(0), metavar="N", help="Processes in which each rank calls Python "
              "functions; 0: in its own, without a limit.")
@click.option("--reward-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS", help="That a Python "
              "function may take for one row (default: 60).")
@click.option("--allow-write", multiple=True, metavar="DIR",
              help="Let the program save models there too, outside --out and the working directory.")
@click.option("--overwrite", is_flag=True, help="Remove the run that OUT holds.")
@click.option("--tensorboard", is_flag=True, help="Write the metrics for TensorBoard too, under OUT/tensorboard.")
@click.option("--wandb", is_flag=False, flag_value="online", type=click.Choice(["offline", "online"]),
              help="Write the metrics for Weights & Biases too (without a value: online).")
@click.option("--log-samples", type=click.IntRange(0), default=0, metavar="N", help="Write so many sampled sequences "
              "of each step as text, under OUT/samples.")
@click.option("--plain", is_flag=True, help="Show a line for each step, even on a terminal.")
def run(settings: Settings, file: str | None, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
        out: str, resume: str | None, trace: str | None, nproc: int | None, reward_workers: int | None,
        reward_timeout: float | None, allow_write: tuple[str, ...], overwrite: bool, tensorboard: bool,
        wandb: str | None, log_samples: int, plain: bool) -> int:
    """Compile FILE (or take a plan) and run it on this machine, one process for each rank."""
    from rldsl.commands.run import run

    if file is None and resume:  # `--resume ppo.rlf`: the option took the program for its value
        file, resume = resume, ""
    if file is None:
        raise Usage("FILE is missing: a program or a plan")
    numbers = {"--reward-workers": reward_workers, "--reward-timeout": reward_timeout, "--wandb": wandb,
               "--log-samples": log_samples or None}
    flags = {"--tensorboard": tensorboard, "--plain": plain}
    return run(file, sets, place, overrides, out, trace, nproc, resume, overwrite,
               [*(f"{option}={value}" for option, value in numbers.items() if value is not None),
                *(option for option, given in flags.items() if given),
                *(f"--allow-write={directory}" for directory in allow_write)], lambda text: click.echo(text, err=True))


@_command
@click.argument("file")
@_set
@_place
@_on
@click.option("-o", "target", default="profile.yaml", show_default=True, metavar="FILE", help="Where the numbers go.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]),
              help="What to measure (default: cuda where there is one).")
@click.option("--fresh", is_flag=True, help="Measure again what was measured before.")
def profile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str, device: str | None, fresh: bool) -> None:
    """Measure this machine and the models of FILE on it, for `rlc sim --cluster`."""
    from rldsl.commands.profile import profile as work

    _say(work(file, sets, place, overrides, target, _cache(), device, fresh))


@_command
@click.argument("file")
@click.option("--cluster", required=True, metavar="CLUSTER", help="A cluster's file, or a known one: h100x8, h100x64.")
@_set
@_place
@_on
@click.option("--prompt-tokens", type=click.FloatRange(0, min_open=True), help="Mean tokens of a prompt (default: the "
              "most).")
@click.option("--response-tokens", type=click.FloatRange(0, min_open=True), help="Mean tokens of a response (default: "
              "the most).")
@click.option("--longest", type=click.FloatRange(0, min_open=True), help="Tokens of the longest response of a batch "
              "(default: the most).")
@click.option("--lengths", "like", metavar="RUN_DIR", help="Take the means from the metrics of an earlier run.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--trace", metavar="FILE", help="Write the timeline of the step to this file (Chrome trace JSON).")
def sim(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
        overrides: tuple[str, ...], prompt_tokens: float | None, response_tokens: float | None, longest: float | None,
        like: str | None, as_json: bool, trace: str | None) -> None:
    """How long a step of FILE (a plan or a program) takes on a cluster, and why."""
    from rldsl.commands.sim import sim as work
    from rldsl.simulate import Lengths

    lengths = Lengths(prompt_tokens or 0.0, response_tokens or 0.0, longest or 0.0)
    _say(work(file, cluster, sets, place, overrides, lengths, like, as_json, trace))


def _asked(body: Callable[..., Any]) -> Callable[..., Any]:
    """What `search` and `explain-placement` are told."""
    for option in reversed((
            click.argument("file"),
            click.option("--cluster", required=True, metavar="CLUSTER", help="A cluster's file, or a known one: "
                         "h100x64."),
            _set, _place, _on,
            click.option("--seconds", type=click.FloatRange(0, min_open=True), default=None, help="Of the processor, "
                         "after which the search ends with what it has."),
            click.option("--memory", type=click.FloatRange(0, min_open=True), help="GB of a device (default: as the "
                         "cluster says)."),
            click.option("--gap", type=click.FloatRange(0), default=0.01, show_default=True, help="How far from the "
                         "bound is good enough; 0: the best there is."),
            click.option("--prompt-tokens", type=click.FloatRange(0, min_open=True), help="Mean tokens of a prompt "
                         "(default: the most)."),
            click.option("--response-tokens", type=click.FloatRange(0, min_open=True), help="Mean tokens of a response "
                         "(default: the most)."),
            click.option("--longest", type=click.FloatRange(0, min_open=True), help="Tokens of the longest response of "
                         "a batch (default: the most)."),
            click.option("--json", "as_json", is_flag=True, help="For programs."))):
        body = option(body)
    return body


@_command
@_asked
@click.option("-o", "target", metavar="FILE", help="Where the placement goes (default: FILE with .place.rlf).")
@click.option("--lock", "locks", multiple=True, metavar="CALL", help="Keep the program's placement of these calls: "
              "actor.generate, ref.*.")
def search(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
           overrides: tuple[str, ...], seconds: float | None, memory: float | None, gap: float,
           prompt_tokens: float | None, response_tokens: float | None, longest: float | None, as_json: bool,
           target: str | None, locks: tuple[str, ...]) -> None:
    """Find the placement of FILE that makes a step shortest on a cluster, and prove how good it is."""
    from rldsl.commands import search as work
    from rldsl.simulate import Lengths

    lengths = Lengths(prompt_tokens or 0.0, response_tokens or 0.0, longest or 0.0)
    asked = work.Asked(file, cluster, sets, place, overrides, locks, seconds or 0.0, memory or 0.0, gap, lengths)
    _say(work.search(asked, target or work.target_of(file), as_json, lambda text: click.echo(text, err=True)))


@_command
@_asked
def explain_placement(settings: Settings, file: str, cluster: str, sets: dict[str, Any], place: str | None,
                      overrides: tuple[str, ...], seconds: float | None, memory: float | None, gap: float,
                      prompt_tokens: float | None, response_tokens: float | None, longest: float | None,
                      as_json: bool) -> None:
    """Why not the placement that FILE, --place and --on say: its time and memory, and what makes it slower than the
    best."""
    from rldsl.commands import search as work
    from rldsl.simulate import Lengths

    lengths = Lengths(prompt_tokens or 0.0, response_tokens or 0.0, longest or 0.0)
    asked = work.Asked(file, cluster, sets, place, overrides, (), seconds or 0.0, memory or 0.0, gap, lengths)
    _say(work.explain(asked, as_json, lambda text: click.echo(text, err=True)))


@_command
@click.argument("plan")
@click.option("-o", "target", metavar="FILE", help="Where the page goes (default: PLAN with .html for .plan).")
@click.option("--cluster", metavar="CLUSTER", help="A cluster's file, or a known one, to simulate a step on (default: "
              "as many nodes of h100x8 as PLAN needs).")
@click.option("--trace", metavar="FILE", help="A recorded timeline of PLAN (`rlc run --trace`), to stand beside the "
              "simulated one.")
def report(settings: Settings, plan: str, target: str | None, cluster: str | None, trace: str | None) -> None:
    """Write PLAN as a page for a browser: dataflow, time, memory, and why each event is there."""
    from rldsl.files import write
    from rldsl.commands.report import report

    target = target or f"{plan.removesuffix('.plan')}.html"
    write(target, report(plan, cluster, trace).encode())
    _say(f"wrote {target}")


@_command
@click.argument("folder", metavar="[DIR]", default="runs")
def runs(settings: Settings, folder: str) -> None:
    """List the runs below DIR (default: runs): how far each is, and its last reward."""
    from rldsl.commands.runs import listing

    _say(listing(folder))


@_command
@click.argument("folder", metavar="DIR")
@click.option("--plan", metavar="PLAN", help="The plan of the run, where DIR does not hold it.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def postmortem(settings: Settings, folder: str, plan: str | None, as_json: bool) -> None:
    """Why the run in DIR stood still: where its ranks were, and who waited for whom."""
    from rldsl.commands.postmortem import postmortem as work

    _say(work(folder, plan, as_json))


@_command
@click.argument("folders", metavar="RUN_DIR...", nargs=-1, required=True)
@click.option("-o", "target", metavar="FILE", help="An .svg or .png file (default: metrics.svg in the first RUN_DIR).")
@click.option("--metric", "patterns", multiple=True, metavar="NAME", help='A metric, or some: "actor/*".')
def plot(settings: Settings, folders: tuple[str, ...], target: str | None, patterns: tuple[str, ...]) -> None:
    """Draw the metrics of a run, or of several over each other: reward, KL, loss, lengths."""
    from rldsl.commands.plot import plot

    target = target or str(Path(folders[0]) / "metrics.svg")
    names = plot(folders, target, patterns)
    _say(f"wrote {target}: {', '.join(names)}")


if __name__ == "__main__":
    main()
