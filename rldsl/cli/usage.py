"""How the commands of `rlc` are listed; and JSON, where it is asked for, also for a wrong command line, `--help` and
`--version`.

In: arguments. Out: as click prints it, or one JSON object on standard output. Errors: RL0099 a wrong command line, exit
status 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches

import click

from rldsl import report
from rldsl.cli.printing import say
from rldsl.diag import Diagnostic
from rldsl.output_format import json_requested
from rldsl.plan.json_output import json_output

# title in the help -> its commands, in the order in which they are used
GROUPS = {
    "Write a program": ("new", "check", "fmt", "explain", "lsp"),
    "Compile and place": ("compile", "graph", "search", "explain-placement", "sim", "profile"),
    "Inspect a plan": ("show", "verify", "diff", "report", "emit"),
    "Run": ("run", "runs", "plot", "diff-runs", "push", "postmortem"),
    "Installation": ("doctor", "completion"),
}
# what other tools call a command
KNOWN_AS = {
    "init": "new", "create": "new", "lint": "check", "validate": "check", "format": "fmt", "build": "compile",
    "tune": "search", "simulate": "sim", "viz": "report", "html": "report", "train": "run", "launch": "run",
    "exec": "run", "ls": "runs", "list": "runs", "compare": "diff-runs", "debug": "postmortem", "env": "doctor",
    "info": "doctor", "upload": "push",
}
_JSON = "rldsl.json"  # key of a context's `meta`, which commands share with the group


def _wants_json(context: click.Context) -> bool:
    return bool(context.meta.get(_JSON))


@contextmanager
def _usage_errors_as_json(context: click.Context) -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        if not _wants_json(context):
            raise
        say(report.to_json((_usage_error(error, context),)))
        raise click.exceptions.Exit(error.exit_code) from None


def _usage_error(error: click.ClickException, context: click.Context) -> Diagnostic:
    """context: of `rlc`; the error knows that of a command if click found it there."""
    where = getattr(error, "ctx", None) or context
    path = " ".join(filter(None, (where.command_path, where.invoked_subcommand if where is context else "")))
    title = error.format_message().rstrip(".") if not isinstance(error, click.exceptions.NoArgsIsHelpError) else ""
    return Diagnostic("RL0099", title or "a command is missing", place=path,
                      help=f"`{path} --help` describes the arguments and options")


class JsonCommand(click.Command):
    """A command whose help is JSON where that is asked for."""

    def get_help(self, ctx: click.Context) -> str:
        return _help(ctx, super().get_help(ctx))


class JsonGroup(click.Group):
    """The group of all commands: it knows whether JSON is asked for before the arguments are parsed."""

    command_class = JsonCommand

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_JSON] = json_requested(args)
        with _usage_errors_as_json(ctx):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        with _usage_errors_as_json(ctx):
            return super().invoke(ctx)

    def resolve_command(self, ctx: click.Context, args: list[str]
                        ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if name and not name.startswith("-") and name not in self.commands and not ctx.resilient_parsing:
            near = KNOWN_AS.get(name) or next(iter(get_close_matches(name, self.commands, n=1)), "")
            ctx.fail(f"No such command {name!r}." + (f" Did you mean `rlc {near}`?" if near else ""))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(width), self.commands[name].get_short_help_str(formatter.width))
                                    for name in names])

    def get_help(self, ctx: click.Context) -> str:
        return _help(ctx, super().get_help(ctx))


def _help(context: click.Context, text: str) -> str:
    return json_output({"format": 1, "help": text}) if _wants_json(context) else text


def print_version(context: click.Context, _: click.Parameter, given: bool) -> None:
    """The callback of `--version`."""
    if given and not context.resilient_parsing:
        from importlib.metadata import version

        found = version("rldsl")
        say(json_output({"format": 1, "version": found}) if _wants_json(context) else f"rlc, version {found}")
        context.exit()
