"""The findings of a post-mortem for a person. In: `Findings`. Out: the title, place and notes of a message;
the report that `rlc postmortem` prints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from rldsl.plan.events import Event
from rldsl.plan.model import Plan
from rldsl.plan.naming import describe_event
from rldsl.plan.notation import ranks_text
from rldsl.postmortem.analysis import LOST_CONTACT, Findings, RankTrace, Wait, is_lost, order_key
from rldsl.postmortem.dumps import EventRun, RankPosition
from rldsl.postmortem.wait_order import WaitOrder

TITLES = {
    "gone": ("exited without an error message", "exited without an error message"),
    "stopped": ("is suspended: its process exists but does not run",
                "are suspended: their processes exist but do not run"),
    "silent": ("has no heartbeat", "have no heartbeat"),
    "waited for": ("blocks other ranks", "block other ranks"),
    "each other": ("waits for itself", "wait for each other"),
}
PROCESS = {"gone": "gone", "stopped": "suspended", "running": "running"}


def event_text(event: Event, why: bool = False) -> str:
    """why: with the reason for which the compiler inserted it."""
    text = describe_event(event)
    because = f", because {text.reason}" if why and text.reason else ""
    return f"event {event.id} ({', '.join(x for x in (text.title, event.at) if x)}{because})"


def title(findings: Findings) -> str:
    """Which ranks are at fault, and why; "" if none is known to be."""
    parts = []
    for why in dict.fromkeys(c.why for c in findings.culprits):
        mine = [c.rank for c in findings.culprits if c.why == why]
        what = TITLES[why][len(mine) > 1] if why in TITLES else f"failed: {findings.traces[mine[0]].reason}"
        parts.append(f"{_ranks(mine)} {what}")
    return "; ".join(parts)


def place(findings: Findings) -> str:
    """Where those who are to blame are, as the place of a message."""
    blamed = [findings.traces[c.rank] for c in findings.culprits]
    spots = (t.reached or (t.position.at if t.position else None) for t in blamed)
    return ", ".join(list(dict.fromkeys(_at(findings.order, at) if at else "start-up" for at in spots))[:3])


def notes(findings: Findings, most: int = 5) -> tuple[str, ...]:
    """Which ranks wait for which, those that wait for culprits first; then where the culprits are, if no line says
    it."""
    text, blamed = _Sentences(findings), {c.rank for c in findings.culprits}
    lines = [text.wait(w) for w in sorted(findings.waits, key=lambda w: not blamed & set(w.on))]
    lines += text.places([findings.traces[r] for r in sorted(blamed - text.located)])
    return (*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else []))


def report(plan: Plan, findings: Findings) -> str:
    """The whole text: which ranks are at fault, which wait, where each rank is, and the messages of those that
    failed."""
    text, header = _Sentences(findings), plan.header
    lines = [f"{header.program}, flow {header.flow}, {header.world} rank{'s' * (header.world > 1)}", ""]
    lines += [title(findings) or "no rank is known to be at fault", ""]
    lines += [*([text.wait(w) for w in findings.waits] or ["no rank is known to wait for another"]), ""]
    lines += ["where each rank is, the furthest behind first"]
    lines += [f"  {x}" for x in text.places(findings.traces)]
    lines += [f"  rank {t.rank} is at {t.line}" for c in findings.culprits[:8] if (t := findings.traces[c.rank]).line]
    messages = {f"{t.code} {t.reason}": None for t in findings.traces if t.code not in ("", LOST_CONTACT)}
    lines += ["", "error messages", *(f"  {message}" for message in messages)] if messages else []
    return "\n".join(lines) + "\n"


class _Sentences:
    """Sentences about one set of findings. located: the ranks whose places some sentence has stated."""

    def __init__(self, findings: Findings):
        self._order, self._traces = findings.order, findings.traces
        self._dumped = any(t.dump for t in findings.traces)
        self._end = max((t.time for t in findings.traces), default=0.0)
        self.located: set[int] = set()

    def wait(self, wait: Wait) -> str:
        ranks, on, verb = _ranks(wait.ranks), _ranks(wait.on), "wait" if len(wait.ranks) > 1 else "waits"
        if wait.kind == "start-up":
            return f"{ranks} {verb} for {on} before the first event{self._on(wait)}"
        if wait.at is None:
            be = "are" if verb == "wait" else "is"
            return f"{ranks} {be} at the end of the run and {verb} for {on}{self._on(wait)}"
        event = self._event(wait.at, why=True)
        if wait.kind == "each other":
            return f"{on} wait for each other inside {event}"
        if wait.kind == "inside":
            return f"{ranks} {verb} for {on} inside {event}{self._on(wait)}"
        sure = not any(is_lost(self._traces[q]) for q in wait.on)
        behind = f", which {on} {'have' if len(wait.on) > 1 else 'has'} not reached" if sure else ""
        return f"{ranks} {verb} for {on} in {event}{behind}{self._on(wait)}"

    def places(self, traces: Sequence[RankTrace]) -> list[str]:
        """Where ranks are, those that have come least far first; ranks that are at one place in one line."""
        return [f"{_ranks([t.rank for t in mine])} {self._is(mine)}" for mine in self._groups(traces)]

    def _on(self, wait: Wait, most: int = 3) -> str:
        """Where the ranks are that others wait for, unless a sentence has stated it."""
        new = [q for q in wait.on if q not in self.located]
        self.located.update(new)
        groups = list(self._groups([self._traces[q] for q in new]))
        subject = ["it" if len(wait.on) == 1 else _ranks([t.rank for t in mine]) for mine in groups]
        clauses = [f"{who} {self._is(mine)}" for who, mine in zip(subject[:most], groups[:most], strict=True)]
        return ": " + "; ".join([*clauses, *(["..."] if len(groups) > most else [])]) if clauses else ""

    def _groups(self, traces: Sequence[RankTrace]) -> Iterable[list[RankTrace]]:
        found: dict[Any, list[RankTrace]] = {}
        for t in sorted(traces, key=lambda t: (order_key(self._order, t), t.rank)):
            s = t.position
            at = (s.at, "begins" if s.phase == "resumes" else s.phase, s.awaits, s.function, s.call) if s else ()
            found.setdefault((at, t.dump, is_lost(t), t.process, t.reached), []).append(t)
        return found.values()

    def _is(self, mine: Sequence[RankTrace]) -> str:
        one, many = mine[0], len(mine) > 1
        if one.position is None:
            return "left no dump and no heartbeat"
        if one.dump or not (is_lost(one) or self._dumped):
            since = f" for {_seconds(max(t.position.seconds for t in mine if t.position))}"
            return f"{'are' if many else 'is'} {self._spot(one.position, many, since)}"
        last = replace(one.position, call="", awaits=None)
        text = f"{'were' if many else 'was'} last seen {self._spot(last, many, '')}"
        if (ago := self._end - one.time) >= 1:
            text += f", {_seconds(ago)} before the others"
        if one.reached is not None:
            text += f", and {'have' if many else 'has'} reached {self._event(one.reached)} since then"
        of = "their processes are" if many else "its process is"
        return text + (f"; {of} {PROCESS[one.process]}" if one.process else "")

    def _spot(self, position: RankPosition, many: bool, since: str) -> str:
        if position.phase == "over":
            return "at the end of the run"
        if position.at is None:
            doing = f", {position.function}{since}" if position.function else ""
            return f"at the start, before the first event{doing}"
        event = self._event(position.at)
        if position.phase == "ends":
            return f"past {event}"
        if position.phase == "calls":
            return f"in {event}, in the Python function `{position.function}`{since}"
        if position.phase == "waits" and position.awaits not in (None, position.at):
            brings = self._event(position.awaits, near=position.at)
            return f"in {event}, where {'they wait' if many else 'it waits'} for the data of {brings}{since}"
        return f"in {event}{f', in {position.call}' if position.call else ''}{since}"

    def _event(self, at: EventRun | None, why: bool = False, near: EventRun | None = None) -> str:
        """near: what has just been named, whose step need not be repeated."""
        event = self._order.events.get(at.event) if at else None
        if at is None or event is None:
            return "an event that is not in the plan"
        step = self._step(at)
        return event_text(event, why) + (f" {step}" if step and (near is None or step != self._step(near)) else "")

    def _step(self, at: EventRun) -> str:
        """"of step 3": the step that an event works for, and its iterations; "" outside the step loop. With a lag, the
        iterations of the loop begin before the first step."""
        event = self._order.events.get(at.event)
        if event is None or not at.turns:
            return ""
        iteration, *inner = at.turns
        ahead = max(event.ahead, 0)
        step = f"of step {iteration + ahead}" if iteration + ahead > 0 else "before step 1"
        early = f" (ahead, during step {iteration})" if ahead and iteration > 0 else " (ahead)" if ahead else ""
        return step + (f", iteration {'.'.join(map(str, inner))}" if inner else "") + early


def _at(order: WaitOrder, at: EventRun) -> str:
    event = order.events.get(at.event)
    return event_text(event) if event else ""


def _ranks(ranks: Sequence[int]) -> str:
    text, count = ranks_text(ranks), len(ranks)
    if len(parts := text.split(",")) > 8:
        return f"{count} ranks ({','.join(parts[:6])}, ...)"
    return f"rank{'s' * (count > 1)} {text}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
