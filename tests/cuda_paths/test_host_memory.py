"""Host memory of what is offloaded: as many bytes as there are, pinned once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.runtime.host_memory import HostMemory


class Cudart:
    def __init__(self, status: int = 0):
        self.status, self.registered, self.unregistered = status, list[tuple[int, int]](), list[int]()

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        self.registered.append((pointer, size))
        return self.status

    def cudaHostUnregister(self, pointer: int) -> None:
        self.unregistered.append(pointer)


class Stream:
    def synchronize(self) -> None:
        """Copies of this test are synchronous."""


def check_error(status: int) -> None:
    if status:
        raise RuntimeError("CUDA error: out of memory")


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    made = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    return made


def test_memory_is_exact_and_allocated_once(cudart: Cudart) -> None:
    host = HostMemory(torch.device("cuda"))
    tensors = {"a": torch.randn(5, 7), "b": torch.randn(3, dtype=torch.float64), "c": torch.randn(1025),
               "none": torch.empty(0, 4), "half": torch.randn(9).bfloat16()}
    for _ in range(3):
        for x in tensors.values():
            x.add_(1)
        copies = host.offload(tensors)
        assert all(torch.equal(copies[n], x) and copies[n].shape == x.shape and copies[n].dtype == x.dtype
                   for n, x in tensors.items())
    assert sorted(size for _, size in cudart.registered) == [4096, 4096, 2 * 4096]  # whole pages of 18, 24, 4240 bytes
    pages = [page for start, size in cudart.registered for page in range(start, start + size, 4096)]
    assert all(page % 4096 == 0 for page in pages) and len({*pages}) == len(pages)
    host.offload({"later": torch.ones(2)})
    assert len(cudart.registered) == 4 and not cudart.unregistered
    del host  # its memory may be given to others, who register it again
    assert cudart.unregistered == [pointer for pointer, _ in cudart.registered]


def test_strides_are_kept_by_an_offload_alone(cudart: Cudart) -> None:
    """A checkpoint's file has contiguous tensors, of views, too."""
    whole = torch.randn(4, 6)
    tensors = {"transposed": whole[:, :].t(), "view": whole[:, 2:5]}
    away, copies = (getattr(HostMemory(torch.device("cuda")), name)(tensors) for name in ("offload", "copies"))
    assert all(torch.equal(x, tensors[name]) for found in (away, copies) for name, x in found.items())
    assert away["transposed"].stride() == (1, 6) and all(x.is_contiguous() for x in copies.values())


def test_memory_that_cannot_be_pinned_is_an_error(cudart: Cudart) -> None:
    cudart.status = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        HostMemory(torch.device("cuda")).offload({"a": torch.ones(2)})
    assert not cudart.unregistered


def test_copies_of_a_checkpoint_are_pinned_and_kept(cudart: Cudart, tmp_path: Path) -> None:
    """Parts of parameters, as a rank with a box of them writes them; the file has them, and no more."""
    host, whole = HostMemory(torch.device("cuda")), torch.randn(6, 8)
    views = {"a|param|w|0:6,2:5": whole[:, 2:5], "a|param|w|1:2,0:8": whole[1:2], "a|exp_avg|w": torch.randn(3).double()}
    for _ in range(2):
        whole.mul_(2)
        copies = host.copies(views)
        before = {name: x.clone() for name, x in views.items()}
        save_file(copies, str(tmp_path / "x.safetensors"))
        whole.add_(1)
        read = load_file(str(tmp_path / "x.safetensors"))
        assert read.keys() == before.keys() and all(torch.equal(read[n], x) for n, x in before.items())
    assert [size for _, size in cudart.registered] == [4096] * 2  # 24 and 104 bytes, in pages of their own


def test_copies_of_a_checkpoint_are_copies_on_the_cpu() -> None:
    x = torch.ones(4, 3)
    (copy,) = HostMemory(torch.device("cpu")).copies({"x": x[:, :2]}).values()
    x.zero_()
    assert copy.is_contiguous() and torch.equal(copy, torch.ones(4, 2))


def test_nothing_moves_on_the_cpu() -> None:
    host = HostMemory(torch.device("cpu"))
    tensors: dict[str, Any] = {"a": torch.ones(2)}
    assert host.offload(tensors)["a"] is tensors["a"] and host.onload(tensors)[0]["a"] is tensors["a"]
