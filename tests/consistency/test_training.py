"""`invariant=training`: parameters after a whole run have the same bits under every placement that is allowed, metrics
included; the sums that this stands on; what would divide them differently is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from hashlib import sha256
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rldsl import api
from rldsl.backends.torch.model.leaf_sums import Leaf, LeafSums, exact_norm
from rldsl.diag import Failure
from rldsl.models.families import describe, sizes_of
from rldsl.plan.events import Loop, Train
from rldsl.plan.model import Optimizer, Plan
from rldsl.runtime.interpreter.exact_sums import as_floats, exact_sum, exact_words
from rldsl.source import SourceFile
from rldsl.sharding.gradient_leaves import LEAVES, PASS_TOKENS, passes_of_rank
from rldsl.verify import verify
from tests.backend_torch.shards import layout_of, pack, plan_model, ragged, shard_of
from tests.end_to_end.programs import Metrics, run_program
from tests.end_to_end.test_invariance import HERE, everywhere, placement
from tests.samples import thorough_between, thorough_unless
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

TWO = dict(num_hidden_layers=2)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
ODD = dict(family="qwen2", num_attention_heads=6, num_key_value_heads=2, hidden_size=48, intermediate_size=90)
# what is trained -> (options of `make_model`, dtype, adapters)
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "tied": (dict(tie_word_embeddings=True, **TWO), "float32", ""),
    "bfloat16": (dict(tie_word_embeddings=True, **TWO), "bfloat16", ""),
    "experts": (dict(family="qwen3_moe", **MIXTURE, **TWO), "float32", ""),
    "adapters": (dict(**ODD, **TWO), "float32", "lora(r=4), "),
}
DISJOINT = placement(4, actor_generate="on mesh(2:4)", actor_train="on mesh(0:2) dp=2 zero=1",
                     **{"ref_*": "on mesh(1:2)"})
MIXED = placement(4, actor_generate="on mesh(0:4) dp=2 tp=2", actor_train="on mesh(0:4) tp=2 pp=2",
                  **{"ref_*": "on mesh(0:2) tp=2"})
FULL = placement(4, actor_generate="on mesh(0:4) dp=4", actor_train="on mesh(0:4) dp=4 zero=3 recompute=full",
                 **{"ref_*": "on mesh(0:1)"})
WIDE = placement(4, actor_generate="on mesh(0:4) tp=4", actor_train="on mesh(0:4) dp=2 tp=2 zero=2 recompute=full",
                 **{"ref_*": "on mesh(0:2) tp=2"})
LONG = placement(4, actor_generate="on mesh(0:4) dp=4", actor_train="on mesh(0:4) cp=2 tp=2",
                 **{"ref_*": "on mesh(0:2) cp=2"})
SLICED = placement(4, actor_generate="on mesh(0:4) dp=2 tp=2", actor_train="on mesh(0:4) dp=2 cp=2 zero=3",
                   **{"ref_*": "on mesh(0:1)"})
EXPERTS = placement(4, actor_generate="on mesh(0:4) dp=2 ep=2 tp=2", actor_train="on mesh(0:4) dp=2 ep=2 tp=2",
                    **{"ref_*": "on mesh(0:1)"})
PLACEMENTS = [
    ("tied", everywhere(8, "dp=8", "actor", "ref")), ("tied", DISJOINT), ("tied", MIXED), ("tied", FULL),
    ("tied", LONG), ("bfloat16", WIDE), ("bfloat16", SLICED), ("experts", EXPERTS), ("experts", LONG),
    ("adapters", MIXED), ("adapters", SLICED)]
SHOWN = [("tied", MIXED), ("bfloat16", SLICED), ("experts", EXPERTS), ("adapters", MIXED)]


def write_page(folder: Path, dtype: str = "float32", adapters: str = "", invariant: str = "training") -> Path:
    """GRPO with a KL penalty, in minibatches and epochs, with clipped gradients; its data and reward beside it."""
    text = (HERE / "grpo_small.rlf").read_text()
    text = text.replace("causal_lm(base) train", f"causal_lm(base, {adapters}dtype={dtype}, invariant={invariant}) train")
    text = text.replace("causal_lm(base)\n", f"causal_lm(base, dtype={dtype}, invariant=true)\n")
    (folder / "rewards_small.py").write_text((HERE / "rewards_small.py").read_text())
    write_jsonl(folder / "rows.jsonl", make_sums(32))
    page = folder / "page.rlf"
    page.write_text(text)
    return page


# two updates in each of two steps, so that the second generates with what the first has trained; 6 rows, of which a
# minibatch leaves some leaves with one and some ranks of dp=8 with none
SETS = {"rows": "rows.jsonl", "steps": 2, "batch": 3, "samples": 2, "tokens": 4, "minibatches": 2, "epochs": 1,
        "every_step": 2, "limit": 0.5}
Found = tuple[str, Metrics]


def run(model: Path, folder: Path, case: str, place: str) -> Found:
    """The digest of the parameters that were saved, and the metrics."""
    page = write_page(folder, *CASES[case][1:])
    found = run_program(page, SETS | {"base": str(model), "rows": str(folder / "rows.jsonl")}, folder, place)
    saved = {f"{file.parent.name} {name}": x for file in sorted(folder.rglob("*.safetensors"))
             for name, x in load_file(file).items()}
    assert saved
    return sha256(b"".join(saved[n].view(torch.uint8).numpy().tobytes() for n in sorted(saved))).hexdigest(), found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {case: make_model(folder / case, **options) for case, (options, _, _) in CASES.items()}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """A case on one rank."""
    place = everywhere(1, "dp=1", "actor", "ref")
    return cache(lambda case: run(models[case], tmp_path_factory.mktemp("alone"), case, place))


@pytest.mark.thorough
@pytest.mark.parametrize(("case", "place"), thorough_unless(lambda *cell: cell in SHOWN, PLACEMENTS))
def test_parameters_and_metrics_have_the_same_bits(case: str, place: str, models: dict[str, Path],
                                                   alone: Callable[[str], Found], tmp_path: Path) -> None:
    assert run(models[case], tmp_path, case, place) == alone(case)


GRADIENTS = {
    "tied": dict(tie_word_embeddings=True), "biases": ODD,
    "experts": dict(family="qwen3_moe", **MIXTURE),
    "norms": dict(family="gemma"), "transposed": dict(family="gpt2", n_layer=2),
    "norms of heads before tokens": dict(family="exaone4"),
    "norms of heads that tp leaves whole": dict(family="afmoe", num_dense_layers=2, head_dim=8)}


@pytest.mark.parametrize("case", thorough_between(GRADIENTS))
def test_gradients_are_torchs(case: str, tmp_path: Path) -> None:
    """But for rounding, whatever the order of their sums is."""
    options = GRADIENTS[case] if case == "transposed" else GRADIENTS[case] | TWO
    path, rows = str(make_model(tmp_path / "m", **options)), ragged(12, 46, longest=20)
    found, sgd = [], Optimizer(kind="sgd", lr=1e-2, clip_grad=0.0)  # AdamW would clear the gradients
    for ordered in (True, False):
        model = replace(plan_model(path, optimizer=sgd), invariant=ordered, invariant_training=ordered,
                        sizes=sizes_of(describe(path, "causal_lm")))
        made = shard_of(model, layout_of(), 0, trainable=True)
        assert made is not None
        passes = [(pack(rows[:5]),), (pack(rows[5:]),)]
        made[0].train(passes, [("logprobs", "entropy")], 0.7,
                      lambda _, fresh: (fresh[0]["logprobs"] - 0.1 * fresh[0]["entropy"]).sum() / 60,
                      leaves=[2] + [0] * 7 if ordered else ())
        found.append({name: p.grad.clone() for name, p in made[0].stage.parameters.items()})
    for name, right in found[1].items():
        assert right.abs().max() > 0 and torch.allclose(found[0][name], right, rtol=1e-3, atol=1e-6), name


def test_something_was_learned(alone: Callable[[str], Found]) -> None:
    """The comparison would mean little if nothing moved, or if nothing was clipped."""
    for case in CASES:
        metrics = alone(case)[1]
        assert len({step["actor/loss"] for step in metrics}) == 2 and metrics[-1]["actor/grad_norm"] > 0.5, case


# micro-batches of each leaf, in rows: several in most, in some none; and one in few, for what follows from their sum
SIZES = ((3, 2), (1,), (), (2, 1), (4,), (1, 1, 1), (), (2,))
FEW = ((1,), (), (), (2,), (), (1,), (), ())


def _parameters(rank: int, path: str, degrees: list[dict[str, int]], optimizer: Optimizer,
                sizes: tuple[tuple[int, ...], ...], kind: str = "causal_lm", output: str = "logprobs") -> list[Any]:
    """For each layout this rank's parameters after two steps: (name, boxes, numbers) each."""
    rows, found = ragged(60, 46, longest=12), []
    counts = iter(accumulate(n for leaf in sizes for n in leaf))
    bounds = [[(stop := next(counts)) - n for n in leaf] + ([stop] if leaf else []) for leaf in sizes]
    for given in degrees:
        model = replace(plan_model(path, kind, optimizer), invariant=True, invariant_training=True,
                        sizes=sizes_of(describe(path, kind)))
        layout = layout_of(**given)
        made = shard_of(model, layout, rank, trainable=True)
        if made is None:
            found.append([])
            continue
        shard, dp = made
        each = LEAVES // layout.dp
        mine = bounds[dp * each : (dp + 1) * each]
        most = [max(max(len(bounds[r * each + i]) - 1, 0) for r in range(layout.dp)) for i in range(each)]
        passes = [[rows[a:b] for a, b in zip(at, at[1:])] for at in mine]
        if layout.zero:
            passes = [leaf + [[]] * (n - len(leaf)) for leaf, n in zip(passes, most, strict=True)]
        for _ in range(2):
            shard.train([(pack(part),) for leaf in passes for part in leaf], [(output,)], 1.0,
                        lambda _, fresh: (fresh[0][output].double() - 1).square().sum() / 60,
                        leaves=[len(x) for x in passes])
        held = {name: (x, shard.stage.held[name][1]) for name, x in shard.state_dict().items()}
        found.append([(name, [p.box for p in pieces], x.numpy().copy()) for name, (x, pieces) in held.items()])
    return found


