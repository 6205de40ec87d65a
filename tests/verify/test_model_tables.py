"""The parameter tables of plans against the models' directories, and data records against what they are used for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from click.testing import CliRunner

from rldsl import api
from rldsl.cli import main
from rldsl.diag import Failure
from rldsl.models.families import describe_architecture
from rldsl.plan.codec import encode
from rldsl.plan.disk_paths import in_kernel_files
from rldsl.plan.model import Plan, Split
from rldsl.runtime.data.jsonl import scan
from rldsl.runtime.data.row_schema import RowNeeds
from rldsl.verify import verify
from rldsl.verify.model_tables import check_model_tables
from tests.tiny import CHARACTERS, make_model
from tests.torchrun import begun
from tests.verify.faults import codes, row
from tests.verify.mutate import data_mutants, parameter_mutants
from tests.verify.plans import GRPO, ROOT, SYNC, TWO, folder

EXPERTS = """
use std.sft (sft)
cluster nodes=1 gpus=2
data rows = jsonl("data/train.jsonl", batch=6)
model actor = causal_lm("models/moe") train adamw(lr=0.02)
flow f(steps=3) {
  row = rows.next()
  actor.train(row, loss=sft())   on mesh(0:2) dp=2 ep=2
}
"""
TEXTS = """
use py "texts.py" (ask: gen -> prompts(max_tokens=20))
data prompts = jsonl("data/prompts.jsonl", batch=4, max_prompt_tokens=16)
model actor = causal_lm("models/sft")
model judge = causal_lm("models/other")
flow f(steps=1) {
  prompt  = prompts.next()
  gen     = actor.generate(prompt, max_new_tokens=4)
  verdict = judge.generate(ask(gen), max_new_tokens=4)
  metric m = mean(judge.logprobs(verdict)) + mean(actor.logprobs(gen))
}
"""


described_once = cache(describe_architecture)


@pytest.fixture(scope="module")
def here() -> Iterator[Path]:
    with folder() as found:
        yield found


@pytest.fixture(scope="module")
def plans(here: Path) -> dict[str, Plan]:
    make_model(here / "models/moe", "mixtral")
    for name, text in (("grpo", GRPO), ("sync", SYNC), ("moe", EXPERTS)):
        (here / f"{name}.rlf").write_text(text)
    (here / "two.rlf").write_text(TWO)
    sets = {"base": "models/sft", "rows": "data/prompts.jsonl"}
    return {"ppo": api.compile(str(ROOT / "examples/ppo.rlf"), {"batch": 8, "steps": 5}),
            "small": api.compile(str(ROOT / "tests/checkpoint/small.rlf"), sets, "two.rlf"),
            **{name: api.compile(f"{name}.rlf") for name in ("grpo", "sync", "moe")}}


def refused(plan: Plan) -> set[str]:
    """The codes of the comparison and, where it finds nothing, of the proof."""
    return {d.code for d in check_model_tables(plan, describe=described_once).faults} or codes(plan)


def test_what_the_compiler_writes_is_what_the_directories_describe(plans: dict[str, Plan]) -> None:
    for plan in plans.values():
        found = check_model_tables(plan)
        assert not found.faults and not found.unreadable
        assert found.compared == tuple(m.name for m in plan.models)


@pytest.mark.thorough
def test_every_other_parameter_table_is_refused(plans: dict[str, Plan]) -> None:
    count, by_comparison = 0, 0
    for name, plan in plans.items():
        for what, mutant in parameter_mutants(plan):
            found = refused(mutant)
            assert found, f"{name}: {what} is accepted"
            count, by_comparison = count + 1, by_comparison + bool({"RL0619", "RL0724"} & found)
    assert count > 700 and by_comparison > 600, (count, by_comparison)


def test_the_tokens_of_another_tokenizer_are_refused(here: Path) -> None:
    """Those of a frame, of a whole chain of frames, of a data source; and a tokenizer that was replaced."""
    other = make_model(here / "models/other", characters="".join(reversed(CHARACTERS)), seed=3)
    (here / "texts.py").write_text("def ask(completion, **row):\n    return completion\n")
    (here / "texts.rlf").write_text(TEXTS)
    plan = api.compile("texts.rlf")
    assert not check_model_tables(plan).faults and [f.tokenizer for f in plan.frames].count("models/other") == 2
    chain = replace(plan, frames=tuple(replace(f, tokenizer=f.tokenizer and "models/sft") for f in plan.frames))
    assert not codes(chain), "the plan alone does not tell"
    found = check_model_tables(chain).faults
    assert {d.code for d in found} == {"RL0619"} and len(found) == 2 and "judge reads verdict" in found[1].title
    assert not check_model_tables(chain, ["actor"]).faults, "another rank tells"
    data = row(plan, "data", 0, tokenizer="models/other")
    assert {d.code for d in check_model_tables(data).faults} == {"RL0619"}
    assert not check_model_tables(row(plan, "data", 0, tokenizer="models/rm")).faults, "which makes the same tokens"
    (other / "tokenizer.json").write_bytes((here / "models/sft/tokenizer.json").read_bytes())
    assert not check_model_tables(chain).faults
    (here / "models/other/tokenizer.json").unlink()
    assert not check_model_tables(plan).faults, "there is nothing to compare with"


def test_every_contradictory_data_record_is_refused(plans: dict[str, Plan]) -> None:
    count = 0
    for name, plan in plans.items():
        for what, mutant in data_mutants(plan):
            assert codes(mutant), f"{name}: {what} is accepted"
            count += 1
    assert count > 50


def edited(plan: Plan, parameter: str, **new: object) -> Plan:
    """With another record of one parameter, in every model that has it."""
    for i, m in enumerate(plan.models):
        plan = row(plan, "models", i, params=tuple(
            replace(p, **new) if p.name == parameter else p for p in m.params))
    return plan


MLP, KEYS = "model.layers.{}.mlp.up_proj.weight", "model.layers.{}.self_attn.k_proj.weight"


def test_the_tables_that_were_accepted_once(plans: dict[str, Plan]) -> None:
    """Each of these ran, to a traceback or to wrong numbers."""
    plan = plans["small"]
    specs = {p.name: p for p in plan.models[0].params}
    mlp, keys = specs[MLP].split, specs[KEYS].split
    assert mlp is not None and keys is not None
    coarse = Split(0, ((mlp.parts[0][0] // 16, 16),))
    assert refused(edited(plan, MLP, split=coarse)) == {"RL0619"}
    whole = Split(0, ((1, keys.parts[0][0] * keys.parts[0][1]),))
    assert refused(edited(plan, KEYS, split=whole)) == {"RL0619"}
    assert refused(row(plan, "models", 0, layers=1)) == {"RL0619"}
    assert refused(edited(plan, KEYS, name="../../x")) == {"RL0619"}
    for i, _ in enumerate(plans["grpo"].spaces):
        assert refused(row(plans["grpo"], "spaces", i, iterations=2)) & {"RL0536", "RL0612", "RL0615"}
    record = plans["grpo"].data[0]
    assert record.row_format == "prompts"
    assert refused(row(plans["grpo"], "data", 0, row_format="answers")) == {"RL0612"}
    assert refused(row(plans["grpo"], "data", 0, path="/proc/self/mem")) == {"RL0612"}


def test_devices_per_node_are_bounded_by_the_world(plans: dict[str, Plan]) -> None:
    plan = plans["sync"]
    for many in (plan.header.world + 1, 10**7, 10**9, 10**300):
        assert codes(replace(plan, header=replace(plan.header, devices_per_node=many))) == {"RL0612"}


def test_verify_compares_where_it_can_and_says_where_it_cannot(plans: dict[str, Plan], here: Path) -> None:
    (here / "good.plan").write_bytes(encode(plans["sync"]))
    said = CliRunner().invoke(main, ["verify", "good.plan"]).output
    assert "ok good.plan" in said and "compared with their directories: actor, ref, slow" in said
    gone = row(plans["sync"], "models", 1, path="models/gone")
    (here / "gone.plan").write_bytes(encode(gone))
    said = CliRunner().invoke(main, ["verify", "gone.plan"]).output
    assert "ok gone.plan" in said and "actor, slow" in said and "model ref not compared: models/gone" in said
    bad = edited(plans["moe"], "model.norm.weight", stored=("model.embed_tokens.weight",))
    (here / "bad.plan").write_bytes(encode(bad))
    found = CliRunner().invoke(main, ["verify", "bad.plan"])
    assert found.exit_code == 1 and "RL0619" in found.output and "model.norm.weight" in found.output


def test_another_config_has_the_code_of_a_changed_config(plans: dict[str, Plan], here: Path, tmp_path: Path) -> None:
    other = make_model(tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    moved = row(plans["small"], "models", 0, path=str(other))
    assert {d.code for d in check_model_tables(moved).faults} == {"RL0724"}


def test_a_directory_without_weights_says_nothing_of_their_names(plans: dict[str, Plan], tmp_path: Path) -> None:
    """Weights may come from a checkpoint."""
    moe = make_model(tmp_path / "moe", "mixtral")
    plan = row(plans["moe"], "models", 0, path=str(moe))
    assert any(p.stored for p in plan.models[0].params) and not check_model_tables(plan).faults
    for file in moe.glob("*.safetensors*"):
        file.unlink()
    assert not check_model_tables(plan).faults
    assert check_model_tables(row(plan, "models", 0, layers=1)).faults


def test_damaged_weights_are_left_to_the_loader(plans: dict[str, Plan], tmp_path: Path) -> None:
    moe = make_model(tmp_path / "moe", "mixtral")
    (moe / "model.safetensors").write_bytes(b"\5")
    found = check_model_tables(row(plans["moe"], "models", 0, path=str(moe)))
    assert found.unreadable == (("actor", str(moe)),) and not found.compared and not found.faults


def test_only_the_models_that_were_asked_for(plans: dict[str, Plan]) -> None:
    bad = row(plans["sync"], "models", 0, layers=1)
    assert check_model_tables(bad).faults and not check_model_tables(bad, ["ref"]).faults


@pytest.mark.thorough
def test_a_run_refuses_before_it_reads_a_weight(plans: dict[str, Plan], here: Path, tmp_path: Path,
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    plan = edited(plans["moe"], "model.norm.weight", stored=("model.embed_tokens.weight",))
    verify(plan)
    (tmp_path / "bad.plan").write_bytes(encode(plan))
    with begun(tmp_path, "--nproc-per-node", "2", "-m", "rldsl.run", str(tmp_path / "bad.plan"), "--out",
               str(tmp_path / "out")) as agent:
        assert agent.wait(120) != 0
        assert "RL0619" in agent.said() and "rldsl/" not in agent.said(), agent.said()


@pytest.mark.parametrize("path, inside", [
    ("/proc/self/mem", True), ("/proc", True), ("//proc/1/fd/0", True), ("/sys/x", True), ("/dev/zero", True),
    ("/a/../dev/fd/3", True), ("/dev/shm/rows.jsonl", False), ("/procs/a", False), ("proc/self", False), ("/", False),
    ("/home/dev/rows", False), ("", False)])
def test_kernel_files(path: str, inside: bool) -> None:
    assert in_kernel_files(path) is inside


def test_a_link_to_a_kernel_file_is_no_data_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(Failure, match="RL0741"):
        scan(str(tmp_path / "rows.jsonl"), RowNeeds({"prompt": "prompt"}, ()))


def test_an_error_of_the_disk_has_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/self/mem gives it, behind a name that does not tell."""
    monkeypatch.setattr("rldsl.runtime.data.data_files.in_kernel_files", lambda path: False)
    (tmp_path / "rows.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(Failure, match="RL0741"):
        scan(str(tmp_path / "rows.jsonl"), RowNeeds({"prompt": "prompt"}, ()))
