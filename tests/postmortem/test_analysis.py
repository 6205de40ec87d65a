"""What a post-mortem finds, from positions made by hand: who waits for whom, and who is to blame."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from rldsl.plan.events import EVERY_ITERATION, Fetch, Generate, Loop, Realloc
from rldsl.postmortem.analysis import Culprit, Findings, Wait, analyze, order_key, rank_traces
from rldsl.postmortem.dumps import EventRun, Heartbeat, RankDump, RankPosition, RingEntry
from rldsl.postmortem.findings_text import notes, place, report, title
from rldsl.postmortem.wait_order import END, START, WaitOrder
from tests.postmortem.hand import (
    FETCH,
    GENERATE,
    LENGTHS,
    PLAN,
    REALLOC,
    SAVE,
    SCORE,
    TRAIN,
    TRANSFER,
    TURN,
    at,
    dump,
    partners,
    sign,
)


def found(positions: Mapping[int, RankPosition], signs: Mapping[int, Heartbeat] | None = None,
          **first: object) -> Findings:
    """positions: of those that left dumps. first: of the dump of the first rank that has one."""
    dumps = {r: dump(r, s, **(first if r == min(positions) else {})) for r, s in positions.items()}
    return analyze(PLAN, rank_traces(8, dumps, signs or {}))


def everywhere(position: RankPosition, **others: RankPosition) -> dict[int, RankPosition]:
    return {r: others.get(f"r{r}", position) for r in range(8)}


def blamed(findings: Findings) -> dict[int, str]:
    return {c.rank: c.why for c in findings.culprits}


# ---------------------------------------------------------------------------------------------------- order


def test_places_are_in_the_order_of_a_run() -> None:
    order, run = WaitOrder(PLAN), []
    for step in (1, 2, 10):
        for event in (FETCH, GENERATE, LENGTHS, TRANSFER, SCORE, TRAIN, REALLOC):
            run.append(EventRun(event, (step,)))
        run += [EventRun(TURN, (step, turn)) for turn in (1, 2, 10)]
        run += [EventRun(SAVE, (step,))]
    places = [place for moment in run for place in (order.place(moment), order.place(moment, after=True))]
    assert places == sorted(places) and len(set(places)) == len(places)
    assert START < places[0] and places[-1] < END == order.place(None)


def test_what_the_plan_does_not_have_is_before_everything() -> None:
    assert WaitOrder(PLAN).place(EventRun(99, (1,))) == START
    nothing = analyze(PLAN, rank_traces(8, {}, {}))
    assert all(order_key(WaitOrder(PLAN), t) == START for t in nothing.traces)


@pytest.mark.parametrize("event, rank, others", [
    (FETCH, 0, ()), (GENERATE, 0, (2,)), (GENERATE, 3, (1,)), (GENERATE, 4, ()), (LENGTHS, 7, (0, 1, 2, 3, 4, 5, 6)),
    (TRANSFER, 1, (4, 5, 6, 7)), (TRANSFER, 5, (0, 1, 2, 3)), (SCORE, 4, (5, 6, 7)), (TRAIN, 2, (0, 1, 3)),
    (TRAIN, 6, ()), (REALLOC, 4, (0, 1, 2, 3, 5, 6, 7)), (REALLOC, 1, (4, 5, 6, 7))])
def test_partners(event: int, rank: int, others: tuple[int, ...]) -> None:
    order = WaitOrder(PLAN)
    assert partners(order, order.events[event], rank) == others


# ---------------------------------------------------------------------------------------------------- waits


def test_one_rank_has_not_reached_an_event() -> None:
    findings = found(everywhere(at(LENGTHS, 3), r4=at(TURN, 2, 3, call="")))
    assert findings.waits == (Wait((0, 1, 2, 3, 5, 6, 7), (4,), EventRun(LENGTHS, (3,)), "not reached"),)
    assert blamed(findings) == {4: "waited for"} and title(findings) == "rank 4 blocks other ranks"
    assert notes(findings) == (
        "ranks 0-3,5-7 wait for rank 4 in event 2 (lengths gen.lengths, p.rlf:6:3, because the rows of gen are divided by"
        " length) of step 3, which rank 4 has not reached: it is in event 7 (judge.values, p.rlf:10:5) of step 2,"
        " iteration 3 for 41 s",)
    assert place(findings) == "event 7 (judge.values, p.rlf:10:5)"


def test_a_chain_ends_at_the_one_who_waits_for_nobody() -> None:
    """4-7 wait for what 0-3 send; 0, 1 and 3 wait for 2, which generates."""
    arriving = at(SCORE, 3, phase="waits", awaits=EventRun(TRANSFER, (3,)), call="wait")
    findings = found(everywhere(arriving, r0=at(GENERATE, 3, call="recv"), r1=at(GENERATE, 3, call="recv"),
                                r2=at(GENERATE, 3, call=""), r3=at(GENERATE, 3, call="")))
    assert {(w.ranks, w.on, w.kind) for w in findings.waits} == {
        ((4, 5, 6, 7), (0, 1, 2, 3), "not reached"), ((0,), (2,), "inside"), ((1,), (3,), "inside")}
    assert blamed(findings) == {2: "waited for", 3: "waited for"}
    assert title(findings) == "ranks 2-3 block other ranks"
    assert "where they wait for what" not in " ".join(notes(findings))


def test_a_post_is_not_waited_for_where_it_is_issued() -> None:
    findings = found(everywhere(at(GENERATE, 1, call=""), **{f"r{r}": at(TRANSFER, 1, call="") for r in range(4, 8)}))
    assert findings.waits == () and findings.culprits == () and title(findings) == ""
    assert "no rank is known to be at fault" in report(PLAN, findings)


def test_who_only_sends_waits_for_the_receiver() -> None:
    sending = at(REALLOC, 1, phase="waits", awaits=EventRun(REALLOC, (1,)), call="wait")
    findings = found(everywhere(sending, **{f"r{r}": at(SCORE, 1, call="") for r in range(4, 8)}))
    assert findings.waits == (Wait((0, 1, 2, 3), (4, 5, 6, 7), EventRun(REALLOC, (1,)), "not reached"),)


def test_a_python_function_keeps_the_others_in_the_same_event() -> None:
    findings = found(everywhere(at(TRAIN, 5), r1=at(TRAIN, 5, phase="calls", function="judge", call="")))
    assert [(w.ranks, w.on, w.kind) for w in findings.waits if 0 in w.ranks] == [((0, 2, 3), (1,), "inside")]
    assert blamed(findings) == {1: "waited for"}
    assert "in the Python function `judge` for 41 s" in notes(findings)[0]


def test_who_is_between_two_events_waits_for_nobody() -> None:
    findings = found(everywhere(at(LENGTHS, 2), r0=at(GENERATE, 2, phase="ends", call="")))
    assert blamed(findings) == {0: "waited for"} and "it is past event 1" in notes(findings)[0]


def test_the_end_of_the_run() -> None:
    findings = found(everywhere(RankPosition(EventRun(SAVE, (9,)), "over", 3.0), r6=at(TURN, 9, 1, call="")))
    assert findings.waits == (Wait((0, 1, 2, 3, 4, 5, 7), (6,), None, "end"),)
    (note,) = notes(findings)
    assert note.startswith("ranks 0-5,7 are at the end of the run and wait for rank 6: it is in event 7")


def test_all_at_the_end_wait_for_nobody() -> None:
    assert found(everywhere(RankPosition(None, "over"))).waits == ()


# ---------------------------------------------------------------------------------------------------- circles


def test_ranks_that_wait_for_each_other_inside_one_event() -> None:
    findings = found({r: at(TRAIN, 4) for r in range(4)} | {r: at(TURN, 3, 1, call="") for r in range(4, 8)})
    assert findings.waits == (Wait((0, 1, 2, 3), (0, 1, 2, 3), EventRun(TRAIN, (4,)), "each other"),)
    assert blamed(findings) == dict.fromkeys(range(4), "each other")
    assert title(findings) == "ranks 0-3 wait for each other"
    assert notes(findings)[0] == "ranks 0-3 wait for each other inside event 5 (actor.train, p.rlf:8:3) of step 4"


def test_who_waits_for_a_circle_is_not_part_of_it() -> None:
    arriving = at(TURN, 4, 1, phase="waits", awaits=EventRun(REALLOC, (4,)), call="wait")
    findings = found({r: at(TRAIN, 4) for r in range(4)} | {r: arriving for r in range(4, 8)})
    assert blamed(findings) == dict.fromkeys(range(4), "each other")
    assert [w.ranks for w in findings.waits if w.kind == "not reached"] == [(4, 5, 6, 7)]


def test_two_circles() -> None:
    """The stages of each replica wait for each other, the replicas do not."""
    findings = found({r: at(GENERATE, 4, call="recv") if r < 4 else at(TURN, 3, 1, call="") for r in range(8)})
    assert [w.ranks for w in findings.waits] == [(0, 2), (1, 3)]
    assert blamed(findings) == dict.fromkeys(range(4), "each other")


@pytest.mark.parametrize("culprit", range(8))
@pytest.mark.parametrize("behind", [at(GENERATE, 3, call=""), at(TURN, 2, 1, phase="ends", call=""), RankPosition()])
def test_no_circle_goes_through_two_events(culprit: int, behind: RankPosition) -> None:
    """Whatever the ranks' positions are, waits for what others have not reached lead to one who waits for none."""
    positions = [at(LENGTHS, 3), at(SCORE, 3, phase="waits", awaits=EventRun(TRANSFER, (3,)), call="wait"),
                 at(TRAIN, 3)]
    findings = found({r: behind if r == culprit else positions[(r + culprit) % 3] for r in range(8)})
    assert "each other" not in {c.why for c in findings.culprits} and culprit in blamed(findings)


