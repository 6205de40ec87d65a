"""What `rlc profile` measures of conversations, and what the simulator makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from examples.tiny import CHAT_TEMPLATE
from rldsl import api
from rldsl.cli import main
from rldsl.clusters import Cluster, Measured, read
from rldsl.clusters.model import PASSES
from rldsl.commands import profile as command
from rldsl.measure import conversation_costs, environment_costs
from rldsl.measure.call_costs import FILLED_CACHE, MeasuredShapes, build, timed_layers, with_each_kind
from rldsl.measure.conversation_costs import AnswersAtOnce, Spoken, alone, converse, measure_conversations
from rldsl.measure.environment_costs import hold, measure_environments
from rldsl.plan.conversing import conversing_models, is_conversing
from rldsl.plan.events import Sampling
from rldsl.simulate import simulate
from rldsl.simulate.machine import Machine
from rldsl.simulate.work_counts import Shard, WorkCounts
from tests.backend_torch.shards import plan_model
from tests.tiny import make_model, make_sums, write_jsonl

CPU = torch.device("cpu")
ENVS = '''
class Game:
    def init(self, prompt):
        return prompt, {}

    def step(self, text):
        return {"observations": [{"role": "user", "content": "no"}], "reward": 0.0, "done": False}
'''
PROGRAM = """use py "envs.py" (Game: env)
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=32)
model actor = causal_lm("models/chat")
flow talk(steps=2, seed=1) {
  prompt = prompts.next()
  gen    = actor.generate(prompt, GIVEN)
  metric tokens = mean(len(gen))
}
"""
TALK = PROGRAM.replace("GIVEN", "env=Game, max_turns=2, max_new_tokens=4, max_tokens=64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    make_model(tmp_path / "models/chat", num_hidden_layers=2, chat=CHAT_TEMPLATE)
    write_jsonl(tmp_path / "data/prompts.jsonl", make_sums(8))
    (tmp_path / "envs.py").write_text(ENVS)
    (tmp_path / "talk.rlf").write_text(TALK)
    (tmp_path / "plain.rlf").write_text(PROGRAM.replace("GIVEN", "max_new_tokens=4"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def test_models_that_talk(folder: Path) -> None:
    talk, plain = api.compile("talk.rlf"), api.compile("plain.rlf")
    assert [m.name for m in conversing_models(talk)] == ["actor"] and not conversing_models(plain)
    (model,) = plain.models
    assert is_conversing(talk, model) and not is_conversing(plain, model), "known by its config"
    assert not is_conversing(talk, replace(model, dtype="bfloat16"))


# ------------------------------------------------------------------------------------------------- passes


@pytest.mark.parametrize("tp", [1, 2])
def test_conversations_are_held_with_answers_at_once(folder: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every turn has the tokens that it should have, and all slots run in the same passes."""
    shard = alone(build(plan_model("models/chat", "causal_lm"), 2, tp, "torch", CPU, False))
    said: list[int] = []
    monkeypatch.setattr(AnswersAtOnce, "said", lambda self, row, ids, *more, real=AnswersAtOnce.said: (
        said.append(len(ids)), real(self, row, ids, *more)))
    converse(shard, Spoken(count=3, answer=5, turns=4, own=2), Sampling(n=2, stop=("x",)), 40, CPU)
    assert said == [2] * (3 * 4)


def test_passes_of_conversations_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = MeasuredShapes((), ((2, 1, 4), (1, 2, 4)), 6, 0, 0)
    monkeypatch.setattr(conversation_costs, "PROCESSOR", small)
    monkeypatch.setattr(conversation_costs, "PROCESSOR_ANSWERS", ((2, 1, 4), (1, 2, 4), (2, 2, 8)))
    monkeypatch.setattr(conversation_costs, "MOST", 1)
    (model,) = api.compile("talk.rlf").models
    found = measure_conversations(model, 1, "torch", Sampling(), CPU)
    assert {name: set(rates) for name, rates in found.items()} == {n: set(PASSES[n]) for n in ("reply", "turn")}
    for rates in found.values():
        assert all(rate >= 0 for rate in rates.values()) and sum(rates.values()) > 0


