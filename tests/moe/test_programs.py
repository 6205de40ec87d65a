"""Whole programs with mixture-of-experts models: under every placement as on one rank; saved, resumed, and refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rldsl.clusters import preset
from rldsl.diag import Failure
from rldsl.memory import curves
from rldsl.memory.curve import each_rank, peak
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Generate, Infer, Train
from rldsl.plan.projection import event_paths
from rldsl.simulate import simulate
from rldsl.simulate.work_counts import build_shard
from rldsl.verify import verify
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import Metrics, compile_program, run_program
from tests.memory.accounting import measured
from tests.memory.estimates import compare_with_run
from tests.memory.plans import Case, on, plan_of
from tests.moe.shards import make
from tests.tiny import make_model, make_sums, write_jsonl

ROOT = Path(__file__).parents[2]
GRPO = ROOT / "tests/end_to_end/grpo_small.rlf"
SMALL = ROOT / "tests/checkpoint/small.rlf"
LORA = ROOT / "tests/lora/grpo_lora.rlf"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("moe")
    make(root / "mixtral", "mixtral")
    make(root / "qwen", "qwen3_moe")
    make_model(root / "dense", num_hidden_layers=2)
    write_jsonl(root / "prompts.jsonl", make_sums(64))
    return root


def sets(tiny: Path, model: str, **more: object) -> dict[str, object]:
    return {"base": str(tiny / model), "rows": str(tiny / "prompts.jsonl"), "steps": 2} | more


def rules(ranks: int, train: str, other: str = "", gpus: int = 0) -> str:
    """other: of the calls that are no training; as the train call where it is empty."""
    return (f"cluster nodes=1 gpus={gpus or ranks}\nplace actor.train on mesh(0:{ranks}) {train}\n"
            + (f"place actor.generate on mesh(0:{ranks}) {other}\n" if other else "")
            + f"place ref.* on mesh(0:{ranks}) {other or train.partition(' zero')[0].partition(' recompute')[0]}\n")


def grpo(tiny: Path, model: str, folder: Path, place: str, like: Metrics | None = None) -> Metrics:
    return run_program(GRPO, sets(tiny, model, every_step=2, eps=1e-4, batch=4, samples=2, tokens=4), folder, place, like=like)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Metrics, Path]]:
    found = {}
    for model in ("mixtral", "qwen"):
        folder = tmp_path_factory.mktemp(model)
        found[model] = grpo(tiny, model, folder, rules(1, "dp=1")), folder
    return found


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the one model that a run has saved."""
    (config,) = (folder / "out").rglob("config.json")
    return {k: t for file in config.parent.glob("*.safetensors") for k, t in load_file(file).items()}


@pytest.mark.thorough
@pytest.mark.parametrize("model, ranks, train, other", [
    ("mixtral", 2, "dp=2 ep=2", ""),
    ("mixtral", 4, "dp=2 tp=2 ep=2 zero=3 recompute=full", "dp=4 ep=4 mbs=2"),
    ("qwen", 4, "dp=4 ep=2 zero=1", "tp=4"),
    ("qwen", 4, "dp=2 pp=2 ep=2 mbs=1", "dp=2 pp=2 ep=2 mbs=3")])
