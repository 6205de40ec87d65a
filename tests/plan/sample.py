"""A small GRPO-like plan on 4 ranks, written by hand."""

from __future__ import annotations

from dataclasses import replace

from rldsl.plan.events import (
    Compute,
    When,
    Fetch,
    Free,
    Generate,
    Infer,
    Lengths,
    Load,
    Log,
    Loop,
    Realloc,
    Sampling,
    Save,
    Train,
    Transfer,
)
from rldsl.plan.expr import Node, Program
from rldsl.plan.model import (
    FORMAT,
    Data,
    Frame,
    Function,
    Group,
    Header,
    Layout,
    Mesh,
    Model,
    Optimizer,
    ParamSpec,
    Plan,
    Space,
    Split,
    Spread,
    Value,
)
from rldsl.plan.projection import rank_classes
from rldsl.reshard.planning import plan_reshard
from rldsl.reshard.summary import summary


def grpo() -> Plan:
    """Generation on ranks 0-3 (dp=4), training on 0-1 (tp=2), the reference on 2-3 (dp=2)."""
    meshes = (Mesh("all", ((0, 4),)), Mesh("fit", ((0, 2),)), Mesh("ref", ((2, 4),)))
    layouts = (Layout("L1", "fit", tp=2), Layout("L2", "all", dp=4), Layout("L3", "ref", dp=2))
    spreads = (
        Spread("s0", "all", granularity="all", balance_by="count"),
        Spread("s1", "all", "L2", ("prompt",), "prompt", "count"),
        Spread("s2", "all", granularity="all", balance_by="count"),
        Spread("s3", "ref", "L3", ("gen",)),
        Spread("s4", "all", "L2", ("gen",), "prompt"),
        Spread("s5", "fit", "L1", ("gen",), minibatches=2, shuffle=True),
    )
    params = (
        ParamSpec("embed.weight", (10, 8), "ends", split=Split(0, ((10, 1),)), style="vocab"),
        ParamSpec("layers.{}.up.weight", (12, 8), "layer", split=Split(0, ((4, 3),)), style="colwise"),
        ParamSpec("norm.weight", (8,), "last"),
    )
    actor = Model("actor", "causal_lm", "models/a", "float32", params, 2, "c0", "L1", Optimizer(1e-6), 20)
    models = (actor, replace(actor, name="ref", train_layout="", optimizer=None, planned_updates=0))
    moved = summary(plan_reshard(actor, layouts[0], meshes[1], layouts[1], meshes[0], 4), actor)
    spaces = (Space("prompt", 8), Space("gen", 32, "prompt", 4))
    frames = (Frame("prompt", "prompt", "tasks", 16, 0), Frame("gen", "gen", "tasks", 16, 8))
    values = (
        *(Value(f"{f}.tokens", f, "token", "tokens", "i64") for f in ("prompt", "gen")),
        *(Value(f"{f}.lengths", f, "seq", "lengths", "i64") for f in ("prompt", "gen")),
        Value("prompt.columns", "prompt", "seq", "columns", "text"),
        Value("gen.logprobs", "gen", "token", "response"),
        Value("gen.finished", "gen", "seq", "row", "bool"),
        Value("ref_lp", "gen", "token", "response"),
        Value("adv", "gen", "seq", "row"),
        Value("reward", "", "batch", "batch"),
        Value("actor.train/loss", "", "batch", "batch"),
    )
    programs = (
        Program(
            "adv",
            (
                Node("py", (), "seq", "gen", (("function", "exact"), ("frame", "gen"))),
                Node("mean", (0,), "prompt", "prompt", (("to", "prompt"),)),
                Node("sub", (0, 1), "seq", "gen"),
                Node("mean", (0,), attrs=(("to", "batch"),)),
            ),
            (("adv", 2), ("reward", 3)),
        ),
        Program(
            "pg",
            (
                Node("input", (), "token", "gen", (("name", "logprobs"),)),
                Node("input", (), "token", "gen", (("name", "old"),)),
                Node("input", (), "seq", "gen", (("name", "adv"),)),
                Node("input", (), "token", "gen", (("name", "ref"),)),
                Node("sub", (0, 1), "token", "gen"),
                Node("exp", (4,), "token", "gen"),
                Node("mul", (5, 2), "token", "gen"),
                Node("sub", (6, 3), "token", "gen"),
                Node("mean", (7,), attrs=(("to", "batch"),)),
            ),
            (("loss", 8),),
        ),
    )
    groups = (
        Group("g0", "tp", "L1"),
        Group("g1", "mesh", "L1"),
        Group("g2", "dp", "L2"),
        Group("g3", "mesh", "L2"),
        Group("g4", "dp", "L3"),
        Group("g5", "mesh", "L3"),
        Group("g6", "mesh", mesh="all"),
        Group("g7", "mesh", mesh="fit"),
    )
    prompt = ("prompt.tokens@s0", "prompt.lengths@s0", "prompt.columns@s0")
    step = (
        Fetch(id=3, mesh="all", writes=prompt, at="grpo.rlf:8", data="tasks", frames=("prompt",)),
        Realloc(
            id=4,
            mesh="all",
            reads=("actor@L1",),
            writes=("actor@L2",),
            because="gen reads actor on L2",
            bytes=moved.bytes,
            model="actor",
            src="L1",
            dst="L2",
            messages=moved.messages,
            digest=moved.digest,
        ),
        Generate(
            id=5,
            mesh="all",
            reads=("actor@L2", "prompt.tokens@s0"),
            writes=("gen.tokens@s1", "gen.logprobs@s1", "gen.finished@s1"),
            at="grpo.rlf:9",
            model="actor",
            layout="L2",
            spread="s1",
            prompts="prompt",
            frame="gen",
            sampling=Sampling(n=4, max_new_tokens=8),
        ),
        Lengths(
            id=6,
            mesh="all",
            reads=("gen.tokens@s1",),
            writes=("gen.lengths@s2",),
            because="e7 is ragged",
            bytes=16 * 32 * 3,
            frame="gen",
            spread="s1",
        ),
        Transfer(
            id=7,
            mesh="all",
            reads=("gen.tokens@s1",),
            writes=("gen.tokens@s3",),
            because="ref_lp reads gen",
            bytes=-1,
            values=("gen.tokens",),
            src="s1",
            dst="s3",
        ),
        Infer(
            id=8,
            mesh="ref",
            reads=("ref@L3", "gen.tokens@s3"),
            writes=("ref_lp@s3",),
            at="grpo.rlf:10",
            model="ref",
            layout="L3",
            spread="s3",
            frame="gen",
            output_name="logprobs",
            value="ref_lp",
        ),
        Transfer(
            id=9,
            mesh="all",
            reads=("gen.tokens@s1",),
            writes=("gen.tokens@s4",),
            because="adv reads gen",
            bytes=-1,
            values=("gen.tokens",),
            src="s1",
            dst="s4",
        ),
        Compute(
            id=10,
            mesh="all",
            reads=("gen.tokens@s4", "prompt.columns@s0"),
            writes=("adv@s4", "reward@s4"),
            at="grpo.rlf:11",
            spread="s4",
            program="adv",
            frames=("gen",),
            inputs=(),
            outputs=(("adv", "adv"), ("reward", "reward")),
        ),
        Transfer(
            id=11,
            mesh="all",
            reads=("gen.tokens@s1", "gen.logprobs@s1"),
            writes=("gen.tokens@s5", "gen.logprobs@s5"),
            because="actor.train reads gen",
            bytes=-1,
            values=("gen.tokens", "gen.logprobs"),
            src="s1",
            dst="s5",
        ),
        Transfer(
            id=12,
            mesh="all",
            reads=("adv@s4",),
            writes=("adv@s5",),
            because="actor.train reads adv",
            bytes=-1,
            values=("adv",),
            src="s4",
            dst="s5",
        ),
        Transfer(
            id=13,
            mesh="all",
            reads=("ref_lp@s3",),
            writes=("ref_lp@s5",),
            because="actor.train reads ref_lp",
            bytes=-1,
            values=("ref_lp",),
            src="s3",
            dst="s5",
        ),
        Train(
            id=14,
            mesh="fit",
            reads=("actor@L1", "gen.tokens@s5", "gen.logprobs@s5", "adv@s5", "ref_lp@s5"),
            writes=("actor@L1", "actor.train/loss@s5"),
            at="grpo.rlf:12",
            model="actor",
            layout="L1",
            spread="s5",
            frames=("gen",),
            loss="pg",
            model_outputs=(("logprobs", "gen", "logprobs"),),
            data_inputs=(("old", "gen.logprobs"), ("adv", "adv"), ("ref", "ref_lp")),
            outputs=(("loss", "actor.train/loss"),),
        ),
        Log(
            id=15,
            mesh="all",
            bytes=-1,
            reads=("reward@s4", "actor.train/loss@s5"),
            metrics=(("reward", "reward@s4"), ("actor/loss", "actor.train/loss@s5")),
        ),
        Free(
            id=16,
            mesh="all",
            buffers=(
                *prompt,
                "gen.tokens@s1",
                "gen.logprobs@s1",
                "gen.finished@s1",
                "gen.lengths@s2",
                "gen.tokens@s3",
                "ref_lp@s3",
                "gen.tokens@s4",
                "adv@s4",
                "reward@s4",
                "gen.tokens@s5",
                "gen.logprobs@s5",
                "adv@s5",
                "ref_lp@s5",
                "actor.train/loss@s5",
            ),
        ),
        When(
            2,
            (
                Save(
                    id=17,
                    mesh="fit",
                    reads=("actor@L1",),
                    at="grpo.rlf:13",
                    model="actor",
                    layout="L1",
                    path="{out}/{step}",
                ),
            ),
        ),
    )
    loads = tuple(
        Load(id=i, mesh=mesh, writes=(f"{m}@{x}",), model=m, layout=x)
        for i, (mesh, m, x) in enumerate((("fit", "actor", "L1"), ("all", "actor", "L2"), ("ref", "ref", "L3")))
    )
    body = (*loads, Loop("step", 10, step))
    return Plan(
        Header(
            FORMAT, "0.1.0", "grpo", "grpo", 4, 4, 10, 1, (("grpo.rlf", "ab"),), (("lr", 1e-6), ("n", 4), ("on", True))
        ),
        meshes,
        layouts,
        spreads,
        models,
        (Data("tasks", "jsonl", "t.jsonl", "prompts", 8, (("prompt", "q"),), "models/a", max_prompt_tokens=16),),
        spaces,
        frames,
        values,
        (Function("exact", "rewards.py", "exact", "cd"),),
        programs,
        groups,
        body,
        rank_classes(meshes, body, 4, dict.fromkeys(range(4), 4096)),
    )
