"""The card of a trained model for the Hub: how it was made, with which numbers, and how to check that.

In: a run's record, plan, program and metrics. Out: the text of README.md, whose head the Hub reads (base model,
datasets, tags). No name of a machine, no directory of it and no command line is in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from rldsl.models import hub, hub_data
from rldsl.plan.metrics_file import Lines
from rldsl.plan.model import Plan
from rldsl.runtime.metrics.names import computed, display_order

SHOWN = 12        # metrics in the table, those first that a run prints first
FOLDER = "rldsl"  # of the repository, with the files that the card names


def model_card(name: str, model: str, plan: Plan, plan_id: str, record: Mapping[str, Any], lines: Lines, page: str,
               checks: Sequence[str]) -> str:
    """name: of the repository. model: in the program. page: the text of the program; "" if it is not known any more.
    checks: what was proved of the plan."""
    head = yaml.safe_dump(_head(plan, model), sort_keys=False, allow_unicode=True)
    params = ", ".join(f"`{key}={value}`" for key, value in plan.header.params)
    packages = ", ".join(f"{package} {number}" for package, number in dict(record.get("packages", {})).items())
    steps = f"step {int(lines[-1]['step']) if lines else 0} of {plan.header.steps}"
    facts = [("program", f"`{plan.header.flow}`, as model `{model}`"), ("plan", f"`{plan_id}`"),
             ("state", f"{record.get('state', 'unknown')}, {steps}"), ("seed", str(plan.header.seed)),
             ("parameters", params), ("ranks", str(plan.header.world)), ("software", packages)]
    parts = [f"---\n{head}---", f"# {name.partition('/')[2]}",
             "Trained with rldsl: the program below was compiled to a static plan, which was verified before it ran.",
             _table(("", ""), [(key, text) for key, text in facts if text]),
             "## Metrics", _metrics(lines)]
    if page:
        fence = "```" if "```" not in page else "````"
        parts += ["## Program", f"{fence}text\n{page.rstrip()}\n{fence}"]
    parts += ["## Check it", f"`{FOLDER}/run.plan` is the plan, and `{FOLDER}/metrics.jsonl` has the metrics of every "
              "step. The plan id is the start of the sha256 of the plan.",
              f"```bash\nrlc verify {FOLDER}/run.plan\nrlc show {FOLDER}/run.plan\n```",
              f"Proved of the plan: {', '.join(checks)}."]
    return "\n\n".join(parts) + "\n"


def _head(plan: Plan, model: str) -> dict[str, Any]:
    """What the Hub reads."""
    bases = [found["name"] for m in plan.models if m.name == model and (found := hub.RECORDED.fullmatch(m.path))]
    data = [found["name"] for d in plan.data if (found := hub_data.RECORDED.fullmatch(d.path))]
    adapters = any(m.lora for m in plan.models if m.name == model)
    head: dict[str, Any] = {"library_name": "peft" if adapters else "transformers",
                            "tags": ["rldsl", "reinforcement-learning", plan.header.flow]}
    if any(m.head_name == "causal_lm" for m in plan.models if m.name == model):
        head["pipeline_tag"] = "text-generation"
    if bases:
        head["base_model"] = bases[0]
    return head | ({"datasets": list(dict.fromkeys(data))} if data else {})


def _metrics(lines: Lines) -> str:
    """The first and last value of each metric, and its mean over the last tenth of the steps."""
    if not lines:
        return "The run has written no metrics yet."
    names = sorted(dict.fromkeys(name for line in lines for name in computed(line)), key=display_order)
    last = lines[-max(1, len(lines) // 10):]
    rows = []
    for name in names[:SHOWN]:
        values = [line[name] for line in lines if name in line]
        late = [line[name] for line in last if name in line] or values[-1:]
        rows.append((f"`{name}`", f"{values[0]:.4g}", f"{values[-1]:.4g}", f"{sum(late) / len(late):.4g}"))
    return _table(("metric", "first step", "last step", f"mean of the last {len(last)}"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [" | ".join(head), " | ".join("---" for _ in head), *(" | ".join(row) for row in rows)]
    return "\n".join(f"| {line} |" for line in lines)
