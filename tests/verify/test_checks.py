"""The checks of `docs/verifier.md`: for each a mutant of a plan that it alone rejects, and more mistakes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from rldsl import api, explain
from rldsl.diag import Failure
from rldsl.plan.codec import decode, encode
from rldsl.plan.events import Event, Loop, Offload, Onload
from rldsl.plan.expr import Node
from rldsl.plan.model import FORMAT, ParamSpec, Plan
from rldsl.plan.projection import class_of
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.transfer_slices import rank_slices
from rldsl.verify import reshards, transfer_slices, verify
from tests.plan.sample import grpo
from tests.verify.faults import change, codes, drop, edited, faults, moved, row, swapped, with_body
from tests.verify.plans import GRPO, folder

DOC = Path(__file__).parents[2] / "docs/verifier.md"


def test_the_sample_verifies() -> None:
    plan = grpo()
    proof = verify(plan)
    assert (proof.events, proof.entries) == (18, sum(len(class_of(plan, r).events) for r in range(4)))
    assert len(proof.checks) == len({*proof.checks}) >= 12


def node(plan: Plan, program: int, number: int, **new: object) -> Plan:
    nodes = list(plan.programs[program].nodes)
    nodes[number] = replace(nodes[number], **new)
    return row(plan, "programs", program, nodes=tuple(nodes))


def steps(plan: Plan, **new: object) -> Plan:
    return replace(plan, body=tuple(replace(x, **new) if isinstance(x, Loop) else x for x in plan.body))


# Check of docs/verifier.md, the one code that rejects the mutant, the mutant.
ALONE: list[tuple[int, str, Callable[[Plan], Plan]]] = [
    (2, "RL0534", lambda p: change(p, 6, bytes=1)),
    (2, "RL0534", lambda p: change(p, 7, bytes=512)),
    (2, "RL0534", lambda p: change(p, 17, bytes=8)),
    (2, "RL0613", lambda p: change(p, 17, mesh="all")),
    (2, "RL0531", lambda p: replace(p, groups=p.groups[:-1])),
    (2, "RL0532", lambda p: replace(p, groups=(*p.groups, replace(p.groups[0], id="g9")))),
    (3, "RL0542", lambda p: row(p, "classes", 0, events=p.classes[0].events[:-1])),
    (3, "RL0542", lambda p: row(p, "classes", 1, events=(*p.classes[1].events, 17))),
    (3, "RL0541", lambda p: replace(p, classes=p.classes[1:])),
    (5, "RL0526", lambda p: change(p, 4, bytes=7)),
    (5, "RL0526", lambda p: change(p, 4, digest="0")),
    (6, "RL0511", lambda p: swapped(p, 1, 9, 13)),
    (6, "RL0511", lambda p: swapped(p, 0, 5, 16)),
    (7, "RL0536", lambda p: steps(p, trips=11)),
    (7, "RL0536", lambda p: row(p, "models", 0, planned_updates=19)),
    (8, "RL0513", lambda p: moved(p, 16, 15)),
    (8, "RL0514", lambda p: with_body(p, edited(p.body, lambda e: (e, replace(e, id=40)) if e.id == 12 else (e,)))),
    (8, "RL0515", lambda p: with_body(p, edited(p.body, lambda e: (e, replace(e, id=40)) if e.id == 16 else (e,)))),
    (8, "RL0516", lambda p: drop(p, 16)),
    (8, "RL0518", lambda p: drop(drop(p, 6), 16)),
    (11, "RL0512", lambda p: swapped(p, 0, 0, 17)),
    (11, "RL0537", lambda p: row(p, "layouts", 2, zero=1)),
    (2, "RL0531", lambda p: row(p, "layouts", 2, ep=2)),
    (12, "RL0521", lambda p: drop(p, 4)),
    (12, "RL0520", lambda p: drop(p, 2)),
    (12, "RL0523", lambda p: moved(p, 2, 4)),
]


@pytest.mark.parametrize("check, code, mutant", ALONE, ids=[f"{n}-{c}-{i}" for i, (n, c, _) in enumerate(ALONE)])
def test_a_mutant_that_one_check_alone_rejects(check: int, code: str, mutant: Callable[[Plan], Plan]) -> None:
    found = codes(mutant(grpo()))
    assert code in found and found <= {code} | ({"RL0516"} if code == "RL0518" else set()), found


def test_a_file_that_was_changed() -> None:
    data = encode(grpo())
    assert decode(data, "x.plan") == grpo()
    for old, new in ((b'"steps":10', b'"steps":11'), (f'"format":{FORMAT}'.encode(), b'"format":9'), (b"}\n", b"} \n")):
        with pytest.raises(Failure) as wrong:
            decode(data.replace(old, new, 1), "x.plan")
        assert [d.code for d in wrong.value.diagnostics] == ["RL0601" if b"format" in old else "RL0602"]


def test_a_rank_that_sends_something_else_than_its_peer_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank gets what it lacks once, by what it says itself; the senders see it otherwise."""
    def wrong(p, rank, known=None):  # noqa: ANN001, ANN202
        sends, receives = rank_slices(p, rank)
        return tuple(x._replace(step=x.step + 1) for x in sends), receives

    monkeypatch.setattr(transfer_slices, "rank_slices", wrong)
    assert codes(grpo()) == {"RL0533"}


