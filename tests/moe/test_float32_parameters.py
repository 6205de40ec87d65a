"""Parameters that transformers keeps in float32 in models of half precision, the biases of routers above all, are
float32 under every layout: loaded, moved between layouts, read by routers and saved bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.memory.parameters import Copy, resting, resting_bytes
from rldsl.models.families import describe
from rldsl.plan.model import Layout, Mesh, Model, ParamSpec
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import joined, summary
from rldsl.runtime.comm.reshard import RankReshard, reshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.sharding.boxes import Cell, expand_specs, local_slice, parameters, slices
from rldsl.sharding.dtypes import float32_specs, in_wire_dtypes, parameter_dtype, storage_dtype
from rldsl.sharding.layout import degree_product
from rldsl.simulate.work_counts import build_shard
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import pack, plan_model, shard_of
from tests.end_to_end.programs import run_program
from tests.families.tiny_configs import make
from tests.moe.test_router_bias import PROGRAM, ROWS, SGD, biases
from tests.samples import thorough_between
from tests.tiny import make_sums, write_jsonl
from tests.world import run_world

BIAS = "e_score_correction_bias"
CPU = torch.device("cpu")
RATE = 0.001


def at_one(folder: Path, family: str) -> str:
    """A directory whose biases are near 1, with digits that bfloat16 has not."""
    path = make(folder, family)
    file = folder / "model.safetensors"
    tensors = {name: 1 + x / 100 if name.endswith(BIAS) else x for name, x in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return at_one(tmp_path_factory.mktemp("float32") / "m", "deepseek_v3")


# ------------------------------------------------------------------------------------------- what a family says


@pytest.mark.parametrize("family, kept", thorough_between([
    ("deepseek_v3", (BIAS,)), ("glm4_moe", (BIAS,)), ("hy_v3", (BIAS,)), ("nemotron_h", (BIAS,)),
    ("lfm2_moe", ("expert_bias",)), ("ernie4_5_moe", (BIAS, "gate.weight")), ("hunyuan_v1_moe", ("wg.weight",)),
    ("olmo_hybrid", ("A_log",)), ("minimax_m2", ()), ("longcat_flash", ()), ("gpt_oss", ()), ("llama", ())]))
def test_what_is_kept_is_what_transformers_loads_in_float32(family: str, kept: tuple[str, ...], tmp_path: Path) -> None:
    """By a family's list of names (DeepSeek-V3), or because its code makes them so (LFM2, Hunyuan). Lists that count in
    float16 alone (gpt-oss, LongCat-Flash) do not; MiniMax-M2's biases are in half precision there, too."""
    from transformers import AutoModelForCausalLM

    path = make(tmp_path / "m", family)
    theirs: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    found = {p.name for p in expand_specs(float32_specs(describe(path, "causal_lm").params), 4)}
    assert found == {name for name, x in theirs.state_dict().items() if x.dtype == torch.float32}
    assert bool(found) == bool(kept) and all(any(name.endswith(end) for name in found) for end in kept)


def test_the_dtype_of_a_directory_changes_nothing(tmp_path: Path) -> None:
    """It is a fact of the family: a directory in bfloat16 keeps the same as one in float32."""
    import json

    for family in ("deepseek_v3", "lfm2_moe", "llama"):
        path = Path(make(tmp_path / family, family))
        before = float32_specs(describe(str(path), "causal_lm").params)
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
        assert float32_specs(describe(str(path), "causal_lm").params) == before and bool(before) == (family != "llama")


def test_a_copy_in_half_precision_has_the_biases_of_transformers(path: str) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    ours = shard_of(plan_model(path, dtype="bfloat16"), at(), 0)[0].state_dict()
    wide = {name for name, x in ours.items() if x.dtype == torch.float32}
    assert len(wide) == 3 and all(name.endswith(BIAS) for name in wide)
    for name in wide:
        assert torch.equal(ours[name], theirs[name]) and not torch.equal(ours[name], ours[name].bfloat16().float())


# --------------------------------------------------------------------------------------------------- training