def test_grpo_is_that_of_one_rank(tiny, alone, tmp_path, model, ranks, train, other):
    """Samples, losses, and what is saved, by the names that transformers gives it on disk."""
    from transformers import AutoModelForCausalLM

    expected, folder = alone[model]
    found = grpo(tiny, model, tmp_path, rules(ranks, train, other), expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}
    mine, theirs = saved(tmp_path), saved(folder)
    assert mine.keys() == theirs.keys() == load_file(tiny / model / "model.safetensors").keys()
    assert all(torch.allclose(mine[k], theirs[k], atol=1e-5) for k in mine)
    (config,) = (tmp_path / "out").rglob("config.json")
    loaded, info = AutoModelForCausalLM.from_pretrained(config.parent, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    named, of = dict(loaded.named_parameters()), "block_sparse_moe" if model == "mixtral" else "mlp"
    last = "w2" if model == "mixtral" else "down_proj"
    assert torch.equal(named["model.layers.1.mlp.experts.down_proj"][3],
                       mine[f"model.layers.1.{of}.experts.3.{last}.weight"])


def small(ranks: int, where: str) -> str:
    return f"cluster nodes=1 gpus={ranks}\n" + "".join(
        f"place {m} on mesh(0:{ranks}) {where}\n" for m in ("actor.train", "critic.train"))


def plan(tiny: Path, folder: Path, place: str) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    return compile_program(SMALL, sets(tiny, "mixtral", steps=3), place, folder)


@pytest.mark.thorough
def test_checkpoints_go_on_exactly_and_elsewhere(tiny, tmp_path):
    home = small(2, "dp=2 ep=2")
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert set(run(plan(tiny, whole / "plan", home), whole)) == {""}
    assert set(run(plan(tiny, stopped / "plan", home), stopped, stop_after=1)) == {""}
    for number, (place, exact) in enumerate(((small(2, "tp=2"), False), (home, True))):
        copy = tmp_path / f"on{number}"
        shutil.copytree(stopped, copy)
        assert set(run(plan(tiny, copy / "plan", place), copy, resume=copy, like=None if exact else whole)) == {""}
        if exact:
            assert lines(copy) == lines(whole)
            mine, theirs = held(copy / "checkpoints/step-000003"), held(whole / "checkpoints/step-000003")
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in theirs)
        else:
            for mine, theirs in zip(lines(copy), lines(whole), strict=True):
                assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


# ------------------------------------------------------------------------------------------- what is compiled


def compiled(tiny: Path, model: str, folder: Path, place: str) -> object:
    return decode(compile_program(GRPO, sets(tiny, model), place, folder), "p.plan")


def test_calls_without_a_placement_follow_the_train_call(tiny, tmp_path):
    found = compiled(tiny, "qwen", tmp_path, "cluster nodes=1 gpus=8\nplace actor.train on mesh(0:8) dp=8 ep=4 zero=2\n")
    layouts = {x.id: x for x in found.layouts}
    at = {type(e): layouts[e.layout] for e, _ in event_paths(found) if isinstance(e, Generate | Train)}
    assert (at[Train].ep, at[Train].zero, at[Generate].ep, at[Generate].zero) == (4, 2, 4, 0)
    assert {g.axis for g in found.groups if g.layout == at[Train].id} == {"dp", "ep", "expert_dp", "mesh"}
    assert any(isinstance(e, Infer) for e, _ in event_paths(found))
    verify(found)


def test_experts_are_divided_in_the_estimate(tiny, tmp_path):
    def state(where: str) -> int:
        held = curves(compiled(tiny, "qwen", tmp_path, rules(8, where)), "cpu")[0].holdings
        return sum(h.bytes for h in held if h.what.startswith("optimizer state"))

    model = compiled(tiny, "qwen", tmp_path, rules(1, "dp=1")).models[0]
    experts = sum(2 * 4 * 2 * torch.Size(p.shape).numel() for p in model.params if p.experts)
    assert state("dp=8") - state("dp=8 ep=4") == experts * 3 // 4
    assert model.sizes.experts_per_token == 3 and model.sizes.intermediate == 24


def test_adapters_beside_divided_experts(tiny, tmp_path):
    """Experts are in the base, of which each rank reads its own."""
    given = sets(tiny, "qwen")
    one = run_program(LORA, given, tmp_path / "1", rules(1, "dp=1"))
    two = run_program(LORA, given, tmp_path / "2", rules(2, "dp=2 ep=2"), like=one)
    for mine, theirs in zip(two, one, strict=True):
        assert mine == {k: pytest.approx(v, rel=1e-4, abs=1e-5) for k, v in theirs.items()}


