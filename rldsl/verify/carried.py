"""Responses that continue in later steps: `generate(..., per_step=N)`, and the fetch of the prompts of several steps.

In: tables with sound references, a Fetch with `newest`, a Generate with `per_step`. Out: what is wrong with it. Rules:
- the prompts are those of this step and of the steps before it, one batch of a step for each iteration of their frame:
  the newest is what a fetch of the same step reads, and the stride is the number of batches that each step reads;
- there are as many steps as the longest response takes, so a response that begins has ended when its prompt leaves:
  none is lost, and none waits longer;
- both are at the top level of the step loop, so that every step continues what the one before it left;
- a response stays on the ranks that began it: its rows are divided by slots, the same in every step.
"""

from __future__ import annotations

from rldsl.plan.events import Fetch, Generate, Loop, split_buffer
from rldsl.verify.tables import Tables

MADE = {"ended": ("row", "bool"), "version": ("response", "f32")}  # value of such a generate -> extent, dtype


def wrong_fetch(t: Tables, e: Fetch) -> str:
    """What contradicts a fetch that reads batches again; "" if nothing does."""
    newest = t.frames[e.newest]
    source = [f for f, path in t.events if isinstance(f, Fetch) and e.newest in f.frames and not f.newest
              and f.data == e.data and len(path) == 1]
    if len(source) != 1 or len(e.frames) != 1 or newest.count != t.data[e.data].batch:
        return f"{e.newest} is not a batch of {e.data} that a step reads"
    if [split_buffer(b)[0] for b in e.reads] != [f"{e.newest}.lengths"]:
        return f"it must read the lengths of {e.newest} alone"
    plain = [path for f, path in t.events if isinstance(f, Fetch) and f.data == e.data and not f.newest
             and not any(isinstance(x, Loop) and x.over == e.data for x in path)]
    if any(len(path) != 1 for path in plain) or e.stride != len(plain):
        return f"its stride is {e.stride}, but a step reads {len(plain)} batches of {e.data}, or not the same number"
    frame = t.frames[e.frames[0]]
    shape = (frame.row_space, frame.present_in, frame.tokenizer, frame.chain[0].parent, frame.data,
             frame.selected_from or frame.picked_from, frame.count)
    if shape != (frame.id, frame.id, "", "", e.data, "", newest.count * frame.iterations):
        return f"frame {frame.id} does not have {frame.iterations} batches of {e.data}"
    return "" if _at_top(t, e) else "it is in a block"


def wrong_generate(t: Tables, e: Generate) -> str:
    """What contradicts a generate with `per_step`; "" if nothing does."""
    frame, prompts, spread = t.frames[e.frame], t.frames[e.prompts], t.spreads[e.spread]
    most = e.sampling.max_new_tokens
    if not any(isinstance(f, Fetch) and f.newest and e.prompts in f.frames for f, _ in t.events):
        return f"its prompts {e.prompts} are not those of several steps"
    if not 0 < e.per_step < most or prompts.iterations != -(-most // e.per_step):
        return (f"responses of up to {most} tokens, {e.per_step} in a step, do not take {prompts.iterations} steps")
    if frame.present_in != frame.id or frame.max_response_tokens != most:
        return f"frame {frame.id} does not say which of its rows there are, or has room for other than {most} tokens"
    if spread.balance_by != "slot" or spread.frames != (e.frame,):
        return f"spread {spread.id} may move a response to other ranks"
    if e.conversation is not None or e.cache_of or any(b.startswith(f"{e.frame}.cache@") for b in e.writes):
        return "it has an environment, or uses a KV cache of another step"
    return "" if _at_top(t, e) else "it is in a block"


def _at_top(t: Tables, e: Fetch | Generate) -> bool:
    return all(len(path) == 1 for x, path in t.events if x is e)
