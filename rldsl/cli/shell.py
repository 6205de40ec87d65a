"""What every command of `rlc` shares: how it says things, what becomes of what it raises, and its exit status.

0 ok, 1 errors in the program or the run, 2 usage, 3 an internal compiler error, 130 Ctrl-C. Warnings do not count,
except with `rlc check --strict`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any

import click

from rldsl.cli.status_line import StatusLine
from rldsl.commands import Usage
from rldsl.diag import Diagnostic, Failure, InternalError
from rldsl.progress import Interrupted, listening

INTERRUPTED = 130  # as a shell reports SIGINT
BUG = "this is a bug in the compiler, not in your program: please report it, with the program or plan and this message"


@dataclass(frozen=True, slots=True)
class Settings:
    output: str = "human"
    verbose: bool = False


def say(text: str) -> None:
    click.echo(text, nl=not text.endswith("\n"))


def coloured(stream: Any) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR")


def report_diagnostics(diagnostics: Iterable[Diagnostic], settings: Settings) -> None:
    """Diagnostics to stderr (human) or stdout (for machines)."""
    from rldsl import report

    found = tuple(diagnostics)
    if settings.output == "json":
        say(report.to_json(found))
    elif settings.output == "github":
        say(report.to_github(found))
    else:
        click.echo(report.render(found, coloured(sys.stderr)).rstrip("\n"), err=True)


def _guarded(settings: Settings, body: Callable[[], int | None]) -> None:
    """Run a command; turn what it raises into messages and the exit status."""

    start = time.process_time()
    status = StatusLine(sys.stderr, sys.stderr.isatty() and settings.output == "human")
    try:
        with status, listening(status):
            code = body() or 0
    except Failure as failure:
        report_diagnostics(failure.diagnostics, settings)
        code = 1
    except InternalError as error:
        report_diagnostics((error.diagnostic,), settings)
        code = 3
    except Interrupted as stop:  # whoever raises it knows how to go on, and may have said so
        if str(stop):
            click.echo(str(stop), err=True)
        code = INTERRUPTED
    except KeyboardInterrupt:
        where = f" in: {status.stage}" if status.stage and status.stage.text else ""
        click.echo(f"interrupted{where}; to start again, repeat the command", err=True)
        code = INTERRUPTED
    except Usage as error:
        raise click.UsageError(str(error)) from None
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except Exception as error:
        if settings.verbose:
            import traceback

            traceback.print_exc()
        more = "" if settings.verbose else "\n(`rlc -v ...` shows the traceback)"
        click.echo(f"internal error: {type(error).__name__}: {error}\n{BUG}{more}", err=True)
        code = 3
    if settings.verbose:
        click.echo(f"{time.process_time() - start:.2f} s of CPU", err=True)
    sys.exit(code)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Choice(["human", "json", "github"]), default="human", show_default=True,
              help="Format of errors.")
@click.option("-v", "--verbose", is_flag=True, help="Show timings, and the traceback of internal errors.")
@click.version_option(package_name="rldsl", prog_name="rlc")
@click.pass_context
def main(context: click.Context, output: str, verbose: bool) -> None:
    """Check, compile, inspect and run .rlf programs."""
    context.obj = Settings(output, verbose)
    if context.invoked_subcommand in ("check", "compile", "explain-placement", "fmt", "graph", "lsp", "run",
                                      "search", "sim", "profile"):
        from rldsl.files import cache_folder
        from rldsl.syntax.parse import warm

        if (folder := cache_folder()) is not None:
            warm(folder)


def _choose(context: click.Context, output: str | None) -> None:
    """`rlc check --output json` means what `rlc --output json check` does."""
    if output is not None:
        context.obj = replace(context.obj, output=output)


_output = click.option("--output", type=click.Choice(["human", "json", "github"]), expose_value=False,
                       callback=lambda context, _, value: _choose(context, value), help="Format of errors.")


def command(body: Callable[..., int | None]) -> click.Command:
    """A command of `rlc`: what it raises becomes messages, what it returns the exit status; `--output` says how."""
    def guarded(settings: Settings, /, **given: Any) -> None:
        _guarded(settings, lambda: body(settings, **given))

    return main.command()(_output(update_wrapper(click.pass_obj(guarded), body)))
