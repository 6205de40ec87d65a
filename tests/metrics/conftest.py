from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import make_all


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("metrics"), tie_word_embeddings=True, num_hidden_layers=2)


@pytest.fixture
def place(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with models and data."""
    for name in ("models", "data"):
        (tmp_path / name).symlink_to(tiny / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path
