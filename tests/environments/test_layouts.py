"""Conversations under every layout: with `invariant=true` the same bits, in any order of answers and for any number of
slots, on every rank of a shard; and what the ranks of a shard tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout
from rldsl.plan.payloads import Conversation, Waiting
from rldsl.runtime.environments import Arrival
from tests.backend_torch.shards import layout_of, plan_model, shard_of
from tests.environments.scripted import Scripted
from tests.families.tiny_configs import make as make_family
from tests.moe.shards import make
from tests.tiny import make_model
from tests.world import run_world

LIMITS = Conversation(("Guess",), max_turns=3, max_tokens=48, turn_timeout=60.0)
SAMPLING = Sampling(max_new_tokens=4, temperature=0.9)
ROWS = 7
LAYOUTS = [dict(), dict(pp=4), dict(tp=2, pp=2), dict(dp=4), dict(dp=2, tp=2), dict(dp=2, pp=2)]
EXPERTS = [dict(), dict(dp=4, ep=4), dict(dp=2, ep=2, pp=2), dict(dp=2, ep=2, tp=2)]
Run = tuple[int | None, int, Waiting]  # seed of the delays, slots, and what those that wait do
RUNS: list[Run] = [(None, 0, "keep"), (1, 0, "keep"), (2, 0, "keep"), (3, 0, "keep"), (1, 2, "keep"), (3, 2, "keep"),
                   (2, 1, "offload"), (3, 1, "recompute"), (1, 2, "offload"), (2, 2, "recompute")]


def runs_of(number: int) -> list[Run]:
    """Of a layout: all on one rank, and then three of those with delays, which differ from layout to layout."""
    return RUNS if number == 0 else [RUNS[1 + (3 * number + i) % 9] for i in range(3)]


class Rows(Scripted):
    """As the runtime begins conversations: by row alone."""

    def begin(self, row: int) -> None:  # type: ignore[override]
        super().begin(row, {"number": row}, "12 + 3 " * (row % 4 + 1) if row != 5 else "9 " * 30, seed=row)


def converse(rank: int, path: str, layouts: Sequence[dict[str, int]], sampling: Sampling, invariant: bool
             ) -> list[Any]:
    """(degrees, run, row, what came of it) of all rows of this rank."""
    from transformers import AutoTokenizer

    tokenizer, found = AutoTokenizer.from_pretrained(path), []
    for number, degrees in enumerate(layouts):
        x = layout_of(**degrees)
        made = shard_of(replace(plan_model(path), invariant=invariant), x, rank)
        if made is None:
            continue
        rows = [r for r in range(ROWS) if r % x.dp == made[1]] if x.dp < 4 else [
            [], [0, 1, 2], [3], list(range(4, ROWS))][made[1]]
        for delays, slots, waiting in runs_of(number):
            talks = made[0].axes.talks  # type: ignore[attr-defined]
            talk = Rows(tokenizer, None if delays is None else delays * 100 + rank) if talks else None
            out = made[0].converse(torch.tensor(rows, dtype=torch.int64), sampling, LIMITS, talk, seed=3, step=2,
                                   max_num_seqs=slots, waiting=waiting)
            assert out.given_away == 0 if waiting == "keep" else slots > 1 or len(rows) < 2 or out.given_away > 0
            own = out.batch.own
            assert own is not None and (talk is None) == (rank_of(x, rank) != (0, x.pp - 1))
            sizes = (out.batch.prompt_lens + out.batch.response_lens).tolist()
            found += [(str(degrees), (delays, slots, waiting), row, *map(torch.Tensor.tolist, result)) for row, *result in zip(
                rows, out.batch.tokens.split(sizes), own.split(sizes),
                out.logprobs.split(out.batch.response_lens.tolist()), out.rewards, out.turns, out.turn_sizes,
                out.turn_rewards, out.stopped, strict=True)]
    return found


def rank_of(x: Layout, rank: int) -> tuple[int, int]:
    """(tp, pp) of a rank."""
    from rldsl.plan.model import Mesh
    from rldsl.sharding.layout import coordinate, degree_product

    at = coordinate(x, Mesh("m0", ((0, degree_product(x)),)), rank)
    return at.tp, at.pp


def differing(found: list[list[Any]], layouts: Sequence[dict[str, int]], close: bool = False) -> list[Any]:
    """Rows that are not what they are on one rank, without delays, with a slot for each."""
    right = {row: result for degrees, run, row, *result in found[0] if (degrees, run) == ("{}", RUNS[0])}
    assert set(right) == set(range(ROWS)) and {stopped for *_, stopped in right.values()} == {0, 1, 2}
    everything = [x for rank in found for x in rank]
    for number, degrees in enumerate(layouts):
        copies = degrees.get("tp", 1) * degrees.get("pp", 1)
        assert all(sum(x[:3] == (str(degrees), run, row) for x in everything) == copies
                   for run in runs_of(number) for row in range(ROWS)), degrees
    same = close_to if close else list.__eq__
    return [x for x in everything if not same(right[x[2]], list(x[3:]))]


def close_to(a: list[Any], b: list[Any]) -> bool:
    """Equal but for the rounding of log-probs."""
    return a[:2] == b[:2] and a[3:] == b[3:] and torch.allclose(torch.tensor(a[2]), torch.tensor(b[2]), atol=1e-5)


@pytest.mark.thorough
def test_bit_for_bit_under_every_layout(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", num_hidden_layers=4))
    found = run_world(4, converse, path, LAYOUTS, SAMPLING, True)
    assert differing(found, LAYOUTS) == []


@pytest.mark.thorough
def test_bit_for_bit_where_experts_are_shared(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "qwen3_moe")
    found = run_world(4, converse, path, EXPERTS, SAMPLING, True)
    assert differing(found, EXPERTS) == []


@pytest.mark.thorough
def test_greedy_decoding_without_invariant_differs_by_rounding(tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", num_hidden_layers=2))
    layouts = [dict(), dict(tp=2), dict(pp=2), dict(dp=2)]
    found = run_world(2, converse, path, layouts, replace(SAMPLING, greedy=True), False)
    assert differing(found, layouts, close=True) == []


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_mamba", "jamba", "bloom"])
def test_states_and_inputs_of_waiting_conversations_are_kept(tmp_path: Path, family: str) -> None:
    """A slot holds more than keys and values where layers carry states, or sequences run from their beginning; an
    answer of several tokens continues a state, also where transformers' module does not."""
    path = make_family(tmp_path / "model", family)
    assert differing(run_world(1, converse, path, [{}], SAMPLING, False), [{}], close=True) == []


