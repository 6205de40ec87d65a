"""Times of what is not attention: vision towers, by the tokens of images, and layers that carry a state, by tokens."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from rldsl.api import compile
from rldsl.clusters.model import Measured
from rldsl.measure import call_costs
from rldsl.measure.call_costs import PROCESSOR, image_cost, measure_calls
from rldsl.plan.events import Sampling
from rldsl.plan.model import Layout, Model, Plan, Recurrence
from rldsl.runtime.data.image_processor import image_processor
from rldsl.simulate.lengths import Lengths, Row
from rldsl.simulate.machine import Machine
from rldsl.simulate.simulate import simulate
from rldsl.simulate.work_counts import DecodePlan, Shard, build_shard, count_decode, count_micro_batch
from tests.families.tiny_configs import make
from tests.memory.plans import GRPO, Case
from tests.memory.vision import vision_program
from tests.simulate.plans import ROUND, plan as text_plan
from tests.tiny import write_jsonl

MACHINE = Machine(replace(ROUND, kernel_us=0.0))  # no launches: work alone
CASE = Case("some rows", batch=4, prompt=40, response=14)


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Plan]:
    """A tower that is trained, and one that is not; prompts of one picture, and of two."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, how in {"trained": {}, "frozen": {"freeze": True}, "single": {"images": 1},
                          "limited": {"images": 1, "limited": True}}.items():
            folder = tmp_path_factory.mktemp(name)
            patch.chdir(folder)
            found[name] = compile(str(vision_program(folder, "qwen2_5_vl", **{"images": 2} | how)))  # type: ignore[arg-type]
    return found