# ---------------------------------------------------------------------------------------------------- the silent


def test_a_stopped_rank_is_to_blame_and_its_last_sign_is_not_believed() -> None:
    """It said last that it waited for others; that does not make these the culprits."""
    positions = everywhere(at(LENGTHS, 3))
    del positions[4]
    findings = found(positions, {4: sign(4, at(TURN, 2, 3), process="stopped")})
    assert findings.culprits == (Culprit(4, "stopped"),)
    assert [(w.on, w.kind) for w in findings.waits] == [((4,), "not reached")]
    (note,) = notes(findings)
    assert "has not reached" not in note and note.endswith(
        "it was last seen in event 7 (judge.values, p.rlf:10:5) of step 2, iteration 3, 40 s before the others; its "
        "process is suspended")


def test_a_rank_that_stopped_inside_the_event() -> None:
    positions = everywhere(at(LENGTHS, 3))
    del positions[4]
    findings = found(positions, {4: sign(4, at(LENGTHS, 3), process="gone")})
    assert [(w.ranks, w.on, w.kind) for w in findings.waits] == [((0, 1, 2, 3, 5, 6, 7), (4,), "inside")]
    assert title(findings) == "rank 4 exited without an error message"


def test_what_others_have_ended_tells_how_far_a_lost_rank_has_come() -> None:
    positions = everywhere(at(SCORE, 3), **{f"r{r}": at(TRAIN, 3) for r in range(4)})
    del positions[1]
    findings = found(positions, {1: sign(1, at(GENERATE, 2))})
    assert findings.traces[1].reached == EventRun(LENGTHS, (3,))
    assert "and has reached event 2 (lengths gen.lengths, p.rlf:6:3) of step 3 since then" in " ".join(notes(findings))
    assert place(findings) == "event 2 (lengths gen.lengths, p.rlf:6:3)"


