"""The two parts of a trained model come back beside each other: no wait between them, and both are there when used."""

from __future__ import annotations

from typing import Any

import pytest

from rldsl.plan.events import Onload
from rldsl.runtime.interpreter import model_events
from rldsl.runtime.state.model_store import ModelStore
from rldsl.runtime.store import Pending


class Shard:
    def __init__(self, seen: list[str]):
        self.seen = seen

    def onload(self, what: str) -> Any:
        self.seen.append(f"issue {what}")
        return lambda: self.seen.append(f"wait {what}")


class Rank(ModelStore):
    """With one shard, and no context."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        super().__init__(None, {("actor", "home"): Shard(self.seen)})  # type: ignore[arg-type, dict-item]

    def onload(self, what: Any) -> None:
        model_events.onload(self, Onload(id=1, mesh="m", model="actor", layout="home", part=what))


def test_nothing_waits_between_them() -> None:
    rank = Rank()
    rank.onload("parameters")
    rank.onload("optimizer")
    assert rank.seen == ["issue parameters", "issue optimizer"]
    rank.shard_to_read("actor", "home")
    assert rank.seen[2:] == ["wait parameters", "wait optimizer"] and not rank.arriving


@pytest.mark.parametrize("what", ["parameters", "optimizer"])
def test_one_alone(what: str) -> None:
    rank = Rank()
    rank.onload(what)
    rank.shard_to_read("actor", "home")
    rank.shard_to_read("actor", "home")
    assert rank.seen == [f"issue {what}", f"wait {what}"]


@pytest.mark.parametrize("what, order", [("parameters", ["came", "issue parameters", "wait parameters"]),
                                         ("optimizer", ["issue optimizer", "came", "wait optimizer"])])
def test_what_still_comes_into_the_parameters(what: str, order: list[str]) -> None:
    rank = Rank()
    rank.arriving["actor", "home"] = Pending(lambda: rank.seen.append("came"))
    rank.onload(what)
    rank.shard_to_read("actor", "home")
    assert rank.seen == order
