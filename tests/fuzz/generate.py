"""Random programs. Each function is a pure function of its seed.

`programs(seed)`: a text of the whole grammar that always parses, with comments and newlines at odd places; its names
and types mean nothing. `sensible(seed)`: names bound before use and mostly right types, so that it reaches the deep
parts of the checker; some are right, most have a few mistakes. `mutate(seed, text)`: a text with a few bytes changed.
"""

from __future__ import annotations

from random import Random

NAMES = ("a", "b", "gen", "prompt", "actor", "critic", "ref", "adv", "ret", "x1", "long_name", "_", "tokens", "n")
AFTER_DOT = (*NAMES, "train", "next", "logprobs", "save", "on", "every", "by", "loss", "metric", "return")
LEVELS = ("batch", "prompt", "seq", "token", "any")
TYPES = ("number", "int", "text", "bool")
UNITS = ("prompts", "sequences", "pairs", "tokens")
COMMENTS = ("# note", "#", "#x", "#   spaced  ", "# naïve — ünïcode", "# \"quoted\" { ( [", "## twice")


def programs(seed: int) -> str:
    """A program that parses."""
    return _Text(Random(seed)).file()


class _Text:
    """Writes one text. Inside brackets a blank may become a newline and a comment; elsewhere only spaces."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.depth = 0  # of expressions; those below `limit` are made small
        self.limit = draw.choice((1, 2, 2, 3, 4))
        self.free = 0  # brackets around this place: newlines are free inside them

    # ------------------------------------------------------------------------------------------ small things

    def one(self, *choices: str) -> str:
        return self.draw.choice(choices)

    def chance(self, share: float) -> bool:
        return self.draw.random() < share

    def name(self) -> str:
        return self.one(*NAMES)

    def gap(self) -> str:
        """At least one blank."""
        return self.pad() or " "

    def pad(self) -> str:
        """Any blanks, perhaps none; inside brackets sometimes newlines and comments."""
        if self.free and self.chance(0.08):
            comment = self.one(*COMMENTS) if self.chance(0.5) else ""
            return f" {comment}\n{' ' * self.draw.randrange(6)}"
        return self.one("", "", " ", " ", " ", "  ", "\t")

    def comma(self) -> str:
        return f"{self.pad()},{self.pad()}"

    def listed(self, make, least: int = 1, most: int = 3, trailing: bool = False) -> str:
        items = [make() for _ in range(self.draw.randint(least, most))]
        text = "".join(item + self.comma() for item in items[:-1]) + (items[-1] if items else "")
        return text + (self.pad() + "," if trailing and items and self.chance(0.15) else "")

    def inside(self, left: str, make, right: str) -> str:
        self.free += 1
        text = left + self.pad() + make() + self.pad() + right
        self.free -= 1
        return text

    def number(self) -> str:
        whole = self.one("0", "1", "2", "8", "512", "1_000", "007", "4k", "2M", "1.5k")
        return self.one(whole, whole, "0.1", "1e-6", "2.5E+3", "1_0.5_0", f"{self.draw.randrange(999)}")

    def string(self) -> str:
        inside = self.one("", "a", "models/sft", "x y", "# no comment", "é", r"\"quoted\"", r"a\\b", r"\n", "{(", "'")
        return f'"{inside}"'

    def end(self) -> str:
        """The end of a statement: a newline, comments and blank lines."""
        text = f"{self.one('', '', '  ', ' ' + self.one(*COMMENTS))}{self.one(*['' for _ in range(9)], chr(13))}\n"
        while self.chance(0.2):
            text += f"{' ' * self.draw.randrange(4)}{self.one('', *COMMENTS)}\n"
        return text

    # ------------------------------------------------------------------------------------------- expressions

    def expr(self) -> str:
        return self._deeper(self._expr, self.primary)

    def _deeper(self, make, small) -> str:
        self.depth += 1
        text = small() if self.depth > self.limit else make()
        self.depth -= 1
        return text

    def _expr(self) -> str:
        kind = self.draw.randrange(12)
        if kind < 3:
            return f"{self.sum()}"
        if kind == 3:
            return f"{self.sum()}{self.pad()}{self.one('<', '<=', '>', '>=', '==', '!=')}{self.pad()}{self.sum()}"
        if kind == 4:
            return f"{self.relation()}{self._word(self.one('and', 'or'))}{self.relation()}"
        if kind == 5:
            return f"not{self.gap()}{self.relation()}"
        return self.primary()

    def _word(self, word: str) -> str:
        return f" {self.pad()}{word}{self.gap()}"

    def relation(self) -> str:
        return f"{self.sum()}{self.pad()}{self.one('<', '>=', '==')}{self.pad()}{self.sum()}"

    def sum(self) -> str:
        parts = [self.product() for _ in range(self.draw.randint(1, 3))]
        text = parts[0]
        for part in parts[1:]:
            text += f"{self.pad()}{self.one('+', '-')}{self.pad()}{part}"
        return text

    def product(self) -> str:
        text = self.signed()
        while self.chance(0.25):
            text += f"{self.pad()}{self.one('*', '/')}{self.pad()}{self.signed()}"
        return text

    def signed(self) -> str:
        text = self.primary()
        if self.chance(0.1):
            text += f"{self.pad()}**{self.pad()}{self.one('', '-')}{self.primary()}"
        return self.one("-", "- ", "--") + text if self.chance(0.12) else text

    def primary(self) -> str:
        return self._deeper(self._primary, lambda: self.one(self.name(), self.number()))

    def _primary(self) -> str:
        kind = self.draw.randrange(16)
        if kind < 4:
            return self.name()
        if kind < 6:
            return self.number()
        if kind == 6:
            return f"{self.number()} {self.one(*UNITS)}"
        if kind == 7:
            return self.one(self.string(), "true", "false")
        if kind == 8:
            return self.inside("[", lambda: self.listed(self.expr, trailing=True) if self.chance(0.8) else "", "]")
        if kind == 9:
            return self.inside("(", self.expr, ")")
        if kind < 12:
            return f"{self.name()}.{self.one(*AFTER_DOT)}"
        return self.call()

    def call(self) -> str:
        owner = self.one(self.name(), f"{self.name()}.{self.one(*AFTER_DOT)}", "mean", "sum", "mesh", "std")
        return owner + self.inside("(", self.arguments, ")")

    def arguments(self) -> str:
        return self.listed(self.argument, 1, 3, trailing=True) if self.chance(0.85) else ""

    def argument(self) -> str:
        name = f"{self.one(*NAMES, 'n', 'loss', 'on')}{self.pad()}={self.pad()}" if self.chance(0.3) else ""
        value = f"{self.sum()}{self.pad()}:{self.pad()}{self.sum()}" if self.chance(0.1) else self.expr()
        if self.chance(0.1):
            return f"{name}{self.expr()} where {self.expr()}"
        by = f" by {self.one(*LEVELS)}" if self.chance(0.15) else ""
        return name + value + by

    # -------------------------------------------------------------------------------------------- statements

    def clause(self) -> str:
        options = "".join(f" {self.one('dp', 'tp', 'pp', 'mbs', 'offload', 'zero')}{self.pad()}={self.pad()}"
                          f"{self.one('1', '2', '4', 'true', 'a', '(a + 1)')}" for _ in range(self.draw.randrange(3)))
        mesh = self.one("mesh(0:8)", "mesh(0:2, 0:8)", "all", "mesh( 0 : 4 )", "mesh(\n0:2)")
        return f" on {mesh}{options}" if self.chance(0.7) or not options else options

    def statement(self, depth: int) -> str:
        kind = self.draw.randrange(17)
        if kind == 0 and self.chance(0.3):
            return f"{self.name()}.{self.one(*AFTER_DOT)}{self.pad()}={self.pad()}{self.expr()}"
        if kind < 6:
            where = f" where {self.expr()}" if self.chance(0.15) else ""
            clause = self.clause() if self.chance(0.2) else ""
            return f"{self.listed(self.name, 1, 2)}{self.pad()}={self.pad()}{self.expr()}{where}{clause}"
        if kind == 6:
            return self.call() + (self.clause() if self.chance(0.4) else "")
        if kind == 7:
            return f"metric {self.name()}{self.pad()}={self.pad()}{self.expr()}"
        if kind == 8:
            return f"return {self.listed(self.expr, 1, 3)}"
        if kind == 9:
            return f"save {self.listed(self.name, 1, 3)}" + (f" to {self.expr()}" if self.chance(0.3) else "")
        if kind == 10:
            if self.chance(0.3):
                return f"checkpoint every {self.one('2', 'a')}" + (" keep=3" if self.chance(0.5) else "")
            return f"stop when {self.expr()}"
        if kind == 11:
            return f"sync {self.name()} from {self.name()}" + self.period()
        if kind == 12:
            return f"ema {self.name()} from {self.name()} {self.one('0.99', 'a', '(1 - b)')}" + self.period()
        if depth > 2:
            return self.name() + " = " + self.number()
        if kind == 13:
            return f"{self.one('every', 'first', 'after')} {self.one('2', 'a', '10 prompts')} {self.block(depth + 1)}"
        if kind == 14:
            return f"repeat {self.one('2', 'a')} {self.block(depth + 1)}"
        if kind == 15:
            most = f" max {self.one('4', 'a + 1')}" if self.chance(0.5) else ""
            return f"eval {self.name()}{most} {self.block(depth + 1)}"
        return f"repeat {self.block(depth + 1)} until {self.expr()} max {self.one('4', 'a + 1')}"

    def period(self) -> str:
        return f" every {self.one('2', 'n', '100')}" if self.chance(0.4) else ""

    def block(self, depth: int = 0) -> str:
        number = self.draw.randrange(4 if depth else 6)
        if number == 0:
            return self.one("{}", "{ }", "{\n}", "{ # empty\n}")
        if number == 1 and self.chance(0.5):
            return f"{{{self.one('', ' ')}{self.statement(depth)}{self.one('', ' ')}}}"
        free, self.free = self.free, 0
        indent = self.one("  ", "  ", "  ", "", "\t", "      ")
        text = "{" + self.end()
        for i in range(number):
            last = i == number - 1 and self.chance(0.1)
            text += indent * (depth + 1) + self.statement(depth) + (" " if last else self.end())
        self.free = free
        return text + "}"

    # ------------------------------------------------------------------------------------------ declarations

    def declaration(self) -> str:
        return self.draw.choice([
            self.use, self.use_py, self.param, self.state, self.buffer, self.cluster, self.mesh, self.data, self.model, self.fn,
            self.loss, self.place, self.flow])()

    def use(self) -> str:
        return f"use {self.one('std.ppo', 'std', 'a.b.c', self.string())} (" + self._imports() + ")"

    def _imports(self) -> str:
        self.free += 1
        text = self.pad() + self.listed(self.name, 1, 3, trailing=True) + self.pad()
        self.free -= 1
        return text

    def use_py(self) -> str:
        def option() -> str:
            return f"{self.one('max_tokens', 'over_long')}{self.pad()}={self.pad()}{self.one('2k', '64', 'drop', '(n + 1)')}"

        def function() -> str:
            text = f"{self.name()}{self.pad()}:{self.pad()}{self.listed(self.name, 1, 2)} -> {self.one(*LEVELS, 'prompts')}"
            more = f"{self.pad()}({self.listed(option, 1, 2, trailing=True)})" if self.chance(0.3) else ""
            return text + (f"{self.pad()}?" if self.chance(0.2) else "") + more
        return f"use py {self.string()} " + self.inside("(", lambda: self.listed(function, 1, 2, trailing=True), ")")

    def param(self) -> str:
        type_ = f"{self.pad()}:{self.pad()}{self.one(*TYPES)}" if self.chance(0.4) else ""
        return f"param {self.name()}{type_}" + (f"{self.pad()}={self.pad()}{self.expr()}" if self.chance(0.85) else "")

    def state(self) -> str:
        data = f"{self.gap()}of{self.gap()}{self.name()}" if self.chance(0.3) else ""
        return f"state {self.name()}{data}{self.pad()}={self.pad()}{self.expr()}"

    def buffer(self) -> str:
        return f"buffer {self.name()}{self.pad()}={self.pad()}{self.one('rows(capacity=4k)', self.expr())}"

    def cluster(self) -> str:
        return self.one('cluster "h100.yaml"', "cluster nodes=1 gpus=8", "cluster gpus = 2", "cluster nodes=a gpus=(1)")

    def mesh(self) -> str:
        return f"mesh {self.name()} = {self.one('mesh(0:8)', 'mesh(0:2, 0:4)', self.expr())}"

    def data(self) -> str:
        return f"data {self.name()} = {self.one('jsonl', 'parquet', 'hf')}" + self.inside("(", self.arguments, ")")

    def model(self) -> str:
        head = self.one('causal_lm("m")', "value_model(a)", "reward_model(\n  a\n)", self.call())
        return f"model {self.name()} = {head}" + (f" train {self.one('adamw(lr=1e-6)', self.call())}"
                                                  if self.chance(0.4) else "")

    def parameter(self) -> str:
        level = f"{self.pad()}:{self.pad()}{self.one(*LEVELS)}" if self.chance(0.6) else ""
        return self.name() + level + (f"{self.pad()}={self.pad()}{self.expr()}" if self.chance(0.3) else "")

    def params(self) -> str:
        return self.listed(self.parameter, 1, 3, trailing=True) if self.chance(0.8) else ""

    def fn(self) -> str:
        returns = self.one("", " -> token", " -> (seq)", " -> (token, any)", "->seq")
        return f"fn {self.name()}" + self.inside("(", self.params, ")") + returns + " " + self.block()

    def loss(self) -> str:
        def params() -> str:
            return self.params() + (f"{self.pad()};{self.pad()}{self.params()}" if self.chance(0.7) else "")
        return f"loss {self.name()}" + self.inside("(", params, ")") + " " + self.block()

    def place(self) -> str:
        selector = self.one("a.generate", "ref.*", "*.logprobs", "*.*", "@gen", "actor", "*", "a . b", "@ gen")
        return f"place {selector}{self.clause()}"

    def flow(self) -> str:
        options = self.inside("(", self.arguments, ")") if self.chance(0.8) else ""
        return f"flow {self.name()}{options} {self.block()}"

    def file(self) -> str:
        text = self.end() if self.chance(0.3) else ""
        for _ in range(self.draw.randint(0 if self.chance(0.02) else 1, 7)):
            text += self.declaration() + self.end()
        return text.rstrip("\n") if self.chance(0.1) else text


# ---------------------------------------------------------------------------------------------------- sensible


def sensible(seed: int) -> str:
    """A program whose names are bound and whose types are mostly right."""
    return _Sense(Random(seed)).file()


class _Sense:
    """`known`: kind ("token", "seq", "prompt", "batch", "frame", "prompts", "pairs", "model", ...) -> names."""

    def __init__(self, draw: Random):
        self.draw = draw
        self.known: dict[str, list[str]] = {}
        self.count = 0
        self.wrong = draw.choice((0.0, 0.0, 0.02, 0.1))  # how often a thing of the wrong kind is taken

    def fresh(self, kind: str, base: str = "v") -> str:
        self.count += 1
        name = f"{base}{self.count}"
        if self.draw.random() < self.wrong:
            name = self.draw.choice(["mean", "v1", "actor", "gen", "mesh"])
        self.known.setdefault(kind, []).append(name)
        return name

    def any(self, kind: str, default: str) -> str:
        if self.draw.random() < self.wrong:
            kind = self.draw.choice(list(self.known))
        names = self.known.get(kind)
        return self.draw.choice(names) if names else default

    def value(self, level: str, depth: int = 0) -> str:
        one, pick = self.draw.choice, self.draw.randrange(10)
        if self.draw.random() < self.wrong:
            level = one(["batch", "prompt", "seq", "token", "bool"])
        if level == "bool":
            left = self.value(one(["batch", "seq", "token"]), depth + 1)
            return f"{left} {one(['<', '>', '==', '!='])} {self.number()}"
        if depth > 3 or pick < 2:
            if level == "batch":
                return self.any("batch", self.number()) if self.draw.random() < 0.5 else self.number()
            if level == "prompt":
                return f"mean({self.value('seq', depth + 1)} by prompt)" if depth < 5 else self.any("prompt", "1.0")
            return self.any(level, f"mean({self.any('token', '1.0')} by seq)" if level == "seq" else
                            f"{self.any('frame', 'gen')}.logprobs")
        if pick < 5:
            other = one([level, level, "batch"])
            return f"{self.value(level, depth + 1)} {one(['+', '-', '*', '/', '**'])} {self.value(other, depth + 1)}"
        if pick == 5:
            function = one(["exp", "log", "abs", "sqrt", "sigmoid", "stop_gradient", "-"])
            return f"{function}({self.value(level, depth + 1)})"
        if pick == 6:
            inner = self.value(level, depth + 1)
            condition = self.value("bool", depth + 1)
            return one([f"clip({inner}, -1, 1)", f"where({condition}, {inner}, 0.0)", f"max({inner}, 0)"])
        finer = {"batch": ["token", "seq", "prompt"], "prompt": ["seq", "token"], "seq": ["token"]}.get(level)
        if finer is None:
            return one([f"next({self.value('token', depth + 1)})", f"discount({self.value('token', depth + 1)}, 0.9)",
                        f"cumsum({self.value('token', depth + 1)})", f"at_end({self.value('seq', depth + 1)})",
                        f"whiten({self.value('token', depth + 1)})"])
        inner = self.value(one(finer), depth + 1)
        by = "" if level == "batch" else f" by {level}"
        return f"{one(['mean', 'sum', 'max', 'min', 'std', 'var', 'count'])}({inner}{by})"

    def number(self) -> str:
        return self.draw.choice(["0", "1", "0.5", "2", "1e-3", "4k", "100", "-1"])

    def clause(self) -> str:
        if self.draw.random() < 0.5:
            return ""
        size = self.draw.choice([1, 2, 4, 8])
        dp = self.draw.choice([d for d in (1, 2, 4, 8) if size % d == 0])
        tail = f" dp={dp}" + (f" tp={size // dp}" if dp < size else "") + self.draw.choice(["", "", " mbs=2", " pp=2"])
        return f" on mesh(0:{size})" + self.draw.choice([tail, ""])

    def file(self) -> str:
        one = self.draw.choice
        lines = ["use std.ppo (gae, ppo_clip, value_clip, kl_rewards)", "use std.sft (sft)"]
        lines += one([[], ["cluster nodes=1 gpus=8"], ["cluster nodes=2 gpus=4 memory_gb=80"]])
        for _ in range(self.draw.randrange(3)):
            lines.append(f"param {self.fresh('batch', 'k')}{one(['', ': number'])} = {one(['1', '0.5', '2'])}")
        for _ in range(self.draw.randrange(2)):
            name = self.fresh("state", "s")
            self.known.setdefault("batch", []).append(name)
            lines.append(f"state {name} = {one(['0.1', '1', '-2'])}")
        lines += ['data rows = jsonl("d.jsonl", batch=4)', 'data twos = jsonl("e.jsonl", batch=2, kind="pairs")']
        train = "" if self.draw.random() < self.wrong else " train adamw(lr=1e-6)"
        lines += [f'model actor = causal_lm("m"){train}', 'model ref = causal_lm("m")',
                  'model critic = value_model("m") train adamw(lr=1e-5, warmup=10)', 'model judge = reward_model("r")']
        self.known |= {"model": ["actor", "ref"], "critic": ["critic"], "judge": ["judge"], "data": ["rows"]}
        if self.draw.random() < 0.4:
            lines += ["fn mine(x: token, k = 0.5) -> token {", f"  y = x * k{one(['', ' + 1'])}", "  return y", "}"]
            self.known["fn"] = ["mine"]
        if self.draw.random() < 0.4:
            lines += ["loss own(logprobs: token; w: token, eps = 0.1) {", "  metric m = mean(logprobs)",
                      f"  {one(['', 'stop when mean(logprobs) > 5'])}",
                      f"  return {one(['-mean(w * logprobs)', 'mean(exp(logprobs - w))', 'mean(logprobs) * eps'])}",
                      "}"]
            self.known["own"] = ["own"]
        if self.draw.random() < 0.3:
            lines.append(f"place {one(['actor.*', '*.logprobs', '*.*', '@gen', 'ref.generate'])} on mesh(0:2) dp=2")
        lines += [f"flow f(steps={one(['1', '100', '2k'])}, seed=1) {{", "  prompt = rows.next()",
                  f"  gen = actor.generate(prompt, n={one(['1', '4'])}, max_new_tokens=8){self.clause()}"]
        self.known |= {"frame": ["gen"], "prompts": ["prompt"], "token": ["gen.logprobs"], "seq": ["len(gen)"]}
        lines += self.statements(self.draw.randint(2, 12), "  ")
        return "\n".join([*lines, "}"]) + "\n"

    def statements(self, number: int, indent: str) -> list[str]:
        return [indent + line for _ in range(number) for line in self.statement(indent)]

    def statement(self, indent: str) -> list[str]:
        one, kind = self.draw.choice, self.draw.randrange(16)
        if kind < 4:
            level = one(["token", "seq", "prompt", "batch"])
            text = self.value(level)
            return [f"{self.fresh(level)} = {text}"]
        if kind == 4:
            call = f"{self.any('model', 'ref')}.{one(['logprobs', 'entropy'])}({self.any('frame', 'gen')})"
            return [f"{self.fresh('token')} = {call}{self.clause()}"]
        if kind == 5:
            frame = self.any("frame", "gen")
            level, call = one([("token", "critic.values"), ("seq", "judge.score")])
            return [f"{self.fresh(level)} = {call}({frame})"]
        if kind == 6 and len(indent) == 2:
            value = self.value("batch")
            return [f"metric {self.fresh('metric', 'm')} = {value}"]
        if kind == 7:
            token = f"{self.value('token')}, {self.value('token')}"
            return [f"{self.fresh('token')}, {self.fresh('token')} = gae({token}{one(['', ', lam=0.9'])})"]
        if kind == 8:
            loss = one([f"ppo_clip(old=gen.logprobs, adv={self.value('token')})", "sft()",
                        f"own(w={self.value(one(['token', 'seq', 'batch']))})" if "own" in self.known else "sft()"])
            frame, parts = self.any("frame", "gen"), one(["1", "2"])
            if self.draw.random() < 0.2:
                frame = f"{frame} where {self.value('seq')} > {self.number()}"
            return [f"actor.train({frame}, loss={loss}, minibatches={parts}){self.clause()}"]
        if kind == 9:
            return [f"critic.train(gen, loss=value_clip(old={self.value('token')}, ret={self.value('token')}))"]
        if kind == 10:
            prompts = self.any("prompts", "prompt")
            return [f"{self.fresh('frame', 'g')} = actor.generate({prompts}, greedy=true)"]
        if kind == 11 and len(indent) < 6:
            word = one(["every 10", "first 2", "after 3", "repeat 2", "eval prompts", "eval prompts max 3"])
            outside = {kind: list(names) for kind, names in self.known.items()}
            body = self.statements(self.draw.randint(1, 2), indent + "  ")
            self.known = outside
            return [f"{word} {{", *("  " + s for s in body), "}"]
        if kind == 12:
            condition = f"{self.value(one(['seq', 'prompt']))} {one(['<', '>='])} {self.number()}"
            frame = self.any("frame", "gen")
            return [f"{self.fresh('frame', 'kept')} = {frame} where {condition}"]
        if kind == 13:
            return [one(["sync ref from actor every 10", "ema ref from actor 0.99", "save actor, critic", "checkpoint every 10 keep=2",
                         f"stop when {self.value('batch')} > 2"])]
        if kind == 14 and "state" in self.known:
            return [f"{self.any('state', 's')} = {self.value('batch')}"]
        if kind == 15 and "fn" in self.known:
            value = self.value("token")
            return [f"{self.fresh('token')} = mine({value})"]
        value = self.value("batch")
        return [f"{self.fresh('batch')} = {value}"]


# ------------------------------------------------------------------------------------------------------ mutation

PIECES = ("(", ")", "{", "}", "[", "]", "=", "==", ",", ";", ":", ".", '"', "'", "#", "\n", "\t", " ", "*", "**", "@",
          "on", "where", "by", "every", "repeat", "return", "flow f", "fn", "loss", "until", "max", "1", "0", "-", "é",
          "\x00", "\ufeff", "\r", "\u2028", "1e999", "99999999999999999999", "->", "not", "and", "\\", "prompts",
          "true")


def mutate(seed: int, text: str) -> str:
    """`text` with one to four small changes: bytes dropped, doubled, swapped, inserted, lines moved or cut."""
    draw = Random(seed)
    for _ in range(draw.randint(1, 4)):
        at, width = draw.randrange(len(text) + 1), draw.randint(1, 6)
        kind = draw.randrange(8)
        if kind == 0:
            text = text[:at] + text[at + width :]
        elif kind == 1:
            text = text[:at] + text[at : at + width] * 2 + text[at + width :]
        elif kind == 2:
            text = text[:at] + draw.choice(PIECES) + text[at:]
        elif kind == 3:
            text = text[:at] + draw.choice(PIECES) + text[at + width :]
        elif kind == 4:
            text = text[:at] + chr(draw.choice((draw.randrange(128), draw.randrange(0x3000)))) + text[at + 1 :]
        elif kind == 5:
            lines = text.split("\n")
            line = lines.pop(draw.randrange(len(lines)))
            lines.insert(draw.randrange(len(lines) + 1), line)
            text = "\n".join(lines)
        elif kind == 6:
            text = text[:at] if draw.random() < 0.3 else text[:at] + text[at:].replace("\n", " ", 1)
        else:
            words = text.split(" ")
            i, j = draw.randrange(len(words)), draw.randrange(len(words))
            words[i], words[j] = words[j], words[i]
            text = " ".join(words)
    return text
