"""`rlc profile`: the arithmetic exactly, the measuring only as far as it gives numbers at all."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl import api, clusters
from rldsl.cli import main
from rldsl.clusters.model import PASSES
from rldsl.commands import profile as command
from rldsl.measure import profile as measuring
from rldsl.measure.call_costs import (
    GPU,
    PROCESSOR,
    MeasuredShapes,
    build,
    fit_costs,
    layer_kinds,
    mean_of_kinds,
    measure_calls,
    with_each_kind,
)
from rldsl.measure.solo_group import SingleRankGroup
from rldsl.models.families import describe, sizes_of
from rldsl.plan.codec import encode
from rldsl.plan.events import Sampling
from rldsl.runtime.collectives import MAX_EXCHANGED, all_gather, all_reduce, reduce_scatter
from rldsl.simulate import simulate
from tests import forked
from tests.backend_torch.shards import plan_model
from tests.families.tiny_configs import make
from tests.memory.vision import vision_program
from tests.samples import thorough_between
from tests.tiny import make_model, make_sums, write_jsonl
from tests.world import run_world

PROGRAM = """data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=8)
model actor = causal_lm("models/sft")
model judge = reward_model("models/rm")
flow score(steps=2, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, max_new_tokens=4)   on mesh(0:2) tp=2
  score  = judge.score(gen)                           on mesh(0:1)
  metric score = mean(score)
}
"""
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "models/sft", num_hidden_layers=2)
    make_model(tmp_path / "models/rm", head="reward_model", num_hidden_layers=2)
    write_jsonl(tmp_path / "data/prompts.jsonl", make_sums(16))
    (tmp_path / "score.rlf").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


# ------------------------------------------------------------------------------------------------- fitting


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.0, 1e4), min_size=3, max_size=3))
def test_a_fit_finds_what_is_there(rates: list[float]) -> None:
    names = ("call", "layer", "token")
    counts = [dict(zip(names, (1.0, float(n), float(n * t)))) for n in (1, 2) for t in (8, 64, 512)]
    samples = [(c, sum(c[n] * r for n, r in zip(names, rates)) * 1e-6 + 1e-12) for c in counts]
    found = fit_costs(samples)
    assert all(found[n] == pytest.approx(r, rel=1e-3, abs=1e-2) for n, r in zip(names, rates))


def test_no_feature_is_negative() -> None:
    samples = [({"call": 1.0, "token": t}, s) for t, s in ((1.0, 5e-6), (2.0, 4e-6), (4.0, 3.5e-6))]
    found = fit_costs(samples)
    assert found["token"] == 0.0 and found["call"] > 0


def test_what_rounding_leaves_is_no_cost() -> None:
    """A profile with it would be refused where it is read."""
    samples = [({"call": 1.0, "layer": float(layers)}, 1e-3 * (1 + 1e-16 * layers)) for layers in range(1, 30)]
    found = fit_costs(samples)
    assert found["call"] == pytest.approx(1000.0) and found["layer"] == 0.0
    drawn = [({"call": 1.0, "layer": n + 0.1 * k}, 1e-3) for n in range(1, 9) for k in range(7)]
    assert all(cost == 0 or cost > 1e-6 for cost in fit_costs(drawn).values())


# ----------------------------------------------------------------------------------------------- measuring


def test_a_solo_group_meets_nobody() -> None:
    group = SingleRankGroup(4)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)
    parts = [torch.zeros(3) for _ in range(4)]
    dist.all_gather(parts, x, group=group)
    dist.reduce_scatter(x, [torch.full((3,), float(i)) for i in range(4)], group=group)
    assert x.tolist() == [0, 0, 0] and all(p.tolist() == [1, 1, 1] for p in parts) and group.size() == 4
    for size in (3, MAX_EXCHANGED):  # as one exchange, and as torch's collective
        x = torch.ones(size)
        all_reduce(x, group=group)
        assert x.sum() in (size, 4 * size) and all_gather(x, group).shape == (4, size)
        assert reduce_scatter(x.expand(4, -1), group).shape == (size,)


@pytest.mark.thorough
def test_every_pass_is_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of real shards of both kinds, one of them half a model; few shapes and tokens, for speed."""
    shapes = ((2, 1, 8, 4), (2, 2, 8, 4), (1, 2, 8, 7), (1, 1, 16, 4), (2, 2, 12, 4))
    for name, value in (("PROCESSOR", MeasuredShapes(shapes, ((2, 1, 4), (1, 2, 4)), 36, 600, 0)), ("ENOUGH", 0.0)):
        monkeypatch.setattr(f"rldsl.measure.call_costs.{name}", value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    plan = api.compile("score.rlf")
    models = {m.name: m for m in plan.models}
    actor = measure_calls(models["actor"], 2, "torch", Sampling(), CPU)
    judge = measure_calls(models["judge"], 1, "torch", Sampling(), CPU)
    others = {"tower", "reply", "turn"}
    assert set(actor) == set(PASSES) - others and set(judge) == set(PASSES) - others - {"decode", "start"}
    for found in (*actor.values(), *judge.values()):
        assert all(rate >= 0 for rate in found.values())
    assert all(set(found[p]) == set(PASSES[p]) for found in (actor, judge) for p in found)
    assert sum(actor["forward"].values()) > 0 and sum(actor["decode"].values()) > 0
    torch.set_num_threads(threads)
    half, whole = (build(models["actor"], 1, tp, "torch", CPU, False).state_dict() for tp in (2, 1))
    name = "model.layers.0.mlp.up_proj.weight"
    assert 2 * half[name].numel() == whole[name].numel() and not any("layers.1" in n for n in whole)


@pytest.mark.parametrize("measured", [PROCESSOR, GPU])
def test_shapes_tell_the_features_apart(measured: MeasuredShapes) -> None:
    """No feature of a pass is a sum of the others."""
    passes = torch.tensor([[1, n, n * s * t, n * s * t * t, s * r] for n, s, t, r in measured.shapes], dtype=torch.float64)
    decodes = torch.tensor([[1, n, n * s, n * s * (t + measured.many / 2), s] for n, s, t in measured.decodes],
                           dtype=torch.float64)
    for table in (passes, decodes):
        assert torch.linalg.matrix_rank(table / table.norm(dim=0)) == table.shape[1]
    assert all(r < t for _, _, t, r in measured.shapes) and min(s * t for _, s, t, _ in measured.shapes) < measured.small


@pytest.mark.parametrize("family, more, kinds", thorough_between([
    ("llama", {}, (0, 0, 0, 0)), ("deepseek_v3", {}, (0, 1, 1, 1)), ("deepseek_v3", {"first_k_dense_replace": 3}, (0, 0, 0, 1)),
    ("llama4_text", {"interleave_moe_layer_step": 2}, (0, 1, 0, 1)), ("gemma3_text", {}, (0, 0, 0, 0)),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3 + ["full_attention"]}, (0, 0, 0, 1)),
    ("granitemoehybrid", {"layer_types": ["mamba", "mamba", "attention", "mamba"]}, (0, 0, 1, 0))]))
