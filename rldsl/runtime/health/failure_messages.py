"""The words with which a run ends. In: an exception, or what a post-mortem found. Out: diagnostics.

Codes: RL0707 out of memory, RL0709 another rank is gone, stopped, or does not come, RL0799 a mistake of ours.
"""

from __future__ import annotations

from rldsl.diag import Diagnostic, Failure
from rldsl.postmortem.analysis import Findings
from rldsl.postmortem.findings_text import notes, place, title

SURE = ("gone", "stopped", "silent")  # also where nothing but a request ends the run
HELP = {
    "gone": "killed from outside, or out of memory? the system's log knows",
    "stopped": "something stopped the process (SIGSTOP, a debugger), and nothing let it go on",
    "silent": "killed or stopped on another machine, or in a long call that holds Python's lock",
    "waited for": "a Python function that does not return? more work than `--timeout` allows?",
}


def own_words(error: BaseException, rank: int, where: str) -> tuple[Diagnostic, ...]:
    """What a rank says of its own exception; () when others have the words."""
    if isinstance(error, Failure):
        return error.diagnostics
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return (Diagnostic("RL0707", f"rank {rank} is out of memory", place=where,
                           help="give the call a larger mesh, more tp or pp, a smaller mbs, or offload=true"),)
    if lost_contact(error):
        return ()
    return (Diagnostic("RL0799", f"internal error (please report): {type(error).__name__}: {error}", place=where),)


def lost_contact(error: BaseException) -> bool:
    """Whether an exception of the communication library means that a peer is gone."""
    text = str(error).lower()
    signs = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout",
             "socket", "gloo", "nccl", "peer")
    return isinstance(error, (RuntimeError, ConnectionError)) and any(sign in text for sign in signs)


def others(findings: Findings | None, otherwise: str, where: str, said: str, asked: bool,
           more: str) -> Diagnostic:
    """That the run ends because of other ranks. otherwise: the title when none is to blame. said: by the communication
    library. asked: the run was told to stop, and that ranks wait is no reason. more: a last piece of advice."""
    causes = [c.why for c in findings.culprits if not asked or c.why in SURE] if findings else []
    notes_ = (f"the library said: {said}",) if said else ()
    if findings and causes:
        otherwise, where, notes_ = title(findings), place(findings) or where, (*notes(findings), *notes_)
    advice = (HELP[why] for why in dict.fromkeys(causes) if why in HELP)
    helps = [*advice, "checkpoints that were written are whole", more]
    return Diagnostic("RL0709", otherwise, place=where, notes=notes_, help="; ".join(x for x in helps if x))