def test_more_messages_at_once_than_a_group_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by the rule, a rank posts few; by another, which puts all its peers together, too many."""
    monkeypatch.setattr(transfer_slices, "MAX_MESSAGES", 4 * transfer_slices.MAX_PARTS)
    assert not codes(grpo())
    monkeypatch.setattr(transfer_slices, "message_batches", lambda rank, peers, world, messages: (tuple(peers),))
    assert codes(grpo()) == {"RL0535"}


def spoiled(**new: object) -> Callable[..., object]:
    """A planner whose first node group is another."""
    def made(*args: object) -> object:
        p = plan_reshard(*args)  # type: ignore[arg-type]
        first = p.groups[0]
        return replace(p, groups=(replace(first, **{k: v(getattr(first, k)) for k, v in new.items()}), *p.groups[1:]))
    return made


def classes(edit: Callable[[tuple], tuple]) -> Callable[..., object]:
    def made(*args: object) -> object:
        p = plan_reshard(*args)  # type: ignore[arg-type]
        return replace(p, classes=edit(p.classes))
    return made


def segment(box_class: object, **new: object) -> object:
    first, *rest = box_class.segments  # type: ignore[attr-defined]
    return replace(box_class, segments=(first._replace(**new), *rest))


@pytest.mark.parametrize("planner", [
    spoiled(local_copies=lambda h: h[1:]),
    spoiled(local_copies=lambda h: h + h[:1]),
    spoiled(local_copies=lambda h: (h[0]._replace(start=1), *h[1:])),
    spoiled(local_copies=lambda h: (h[0]._replace(stop=h[0].stop + 1), *h[1:])),
    spoiled(cells=lambda x: x[::-1]),
    spoiled(nodes=lambda n: ()),
    classes(lambda x: x[1:]),
    classes(lambda x: x + x[:1]),
    classes(lambda x: (replace(x[0], holders=x[1].holders), *x[1:])),
    classes(lambda x: (replace(x[0], needers=()), *x[1:])),
    classes(lambda x: (replace(x[0], size=x[0].size + 1), *x[1:])),
    classes(lambda x: (segment(x[0], box=((0, 1), (0, 8))), *x[1:])),
    classes(lambda x: (segment(x[0], spec="nothing"), *x[1:])),
])
def test_a_planner_that_leaves_gaps_or_overlaps(planner: Callable[..., object],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Coverage is tested on boxes and transfer slices, whatever the planner's own bytes and digest say."""
    monkeypatch.setattr(reshards, "plan_reshard", planner)
    found = codes(grpo())
    assert "RL0527" in found and found <= {"RL0527", "RL0526", "RL0533"}, found  # and who would pass it on lacks it