def test_small_models_are_timed_with_more_layers() -> None:
    """As many as fill the caches of a processor, and no more than the model has; on a GPU two."""
    def model(elements: int, layers: int) -> Any:
        spec = SimpleNamespace(stage="layer", layer=-1, shape=(elements // 4, 1))
        return SimpleNamespace(params=(spec, SimpleNamespace(stage="first", layer=-1, shape=(10**9,))), base=(),
                               dtype="float32", layers=layers)

    assert timed_layers(model(FILLED_CACHE, 40), 1, CPU) == 2
    assert timed_layers(model(FILLED_CACHE // 4, 40), 1, CPU) == 4
    assert timed_layers(model(FILLED_CACHE // 4, 40), 2, CPU) == 8
    assert timed_layers(model(FILLED_CACHE // 4, 3), 1, CPU) == 3
    assert timed_layers(model(64, 1000), 1, CPU) == 8 and timed_layers(model(64, 1), 1, CPU) == 2
    assert timed_layers(model(64, 1000), 1, torch.device("cuda")) == 2
    assert with_each_kind([(2, 8, 16), (1, 4, 16)], (0,) * 4, 4) == [(4, 8, 16), (2, 4, 16)]


# ---------------------------------------------------------------------------------------------- environments


def test_real_processes_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("FEW", 1), ("MANY", 3), ("MORE", 3)):
        monkeypatch.setattr(environment_costs, name, value)
    found = measure_environments("models/chat")
    assert set(found) == {"conversation_us", "turn_us", "answer_us", "environment_us"}
    assert found["conversation_us"] > 50 and found["turn_us"] > 10 and min(found.values()) >= 0
    held = hold("models/chat", 2, 2)
    assert held.start > held.start_computed > 0 and held.children > 0


def test_a_tokenizer_without_a_template_holds_no_conversations(tmp_path: Path) -> None:
    make_model(tmp_path / "plain", num_hidden_layers=1)
    assert measure_environments(str(tmp_path / "plain")) == {}


def test_a_template_that_rewrites_turns_is_measured_with_first_contexts(folder: Path) -> None:
    """Programs with tools may use such a one; the environment that is measured speaks as the user."""
    file = folder / "models/chat/chat_template.jinja"
    text = file.read_text()
    file.write_text("{% if messages|length > 3 %}{{ 'later' }}{% endif %}" + text)
    assert hold("models/chat", 1, 1).answer > 0


# ----------------------------------------------------------------------------------------------- the command


HOST = {"conversation_us": 3000.0, "turn_us": 400.0, "answer_us": 100.0, "environment_us": 2000.0}
RATES = {name: dict.fromkeys(PASSES[name], 0.0) | {feature: rate} for name, feature, rate in (
    ("forward", "call", 1.0), ("reply", "slot", 2.0), ("turn", "token", 3.0))}


@pytest.fixture
def asked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The machine is not measured; what was asked of it is written down."""
    seen: list[dict[str, Any]] = []

    def run(line: list[str], environment: object) -> str:
        if "--facts" in line:
            return json.dumps({"device": "Toy", "devices": 0, "cores": 2, "versions": ["torch 1"]})
        plan, wanted, found = line[line.index("rldsl.measure.profile") + 1 :][:3]
        seen.append(json.loads(Path(wanted).read_text()))
        models, talks = {m.name: m for m in api.read_plan(plan).models}, bool(conversing_models(api.read_plan(plan)))
        rates = {k: v for k, v in RATES.items() if talks or k == "forward"}
        measured = [{"config": models[m].config_digest, "head": models[m].head_name, "dtype": models[m].dtype, "tp": tp,
                     "threads": 1, **rates} for m, tp, _ in seen[-1]["models"]]
        machine = {"float32_tflops": 1.0, "bfloat16_tflops": 1.0, "memory_gb_s": 1.0} if seen[-1]["machine"] else {}
        host = HOST if seen[-1]["environments"] else {}
        Path(found).write_text(json.dumps(machine | host | {"measured": measured}))
        return ""

    monkeypatch.setattr(command, "_run", run)
    return seen


def profiled(program: str) -> str:
    done = CliRunner().invoke(main, ["profile", program])
    assert done.exit_code == 0, done.output
    return done.output


def test_only_programs_with_environments_ask_for_them(asked: list[dict[str, Any]], folder: Path) -> None:
    """What was measured for a program without them is measured again, and replaced; later nothing is new to either."""
    profiled("plain.rlf")
    first = read("profile.yaml")
    assert not asked[0]["environments"] and first.turn_us == 0 and not first.measured[0].turn
    profiled("talk.rlf")
    assert asked[1] == {"models": [["actor", 1, "torch"]], "machine": False, "environments": True}
    found = read("profile.yaml")
    assert {name: getattr(found, name) for name in HOST} == HOST and len(found.measured) == 1
    assert dict(found.measured[0].reply) == RATES["reply"] and dict(found.measured[0].turn) == RATES["turn"]
    assert "nothing new" in profiled("plain.rlf") and "nothing new" in profiled("talk.rlf") and len(asked) == 2


# ---------------------------------------------------------------------------------------------- simulation


def test_a_profile_without_them_is_read_as_before(folder: Path) -> None:
    """It counts passes of conversations as other ones, and says what it counts as free."""
    Path("old.yaml").write_text(
        "gpus: 1\ncores: 1\nthreads: 1\nfloat32_tflops: 1\nbfloat16_tflops: 1\nmemory_gb_s: 1\n"
        "kernel_us: 1\nrow_us: 1\n")
    plan, old = api.compile("talk.rlf"), read("old.yaml")
    before, after = (simulate(plan, x) for x in (old, replace(old, **HOST)))
    assert before.free == ("conversation_us", "turn_us") and after.free == ()
    # four conversations of two turns: the environment begins, and answers twice
    assert after.seconds - before.seconds == pytest.approx(4e-6 * (3000 + 3 * (400 + 100) + 2000))
    assert simulate(api.compile("plain.rlf"), old).free == ()


def test_measured_passes_of_conversations_replace_others(folder: Path) -> None:
    (model,) = api.compile("talk.rlf").models
    found = Measured(model.config_digest, model.head_name, model.dtype, 1, 1, forward=(("call", 100.0),),
                     decode=(("call", 10.0),))
    talks = replace(found, reply=(("slot", 2.0), ("token", 1.0)), turn=(("call", 7.0),))
    shard = SimpleNamespace(model=model, tp=1)
    counts = WorkCounts(1.0, 2.0, 6.0, 0.0, 3.0, slots=4.0)
    other, own = (Machine(Cluster(gpus=1, cores=1, measured=(x,))) for x in (found, talks))
    assert own.conversation_reply(_shard(shard), counts) == pytest.approx((4 * 2.0 + 6 * 1.0) * 1e-6)
    assert own.conversation_step(_shard(shard), counts) == pytest.approx(7e-6)
    assert other.conversation_step(_shard(shard), counts) == pytest.approx(100e-6)
    halved = talks.under(2, 0.0)
    assert dict(halved.reply) == {"slot": 2.0, "token": 0.5}, "the rank's slots are as many under any tp"


def _shard(some: Any) -> Shard:
    return some  # type: ignore[no-any-return]


@pytest.mark.parametrize("text, code", [
    ("turn_us: -1", "RL0205"), ("conversation_us: many", "RL0205"), ("turns_us: 1", "RL0107"),
    ("turn_tokens: 0", "RL0205"),
    ("measured: [{config: a, head: b, dtype: c, tp: 1, threads: 1, turn: {slot: 1}}]", "RL0107")])
def test_mistakes_in_a_file(tmp_path: Path, text: str, code: str) -> None:
    from rldsl.diag import Failure

    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(Failure) as said:
        read(str(tmp_path / "c.yaml"))
    assert said.value.diagnostics[0].code == code