def test_layers_of_a_kind(family: str, more: dict, kinds: tuple[int, ...], tmp_path: Path) -> None:
    made = plan_model(str(make(tmp_path / "m", family, **more)), "causal_lm")
    assert layer_kinds(replace(made, sizes=sizes_of(describe(str(tmp_path / "m"), "causal_lm")))) == kinds


@pytest.mark.parametrize("kinds, counts", [
    ((0, 0, 0, 1) * 4, {1, 2, 4}), ((0, 1) * 8, {1, 2, 3}), ((0, 0, 0, *(1,) * 13), {1, 2, 4}), ((0, *(1,) * 15), {1, 2})])
def test_what_kinds_cost_is_told_apart_and_averaged(kinds: tuple[int, ...], counts: set[int]) -> None:
    """From shapes with the first layers alone: some layers cost three times as much as the others."""
    shapes = with_each_kind(PROCESSOR.shapes, kinds)
    assert {s[0] for s in shapes} == counts and len(shapes) == len(set(shapes))
    assert {s[1:] for s in shapes} == {s[1:] for s in PROCESSOR.shapes}
    costs = {"call": 50.0, "layer 0": 100.0, "layer 1": 300.0, "token 0": 2.0, "token 1": 6.0, "pair": 0.01, "output": 3.0}
    samples = []
    for layers, count, length, response in shapes:
        own, tokens = kinds[:layers], count * length
        counts = {"call": 1.0, "pair": layers * tokens * length, "output": count * response}
        for kind in (0, 1):
            counts |= {f"layer {kind}": own.count(kind), f"token {kind}": own.count(kind) * tokens}
        samples.append((counts, 1e-6 * sum(costs[n] * x for n, x in counts.items())))
    found, share = mean_of_kinds(fit_costs(samples), kinds), kinds.count(1) / len(kinds)
    right = {"call": 50.0, "layer": 100 + 200 * share, "token": 2 + 4 * share, "pair": 0.01, "output": 3.0}
    assert found["call"] + 16 * found["layer"] == pytest.approx(right["call"] + 16 * right["layer"], rel=1e-3)
    same = ("token", "pair", "output") if kinds.count(0) == 1 else right  # the one layer is as much a part of the call
    assert {n: found[n] for n in same} == pytest.approx({n: right[n] for n in same}, rel=1e-3)