def test_the_simulator_knows_experts(tiny, tmp_path):
    """Work follows the experts that a token chose, memory and updates those that a rank has."""
    found = {}
    for where in ("dp=4", "dp=4 ep=4", "dp=2 tp=2 ep=2"):
        made = compiled(tiny, "qwen", tmp_path, rules(4, where))
        model = next(m for m in made.models if m.name == "actor")
        found[where] = build_shard(model, next(x for x in made.layouts if x.id == model.train_layout), 0)
    whole, divided, both = found.values()
    expert = 3 * 24 * 32
    assert whole.experts == 8 * expert and divided.experts == 2 * expert and both.experts == 4 * expert // 2
    assert whole.active == divided.active == whole.layer - 8 * expert + 3 * expert
    assert both.active == both.layer - both.experts + 3 * expert // 2
    assert whole.read(1) == whole.active and whole.read(1000) == whole.layer and divided.read(1000) == divided.layer
    assert (whole.local_experts, divided.local_experts) == (0, 2 * 2 * expert)
    assert whole.trained - divided.trained == 2 * 6 * expert


def test_a_plan_with_ep_is_simulated(tiny, tmp_path):
    cluster = preset("h100x8")
    for where in ("dp=4", "dp=4 ep=4", "dp=2 tp=2 ep=2 zero=2"):
        assert simulate(compiled(tiny, "qwen", tmp_path, rules(4, where)), cluster).seconds > 0


def test_estimates_are_what_runs_hold(tmp_path, monkeypatch):
    """The peak of each rank, within the gate of `tests/memory`. With ep it would depend on what routers choose."""
    monkeypatch.chdir(tmp_path)
    sizes = dict(num_local_experts=4, num_hidden_layers=2, hidden_size=128, intermediate_size=192, vocab_size=1024)
    plan = plan_of(Case("moe", 2, on(2, "tp=2", "dp=2", "dp=2"), family="mixtral", batch=16, prompt=48,
                        response=6, sizes=tuple(sizes.items())), tmp_path)
    found = measured(encode(plan), tmp_path / "out", 2)
    for rank, curve in each_rank(curves(plan, "cpu")):
        assert peak(curve).bytes == pytest.approx(found[rank].peak, rel=0.10), f"rank {rank}"


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_captured_steps_are_in_the_estimate(dtype, tmp_path, monkeypatch):
    """In bfloat16 a tenth of a call with long responses, for which the steps of four widths are held."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "m", "qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128,
               num_hidden_layers=4, hidden_size=128, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
               intermediate_size=256, vocab_size=512, max_position_embeddings=512)
    compare_with_run(tmp_path, Case("long responses", batch=48, prompt=24, response=100, dtype=dtype))


REFUSED = [
    ("dense", 4, "dp=4 ep=2", "RL0323"), ("mixtral", 4, "dp=2 tp=2 ep=4", "RL0324"), ("mixtral", 3, "dp=3 ep=3", "RL0324"),
    ("mixtral", 8, "dp=8 ep=8", "RL0324"), ("qwen", 4, "tp=4 ep=2", "RL0324"), ("qwen", 4, "dp=2 cp=2 ep=2", "RL0325"),
    ("qwen", 2, "dp=2 ep=0", "RL0311"), ("qwen", 2, "dp=2 ep=true", "RL0311"), ("qwen", 2, "dp=2 ep=2 ep=2", "RL0311"),
    ("qwen", 4, "dp=2 ep=2", "RL0304"), ("qwen", 2, "tp=2 pp=4", "RL0304"),
]


@pytest.mark.parametrize("model, ranks, where, code", REFUSED)
def test_refused(model, ranks, where, code, tiny, tmp_path):
    place = f"cluster nodes=1 gpus={ranks}\nplace actor.train on mesh(0:{ranks}) {where}\n"
    with pytest.raises(Failure) as failure:
        compiled(tiny, model, tmp_path, place)
    found = failure.value.diagnostics[0]
    assert found.code == code and found.help
    if code in ("RL0323", "RL0324", "RL0325"):
        assert found.span.text.startswith("ep=")


def test_a_computation_has_no_ep(tiny, tmp_path):
    with pytest.raises(Failure) as failure:
        compiled(tiny, "qwen", tmp_path, rules(2, "dp=2") + "place @adv on mesh(0:2) ep=2\n")
    assert failure.value.diagnostics[0].code == "RL0311"
