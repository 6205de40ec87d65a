"""Tests of this directory need a CUDA GPU: `make gpu` runs them, and `make test` skips them where there is none."""

from __future__ import annotations

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.path.parent.name == "gpu" and "cuda" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU"))


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in `rldsl.run`
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    return device