def test_layers_that_are_alike_are_measured_as_they_are() -> None:
    assert with_each_kind(PROCESSOR.shapes, (0,) * 8) == list(PROCESSOR.shapes)
    assert mean_of_kinds({"call": 1.0, "layer 0": 2.0, "token 0": 3.0, "pair": 4.0}, (0, 0)) == {
        "call": 1.0, "layer": 2.0, "token": 3.0, "pair": 4.0}
    assert mean_of_kinds({"call": 1.0, "layer": 2.0}, (0, 1)) == {"call": 1.0, "layer": 2.0}


def test_a_gpu_is_measured_with_more() -> None:
    """Of what takes a processor a few milliseconds, a GPU would show its launches."""
    assert max(s * t for _, s, t, _ in GPU.shapes) > 16_000 > 20 * min(s * t for _, s, t, _ in GPU.shapes)
    assert max(s for _, s, _ in GPU.decodes) >= 128 and GPU.many > 4 * PROCESSOR.many


def links(rank: int) -> dict[str, float]:
    """Rates between two ranks, where single messages, which NCCL gives a communicator of their own, are refused."""
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("a message outside of a batch")

    dist.send = dist.recv = refused
    measuring._added_seconds = lambda message, *_: (message(), 1e-3)[1]
    return measuring.link_rates(CPU)


