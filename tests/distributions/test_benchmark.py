"""`python -m benchmarks.distillation` in miniature; its page and picture are those of the results that are kept."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import pytest

from benchmarks.distillation.__main__ import LAYERS, SIZES, Protocol, make_student, measure
from benchmarks.distillation.report import DOCS, RESULTS, WAYS, picture, read, table, write
from tests.tiny import make_model


def test_the_page_has_the_results_that_are_kept(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    shutil.copy(DOCS / "distillation.md", tmp_path)
    write(read(RESULTS), tmp_path / "results.json", tmp_path)
    assert (tmp_path / "results.json").read_text() == RESULTS.read_text()
    for name in ("distillation.md", "images/distillation.svg"):
        assert (tmp_path / name).read_text() == (DOCS / name).read_text(), name


def test_the_results_are_those_of_the_protocol() -> None:
    """All seeds, and for each way the best learning rate of those that were tried, which is not the first or last."""
    results, protocol = read(RESULTS), Protocol()
    assert results.curves.keys() == {str(seed) for seed in protocol.seeds} and protocol.choice not in protocol.seeds
    assert results.steps == list(range(protocol.period, protocol.student_steps + 1, protocol.period))
    assert [float(rate) for rate in results.search] == list(protocol.rates)
    for model in WAYS:
        best = max(results.search, key=lambda rate, m=model: results.search[rate][-1][f"{m}_accuracy"])
        assert results.rates[model] == float(best) and best not in (f"{protocol.rates[0]:g}", f"{protocol.rates[-1]:g}")
    assert results.is_ahead
    swapped = {seed: [{**point, "plain_accuracy": point["distilled_accuracy"], "distilled_accuracy": 0.5}
                      for point in curve] for seed, curve in results.curves.items()}
    assert not replace(results, curves=swapped).is_ahead


def test_a_student_is_every_second_layer_of_the_teacher(tmp_path: Path) -> None:
    make_model(tmp_path / "teacher", num_hidden_layers=LAYERS, **SIZES)
    make_student(tmp_path / "teacher", tmp_path / "student")
    teacher, student = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
                        for name in ("teacher", "student"))
    assert sum(name.endswith("mlp.up_proj.weight") for name in student) == LAYERS // 2
    for name, tensor in student.items():
        parts = name.split(".")
        at = parts.index("layers") + 1 if "layers" in parts else 0
        if at:
            parts[at] = str(2 * int(parts[at]))
        assert torch.equal(tensor, teacher[".".join(parts)]), name


@pytest.mark.thorough
def test_in_miniature(tmp_path: Path) -> None:
    small = Protocol(teacher_steps=1, student_rows=128, student_steps=2, period=1, rates=(1e-3,), seeds=(1,))
    results = measure(tmp_path, small)
    assert results.steps == [1, 2] and 0 <= results.teacher <= 1
    assert results.rates == {"distilled": 1e-3, "plain": 1e-3}
    (curve,) = results.curves.values()
    # the same weights and rows, but not the same loss
    assert abs(curve[0]["distilled_nll"] - curve[0]["plain_nll"]) < 0.5
    assert curve[1]["distilled_nll"] != curve[1]["plain_nll"]
    assert "| 2 |" in table(results) and picture(results).count("<circle") == 4
    rows = [(tmp_path / f"{name}.jsonl").read_text().splitlines() for name in ("rows1", "choice", "test")]
    assert len(rows[0]) == 128 and all(len(x) == 500 for x in rows[1:])
    sums = [{row.partition('"answer"')[0] for row in part} for part in rows]
    assert not sums[2] & (sums[0] | sums[1]) and not sums[0] & sums[1]
