"""`rlc`: the command line. Exit status: 0 ok, 1 errors in the program or the run, 2 usage, 3 a mistake of the compiler.

Every command imports what it needs when it runs, so that `rlc --help` and `rlc check` stay quick.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from rldsl.diag import Diagnostic, Failure

BUG = "this is a mistake of the compiler, not of your program: please report it, with the program and this message"


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


def _sets(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise click.BadParameter(f"{text!r} is not of the form name=value")
        found[name.strip()] = value
    return found


_set = click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", callback=_sets,
                    help="Give a `param` of the program another value.")
_place = click.option("--place", metavar="FILE", help="A file of `place` rules.")
_on = click.option("--on", "overrides", multiple=True, metavar="RULE",
                   help='A placement rule, stronger than all others: "actor.train on mesh(0:4) dp=2 tp=2".')


@main.command()
@click.argument("file")
@_set
@_place
@_on
@click.option("-o", "target", metavar="PLAN", help="Where the plan goes (default: beside the program, as .plan).")
@click.option("--emit", type=click.Choice(["graph", "events", "plan"]), help="Print a stage of compilation instead.")
@click.pass_obj
def compile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str | None, emit: str | None) -> None:
    """Compile FILE to a verified plan, and show what it will do."""
    def body() -> None:
        from rldsl import api

        if emit == "graph":
            from rldsl.graph.picture import text

            rules = api.read_source(place) if place else None
            return _say(text(api.build_graph(api.read_source(file), sets, rules, overrides)))
        events = api.draft(file, sets, place, overrides)
        if emit == "events":
            from rldsl.passes.show import show

            return _say(show(events))
        compiled = api.finish(events)
        if emit == "plan":
            from rldsl.plan.show import show as show_plan

            return _say(show_plan(compiled.plan))
        from rldsl.plan.codec import encode
        from rldsl.preview import preview

        data = encode(compiled.plan)
        path = target or str(Path(file).with_suffix(".plan"))
        _write(path, data)
        _say(preview(compiled, file, path, data))

    _guarded(settings, body)


def _write(path: str, data: bytes) -> None:
    """All or nothing: a plan is never half written."""
    from rldsl.diag import fail

    part = Path(f"{path}.part")
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError as error:
        raise fail("RL0094", f"cannot write {path}: {error.strerror}", place=path,
                   help="choose another place with -o") from None


@main.command()
@click.argument("file")
@_set
@_place
@click.pass_obj
def check(settings: Settings, file: str, sets: dict[str, Any], place: str | None) -> None:
    """Find the mistakes in FILE without writing a plan; needs no model."""
    def body() -> int:
        from rldsl import api

        source = api.read_source(file)
        found = api.check(source.text, source.name, sets=sets, place=api.read_source(place) if place else None)
        if found or settings.output == "json":
            _report(found, settings)
        elif settings.output == "human":
            _say(f"{file}: no mistakes found")
        return int(any(d.severity == "error" for d in found))

    _guarded(settings, body)


@main.command()
@click.argument("plan")
@click.option("--rank", type=int, help="Only what this rank does.")
@click.option("--event", type=int, help="One event in full.")
@click.pass_obj
def show(settings: Settings, plan: str, rank: int | None, event: int | None) -> None:
    """Print PLAN as text."""
    def body() -> None:
        from rldsl import api
        from rldsl.plan.show import show as text

        _say(text(api.read_plan(plan), rank, event))

    _guarded(settings, body)


@main.command()
@click.argument("plan")
@click.pass_obj
def verify(settings: Settings, plan: str) -> None:
    """Prove that PLAN can run."""
    def body() -> None:
        from rldsl import api
        from rldsl.plan.codec import decode, plan_id
        from rldsl.plan.verify import verify as prove

        data = api.read_bytes(plan)
        proof = prove(decode(data, plan))
        _say(f"ok {plan}  plan {plan_id(data)}  {proof.events} events, {proof.entries} entries: "
             f"{', '.join(proof.checks)}")

    _guarded(settings, body)


@main.command()
@click.argument("file")
@_set
@_place
@click.option("--format", "form", type=click.Choice(["mermaid", "dot", "svg"]), default="mermaid", show_default=True)
@click.pass_obj
def graph(settings: Settings, file: str, sets: dict[str, Any], place: str | None, form: str) -> None:
    """Draw the dataflow graph of FILE."""
    def body() -> None:
        from rldsl import api
        from rldsl.diag import fail
        from rldsl.graph import picture

        made = api.build_graph(api.read_source(file), sets, api.read_source(place) if place else None)
        if form == "mermaid":
            return _say(picture.mermaid(made))
        if form == "dot":
            return _say(picture.dot(made))
        import shutil
        import subprocess

        program = shutil.which("dot")
        if program is None:
            raise fail("RL0095", "SVG needs Graphviz, and there is no `dot` program here", place=file,
                       help="install Graphviz, or use --format mermaid or dot")
        _say(subprocess.run([program, "-Tsvg"], input=picture.dot(made), text=True, capture_output=True,
                            check=True).stdout)

    _guarded(settings, body)


@main.command()
@click.argument("file")
@_set
@_place
@_on
@click.option("--out", default="runs/out", show_default=True, metavar="DIR", help="Where logs and checkpoints go.")
@click.option("--trace", metavar="FILE", help="Write the recorded timeline to this file (Chrome trace JSON).")
@click.option("--nproc", type=click.IntRange(1), help="Processes to start; must be what the plan needs.")
@click.pass_obj
def run(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...], out: str,
        trace: str | None, nproc: int | None) -> None:
    """Compile FILE (or take a plan) and run it on this machine, one process for each rank."""
    def body() -> int:
        import tempfile

        from rldsl import api
        from rldsl.diag import fail
        from rldsl.plan.codec import encode

        with tempfile.TemporaryDirectory(prefix="rlc-") as folder:
            if file.endswith(".plan"):
                if sets or place or overrides:
                    raise click.UsageError("a plan is fixed: give --set, --place and --on when compiling it")
                plan, path = api.read_plan(file), file
            else:
                plan = api.compile(file, sets, place, overrides)
                path = str(Path(folder) / f"{Path(file).stem}.plan")
                Path(path).write_bytes(encode(plan))
            world = plan.header.world
            if nproc not in (None, world):
                raise fail("RL0096", f"the plan is for {world} rank{'s' * (world > 1)}, not {nproc}", place=file,
                           help=f"leave --nproc out, or write --nproc {world}")
            return _launch(path, world, out, trace)

    _guarded(settings, body)


def _launch(plan: str, world: int, out: str, trace: str | None) -> int:
    """Start the ranks and wait for them; Ctrl-C reaches them too, and they get time to stop."""
    import subprocess

    environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))} | os.environ
    command = [sys.executable, "-m", "rldsl.runtime.launch", "--standalone", "--nproc-per-node", str(world), "-m",
               "rldsl.run", plan, "--out", out, *(["--trace", trace] if trace else [])]
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except KeyboardInterrupt:
        try:
            process.wait(timeout=15)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.kill()
            process.wait()
        return 130


if __name__ == "__main__":
    main()
