"""Runs with adapters: the same on every placement, resumed exactly, saved as PEFT reads them, the base held once."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rldsl.diag import Failure
from rldsl.plan.codec import decode
from rldsl.plan.events import Load
from rldsl.plan.model import Lora, Model, Optimizer
from rldsl.plan.projection import event_paths
from rldsl.sharding.boxes import Box, local_slice
from tests.backend_torch.shards import make_shard, pack, ragged
from tests.checkpoint.runs import held, lines, run
from tests.end_to_end.programs import compile_program
from tests.lora.adapted import adapted, by_hand, make_adapter
from tests.samples import thorough_between
from tests.tiny import make_all, make_model
from tests.world import run_world

HERE = Path(__file__).parent
ONE = "cluster nodes=1 gpus=1\n"
TWO = "cluster nodes=1 gpus=2\nplace actor.* on mesh(0:2) tp=2\nplace ref.* on mesh(0:2) dp=2\n"
FOUR = ("cluster nodes=1 gpus=4\nplace actor.generate on mesh(0:4) dp=4\nplace actor.train on mesh(0:4) tp=2 pp=2\n"
        "place ref.* on mesh(0:4) tp=2 pp=2\n")
APART = ("cluster nodes=1 gpus=4\nplace actor.generate on mesh(0:2) dp=2\nplace actor.train on mesh(2:4) dp=2\n"
         "place ref.* on mesh(0:4) tp=4\n")
ROWS = ragged(6, 46, 3)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_all(tmp_path_factory.mktemp("tiny"), tie_word_embeddings=True, num_hidden_layers=2)


def plan(tiny: Path, folder: Path, place: str, **sets: object) -> bytes:
    folder.mkdir(parents=True, exist_ok=True)
    given = {"base": str(tiny / "models/sft"), "rows": str(tiny / "data/prompts.jsonl")} | sets
    return compile_program(HERE / "grpo_lora.rlf", given, place, folder)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone")
    assert run(plan(tiny, out / "plan", ONE), out) == [""]
    return out


def same(mine: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    """In everything that the program computes: not in times, memory and what was moved."""
    assert len(mine) == len(theirs) == 3
    for a, b in zip(mine, theirs):
        computed = [k for k in b if k.split("/")[0] not in ("time", "memory", "moved")]
        assert {"actor/loss", "actor/grad_norm", "kl", "reward", "length"} <= {*computed}
        assert {k: a[k] for k in computed} == pytest.approx({k: b[k] for k in computed}, rel=1e-4, abs=1e-5)


@pytest.mark.thorough
def test_training_changes_something_and_begins_at_the_base(alone: Path) -> None:
    first, _, last = lines(alone)
    assert abs(first["kl"]) < 1e-6 and abs(last["kl"]) > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("place", thorough_between([TWO, FOUR, APART]), ids=["two", "four", "apart"])
def test_placement_changes_no_numbers(alone: Path, tiny: Path, tmp_path: Path, place: str) -> None:
    assert set(run(plan(tiny, tmp_path / "plan", place), tmp_path, like=alone)) == {""}
    same(lines(tmp_path), lines(alone))
    mine, theirs = (load_file(x / "step-3/actor/adapter_model.safetensors") for x in (tmp_path, alone))
    assert mine.keys() == theirs.keys()
    assert all(torch.allclose(mine[k], theirs[k], atol=1e-5) for k in mine)


# ---------------------------------------------------------------------------------------------- on disk


def _logprobs(rank: int, base: str, adapter: str) -> np.ndarray:
    return _of_record(rank, adapted(base, Lora(0, 0.0, (), path=adapter)))


def _of_record(rank: int, model: Model) -> np.ndarray:
    return make_shard(model, rank, 1, 1, 1).infer([pack(ROWS)], "logprobs", 1.0).numpy()


def logprobs(base: str, adapter: str) -> torch.Tensor:
    return torch.from_numpy(run_world(1, _logprobs, base, adapter)[0])


def expected(model: Any) -> torch.Tensor:
    """Log-probs of the responses of ROWS by a transformers model."""
    found = []
    with torch.no_grad():
        for prompt, response in ROWS:
            logits = model(torch.tensor([prompt + response])).logits[0][len(prompt) - 1 : -1].log_softmax(-1)
            found.append(logits.gather(1, torch.tensor(response, dtype=torch.long)[:, None])[:, 0])
    return torch.cat(found)


def test_what_is_saved_is_read_by_peft(alone: Path, tiny: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    saved, base = alone / "step-3/actor", str(tiny / "models/sft")
    assert {p.name for p in saved.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"}
    assert not (saved / "config.json").exists()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    before = expected(plain)
    theirs = expected(peft.PeftModel.from_pretrained(plain, str(saved)).eval())
    mine = logprobs(base, str(saved))
    assert torch.allclose(mine, theirs, atol=1e-5) and not torch.allclose(before, theirs, atol=1e-2)


def test_what_is_saved_is_the_base_and_a_low_rank_product(alone: Path, tiny: Path) -> None:
    """Without PEFT: the merged weights W + alpha / r * B A in plain transformers."""
    from transformers import AutoModelForCausalLM

    saved, base = alone / "step-3/actor", str(tiny / "models/sft")
    said = json.loads((saved / "adapter_config.json").read_text())
    stored = load_file(saved / "adapter_model.safetensors")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    modules = {k.removesuffix(".lora_A.weight") for k in stored if k.endswith("lora_A.weight")}
    assert len(modules) == 2 * len(said["target_modules"]) == 14 and len(stored) == 28
    with torch.no_grad():
        for module in modules:
            product = stored[f"{module}.lora_B.weight"] @ stored[f"{module}.lora_A.weight"]
            weight = model.get_submodule(module.removeprefix("base_model.model.")).weight
            weight += said["lora_alpha"] / said["r"] * product
    mine = logprobs(base, str(saved))
    assert torch.allclose(mine, expected(model), atol=1e-5)


def test_what_peft_writes_is_read(tiny: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = str(tiny / "models/sft")
    asked = peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM",
                            init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), asked).eval()
    model.save_pretrained(str(tmp_path / "a"))
    mine = logprobs(base, str(tmp_path / "a"))
    assert torch.allclose(mine, expected(model), atol=1e-5)


def _refused(rank: int, model: Model) -> str:
    try:
        _of_record(rank, model)
    except Failure as failure:
        return failure.diagnostics[0].code
    return ""


def code_at_run(model: Model) -> str:
    return run_world(1, _refused, model)[0]


def code_at_compile(base: str, adapter: Path) -> str:
    with pytest.raises(Failure) as caught:
        adapted(base, Lora(0, 0.0, (), path=str(adapter)))
    return caught.value.diagnostics[0].code


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "score.weight", "model.layers.0.self_attn.q_proj.bias",
                                  "model.layers.0.self_attn.k_proj.lora_A.weight",
                                  "model.layers.0.self_attn.q_proj.lora_B.bias"])
def test_weights_that_would_be_left_out_are_refused(tiny: Path, tmp_path: Path, name: str) -> None:
    base, file = str(tiny / "models/sft"), tmp_path / "a/adapter_model.safetensors"
    make_adapter(tmp_path / "a", base, Lora(2, 4.0, ("q_proj",)))
    model = adapted(base, Lora(0, 0.0, (), path=str(tmp_path / "a")))
    assert code_at_run(model) == ""
    save_file(load_file(file) | {f"base_model.model.{name}": torch.zeros(2)}, str(file))
    assert code_at_run(model) == "RL0727"
    assert code_at_compile(base, tmp_path / "a") == "RL0342"


@pytest.mark.parametrize("other, code", [(Lora(2, 4.0, ("v_proj",)), "RL0727"), (Lora(3, 4.0, ("q_proj",)), "RL0723")])
def test_weights_of_another_adapter_are_refused(tiny: Path, tmp_path: Path, other: Lora, code: str) -> None:
    """When the program is compiled, or by the run if they were changed after that."""
    base = str(tiny / "models/sft")
    for name, lora in (("a", Lora(2, 4.0, ("q_proj",))), ("b", other)):
        make_adapter(tmp_path / name, base, lora)
    model = adapted(base, Lora(0, 0.0, (), path=str(tmp_path / "a")))
    shutil.copy(tmp_path / "b/adapter_model.safetensors", tmp_path / "a")
    assert code_at_run(model) == code
    assert code_at_compile(base, tmp_path / "a") == "RL0342"


def test_damaged_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    base, file = str(tiny / "models/sft"), tmp_path / "a/adapter_model.safetensors"
    make_adapter(tmp_path / "a", base, Lora(2, 4.0, ("q_proj",)))
    model = adapted(base, Lora(0, 0.0, (), path=str(tmp_path / "a")))
    file.write_bytes(file.read_bytes()[:100])
    assert (code_at_run(model), code_at_compile(base, tmp_path / "a")) == ("RL0721", "RL0302")
    file.unlink()
    assert (code_at_run(model), code_at_compile(base, tmp_path / "a")) == ("RL0721", "RL0342")


# ---------------------------------------------------------------------------------------------- resuming


@pytest.mark.thorough
def test_a_run_goes_on_exactly(tiny: Path, tmp_path: Path) -> None:
    """Under the same placement bit for bit; under another, equal. A checkpoint holds adapters only."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    data = plan(tiny, whole, TWO, often=1)
    assert set(run(data, whole)) == {""} and set(run(data, cut, stop_after=2)) == {""}
    stored = held(cut / "checkpoints/step-000002")
    assert stored and all(".lora_" in key and key.startswith("actor|") for key in stored)
    shutil.copytree(cut, tmp_path / "other")
    assert set(run(data, cut, resume=cut)) == {""}
    mine, theirs = (held(x / "checkpoints/step-000003") for x in (cut, whole))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)
    other = tmp_path / "other"
    assert set(run(plan(tiny, other / "plan", FOUR, often=1), other, resume=other, like=whole)) == {""}
    same(lines(other), lines(whole))


