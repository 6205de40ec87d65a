"""Commands that read a program: check, compile, fmt, graph, new, explain, lsp."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import click

from rldsl.cli.options import FILE, chosen, jobs_of_search, on_cluster, one_of
from rldsl.cli.printing import say
from rldsl.cli.shell import Settings, command, print_result, report_diagnostics
from rldsl.commands import Usage

if TYPE_CHECKING:  # what a command does not need is not imported
    from rldsl.commands.compile import Stage


def _passes() -> Iterable[str]:
    from rldsl.commands.compile import pass_names

    return ("list", *pass_names())


def _starters() -> Iterable[str]:
    from rldsl.commands.new import lines

    return lines()


def _codes() -> Iterable[str]:
    from rldsl.explain import codes

    return codes()


@command
@click.argument("file", type=FILE)
@chosen
@click.option("-o", "target", type=FILE, metavar="PLAN", help="Output file (default: FILE with the extension .plan).")
@click.option("--emit", type=click.Choice(["graph", "events", "plan"]),
              help="Print a compilation stage instead of writing a plan.")
@click.option("--print-after", "after", metavar="PASS", shell_complete=one_of(_passes),
              help="Print the events after this compiler pass instead of writing a plan; `--print-after list` lists "
                   "the passes.")
@click.option("--cluster", shell_complete=on_cluster, metavar="CLUSTER",
              help="Also predict the step time on this cluster, and what a lag gains: a cluster file, or a built-in "
                   "cluster such as h100x8.")
@jobs_of_search
def compile(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
            target: str | None, emit: Stage | None, after: str | None, cluster: str | None, jobs: int) -> None:
    """Compile FILE to a verified plan and preview the run."""
    from rldsl.commands import compile as work

    if (emit or after) and target:
        raise Usage(f"{'--emit' if emit else '--print-after'} prints a stage and writes no plan: omit -o")
    if (emit or after) and cluster:
        raise Usage(f"{'--emit' if emit else '--print-after'} prints a stage of compilation: omit --cluster")
    if emit and after:
        raise Usage("--emit and --print-after each print a stage: use only one of them")
    if after or emit:
        text = (work.after(after, file, sets, place, overrides) if after else
                work.stage(cast("Stage", emit), file, sets, place, overrides))
        print_result(settings, text, stage=after or emit, text=text)
        return
    path, plan = work.compile(file, sets, place, overrides, target, jobs)
    line, numbers = work.predicted(file, sets, place, overrides, plan, cluster) if cluster else ("", {})
    print_result(settings, plan.preview(path) + line, **work.summary(path, plan), **numbers)


@command
@click.argument("files", type=FILE, nargs=-1, required=True)
@chosen
@click.option("--fix", is_flag=True, help="Apply all safe fixes, then check again.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
def check(settings: Settings, files: tuple[str, ...], sets: dict[str, Any], place: str | None,
          overrides: tuple[str, ...], fix: bool, strict: bool) -> int:
    """Find the errors in FILES. Writes no plan and needs no models."""
    from rldsl.commands.check import check

    done = {file: check(file, sets, place, fix, overrides) for file in dict.fromkeys(files)}
    found = tuple(d for now in done.values() for d in now.found)
    for file, now in done.items():
        if now.fixed:
            click.echo(f"{file}: fixed {now.fixed} error{'s' * (now.fixed > 1)}", err=True)
    if found or settings.output == "json":
        report_diagnostics(found, settings)
    for file, now in done.items() if settings.output == "text" else ():
        if now.sure and not fix:
            click.echo(f"\n`rlc check --fix {file}` fixes {now.sure} of {len(now.found)}", err=True)
        if not now.errors:
            count = len(now.found)
            say(f"{file}: no errors found" + (f", {count} warning{'s' * (count > 1)}" if count else ""))
    return int(any(now.errors > 0 for now in done.values()) or strict and bool(found))


@command
def lsp(settings: Settings) -> int:
    """Run the language server for editors. It communicates over standard input and output."""
    from rldsl.commands.lsp import serve

    serve()
    return 0


@command
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--check", "ask", is_flag=True,
              help="Write nothing; list the files that would change, and exit with status 1 if there are any.")
@click.option("--diff", is_flag=True, help="Write nothing; print a diff.")
def fmt(settings: Settings, files: tuple[str, ...], ask: bool, diff: bool) -> int:
    """Format programs. FILES are programs, directories of programs, or - (from standard input to standard output)."""
    from rldsl.commands.fmt import SHOWN, STDIN, formatted
    from rldsl.files import write

    done, broken = formatted(files, sys.stdin.buffer.read() if STDIN in files else b"")
    if broken:
        report_diagnostics(broken, settings)
    changed = [one for one in done if one.changed]
    for one in done:
        if one.changed and not (ask or diff) and one.path != SHOWN:
            write(one.path, one.after.encode(), "")
    if settings.output == "json" and not broken:
        texts = {one.path: {"diff": one.diff} if diff else {"text": one.after} if one.path == SHOWN and not ask else {}
                 for one in done}
        print_result(settings, "", files=[{"path": one.path, "changed": one.changed, **texts[one.path]}
                                         for one in done])
    elif settings.output != "json":
        for one in changed if ask or diff else done:
            if ask or diff:
                say(one.diff if diff else one.path)
            elif one.path == SHOWN:
                click.echo(one.after, nl=False)
    return int(bool(broken) or ask and bool(changed))


@command
@click.argument("name", required=False, shell_complete=one_of(_starters))
@click.option("-o", "target", type=FILE, metavar="FILE", help="Output file (default: NAME.rlf; - for standard output).")
@click.option("--force", is_flag=True, help="Overwrite an existing program.")
def new(settings: Settings, name: str | None, target: str | None, force: bool) -> None:
    """Write a commented starter program. Without NAME, list the starters."""
    from rldsl.commands import new as work
    from rldsl.files import write

    if name is None:
        if target or force:
            raise Usage("NAME is missing; `rlc new` lists the starter programs")
        print_result(settings, work.listing(), starters=work.lines())
        return
    if target == "-" and force:
        raise Usage("--force cannot be combined with `-o -`")
    if target == "-":
        print_result(settings, work.program(name), program=work.program(name))
        return
    made = work.files(name, target, force)
    for path, text in made:
        write(path, text.encode())
    print_result(settings, f"wrote {' and '.join(path for path, _ in made)}; next: rlc check {made[0][0]}",
                 wrote=[path for path, _ in made])


@command
@click.argument("code", required=False, shell_complete=one_of(_codes))
def explain(settings: Settings, code: str | None) -> None:
    """Explain a message code such as RL0202. Without CODE, list all codes."""
    from rldsl import explain as pages
    from rldsl.explain.show import listing, show
    from rldsl.report import colored

    if code is None:
        print_result(settings, listing(pages.codes()), codes=dict(pages.codes()))
        return
    page = pages.page(pages.normal(code))
    if page is None:
        near = ", ".join(pages.nearest(pages.normal(code)))
        raise Usage(f"no such code: {code!r}; " + (f"did you mean {near}?" if near else "`rlc explain` lists all "
                                                                                           "codes"))
    print_result(settings, show(page, colored(sys.stdout)), styled=True, code=page.code, title=page.title,
                 text=page.text)


@command
@click.argument("file", type=FILE)
@chosen
@click.option("--format", "form", type=click.Choice(["mermaid", "dot", "svg"]),
              help="Output format (default: from the extension of -o, else mermaid).")
@click.option("-o", "target", type=FILE, metavar="FILE",
              help="Output file: .svg, .dot or .mmd (default: standard output).")
@click.option("--reduce", is_flag=True, help="Omit edges that follow from others (transitive reduction).")
def graph(settings: Settings, file: str, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
          form: str | None, target: str | None, reduce: bool) -> None:
    """Draw the dataflow graph of FILE."""
    from rldsl.commands.graph import draw, form_of
    from rldsl.files import write

    chosen_form = form_of(form, target)
    text = draw(chosen_form, file, sets, place, overrides, reduce)
    if target is None:
        print_result(settings, text, form=chosen_form, picture=text)
        return
    write(target, text.encode())
    print_result(settings, f"wrote {target}", form=chosen_form, wrote=target)
