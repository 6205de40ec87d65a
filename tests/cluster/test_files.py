"""The files of docs/cluster.md: the SLURM script with stand-ins of `srun` and `scontrol`, the Kubernetes manifest."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPT, MANIFEST = ROOT / "examples/cluster/slurm.sbatch", ROOT / "examples/cluster/pytorchjob.yaml"


@pytest.fixture
def bin(tmp_path: Path) -> Path:
    """Stand-ins that write down what they are called with."""
    folder = tmp_path / "bin"
    folder.mkdir()
    stubs = {"python": 'echo "python $*" >> calls', "scontrol": 'echo "scontrol $*" >> calls; [ "$1" = show ] && printf "gpu-a\\ngpu-b\\n"; exit 0',
             "srun": 'echo "srun $*" >> calls; trap "echo told >> calls; kill $! 2>/dev/null; exit 0" TERM\n'
                     'sleep "${STUB_SLEEP:-0}" & wait $!; exit "${STUB_CODE:-0}"'}
    for name, text in stubs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


def start(bin: Path, *arguments: str, **more: str) -> subprocess.Popen[str]:
    env = os.environ | {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-[a-b]",
                        "SLURM_JOB_NUM_NODES": "2"} | more
    return subprocess.Popen(["bash", str(SCRIPT), *arguments], cwd=bin.parent, env=env, text=True,
                            stderr=subprocess.PIPE)


def calls(bin: Path) -> list[str]:
    return (bin.parent / "calls").read_text().splitlines()


def test_the_script_is_bash_and_asks_slurm_for_what_it_needs() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)
    asked = [line.split(None, 1)[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=B:TERM@120", "--requeue", "--ntasks-per-node=1", "--nodes=2"} <= set(asked)


def test_one_torchrun_a_node_that_meets_at_the_first(bin: Path) -> None:
    process = start(bin, "p.plan", "--timeout", "60")
    assert process.wait(20) == 0
    (srun,) = (c for c in calls(bin) if c.startswith("srun"))
    assert "--rdzv-endpoint gpu-a:29500" in srun and "--nnodes 2 --nproc-per-node 8 --max-restarts 3" in srun
    assert srun.endswith("-m rldsl.run p.plan --out runs/p-7 --timeout 60") and "--resume" not in srun


def test_a_job_that_was_queued_again_resumes(bin: Path) -> None:
    (bin.parent / "runs/p-7/checkpoints/step-000004").mkdir(parents=True)
    assert start(bin, "p.plan").wait(20) == 0
    assert any("--out runs/p-7 --resume" in c for c in calls(bin))


def test_sigterm_is_passed_on_and_the_job_queued_again(bin: Path) -> None:
    process = start(bin, "p.plan", STUB_SLEEP="30")
    end = time.monotonic() + 20
    while not (bin.parent / "calls").exists() or not any(c.startswith("srun") for c in calls(bin)):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    process.terminate()
    assert process.wait(20) == 0
    assert calls(bin)[-2:] == ["told", "scontrol requeue 7"]


def test_a_failed_run_fails_the_job_and_is_not_queued_again(bin: Path) -> None:
    assert start(bin, "p.plan", STUB_CODE="3").wait(20) == 3
    assert not any("requeue" in c for c in calls(bin))


def test_without_a_plan(bin: Path) -> None:
    process = start(bin)
    assert process.wait(20) != 0 and "usage" in process.stderr.read()


def test_the_manifest() -> None:
    job = yaml.safe_load(MANIFEST.read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec, worker = job["spec"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert worker["replicas"] == spec["elasticPolicy"]["minReplicas"] == spec["elasticPolicy"]["maxReplicas"] == 2
    assert worker["restartPolicy"] == "OnFailure"
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    assert int(spec["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HF_HUB_OFFLINE"} <= {e["name"] for e in container["env"]}


@pytest.mark.parametrize("there, resume", [(False, ""), (True, " --resume")])
def test_a_pod_that_starts_again_resumes(bin: Path, there: bool, resume: str) -> None:
    job = yaml.safe_load(MANIFEST.read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    if there:
        for step in (4, 8):
            (bin.parent / f"runs/grpo/checkpoints/step-{step:06}").mkdir(parents=True)
    subprocess.run([*container["command"], *container["args"]], cwd=bin.parent, check=True,
                   env=os.environ | {"PATH": f"{bin}:{os.environ['PATH']}"})
    assert calls(bin) == [f"python -m rldsl.runtime.launch -m rldsl.run run.plan --out runs/grpo{resume}"]
