"""Runs whose conversations begin with images: the same under every placement, and bit for bit after kills."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import chdir
from pathlib import Path

import pytest

from examples.tiny import make_vision_model
from tests.end_to_end.programs import compile_program, run_program
from tests.environments.kills import Kill, differences, start, survive
from tests.images.pictures import make_rows

HERE = Path(__file__).parent
TEMPLATE = """{% if tools %}<|start|>tools{% for tool in tools %} {{ tool.function.name }}{% endfor %}
{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<tool_response>{% for part in m.content %}{{ part.text }}{% endfor %}</tool_response>
{%- else %}<|start|>{{ m.role }}
{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}
{%- endif %}{% endfor %}{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments":
{{- ' ' }}{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<eos>{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""
PROGRAM = """
use py "talks.py" (Text: env, Tools: env, ask: env)
data prompts = jsonl("rows.jsonl", batch=4, images="images", max_prompt_tokens=120, shuffle=false)
model actor = causal_lm("m") train adamw(lr=0.01)
loss pg(logprobs: token; adv: token) { return -mean(adv * logprobs) }
flow f(steps=3, seed=1) {
  checkpoint every 1 keep=9
  prompt = prompts.next()
  gen = actor.generate(prompt, env=[Text, Tools, ask], n=2, max_turns=3, max_new_tokens=4, max_tokens=180)
  lp = actor.logprobs(gen)
  actor.train(gen, loss=pg(adv=per_token(gen.reward, gen.logprobs)), minibatches=2)
  metric turns  = mean(gen.turns)
  metric reward = mean(gen.reward)
  metric gap    = max(abs(lp - gen.logprobs))
  metric lp     = mean(lp)
}
"""
DP = "place *.* on mesh(0:2) dp=2\nplace actor.generate on mesh(0:2) dp=2 mbs=1\n"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("talks")
    make_vision_model(made / "m", num_hidden_layers=2)
    config = made / "m/tokenizer_config.json"
    (made / "m/chat_template.jinja").unlink(missing_ok=True)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    rows = [json.loads(line) for line in make_rows(made, count=12).read_text().splitlines()]
    names = ("Text", "Tools", "ask")
    (made / "rows.jsonl").write_text("".join(json.dumps(row | {"env": names[i // 2 % 3]}) + "\n"
                                             for i, row in enumerate(rows)))
    shutil.copy(HERE / "talks.py", made)
    (made / "p.rlf").write_text(PROGRAM)
    return made


def run(base: Path, name: str, place: str) -> list[dict[str, float]]:
    with chdir(base):
        return run_program(base / "p.rlf", {}, base / name, place)


@pytest.fixture(scope="module")
def alone(base: Path) -> list[dict[str, float]]:
    return run(base, "alone", "place *.* on mesh(0:1)")


def same(mine: Mapping[str, float], theirs: Mapping[str, float]) -> None:
    names = ("turns", "reward", "lp", "actor/loss", "actor/grad_norm")
    assert mine["gap"] < 2e-5 and [mine[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-4, abs=1e-5)


@pytest.mark.thorough
@pytest.mark.numeric
def test_placements_say_and_learn_the_same(base: Path, alone: list[dict[str, float]]) -> None:
    assert len(alone) == 3 and all(line["gap"] < 2e-5 and line["turns"] > 1.2 for line in alone)
    assert len({line["lp"] for line in alone}) == 3
    for name, place in (("pp", "place *.* on mesh(0:2) pp=2"), ("tp", "place *.* on mesh(0:2) tp=2")):
        for mine, theirs in zip(run(base, name, place), alone, strict=True):
            same(mine, theirs)


@pytest.mark.thorough
def test_a_killed_run_is_the_undisturbed_one(base: Path, alone: list[dict[str, float]]) -> None:
    """On two ranks of dp, which say and learn what one rank does, too."""
    (base / "dp").mkdir()
    with chdir(base):
        plan = compile_program(base / "p.rlf", {}, DP, base / "dp")
    start(plan, base, "whole")
    survive(base, "killed", plan, [Kill(1, 1, "all"), Kill(2, 3, "rank")])
    assert differences(base, "killed", "whole") == []
    for mine, theirs in zip(map(json.loads, (base / "whole/metrics.jsonl").read_text().splitlines()), alone, strict=True):
        same(mine, theirs)
