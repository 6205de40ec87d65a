"""Host memory of what is offloaded: as many bytes as there are, pinned once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rldsl.backends.torch.model.offload import HostMemory


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
    assert sorted(size for _, size in cudart.registered) == sorted([4 * (35 + 1025), 8 * 3, 2 * 9])
    host.offload({"later": torch.ones(2)})
    assert len(cudart.registered) == 4 and not cudart.unregistered
    del host  # its memory may be given to others, who register it again
    assert cudart.unregistered == [pointer for pointer, _ in cudart.registered]


def test_memory_that_cannot_be_pinned_is_an_error(cudart: Cudart) -> None:
    cudart.status = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        HostMemory(torch.device("cuda")).offload({"a": torch.ones(2)})
    assert not cudart.unregistered


def test_nothing_moves_on_the_cpu() -> None:
    host = HostMemory(torch.device("cpu"))
    tensors: dict[str, Any] = {"a": torch.ones(2)}
    assert host.offload(tensors)["a"] is tensors["a"] and host.onload(tensors)[0]["a"] is tensors["a"]
