"""Commands that run a plan, and look at runs and at the machine: run, runs, postmortem, push, plot, diff-runs,
doctor, completion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
from click.shell_completion import ShellComplete, get_completion_class

from rldsl.cli.options import FILE, FOLDER, chosen, metrics_of
from rldsl.cli.printing import say
from rldsl.cli.shell import Settings, command, main, print_result, report_diagnostics
from rldsl.commands import Usage
from rldsl.diag import Failure
from rldsl.plan.metrics_file import TRACKERS

SHELLS = ("bash", "zsh", "fish")


@command
@click.argument("file", type=FILE, metavar="FILE", required=False)
@chosen
@click.option("--out", type=FOLDER, metavar="DIR",
              help="Directory for logs and checkpoints (default: runs/PROGRAM, or runs/PROGRAM-2 and so on if that "
                   "holds a run; with --resume or --overwrite, the newest of these).")
@click.option("--resume", is_flag=False, flag_value="", metavar="[DIR]",
              help="Resume from the latest checkpoint of the run in DIR, or from the checkpoint DIR (without DIR: from "
                   "the latest checkpoint in --out).")
@click.option("--trace", type=FILE, metavar="FILE",
              help="Write the recorded timeline to this file (Chrome trace JSON).")
@click.option("--profile", is_flag=False, flag_value="1", type=click.IntRange(1), metavar="[STEPS]",
              help="Record this many steps with torch's profiler, after the first one, to OUT/profile (without a "
                   "value: 1).")
@click.option("--nproc", type=click.IntRange(1), metavar="N", help="Number of processes; must match the plan.")
@click.option("--reward-workers", type=click.IntRange(0), metavar="N",
              help="Worker processes per rank for Python functions; 0 runs them in the rank's own process without a "
                   "time limit.")
@click.option("--reward-timeout", type=click.FloatRange(0, min_open=True), metavar="SECONDS",
              help="Time limit per row for Python functions (default: 60).")
@click.option("--allow-write", type=FOLDER, multiple=True, metavar="DIR",
              help="Also allow saves to this directory, outside --out and the working directory; repeatable.")
@click.option("--check-images", is_flag=True,
              help="Decode every image of the data before the first step, which finds damaged pixels.")
@click.option("--overwrite", is_flag=True, help="Delete an earlier run in --out.")
@click.option("--deterministic", is_flag=True,
              help="On GPUs, use kernels that add in a fixed order where there are any; slower.")
@click.option("--tensorboard", is_flag=True, help="Also write the metrics for TensorBoard, to OUT/tensorboard.")
@click.option("--wandb", is_flag=False, flag_value="online", type=click.Choice(["offline", "online"]),
              help="Also log the metrics to Weights & Biases (without a value: online).")
@click.option("--report-to", type=click.Choice(TRACKERS), multiple=True, metavar="TRACKER",
              help=f"Also log the metrics to this tracker: {', '.join(TRACKERS)}; repeatable.")
@click.option("--project", default="", metavar="NAME", help="Project of the trackers (default: the flow).")
@click.option("--run-name", default="", metavar="NAME", help="Name of the run in the trackers (default: as --out).")
@click.option("--tag", "tags", multiple=True, metavar="WORD", help="Tag of the run in the trackers; repeatable.")
@click.option("--log-samples", type=click.IntRange(0), default=0, metavar="N",
              help="Write this many sampled sequences per step as text, to OUT/samples.")
@click.option("--plain", is_flag=True, help="Print one line per step even on a terminal.")
def run(settings: Settings, file: str | None, sets: dict[str, Any], place: str | None, overrides: tuple[str, ...],
        out: str | None, resume: str | None, trace: str | None, profile: int | None, nproc: int | None,
        reward_workers: int | None, reward_timeout: float | None, allow_write: tuple[str, ...], check_images: bool,
        overwrite: bool, deterministic: bool,
        tensorboard: bool, wandb: str | None, report_to: tuple[str, ...], project: str, run_name: str,
        tags: tuple[str, ...], log_samples: int, plain: bool) -> int:
    """Compile and run FILE on this machine. FILE may also be a plan. Starts one process per rank."""
    from rldsl.commands.run import run

    if file is None and resume:  # `--resume ppo.rlf`: the option took the program for its value
        file, resume = resume, ""
    if file is None:
        raise Usage("FILE is missing: a program or a plan")
    numbers = {"--reward-workers": reward_workers, "--reward-timeout": reward_timeout, "--wandb": wandb,
               "--log-samples": log_samples or None, "--profile": profile,
               "--project": project or None, "--run-name": run_name or None}
    flags = {"--check-images": check_images, "--deterministic": deterministic, "--tensorboard": tensorboard,
             "--plain": plain}
    as_json = settings.output == "json"
    options = [*(f"{option}={value}" for option, value in numbers.items() if value is not None),
               *(option for option, given in flags.items() if given),
               *(f"{option}={value}" for option, values in (("--allow-write", allow_write), ("--report-to", report_to),
                                                            ("--tag", tags)) for value in values)]
    ended = run(file, sets, place, overrides, out, trace, nproc, resume, overwrite, options,
                lambda text: click.echo(text, err=True), quiet=as_json)
    if as_json:
        print_result(settings, "", directory=ended.out, state=ended.state, step=ended.step,
                     diagnostics=list(ended.diagnostics))
    elif ended.line:
        click.echo(ended.line, err=True)
    return ended.status


@command
@click.argument("folder", type=FOLDER, metavar="[DIR]", default="runs")
def runs(settings: Settings, folder: str) -> None:
    """List the runs below DIR (default: runs). Shows their progress and last reward."""
    from rldsl.commands.runs import listing, records

    if settings.output == "json":
        print_result(settings, "", runs=records(folder))
    else:
        say(listing(folder))


@command
@click.argument("folder", type=FOLDER, metavar="DIR")
@click.option("--plan", type=FILE, metavar="PLAN", help="The plan of the run, if it is not in DIR.")
def postmortem(settings: Settings, folder: str, plan: str | None) -> None:
    """Explain why the run in DIR hung. Shows where its ranks were, and which rank waited for which."""
    from rldsl.commands.postmortem import postmortem as work

    say(work(folder, plan, settings.output == "json"))


@command
@click.argument("folder", type=FOLDER, metavar="RUN_DIR")
@click.argument("name", metavar="OWNER/NAME")
@click.option("--model", default="", metavar="NAME", help="The model to send, if the program saves several.")
@click.option("--private", is_flag=True, help="Make the repository private if it is created.")
@click.option("--branch", default="", metavar="NAME", help="Send to this branch (default: the main one).")
def push(settings: Settings, folder: str, name: str, model: str, private: bool, branch: str) -> None:
    """Send the newest saved model of a run to the Hub. Writes a model card; the run may still be running."""
    from rldsl.commands.push import push

    address = push(folder, name, model, private, branch)
    print_result(settings, f"sent to {address}", address=address)


@command
@click.argument("folders", type=FOLDER, metavar="RUN_DIR...", nargs=-1, required=True)
@click.option("-o", "target", type=FILE, metavar="FILE",
              help="Output file, .svg or .png (default: metrics.svg in the first RUN_DIR).")
@click.option("--metric", "patterns", multiple=True, metavar="NAME", shell_complete=metrics_of,
              help="A metric, or a pattern such as \"actor/*\", to plot instead of the usual ones; repeatable.")
def plot(settings: Settings, folders: tuple[str, ...], target: str | None, patterns: tuple[str, ...]) -> None:
    """Plot the metrics of one or more runs. By default these are rewards, KL, losses and lengths."""
    from rldsl.commands.plot import plot

    target = target or str(Path(folders[0]) / "metrics.svg")
    names = plot(folders, target, patterns)
    print_result(settings, f"wrote {target}: {', '.join(names)}", wrote=target, metrics=list(names))


@command
@click.argument("one", type=FOLDER, metavar="RUN_A")
@click.argument("two", type=FOLDER, metavar="RUN_B")
@click.option("--rtol", "tolerance", type=click.FloatRange(0, 1), default=0.0, metavar="X",
              help="Ignore relative differences of numbers up to X (default: 0, equal bits).")
def diff_runs(settings: Settings, one: str, two: str, tolerance: float) -> int:
    """Show where two runs first differ. Compares metrics, and sequences recorded with --log-samples.

    Exit status, as for diff(1): 0 if nothing differs, 1 if something does, 2 if the runs cannot be compared."""
    from rldsl.commands.diff_runs import diff_runs

    try:
        found = diff_runs(one, two, tolerance)
    except Failure as failure:
        report_diagnostics(failure.diagnostics, settings)
        return 2
    print_result(settings, found.text((one, two)), **found.json())
    return int(not found.same)


# no space after `NAME=`, where the value comes next: shell -> (what click writes, what takes its place); fish adds none
WITHOUT_SPACE = {
    "bash": (("    return 0\n",
              "    [[ ${#COMPREPLY[@]} == 1 && $COMPREPLY == *= ]] && compopt -o nospace 2>/dev/null\n"
              "    return 0\n"),),
    "zsh": (("        _describe -V unsorted completions_with_descriptions -U\n",
             "        local -a before_value=(${(M)completions_with_descriptions:#*=:*})\n"
             "        completions_with_descriptions=(${completions_with_descriptions:#*=:*})\n"
             "        (( $#before_value )) && _describe -V unsorted before_value -U -S ''\n"
             "        (( $#completions_with_descriptions )) && \\\n"
             "            _describe -V unsorted completions_with_descriptions -U\n"),
            ("        compadd -U -V unsorted -a completions\n",
             "        local -a alone=(${(M)completions:#*=})\n        completions=(${completions:#*=})\n"
             "        compadd -U -V unsorted -S '' -a alone\n        compadd -U -V unsorted -a completions\n")),
}


@command
@click.argument("shell", type=click.Choice(SHELLS))
def completion(settings: Settings, shell: str) -> None:
    """Print the script that makes Tab complete `rlc` in SHELL. For example: eval "$(rlc completion bash)"."""
    found = get_completion_class(shell)
    if found is None:
        raise Usage(f"no completion for {shell}")
    script = ShellComplete.source(found(main, {}, "rlc", "_RLC_COMPLETE"))
    for text, other in WITHOUT_SPACE.get(shell, ()):
        script = script.replace(text, other)
    print_result(settings, script, shell=shell, script=script)


@command
def doctor(settings: Settings) -> int:
    """Show what is installed and which devices there are. Exit status 1 if something does not work."""
    from rldsl.commands.doctor import examine

    found = examine()
    print_result(settings, found.text(), **found.json())
    return int(bool(found.problems))
