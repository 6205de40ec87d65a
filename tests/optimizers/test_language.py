"""`train OPTIMIZER(...)`: what it means in the plan, what it needs, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api
from rldsl.diag import Failure
from rldsl.memory.parameters import Copy, elements, largest_step, optimizer_state, trained
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Loop, Train
from rldsl.plan.model import Model, Optimizer, ParamGroup
from rldsl.plan.optimizers import param_options
from rldsl.plan.model import Plan
from rldsl.sharding.boxes import Cell, parameters
from rldsl.verify import verify
from tests.tiny import make_model

LINE = """use std.sft (sft)
data rows = jsonl("rows.jsonl", batch=4, kind=answers)
model actor = causal_lm("m") train OPTIMIZER
flow f(steps=3) {
  row = rows.next()
  actor.train(row, loss=sft()) on mesh(0:2) PLACE
}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "m", num_hidden_layers=2)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 8)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def text(optimizer: str, place: str = "dp=2") -> str:
    return LINE.replace("OPTIMIZER", optimizer).replace("PLACE", place)


def compiled(optimizer: str, place: str) -> Plan:
    Path("x.rlf").write_text(text(optimizer, place))
    return api.compile("x.rlf")


def model(optimizer: str, place: str = "dp=2") -> tuple[Model, Copy]:
    plan = compiled(optimizer, place)
    (found,) = decode(encode(plan), "x.plan").models
    (layout,) = [x for x in plan.layouts if x.id == found.train_layout]
    return found, Copy(found, layout, Cell(0, 0))


