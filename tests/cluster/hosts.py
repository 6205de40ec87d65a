"""Two torchrun agents for tests: on this machine, or each in a user, network, mount and host-name namespace of its own,
so that they have other addresses and other names, as two machines have.

In: the bytes of a plan and a directory. Out: a `Run`, whose processes, with all that they started, end with it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex

from rldsl.runtime.local_ranks import held_port
from rldsl.runtime.metrics.names import computed

MARK = "TWO_HOSTS_TEST"  # in the environment of every process of a run
ADDRESSES = {"host-a": "10.77.0.1", "host-b": "10.77.0.2"}

# "$1": the host's name, "$2": its end of the cable, "$3": its address; then the command.
_HOST = """
set -e
hostname "$1"; mount --bind hosts /etc/hosts; ip link set lo up
if [ "$2" = cable-a ]; then
  ip link add cable-a type veth peer name cable-b; touch cable
  until [ -e peer ]; do sleep 0.02; done
  ip link set cable-b netns "$(cat peer)"
else
  echo $$ > peer.tmp; mv peer.tmp peer
  until ip link show cable-b > /dev/null 2>&1; do sleep 0.02; done
fi
ip addr add "$3/24" dev "$2"; ip link set "$2" up
shift 3; exec "$@"
"""
_NEW = ["unshare", "-Urnmu"]


def forbidden() -> str:
    """Why two hosts cannot be made here; "": they can."""
    probe = "hostname x && mount --bind /etc/hosts /etc/hosts && ip link add cable-a type veth peer name cable-b"
    try:
        done = subprocess.run([*_NEW, "sh", "-c", f"{probe} && nsenter --version && unshare -nmu true"], text=True,
                              capture_output=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no namespaces: {error}"
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()[:200]}"


@dataclass(frozen=True, slots=True)
class Run:
    """agents: torchrun of each host; what they and their ranks say is in said-0 and said-1 of `folder`."""

    folder: Path
    id: str
    agents: Sequence[subprocess.Popen[bytes]]

    def wait(self, seconds: float) -> list[int]:
        """The exit statuses of the agents, once both have ended."""
        end = time.monotonic() + seconds
        return [agent.wait(max(0.0, end - time.monotonic())) for agent in self.agents]

    def said(self) -> str:
        return "\n".join(p.read_text(errors="replace") for p in sorted(self.folder.glob("said-*")))

    def ranks(self) -> dict[int, int]:
        """Rank -> its process."""
        return {int(env["RANK"]): pid for pid, env in _processes(self.id) if "RANK" in env}

    def newest(self) -> int:
        """Step of the newest checkpoint; 0: none."""
        return max((int(p.name[5:]) for p in (self.folder / "out/checkpoints").glob("step-*")), default=0)

    def metrics(self) -> list[dict[str, float]]:
        """As of `programs.run_program`."""
        lines = [json.loads(line) for line in (self.folder / "out/metrics.jsonl").read_text().splitlines()]
        return [{"step": line["step"], **{name: line[name] for name in computed(line)}} for line in lines]


@contextmanager
def started(plan: bytes, folder: Path, namespaces: bool, *more: str, restarts: int = 0) -> Iterator[Run]:
    """Two agents with a rank each, as docs/cluster.md starts them. more: arguments of rldsl.run."""
    id = token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "p.plan").write_bytes(plan)
    (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for n, a in ADDRESSES.items()))
    agents: list[subprocess.Popen[bytes]] = []
    held = ExitStack()
    endpoint = "host-a:29500" if namespaces else f"localhost:{held.enter_context(held_port())}"
    try:
        for node, (name, address) in enumerate(ADDRESSES.items()):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
                       "--node-rank", str(node), "--max-restarts", str(restarts), "--rdzv-id", id,
                       "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "-m", "rldsl.run", "p.plan", "--out", "out", "--device", "cpu",
                       "--timeout", "60", *more]
            if namespaces:
                host = ["sh", "-c", _HOST, "host", name, f"cable-{name[-1]}", address]
                command = [*(_beside(agents[0].pid) if agents else _NEW), *host, *command]
            with (folder / f"said-{node}").open("wb") as said:
                agents.append(subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said,
                                               env=os.environ | {"OMP_NUM_THREADS": "1", MARK: id}))
            if namespaces and not node:
                until((folder / "cable").exists, 20)
        yield Run(folder, id, agents)
    finally:
        for _ in range(3):  # what was just being started while we looked
            for pid, _env in _processes(id):
                kill(pid)
        for agent in agents:
            agent.wait(20)
        held.close()


def _beside(pid: int) -> list[str]:
    """A host of its own among the users of that process, which may then hand it an end of the cable."""
    return ["nsenter", "-t", str(pid), "-U", "--preserve-credentials", "unshare", "-nmu"]


def until(true: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.01)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has just ended
        pass


def _processes(id: str) -> list[tuple[int, dict[str, str]]]:
    """Those of a run, with their environments: ranks have sessions of their own, and outlive a killed agent."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (text := (entry / "environ").read_text(errors="replace")):
                env = dict(x.split("=", 1) for x in text.split("\0") if "=" in x)
                if env.get(MARK) == id:
                    found.append((int(entry.name), env))
        except OSError:
            continue
    return found
