from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256

import pytest

from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode, plan_id
from rldsl.plan.expr import Node, Program
from tests.plan.sample import grpo


def sealed(lines: list[str]) -> bytes:
    text = ("\n".join(lines) + "\n").encode()
    return (
        text
        + (json.dumps({"kind": "digest", "sha256": sha256(text).hexdigest()}, separators=(",", ":")) + "\n").encode()
    )


def body_lines() -> list[str]:
    return encode(grpo()).decode().split("\n")[:-2]


def code(data: bytes) -> tuple[str, str]:
    with pytest.raises(Failure) as e:
        decode(data, "x.plan")
    (d,) = e.value.diagnostics
    assert d.help
    return d.code, d.place


def test_round_trip_is_exact_and_deterministic():
    plan = grpo()
    data = encode(plan)
    assert decode(data, "x.plan") == plan
    assert encode(decode(data, "x.plan")) == data == encode(grpo())
    assert len(plan_id(data)) == 12 and data.startswith(b'{"compiler"')
    assert type(dict(decode(data, "x").header.params)["on"]) is bool


def test_scalars_keep_their_types():
    nodes = tuple(Node("const", attrs=(("value", v),)) for v in (1, 1.0, True, "a", -0.0))
    plan = replace(grpo(), programs=(Program("p", nodes, ()),))
    back = decode(encode(plan), "x").programs[0].nodes
    assert [repr(n.attr("value")) for n in back] == ["1", "1.0", "True", "'a'", "-0.0"]


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(Failure) as e:
        encode(replace(grpo(), programs=(Program("p", (Node("const", attrs=(("value", float("nan")),)),), ()),)))
    assert e.value.diagnostics[0].code == "RL0606"


def test_an_edited_plan_is_refused():
    data = encode(grpo())
    assert code(data.replace(b'"trips":10', b'"trips":11'))[0] == "RL0602"
    assert code(data[:-1])[0] == code(data[: len(data) // 2])[0] == "RL0602"
    assert code(data + data)[0] == "RL0602"


@pytest.mark.parametrize("data", [b"", b"\n", b"\xff\xfe", b"hello", b"[]\n", b'{"kind":"mesh"}\n', b"[" * 100_000])
def test_other_files_are_refused(data):
    assert code(data)[0] == "RL0601"


@pytest.mark.parametrize("format", [1, 5, 6, 8, "7", True, None])
def test_another_format_is_named(format):
    lines = body_lines()
    head = json.loads(lines[0])
    lines[0] = json.dumps({**head, "format": format}, sort_keys=True, separators=(",", ":"))
    assert code(sealed(lines)) == ("RL0601", "x.plan:1")


def edit(prefix: str, old: str, new: str) -> tuple[bytes, str]:
    """The sample with `old` made `new` in its first line that has `prefix`."""
    lines = body_lines()
    at = next(i for i, x in enumerate(lines) if prefix in x)
    assert old in lines[at], lines[at]
    lines[at] = lines[at].replace(old, new, 1)
    return sealed(lines), f"x.plan:{at + 1}"


@pytest.mark.parametrize(
    "prefix, old, new, expected",
    [
        ('"kind":"mesh"', '"kind":"mesh"', '"kind":"grid"', "RL0604"),
        ('"kind":"mesh"', '"kind":"mesh"', '"kind":7', "RL0604"),
        ('"kind":"mesh"', '"id":"all"', '"id":"all","idd":1', "RL0605"),
        ('"kind":"mesh"', '"id":"all",', "", "RL0605"),
        ('"kind":"mesh"', "[[0,4]]", "[[0,4,5]]", "RL0606"),
        ('"kind":"mesh"', "[[0,4]]", "[[0,4.0]]", "RL0606"),
        ('"kind":"mesh"', "[[0,4]]", "[[0,true]]", "RL0606"),
        ('"kind":"mesh"', '"id":"all"', '"id":null', "RL0606"),
        ('"kind":"mesh"', '"id":"all"', '"id": "all"', "RL0603"),
        ('"kind":"mesh"', '"id":"all"', '"id":"no","id":"all"', "RL0603"),
        ('"kind":"mesh"', "[[0,4]]", "[[0,NaN]]", "RL0603"),
        ('"kind":"layout"', '"id":"L1"', '"dp":1,"id":"L1"', "RL0603"),
        ('"kind":"spread"', '"granularity":"all"', '"granularity":"some"', "RL0606"),
        ('"kind":"model"', '"lr":1e-06', '"lr":1e999', "RL0603"),
        ('"kind":"model"', '"lr":1e-06', '"lr":"1"', "RL0606"),
        ('"kind":"generate"', '"max_new_tokens":8', '"max_new":8', "RL0605"),
        ('"kind":"end"', '"kind":"end"', '"id":1,"kind":"end"', "RL0607"),
        ('"kind":"loop"', '{"id":"step","kind":"loop","trips":10}', '{"kind":"end"}', "RL0607"),
        ('"kind":"end"', '{"kind":"end"}', '{"kind":"when","period":3}', "RL0607"),
    ],
)
def test_a_bad_line_is_named(prefix, old, new, expected):
    data, place = edit(prefix, old, new)
    found, at = code(data)
    assert found == expected
    assert at == place or expected == "RL0607"


def test_records_out_of_place_are_refused():
    lines = body_lines()
    assert code(sealed([lines[0], lines[-1], *lines[1:-1]]))[0] == "RL0604"
    assert code(sealed([*lines, lines[0]]))[0] == "RL0604"
