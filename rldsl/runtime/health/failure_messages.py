"""The message with which a run ends. In: an exception, or what a post-mortem found. Out: diagnostics.

Codes: RL0707 out of memory, files or threads, RL0709 another rank is gone, stopped, or does not arrive, RL0799 an
internal error.
"""

from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from rldsl import threads
from rldsl.diag import Diagnostic, Failure
from rldsl.postmortem.analysis import Findings
from rldsl.postmortem.findings_text import notes, place, title

SURE = ("gone", "stopped", "silent")  # also where nothing but a request ends the run
NOTICED = 5.0  # seconds: torchrun notices that a rank has ended before the others do, by less than this
HELP = {
    "gone": "it was killed, possibly because memory ran out; see the system log",
    "stopped": "the process was suspended (SIGSTOP, a debugger) and not continued",
    "silent": "it was killed or suspended on another machine, or is in a long call that holds Python's global "
              "interpreter lock",
    "waited for": "a Python function does not return, or the work takes longer than `--timeout`",
}


def tell_torchrun(text: str, is_cause: bool = True, known: float | None = None) -> None:
    """Leave the message of this process where torchrun looks for it. torchrun's own report, which comes after
    everything that ranks print, ends with the earliest failure on its machine: it gives a killed rank, which leaves no
    message, the time when it noticed that.

    is_cause: the message says why the run ended, and so must be the earliest: otherwise the report would end with the
    number of a signal, or with a hint to look elsewhere. known: when this process learned of it (default: now)."""
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        when = (time.time() if known is None else known) - (NOTICED if is_cause else 0.0)
        with suppress(OSError):
            Path(file).write_text(json.dumps({"message": text, "timestamp": int(when)}))


def describe_own_error(error: BaseException, rank: int, where: str) -> tuple[Diagnostic, ...]:
    """What a rank reports of its own exception; () if another rank reports the error."""
    if isinstance(error, Failure):
        return error.diagnostics
    if ran_out_of_memory(error):
        return (Diagnostic("RL0707", f"rank {rank} ran out of memory", place=where,
                           help="use a larger mesh, a larger tp or pp, a smaller mbs, or offload=true; a limit of "
                                "the shell (`ulimit -v`) may be smaller than the machine"),)
    if ran_out_of_files(error):
        return (Diagnostic("RL0707", f"rank {rank} may open no more files", place=where, notes=(str(error),),
                           help="raise the limit in the shell that starts the run, for example `ulimit -n 4096`"),)
    if threads.is_refused(error):
        return (threads.refused(f"rank {rank}", where),)
    if lost_contact(error):
        return ()
    return (Diagnostic("RL0799", f"internal error (please report it): {type(error).__name__}: {error}", place=where),)


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that a device or the host has no memory left. NCCL, cuBLAS and safetensors say so in
    their own texts: on a full device the first allocation that fails is often one of theirs."""
    text, signs = str(error).lower(), ("out of memory", "alloc_failed", "cannot allocate memory")
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or isinstance(
        error, RuntimeError) and any(sign in text for sign in signs)


def ran_out_of_files(error: BaseException) -> bool:
    """Whether a process has as many files and sockets open as the system allows, also where gloo says so."""
    return (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            or isinstance(error, RuntimeError) and "too many open files" in str(error).lower())


def lost_contact(error: BaseException) -> bool:
    """Whether an exception of the communication library means that a peer is gone. Errors of this rank's own device are
    none, whatever their text names."""
    text = str(error).lower()
    own_device = type(error).__name__ == "AcceleratorError" or "unhandled cuda error" in text
    if own_device or ran_out_of_memory(error):
        return False
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout",
             "socket", "gloo", "nccl", "peer")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in text for sign in signs)


def is_rank_gone(findings: Findings | None) -> bool:
    """Whether a rank ended or stands still whatever the run was asked to do."""
    return findings is not None and any(c.why in SURE for c in findings.culprits)


def describe_other_ranks(findings: Findings | None, default_title: str, where: str, library_message: str,
                         requested: bool, more: str, is_first_gone: bool = False) -> Diagnostic:
    """The message of a run that ends because of other ranks.

    default_title: if no rank is to blame.
    library_message: of the communication library.
    requested: the run was asked to stop, so ranks that wait are not its reason.
    more: a last piece of advice.
    is_first_gone: rank 0 has ended, perhaps with the store, so that nothing is found."""
    causes = [c.why for c in findings.culprits if not requested or c.why in SURE] if findings else []
    notes_ = (f"message of the library: {library_message}",) if library_message else ()
    if findings and causes:
        default_title, where, notes_ = title(findings), place(findings) or where, (*notes(findings), *notes_)
    elif is_first_gone and not requested:
        default_title, causes = "rank 0 exited without an error message", ["gone"]
    advice = (HELP[why] for why in dict.fromkeys(causes) if why in HELP)
    helps = [*advice, "checkpoints that were written are complete", more]
    return Diagnostic("RL0709", default_title, place=where, notes=notes_, help="; ".join(x for x in helps if x))
