"""One run owns a directory at a time: `OUT/run.lock`, held by rank 0, on local and on network file systems.

The lock is a file that appears under its name with its contents, by a hard link (a network file system does that
atomically, too). It names its owner: host, boot and process-id namespace, process, start time of the process, program;
its modification time is the heartbeat, set every `BEAT` seconds by the file system's own clock.

A lock is stale if its owner is gone. On the same host that is known at once: the process does not exist, or began at
another time than it says. Otherwise (another host, another container, a machine that has restarted) the heartbeat
decides: it is older than `STALE`, or does not move for so long while a start watches it. A stale lock is removed by
exactly one start, the one that creates the guard file which carries the lock's token. An owner whose lock is replaced
nevertheless (it was suspended) finds that at its next heartbeat and ends.
Errors: RL0780 another run owns the directory, RL0708 the lock cannot be written.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from secrets import token_hex

from rldsl import threads
from rldsl.diag import Diagnostic, Failure, fail
from rldsl.plan.disk_paths import shown
from rldsl.runtime.files import written

LOCK = "run.lock"
BEAT, STALE = 10.0, 120.0  # seconds between heartbeats; without one for so long, an owner elsewhere is gone
LOOK = 0.5  # seconds between looks at the heartbeat of another host
LARGEST = 4096  # bytes of a lock
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class Owner:
    """Who holds a lock."""

    token: str      # random: distinguishes this lock from all others
    host: str       # name of its machine
    boot: str       # id of the running system: changes when the machine restarts
    namespace: str  # id of the process-id namespace: ids of another container mean nothing here
    pid: int        # of its process
    born: str       # when the process began, as the system counts
    program: str    # what it runs, for messages
    started: str    # when the lock was taken: UTC, ISO 8601

    @classmethod
    def this_process(cls, program: str) -> Owner:
        return cls(token_hex(8), socket.gethostname(), _boot(), _namespace(), os.getpid(), born(os.getpid()) or "",
                   program, datetime.now(UTC).isoformat(timespec="seconds"))

    def is_here(self) -> bool:
        """Whether its process id means something to this process."""
        return (self.host, self.boot, self.namespace) == (socket.gethostname(), _boot(), _namespace())

    def text(self) -> str:
        return (f"process {self.pid} on {shown(self.host)}, started {shown(self.started)}"
                + (f" ({shown(self.program)})" if self.program else ""))


class RunLock:
    """The lock of a run that this process holds. `with` releases it."""

    def __init__(self, file: Path, owner: Owner, lost: Callable[[Diagnostic], object] | None = None):
        """lost: called by the heartbeat's thread when another run has taken the directory."""
        self.file, self.owner, self._lost = file, owner, lost
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beats, name="rldsl-lock", daemon=True)
        threads.start(self._thread)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the directory, if it is still ours."""
        self._done.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=1.0)
        with suppress(OSError):
            if _token(self.file) == self.owner.token:
                self.file.unlink()

    def _beats(self) -> None:
        while not self._done.wait(BEAT):
            if not self.beat():
                return

    def beat(self) -> bool:
        """One heartbeat; False: the lock belongs to another run now."""
        try:
            now = _token(self.file)
            if now == self.owner.token:
                os.utime(self.file)
                return True
        except FileNotFoundError:
            now = ""
        except OSError:  # a file system that does not answer now may answer at the next beat
            return True
        if self._lost is not None and not self._done.is_set():
            reason = "its lock was removed" if not now else "another run has taken it"
            self._lost(Diagnostic("RL0780", f"this run no longer owns its output directory: {reason}",
                                  place=str(self.file.parent),
                                  help="do not delete files of an active run; start it again with `--resume`"))
        return False


def acquire(out: Path, program: str = "", lost: Callable[[Diagnostic], object] | None = None) -> RunLock:
    """Own `out`. Waits at most `STALE` seconds, and only where the heartbeat of another host has to show whether its
    process lives. Errors: RL0780 its owner is alive, RL0708."""
    file, owner = out / LOCK, Owner.this_process(program)
    temporary = out / f".{LOCK}.{owner.token}"
    try:
        with written(file):
            out.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(asdict(owner)) + "\n")
        with written(file):
            while not _linked(temporary, file):
                stale = _wait_until_stale(file, temporary)
                if stale is not None:
                    _remove_stale(file, stale)
    finally:
        with suppress(OSError):
            temporary.unlink()
    try:
        return RunLock(file, owner, lost)
    except Failure:  # without heartbeats the directory would look abandoned, after a time in which nobody gets it
        file.unlink(missing_ok=True)
        raise


def refuse_owned(out: Path) -> None:
    """RL0780 where a process of this host owns `out` now, as far as that is known without waiting."""
    owner = _read(out / LOCK)
    if owner is not None and owner.is_here() and _alive(owner):
        raise _refused(out / LOCK, owner)


def _linked(temporary: Path, file: Path) -> bool:
    """Whether the lock is ours now."""
    try:
        os.link(temporary, file, follow_symlinks=False)
    except FileExistsError:
        return temporary.stat().st_nlink == 2  # a network file system that repeated a request that had succeeded
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            handle = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        with open(handle, "wb") as opened:
            opened.write(temporary.read_bytes())
    return True


def _wait_until_stale(file: Path, temporary: Path) -> str | None:
    """The token of the lock that was found stale ("" if the lock is damaged), None as soon as it is gone. That lock is
    to be removed; another start may have put its own in its place by then. RL0780: the owner is alive."""
    beat, seen, announced = _heartbeat(file), time.monotonic(), False
    owner = _read(file)  # between two looks at the heartbeat: if they agree, it is the owner of that lock
    if beat is None:
        return None
    token = owner.token if owner is not None else ""
    if owner is not None and owner.is_here():
        if _alive(owner):
            raise _refused(file, owner)
        return token
    os.utime(temporary)
    if temporary.lstat().st_mtime - beat > STALE and _heartbeat(file) == beat:  # by one clock, that of the file system
        return token
    while time.monotonic() - seen < STALE:
        if not announced and time.monotonic() - seen > 2.0:
            whose = owner.text() if owner is not None else "an unknown process"
            print(f"{file.parent} is owned by {whose}; waiting for its heartbeat (at most {STALE:g} s)",
                  file=sys.stderr, flush=True)
            announced = True
        time.sleep(LOOK)
        now = _heartbeat(file)
        if now is None:
            return None
        if now != beat:
            raise _refused(file, _read(file) or owner)
    return token


def _remove_stale(file: Path, stale: str) -> None:
    """Remove the lock whose token is `stale`, unless another start has done so or does it now."""
    guard = file.with_name(f".{LOCK}.stale-{stale or 'damaged'}")
    try:
        os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        with suppress(OSError):  # a start that died while it held the guard
            if time.time() - guard.lstat().st_mtime > STALE:
                guard.unlink()
        time.sleep(0.05)
        return
    try:
        if _token_or_none(file) == stale:
            with suppress(FileNotFoundError):
                file.unlink()
    finally:
        with suppress(OSError):
            guard.unlink()


def _refused(file: Path, owner: Owner | None) -> Failure:
    whose = owner.text() if owner is not None else "an unknown process"
    return fail("RL0780", f"another run owns this directory: {whose}", place=str(file.parent),
                help="wait until it has finished, or use `--out` to choose another directory; `kill -TERM` stops a run "
                     "with checkpoints after the current step")


def _heartbeat(file: Path) -> float | None:
    try:
        return file.lstat().st_mtime
    except FileNotFoundError:
        return None


def _content(file: Path) -> bytes:
    """The contents of a file; a link is not followed. OSError."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.read(handle, LARGEST)
    finally:
        os.close(handle)