@pytest.mark.parametrize("last, reached", [(at(GENERATE, 2), EventRun(TRAIN, (2,))), (at(TRAIN, 2, phase="ends"), None),
                                           (RankPosition(), None)])
def test_the_step_before_counts_for_who_was_there(last: RankPosition, reached: EventRun | None) -> None:
    positions = {r: at(GENERATE, 3) for r in range(8) if r != 1}
    assert found(positions, {1: sign(1, last)}).traces[1].reached == reached


def test_the_dead_come_before_the_silent() -> None:
    positions = {r: at(LENGTHS, 3) for r in range(6)}
    findings = found(positions, {6: sign(6, at(TURN, 2, 3)), 7: sign(7, at(TURN, 2, 3), process="gone")})
    assert list(blamed(findings).items()) == [(7, "gone"), (6, "silent")]
    assert title(findings) == "rank 7 exited without an error message; rank 6 has no heartbeat"


def test_a_silent_rank_whose_process_runs_is_to_blame_only_if_others_wait_for_it() -> None:
    """It may be in a call that holds Python's lock, and innocent."""
    busy = sign(5, at(SCORE, 3, call=""), process="running")
    positions = {r: at(TRAIN, 3, call="" if r == 2 else "all_reduce") for r in range(4)} | {r: at(SCORE, 3, call="")
                                                                                         for r in (4, 6, 7)}
    assert blamed(found(positions, {5: busy})) == {2: "waited for"}
    waiting = positions | {r: at(SCORE, 3) for r in (4, 6, 7)} | {2: at(TRAIN, 3, call="")}
    assert blamed(found(waiting, {5: busy})) == {2: "waited for", 5: "silent"}
    alone = {r: at(SCORE, 3, call="") for r in range(8) if r != 5}
    assert blamed(found(alone, {5: busy})) == {5: "silent"}