# ---------------------------------------------------------------------------------------------- memory, first values


def _bytes(rank: int, data: bytes, out: str, cwd: str) -> tuple[int, int, int, int]:
    """Of all shards on this rank, those of (the actor, the reference, both, a whole base)."""
    from rldsl.runtime.comm.world import join
    from rldsl.runtime.interpreter import model_events
    from rldsl.runtime.state.context import RunContext
    from rldsl.runtime.state.model_store import ModelStore

    os.chdir(cwd)
    made = decode(data, "x")
    world = join(made, rank, torch.device("cpu"))
    models = ModelStore(RunContext(made, world, Path(out)))
    for event, _ in event_paths(made):
        if isinstance(event, Load) and rank in world.meshes[event.mesh].members():
            model_events.load(models, None, event)

    def size(*names: str) -> int:
        tensors = {p.data_ptr(): p.nbytes for (m, _), s in models.shards.items() if m in names
                   for p in (*s.stage.parameters.values(), *s.stage.base.values())}
        return sum(tensors.values())

    base = max(sum(p.nbytes for p in s.stage.base.values()) for s in models.shards.values())
    return size("actor"), size("ref"), size("actor", "ref"), base


@pytest.mark.parametrize("place", [ONE, FOUR], ids=["one", "four"])
def test_the_reference_takes_no_memory(tiny: Path, tmp_path: Path, place: str) -> None:
    data = plan(tiny, tmp_path / "plan", place)
    for actor, ref, both, base in run_world(json.loads(data.splitlines()[0])["world"], _bytes, data, str(tmp_path),
                                            os.getcwd()):
        assert both == actor > ref > 0
        assert place == FOUR or base < actor < 1.5 * base