@pytest.mark.thorough
def test_a_bias_at_one_moves_by_a_thousandth_in_half_precision(path: str) -> None:
    """Twenty steps, as float32 numbers move by the loads of the experts. A number of bfloat16 near 1 is off by up to
    0.004, and would not move in the first."""
    home = shard_of(plan_model(path, "causal_lm", SGD, dtype="bfloat16"), at(), 0, True)[0]
    by_hand = {n: x.clone() for n, x in home.state_dict().items() if n.endswith(BIAS)}
    rounded = {n: x.bfloat16() for n, x in by_hand.items()}
    assert len(by_hand) == 3

    def loss(i: int, fresh: Sequence[Any]) -> torch.Tensor:
        return fresh[0]["logprobs"].square().sum() * 0.02

    for _ in range(20):
        home.train([(pack(ROWS),)], [("logprobs",)], 1.0, loss, None, "full", router_bias_update_rate=RATE)
        for name, load in home.router_loads.loads.items():
            step = torch.tensor([(sum(load.tolist()) > n * len(load)) - (sum(load.tolist()) < n * len(load))
                                 for n in load.tolist()])
            by_hand[name] += RATE * step
            rounded[name] += RATE * step
    for name, right in by_hand.items():
        assert torch.equal(home.state_dict()[name], right)
        router = home.stage.chunks[0].body.get_submodule(name.rpartition(".")[0].removeprefix("model."))
        assert torch.equal(router.e_score_correction_bias, right)  # what it chooses experts with
    assert any((rounded[n].float() - x).abs().max() > RATE for n, x in by_hand.items())


# ------------------------------------------------------------------------------------------- between layouts


TARGETS = [at(tp=2), at(pp=2), at(dp=2, ep=2), at(dp=2, zero=3), at(dp=2, zero=2), at(cp=2), at(dp=2)]
HOMES = [at(dp=2), at(dp=2, ep=2), at(dp=2, zero=1), at(dp=2, zero=2), at(cp=2)]


def moved(rank: int, path: str) -> list[tuple[str, str, bool]]:
    """(layout, parameter, whether the copy has the numbers of the home, rounded unless transformers keeps them)"""
    model = plan_model(path, "causal_lm", SGD, dtype="bfloat16")
    found = []
    for number, src in enumerate(HOMES):
        home = shard_of(model, src, rank, True)[0]
        whole = load_file(Path(path) / "model.safetensors")
        for more, dst in enumerate(TARGETS if number == 0 else TARGETS[:1]):
            copy_model = replace(model, train_layout="", optimizer=None, updated_from=("m",))
            copy = shard_of(copy_model, replace(dst, id="L1"), rank)[0]
            for x in copy.state_dict().values():
                x.zero_()
            mesh = Mesh("m0", ((0, 2),))
            for at_, part in enumerate(in_wire_dtypes(model, "L0", copy_model, "L1", 0.0)):
                todo = RankReshard.plan(part, src, mesh, replace(dst, id="L1"), mesh, 2, rank)
                dtype = torch.float32 if part.dtype == "float32" else torch.bfloat16
                reshard(todo, home.state_dict(), copy.state_dict(), dtype, SideStream(CPU),
                        16 * (20 * number + 2 * more + at_ + 1)).finish()
            for name, (p, pieces) in copy.stage.held.items():
                local = copy.state_dict()[name]
                dtype = torch.float32 if p.spec.float32 else torch.bfloat16
                right = whole.get(name)
                if right is not None:
                    found += [(str(dst), name, local.dtype == dtype and torch.equal(
                        local[local_slice(x, x.box, p.dim)], right[slices(x.box)].to(dtype))) for x in pieces]
    return found


def test_copies_under_other_layouts_get_them_bit_for_bit(path: str) -> None:
    found = sum(run_world(2, moved, path), [])
    assert {layout for layout, _, _ in found} == {str(x) for x in TARGETS}
    assert sum(name.endswith(BIAS) for _, name, _ in found) >= 3 * (len(TARGETS) + len(HOMES) - 1)
    for layout, name, equal in found:
        assert equal, f"{name} under {layout}"


