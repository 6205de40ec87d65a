"""What the compiler knows of the backend: what it refuses, what it warns of, and which metrics it adds. No vLLM is
needed, and none is imported."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rldsl import api
from rldsl.cli import main
from rldsl.diag import Diagnostic, Failure
from rldsl.memory import curves
from rldsl.placement.engines import other_engines
from rldsl.plan.backends import described, lacking
from rldsl.plan.events import Compute, Infer, Log, Realloc
from rldsl.plan.model import Plan
from rldsl.plan.projection import event_paths
from rldsl.verify import verify
from tests.docs.pages import files
from tests.tiny import make_model, make_sums, write_jsonl

ROOT = Path(__file__).parents[2]
PROGRAM = """
use std.grpo (group_norm)
use std.ppo (ppo_clip)
use std.rloo (reinforce)
use std.correction (truncated)
cluster nodes=1 gpus=4
data prompts = jsonl("prompts.jsonl", batch=4, max_prompt_tokens=8)
data heldout = jsonl("prompts.jsonl", batch=8, max_prompt_tokens=8)
model actor = causal_lm({model}) {train}
flow run({flow}) {{
  {body}
}}
"""
BODY = """prompt = prompts.next()
  gen = actor.generate(prompt, n=2, max_new_tokens=4{options}) on mesh(0:2) dp=2 {place}
  actor.train(gen, loss={loss}) on mesh({trained})"""
UNCORRECTED = "reinforce(adv=group_norm(len(gen)))"
CORRECTED = "ppo_clip(old=gen.logprobs, adv=group_norm(len(gen)))"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RLDSL_VLLM_PYTHON", sys.executable)  # it is not asked
    (tmp_path / "models").symlink_to(models)
    write_jsonl(tmp_path / "prompts.jsonl", make_sums(16))
    yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    make_model(base / "dense", num_hidden_layers=2, max_position_embeddings=1024)
    make_model(base / "experts", "qwen3_moe", num_experts=4, moe_intermediate_size=16, num_experts_per_tok=2,
               num_hidden_layers=1)
    make_model(base / "gpt2", "gpt2")
    return base


def program(model: str = '"models/dense"', train: str = "train adamw(lr=1e-3)", flow: str = "steps=4", options: str = "",
            place: str = "backend=vllm", loss: str = CORRECTED, trained: str = "0:2", body: str = BODY) -> str:
    return PROGRAM.format(model=model, train=train, flow=flow, body=body.format(
        options=options, place=place, loss=loss, trained=trained))


def compiled(**given: str) -> Plan:
    Path("p.rlf").write_text(program(**given))
    return api.compile("p.rlf")


def refused(**given: str) -> Diagnostic:
    with pytest.raises(Failure) as caught:
        compiled(**given)
    (diagnostic,) = caught.value.diagnostics
    return diagnostic


@pytest.mark.parametrize("given, code, words", [
    (dict(place="tp=2 backend=vllm", body=BODY.replace("dp=2 ", "")), "RL0327",
     "it does not support `tp`: each rank that generates has its own engine, with all of the model"),
    (dict(place="backend=vllm", body=BODY.replace("dp=2", "pp=2")), "RL0327", "it does not support `pp`"),
    (dict(trained="0:2) dp=2 backend=vllm  # (", loss="reinforce(adv=1)", place=""), "RL0327",
     "it does not support `train`"),
    (dict(model='"models/experts"'), "RL0327", "mixture-of-experts models are not supported"),
    (dict(model='"models/gpt2"'), "RL0327", "the family gpt2; supported families: llama"),
    (dict(options=", per_step=2"), "RL0327", "the responses of earlier steps (`per_step`)"),
    (dict(model='"models/dense", invariant=true'), "RL0330", "the backend `vllm`")])
def test_what_it_does_not_support_is_refused(given: dict[str, str], code: str, words: str) -> None:
    d = refused(**given)
    assert d.code == code and words in d.label, (d.code, d.label)
    assert d.span is not None and (code != "RL0327" or "backend=torch" in d.help)


def conversation(place: str, max_tokens: int = 64) -> dict[str, str]:
    """A program whose model talks with an environment."""
    Path("envs.py").write_text("class Game:\n    pass\n")
    return dict(body=f"prompt = prompts.next()\n  gen = actor.generate(prompt, env=Game, max_turns=2, "
                     f"max_tokens={max_tokens}) on mesh(0:2) dp=2 backend=vllm {place}\n"
                     "  actor.train(gen, loss=ppo_clip(old=gen.logprobs, adv=gen.reward)) on mesh(0:2)",
                train='train adamw(lr=1e-3)\nuse py "envs.py" (Game: env)')


def test_conversations() -> None:
    """Their log-probs are compared, too. No cache moves to the host, and no sequence is longer than the model's."""
    for place in ("", "waiting=keep", "waiting=recompute mbs=2"):
        plan = compiled(**conversation(place))
        assert any(name == "gen/logprob_difference" for e in events(plan, Log) for name, _ in e.metrics)
    d = refused(**conversation("waiting=offload"))
    assert (d.code, d.label) == ("RL0327", "it does not support `waiting=offload`, only `keep` and `recompute`")
    assert refused(**conversation("", 2000)).code == "RL0331"
    given = conversation("waiting=offload")
    plan = compiled(**{**given, "body": given["body"].replace("backend=vllm", "")})
    with pytest.raises(Failure) as caught:
        verify(replace(plan, layouts=tuple(replace(x, backend="vllm") for x in plan.layouts)))
    assert any("offload of slots that wait for an environment, on the backend 'vllm'" in d.title
               for d in caught.value.diagnostics)