DEGREES = [{}, {"dp": 2}, {"dp": 4, "zero": 1}, {"dp": 4, "zero": 3}, {"dp": 2, "pp": 2}, {"tp": 4},
           {"dp": 2, "tp": 2, "zero": 3}]
MORE = [{"dp": 4}, {"dp": 2, "pp": 2, "zero": 2}, {"cp": 2, "pp": 2}, {"cp": 2, "tp": 2}]
ADAMW = Optimizer(lr=1e-2, clip_grad=0.5)
OPTIMIZERS = {
    "adamw": ADAMW, "sgd": replace(ADAMW, kind="sgd", momentum=0.9), "adafactor": replace(ADAMW, kind="adafactor", eps=1e-3),
    "muon": replace(ADAMW, kind="muon", momentum=0.95, nesterov=True), "adamw_8bit": replace(ADAMW, kind="adamw_8bit")}


@pytest.mark.thorough
@pytest.mark.parametrize("optimizer", thorough_unless(lambda name: name != "adamw", OPTIMIZERS))
def test_leaves_of_several_passes(optimizer: str, tmp_path: Path) -> None:
    """Muon's bfloat16 makes percents of the last bit of a gradient: here it gets the same bits. How gradients are added
    does not depend on the optimizer: all patterns of passes with one, few with the others."""
    path = str(make_model(tmp_path / "m", tie_word_embeddings=True, **TWO, intermediate_size=144))
    degrees = DEGREES + (MORE if optimizer == "adamw" else [])
    check(degrees, run_world(4, _parameters, path, degrees, OPTIMIZERS[optimizer], SIZES if optimizer == "adamw" else FEW))


