"""Messages of a pipeline that are waited for together, as NCCL's are: one work for all of an exchange. gloo has one for
each."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rldsl.backends.torch.train.pipeline import P2PCommunicator, SentMessages
from rldsl.memory.train_memory import MAX_SENT_GRADIENTS
from rldsl.runtime.backend import Axis
from rldsl.sharding.pipeline_schedule import Exchange, MicroBatchPass, actions, max_waiting_messages


class Exchanges:
    """What one rank posts, and what it waits for, in order."""

    def __init__(self, coalesced: bool):
        self.coalesced, self.posted, self.waited = coalesced, 0, list[tuple[int, str]]()

    def post(self, operations: list[Any]) -> list[Work]:
        number, self.posted = self.posted, self.posted + 1
        kinds = ["send" if op.op is dist.isend else "receive" for op in operations]
        return [Work(self, number, "all")] if self.coalesced else [Work(self, number, kind) for kind in kinds]


class Work:
    def __init__(self, of: Exchanges, number: int, kind: str):
        self.of, self.number, self.kind = of, number, kind

    def wait(self) -> None:
        self.of.waited.append((self.number, self.kind))


class Operation:
    """`dist.P2POp`, which asks for a process group."""

    def __init__(self, op: Any, tensor: torch.Tensor, peer: int, group: Any):
        self.op = op


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize(("pp", "chunks", "count"), [(2, 1, 4), (4, 1, 8), (2, 2, 4), (4, 2, 8), (3, 2, 6), (3, 4, 7), (8, 3, 16)])
def test_no_message_is_waited_for_before_a_pass_needs_it(pp: int, chunks: int, count: int, coalesced: bool,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "P2POp", Operation)
    early_at_all, gradients = False, 0
    most = max_waiting_messages(pp, chunks, count)
    for rank, own in enumerate(actions(pp, chunks, count)):
        exchanges = Exchanges(coalesced)
        monkeypatch.setattr(dist, "batch_isend_irecv", exchanges.post)
        p2p = P2PCommunicator(Axis(tuple(range(pp)), rank, None))
        brings: dict[int, set[MicroBatchPass]] = {}  # exchange -> passes that need what it brings
        used: set[MicroBatchPass] = set()
        backward: list[SentMessages] = []  # of gradients
        kept = 0
        for action in own:
            before = len(exchanges.waited)
            if isinstance(action, Exchange):
                brings[exchanges.posted] = {m.for_pass for m in action.receives}
                p2p.exchange(action, torch.zeros(1), lambda i: torch.zeros(1))
                for number, kind in exchanges.waited[before:]:
                    assert kind == "send" or brings[number] <= used, (rank, number)
                kept = max(kept, len(p2p.sends))
                backward += p2p.sends[-1:] if any(m.for_pass.backward for m in action.sends) else []
                gradients = max(gradients, sum(any(sent is x for x in backward) for sent in p2p.sends))
                early_at_all |= any(x - used for x in brings.values())
            else:
                used.add(action)
                p2p.wait_receive(action)
        p2p.finish()
        assert not p2p.sends and not p2p.receives
        assert {number for number, _ in exchanges.waited} == set(range(exchanges.posted))
        assert kept <= (max(1, most[rank]) if coalesced else 1)
    assert early_at_all and gradients <= (MAX_SENT_GRADIENTS if coalesced else 1)