def test_a_reference_elsewhere_takes_its_own(tiny: Path, tmp_path: Path) -> None:
    """Under a layout that divides otherwise (all but norms, which are whole under both), and where it is moved to the
    host between calls."""
    for place, norms in ((TWO, 0.05), (ONE + "place ref.* on mesh(0:1) offload=true\n", 0.0)):
        data = plan(tiny, tmp_path / "plan", place)
        for actor, ref, both, _ in run_world(json.loads(data.splitlines()[0])["world"], _bytes, data, str(tmp_path),
                                             os.getcwd()):
            assert actor + ref * (1 - norms) <= both <= actor + ref


def _first(rank: int, base: str) -> list[dict[str, dict[Box, np.ndarray]]]:
    """The boxes of a new adapter under layouts of 4 ranks."""
    model = adapted(base, Lora(4, 8.0, ()), optimizer=Optimizer(lr=1e-3))
    found = []
    for dp, tp, pp in ((4, 1, 1), (1, 4, 1), (1, 2, 2)):
        shard = make_shard(model, rank, dp, tp, pp)
        found.append({name: {p.box: t[local_slice(p, p.box, s.spec.split.dim if s.spec.split else 0)].numpy()
                             for p in pieces}
                      for name, t in shard.state_dict().items() for s, pieces in [shard.stage.held[name]]})
    return found


