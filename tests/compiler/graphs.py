"""Graphs made by hand: the program of DESIGN 3.1 with ReaL's placement, and small ones."""

from __future__ import annotations

from rldsl.graph import model as g
from rldsl.models.families import Family
from rldsl.plan.events import Sampling
from rldsl.plan.expr import Node, Program
from rldsl.plan.model import Optimizer, ParamSpec, Split, Value
from rldsl.source import SourceFile, Span
from tests.frames import frame

FILE = SourceFile("ppo.rlf", "\n".join(f"line {i} of the program, long enough to be underlined" for i in range(60)))


def at(line: int, column: int = 0, width: int = 4) -> Span:
    start = sum(len(x) + 1 for x in FILE.text.splitlines()[:line]) + column
    return Span(FILE, start, start + width)


def on(line: int, start: int | None, stop: int = 0, nodes=None, **options) -> g.Clause:
    ref = None if start is None else g.MeshRef(nodes, (start, stop), at(line, 10, 9))
    return g.Clause(ref, tuple((k, v, at(line, 20 + 5 * i)) for i, (k, v) in enumerate(options.items())), at(line, 7, 40))


def ppo(places=None, *, cluster: g.Cluster | None = g.Cluster(1, 8, 80.0), rules=(), rest=(), steps=4,
        offload=False) -> g.Graph:
    """places: node id -> clause (ReaL's manual allocation when None)."""
    real = {"gen": on(1, 0, 8, dp=4, pp=2), "score": on(2, 2, 4, pp=2), "ref_lp": on(3, 4, 8, pp=4, offload=offload),
            "v": on(4, 0, 2, dp=2), "critic.train": on(7, 4, 8, dp=2, pp=2), "actor.train": on(8, 0, 4, dp=2, pp=2)}
    where = real if places is None else places
    value = lambda id, level, extent, dtype="f32", frame="gen": Value(id, frame, level, extent, dtype)  # noqa: E731
    values = [value("prompt.tokens", "token", "tokens", "i64", "prompt"),
              value("prompt.lengths", "seq", "lengths", "i64", "prompt"),
              value("prompt.columns", "seq", "columns", "text", "prompt"),
              value("gen.tokens", "token", "tokens", "i64"), value("gen.logprobs", "token", "response"),
              value("gen.finished", "seq", "row", "bool"), value("gen.lengths", "seq", "lengths", "i64"),
              value("score", "seq", "row"), value("ref_lp", "token", "response"), value("v", "token", "response"),
              value("adv", "token", "response"), value("ret", "token", "response"), value("kl", "batch", "batch", frame="")]
    programs = [
        Program("adv", tuple(_input(n, lv, sp) for n, lv, sp in (
            ("score", "seq", "gen"), ("gen.logprobs", "token", "gen"), ("ref_lp", "token", "gen"), ("v", "token", "gen")))
            + (Node("sub", (1, 2), "token", "gen"), Node("mean", (4,), "batch", "", (("to", "batch"),)),
               Node("add", (4, 3), "token", "gen")), (("adv", 4), ("ret", 6), ("kl", 5)))]
    trains = []
    for name, fresh, data in (("critic", "values", (("old", "v"), ("ret", "ret"))),
                              ("actor", "logprobs", (("old", "gen.logprobs"), ("adv", "adv")))):
        node = f"{name}.train"
        outputs = tuple((m, f"{node}/{m}") for m in ("loss", "grad_norm", "lr"))
        values += [Value(v, "", "batch", "batch") for _, v in outputs]
        programs.append(Program(f"{node}/loss", (
            _input(fresh, "token", "gen"), _input(data[0][0], "token", "gen"), _input(data[1][0], "token", "gen"),
            Node("sub", (0, 1), "token", "gen"), Node("mul", (3, 2), "token", "gen"),
            Node("mean", (4,), "batch", "", (("to", "batch"),))), (("loss", 5),)))
        trains.append(g.Train(
            id=node, reads=("gen.tokens", *(v for _, v in data)), writes=tuple(v for _, v in outputs),
            span=at(7 if name == "critic" else 8), clause=where.get(node), model=name, frames=("gen",), loss=f"{node}/loss",
            model_outputs=((fresh, "gen", fresh),), data_inputs=data, outputs=outputs, minibatches=2, epochs=1, shuffle=True))
    infer = lambda id, model, what, line: g.Infer(  # noqa: E731
        id=id, reads=("gen.tokens",), writes=(id,), span=at(line), clause=where.get(id), model=model, frame="gen", output_name=what,
        value=id, temperature=1.0)
    items = (
        g.Fetch(id="prompt", reads=(), writes=("prompt.tokens", "prompt.lengths", "prompt.columns"), span=at(0),
                data="prompts", frames=("prompt",)),
        g.Generate(id="gen", reads=("prompt.tokens",), writes=("gen.tokens", "gen.logprobs", "gen.finished"), span=at(1),
                   clause=where.get("gen"), model="actor", prompts="prompt", frame="gen", sampling=Sampling(2, 16)),
        infer("score", "judge", "scores", 2), infer("ref_lp", "ref", "logprobs", 3), infer("v", "critic", "values", 4),
        g.Compute(id="adv", reads=("score", "gen.logprobs", "ref_lp", "v"), writes=("adv", "ret", "kl"), span=at(5),
                  clause=where.get("adv"), program="adv", frames=("gen",),
                  inputs=tuple((n, n) for n in ("score", "gen.logprobs", "ref_lp", "v")),
                  outputs=tuple((n, n) for n in ("adv", "ret", "kl"))),
        *trains, *rest,
        g.When(period=2, span=at(9), body=(g.Save(id="actor.save", reads=(), writes=(), span=at(9), model="actor",
                                                   path="{out}/step-{step}/actor"),)))
    model = lambda name, kind, path, lr: g.Model(name, kind, path, Optimizer(lr) if lr else None, "float32", at(20))  # noqa: E731
    return g.Graph(
        program="ppo.rlf", flow="ppo", steps=steps, seed=1, params=(("lr", 1e-6),), sources=(("ppo.rlf", "0" * 64),),
        cluster=cluster, models=(model("actor", "causal_lm", "sft", 1e-6), model("critic", "value_model", "sft", 5e-6),
                                 model("ref", "causal_lm", "sft", 0), model("judge", "reward_model", "rm", 0)),
        data=(g.Data("prompts", "jsonl", "p.jsonl", "prompts", (("batch", 8), ("max_prompt_tokens", 8)), at(21)),),
        frames=(frame("prompt", "prompt", "prompt", 8, 1, "prompts", 8, 0),
                frame("gen", "gen", "prompt", 16, 2, "prompts", 8, 16)),
        values=tuple(values), functions=(), programs=tuple(programs), items=items,
        metrics=(("kl", "kl"), ("actor/loss", "actor.train/loss")), rules=tuple(rules))


