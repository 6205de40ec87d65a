"""Runs Python code in a child process with limits.

What it stops: code that runs too long or uses too much memory, writes large files or much output, opens many files, or
outlives the call; code finds an empty directory of its own, which is removed, and none of the environment's variables.
Where the system grants a network namespace (most Linux systems without root; containers often do not), it has no
network.

What it does not stop: reading what the user of the run can read, writing small files where that user can write, and, if
that user is root, starting processes, which end with the call only as far as they stay in its process group. It keeps
mistakes of a model from harming a run; it is no wall against code that wants out. For that, run the whole training in
a container without secrets and without network.
"""

import os
import signal
import subprocess
import sys
import tempfile

SECONDS = 5                # of processor time, and twice as much on the clock
MEMORY = 512 << 20         # bytes of address space
FILE = 1 << 20             # bytes of a file, and of the output
SHOWN = 4000               # characters of the output that are returned

# what the child does before the code: limits that it cannot raise again (unless it is root)
LIMITS = f"""
import ctypes, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
if sys.platform == "linux":
    libc.prctl(1, 9, 0, 0, 0)             # it dies with the environment
    libc.unshare(0x10000000 | 0x40000000)  # user and network namespaces, where the system grants them
for name, most in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", {FILE}), ("NOFILE", 32), ("CORE", 0), ("NPROC", 0)):
    if hasattr(resource, f"RLIMIT_{{name}}"):
        hard = resource.getrlimit(getattr(resource, f"RLIMIT_{{name}}"))[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(getattr(resource, f"RLIMIT_{{name}}"), (most, most))
del ctypes, resource, libc
"""


def run(code: str, stdin: str = "") -> tuple[str, str]:
    """(how it ended, output): "" if all is well, else for example "was killed after 5 s"; the last SHOWN characters that
    it wrote to standard output and error."""
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as said:
        said.write(stdin.encode("utf-8", "replace"))
        said.seek(0)
        child = subprocess.Popen([sys.executable, "-I", "-B", "-c", LIMITS + code], stdin=said, stdout=output,
                                 stderr=output, cwd=directory, env={"PATH": "/usr/bin:/bin", "HOME": directory},
                                 start_new_session=True)
        try:
            status = ended(child.wait(2 * SECONDS))
        except subprocess.TimeoutExpired:
            status = f"was killed after {2 * SECONDS} s"
        finally:
            try:
                os.killpg(child.pid, signal.SIGKILL)  # and what it has started
            except ProcessLookupError:
                pass
            child.wait()
        output.seek(0)
        text = output.read(FILE).decode("utf-8", "replace")
        return status, text[-SHOWN:]


def ended(code: int) -> str:
    """An exit status in words."""
    if code == -signal.SIGXCPU:
        return f"was killed after {SECONDS} s"
    if code == -signal.SIGXFSZ:
        return "was killed: it wrote too much"
    return "" if code == 0 else f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