def check(degrees: list[dict[str, int]], ranks: list[Any]) -> None:
    """The parameters of the first layout, which is that of one rank, are those of all."""
    right = {name: x for name, _, x in ranks[0][0]}
    for at, given in enumerate(degrees):
        seen = dict.fromkeys(right, 0)
        for here in ranks:
            for name, boxes, x in here[at]:
                part = right[name] if not boxes else right[name][tuple(slice(*side) for side in boxes[0])]
                assert (x == part).all(), (given, name)
                seen[name] += x.size
        assert all(seen[name] >= right[name].size for name in right), given


@pytest.mark.parametrize("family", ["phi3", "glm4"])
def test_columns_that_every_rank_needs(family: str, tmp_path: Path) -> None:
    """All of phi3's attention, and one half of glm4's layers: each rank computes a part of the columns, and what follows
    is computed by all alike."""
    path, degrees = str(make_model(tmp_path / "m", family=family, **TWO)), [{}, {"tp": 2}]
    check(degrees, run_world(2, _parameters, path, degrees, ADAMW, FEW))


def test_a_rank_without_rows_of_a_head(tmp_path: Path) -> None:
    """A scalar head has one row, which zero gives to one rank alone."""
    path, degrees = str(make_model(tmp_path / "m", **TWO)), [{}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}]
    check(degrees, run_world(2, _parameters, path, degrees, ADAMW, FEW, "value_model", "values"))


