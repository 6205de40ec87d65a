"""`rlc report`: a plan as a page for a browser.

In: the path of a plan, a cluster's file or preset, a recorded timeline. Out: the text of one HTML file that needs no
other. Errors: those of reading and verifying a plan, of reading a cluster or a timeline (RL0098), and RL0096 for a plan
that the cluster is not for.
"""

from __future__ import annotations

from pathlib import Path

from rldsl import api
from rldsl.clusters import Cluster, find, preset
from rldsl.commands.show import source_text
from rldsl.diag import fail
from rldsl.pages import Given, page
from rldsl.pages.recorded import read
from rldsl.plan.codec import decode, plan_id
from rldsl.plan.model import Plan
from rldsl.plan.verify import verify
from rldsl.simulate import simulate

ASSUMED = "h100x8"


def report(file: str, cluster: str | None = None, trace: str | None = None) -> str:
    """cluster: None takes as many nodes of the preset `ASSUMED` as the plan needs, and the page says so."""
    data = api.read_bytes(file)
    plan = decode(data, file)
    proof = verify(plan)
    machine = find(cluster) if cluster else assumed(plan)
    recorded = read(text_of(trace), trace, plan) if trace else None
    texts = ((path, source_text(path, digest, Path(file).parent)) for path, digest in plan.header.sources)
    return page(Given(plan, plan_id(data), proof, machine, cluster is None, simulate(plan, machine), recorded=recorded,
                      sources={path: text for path, text in texts if text}))


def assumed(plan: Plan) -> Cluster:
    per_node = int(ASSUMED.rpartition("x")[2])
    found = preset(f"{ASSUMED.rpartition('x')[0]}x{-(-plan.header.world // per_node) * per_node}")
    assert found is not None
    return found


def text_of(trace: str) -> str:
    try:
        return Path(trace).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise fail("RL0091", f"no such file: {trace}", place=trace, help="`rlc run --trace FILE` writes it") from None
    except UnicodeDecodeError:
        raise fail("RL0098", "this is no timeline", place=trace, notes=("it is not UTF-8 text",)) from None
    except OSError as error:
        raise fail("RL0092", f"cannot read {trace}: {error.strerror}", place=trace) from None