@pytest.mark.thorough
def test_a_run_moves_and_saves_them_as_they_are(tmp_path: Path) -> None:
    """A model that follows the trained one, in half precision and on another mesh: its file has the trained biases, and
    everything else rounded."""
    path = at_one(tmp_path / "m", "deepseek_v3")
    write_jsonl(tmp_path / "prompts.jsonl", make_sums(16))
    text = PROGRAM.format(root=tmp_path, model="m", more=', dtype="bfloat16"', option=f", router_bias_update_rate={RATE}")
    text = text.replace("flow run", f'model ref = causal_lm("{path}", dtype="bfloat16")\nflow run')
    text = text.replace("  every 2 { save actor }", (
        '  sync ref from actor\n  lp = ref.logprobs(gen)\n  metric off = mean(abs(lp - gen.logprobs))\n'
        '  every 2 { save actor, ref }'))
    (tmp_path / "p.rlf").write_text(text)
    place = ("place actor.train on mesh(0:2) dp=2 ep=2 mbs=1\nplace actor.generate on mesh(0:2) tp=2\n"
             "place ref.* on mesh(0:2) pp=2\n")
    run_program(tmp_path / "p.rlf", {}, tmp_path / "run", "cluster nodes=1 gpus=2\n" + place)
    out = tmp_path / "run" / "out"
    (actor,), (ref,) = ([x for x in out.rglob(f"*{name}*") if x.is_dir() and [*x.glob("*.safetensors")]]
                        for name in ("actor", "ref"))
    mine, theirs = ({n: x for file in folder.glob("*.safetensors") for n, x in load_file(file).items()}
                    for folder in (actor, ref))
    assert mine.keys() == theirs.keys()
    for name, x in theirs.items():
        assert x.dtype == (torch.float32 if name.endswith(BIAS) else torch.bfloat16)
        assert torch.equal(x, mine[name].to(x.dtype))
    before = biases(tmp_path / "m")
    assert len(before) == 3 and any(not torch.equal(x, mine[n]) for n, x in before.items())


# --------------------------------------------------------------------------------------------------- sizes


ON = Mesh("m0", ((0, 4),))


def model(dtype: str, *specs: ParamSpec) -> Model:
    return Model("m", "causal_lm", "", dtype, specs, 2, "", train_layout="A")


NARROW = ParamSpec("layers.{}.w", (8, 4), "layer", 2)
WIDE = ParamSpec("layers.{}.b", (8,), "layer", 2, float32=True)
A, B = Layout("A", "m0", dp=4), Layout("B", "m0", pp=2, dp=2)


def test_what_travels_in_which_dtype() -> None:
    both, plain = model("bfloat16", NARROW, WIDE), model("bfloat16", NARROW)
    assert [(m.dtype, m.params) for m in in_wire_dtypes(both, "A", both, "B", 0.0)] == [
        ("bfloat16", (NARROW,)), ("float32", (WIDE,))]
    assert [m.dtype for m in in_wire_dtypes(plain, "A", plain, "B", 0.0)] == ["bfloat16"]
    assert [m.params for m in in_wire_dtypes(both, "A", replace(both, train_layout="B"), "B", 0.0)] == [(NARROW, WIDE)]
    full = model("float32", NARROW, WIDE)
    assert [(m.dtype, m.params) for m in in_wire_dtypes(full, "A", full, "B", 0.0)] == [("float32", (NARROW, WIDE))]
    alone = model("bfloat16", WIDE)
    assert [m.dtype for m in in_wire_dtypes(alone, "A", alone, "B", 0.0)] == ["float32"]
    assert parameter_dtype(WIDE, storage_dtype(both, "B")) == "float32" != parameter_dtype(NARROW, "bfloat16")


def test_bytes_of_a_realloc_are_those_of_both_dtypes() -> None:
    one = Mesh("m0", ((0, 1),))
    parts = in_wire_dtypes(model("bfloat16", NARROW, WIDE), "A", model("bfloat16", NARROW, WIDE), "B", 0.0)
    each = [summary(plan_reshard(m, replace(A, dp=1), one, replace(B, mesh="m1"), Mesh("m1", ((1, 5),)), 8), m)
            for m in parts]
    assert [x.bytes for x in each] == [2 * 2 * 64, 2 * 4 * 16]  # two ranks of dp for each of two stages
    total = joined(each)
    assert total.bytes == sum(x.bytes for x in each) and total.messages == sum(x.messages for x in each)
    assert joined(each[:1]) == each[0] and total.digest not in {x.digest for x in each}


def test_the_estimate_counts_what_a_copy_holds(path: str) -> None:
    found = plan_model(path, dtype="bfloat16")
    held = shard_of(found, at(), 0)[0].state_dict()
    copy = Copy(found, at(), Cell(0, 0))
    assert resting_bytes(copy) == sum(x.nbytes for x in held.values()) > 2 * resting(copy)
    assert build_shard(found, at(), 0).weight_bytes == resting_bytes(copy)
    assert len([*parameters(found)]) == len(held) and degree_product(at()) == 1
    single = replace(found, dtype="float32")
    assert resting_bytes(Copy(single, at(), Cell(0, 0))) == 4 * resting(copy)