def test_adapters() -> None:
    """Only their factors travel to the engine's copy, which has a base and merged weights, and the estimate counts
    all three."""
    plan = compiled(model='"models/dense", lora(r=4)', trained="0:2) dp=2  # (")
    (moved,) = (e for e in events(plan, Realloc))
    (model,) = plan.models
    assert {"lora_A", "lora_B"} == {p.name.split(".")[-2] for p in model.params} and moved.model == "actor"
    for device, expected in (("cpu", {"weights of the engine", "merged weights"}), ("cuda", {"weights of the engine"})):
        curve = curves(plan, device)[0]  # type: ignore[arg-type]
        sizes = {x.what.partition(" of actor")[0]: x.bytes for x in curve.holdings if "engine" in x.what or "merged" in x.what}
        assert sizes.keys() == expected and len({*sizes.values()}) == 1, sizes


def test_a_cache_is_not_reused() -> None:
    d = refused(body="prompt = prompts.next()\n  gen = actor.generate(prompt, max_new_tokens=4) on mesh(0:2) dp=2 "
                     "backend=vllm\n  more = actor.generate(gen, max_new_tokens=4) on mesh(0:2) dp=2 backend=vllm "
                     "reuse=true\n  metric l = mean(len(more))")
    assert (d.code, d.label) == ("RL0332", "the backend `vllm` keeps no KV cache")


def test_without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLDSL_VLLM_PYTHON")
    known = described("vllm")
    assert known is not None
    if not lacking(known):
        pytest.skip("vLLM is installed here")
    d = refused()
    assert d.code == "RL0326" and "pip install 'rldsl[vllm]'" in d.help
    assert "~/vllm/bin/pip install 'vllm==0.32.*' && export RLDSL_VLLM_PYTHON=~/vllm/bin/python" in d.help


def test_a_python_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLDSL_VLLM_PYTHON", "/no/python")
    d = refused()
    assert (d.code, d.label) == ("RL0326", "RLDSL_VLLM_PYTHON names /no/python, which cannot be run")


def test_a_forged_plan_is_refused_by_the_verifier() -> None:
    """Of a call that continues responses of earlier steps, moved to the backend."""
    plan = compiled(options=", per_step=2", place="")
    verify(plan)
    layouts = tuple(replace(x, backend="vllm") for x in plan.layouts)
    with pytest.raises(Failure) as caught:
        verify(replace(plan, layouts=layouts))
    assert any(d.code == "RL0615" and "continues responses in later steps" in d.title
               for d in caught.value.diagnostics)