WRITTEN = {
    "adamw(lr=1e-5)": Optimizer(lr=1e-5),
    "adamw_8bit(1e-5, betas=[0.9, 0.95])": Optimizer(lr=1e-5, betas=(0.9, 0.95), kind="adamw_8bit"),
    "sgd(1e-2)": Optimizer(lr=1e-2, kind="sgd"),
    "sgd(lr=1e-2, momentum=0.9, nesterov=true, decay=matrices)": Optimizer(
        lr=1e-2, kind="sgd", momentum=0.9, nesterov=True, decay="matrices"),
    "adafactor(lr=1e-3)": Optimizer(lr=1e-3, eps=1e-3, kind="adafactor"),
    "muon(lr=1e-2, adjust_lr=match_rms_adamw)": Optimizer(lr=1e-2, kind="muon", momentum=0.95, nesterov=True,
                                                         adjust_lr="match_rms_adamw"),
    'adamw(1e-5, group("*norm*", "*.up_proj.*", weight_decay=0), group("*.layers.1.*", lr_scale=0.1), freeze="lm_head.*")':
        Optimizer(lr=1e-5, freeze=("lm_head.*",), groups=(ParamGroup(("*norm*", "*.up_proj.*"), weight_decay=0.0),
                                                          ParamGroup(("*.layers.1.*",), lr_scale=0.1))),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_what_a_plan_says(folder: Path, written: str) -> None:
    assert model(written)[0].optimizer == WRITTEN[written]


def test_options_of_one_parameter(folder: Path) -> None:
    """The last group that sets an option wins; vectors do not decay; Muon leaves the embedding to AdamW."""
    found, _ = model('muon(lr=0.02, adamw_lr=1e-3, weight_decay=0.1, decay=matrices, group("model.layers.*", lr_scale=2),'
                     ' group("*.layers.1.*", lr_scale=3, weight_decay=0.2), freeze=["lm_head.*"])')
    assert found.optimizer is not None
    own = {p.name: param_options(found.optimizer, p.name, p.spec) for p in parameters(found)}

    def of(name: str) -> tuple[str, float, float, bool]:
        x = own[name]
        return x.rule, pytest.approx(x.lr_scale), x.weight_decay, x.frozen

    assert of("model.layers.0.mlp.up_proj.weight") == ("muon", 2, 0.1, False)
    assert of("model.layers.1.mlp.up_proj.weight") == ("muon", 3, 0.2, False)
    assert of("model.layers.0.input_layernorm.weight") == ("adamw", 2 * 0.05, 0.0, False)
    assert of("model.embed_tokens.weight") == ("adamw", 0.05, 0.1, False)
    assert of("lm_head.weight") == ("adamw", 0.05, 0.1, True)


def test_memory_is_that_of_the_optimizer(folder: Path) -> None:
    """A frozen parameter has neither gradient nor state."""
    plain, whole = model("adamw(1e-5)")
    size = elements(plain.params, whole)
    head = plain.sizes.vocab * plain.sizes.hidden
    assert trained(whole) == size and optimizer_state(whole) == 8 * size and largest_step(whole) == 0
    assert optimizer_state(model("sgd(1e-2)")[1]) == 0
    assert optimizer_state(model("sgd(1e-2, momentum=0.5)")[1]) == 4 * size
    frozen = model('adamw(1e-5, freeze=["lm_head.*"])')[1]
    assert trained(frozen) == size - head and optimizer_state(frozen) == 8 * (size - head)
    muon = model("muon(1e-2)")[1]
    matrices = sum(p.spec.shape[0] * p.spec.shape[1] for p in parameters(muon.model)
                   if p.layer is not None and len(p.spec.shape) == 2)
    assert optimizer_state(muon) == 8 * size - 4 * matrices
    assert 0 < largest_step(muon) < largest_step(model("muon(1e-2)", "tp=2")[1])
    factored = model("adafactor(1e-3)")[1]
    assert 0 < optimizer_state(factored) < size


@pytest.mark.parametrize(("optimizer", "code", "says"), [
    ("adam(1e-5)", "RL0101", "adamw"),
    ("lion(1e-5)", "RL0101", "one of: adamw, adamw_8bit, sgd, adafactor, muon"),
    ("adamw", "RL0203", "a call"),
    ("sgd()", "RL0215", "lr"),
    ("sgd(1e-2, betas=[0.9, 0.99])", "RL0107", "no option `betas`"),
    ("adamw(1e-2, momentum=0.9)", "RL0107", "no option `momentum`"),
    ("sgd(1e-2, nesterov=true)", "RL0205", "`momentum` above 0"),
    ("sgd(1e-2, momentum=1)", "RL0205", "less than 1"),
    ("muon(1e-2, ns_steps=0)", "RL0205", "at least 1"),
    ("muon(1e-2, adjust_lr=\"other\")", "RL0205", ""),
    ("adafactor(1e-2, beta2_decay=0.8)", "RL0205", "at most 0"),
    ("adamw(1e-5, decay=\"norms\")", "RL0205", ""),
    ("adamw(1e-5, 0.1)", "RL0204", "must be named"),
    ("adamw(1e-5, warmup=1.5)", "RL0205", "neither a number of steps nor a fraction"),
    ("adamw_8bit(1e-5, momentum=0.9)", "RL0107", "no option `momentum`"),
    ('adamw(1e-5, group("*norm*"))', "RL0215", "`lr_scale` or `weight_decay`"),
    ("adamw(1e-5, group(weight_decay=0))", "RL0215", "a pattern"),
    ("adamw(1e-5, group(3, weight_decay=0))", "RL0205", "must be a string"),
    ('adamw(1e-5, group("*", lr=1))', "RL0107", "no option `lr`"),
])
def test_mistakes_of_writing(optimizer: str, code: str, says: str) -> None:
    found = api.check(text(optimizer), "x.rlf")
    assert [d.code for d in found] == [code] and found[0].span is not None
    assert says in f"{found[0].title} {found[0].label} {found[0].help}"


@pytest.mark.parametrize(("optimizer", "place", "code", "says"), [
    ('adamw(1e-5, group("norm", weight_decay=0))', "dp=2", "RL0343", 'matches "norm"'),
    ('adamw(1e-5, freeze=["lm_haed.weight"])', "dp=2", "RL0343", 'did you mean "lm_head.weight"'),
    ('adamw(1e-5, freeze=["*"])', "dp=2", "RL0343", "every parameter"),
    ('adamw(1e-5, freeze=["lm_head.*"])', "dp=2 backend=megatron", "RL0327", "`freeze`"),
])
def test_mistakes_about_a_model(folder: Path, optimizer: str, place: str, code: str, says: str) -> None:
    with pytest.raises(Failure) as caught:
        compiled(optimizer, place)
    (found,) = caught.value.diagnostics
    assert found.code == code and says in f"{found.title} {found.label} {found.help}"
    assert found.span is not None and found.span.text in text(optimizer, place)


@pytest.mark.parametrize(("rate", "code"), [
    ("-1e-6", "RL0205"), ("row.logprobs", "RL0112"), ("len(row)", "RL0201"), ("mean(len(row)) > 2", "RL0205"),
    ('"high"', "RL0205"), ("1e-6, lr=1e-6", "RL0215"), ("step_number", "RL0101"), ("step_number(3)", "RL0204"),
    ("missing", "RL0101"), ("64 tokens", "RL0205"),
])
def test_mistakes_of_a_learning_rate(rate: str, code: str) -> None:
    program = text("adamw(1e-5)").replace("loss=sft()", f"loss=sft(), lr={rate}")
    assert [d.code for d in api.check(program, "x.rlf")] == [code]


def test_the_number_of_the_step_belongs_to_the_flow() -> None:
    program = text("adamw(1e-5)").replace("loss=sft()", "loss=mine()") + """
loss mine(logprobs: token) {
  return -mean(logprobs) * step_number()
}
"""
    assert [d.code for d in api.check(program, "x.rlf")] == ["RL0210"]


@pytest.mark.parametrize(("rate", "code"), [("missing", "RL0610"), ("row.tokens", "RL0615"), ("", "RL0614")])
def test_a_plan_with_another_learning_rate_is_refused(folder: Path, rate: str, code: str) -> None:
    """A value that is not there, one of tokens, and none where one is brought."""
    Path("x.rlf").write_text(text("adamw(1e-5)").replace("loss=sft()", "loss=sft(), lr=1e-6 * step_number()"))
    plan = api.compile("x.rlf")
    verify(plan)
    (loop,) = [item for item in plan.body if isinstance(item, Loop)]
    forged = tuple(replace(e, rate=rate) if isinstance(e, Train) else e for e in loop.body)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, body=tuple(replace(loop, body=forged) if item is loop else item for item in plan.body)))
    assert code in [d.code for d in caught.value.diagnostics]
