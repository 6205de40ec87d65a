"""What `python -m benchmarks.distillation` prints and writes: a table, and the curve as a picture.

In: the metrics of all runs. Out: text. The page docs/distillation.md has the table between two comments.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev

RESULTS = Path(__file__).parent / "results.json"
DOCS = Path(__file__).parents[2] / "docs"
WAYS = {"distilled": "distillation", "plain": "SFT"}  # the model of a run -> its name
COLORS = {"distilled": "#5c73e6", "plain": "#c4690c"}  # at least 3.8 : 1 on white and on dark pages
BEGIN, END = "<!-- results -->\n", "<!-- end of results -->\n"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 300, 48, 110, 12, 36
Curve = list[dict[str, float]]


@dataclass(frozen=True)
class Results:
    """The curves of all runs."""

    teacher: float  # its accuracy on the sums of the results
    rates: dict[str, float]  # model -> the learning rate that was chosen for it
    search: dict[str, Curve]  # learning rate -> the curve of both models with it, with which rates were chosen
    curves: dict[str, Curve]  # seed -> the curve of both models

    @property
    def steps(self) -> list[int]:
        return [int(point["step"]) for point in next(iter(self.curves.values()))]

    def at(self, point: int, model: str, what: str) -> list[float]:
        """One number per seed."""
        return [curve[point][f"{model}_{what}"] for curve in self.curves.values()]

    @property
    def is_ahead(self) -> bool:
        """Whether distillation has the higher mean accuracy at the end."""
        return mean(self.at(-1, "distilled", "accuracy")) > mean(self.at(-1, "plain", "accuracy"))


def read(path: Path) -> Results:
    return Results(**json.loads(path.read_text()))


def write(results: Results, path: Path, docs: Path) -> None:
    """Keep the results, and put them into the page."""
    path.write_text(json.dumps(asdict(results), indent=1) + "\n")
    page = docs / "distillation.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.split(END)[1]}")
    (docs / "images" / "distillation.svg").write_text(picture(results))


def table(results: Results) -> str:
    """In Markdown: means and deviations over seeds, the end of each seed, and the choice of learning rates."""
    count = len(results.curves)
    lines = [f"The teacher's accuracy is {results.teacher:.3f}. Mean ± standard deviation over {count} seeds:", "",
             "| step | accuracy: distillation | SFT | negative log-likelihood: distillation | SFT |",
             "|---|---|---|---|---|"]
    for i, step in enumerate(results.steps):
        cells = [_spread(results.at(i, model, what)) for what in ("accuracy", "nll") for model in WAYS]
        lines.append(f"| {step} | " + " | ".join(cells) + " |")
    lines += ["", "Accuracy at the end, for each seed:", "", "| seed | distillation | SFT |", "|---|---|---|"]
    lines += [f"| {seed} | " + " | ".join(f"{curve[-1][f'{model}_accuracy']:.3f}" for model in WAYS) + " |"
              for seed, curve in results.curves.items()]
    lines += ["", "Accuracy at the end by learning rate, where these were chosen:", "",
              "| learning rate | distillation | SFT |", "|---|---|---|"]
    for rate, curve in results.search.items():
        cells = [f"{curve[-1][f'{model}_accuracy']:.3f}" + (" (chosen)" if results.rates[model] == float(rate) else "")
                 for model in WAYS]
        lines.append(f"| {rate} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _spread(numbers: list[float]) -> str:
    return f"{mean(numbers):.3f} ± {stdev(numbers) if len(numbers) > 1 else 0:.3f}"


def picture(results: Results) -> str:
    """As SVG: accuracy over steps, the mean as a line, each seed as a dot."""
    last = results.steps[-1]

    def x(step: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * step / last, 1)

    def y(accuracy: float) -> float:
        return round(HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * accuracy, 1)

    def text(at: float, down: float, anchor: str, color: str, words: str) -> str:
        return f'<text x="{at}" y="{down}" text-anchor="{anchor}" fill="{color}">{words}</text>'

    gray = "#888888"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
             'font-size="12">',
             "<title>Accuracy of distillation and of supervised fine-tuning on the same tokens</title>"]
    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts += [f'<line x1="{LEFT}" x2="{x(last)}" y1="{y(tick)}" y2="{y(tick)}" stroke="{gray}" '
                  'stroke-opacity="0.3"/>', text(LEFT - 6, y(tick) + 4, "end", gray, f"{tick:.0%}")]
    parts += [text(x(step), HEIGHT - BOTTOM + 16, "middle", gray, str(step)) for step in results.steps]
    parts.append(text(x(last / 2), HEIGHT - 4, "middle", gray, "step"))
    for model, name in WAYS.items():
        color = COLORS[model]
        means = [mean(results.at(i, model, "accuracy")) for i in range(len(results.steps))]
        points = " ".join(f"{x(step)},{y(a)}" for step, a in zip(results.steps, means, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(step)}" cy="{y(a)}" r="2.5" fill="{color}" fill-opacity="0.5"/>'
                  for i, step in enumerate(results.steps) for a in results.at(i, model, "accuracy")]
        parts.append(text(x(last) + 8, y(means[-1]) + 4, "start", color, f"{name} {means[-1]:.1%}"))
    return "\n".join([*parts, "</svg>"]) + "\n"
