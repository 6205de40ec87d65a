"""Router biases that training moves by the load of the experts, against counts made by hand of transformers' routers:
the same bits under every layout and any division into passes, in checkpoints, and in the copies that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rldsl.api import compile
from rldsl.diag import Failure
from rldsl.models.families import describe
from rldsl.plan.backends import Description, described, unable
from rldsl.plan.codec import encode
from rldsl.plan.events import Train
from rldsl.plan.model import Layout, Optimizer
from rldsl.plan.projection import event_paths
from rldsl.plan.router_bias import router_biases
from rldsl.runtime.backend import PackedBatch
from rldsl.sharding.boxes import local_slice, slices
from rldsl.verify import verify
from tests.backend_torch.shards import layout_of as at
from tests.backend_torch.shards import pack, plan_model, ragged, shard_of
from tests.checkpoint.runs import run
from tests.end_to_end.programs import run_program
from tests.families.checks import model_of
from tests.families.tiny_configs import make
from tests.tiny import make_sums, write_jsonl
from tests.verify.faults import codes, edited
from tests.world import run_world

RATE, STEPS = 0.03, 3
SGD = Optimizer(lr=0.1, kind="sgd", clip_grad=0.0)
PROMPT = [5, 9, 12, 30, 7, 22, 8, 41, 17, 3, 29, 11]
# four responses to one prompt, and rows with prompts of their own; the last step has one row
ROWS = [(PROMPT, [4 + i, 40 - i, 13]) for i in range(4)] + ragged(5, 46, longest=10)
LAYOUTS = [at(), at(dp=2), at(tp=2), at(pp=2), at(cp=2), at(dp=2, ep=2), at(dp=2, zero=3), at(dp=2, zero=2),
           at(dp=2, ep=2, zero=1)]


def minibatch(step: int) -> list[int]:
    return [1] if step == STEPS - 1 else list(range(len(ROWS)))


Named = dict[str, torch.Tensor]  # of each bias


def by_hand(path: str) -> tuple[Named, Named]:
    """The biases after STEPS, and the loads of the first step. Each bias moves by RATE towards the mean load of its layer. Loads are those of transformers'
    own routers, sequence by sequence, which the experts get as their second argument."""
    model = model_of(path)
    biases = {n: x for n, x in (*model.named_buffers(), *model.named_parameters())
              if n.endswith(("e_score_correction_bias", "expert_bias"))}
    seen: dict[str, list[torch.Tensor]] = {}
    loads: Named = {}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args, name=name: seen.setdefault(name, []).append(args[1]))
    for step in range(STEPS):
        seen.clear()
        model.zero_grad()
        for row in minibatch(step):
            prompt, response = ROWS[row]
            logits = model(torch.tensor([prompt + response]), use_cache=False).logits[0].float().log_softmax(-1)
            at_response = logits[len(prompt) - 1 : -1].gather(1, torch.tensor(response, dtype=torch.long)[:, None])
            (at_response.square().sum() * 0.02).backward()
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= SGD.lr * p.grad
            for name, bias in biases.items():
                (chosen,) = (torch.cat([x.reshape(-1) for x in found]) for module, found in seen.items()
                             if name.startswith(module.removesuffix("experts")))
                counts = [int((chosen == expert).sum()) for expert in range(bias.numel())]
                loads.setdefault(name, torch.tensor(counts))
                for expert, load in enumerate(counts):
                    total = chosen.numel()
                    direction = (total > load * bias.numel()) - (total < load * bias.numel())
                    bias.view(-1)[expert] += RATE * direction
    return {n: x.detach().clone() for n, x in biases.items()}, loads


def train(shard: Any, rows: Sequence[Sequence[int]], name_prompts: bool) -> None:
    """One step, a pass for each of some lists of rows. name_prompts: say which prompts are the same."""
    def packed(part: Sequence[int]) -> PackedBatch:
        batch = pack([ROWS[r] for r in part])
        lens = [len(ROWS[r][0]) for r in part], [len(ROWS[r][1]) for r in part]
        return replace(batch, prompts=["same" if r < 4 else r for r in part], on_host=lens) if name_prompts else batch

    def loss(i: int, fresh: Sequence[Any]) -> torch.Tensor:
        return fresh[0]["logprobs"].square().sum() * 0.02

    shard.train([(packed(part),) for part in rows], [("logprobs",)], 1.0, loss, None, "full",
                router_bias_update_rate=RATE)


def steps(rank: int, path: str, layouts: Sequence[Layout], right: Named, loads: Named, passes: int,
          name_prompts: bool) -> list[tuple[Layout, str, bool]]:
    """(layout, bias, whether it is as by hand to the last bit), and the same of the loads of a rank with all tokens"""
    found = []
    for layout in layouts:
        made = shard_of(plan_model(path, "causal_lm", SGD), layout, rank, True)
        if made is None:
            continue
        shard, mine = made
        for step in range(STEPS):
            own = minibatch(step)[mine :: layout.dp]
            train(shard, [own[i::passes] for i in range(passes) if own[i::passes] or layout.zero or layout.ep > 1],
                  name_prompts)
            if step == 0 and layout.dp == layout.cp == 1:
                found += [(layout, f"loads of {name}", torch.equal(load, loads[name]))
                          for name, load in shard.router_loads.loads.items()]
        state = shard.state_dict()
        for name, bias in right.items():
            if name in state:
                parameter, pieces = shard.stage.held[name]
                found += [(layout, name, torch.equal(state[name][local_slice(p, p.box, parameter.dim)],
                                                     bias[slices(p.box)])) for p in pieces]
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("family, layouts, passes, shared", [
    ("deepseek_v3", LAYOUTS, 2, False), ("deepseek_v3", [at(), at(dp=2)], 1, True),
    ("minimax_m2", [at(), at(dp=2, ep=2)], 3, True), ("ernie4_5_moe", [at(), at(tp=2)], 2, False),
    ("glm_moe_dsa", [at(), at(dp=2)], 2, False)], ids=lambda x: x if isinstance(x, str) else "")
def test_biases_move_as_by_hand(family, layouts, passes, shared, tmp_path):
    """Of buffers and of parameters without gradient, of layers that are alike and not, of rows that are padded, and of
    prompts that a pass computes once."""
    path = make(tmp_path / "m", family)
    right, loads = by_hand(path)
    stored = load_file(tmp_path / "m/model.safetensors")
    assert right.keys() == {n.replace("{}", str(i)) for n in router_biases(describe(path, "causal_lm").params)
                            for i in (range(4) if "{}" in n else range(1))}
    assert all((right[n] != x.view_as(right[n])).any() for n, x in stored.items() if n in right)
    found = sum(run_world(2, steps, path, layouts, right, loads, passes, shared), [])
    assert {x for x, _, _ in found} == {*layouts}
    for layout, name, equal in found:
        assert equal, f"{name} under {layout}"


# --------------------------------------------------------------------------------------------- whole programs

PROGRAM = """
use std.grpo (group_norm, grpo_free)
data prompts = jsonl("{root}/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("{root}/{model}"{more}) train adamw(lr=1e-3, weight_decay=0.5)
flow run(steps=2) {{
  prompt = prompts.next()
  gen    = actor.generate(prompt, n=2, max_new_tokens=6)
  actor.train(gen, loss=grpo_free(old=gen.logprobs, adv=group_norm(len(gen))), minibatches=2{option})
  every 2 {{ save actor }}
}}
"""
OPTION = ", router_bias_update_rate=0.02"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("router_bias")
    for name, family in (("m", "deepseek_v3"), ("without", "mixtral"), ("own", "longcat_flash")):
        make(found / name, family)
    write_jsonl(found / "prompts.jsonl", make_sums(16))
    return found


def program(root: Path, folder: Path, option: str = OPTION, more: str = "", model: str = "m") -> Path:
    path = folder / "p.rlf"
    path.write_text(PROGRAM.format(root=root, option=option, more=more, model=model))
    return path


def biases(folder: Path) -> dict[str, torch.Tensor]:
    return {n: x for file in folder.rglob("*.safetensors") for n, x in load_file(file).items()
            if n.endswith("e_score_correction_bias")}


def test_runs_save_the_same_biases_under_every_placement(root, tmp_path):
    """The copy that generates is another one than that which trains: what it samples in the second step follows the
    biases of the first. Without the option, biases stay as they are, whatever the weight decay."""
    found = {}
    like = None
    for name, world, rules in (("one", 1, "place actor.* on mesh(0:1)"),
                               ("apart", 2, "place actor.train on mesh(0:2) dp=2 ep=2 mbs=1\n"
                                            "place actor.generate on mesh(0:2) tp=2")):
        folder = tmp_path / name
        folder.mkdir()
        like = run_program(program(root, folder), {}, folder, f"cluster nodes=1 gpus={world}\n{rules}\n", like=like)
        found[name] = biases(folder)
    stored = biases(root / "m")
    assert found["one"].keys() == stored.keys() and len(stored) == 3
    for name, bias in found["one"].items():
        assert torch.equal(bias, found["apart"][name])
        moved = (bias - stored[name]) / 0.02  # four steps of at most one each
        assert float((moved - moved.round()).abs().max()) < 1e-4 and 0 < float(moved.abs().max()) < 4.01
    folder = tmp_path / "frozen"
    folder.mkdir()
    run_program(program(root, folder, ""), {}, folder, "cluster nodes=1 gpus=1\n")
    assert all(torch.equal(x, stored[name]) for name, x in biases(folder).items())


@pytest.mark.thorough
@pytest.mark.parametrize("more", ["", ', dtype="bfloat16"'], ids=["float32", "bfloat16"])
def test_a_resumed_run_goes_on_with_the_biases_of_its_checkpoint(more, root, tmp_path):
    path = program(root, tmp_path, more=more)
    path.write_text(path.read_text().replace("  every 2", "  checkpoint every 1\n  every 2"))
    plan = encode(compile(str(path)))
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert run(plan, whole) == run(plan, stopped, stop_after=1) == [""]
    assert not (stopped / "step-2").exists()
    assert run(plan, stopped, resume=stopped) == [""]
    right, found = biases(whole / "step-2"), biases(stopped / "step-2")
    assert right and all(torch.equal(found[n], x) for n, x in right.items())


@pytest.mark.parametrize("model, more, why", [
    ("without", "", "the routers of mixtral models have no bias"),
    ("m", ", lora(r=4)", "under adapters the parameters of the directory stay as they are"),
    ("own", "", "the experts next to its model.layers.0.mlp.router.e_score_correction_bias have a special form")])
def test_models_without_such_biases_are_refused(model, more, why, root, tmp_path):
    with pytest.raises(Failure) as failure:
        compile(str(program(root, tmp_path, OPTION, more, model)))
    (found,) = failure.value.diagnostics
    assert (found.code, found.label) == ("RL0334", why) and found.span.text.startswith("actor.train(gen")


@pytest.mark.parametrize("rate", ["-0.1", "1.5", "1e39"])
def test_rates_outside_zero_to_one_are_refused(rate, root, tmp_path):
    """1e39 would be infinite in float32."""
    with pytest.raises(Failure) as failure:
        compile(str(program(root, tmp_path, f", router_bias_update_rate={rate}")))
    assert "router_bias_update_rate" in failure.value.diagnostics[0].title


@pytest.mark.parametrize("optimizer, says", [
    ('freeze="*.e_score_correction_bias"', "model.layers.1.mlp.gate.e_score_correction_bias gets no gradient"),
    ('group("*score_correction*", lr_scale=2)', "gets no gradient"),
    ('freeze=["*.weight", "*proj"]', "this freezes every parameter")])
def test_patterns_that_name_nothing_but_biases_are_refused(optimizer, says, root, tmp_path):
    """No optimizer changes them, so `freeze` would not keep them, and leaves nothing to train without the others."""
    path = program(root, tmp_path)
    path.write_text(path.read_text().replace("weight_decay=0.5", optimizer))
    with pytest.raises(Failure) as failure:
        compile(str(path))
    (found,) = failure.value.diagnostics
    assert found.code == "RL0343" and says in found.label


def test_other_backends_are_refused():
    """Whose description does not say that they can."""
    why = "it cannot move router biases (`router_bias_update_rate`)"
    for known, found in ((Description(), why), (Description(router_bias=True), "")):
        assert unable(known, "train", at(), False, router_bias=True) == found
    assert not described("megatron").router_bias and described("torch").router_bias


@pytest.mark.parametrize("rate", [-1.0, 1.5, float("inf"), float("nan")])
def test_plans_with_other_rates_are_found(rate, root, tmp_path):
    plan = compile(str(program(root, tmp_path)))
    verify(plan)
    body = edited(plan.body, lambda e: (replace(e, router_bias_update_rate=rate) if isinstance(e, Train) else e,))
    assert "RL0615" in codes(replace(plan, body=body))
    assert sum(isinstance(e, Train) and e.router_bias_update_rate == 0.02 for e, _ in event_paths(plan)) == 1
