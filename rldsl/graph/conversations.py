"""`env=` of `generate`: the environments that a model talks with, and the options of these conversations.

In: a call of `generate`. Out: a `Conversation`, or None without `env=`.
Errors: RL0107, RL0203, RL0205, RL0213, each with its position.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from rldsl.plan.payloads import Conversation
from rldsl.semantics import options
from rldsl.semantics.errors import BAD, Bad
from rldsl.semantics.levels import source_name
from rldsl.semantics.scope import Scope
from rldsl.semantics.values import EnvRef, FrameRef, describe
from rldsl.syntax import ast

if TYPE_CHECKING:
    from rldsl.graph.flow import FlowBuilder

ONLY_WITH_ENV = tuple(o for o in options.ENVIRONMENT if o != "max_tokens")  # this may mean `max_new_tokens`


def env_of(call: ast.Call) -> ast.Argument | None:
    """The argument `env=` of a call."""
    return next((a for a in call.args if a.name is not None and a.name.name == "env"), None)


def conversation(flow: FlowBuilder, call: ast.Call, prompts: FrameRef, scope: Scope) -> Conversation | None | Bad:
    """What `env=` and its options say; None for a call without."""
    env = env_of(call)
    given = [(a.name, a.value) for a in call.args if a.name is not None and a.name.name in options.ENVIRONMENT]
    given = [o for o in given if env is not None or o[0].name in ONLY_WITH_ENV]
    if env is None and given:
        return flow.errors.add("RL0107", f"`{given[0][0].name}` is an option of conversations", given[0][0].span,
                               help="add the environment: `env=NAME`")
    if prompts.frame.max_turns:
        return flow.errors.add("RL0213", "`generate` does not continue a conversation", call.args[0].span,
                               "its environments have ended",
                               help="raise `max_turns` of the call that made it, or generate from its prompts")
    if env is None:
        return None
    environments = _environments(flow, env.value, scope)
    if isinstance(environments, Bad):
        return BAD
    read = options.read(options.ENVIRONMENT, given, "`generate` with an environment", call.span, flow.exprs,
                        scope)
    if isinstance(read, Bad):
        return BAD
    frame, where = prompts.frame, call.args[0].span
    if prompts.contents != "prompts" or frame.tokenizer or frame.chain[-1].id not in flow.columns:
        return flow.errors.add("RL0213", "a conversation begins with prompts of data", where,
                               f"`{source_name(frame)}` contains others",
                               help="`reset` gets the columns of a row of data: use `data.next()`, or a selection "
                                    "of it")
    talk = Conversation(environments, **cast(dict[str, Any], read))
    longest = frame.max_prompt_tokens + frame.max_response_tokens
    if talk.max_tokens <= longest:
        at = next(value.span for name, value in given if name.name == "max_tokens")
        return flow.errors.add("RL0205", "`max_tokens` leaves no room for a response", at,
                               f"a prompt has up to {longest} tokens",
                               help=f"raise it above {longest}: it counts the prompt, what the environment says "
                                    "and what the model says; or lower `max_prompt_tokens` of the data")
    return talk


def _environments(flow: FlowBuilder, value: ast.Expr, scope: Scope) -> tuple[str, ...] | Bad:
    """The classes that `env=` names: one, or a list."""
    found: list[str] = []
    for item in value.items if isinstance(value, ast.ListOf) else (value,):
        ref = flow.exprs.build(item, scope)
        if isinstance(ref, Bad):
            return BAD
        if not isinstance(ref, EnvRef):
            return flow.errors.add("RL0203", f"`env` must be an environment, not {describe(ref)}", item.span,
                                   help="declare it: `use py \"envs.py\" (Calculator: env)`")
        if ref.id in found:
            return flow.errors.add("RL0205", "`env` names this environment twice", item.span,
                                   help="remove it: a row of data names its environment in the column `env`")
        found.append(ref.id)
    if not found:
        return flow.errors.add("RL0205", "`env` names no environment", value.span,
                               help="name a class that `use py` declares: `env=Calculator`")
    return tuple(found)