# ------------------------------------------------------------------------------------------------ the sums


def tree(leaves: Sequence[torch.Tensor]) -> torch.Tensor:
    """Written down: halves are added."""
    half = len(leaves) // 2
    return leaves[0] if len(leaves) == 1 else tree(leaves[:half]) + tree(leaves[half:])


def test_a_tree_of_a_rank_is_a_part_of_the_tree_of_all() -> None:
    leaves = torch.randn(LEAVES, 100, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(LEAVES)[:, None]

    def total(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        sums = LeafSums()
        for part in parts:
            sums.add([part.clone()])  # given away
        return only(sums.take())

    for ranks in (1, 2, 4, 8):
        assert torch.equal(total([total(part) for part in leaves.chunk(ranks)]), tree(leaves))
    assert not torch.equal(leaves.sum(0), tree(leaves)) and torch.allclose(leaves.sum(0), tree(leaves))


def only(leaf: Leaf | None) -> torch.Tensor:
    assert leaf is not None and len(leaf) == 1 and leaf[0] is not None
    return leaf[0]


def test_leaves_without_rows_add_nothing() -> None:
    """All 256 patterns; the sum is in the memory of the first leaf with rows."""
    leaves = torch.randn(LEAVES, 20, generator=torch.Generator().manual_seed(1)) * 10.0 ** torch.arange(LEAVES)[:, None]
    sums, buffer = LeafSums(), torch.zeros(20)
    for pattern in product((False, True), repeat=LEAVES):
        for leaf, has_rows in zip(leaves, pattern, strict=True):
            own = leaf.clone() if sums.has_rows else buffer.copy_(leaf)
            sums.add([own] if has_rows else None)
        assert sums.has_rows == any(pattern)
        found, kept = sums.take(), torch.tensor(pattern, dtype=torch.float32)[:, None]
        assert (found is None) == (not any(pattern)) and not sums.has_rows
        if found is not None:
            assert only(found) is buffer and torch.equal(buffer, tree(list(leaves * kept + 0.0)))


def test_gradients_that_a_leaf_does_not_have_add_nothing() -> None:
    sums, one = LeafSums(), torch.ones(3)
    for leaf in ([one.clone(), None, None], [None, None, 2 * one], None, [one.clone(), None, 4 * one]):
        sums.add(leaf)
    found = sums.take()
    assert found is not None and found[1] is None
    assert [float(x.sum()) for x in found if x is not None] == [6.0, 18.0]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e15])
def test_a_norm_does_not_depend_on_its_parts(scale: float) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * scale
    found = {exact_norm(parts, None, x.device) for parts in ([x], x.split(7), list(x.flip(0).split(999)))}
    assert len(found) == 1 and found.pop() == pytest.approx(x.double().norm().item(), rel=1e-12)


def test_a_norm_of_what_is_not_finite() -> None:
    device = torch.device("cpu")
    assert exact_norm([torch.zeros(3)], None, device) == exact_norm([], None, device) == 0
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert exact_norm([torch.ones(3), torch.tensor([1.0, bad])], None, device) == torch.inf


@pytest.mark.parametrize("terms", [[0.1] * 10, [1e300, -1e300, 1e-300], [-5.5, 2.25], [], [torch.inf], [torch.nan, 1.0]])
def test_words_survive_messages_of_floats(terms: list[float]) -> None:
    words = exact_words(torch.tensor(terms, dtype=torch.float64))
    sent = sum(as_floats(w) for w in (words, words, words))
    assert repr(exact_sum(sent)) == repr(exact_sum(3 * words))
    assert all(abs(x) < 2**34 for x in as_floats(words).tolist())