def test_the_description_is_light() -> None:
    code = ("import sys; from rldsl.plan.backends import described; assert described('vllm') is not None; "
            "print(sorted({m.partition('.')[0] for m in sys.modules} & {'torch', 'vllm', 'transformers', 'numpy'}))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def warnings(**given: str) -> list[Diagnostic]:
    return [d for d in api.examine(program(**given)) if d.code == "RL0912"]


def test_a_loss_that_does_not_correct() -> None:
    (d,) = warnings(loss=UNCORRECTED)
    assert d.severity == "warning" and d.label == "it does not read `gen.logprobs`" and "std.correction" in d.help
    recomputed = BODY.replace("  actor.train", "  lp = actor.logprobs(gen) on mesh(0:2) dp=2\n  actor.train")
    assert warnings(loss="ppo_clip(old=lp, adv=group_norm(len(gen)))", body=recomputed)
    weighted = "ppo_clip(old=lp, adv=group_norm(len(gen)) * truncated(lp, gen.logprobs))"
    assert not warnings(loss=weighted, body=recomputed)
    assert not warnings(loss=CORRECTED)
    assert not warnings(loss=UNCORRECTED, place="")


def events(plan: Plan, kind: type) -> list[Any]:
    return [e for e, _ in event_paths(plan) if isinstance(e, kind)]


def test_the_difference_of_log_probs_is_a_metric() -> None:
    """Against an inference under the layout of the training, which is added, or is the program's own."""
    plan = compiled(loss=UNCORRECTED, trained="2:4) tp=2  # (")
    (added,) = events(plan, Infer)
    layouts = {x.id: x for x in plan.layouts}
    assert (layouts[added.layout].tp, layouts[added.layout].backend) == (2, "torch")
    logged = {name for e in events(plan, Log) for name, _ in e.metrics}
    assert {"gen/logprob_difference", "gen/logprob_difference_max"} <= logged
    own = BODY.replace("  actor.train", "  lp = actor.logprobs(gen) on mesh(0:2) dp=2\n  actor.train")
    plan = compiled(body=own, loss=UNCORRECTED)
    (infer,) = events(plan, Infer)
    assert infer.value == "lp" and any("lp" in str(e.inputs) for e in events(plan, Compute))


def test_no_metric_without_another_engine_or_without_training() -> None:
    for given in (dict(place=""), dict(body="prompt = prompts.next()\n  gen = actor.generate(prompt, max_new_tokens=4) "
                                            "on mesh(0:2) dp=2 backend=vllm\n  metric l = mean(len(gen))", train="")):
        plan = compiled(**given)
        assert not events(plan, Infer)
        assert not any("difference" in name for e in events(plan, Log) for name, _ in e.metrics)


@pytest.mark.parametrize("flow, body, inferred", [
    ("steps=4, lag=1", BODY, 1),
    ("steps=4", """repeat {{
    prompt = prompts.next()
    gen = actor.generate(prompt, n=2, max_new_tokens=4{options}) on mesh(0:2) dp=2 {place}
    kept = gen where len(gen) > 2
  }} until count(len(kept)) > 3 max 3
  actor.train(kept, loss=reinforce(adv=len(kept))) on mesh({trained})""", 1),
    ("steps=4, lag=1", """repeat {{
    prompt = prompts.next()
    gen = actor.generate(prompt, n=2, max_new_tokens=4{options}) on mesh(0:2) dp=2 {place}
    kept = gen where len(gen) > 2
  }} until count(len(kept)) > 3 max 3
  actor.train(kept, loss=reinforce(adv=len(kept))) on mesh({trained})""", 0),
    ("steps=4", BODY + """
  eval heldout {{
    held = heldout.next()
    g = actor.generate(held, max_new_tokens=4) on mesh(0:2) dp=2 {place}
    metric l = mean(len(g))
  }}""", 1),
    ("steps=4", BODY + """
  every 2 {{ eval heldout {{
    held = heldout.next()
    g = actor.generate(held, max_new_tokens=4) on mesh(0:2) dp=2 {place}
    metric l = mean(len(g))
  }} }}""", 1)])
def test_blocks_and_lags(flow: str, body: str, inferred: int) -> None:
    assert len(events(compiled(flow=flow, body=body), Infer)) == inferred


def test_the_program_of_the_guide() -> None:
    """It compiles without a warning."""
    text = files((ROOT / "docs/howto/vllm.md").read_text())["vllm.rlf"]
    Path("models/sft").symlink_to("dense")
    write_jsonl(Path("questions.jsonl"), make_sums(64))
    assert not api.examine(text)
    Path("vllm.rlf").write_text(text)
    (infer,) = events(api.compile("vllm.rlf"), Infer)
    assert infer.value == "lp"


def test_which_calls_have_another_engine() -> None:
    Path("p.rlf").write_text(program())
    placed = api.placed_source(api.read_source("p.rlf"))
    assert other_engines(placed.graph, dict(placed.placements)) == {"gen": "vllm"}


@pytest.mark.parametrize("rope, most", [
    (None, 48),
    ({"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}, 96),
    ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}, 48),
    ({"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
      "original_max_position_embeddings": 16}, 48)])
def test_vllm_has_no_positions_beyond_those_of_the_config(tmp_path: Path, rope: dict[str, Any] | None,
                                                          most: int) -> None:
    """As vLLM 0.32 derives `max_model_len`; torch continues beyond it."""
    more = {"rope_parameters": rope} if rope else {}
    make_model(tmp_path / "own", "llama", num_hidden_layers=1, max_position_embeddings=48, **more)
    body = BODY.replace("max_new_tokens=4", "max_new_tokens={new}")
    kept = {"model": '"own"'}
    compiled(**kept, body=body.replace("{new}", str(most - 8)))
    d = refused(**kept, body=body.replace("{new}", str(most - 7)))
    assert d.code == "RL0331" and d.span is not None and f"{most} positions" in d.title and "backend=torch" in d.help
    compiled(**kept, place="", body=body.replace("{new}", str(most - 7)))


def test_an_empty_stop_string_is_refused() -> None:
    for stop in ('[""]', '["a", ""]'):
        d = refused(options=f", stop={stop}")
        assert d.code == "RL0205" and "empty" in d.title and d.span is not None
    compiled(options=', stop=["a", " "]')


def test_a_placement_is_compared_with_the_best_one() -> None:
    """The search places a graph again that has the metrics already."""
    Path("p.rlf").write_text(program())
    said = CliRunner().invoke(main, ["explain-placement", "p.rlf", "--cluster", "h100x8"])
    assert said.exit_code == 0 and "proposed" in said.output and "best" in said.output, said.output
