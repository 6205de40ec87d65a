"""Cluster files: what they may say, and what the messages say when they say something else."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path
from statistics import fmean, pstdev

import pytest

from rldsl import api, clusters
from rldsl.clusters.model import FIELDS, LEAST, MOST, NEEDED, Cluster, Distribution, Field, Measured
from rldsl.diag import Failure
from rldsl.graph.build import build
from rldsl.report import render
from rldsl.source import SourceFile
from rldsl.syntax.parse import parse as parse_program

PROGRAM = """model m = causal_lm("a")
data d = jsonl("x.jsonl", batch=2, kind=answers)
flow f(steps=1) {
  b = d.next()
  x = m.logprobs(b)
  metric y = mean(x)
}
"""
RATES = "{call: 3, layer: 0, token: 1e-3, pair: 0, output: 0}"
MEASURED = f"  - {{config: abc, head: causal_lm, dtype: float32, tp: 2, threads: 1, forward: {RATES}}}\n"


def parse(text: str) -> Cluster:
    return clusters.parse(SourceFile("c.yaml", text))


def mistakes(text: str) -> list[tuple[str, int]]:
    """(code, line) of each."""
    with pytest.raises(Failure) as caught:
        parse(text)
    assert "Traceback" not in render(caught.value.diagnostics)
    return [(d.code, d.span.line if d.span else 0) for d in caught.value.diagnostics]


# ------------------------------------------------------------------------------------------------ presets


@pytest.mark.parametrize("name", clusters.presets())
def test_presets_say_everything_and_where_it_is_from(name: str) -> None:
    text = files("rldsl.clusters").joinpath("presets", f"{name}.yaml").read_text()
    known = clusters.preset(name)
    assert known is not None and known.name == name and not known.unknown() and known.source
    numbers = [line for line in text.splitlines() if re.match(r"[a-z]\w*: *[\d.]+", line)]
    assert len(numbers) >= 16 and all("#" in line for line in numbers if not line.startswith("nodes"))
    references = set(re.findall(r"\[\d\]", text))
    assert references and all(f"# {r} " in text for r in references), "a reference is not explained"


def test_presets_are_ordered_as_the_hardware_is() -> None:
    a, h, h2, b = (clusters.preset(f"{n}x8") for n in ("a100", "h100", "h200", "b200"))
    assert a.bfloat16_tflops < h.bfloat16_tflops == h2.bfloat16_tflops < b.bfloat16_tflops
    assert a.memory_gb_s < h.memory_gb_s < h2.memory_gb_s < b.memory_gb_s
    assert (a.memory_gb, h.memory_gb, h2.memory_gb, b.memory_gb) == (80, 80, 141, 180)


@pytest.mark.parametrize("name, nodes", [("h100x8", 1), ("h100x64", 8), ("h100x64.yaml", 8), ("b200x16.yml", 2)])
def test_a_name_says_how_many_devices(name: str, nodes: int) -> None:
    found = clusters.find(name)
    assert (found.nodes, found.gpus, found.world) == (nodes, 8, 8 * nodes)


@pytest.mark.parametrize("name", ["h100x12", "h100x0", "h100", "x8", "h100x8.txt", "H100x8", "p100x8", "../h100x8",
                                  "h100x131080", "h100x8000000000", f"h100x{'8' * 5000}"])
def test_other_names_are_none(name: str) -> None:
    assert clusters.preset(name) is None


def test_a_file_wins_over_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("h100x64.yaml").write_text("preset: h100x8\nnodes: 3\nnetwork_gb_s: 25\n")
    found = clusters.find("h100x64.yaml")
    assert (found.nodes, found.network_gb_s, found.memory_gb_s) == (3, 25, 3350) and found.name == "h100x64"


# -------------------------------------------------------------------------------------------------- files


def test_a_small_file_is_enough_to_compile_and_not_to_simulate() -> None:
    found = parse("nodes: 2\ngpus: 8\nmemory_gb: 40\n")
    assert (found.nodes, found.gpus, found.memory_gb, found.name) == (2, 8, 40, "c")
    assert set(found.unknown()) == {*NEEDED, "link_gb_s", "network_gb_s"} - {"gpus"}


def test_what_a_file_does_not_say_is_not_known() -> None:
    """Not even memory: nobody is accused by a number that nobody gave."""
    found = parse("gpus: 8\nnodes: 1\n")
    assert found.memory_gb == 0 and found.link_gb_s == 0 and parse("preset: h100x8\n").memory_gb == 80


def test_a_wrong_value_comes_with_a_right_one() -> None:
    for text, like in (("gpus: eight\n", "gpus: 8"), ("gpus: 8\nlink_us: x\n", "link_us: 0.75"),
                       ("gpus: 8\nname: 3\n", 'name: "mine"')):
        with pytest.raises(Failure) as caught:
            parse(text)
        assert like in caught.value.diagnostics[0].help


def test_every_field_is_of_the_record() -> None:
    assert set(FIELDS) | {"measured", "file"} == {f for f in Cluster.__dataclass_fields__}


def test_numbers_may_be_written_as_people_do() -> None:
    assert parse("gpus: 8\nlink_us: 1e1\nkernel_us: 5\ncore_speed: 0.5").link_us == 10


def test_measurements_are_read() -> None:
    (found,) = parse(f"gpus: 1\nmeasured:\n{MEASURED}").measured
    assert found == Measured("abc", "causal_lm", "float32", 2, 1, forward=(
        ("call", 3.0), ("layer", 0.0), ("token", 0.001), ("pair", 0.0), ("output", 0.0)))


def test_how_conversations_go() -> None:
    found = parse("gpus: 8\nturns: 4\ntool_seconds: {mean: 2, deviation: 3}\n")
    assert found.turns == Distribution(4) and found.tool_seconds == Distribution(2, 3)
    assert parse("gpus: 1\ntool_seconds: [3, 0, 0.6]\n").tool_seconds == Distribution(1.2, values=(0.0, 0.6, 3.0))
    assert parse("gpus: 8\n").turns is None and parse("gpus: 8\n").tool_seconds is None


@pytest.mark.parametrize("distribution", [Distribution(2), Distribution(2, 3), Distribution(2, values=(0.0, 1.0, 5.0))])
def test_quantiles_have_the_mean_and_deviation(distribution: Distribution) -> None:
    values = [distribution.quantile((i + 0.5) / 20_000) for i in range(20_000)]
    assert values == sorted(values) and fmean(values) == pytest.approx(distribution.mean, rel=0.01)
    if not distribution.values:
        assert pstdev(values) == pytest.approx(distribution.deviation, rel=0.06)


@pytest.mark.parametrize("text, expected", [
    ("gpus: 8\nturns: 0.5\n", [("RL0205", 2)]), ("gpus: 8\nturns: []\n", [("RL0205", 2)]),
    ("gpus: 8\nturns: [2, x]\n", [("RL0205", 2)]), ("gpus: 8\nturns: {deviation: 2}\n", [("RL0215", 2)]),
    ("gpus: 8\nturns: {mean: 4, std: 2}\n", [("RL0107", 2)]), ("gpus: 8\ntool_seconds: {mean: -1}\n", [("RL0205", 2)]),
    ("gpus: 8\ntool_seconds: {mean: 1, deviation: -1}\n", [("RL0205", 2)]), ("gpus: 8\nturns: fast\n", [("RL0205", 2)]),
    ("gpus: 8\nnods: 2\n", [("RL0107", 2)]), ("gpus: 8\ngpus: 4\n", [("RL0215", 2)]),
    ("gpus: eight\n", [("RL0205", 1)]), ("gpus: 0\n", [("RL0205", 1)]), ("gpus: 2.5\n", [("RL0205", 1)]),
    ("gpus: 010\n", [("RL0205", 1)]), ("gpus: 0x8\n", [("RL0205", 1)]), ("gpus: 8\nlink_gb_s: 1:30\n", [("RL0205", 2)]),
    ("gpus: true\n", [("RL0205", 1)]), ("gpus: [8]\n", [("RL0205", 1)]), ("gpus:\n", [("RL0205", 1)]),
    ("gpus: 8\nmemory_gb: 0\n", [("RL0205", 2)]), ("gpus: 8\nmemory_gb: 1e-12\n", [("RL0205", 2)]),
    ("gpus: 8\nmemory_gb: 1e10\n", [("RL0205", 2)]), ("gpus: 8\nmemory_gb: .inf\n", [("RL0205", 2)]),
    ("gpus: 8\nlink_gb_s: .nan\n", [("RL0205", 2)]), ("gpus: 8\nlink_us: -1\n", [("RL0205", 2)]),
    ("gpus: 8\nmatmul_efficiency: 1.2\n", [("RL0205", 2)]), ("gpus: 8\nmatmul_efficiency: 0\n", [("RL0205", 2)]),
    ("preset: h100x8\ncache_gb: 400\n", [("RL0205", 2)]), ("cache_gb: 60\ngpus: 8\nmemory_gb: 40\n", [("RL0205", 1)]),
    ("preset: h100x8\nnodes: 2\ncache_gb: 81\n", [("RL0205", 3)]),
    ("gpus: 8\nname: 3\n", [("RL0205", 2)]), ("preset: h100x9\n", [("RL0205", 1)]),
    ("preset: [h100x8]\n", [("RL0205", 1)]),
    ("- 8\n", [("RL0205", 1)]), ("", [("RL0205", 1)]), ("8\n", [("RL0205", 1)]),
    ("gpus: 8\nlink: [\n", [("RL0103", 2)]), ("gpus: 8\n\tnodes: 1\n", [("RL0103", 2)]),
    ("gpus: !!python/none x\n", [("RL0205", 1)]), (f"gpus: 1\ncores: 1{'0' * 400}\n", [("RL0205", 2)]),
    ("gpus: 1\n? [a, b]\n: 2\n", [("RL0107", 2)]), ("? {a: 1}\n: 2\n", [("RL0107", 1)]),
    ("nods: 2\ngpus: x\nmemory_gb: -1\n", [("RL0107", 1), ("RL0205", 2), ("RL0205", 3)]),
    ("gpus: 1\nmeasured: 3\n", [("RL0205", 2)]), ("gpus: 1\nmeasured:\n  - 3\n", [("RL0205", 3)]),
    (f"gpus: 1\nmeasured:\n{MEASURED.replace('head', 'haed')}", [("RL0107", 3), ("RL0215", 3)]),
    (f"gpus: 1\nmeasured:\n{MEASURED.replace('token:', 'tokens:')}", [("RL0107", 3)]),
    (f"gpus: 1\nmeasured:\n{MEASURED.replace('call: 3', 'call: -3')}", [("RL0205", 3)]),
    (f"gpus: 1\nmeasured:\n{MEASURED.replace(RATES, '7')}", [("RL0205", 3)]),
])
def test_mistakes_are_found_where_they_are(text: str, expected: list[tuple[str, int]]) -> None:
    assert mistakes(text) == expected


HUGE = "9" * 300  # still a float
NUMBERS = [(name, field) for name, field in FIELDS.items() if field.kind in ("int", "float", "distribution")]


@pytest.mark.parametrize("name, field", NUMBERS, ids=[name for name, _ in NUMBERS])
def test_no_number_is_too_large_or_too_small_for_times(name: str, field: Field) -> None:
    first = "gpus: 8\n" if name != "gpus" else ""
    line = 1 + bool(first)
    for number in (HUGE, f"1{HUGE}{HUGE}", "1" * 5000, "1e13", "1e300", "-1e300", "1e-300", "1e-13"):
        assert mistakes(f"{first}{name}: {number}\n") == [("RL0205", line)], number
    if field.kind == "float" and not field.low and field.high >= 1:
        for number in (MOST if field.high == MOST else field.high, LEAST):
            assert getattr(parse(f"{first}{name}: {number!r}\n"), name) == number
    with pytest.raises(Failure) as caught:
        parse(f"{first}{name}: {HUGE}9\n")
    assert "at most" in caught.value.diagnostics[0].title and "301 digits" in caught.value.diagnostics[0].label


def test_measured_times_have_the_same_bounds() -> None:
    for number in (HUGE, "1e-300"):
        assert mistakes(f"gpus: 1\nmeasured:\n{MEASURED.replace('call: 3', f'call: {number}')}") == [("RL0205", 3)]


def test_measurements_are_complete_and_there_once() -> None:
    """A rate that is missing would count as free, and of two entries one would count for nothing."""
    assert mistakes(f"gpus: 1\nmeasured:\n{MEASURED.replace('layer: 0, ', '')}") == [("RL0215", 3)]
    assert mistakes(f"gpus: 1\nmeasured:\n{MEASURED}{MEASURED.replace('call: 3', 'call: 4')}") == [("RL0215", 4)]
    assert len(parse(f"gpus: 1\nmeasured:\n{MEASURED}{MEASURED.replace('tp: 2', 'tp: 4')}").measured) == 2


@pytest.mark.parametrize("name", ["h100x0", "h100x99999999999", "h100x12"])
def test_a_number_of_devices_that_no_cluster_has(name: str) -> None:
    with pytest.raises(Failure) as caught:
        clusters.find(name)
    assert "8 per node" in caught.value.diagnostics[0].help and "16,384 nodes" in caught.value.diagnostics[0].help


def test_messages_about_a_cluster_point_to_its_file() -> None:
    known = clusters.preset("h100x16")
    assert parse("gpus: 8\n").place == "c.yaml" and parse("gpus: 8\n") == Cluster(name="c", gpus=8)
    assert known is not None and known.place == "h100x16"


@pytest.mark.parametrize("text, word", [("gpus: 8\nlink_gbs: 2\n", "link_gb_s"), ("preset: h100x80\n", "h100x8"),
                                        ("gpus: 8\nmemory: 80\n", "memory_gb")])
def test_suggestions(text: str, word: str) -> None:
    if text.startswith("preset: h100x80"):
        assert parse(text).nodes == 10  # ten nodes of eight
        return
    with pytest.raises(Failure) as caught:
        parse(text)
    assert word in caught.value.diagnostics[0].help


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for name, code in ((str(tmp_path / "none.yaml"), "RL0091"), (str(tmp_path), "RL0092"), ("h10x8", "RL0091")):
        with pytest.raises(Failure) as caught:
            clusters.find(name)
        assert [d.code for d in caught.value.diagnostics] == [code]
    (tmp_path / "bytes.yaml").write_bytes(b"gpus: \xff\n")
    with pytest.raises(Failure, match="RL0103"):
        clusters.read(str(tmp_path / "bytes.yaml"))
    (tmp_path / "deep.yaml").write_text(f"name: {'[' * 3000}{']' * 3000}\n")
    with pytest.raises(Failure, match="RL0103") as deep:
        clusters.read(str(tmp_path / "deep.yaml"))
    assert "nested" in deep.value.diagnostics[0].help


def test_yaml_runs_nothing(tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(Failure):
        parse(f"gpus: !!python/object/apply:os.mkdir ['{target}']\n")
    assert not target.exists()


# ------------------------------------------------------------------------------------- the cluster statement


def cluster_of(statement: str) -> tuple[int, int, float]:
    made = build(parse_program(SourceFile("p.rlf", f"{statement}\n{PROGRAM}")), {}).cluster
    assert made is not None
    return made.nodes, made.gpus, made.memory_gb


def test_programs_read_the_same_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text("nodes: 2\ngpus: 4\nmemory_gb: 40\n")
    Path("new.yaml").write_text("preset: h200x8\nnodes: 4\nlink_us: 3\n")
    assert cluster_of('cluster "old.yaml"') == (2, 4, 40)
    assert cluster_of('cluster "new.yaml"') == (4, 8, 141)
    assert cluster_of('cluster "h100x64.yaml"') == cluster_of('cluster "h100x64"') == (8, 8, 80)


@pytest.mark.parametrize("text, code", [
    ("nods: 1\ngpus: 8\n", "RL0107"), ("nodes: 2\n", "RL0215"), ("gpus: -1\n", "RL0205"), ("gpus: [\n", "RL0103"),
    ("name: x\n", "RL0215"), (None, "RL0103")])
def test_mistakes_in_a_program_s_file_are_the_program_s(text: str | None, code: str, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("c.yaml").write_text(text)
    assert [d.code for d in api.check(f'cluster "c.yaml"\n{PROGRAM}')] == [code]


def test_an_unknown_preset_in_a_program() -> None:
    (found,) = api.check(f'cluster "h100x9"\n{PROGRAM}')
    assert found.code == "RL0103" and "h100x8" in found.help


def test_an_empty_name_is_no_directory() -> None:
    with pytest.raises(Failure) as failure:
        clusters.find("")
    (d,) = failure.value.diagnostics
    assert d.code == "RL0091" and "is empty" in d.title and "h100x8" in d.help