def _input(name: str, level, space: str) -> Node:
    return Node("input", (), level, space, (("name", name),))


def family(path: str = "sft", kind: str = "causal_lm", span=None, trained=False, *, heads=4, kv_heads=2, layers=4, tokenizer="t",
           tp_problem="", pp_problem="", hidden=16) -> Family:
    """A family described without files."""
    layer = lambda n, shape, dim: ParamSpec(f"model.layers.{{}}.{n}.weight", shape, "layer", layers,  # noqa: E731
                                            Split(dim, ((heads, shape[dim] // heads),)), "colwise" if dim == 0 else "rowwise")
    head = (ParamSpec("lm_head.weight", (10, hidden), "last", 0, Split(0, ((10, 1),)), "head") if kind == "causal_lm"
            else ParamSpec("score.weight", (1, hidden), "last"))
    params = (ParamSpec("model.embed_tokens.weight", (10, hidden), "first", 0, Split(0, ((10, 1),)), "vocab"),
              layer("self_attn.q_proj", (hidden, hidden), 0), layer("self_attn.o_proj", (hidden, hidden), 1),
              ParamSpec("model.norm.weight", (hidden,), "last"), head)
    return Family("toy", path, kind, params, layers, heads, kv_heads, hidden, hidden // heads, 4 * hidden, 10, 0, 4, "c" * 64,
                  tokenizer, tp_problem, pp_problem)