def test_a_rank_that_left_nothing_at_all() -> None:
    findings = found({r: at(LENGTHS, 3) for r in range(7)})
    assert blamed(findings) == {7: "silent"}
    assert "rank 7 left no dump" in report(PLAN, findings)


def test_a_rank_without_a_dump_that_spoke_until_the_end_is_not_to_blame() -> None:
    """Its disk was full, perhaps."""
    positions = everywhere(at(LENGTHS, 3), r4=at(TURN, 2, 3, call=""))
    del positions[0]
    assert blamed(found(positions, {0: sign(0, at(LENGTHS, 3), silent=0.0, time=999.9)})) == {4: "waited for"}


# ---------------------------------------------------------------------------------------------------- words


def test_own_words_come_before_all_guesses() -> None:
    findings = found(everywhere(at(LENGTHS, 3), r0=at(TRAIN, 2, call="")), first=True, code="RL0775",
                     reason="`judge` raised: ValueError: no answer")
    assert blamed(findings) == {0: "failed"}
    assert title(findings) == "rank 0 failed: `judge` raised: ValueError: no answer"
    assert "error messages\n  RL0775 `judge` raised" in report(PLAN, findings)


def test_who_lost_contact_first_is_no_culprit() -> None:
    positions = everywhere(at(LENGTHS, 3), r4=at(TURN, 2, 3, call=""))
    findings = found(positions, first=True, code="RL0709", reason="a guess")
    assert blamed(findings) == {4: "waited for"} and "error messages" not in report(PLAN, findings)


def test_where_python_runs_ahead_of_what_it_posts() -> None:
    """On GPUs a rank may be events further than the one whose message it needs."""
    ring = tuple(RingEntry(9.0, EventRun(e, (3,)), "begins") for e in (LENGTHS, TRANSFER, TRAIN))
    positions = everywhere(at(TRAIN, 3, call=""), **{f"r{r}": at(TURN, 2, 1, call="") for r in range(4, 8)})
    plain = {r: dump(r, s) for r, s in positions.items()}
    late: dict[int, RankDump] = {r: dump(r, s, late=True, ring=ring if r < 4 else ()) for r, s in positions.items()}
    assert analyze(PLAN, rank_traces(8, plain, {})).waits == ()
    findings = analyze(PLAN, rank_traces(8, late, {}))
    assert findings.waits == (Wait((0, 1, 2, 3), (4, 5, 6, 7), EventRun(LENGTHS, (3,)), "not reached"),)
    assert blamed(findings) == dict.fromkeys(range(4, 8), "waited for")