def _read(file: Path) -> Owner | None:
    """The owner that a lock names; None if there is no lock, or one that is damaged or not from this program."""
    try:
        content = json.loads(_content(file))
        owner = Owner(**content)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    wrong = [f for f in fields(Owner) if type(getattr(owner, f.name)).__name__ != f.type]
    return None if wrong else owner


def _token(file: Path) -> str:
    """The token of a lock; "" if it is damaged. FileNotFoundError, OSError."""
    try:
        _content(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    owner = _read(file)
    return owner.token if owner is not None else ""


def _token_or_none(file: Path) -> str | None:
    try:
        return _token(file)
    except FileNotFoundError:
        return None


def _alive(owner: Owner) -> bool:
    """Whether the process of an owner on this host still exists."""
    return is_alive(owner.pid, owner.born or None)


def born(pid: int) -> str | None:
    """When a process began, as the system counts; None where it does not say. In a container that starts again, the
    same numbers come back."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, TypeError, IndexError, OverflowError):
        return None


def is_alive(pid: int, since: str | None) -> bool:
    """Whether the process `pid` that began at `since` (None: unknown) still exists."""
    now = born(pid)
    if since is not None and now is not None and now != since or _is_zombie(pid):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError, ValueError):  # another user's, or no process number at all
        return True
    return True


def _is_zombie(pid: int) -> bool:
    """Whether a process has ended and only its parent has not noticed yet."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, ValueError, TypeError, IndexError, OverflowError):
        return False


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
