"""Plans of models with adapters: what moves, what is refused, and the messages for mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.models.families import describe
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, Item, Load, Loop, Realloc
from rldsl.plan.model import Lora, Model, Plan
from rldsl.plan.projection import rank_classes, walk
from rldsl.sharding.boxes import itemsize, parameters, pieces_of_rank, volume
from rldsl.verify import verify
from tests.families import tiny_configs
from tests.lora.adapted import make_adapter
from tests.tiny import make_model

PROGRAM = """
use std.sft (sft)
cluster nodes=1 gpus=4
data rows = jsonl("rows.jsonl", batch=6)
model actor = causal_lm("{base}", lora(r=4, targets=["q_proj", "down_proj"])) train adamw(lr=0.02)
model ref   = causal_lm("{base}")
{top}
flow f(steps=3) {{
  row = rows.next()
  a = actor.logprobs(row)  on mesh(0:4) dp=4
  r = ref.logprobs(row)    on mesh(0:4) dp=2 pp=2
  metric m = mean(a) + mean(r)
  actor.train(row, loss=sft())   on mesh(0:4) tp=2 pp=2
  {more}
}}
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny") / "sft")


def compiled(base: Path, folder: Path, more: str = "", top: str = "", program: str = PROGRAM) -> api.Compiled:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lora.rlf").write_text(program.format(base=base, more=more, top=top))
    return api.compile_all(str(folder / "lora.rlf"))


