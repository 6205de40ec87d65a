"""The engine process of a rank: it is started, asked, and its end is noticed.

In: requests (`engine.py` has the form). Out: answers.
Invariants: the process sees nothing of the run's world; it ends with the rank; whoever waits for an answer learns that
there will be none.
Errors: RL0326 no vLLM of a supported version, RL0801 the engine failed or ended.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import IO, Any

from rldsl.backends.vllm import engine
from rldsl.backends.vllm.describe import DESCRIPTION, PYTHON
from rldsl.diag import Failure, fail, present
from rldsl.plan.backends import how_to_install, release

WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
         "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT")  # of the run; and all of TORCHELASTIC_
LAST_LINES = 12  # of its output, that a message shows
TAIL = 2**16  # bytes in which they are looked for
PATIENCE = 5.0  # seconds that it has to end after its input was closed
START_LIMIT = 600.0  # seconds in which it must have imported vLLM
SILENCE_LIMIT = 1800.0  # seconds without a sign of progress, in which it loads a model or takes a decode step


class EngineProcess:
    """One process with vLLM. Nothing of the model is in it yet."""

    def __init__(self, model: str, memory: int, device: str):
        """model: its name, for messages. memory: the descriptor of the weights. device: where it computes."""
        self.model = model
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- as long as the process
        python = os.environ.get(PYTHON) or sys.executable
        try:
            self.process = subprocess.Popen(
                [python, engine.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log,
                env=environment(os.environ, device), pass_fds=(memory,), start_new_session=True)
        except OSError as error:
            raise self._unusable(f"{python} cannot be run: {error.strerror}") from None
        self._finalizer = weakref.finalize(self, _end, self.process)
        self._check_version(python)

    def ask(self, verb: str, arrays: engine.Arrays | None = None, **message: Any
            ) -> tuple[dict[str, Any], engine.Arrays]:
        """Send a request and wait for its answer. Errors: RL0801."""
        requests = present(self.process.stdin, "standard input of the engine")
        stream = present(self.process.stdout, "standard output of the engine")
        answers = open(stream.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 -- what is read ahead is no wait
        try:
            engine.send(requests, {"verb": verb, **message}, arrays)
            self._wait_for(answers, verb)
            answer, found = engine.receive(answers)
            while answer == engine.PROGRESS:
                self._wait_for(answers, verb)
                answer, found = engine.receive(answers)
        except (EOFError, BrokenPipeError):
            raise self._ended() from None
        if "error" in answer:
            raise self.failed(verb, str(answer["error"]))
        return answer, found

    def close(self) -> None:
        self._finalizer()

    def _wait_for(self, answers: IO[bytes], verb: str) -> None:
        """Wait until there is something to read. Errors: RL0801 where nothing comes."""
        limit = START_LIMIT if verb == "hello" else SILENCE_LIMIT
        if not select.select([answers], [], [], limit)[0]:
            self.process.kill()
            raise self.failed(verb, f"it has reported no progress for {limit:g} s", *self._last_lines())

    def _check_version(self, python: str) -> None:
        try:
            answer, _ = self.ask("hello")
        except Failure as failure:
            raise self._unusable(f"vLLM cannot be imported by {python}", *failure.diagnostics[0].notes) from None
        _, first, end = DESCRIPTION.versions or ("", "0", "0")
        if not release(first) <= release(answer["version"]) < release(end):
            self.close()
            raise self._unusable(f"vLLM {answer['version']} of {python} is not supported: version {first} or later, "
                                 f"before {end}, is required")

    def _unusable(self, *notes: str) -> Failure:
        return fail("RL0326", f"`{self.model}` is placed with `backend=vllm`, which is not available here", notes=notes,
                    help=f"install it on every machine with {how_to_install(DESCRIPTION)}; or compile for "
                         "`backend=torch`")

    def failed(self, verb: str, *notes: str) -> Failure:
        """RL0801 for a request that has no usable answer."""
        if verb == "hello":
            self.close()
        return fail("RL0801", f"the vLLM engine of `{self.model}` could not {VERBS[verb]}", notes=notes,
                    help="the messages are of vLLM and its engine; `backend=torch` samples without it")

    def _ended(self) -> Failure:
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        how = (f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}")
        return fail("RL0801", f"the vLLM engine of `{self.model}` {how}", notes=self._last_lines(),
                    help="if the system killed it for lack of memory, use smaller `mbs`; a run with `checkpoint` "
                         "continues with `--resume`")

    def _last_lines(self) -> tuple[str, ...]:
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(end - TAIL, 0))
        lines = self._log.read().decode(errors="replace").splitlines()
        return tuple(line for line in lines if line.strip())[-LAST_LINES:]


VERBS: Mapping[str, str] = {"hello": "start", "open": "load the model", "load": "take the weights",
                            "sleep": "give its memory back", "generate": "generate", "converse": "begin conversations",
                            "turns": "generate a turn"}


def environment(own: Mapping[str, str], device: str) -> dict[str, str]:
    """The variables of an engine process: those of the rank without its world."""
    kept = {name: value for name, value in own.items() if name not in WORLD and not name.startswith("TORCHELASTIC_")}
    # vLLM in this very process, so that requests are taken in order and nothing is left when it ends; no thread is
    # bound to a core, since the engines of several ranks would bind theirs to the same ones
    usual = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
             "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    kind, _, index = device.partition(":")
    if kind == "cuda":
        seen = own.get("CUDA_VISIBLE_DEVICES", "").split(",") if own.get("CUDA_VISIBLE_DEVICES") else []
        number = int(index or 0)
        kept["CUDA_VISIBLE_DEVICES"] = seen[number] if number < len(seen) else str(number)
    return {**usual, **kept, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """It ends when its input does."""
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            with suppress(BrokenPipeError):
                stream.close()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