def test_a_new_adapter_begins_alike_everywhere(tiny: Path) -> None:
    ranks = run_world(4, _first, str(tiny / "models/sft"))
    whole = {name: torch.from_numpy(next(iter(boxes.values()))) for name, boxes in ranks[0][0].items()}
    for name, tensor in whole.items():
        if ".lora_B." in name:
            assert not tensor.any()
        else:
            bound = tensor.shape[1] ** -0.5
            assert bound * 0.8 < float(tensor.abs().max()) < bound and abs(float(tensor.mean())) < bound / 3
    assert not torch.equal(whole["model.layers.0.self_attn.q_proj.lora_A.weight"],
                           whole["model.layers.1.self_attn.q_proj.lora_A.weight"])
    for layouts in ranks:
        for own in layouts:
            for name, boxes in own.items():
                for box, part in boxes.items():
                    assert torch.equal(torch.from_numpy(part), whole[name][tuple(slice(*b) for b in box)])


def _half(rank: int, base: str) -> tuple[set[str], set[str], bool, bool]:
    model = adapted(base, Lora(4, 8.0, ()), optimizer=Optimizer(lr=1e-2), dtype="bfloat16")
    pool: dict[object, torch.Tensor] = {}
    shard = make_shard(model, rank, weight_cache=pool)
    frozen = replace(model, params=model.base, base=(), lora=None, train_layout="", optimizer=None)
    ref = make_shard(frozen, rank, weight_cache=pool)
    one = shard.infer([pack(ROWS)], "logprobs", 1.0)
    two = ref.infer([pack(ROWS)], "logprobs", 1.0)
    for _ in range(2):  # the first moves B alone, since A's gradient goes through it
        shard.train([(pack(ROWS),)], [("logprobs",)], 1.0, lambda i, fresh: fresh[0]["logprobs"].sum())
    three = ref.infer([pack(ROWS)], "logprobs", 1.0)
    moved = all(t.any() for t in shard.state_dict().values())
    return ({str(p.dtype) for p in shard.stage.base.values()}, {str(t.dtype) for t in shard.state_dict().values()},
            torch.equal(one, two) and torch.equal(two, three), moved)


def test_half_precision_keeps_adapters_in_full(tiny: Path) -> None:
    """The base in bfloat16, shared; what is trained in float32; log-probs of a new adapter are the reference's, bit by
    bit."""
    assert run_world(1, _half, str(tiny / "models/sft")) == [({"torch.bfloat16"}, {"torch.float32"}, True, True)]


def test_the_reference_of_this_file_is_the_adapters(tmp_path: Path) -> None:
    """by_hand changes what a model computes (or the tests above would prove nothing)."""
    from transformers import AutoModelForCausalLM

    path = str(make_model(tmp_path / "m"))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    before = expected(model)
    by_hand(model, make_adapter(tmp_path / "a", path, Lora(2, 4.0, ("q_proj",))), 2.0)
    assert not torch.allclose(before, expected(model), atol=1e-3)