@pytest.mark.parametrize("planner", [
    spoiled(local_copies=lambda h: (h[0]._replace(src=3 if h[0].dst != 3 else 2), *h[1:])),
    spoiled(local_copies=lambda h: (h[0]._replace(step=4), *h[1:])),
])
def test_a_planner_that_sends_what_is_not_there(planner: Callable[..., object],
                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """From a rank that does not hold it; and so late that those who pass it on do not have it yet."""
    monkeypatch.setattr(reshards, "plan_reshard", planner)
    assert codes(grpo()) - {"RL0526"} == {"RL0533"}


def test_a_planner_that_leaves_something_out_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(p, rank, known=None):  # noqa: ANN001, ANN202
        return tuple(tuple(x for x in side if x.step < 1) for side in rank_slices(p, rank))

    monkeypatch.setattr(transfer_slices, "rank_slices", wrong)
    assert codes(grpo()) == {"RL0527"}


def test_a_model_on_dp_alone_may_be_invariant() -> None:
    assert not codes(row(grpo(), "models", 1, invariant=True))


def test_a_deadlock_names_who_waits_for_whom_and_where() -> None:
    (d,) = faults(swapped(grpo(), 1, 9, 13))
    assert d.code == "RL0511" and d.help
    waits = [n for n in d.notes if "wait at" in n]
    assert waits == ["ranks 0-1 wait at event 9 (transfer) for ranks 2-3, which are at event 13",
                     "ranks 2-3 wait at event 13 (transfer) for ranks 0-1, which are at event 9"] or len(waits) == 2
    plan = change(change(grpo(), 9, at="grpo.rlf:11"), 13, at="grpo.rlf:12")
    (d,) = faults(swapped(plan, 1, 9, 13))
    assert sum("grpo.rlf:11" in n for n in d.notes) and sum("grpo.rlf:12" in n for n in (*d.notes, d.place))


def _undivided_sum(spec: ParamSpec) -> ParamSpec:
    """A column-parallel weight as a row-parallel one with a single unit, so that its sum has one block."""
    if spec.style != "colwise" or spec.split is None:
        return spec
    return replace(spec, style="rowwise", split=replace(spec.split, dim=1, parts=((1, spec.shape[1]),)))


MISTAKES: list[tuple[Callable[[Plan], Plan], str]] = [
    (lambda p: change(p, 5, mesh="fit"), "RL0613"),
    (lambda p: change(p, 5, mesh="nowhere"), "RL0610"),
    (lambda p: change(p, 8, reads=("ref@L3", "gen.tokens@s1")), "RL0614"),
    (lambda p: change(p, 5, writes=("gen.tokens@s1", "gen.logprobs@s1")), "RL0614"),
    (lambda p: change(p, 10, spread="s1"), "RL0614"),
    (lambda p: change(p, 8, output_name="values"), "RL0615"),
    # it is trained with tp=2
    (lambda p: row(p, "models", 0, invariant=True, params=tuple(map(_undivided_sum, p.models[0].params))), "RL0615"),
    (lambda p: row(row(p, "models", 1, invariant=True), "layouts", 2, backend="megatron"), "RL0615"),
    (lambda p: change(p, 8, temperature=0.5), "RL0615"),
    (lambda p: drop(p, 0), "RL0520"),
    (lambda p: drop(p, 14, project=False), "RL0542"),
    (lambda p: moved(p, 16, 15), "RL0513"),
    (lambda p: moved(p, 14, 12), "RL0513"),
    (lambda p: replace(p, groups=p.groups[1:]), "RL0531"),
    (lambda p: replace(p, classes=p.classes + p.classes[:1]), "RL0541"),
    (lambda p: row(p, "classes", 0, ranks=((0, 2), (1, 2))), "RL0541"),
    (lambda p: row(p, "classes", 0, ranks=()), "RL0541"),
    (lambda p: row(p, "classes", 0, peak_bytes=-1), "RL0543"),
    (lambda p: row(p, "layouts", 0, tp=4), "RL0612"),
    (lambda p: row(p, "layouts", 0, backend="os"), "RL0612"),
    (lambda p: row(p, "meshes", 0, ranks=((0, 3), (2, 4))), "RL0612"),
    (lambda p: row(p, "meshes", 0, ranks=((0, 10**12),)), "RL0612"),
    (lambda p: replace(p, header=replace(p.header, world=10**12)), "RL0612"),
    (lambda p: replace(p, header=replace(p.header, devices_per_node=0)), "RL0612"),
    (lambda p: replace(p, values=p.values[1:]), "RL0610"),
    (lambda p: replace(p, values=p.values + p.values[:1]), "RL0611"),
    (lambda p: row(p, "values", 0, dtype="f32"), "RL0612"),
    (lambda p: row(p, "values", 0, extent="row"), "RL0612"),
    (lambda p: row(p, "spaces", 1, count=33), "RL0612"),
    (lambda p: row(p, "frames", 1, selected_from="gen"), "RL0612"),
    (lambda p: row(p, "data", 0, batch=0), "RL0612"),
    (lambda p: row(p, "data", 0, row_format="pairs",
                   columns=(("prompt", "p"), ("chosen", "c"), ("rejected", "r"))), "RL0615"),
    (lambda p: row(p, "functions", 0, returns="batch"), "RL0612"),
    (lambda p: row(p, "models", 0, dtype="float16"), "RL0612"),
    (lambda p: row(p, "models", 0, optimizer=replace(p.models[0].optimizer, betas=(0.9, 1.5))), "RL0612"),
    (lambda p: row(p, "models", 0, optimizer=replace(p.models[0].optimizer, lr=-1.0)), "RL0612"),
    (lambda p: row(p, "models", 0, params=(replace(p.models[0].params[0], style="rowwise"), *p.models[0].params[1:])),
     "RL0612"),
    (lambda p: row(p, "models", 0, params=(replace(p.models[0].params[1], partial_grad=True), *p.models[0].params[2:])),
     "RL0612"),
    (lambda p: change(p, 5, sampling=replace(p.body[-1].body[2].sampling, temperature=0.0)), "RL0612"),
    (lambda p: change(p, 5, sampling=replace(p.body[-1].body[2].sampling, top_p=1.5)), "RL0612"),
    (lambda p: change(p, 5, sampling=replace(p.body[-1].body[2].sampling, min_p=-0.1)), "RL0612"),
    (lambda p: change(p, 5, sampling=replace(p.body[-1].body[2].sampling, min_new_tokens=9)), "RL0612"),
    (lambda p: row(p, "spreads", 4, granularity="row"), "RL0538"),
    (lambda p: row(p, "spreads", 4, epochs=2), "RL0538"),
    (lambda p: row(p, "spreads", 4, frames=()), "RL0538"),
    (lambda p: row(p, "spreads", 5, granularity="prompt"), "RL0538"),
    (lambda p: row(p, "spreads", 1, frames=("gen",), balance_by="tokens"), "RL0538"),
    (lambda p: row(p, "programs", 0, outputs=(("adv", 1), ("reward", 3))), "RL0617"),
    (lambda p: row(p, "programs", 0, nodes=p.programs[0].nodes[::-1]), "RL0616"),
    (lambda p: node(p, 0, 1, attrs=(("to", "seq"),), level="seq", space="gen"), "RL0616"),
    (lambda p: node(p, 0, 3, args=(3,)), "RL0616"),
    (lambda p: row(p, "programs", 0, nodes=(*p.programs[0].nodes, Node("mean", (), "seq", "gen", (("to", "seq"),)))),
     "RL0616"),  # other checks look at what it reduces
    (lambda p: node(p, 0, 2, op="lt"), "RL0617"),
    (lambda p: node(p, 1, 8, op="amax"), "RL0618"),
    (lambda p: node(p, 1, 5, op="mean", attrs=(("to", "prompt"),), level="prompt", space="prompt"), "RL0618"),
    (lambda p: row(p, "programs", 1, nodes=(*p.programs[1].nodes, Node("mul", (8, 8))), outputs=(("loss", 9),)),
     "RL0618"),
    (lambda p: row(p, "programs", 1, nodes=(*p.programs[1].nodes, Node("add", (8, 1), "token", "gen"),
                                            Node("mean", (9,), attrs=(("to", "batch"),))), outputs=(("loss", 10),)),
     "RL0618"),
    (lambda p: change(p, 14, model_outputs=(), data_inputs=(("logprobs", "gen.logprobs"), ("old", "gen.logprobs"), ("adv", "adv"),
                                            ("ref", "ref_lp"))), "RL0618"),
    (lambda p: replace(p, body=(*p.body, Loop("again", 10, ()))), "RL0536"),
]


@pytest.mark.parametrize("mutant, code", MISTAKES, ids=[f"{c}-{i}" for i, (_, c) in enumerate(MISTAKES)])
def test_a_mistake_has_its_code(mutant: Callable[[Plan], Plan], code: str) -> None:
    found = faults(mutant(grpo()))
    assert code in {d.code for d in found}, [(d.code, d.title) for d in found]


def test_onload_and_offload_alternate() -> None:
    plan = grpo()

    def side(kind: type[Event], id: int) -> Event:
        return kind(id=id, mesh="ref", model="ref", layout="L3")  # type: ignore[call-arg]

    def around(*kinds: type[Event]) -> Plan:
        """Offload or onload `ref` before (even places) and after (odd places) its call."""
        extra = [side(k, 90 + i) for i, k in enumerate(kinds)]
        return with_body(plan, edited(plan.body, lambda e: (*extra[::2], e, *extra[1::2]) if e.id == 8 else (e,)))

    parked = edited(plan.body, lambda e: (e, side(Offload, 80)) if e.id == 2 else (e,))
    good = edited(parked, lambda e: (side(Onload, 81), e, side(Offload, 82)) if e.id == 8 else (e,))
    assert not faults(with_body(plan, good))
    for bad in (with_body(plan, parked), around(Offload), around(Onload), around(Offload, Onload),
                around(Onload, Offload)):
        assert "RL0525" in codes(bad)


def test_greedy_completions_have_the_log_probabilities_of_temperature_1() -> None:
    with folder() as here:
        (here / "p.rlf").write_text(GRPO.replace("temperature=0.9", "greedy=true, temperature=0.7"))
        plan = api.compile("p.rlf")
    gen = next(i for i, f in enumerate(plan.frames) if f.id == "gen")
    assert plan.frames[gen].temperature == 1.0 and not faults(plan)
    assert "RL0615" in codes(row(plan, "frames", gen, temperature=0.7))


# ------------------------------------------------------------------------------------------------- the document


def table() -> list[tuple[int, list[str], list[str]]]:
    """(check, its codes, its files) of the table in docs/verifier.md."""
    rows = [line.split("|") for line in DOC.read_text().splitlines() if re.match(r"\| \d+ ", line)]
    return [(int(r[1]), re.findall(r"RL\d{4}", r[3]), re.findall(r"`([\w/]+\.py)`", r[4])) for r in rows]


def test_the_document_has_all_checks_whose_codes_and_files_exist() -> None:
    found = table()
    assert [n for n, _, _ in found] == list(range(1, 15))
    for _, its_codes, files in found:
        assert its_codes and files and set(its_codes) <= set(explain.codes())
        for file in files:
            text = (DOC.parents[1] / "rldsl" / file).read_text()
            assert any(f'"{code}"' in text for code in its_codes), file


def test_every_code_of_a_check_is_in_the_document() -> None:
    folder = DOC.parents[1] / "rldsl/verify"
    used = {code for p in folder.glob("*.py") for code in re.findall(r'"(RL\d{4})"', p.read_text())}
    said = {code for _, its_codes, _ in table() for code in its_codes}
    assert used <= said, sorted(used - said)


def test_every_file_that_reports_a_code_is_in_the_document() -> None:
    folder = DOC.parents[1] / "rldsl/verify"
    reports = {f"verify/{p.name}" for p in folder.glob("*.py") if '"RL' in p.read_text()}
    said = {file for _, _, files in table() for file in files}
    assert reports and reports <= said, sorted(reports - said)