@pytest.fixture(scope="module")
def plan(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Plan:
    return compiled(base, tmp_path_factory.mktemp("plan")).plan


def actor(plan: Plan) -> Model:
    return next(m for m in plan.models if m.name == "actor")


def test_only_adapters_have_versions(plan: Plan, base: Path) -> None:
    model = actor(plan)
    assert {p.name.split(".")[-2] for p in model.params} == {"lora_A", "lora_B"}
    assert {p.name.split(".")[-3] for p in model.params} == {"q_proj", "down_proj"}
    assert model.base == describe(str(base), "causal_lm").params
    assert model.lora is not None and (model.lora.r, model.lora.alpha, model.lora.seed) == (4, 16.0, 1)
    assert decode(encode(plan), "x") == plan


def test_factors_are_divided_as_their_modules(plan: Plan) -> None:
    """Rows of q_proj are divided by heads, columns of down_proj one by one."""
    found = {p.name.split("self_attn.")[-1].split("mlp.")[-1]: p for p in actor(plan).params}
    assert found["q_proj.lora_A.weight"].split is None and found["q_proj.lora_A.weight"].partial_grad
    assert found["q_proj.lora_B.weight"].split.dim == 0 and found["q_proj.lora_B.weight"].split.parts == ((4, 8),)
    divided = found["down_proj.lora_A.weight"].split
    assert (divided.dim, divided.parts) == (1, ((48, 1),))
    assert found["down_proj.lora_B.weight"].split is None and found["down_proj.lora_B.weight"].partial_grad
    assert not found["q_proj.lora_B.weight"].partial_grad and not found["down_proj.lora_A.weight"].partial_grad


def test_reallocs_move_what_is_lacking_of_the_adapters(plan: Plan) -> None:
    (move,) = [e for e, _ in walk(plan.body) if isinstance(e, Realloc)]
    model, meshes = actor(plan), {m.id: m for m in plan.meshes}
    layouts = {x.id: x for x in plan.layouts}
    lacking = 0
    for rank in range(4):
        for p in parameters(model):
            have, want = ([piece.box for piece in pieces_of_rank(p, model.layers, layouts[x], meshes[layouts[x].mesh], rank)]
                          for x in (move.src, move.dst))
            lacking += sum(map(volume, want)) - sum(map(volume, have))  # each rank wants all of everything
    assert move.bytes == lacking * itemsize(model) > 0
    assert move.bytes < 4 * sum(volume(tuple((0, n) for n in p.spec.shape)) for p in parameters(model)) * 4


def test_every_layout_reads_the_base(plan: Plan) -> None:
    loads = [(e.model, e.layout) for e, _ in walk(plan.body) if isinstance(e, Load)]
    assert len(loads) == len(set(loads)) == 3 and sum(m == "actor" for m, _ in loads) == 2


SAME = PROGRAM.replace("dp=2 pp=2", "tp=2 pp=2")


def test_the_base_of_a_reference_costs_nothing_where_it_is_there_already(base: Path, tmp_path: Path) -> None:
    """Under the layout of the actor; under another one it is what is not there."""
    same, other = (dict(compiled(base, tmp_path / str(i), program=p).peaks[3].holders)
                   for i, p in enumerate((SAME, PROGRAM)))
    # the actor trains there; and under the other layout rank 3 has all of it too, from the actor under dp=4
    assert not any(v for held in (same, other) for k, v in held.items() if k.startswith("parameters of ref"))
    gradients = next(v for k, v in same.items() if k.startswith("gradients of actor"))
    own = [v for k, v in same.items() if k.startswith("parameters of actor")]
    assert gradients == min(own) and all(v < 100_000 for v in own)


def test_a_model_without_room_for_gradients_fits_with_adapters(base: Path, tmp_path: Path) -> None:
    """The estimate counts gradients and optimizer of adapters alone."""
    few = PROGRAM.replace("batch=6)", "batch=4, max_prompt_tokens=32, max_answer_tokens=32)")  # parameters count for more
    whole = compiled(base, tmp_path / "w", program=few.replace(', lora(r=4, targets=["q_proj", "down_proj"])', ""))
    thin = compiled(base, tmp_path / "t", program=few)
    assert max(p.bytes for p in thin.peaks.values()) < max(p.bytes for p in whole.peaks.values())


def test_averages_of_adapters_move_adapters(base: Path, tmp_path: Path) -> None:
    top = f'model slow = causal_lm("{base}", lora(r=4, targets=["q_proj", "down_proj"]))'
    plan = compiled(base, tmp_path, more="ema slow from actor 0.9\n  save slow to \"x\"", top=top).plan
    slow = next(m for m in plan.models if m.name == "slow")
    assert slow.updated_from == ("actor",) and slow.params == actor(plan).params and slow.base == actor(plan).base
    verify(plan)


# ---------------------------------------------------------------------------------------------- the verifier


def changed(plan: Plan, **fields: object) -> Plan:
    """The plan with the actor's record changed."""
    return replace(plan, models=tuple(replace(m, **fields) if m.name == "actor" else m for m in plan.models))


def codes(plan: Plan) -> set[str]:
    try:
        verify(plan)
    except Failure as failure:
        return {d.code for d in failure.diagnostics}
    return set()


def only(items: tuple[Item, ...], keep) -> tuple[Item, ...]:
    return tuple(replace(i, body=only(i.body, keep)) if isinstance(i, Loop) else i for i in items
                 if not isinstance(i, Event) or keep(i))


def test_a_realloc_needs_a_base_that_was_read(plan: Plan) -> None:
    (move,) = [e for e, _ in walk(plan.body) if isinstance(e, Realloc)]
    body = only(plan.body, lambda e: not (isinstance(e, Load) and (e.model, e.layout) == ("actor", move.dst)))
    less = replace(plan, body=body)
    peaks = {r: c.peak_bytes for c in plan.classes for a, b in c.ranks for r in range(a, b)}
    less = replace(less, classes=rank_classes(less.meshes, body, 4, peaks))
    assert "RL0520" in codes(less)


def test_a_record_that_is_not_what_it_says_is_refused(plan: Plan) -> None:
    m = actor(plan)
    first, rest = m.params[0], m.params[1:]
    lora = m.lora
    assert lora is not None
    wrong = {
        "no base": dict(base=()),
        "does not support adapters": dict(lora=None),
        "a weight that is trained": dict(params=(*m.params, m.base[0]), base=m.base[1:]),
        "a factor lacks": dict(params=rest),
        "another rank": dict(lora=replace(lora, r=5)),
        "rank 0": dict(lora=replace(lora, r=0)),
        "no scale": dict(lora=replace(lora, alpha=0.0)),
        "further targets": dict(lora=replace(lora, targets=(*lora.targets, "k_proj"))),
        "fewer targets": dict(lora=replace(lora, targets=("q_proj",))),
        "no part of a gradient": dict(params=(replace(first, partial_grad=False), *rest)),
        "divided otherwise": dict(params=(replace(first, split=m.params[1].split), *rest)),
        "on another stage": dict(params=(replace(first, stage="first", layers=0, name=first.name.replace("{}", "0")),
                                         *rest)),
        "twice": dict(base=(*m.base, m.base[0])),
    }
    assert codes(plan) == set()
    for what, fields in wrong.items():
        assert codes(changed(plan, **fields)) & {"RL0611", "RL0612"}, what


def test_bytes_of_the_whole_model_are_refused(plan: Plan) -> None:
    def grown(items: tuple[Item, ...]) -> tuple[Item, ...]:
        return tuple(replace(i, body=grown(i.body)) if isinstance(i, Loop) else
                     replace(i, bytes=i.bytes * 10) if isinstance(i, Realloc) else i for i in items)

    assert codes(replace(plan, body=grown(plan.body))) == {"RL0526"}


# ---------------------------------------------------------------------------------------------- mistakes


LINE = """
use std.sft (sft)
data rows = jsonl("rows.jsonl", batch=6)
model actor = MODEL
flow f(steps=3) {
  row = rows.next()
  actor.train(row, loss=sft())
}
"""
WRITTEN = {  # found by `check`
    'causal_lm("m", lora(r=0)) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora(r=1.5)) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora(alpha=0)) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora(rank=8)) train adamw(1e-4)': "RL0107",
    'causal_lm("m", lora(r=8, r=8)) train adamw(1e-4)': "RL0215",
    'causal_lm("m", lora(targets=3)) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora(8)) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora("")) train adamw(1e-4)': "RL0205",
    'causal_lm("m", lora("dir", r=8)) train adamw(1e-4)': "RL0204",
    'causal_lm("m", lora("dir", "other")) train adamw(1e-4)': "RL0204",
    'causal_lm("m", lora) train adamw(1e-4)': "RL0203",
    'causal_lm("m", lroa(r=8)) train adamw(1e-4)': "RL0101",
    'causal_lm("m", lora=lora(r=8)) train adamw(1e-4)': "RL0204",
    'causal_lm("m", lora=8) train adamw(1e-4)': "RL0204",
    'causal_lm("m", 8) train adamw(1e-4)': "RL0204",
    'causal_lm("m", lora(), lora()) train adamw(1e-4)': "RL0204",
}


@pytest.mark.parametrize("model", WRITTEN)
def test_mistakes_of_writing(model: str) -> None:
    assert [d.code for d in api.check(LINE.replace("MODEL", model), "x.rlf")] == [WRITTEN[model]]


def test_an_adapter_that_nothing_trains() -> None:
    """Refused, unless another writes it or it comes from a directory."""
    text = LINE.replace("MODEL", 'causal_lm("m", lora(r=2)) train adamw(1e-4)\nmodel ref = causal_lm("m", lora(r=2))')
    text = text.replace("  actor.train", "  r = ref.logprobs(row)\n  metric m = mean(r)\n  actor.train")
    (found,) = api.check(text, "x.rlf")
    assert found.code == "RL0241" and found.span is not None
    assert found.span.text == "lora(r=2)" and found.span.start > text.index("ref")
    assert not api.check(text.replace("lora(r=2))\nflow", 'lora("dir"))\nflow'), "x.rlf")
    assert not api.check(text.replace("loss=sft())", "loss=sft())\n  ema ref from actor 0.5"), "x.rlf")


def refused(base: Path, folder: Path, **given: str) -> list[tuple[str, str]]:
    with pytest.raises(Failure) as caught:
        compiled(base, folder, **given)
    return [(d.code, f"{d.title} {d.label} {d.help}") for d in caught.value.diagnostics]


def test_a_target_that_is_not_there(base: Path, tmp_path: Path) -> None:
    ((code, text),) = refused(base, tmp_path, program=PROGRAM.replace('"q_proj"', '"vproj"'))
    assert code == "RL0341" and "did you mean `v_proj`" in text and "gate_proj" in text and "up_proj" in text
    for name in ("embed_tokens", "lm_head", "layers", "proj", ""):  # no linear layer in a block
        assert refused(base, tmp_path, program=PROGRAM.replace("q_proj", name))[0][0] == "RL0341", name


def test_a_linear_layer_whose_weight_another_module_reads_gets_no_adapter(tmp_path: Path) -> None:
    """LongCat's routers multiply with the weight of their linear layer without calling it, Hunyuan's call it."""
    path = Path(tiny_configs.make(tmp_path / "longcat", "longcat_flash"))
    given = PROGRAM.replace('["q_proj", "down_proj"]', '["classifier"]')
    ((code, text),) = refused(path, tmp_path, program=given)
    assert code == "RL0341" and "no module named `classifier`" in text and "q_a_proj" in text
    of_all = compiled(path, tmp_path / "all", program=PROGRAM.replace(', targets=["q_proj", "down_proj"]', "").replace(
        "tp=2 pp=2", "dp=4").replace("dp=2 pp=2", "dp=4"))
    assert not any("classifier" in p.name for p in actor(of_all.plan).params)
    other = describe(str(tiny_configs.make(tmp_path / "hunyuan", "hunyuan_v1_moe")), "causal_lm")
    assert any(m.name.endswith(".wg") for m in other.linears)


def test_a_family_without_a_plan_is_not_divided(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "gpt2", family="gpt2", n_positions=1024)
    given = PROGRAM.replace('["q_proj", "down_proj"]', '["c_attn"]')
    assert refused(plain, tmp_path, program=given)[0][0] not in ("RL0341", "RL0342")
    whole = given.replace("tp=2 pp=2", "dp=4").replace("dp=2 pp=2", "dp=4")
    model = actor(compiled(plain, tmp_path / "whole", program=whole).plan)
    assert model.lora is not None and model.lora.transposed
    assert {p.shape for p in model.params} == {(4, 32), (96, 4)}


def test_models_with_other_adapters_do_not_follow(base: Path, tmp_path: Path) -> None:
    same = 'lora(r=4, targets=["q_proj", "down_proj"])'
    other = make_model(tmp_path / "other", seed=3)
    for lora, path in (("", base), (", lora(r=2)", base), (", " + same.replace("r=4", "r=4, alpha=8"), base),
                       (", " + same, other)):
        top = f'model slow = causal_lm("{path}"{lora})'
        ((code, _),) = refused(base, tmp_path, more="sync slow from actor\n  save slow to \"x\"", top=top)
        assert code == "RL0321", (lora, path)


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
WITHOUT = {"bias": "none", "use_dora": False, "rank_pattern": {}, "lora_bias": False, "layers_to_transform": None,
           "modules_to_save": None, "init_lora_weights": True, "megatron_core": "megatron.core",
           "qalora_group_size": 16, "peft_version": "0.21.2", "lora_dropout": 0.05, "task_type": "CAUSAL_LM",
           "an_option_of_later": None}
ODD = [
    {"target_modules": None}, {"target_modules": ".*q_proj"}, {"peft_type": "IA3"}, {"r": 0},
    {"lora_alpha": -1}, {"r": "x"}, {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}, {"lora_bias": True},
    {"rank_pattern": {"k_proj": 2}},
    {"alpha_pattern": {"k_proj": 2}}, {"modules_to_save": ["lm_head"]}, {"exclude_modules": ["k_proj"]},
    {"exclude_modules": ".*layers.0.*"}, {"trainable_token_indices": [1, 2]}, {"layers_to_transform": [0, 1]},
    {"layers_to_transform": 0}, {"target_parameters": ["gate"]}, {"init_lora_weights": "pissa"}, {"use_qalora": True},
    {"init_lora_weights": "olora"}, {"alora_invocation_tokens": [5]}, {"an_option_of_later": 1.5},
]


def with_config(base: Path, folder: Path, config: str) -> api.Compiled:
    make_adapter(folder / "a", str(base), Lora(4, 8.0, ("q_proj",)))
    (folder / "a/adapter_config.json").write_text(config)
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{folder}/a"')
    return compiled(base, folder, program=given)


def test_an_adapter_as_peft_says_it(base: Path, tmp_path: Path) -> None:
    lora = actor(with_config(base, tmp_path, json.dumps(PLAIN | WITHOUT)).plan).lora
    assert lora is not None and (lora.r, lora.alpha, lora.targets) == (4, 8.0, ("q_proj",))


@pytest.mark.parametrize("options", ODD, ids=lambda x: "-".join(x))
def test_adapters_that_compute_something_else(base: Path, tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(Failure) as caught:
        with_config(base, tmp_path, json.dumps(PLAIN | WITHOUT | options))
    (found,) = caught.value.diagnostics
    assert found.code == "RL0342" and any(name in found.label for name in (*options, "invalid literal")) and found.help


@pytest.mark.parametrize("config", ["", "[]", '{"peft_type": "LORA"}', "{", "null", "\ud800"])
def test_adapters_that_cannot_be_read(base: Path, tmp_path: Path, config: str) -> None:
    with pytest.raises(Failure) as caught:
        with_config(base, tmp_path, config.encode("utf-8", "surrogatepass").decode("latin-1"))
    assert [d.code for d in caught.value.diagnostics] == ["RL0342"]


def test_a_pickled_adapter(base: Path, tmp_path: Path) -> None:
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{tmp_path}/a"')
    (tmp_path / "a").mkdir()
    (tmp_path / "a/adapter_config.json").write_text(json.dumps(PLAIN | WITHOUT))
    (tmp_path / "a/adapter_model.bin").write_bytes(b"pickled")
    ((code, text),) = refused(base, tmp_path, program=given)
    assert code == "RL0342" and "adapter_model.bin" in text and "save_pretrained" in text
    (tmp_path / "b").mkdir()
    make_adapter(tmp_path / "b/a", str(base), Lora(4, 8.0, ("q_proj",)))
    (tmp_path / "b/a/adapter_model.bin").write_bytes(b"pickled")  # the safetensors are read, not this
    compiled(base, tmp_path, program=given.replace(f"{tmp_path}/a", f"{tmp_path}/b/a"))


def with_adapter(base: Path, folder: Path, adapter: Path) -> str:
    """The one error of a program whose model has this adapter."""
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{adapter}"')
    with pytest.raises(Failure) as caught:
        compiled(base, folder, program=given)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0342" and found.span is not None and found.span.text.startswith("lora(")
    return f"{found.title}; {found.label}; {found.help}"


def test_an_adapter_without_weights(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", str(base), Lora(4, 8.0, ("q_proj",)))
    (tmp_path / "a/adapter_model.safetensors").unlink()
    assert "has no weights; adapter_model.safetensors is missing" in with_adapter(base, tmp_path / "p", tmp_path / "a")


@pytest.mark.parametrize("named", ["", "lab/wide"])
def test_an_adapter_of_another_base_is_named(base: Path, tmp_path: Path, named: str) -> None:
    """By the base that PEFT has noted, if it has."""
    wide = make_model(tmp_path / "wide", hidden_size=64)
    make_adapter(tmp_path / "a", str(wide), Lora(4, 8.0, ("q_proj",)))
    config = tmp_path / "a/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": named or None}))
    text = with_adapter(base, tmp_path / "p", tmp_path / "a")
    assert f'does not fit the model "{base}"' in text
    assert "model.layers.0.self_attn.q_proj.lora_A.weight is 4 x 64 there, and must be 4 x 32" in text
    assert ('was trained on "lab/wide", as its adapter_config.json says' if named else "to another model") in text


def test_an_adapter_with_more_layers_than_the_base(base: Path, tmp_path: Path) -> None:
    deep = make_model(tmp_path / "deep", num_hidden_layers=7)
    make_adapter(tmp_path / "a", str(deep), Lora(4, 8.0, ("q_proj",)))
    text = with_adapter(base, tmp_path / "p", tmp_path / "a")
    assert "the model has nothing for its model.layers." in text and "q_proj.lora_A.weight and " in text
    make_adapter(tmp_path / "b", str(base), Lora(4, 8.0, ("q_proj",)))
    assert "model.layers.4.self_attn.q_proj.lora_A.weight is missing there" in with_adapter(
        make_model(tmp_path / "deeper", num_hidden_layers=7), tmp_path / "q", tmp_path / "b")


def test_a_base_without_the_modules_of_an_adapter(base: Path, tmp_path: Path) -> None:
    make_adapter(tmp_path / "a", str(base), Lora(4, 8.0, ("q_proj",)))
    config = tmp_path / "a/adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "lab/llama"}))
    plain = make_model(tmp_path / "gpt2", family="gpt2", n_positions=1024)
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{tmp_path}/a"').replace("tp=2 pp=2", "dp=4")
    with pytest.raises(Failure) as caught:
        compiled(plain, tmp_path / "p", program=given.replace("dp=2 pp=2", "dp=4"))
    (found,) = caught.value.diagnostics
    assert found.code == "RL0341" and 'trained on "lab/llama"' in found.notes[0] and not found.label


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, b"\2\0\0\0\0\0\0\0[]", b'\7\0\0\0\0\0\0\0{"a":1}'])
def test_weights_of_an_adapter_that_cannot_be_read(base: Path, tmp_path: Path, data: bytes) -> None:
    make_adapter(tmp_path / "a", str(base), Lora(4, 8.0, ("q_proj",)))
    (tmp_path / "a/adapter_model.safetensors").write_bytes(data)
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{tmp_path}/a"')
    ((code, text),) = refused(base, tmp_path / "p", program=given)
    assert code == "RL0302" and "cannot be read" in text


def test_no_adapter_at_all(base: Path, tmp_path: Path) -> None:
    given = PROGRAM.replace('r=4, targets=["q_proj", "down_proj"]', f'"{tmp_path}/a"')
    assert refused(base, tmp_path, program=given)[0][0] == "RL0342"


@pytest.mark.parametrize("family, has", [("falcon", "query_key_value"), ("llama4_text", "q_proj")])
def test_layers_that_only_compute_a_product_can_have_adapters(family, has, tmp_path):
    """Falcon writes its product itself; Llama 4's routers choose experts, too."""
    found = describe(str(tiny_configs.make(tmp_path / "m", family)), "causal_lm")
    names = {linear.name.removesuffix(".weight").rpartition(".")[2] for linear in found.linears}
    assert has in names and "router" not in names