def hybrid(folder: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(folder)
    make(folder / "m", family)
    write_jsonl(folder / "prompts.jsonl", [{"prompt": "7"}] * 8)
    (folder / "run.rlf").write_text(GRPO.format(**{k: getattr(CASE, k) for k in Case.__dataclass_fields__}))
    return compile(str(folder / "run.rlf"))


def seconds(plan: Plan, prompt: float = 0.0) -> float:
    return simulate(plan, ROUND, Lengths(prompt)).seconds


def without_images(plan: Plan) -> Plan:
    return replace(plan, data=tuple(replace(d, images="") for d in plan.data))


def of_tower(plan: Plan, prompt: float = 0.0) -> float:
    """Seconds of a step that the tower takes."""
    return seconds(plan, prompt) - seconds(without_images(plan), prompt)


def shard(model: Model, stage: int = 0, **degrees: int) -> Shard:
    return build_shard(model, Layout("x", "x", **degrees), stage)


# ------------------------------------------------------------------------------------------------- images


@pytest.mark.thorough
def test_twice_the_images_take_twice_the_tower_s_time(vision: dict[str, Plan]) -> None:
    plan = vision["trained"]
    few = of_tower(plan, 32)
    assert few > 0 and of_tower(plan, 64) == pytest.approx(2 * few, rel=1e-6)


@pytest.mark.thorough
def test_more_pictures_in_a_prompt_take_more(vision: dict[str, Plan]) -> None:
    """As their prompts are longer."""
    few, many = ("single", "trained")
    longest = {n: vision[n].data[0].max_prompt_tokens for n in (few, many)}
    assert of_tower(vision[many]) / of_tower(vision[few]) == pytest.approx(longest[many] / longest[few], rel=1e-6)


def test_a_limit_of_image_tokens_bounds_the_tower_s_time(vision: dict[str, Plan]) -> None:
    """The text of a prompt is not the tower's; shorter prompts have no more images than tokens."""
    plan = vision["limited"]
    most, longest = plan.data[0].max_image_tokens, plan.data[0].max_prompt_tokens
    assert 32 < most == 64 < longest
    assert of_tower(plan) / of_tower(vision["single"]) == pytest.approx(most / longest, rel=1e-6)
    assert of_tower(plan, 32) == of_tower(vision["single"], 32)


def test_the_tower_of_a_step_is_that_of_its_passes(vision: dict[str, Plan]) -> None:
    """The prefill and the reference run it forward, and training forward and backward: 5 passes over all images, or 3
    where it is frozen. The samples of a prompt share them."""
    for name, passes in (("trained", 5), ("frozen", 3)):
        plan = vision[name]
        model = plan.models[0]
        prompts = plan.spaces[0].count * plan.data[0].max_prompt_tokens
        operations = passes * prompts * model.sizes.towers[0].operations
        assert of_tower(plan) == pytest.approx(operations / (ROUND.float32_tflops * 1e12), rel=1e-6), name


def test_a_measured_tower_takes_what_was_measured(vision: dict[str, Plan]) -> None:
    """On the first stage, whatever the degree of tensor parallelism is; a measurement without it leaves the count."""
    model = vision["trained"].models[0]
    measured = Measured(model.config_digest, model.head_name, model.dtype, tp=1, threads=1, tower=(("image", 5.0),))
    machine = Machine(replace(ROUND, measured=(measured,)))
    assert machine.tower(shard(model), 200) == machine.tower(shard(model, tp=2), 200) == pytest.approx(1e-3)
    assert machine.tower(shard(model, stage=1, pp=2), 200) == 0
    less = Machine(replace(ROUND, measured=(replace(measured, tower=()),)))
    assert less.tower(shard(model), 200) == Machine(ROUND).tower(shard(model), 200) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_a_tower_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Where images are asked for; a trained model and its reference alike."""
    monkeypatch.chdir(tmp_path)
    image_processor.cache_clear()  # of a directory of the same relative path
    plan = compile(str(vision_program(tmp_path, family)))
    device = torch.device("cpu")
    for model in plan.models:
        few, more = (image_cost(model, 1, "torch", count, device) for count in (64, 512))
        assert few > 0 and more > 0
    monkeypatch.setattr(call_costs, "PROCESSOR", replace(PROCESSOR, shapes=PROCESSOR.shapes[:2], images=64,
                                                         decodes=PROCESSOR.decodes[:1], many=6))
    assert "tower" not in measure_calls(plan.models[0], 1, "torch", Sampling(), device)
    assert measure_calls(plan.models[0], 1, "torch", Sampling(), device, images=True)["tower"]["image"] > 0


def test_the_backward_pass_of_a_tower(vision: dict[str, Plan]) -> None:
    trained, frozen = (shard(next(m for m in vision[n].models if m.optimizer)) for n in ("trained", "frozen"))
    with_images, without = (count_micro_batch(trained, 2, Row(40, 10, 10), 10, images=n) for n in (80.0, 0.0))
    once = MACHINE.tower(trained, 80.0)

    def added(of: Shard, recompute: bool) -> tuple[float, float]:
        (a, b), (c, d) = (MACHINE.train(of, x, recompute) for x in (with_images, without))
        return a - c, b - d

    assert added(trained, False) == pytest.approx((once, 2 * once))
    assert added(trained, True) == pytest.approx((once, 3 * once))  # the backward pass runs it again
    for recompute in (False, True):
        assert added(frozen, recompute) == pytest.approx((once, 0.0))


def test_the_tower_is_on_the_first_stage_and_whole_on_every_rank_of_tp(vision: dict[str, Plan]) -> None:
    model = vision["trained"].models[0]
    first, last, half = shard(model, 0, pp=2), shard(model, 1, pp=2), shard(model, 0, tp=2)
    assert MACHINE.tower(first, 9.0) == MACHINE.tower(half, 9.0) == MACHINE.tower(shard(model), 9.0) > 0
    assert MACHINE.tower(last, 9.0) == 0 == MACHINE.tower(replace(first, first=False), 9.0)


def test_what_has_no_images_is_as_it_was_to_the_last_bit(vision: dict[str, Plan]) -> None:
    """Rows with images for a model without a tower, and a tower on rows without images."""
    text = text_plan("together")
    assert seconds(replace(text, data=tuple(replace(d, images="images") for d in text.data))) == seconds(text)
    plan = without_images(vision["trained"])
    bare = replace(plan, models=tuple(replace(m, sizes=replace(m.sizes, towers=())) for m in plan.models))
    assert seconds(bare) == seconds(plan)


# ------------------------------------------------------------------------------------------------- states


def pass_seconds(s: Shard, tokens: float) -> float:
    return MACHINE.forward(s, count_micro_batch(s, 1, Row(tokens, 0, 0), 0))


def test_a_recurrent_model_grows_linearly_and_attention_quadratically(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recurrent = shard(hybrid(tmp_path, "mamba2", monkeypatch).models[0])
    attention = shard(text_plan("together").models[0])
    assert recurrent.attending == 0 and attention.attending == 1
    n = 2.0**24  # tokens: so many that the weights' reading is nothing
    assert pass_seconds(recurrent, 2 * n) / pass_seconds(recurrent, n) == pytest.approx(2, rel=1e-3)
    assert pass_seconds(attention, 2 * n) / pass_seconds(attention, n) == pytest.approx(4, rel=1e-2)


def test_a_hybrid_has_pairs_in_its_layers_with_attention_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(tmp_path, "qwen3_next", monkeypatch).models[0]
    (states,) = (r for r in model.sizes.recurrences if r.itemsize == 4)
    whole = shard(model)
    rest = model.layers - len(states.layers)
    row = Row(30, 10, 10)
    assert 0 < rest < model.layers and whole.attending == rest / model.layers
    assert count_micro_batch(whole, 2, row, 10).pairs == rest * 2 * 40**2
    assert count_decode(whole, DecodePlan(1, 2, 2, 5, 2, 30, 1)).pairs == rest * 5 * 2 * 30
    each = [shard(model, s, pp=model.layers) for s in range(model.layers)]
    assert [s.attending for s in each] == [float(n not in states.layers) for n in range(model.layers)]
    assert [s.scan for s in each] == [states.operations * (n in states.layers) for n in range(model.layers)]


def test_states_take_their_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations and bytes by the plan's record of the layers, in passes; the states themselves in decoding."""
    model = hybrid(tmp_path, "qwen3_next", monkeypatch).models[0]

    def changed(**to: int) -> Shard:
        def one(r: Recurrence) -> Recurrence:
            return replace(r, **{k: v + getattr(r, k) for k, v in to.items()})  # type: ignore[arg-type]

        return shard(replace(model, sizes=replace(model.sizes, recurrences=tuple(map(one, model.sizes.recurrences)))))

    layers = len(next(r.layers for r in model.sizes.recurrences))
    rate, memory = ROUND.float32_tflops * 1e12, ROUND.memory_gb_s * 1e9
    before = pass_seconds(shard(model), 100)
    assert pass_seconds(changed(operations=1000), 100) - before == pytest.approx(100 * layers * 1000 / rate)
    assert pass_seconds(changed(written=1000), 100) - before == pytest.approx(100 * layers * 2 * 1000 / memory)
    steps = DecodePlan(1, 2, 2, 5, 2, 30, 1)
    few, many = (MACHINE.decode(s, count_decode(s, steps)) for s in (changed(), changed(state=1000)))
    assert many - few == pytest.approx(5 * 2 * layers * 1000 / memory)


def test_matrices_of_layers_that_differ_count_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid(tmp_path, "lfm2", monkeypatch).models[0]
    specs = [s for s in (*model.params, *model.base) if s.stage == "layer" and len(s.shape) > 1]
    assert any(s.layer >= 0 for s in specs)
    whole = sum(prod(s.shape) * len(s.layer_numbers(model.layers)) for s in specs)
    assert shard(model).layer * model.layers == pytest.approx(whole)
    halves = [shard(model, s, pp=2) for s in (0, 1)]
    assert sum(s.layer * s.layers for s in halves) == pytest.approx(whole)