def contacted(rank: int, path: str) -> set[int]:
    """The ranks that take part in what this rank sends and receives in conversations."""
    import torch.distributed as dist

    peers: set[int] = set()
    plain = {name: getattr(dist, name) for name in ("all_reduce", "broadcast", "all_gather", "all_to_all_single",
                                                     "batch_isend_irecv")}

    def wrapped(name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            peers.update([op.peer for op in args[0]] if name == "batch_isend_irecv" else
                         dist.get_process_group_ranks(options.get("group") or dist.group.WORLD))
            return plain[name](*args, **options)
        return call

    x = layout_of(dp=2, tp=2) if path.endswith("tp") else layout_of(dp=2, pp=2)
    made = shard_of(plan_model(path.removesuffix("tp")), x, rank)
    assert made is not None
    from transformers import AutoTokenizer

    talk = Rows(AutoTokenizer.from_pretrained(path.removesuffix("tp")), rank) if made[0].axes.talks else None  # type: ignore[attr-defined]
    for name in plain:
        setattr(dist, name, wrapped(name))
    made[0].converse(torch.arange(3) + 3 * made[1], SAMPLING, LIMITS, talk, seed=3, step=2, max_num_seqs=2)
    return peers | {rank}


@pytest.mark.parametrize("degree", ["", "tp"])
def test_no_message_leaves_the_shard(tmp_path: Path, degree: str) -> None:
    path = str(make_model(tmp_path / "model", num_hidden_layers=2))
    shards = run_world(4, contacted, path + degree)
    assert sorted(map(sorted, shards)) == ([[0, 1], [0, 1], [2, 3], [2, 3]] if degree else
                                           [[0, 2], [0, 2], [1, 3], [1, 3]])


@pytest.mark.parametrize("arrivals", [
    [], [Arrival(3, (), True, "timeout", None, None)],
    [Arrival(7, (1, 2, 151_000), False, None, None, 0.1), Arrival(2**40, (5,), True, "no_call", -1.25e-30, 3.0)],
    [Arrival(0, (5 | 2**31 - 1 << 32, 7), False, None, -0.0, None), Arrival(1, (), True, "error", 1e308, -1e-308, 3)],
])
def test_arrivals_travel_exactly(arrivals: list[Arrival]) -> None:
    from rldsl.backends.torch.generate.conversation_ticks import decoded, encoded

    numbers = encoded(arrivals)
    assert list(decoded(torch.tensor(numbers, dtype=torch.int64).tolist())) == arrivals
