"""What every command of `rlc` shares: how it prints, how exceptions become messages, and the exit status.

0 ok, 1 errors in the program or the run, 2 usage, 3 an internal compiler error, 130 Ctrl-C, 143 a run ended by SIGTERM.
Warnings do not count, except with `rlc check --strict`.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any

import click

from rldsl import threads
from rldsl.cli.printing import say
from rldsl.cli.status_line import StatusLine
from rldsl.cli.usage import JsonGroup, print_version
from rldsl.commands import Usage
from rldsl.diag import Diagnostic, Failure, InternalError, internal_error
from rldsl.extras import missing_package
from rldsl.output_format import FORMATS, json_requested
from rldsl.plan.json_output import json_output
from rldsl.progress import Interrupted, listening

BUG = "this is a bug in the compiler, not in your program: please report it, with the program or plan and this message"
INTERRUPTED = 130  # as a shell reports SIGINT


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings that every command gets."""

    output: str = "text"  # how results and errors are printed: "text", "json", or "github" (errors as annotations)
    verbose: bool = False  # CPU seconds, and tracebacks of internal errors


def print_result(settings: Settings, text: str, /, styled: bool = False, **data: Any) -> None:
    """The result of a command: `text` for people, or `data` as one JSON object. styled: as in `say`."""
    if settings.output == "json":
        say(json_output({"format": 1, **data}))
    else:
        say(text, styled)


def report_diagnostics(diagnostics: Iterable[Diagnostic], settings: Settings) -> None:
    """Diagnostics to stderr as text, or to stdout for machines."""
    from rldsl import report

    found = tuple(diagnostics)
    if settings.output == "json":
        say(report.to_json(found))
    elif settings.output == "github":
        say(report.to_github(found))
    else:
        click.echo(report.render(found, report.colored(sys.stderr)).rstrip("\n"), err=True)


def _guarded(settings: Settings, body: Callable[[], int | None]) -> None:
    """Run a command; turn what it raises into messages and the exit status."""

    start = time.process_time()
    status = StatusLine(sys.stderr, sys.stderr.isatty() and settings.output == "text")
    try:
        _let_interrupts_raise()
        with status, listening(status):
            code = body() or 0
    except Failure as failure:
        report_diagnostics(failure.diagnostics, settings)
        code = 1
    except InternalError as error:
        report_diagnostics((error.diagnostic,), settings)
        code = 3
    except Interrupted as stop:  # whoever raises it knows how to continue, and may have printed it
        _report_interruption(str(stop), settings)
        code = INTERRUPTED
    except KeyboardInterrupt:
        where = f" in: {status.stage}" if status.stage and status.stage.text else ""
        _report_interruption(f"interrupted{where}; to start again, repeat the command", settings)
        code = INTERRUPTED
    except Usage as error:
        raise click.UsageError(str(error)) from None
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except ModuleNotFoundError as error:
        found = missing_package(error)
        code = 3 if found is None else 1
        if found is None:
            _report_bug(error, settings)
        else:
            report_diagnostics((found,), settings)
    except Exception as error:
        if threads.is_refused(error):
            report_diagnostics((threads.refused("this command"),), settings)
            code = 1
        else:
            _report_bug(error, settings)
            code = 3
    if settings.verbose:
        click.echo(f"{time.process_time() - start:.2f} s of CPU", err=True)
    sys.exit(code)


def _report_bug(error: Exception, settings: Settings) -> None:
    """An exception that no command expects."""
    if settings.verbose:
        import traceback

        traceback.print_exc()
    what = f"{type(error).__name__}: {error}"
    if settings.output == "text":
        more = "" if settings.verbose else "\n(`rlc -v ...` shows the traceback)"
        click.echo(f"internal error: {what}\n{BUG}{more}", err=True)
    else:
        report_diagnostics((internal_error(what).diagnostic,), settings)


def _report_interruption(line: str, settings: Settings) -> None:
    """line: where the command stopped, and after a semicolon how to continue; "" if that has been said already."""
    if settings.output == "json":
        title, _, advice = (line or "interrupted").partition("; ")
        report_diagnostics((Diagnostic("RL0090", title, help=advice),), settings)
    elif line:
        click.echo(line, err=True)


def _let_interrupts_raise() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt; before, `rldsl.rlc` ends the process."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _choose(context: click.Context, option: click.Parameter, value: Any) -> None:
    """An option that all commands have means the same before and after the command's name."""
    settings: Settings = context.obj or Settings()
    match option.name:
        case "verbose" if value:
            settings = replace(settings, verbose=True)
        case "json" if value:
            settings = replace(settings, output="json")
        case "output_format" | "output" if value is not None:
            if option.name == "output" and not json_requested(sys.argv[1:]):
                click.echo("note: `--output` is now called `--output-format`", err=True)
            settings = replace(settings, output="text" if value == "human" else value)
    context.obj = settings


def shared_options(body: Callable[..., Any]) -> Callable[..., Any]:
    """The options that `rlc` and all of its commands have. `--output` is the earlier name of `--output-format`."""
    for option in (
            click.option("-v", "--verbose", is_flag=True, expose_value=False, callback=_choose,
                         help="Show the CPU time, and the traceback of internal errors."),
            click.option("--output", type=click.Choice(["human", *FORMATS]), hidden=True, expose_value=False,
                         callback=_choose),
            click.option("--json", is_flag=True, expose_value=False, callback=_choose,
                         help="Short for --output-format json."),
            click.option("--output-format", type=click.Choice(FORMATS), expose_value=False, callback=_choose,
                         help="Format of results and errors (default: text).")):
        body = option(body)
    return body


@click.group("rlc", cls=JsonGroup, context_settings={"help_option_names": ["-h", "--help"]})
@shared_options
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=print_version,
              help="Show the version and exit.")
@click.pass_context
def main(context: click.Context) -> None:
    """Check, compile, inspect and run .rlf programs."""
    if context.invoked_subcommand in ("check", "compile", "explain-placement", "fmt", "graph", "lsp", "run",
                                      "search", "sim", "profile"):
        from rldsl.files import cache_folder
        from rldsl.syntax.parse import warm

        if (folder := cache_folder()) is not None:
            warm(folder)


def command(body: Callable[..., int | None]) -> click.Command:
    """A command of `rlc`: what it raises becomes messages, what it returns the exit status."""
    def guarded(settings: Settings, /, **given: Any) -> None:
        _guarded(settings, lambda: body(settings, **given))

    return main.command()(shared_options(update_wrapper(click.pass_obj(guarded), body)))