def test_many_groups_are_cut_short() -> None:
    positions = {r: at(GENERATE, r + 1, call="") for r in range(7)} | {7: at(LENGTHS, 9)}
    findings = found(positions)
    (wait,) = (w for w in findings.waits if 7 in w.ranks)
    assert wait.on == tuple(range(7)) and "; ..." in " ".join(notes(findings))
    assert notes(findings, most=1)[1:] == (f"and {len(notes(findings, most=99)) - 1} more",)


# ---------------------------------------------------------------------------------------------------- the start


def starts(call: str = "", doing: str = "") -> RankPosition:
    return RankPosition(None, "start-up", 41.0, None, doing, call)


def test_a_rank_that_is_slow_to_start_is_named() -> None:
    slow = starts(doing="opening the data source `rows`")
    findings = found(everywhere(starts("all_reduce"), r3=slow), code="RL0709")
    assert blamed(findings) == {3: "waited for"} and title(findings) == "rank 3 blocks other ranks"
    assert findings.waits == (Wait((0, 1, 2, 4, 5, 6, 7), (3,), None, "start-up"),)
    assert place(findings) == "start-up"
    assert notes(findings) == ("ranks 0-2,4-7 wait for rank 3 before the first event: it is at the start, before the "
                               "first event, opening the data source `rows` for 41 s",)


def test_ranks_that_all_start_blame_nobody() -> None:
    assert found(everywhere(starts("all_reduce"))).culprits == ()
    assert found(everywhere(starts(doing="reading the weights"))).waits == ()


def test_a_rank_that_never_came_is_waited_for() -> None:
    positions = {r: s for r, s in everywhere(starts("broadcast")).items() if r != 5}
    findings = found(positions)
    assert blamed(findings) == {5: "silent"} and findings.waits[0].on == (5,)


@pytest.mark.parametrize("process, code, why", [
    ("stopped", "", "stopped"), ("stopped", "RL0709", "stopped"), ("", "", "silent")])
def test_a_rank_that_wakes_later_stays_to_blame(process: str, code: str, why: str) -> None:
    positions = everywhere(at(LENGTHS, 3), r4=at(TURN, 2, 3, call=""))
    dumps = {r: dump(r, s, code=code if r == 4 else "") for r, s in positions.items()}
    signs = {r: sign(r, s, process=process if r == 4 else "", silent=2.5 if r == 4 else 0.0)
             for r, s in positions.items()}
    findings = analyze(PLAN, rank_traces(8, dumps, signs))
    assert blamed(findings) == {4: why}


@pytest.mark.parametrize("more, code", [({"process": "running"}, ""), ({"process": "stopped", "silent": 0.0}, ""),
                                        ({"process": "stopped"}, "RL0775")])
def test_a_rank_that_was_not_away_speaks_for_itself(more: Mapping[str, object], code: str) -> None:
    positions = everywhere(at(LENGTHS, 3), r4=at(TURN, 2, 3, call=""))
    dumps = {r: dump(r, s, code=code if r == 4 else "", first=bool(code) and r == 4) for r, s in positions.items()}
    findings = analyze(PLAN, rank_traces(8, dumps, {4: sign(4, positions[4], **more)}))
    assert blamed(findings) == {4: "failed" if code else "waited for"}


def test_a_step_that_runs_ahead_is_named() -> None:
    """With a lag, turns begin before the first step, and an event works for a later step than those around it."""
    loop = PLAN.body[0]
    assert isinstance(loop, Loop)
    late = replace(PLAN, body=(replace(loop, first=0, body=tuple(
        replace(x, ahead=1) if isinstance(x, Fetch | Generate) else replace(x, ahead=EVERY_ITERATION)
        if isinstance(x, Realloc) else x for x in loop.body)),))

    def says(event: int, turn: int) -> str:
        return report(late, analyze(late, rank_traces(8, {0: dump(0, at(event, turn))}, {})))

    assert "p.rlf:6:3) of step 3 (ahead, during step 2)" in says(GENERATE, 2)
    assert "p.rlf:6:3) of step 1 (ahead)" in says(GENERATE, 0)
    assert "p.rlf:8:3) of step 2," in says(TRAIN, 2)
    assert "p.rlf:7:3) before step 1" in says(REALLOC, 0)