def test_links_are_measured_as_runs_use_them() -> None:
    found = run_world(2, links)
    assert found[0].keys() == {"link_us", "link_gb_s", "reduce_us", "reduce_gb_s", "scatter_us", "scatter_gb_s"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_meet_as_those_of_a_run(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Met(Exception):
        pass

    def meet(**given: object) -> None:
        raise Met(given)

    monkeypatch.setattr(measuring.dist, "init_process_group", meet)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr("sys.argv", ["profile", "p", "w", "f", "--device", device])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(Met) as met:
        measuring.main()
    assert met.value.args[0] == ({"backend": "nccl", "device_id": torch.device("cuda", 0)} if device == "cuda" else
                                 {"backend": "gloo"})


# -------------------------------------------------------------------------------------------- the command


FOUND = {"link_us": 50.0, "link_gb_s": 1.5, "reduce_us": 100.0, "float32_tflops": 0.1, "bfloat16_tflops": 0.2,
         "memory_gb_s": 10.0, "kernel_us": 2.0, "row_us": 0.3, "core_speed": 0.9}
RATES = {"forward": {"call": 1.0, "layer": 2.0, "token": 3e-5, "pair": 0.0, "output": 0.0}, "update": {"call": 1.0, "element": 1e-9}}


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The machine is not measured; what was asked of it is written down."""
    seen: list[dict] = []

    def run(line, environment) -> str:
        if "--facts" in line:
            return json.dumps({"device": "Toy", "devices": 0, "cores": 2, "versions": ["torch 1"]})
        plan, wanted, found = line[line.index("rldsl.measure.profile") + 1 :][:3]
        seen.append(json.loads(Path(wanted).read_text()) | {"threads": environment["OMP_NUM_THREADS"]})
        models = {m.name: m for m in api.read_plan(plan).models}
        measured = [{"config": models[m].config_digest, "head": models[m].head_name, "dtype": models[m].dtype, "tp": tp,
                     "threads": 1, **RATES} for m, tp, _ in seen[-1]["models"]]
        Path(found).write_text(json.dumps((FOUND if seen[-1]["machine"] else {}) | {"measured": measured}))
        return ""

    monkeypatch.setattr(command, "_run", run)
    return seen


def profile(*args: str) -> Result:
    return CliRunner().invoke(main, ["profile", *args])


@pytest.mark.thorough
def test_a_tower_is_measured_once_a_plan_has_images(asked: list[dict], tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured for a plan of texts alone is measured again, and replaced."""
    monkeypatch.chdir(tmp_path)
    program = vision_program(tmp_path, "qwen2_5_vl")
    text = program.read_text()
    program.write_text(re.sub(r'images="images"(, max_image_tokens=[0-9]+)?, ', "", text))

    def count() -> int:
        return len(clusters.read("profile.yaml").measured)

    assert profile(str(program)).exit_code == 0 and "nothing new" in profile(str(program)).output and count() == 1
    program.write_text(text)
    assert "measured 2 shards" in profile(str(program)).output and len(asked) == 2 and count() == 1
    monkeypatch.setitem(RATES, "tower", {"image": 3.0})
    assert "measured 2 shards" in profile(str(program)).output and count() == 1
    assert dict(clusters.read("profile.yaml").measured[0].tower) == {"image": 3.0}
    assert "nothing new" in profile(str(program)).output and len(asked) == 3


def test_the_file_is_a_cluster(asked: list[dict], folder: Path) -> None:
    said = profile("score.rlf")
    assert said.exit_code == 0 and "wrote profile.yaml: Toy, measured 2 shards" in said.output, said.output
    found = clusters.read("profile.yaml")
    assert (found.nodes, found.gpus, found.cores, found.threads, found.core_speed) == (1, 2, 2, 1, 0.9)
    assert not found.unknown() and {(m.head, m.tp) for m in found.measured} == {("causal_lm", 2), ("reward_model", 1)}
    assert dict(found.measured[0].forward) == RATES["forward"]
    assert dict(found.measured[0].update) == RATES["update"]
    assert asked == [{"models": [["actor", 2, "torch"], ["judge", 1, "torch"]], "machine": True, "environments": False,
                      "threads": "1"}]
    plan = api.compile("score.rlf")
    assert simulate(plan, found).estimated == ()
    others = tuple(replace(m, threads=8) for m in found.measured)
    said = simulate(plan, replace(found, measured=others)).estimated
    assert said == (("actor", "measured with other threads"), ("judge", "measured with other threads"))
    others = tuple(replace(m, config="other") for m in found.measured)
    assert "measured with other config.json" in dict(simulate(plan, replace(found, measured=others)).estimated)["judge"]


def test_the_result_as_json(asked: list[dict], folder: Path) -> None:
    done = CliRunner().invoke(main, ["profile", "score.rlf", "-o", "a.yaml", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == {"format": 1, "wrote": "a.yaml"}, done.output
    assert Path("a.yaml").exists()


def test_what_was_measured_is_kept(asked: list[dict], folder: Path) -> None:
    assert profile("score.rlf").exit_code == 0
    again = profile("score.rlf", "-o", "again.yaml")
    assert "nothing new to measure" in again.output and len(asked) == 1
    assert Path("again.yaml").read_text() == Path("profile.yaml").read_text()
    assert profile("score.rlf", "--on", "judge.* on mesh(0:2) tp=2").exit_code == 0  # only what is new
    assert asked[1]["models"] == [["judge", 2, "torch"]] and not asked[1]["machine"]
    assert profile("score.rlf", "--fresh").exit_code == 0 and asked[2]["machine"]


def test_other_degrees_are_measured_where_a_model_allows_them(asked: list[dict], folder: Path) -> None:
    said = profile("score.rlf", "--tp", "1", "--tp", "2", "--tp", "3")
    assert said.exit_code == 0 and "no model supports tp=3" in said.output
    assert asked[0]["models"] == [["actor", 2, "torch"], ["judge", 1, "torch"], ["actor", 1, "torch"],
                                  ["judge", 2, "torch"]]
    assert profile("score.rlf", "--tp", "0").exit_code == 2


def test_a_plan_may_be_given(asked: list[dict], folder: Path) -> None:
    Path("score.plan").write_bytes(encode(api.compile("score.rlf")))
    assert profile("score.plan", "-o", "a.yaml").exit_code == 0 and clusters.read("a.yaml").gpus == 2


def test_a_damaged_cache_is_measured_again(asked: list[dict], folder: Path) -> None:
    """Wherever a byte has changed: a name, a number, the digest, or everything."""
    assert profile("score.rlf").exit_code == 0
    (kept,) = (folder / "cache").rglob("profile/*.json")
    whole, before = kept.read_bytes(), Path("profile.yaml").read_bytes()
    damaged = [whole.replace(old, new, 1) for old, new in ((b'"config"', b'"confie"'), (b"50.0", b"90.0"), (b"[", b"{"))]
    for done, data in enumerate([*damaged, b"0" + whole[1:], b"{}", b""], 1):
        kept.write_bytes(data)
        assert profile("score.rlf").exit_code == 0 and len(asked) == done + 1
        assert Path("profile.yaml").read_bytes() == before and kept.read_bytes() == whole


@pytest.mark.parametrize("args, status, word", [
    (("none.rlf",), 1, "RL0091"), (("score.rlf", "-o", "none/x.yaml"), 1, "RL0094"), ((), 2, "FILE"),
    (("score.rlf", "--device", "tpu"), 2, "tpu"), (("score.rlf", "--set", "x=1"), 1, "RL0106")])
def test_mistakes(asked: list[dict], args: tuple[str, ...], status: int, word: str) -> None:
    said = profile(*args)
    assert said.exit_code == status and word in said.output and "Traceback" not in said.output, said.output


def test_a_plan_is_fixed(asked: list[dict]) -> None:
    Path("score.plan").write_bytes(encode(api.compile("score.rlf")))
    assert "apply to programs" in profile("score.plan", "--set", "x=1").output


@pytest.mark.thorough
def test_measuring_that_fails(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, with a model that is gone: what it said is shown, as a message."""
    monkeypatch.setattr(command, "subprocess", SimpleNamespace(run=forked.run))
    Path("score.plan").write_bytes(encode(api.compile("score.rlf")))
    for file in Path("models/sft").iterdir():
        file.unlink()
    said = profile("score.plan", "--device", "cpu")
    assert said.exit_code == 1 and "RL0788" in said.output and "Traceback" not in said.output, said.output
    assert not Path("profile.yaml").exists()