def test_passes_follow_from_the_rows_alone() -> None:
    lengths = [7, 3, 9, 9, 1, 2, 8, 4, 4, 6]
    leaves = [(0, 1, 2), (3,), (), (4, 5, 6, 7), (8,), (9,), (), ()]
    whole = passes_of_rank(leaves, 1, 0, lengths, 10, False)
    for dp in (2, 4, 8):
        ranks = [passes_of_rank(leaves, dp, r, lengths, 10, False) for r in range(dp)]
        padded = [passes_of_rank(leaves, dp, r, lengths, 10, True) for r in range(dp)]
        assert [leaf for rank in ranks for leaf in rank] == whole
        assert len({tuple(map(len, rank)) for rank in padded}) == 1
        assert [[p for p in leaf if p] for rank in padded for leaf in rank] == [list(leaf) for leaf in whole]


# ------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(("where", "word"), [
    ("on mesh(0:4) cp=4", "cp=4"), ("on mesh(0:16) tp=16", "tp=16"),
    ("on mesh(0:16) dp=16", "dp=16"), ("on mesh(0:2) dp=2 mbs=2", "must not depend"),
    ("on mesh(0:2) dp=2 mbt=512", "1024 tokens are summed together")])
def test_other_placements_are_refused(where: str, word: str, tmp_path: Path) -> None:
    page = write_page(tmp_path)
    place = placement(16, actor_generate="on mesh(0:1)", actor_train=where, **{"ref_*": "on mesh(0:1)"})
    found = api.check(page.read_text(), str(page), place=SourceFile("place.rlf", place))
    assert [d.code for d in found] == ["RL0330"] and word in found[0].label


@pytest.mark.parametrize(("actor", "ref", "warned"), [
    ("training", "true", []), ("training", "false", ["RL0908"]), ("true", "false", [])])
def test_a_model_that_varies_is_pointed_out(actor: str, ref: str, warned: list[str], tmp_path: Path) -> None:
    page = write_page(tmp_path, invariant=actor)
    found = api.examine(page.read_text().replace("float32, invariant=true", f"float32, invariant={ref}"), str(page))
    assert [d.code for d in found] == warned and all("`ref` is not invariant" in d.title for d in found)


@pytest.mark.parametrize("written", ["2", "1", '"true"'])
def test_other_levels_are_refused(written: str, tmp_path: Path) -> None:
    page = write_page(tmp_path, invariant=written)
    (found,) = api.check(page.read_text(), str(page))
    assert found.code == "RL0205" and "`invariant` must be true or false, or training" in found.title


@pytest.fixture(scope="module")
def plan(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Plan:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "place.rlf").write_text(everywhere(2, "dp=2", "actor", "ref"))
    return api.compile(str(write_page(folder)), {"base": str(models["tied"])}, str(folder / "place.rlf"))


def with_train(plan: Plan, change: Callable[[Train], Train]) -> Plan:
    def item(x: Any) -> Any:
        return replace(x, body=tuple(map(item, x.body))) if isinstance(x, Loop) else \
            change(x) if isinstance(x, Train) else x

    return replace(plan, body=tuple(map(item, plan.body)))


FORGED: dict[str, Callable[[Plan], Plan]] = {
    "rows are divided over the ranks": lambda p: replace(p, spreads=tuple(replace(s, leaves=0) for s in p.spreads)),
    "fewer leaves": lambda p: replace(p, spreads=tuple(replace(s, leaves=s.leaves // 2) for s in p.spreads)),
    "leaves that the ranks cannot share": lambda p: replace(
        p, spreads=tuple(replace(s, leaves=3 if s.leaves else 0) for s in p.spreads)),
    "smaller passes": lambda p: with_train(p, lambda e: replace(e, mbt=PASS_TOKENS - 1)),
    "passes of a number of rows": lambda p: with_train(p, lambda e: replace(e, mbs=2)),
    "leaves that no model asks for": lambda p: replace(
        p, models=tuple(replace(m, invariant_training=False) for m in p.models)),
    "another model asks for them": lambda p: replace(
        p, models=tuple(replace(m, invariant_training=True, invariant=False) for m in p.models)),
}


def test_the_plan_is_verified(plan: Plan) -> None:
    verify(plan)


@pytest.mark.parametrize("name", FORGED)
def test_other_plans_are_refused(name: str, plan: Plan) -> None:
    with pytest.raises(Failure) as failure:
        verify(FORGED[name](plan))
    assert {d.code for d in failure.value.diagnostics} <= {"RL0538", "RL0615"}
