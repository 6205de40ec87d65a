"""Commands that read a program: check, compile, fmt, graph, new, explain, lsp."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from rldsl.cli.options import chosen
from rldsl.cli.shell import Settings, coloured, command, report_diagnostics, say
from rldsl.commands import Usage

if TYPE_CHECKING:  # what a command does not need is not imported
    from rldsl.commands.compile import Stage
    from rldsl.commands.graph import Form


def passes(context: click.Context, option: click.Parameter, begin: str) -> list[str]:
    """Names of passes for the shell's completion."""
    from rldsl.commands.compile import pass_names

    return [name for name in pass_names() if name.startswith(begin)]


@command
@click.argument("file")
@chosen
@click.option("-o", "target", metavar="PLAN", help="Where the plan goes (default: beside the program, as .plan).")
@click.option("--emit", type=click.Choice(["graph", "events", "plan"]), help="Print a stage of compilation instead.")
@click.option("--print-after", "after", metavar="PASS", shell_complete=passes,
              help="Print the events as they are after PASS instead; `--print-after list` lists the passes.")
def compile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str | None, emit: Stage | None, after: str | None) -> None:
    """Compile FILE to a verified plan, and show what it will do."""
    from rldsl.commands import compile as work

    if (emit or after) and target:
        raise Usage(f"{'--emit' if emit else '--print-after'} prints a stage and writes no plan: leave -o out")
    if emit and after:
        raise Usage("--emit and --print-after each print a stage: leave one out")
    say(work.after(after, file, sets, place, overrides) if after else
        work.stage(emit, file, sets, place, overrides) if emit else
        work.compile(file, sets, place, overrides, target))


@command
@click.argument("files", nargs=-1, required=True)
@chosen
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
        report_diagnostics(found, settings)
    for file, now in done.items() if settings.output == "human" else ():
        if now.sure and not fix:
            click.echo(f"\n`rlc check --fix {file}` mends {now.sure} of {len(now.found)}", err=True)
        if not now.errors:
            count = len(now.found)
            say(f"{file}: no mistakes found" + (f", {count} warning{'s' * (count > 1)}" if count else ""))
    return int(any(now.errors > 0 for now in done.values()) or strict and bool(found))


@command
def lsp(settings: Settings) -> int:
    """Speak to an editor: the language server, on standard input and output."""
    from rldsl.commands.lsp import serve

    serve()
    return 0


@command
@click.argument("files", nargs=-1, required=True)
@click.option("--check", "ask", is_flag=True, help="Write nothing; name what would change, exit with 1 if anything.")
@click.option("--diff", is_flag=True, help="Write nothing; show what would change.")
def fmt(settings: Settings, files: tuple[str, ...], ask: bool, diff: bool) -> int:
    """Put FILES into the one form: programs, directories of programs, or - (standard input to standard output)."""
    from rldsl.commands.fmt import SHOWN, STDIN, formatted
    from rldsl.files import write

    done, broken = formatted(files, sys.stdin.buffer.read() if STDIN in files else b"")
    if broken:
        report_diagnostics(broken, settings)
    changed = [one for one in done if one.changed]
    for one in changed if ask or diff else done:
        if ask or diff:
            say(one.diff if diff else one.path)
        elif one.path == SHOWN:
            click.echo(one.after, nl=False)
        elif one.changed:
            write(one.path, one.after.encode(), "")
    return int(bool(broken) or ask and bool(changed))


@command
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
        say(work.listing())
        return
    if target == "-" and force:
        raise Usage("--force overwrites a file, and `-o -` writes none")
    if target == "-":
        say(work.program(name))
        return
    made = work.files(name, target, force)
    for path, text in made:
        write(path, text.encode())
    say(f"wrote {' and '.join(path for path, _ in made)}; next: rlc check {made[0][0]}")


@command
@click.argument("code", required=False)
def explain(settings: Settings, code: str | None) -> None:
    """What a message means, by its CODE; without one, all codes."""
    from rldsl import explain as pages
    from rldsl.explain.show import listing, show

    if code is None:
        say(listing(pages.codes()))
        return
    page = pages.page(pages.normal(code))
    if page is None:
        near = ", ".join(pages.nearest(pages.normal(code)))
        raise Usage(f"there is no code {code!r}; " + (f"did you mean {near}?" if near else "`rlc explain` lists all"))
    say(show(page, coloured(sys.stdout)))


@command
@click.argument("file")
@chosen
@click.option("--format", "form", type=click.Choice(["mermaid", "dot", "svg"]), default="mermaid", show_default=True)
@click.option("--reduce", is_flag=True, help="Leave out links that follow from others (transitive reduction).")
def graph(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
          form: Form, reduce: bool) -> None:
    """Draw the dataflow graph of FILE."""
    from rldsl.commands.graph import draw

    say(draw(form, file, sets, place, overrides, reduce))
