"""What a plan means: its events one after another in the body's order, on whole values, as if there were one rank.

In: a plan. Out: `Story`: for each time that an event happens what it finds, and what a person would see of the run.
Numbers are terms (`arithmetic.py`); lengths, kept rows and the end of a repeat follow from terms, so they differ from
row to row but are the same on every rank. Loops run a few turns, an `every` on those that its period divides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from rldsl.plan.events import (
    Checkpoint,
    Collect,
    Compute,
    Derive,
    Draw,
    Event,
    Fetch,
    Generate,
    Infer,
    Item,
    Load,
    Log,
    Lookup,
    Loop,
    Realloc,
    Sample,
    Save,
    Store,
    Train,
    Transfer,
    Update,
    When,
    ahead_of,
    split_buffer,
)
from rldsl.plan.model import Plan, ReplayBuffer, Spread, Value
from rldsl.plan.spaces import IndexedFrame, indexed_frames
from rldsl.sharding import partition
from tests.verify.arithmetic import WIDE, Cell, View, evaluate, need, term
from tests.verify.derived import Derived, derived
from tests.verify.loss import check_loss
from tests.verify.moment import Held, Key, Lens, Moment, due, enough, is_due, kept, lasting_models, placed, space, turns

LEVEL = {"tokens": "token", "response": "token", "row": "seq", "prompt": "prompt", "batch": "batch"}
SPLITS = {"prompts": {"": None}, "answers": {"": "answer"}, "pairs": {"chosen": "chosen", "rejected": "rejected"}}


Row = tuple[int, int, tuple[int, ...]]  # of a buffer: tokens of its prompt and response, and its fields


@dataclass
class Story:
    plan: Plan
    moments: dict[Key, Moment] = field(default_factory=dict)
    seen: list[object] = field(default_factory=list)
    made: dict[tuple[str, int], Held] = field(default_factory=dict)  # value, stamp -> what it was then
    derived: dict[tuple[str, int], Derived] = field(default_factory=dict)  # frame, stamp -> its rows
    before: dict[int, int] = field(default_factory=dict)  # tokens -> the tokens that they continue
    behind: dict[str, str] = field(default_factory=dict)  # frame -> the one whose responses it has behind other prompts
    contained: dict[int, int] = field(default_factory=dict)  # tokens of a prefix -> those that it was cut from
    caches: dict[str, tuple[str, str]] = field(default_factory=dict)  # frame -> model and layout that wrote its cache
    moments_over: set[int] = field(default_factory=set)  # stamps of fetches that go over their source

    def __post_init__(self) -> None:
        p = self.plan
        self.frames = indexed_frames(p)
        self.records: dict[str, Value] = {v.id: v for v in p.values}
        self.spreads: dict[str, Spread] = {s.id: s for s in p.spreads}
        self.layouts, self.meshes = {x.id: x for x in p.layouts}, {m.id: m for m in p.meshes}
        self.programs, self.functions = {x.id: x for x in p.programs}, {f.id: f for f in p.functions}
        self.data, self.owners = {d.name: d for d in p.data}, {m.name: m for m in p.models}
        self.values: dict[str, Held] = {s.value: Held(-1, {0: term("state", s.initial)}) for s in p.states}
        self.values |= {b.value: Held(-1, {0: term("buffer", repr(b))}) for b in p.buffers}
        self.stored: dict[int, tuple[Row, ...]] = {self.values[b.value].of[0]: () for b in p.buffers}  # by what stands for them
        self.lens: dict[str, Lens] = {}
        self.models: dict[str, tuple[int, int]] = {}
        self.fetched, self.drawn = Counter[str](), Counter[int]()
        self.step = self.closed = 0
        self.steps: dict[int, tuple[dict[str, Held], dict[str, Lens]]] = {}  # of other steps: values and lengths
        for f in self.frames.values():
            above, steps = f, 0
            while above.selected_from or above.present_in not in ("", above.id):
                above, steps = self.frames[above.selected_from or above.present_in], steps + 1
                need(steps <= len(p.frames), f"frame {f.id} comes from itself")

    # ------------------------------------------------------------------------------------------------ walking

    def tell(self) -> Story:
        self._walk(self.plan.body, (), 1)
        self.seen.append(sorted(self.models.items()))
        return self

    def _walk(self, items: tuple[Item, ...], key: Key, turn: int, over: str = "") -> None:
        for item in items:
            if isinstance(item, Event):
                self._event(item, (*key, item.id), turn, over)
            elif isinstance(item, When):
                if due(item, turn):
                    self._walk(item.body, key, turn, over)
            else:
                self._loop(item, key)

    def _loop(self, loop: Loop, key: Key) -> None:
        outermost = not key
        for buffer in loop.collects:
            self._empty(split_buffer(buffer)[0])
        for turn in turns(loop, outermost):
            if outermost:
                self._of_step(turn)
                self.drawn.clear()
            last = turn == loop.trips or not loop.over
            over = loop.over if last else f"{loop.over} "
            if not outermost:
                self._walk(loop.body, (*key, turn), turn, over)
            for item, blocks in placed(loop.body) if outermost else ():
                if is_due(item, blocks, loop, turn):
                    ahead = max(ahead_of(item), 0)
                    self._of_step(turn + ahead)
                    self._walk((item,), (*key, turn), turn + ahead, over)
            if outermost:
                self._of_step(turn)
            if loop.until and turn >= 1 and enough(self.values.pop(split_buffer(loop.until)[0])):
                break

    def _of_step(self, step: int) -> None:
        """Look at the values and lengths of a step, and at what lasts."""
        if step == self.step:
            return
        lasting = {s.value for s in (*self.plan.states, *self.plan.buffers)}
        kept = {v: x for v, x in self.values.items() if v in lasting}
        self.steps[self.step] = {v: x for v, x in self.values.items() if v not in lasting}, self.lens
        self.step, (values, self.lens) = step, self.steps.pop(step, ({}, {}))
        self.values = kept | values

    def _event(self, e: Event, key: Key, turn: int, over: str) -> None:
        need(key not in self.moments, "an event with the number of another")
        need(self.closed != self.step or not self.step, "an event of a step after its checkpoint")
        times, turn = self.drawn[e.id], turn - 1
        self.drawn[e.id] += 1
        if isinstance(e, Fetch) and not e.reads:
            times = turn if over.strip() == e.data else self.fetched[e.data]
            self.fetched[e.data] += over.strip() != e.data
            if over.strip() == e.data:
                self.moments_over.add(len(self.moments))
        now = Moment(len(self.moments), self.step, turn, times, dict(self.values), dict(self.lens), dict(self.models))
        self.moments[key] = now
        match e:
            case Fetch():
                self._fetch(e, now, short=over == e.data)
            case Draw():
                self._draw(e, now)
            case Lookup():
                numbers, table = self._row_state(e)
                self._make(e.value, now, {r: term("lookup", table, x) for r, x in numbers.items()}, False, "row", "prompt")
            case Update():
                numbers, table = self._row_state(e)
                new = tuple((numbers[r], x) for r, x in sorted(self.values[e.value].of.items()))
                need(not self.values[e.value].truth, "a condition in the place of a number")
                self.values[e.state] = Held(now.stamp, {0: term("update", table, new)})
            case Store():
                self._store(e, now)
            case Sample():
                self._sample(e, now)
            case Generate():
                self._generate(e, now)
            case Infer():
                self._infer(e, now)
            case Train():
                self._train(e, now)
            case Compute():
                self._compute(e, now)
            case Derive():
                self._derive(e, now)
            case Collect():
                self._collect(e, now)
            case Transfer():
                need(all(v in self.values for v in e.values), "a transfer of what is not there")
            case Load():
                self.models.setdefault(e.model, (-1, term("load", repr(self.owners[e.model]))))
            case Realloc() if e.source:
                old = self.models[e.model][1] if e.decay else 0
                self.models[e.model] = now.stamp, term("mean", e.decay, old, self.models[e.source][1])
            case Log():
                self.seen.append(("log", [(n, self.values[split_buffer(b)[0]].of[0]) for n, b in e.metrics]))
            case Save():
                self.seen.append(("save", e.path, self.models[e.model]))
            case Checkpoint():
                need(e.every > 0, "a checkpoint that is never due")
                self.closed = self.step
                lasting = sorted((m, self.models[m]) for m in lasting_models(self.plan))
                self.seen.append(("checkpoint", e.every, lasting))

    # ------------------------------------------------------------------------------------------------ events

    def rows(self, frame: str, lens: Mapping[str, Lens] | None = None) -> tuple[int, ...]:
        """The rows that a frame has, by the present lengths or by others."""
        f, lens = self.frames[frame], self.lens if lens is None else lens
        return partition.present_rows(f, {f.present_in: lens[f.present_in].totals()} if f.present_in else {})

    def cell(self, value: str) -> Cell:
        v, held = self.records[value], self.values[value]
        return Cell(v.level, space(self.frames, v), held.truth, held.of)

    def ids(self, value: Value) -> tuple[int, ...]:
        return (0,) if value.extent == "batch" else kept(value, self.rows(value.frame), self.frames[value.frame])

    def _make(self, value: str, now: Moment, of: Mapping[int, int], truth: bool = False, *extents: str) -> None:
        v = self.records[value]
        need(v.extent in extents and LEVEL.get(v.extent, v.level) == v.level, f"{value} cannot hold what is made")
        wanted = "i64" if v.extent in ("tokens", "row_numbers") else "text" if v.extent == "columns" else "bool" if truth else "f32"
        need(v.dtype == wanted, f"{value} has another dtype than what is made")
        self.values[value] = self.made[value, now.stamp] = Held(now.stamp, of, truth)

    def _fetch(self, e: Fetch, now: Moment, short: bool) -> None:
        d = self.data[e.data]
        here = d.batch - 1 if short and d.batch > 1 else d.batch
        numbers = {r: term("number", repr(d), now.times, r) for r in range(here)}
        if e.reads:
            (drawn,) = e.reads
            numbers = dict(self.values[split_buffer(drawn)[0]].of)
            need(self.records[split_buffer(drawn)[0]].extent == "row_numbers" and len(numbers) == here, "no row numbers")
        for suffix, role in SPLITS[d.row_format].items():
            frame = next(f for f in e.frames if not suffix or f.endswith(f".{suffix}"))
            f = self.frames[frame]
            need(f.count == d.batch and (here == d.batch or f.present_in == frame), "rows that the frame has no room for")
            made = {r: term("row", repr(d), suffix, numbers[r]) for r in range(here)}
            prompt = tuple(1 + made[r] % 3 if r < here else 0 for r in range(f.count))
            response = tuple(1 + made[r] % 2 if r < here and role else 0 for r in range(f.count))
            self.lens[frame] = Lens(now.stamp, prompt, response)
            for value, _ in map(split_buffer, e.writes):
                if value == f"{frame}.tokens":
                    self._make(value, now, made, False, "tokens")
                elif value == f"{frame}.columns":
                    self._make(value, now, {r: term("column", x) for r, x in made.items()}, False, "columns")
                elif value == f"{frame}.row_numbers":
                    self._make(value, now, numbers, False, "row_numbers")
                elif value.rpartition(".")[0] == frame and value.rpartition(".")[2] in d.numbers:
                    self._make(value, now, {r: term(value, x) for r, x in made.items()}, False, "row", "prompt")

    def _draw(self, e: Draw, now: Moment) -> None:
        d, own = self.data[e.data], {s.value: s.data for s in self.plan.states}
        need(all(own[v] in ("", e.data) for _, v in e.inputs), "a state of other rows")
        need(all(c in d.numbers for _, c in e.columns), "a column that is no number")
        given = [(n, self.values[v].of[0]) for n, v in e.inputs] + [(n, term("column", c)) for n, c in e.columns]
        cells = {n: Cell("batch", "", False, {0: x}) for n, x in given}
        need(len(cells) == len(given), "one input given twice")
        found = evaluate(self.programs[e.program], cells, {}, {}, 0)
        key = (found["weight"].of[0], repr(d), e.frame, now.times, self.plan.header.seed, self.step)
        made = {r: term("drawn", *key, r) for r in range(self.frames[e.frame].count)}
        need(self.frames[e.frame].count == d.batch, "rows that the frame has no room for")
        self._make(f"{e.frame}.row_numbers", now, made, False, "row_numbers")

    def _store(self, e: Store, now: Moment) -> None:
        b = next(b for b in self.plan.buffers if b.value == e.buffer)
        need([f for _, f in e.values] == [f.name for f in b.fields], "other fields")
        f, lens = self.frames[e.frame], self._lens_of(e.frame)
        for (v, _), field in zip(e.values, b.fields, strict=True):
            record = self.records[v]
            need((record.extent, record.dtype) == (field.extent, field.dtype), f"{v} is stored as something else")
            need(space(self.frames, record) == (f.row_space if field.extent == "row" else f.id), f"{v} is of other rows")
        need(f"{e.frame}.tokens" in [v for v, name in e.values if name == "tokens"], "other tokens")
        self._like(e.frame, e.buffer)
        old, here = self.values[e.buffer].of[0], self.lens[e.frame] if e.frame in self.lens else lens
        rows = tuple((here.prompt[r], here.response[r], tuple(self.values[v].of[r] for v, _ in e.values))
                     for r in self.rows(e.frame))
        new = term("stored", old, rows)
        self.stored[new] = (*self.stored[old], *rows)[-b.capacity:]
        self.values[e.buffer] = Held(now.stamp, {0: new})
        self.seen.append((e.buffer, self.stored[new]))

    def _like(self, frame: str, buffer: str) -> None:
        """What is stored and sampled is of one kind."""
        b, f = next(b for b in self.plan.buffers if b.value == buffer), self.frames[frame]
        need((f.data, f.tokenizer, f.temperature) == (b.data, b.tokenizer, b.temperature), "other tokens")
        need((f.max_prompt_tokens, f.max_response_tokens) == (b.max_prompt_tokens, b.max_response_tokens), "other limits")

    def _sample(self, e: Sample, now: Moment) -> None:
        b = next(b for b in self.plan.buffers if b.value == e.buffer)
        f, names = self.frames[e.frame], [f.name for f in b.fields]
        need([x for x, _ in e.values] == names, "other fields")
        self._like(e.frame, e.buffer)
        need(f.present_in == e.frame and not f.selected_from and len(f.chain) == 1, "rows that cannot be absent")
        need(all((x, "row") in {(y.name, y.extent) for y in b.fields} for _, x in e.fields), "no weight")
        need(bool(e.program) or not e.fields and not e.inputs, "a weight without a program")
        states = {s.value for s in self.plan.states if not s.data}
        need(all(v in states for _, v in e.inputs), "a weight by something else")
        rows = self.stored[self.values[e.buffer].of[0]]
        key = (e.frame, now.times, self.plan.header.seed, self.step)
        keys = [term("key", *key, i, self._weight(e, names, b, row[2])) for i, row in enumerate(rows)]
        drawn = [rows[i] for i in sorted(sorted(range(len(rows)), key=lambda i: keys[i])[: f.count])]
        absent = (0,) * (f.count - len(drawn))
        self.lens[e.frame] = Lens(now.stamp, (*(p for p, _, _ in drawn), *absent), (*(r for _, r, _ in drawn), *absent))
        for i, (field, (_, v)) in enumerate(zip(b.fields, e.values, strict=True)):
            need(self.records[v].frame == e.frame, f"{v} is of other rows")
            self._make(v, now, {r: row[2][i] for r, row in enumerate(drawn)}, field.dtype == "bool", field.extent)

    def _weight(self, e: Sample, names: list[str], b: ReplayBuffer, row: tuple[int, ...]) -> int:
        """What the weight of a stored row is made of."""
        if not e.program:
            return 0
        cells = {n: Cell("batch", "", False, {0: self.values[v].of[0]}) for n, v in e.inputs}
        for n, field in e.fields:
            at = names.index(field)
            cells[n] = Cell("batch", "", b.fields[at].dtype == "bool", {0: row[at]})
        need(len(cells) == len(e.inputs) + len(e.fields), "one input given twice")
        return evaluate(self.programs[e.program], cells, {}, {}, 0)["weight"].of[0]

    def _row_state(self, e: Lookup | Update) -> tuple[Mapping[int, int], int]:
        """The row numbers of a batch, and a state of the rows of its source."""
        need(e.data == self.frames[e.frame].data == {s.value: s.data for s in self.plan.states}[e.state], "other rows")
        need(self.records[f"{e.frame}.row_numbers"].extent == "row_numbers", "no row numbers")
        return self.values[f"{e.frame}.row_numbers"].of, self.values[e.state].of[0]

    def _generate(self, e: Generate, now: Moment) -> None:
        f, s = self.frames[e.frame], e.sampling
        need(s.max_new_tokens > 0 and 0 <= s.min_new_tokens <= s.max_new_tokens, "a number of tokens")
        need(s.greedy or s.temperature > 0 and 0 < s.top_p <= 1 and s.top_k >= 0 <= s.min_p <= 1, "no distribution")
        need(f.temperature == (1.0 if s.greedy else s.temperature), "log-probabilities at another temperature")
        prompts, given, p = self.values[f"{e.prompts}.tokens"], self.lens[e.prompts], self.frames[e.prompts]
        need(f.chain[0].parent == p.row_space and f.data == p.data, "completions of other rows")
        need(self.tokenizer(f) == self.tokenizer(p), "tokens of another tokenizer")
        need(f.max_prompt_tokens >= p.max_prompt_tokens + p.max_response_tokens, "prompts that have no room")
        need({r // f.per_prompt for r in self.rows(f.id)} == {*self.rows(p.id)}, "prompts that are not there")
        key = (self.models[e.model][1], repr(s), e.frame, now.times, self.plan.header.seed, self.step)
        made = {r: term("sample", *key, r, prompts.of[r // f.per_prompt]) for r in self.rows(e.frame)}
        self.before |= {x: prompts.of[r // f.per_prompt] for r, x in made.items()}
        most, totals = min(s.max_new_tokens, 4) + 1, given.totals()
        lens = [(totals[r // f.per_prompt], made[r] % most) if r in made else (0, 0) for r in range(f.count)]
        if e.cache_of:
            self._reads_cache(e, made)
        if any(b.startswith(f"{f.id}.cache@") for b in e.writes):
            need(self.records[f"{f.id}.cache"].extent == "cache" and self.records[f"{f.id}.cache"].frame == f.id, "no cache")
            version = self.models[e.model][1]
            held = Held(now.stamp, {r: term("cache", x, version) for r, x in made.items()})
            self.values[f"{f.id}.cache"] = self.made[f"{f.id}.cache", now.stamp] = held
            self.caches[f.id] = e.model, e.layout
        need(f.max_response_tokens >= s.max_new_tokens, "more tokens than the frame has room for")
        self.lens[e.frame] = Lens(now.stamp, *zip(*lens))  # type: ignore[arg-type]
        self._make(f"{e.frame}.tokens", now, made, False, "tokens")
        self._make(f"{e.frame}.logprobs", now, {r: term("lp", x) for r, x in made.items()}, False, "response")
        self._make(f"{e.frame}.finished", now, {r: term("end", x) for r, x in made.items()}, True, "row")

    def _reads_cache(self, e: Generate, made: Mapping[int, int]) -> None:
        """The keys and values of each prompt are in the cache of the row that it begins with, of the same version."""
        held, of, version = self.values[f"{e.cache_of}.cache"].of, self.frames[e.cache_of], self.models[e.model][1]
        tokens, f = self.values[f"{e.prompts}.tokens"].of, self.frames[e.frame]
        need(self.caches[e.cache_of] == (e.model, e.layout), "a cache of another model, or of other slices")
        for r in made:
            mine = tokens[r // f.per_prompt]
            mine = self.contained.get(mine, mine)
            need(held[r // (f.count // of.count)] == term("cache", mine, version), "a cache of other tokens or weights")

    def _infer(self, e: Infer, now: Moment) -> None:
        tokens, model = self.values[f"{e.frame}.tokens"], self.models[e.model][1]
        heads = {"causal_lm": ("logprobs", "entropy", "sum_squares"), "value_model": ("values", "end_values"), "reward_model": ("scores",)}
        need(e.output_name in heads[self.owners[e.model].head_name], "another head")
        need(self.records[e.value].frame in (e.frame, self.behind.get(e.frame)), "an output for other rows")
        drawn = self.frames[e.frame].temperature
        need(e.output_name not in heads["causal_lm"] or e.temperature == drawn, "another temperature")
        made = {r: term(e.output_name, model, e.temperature, tokens.of[r]) for r in self.rows(e.frame)}
        self._make(e.value, now, made, False, "row" if e.output_name in ("scores", "end_values") else "response")

    def _train(self, e: Train, now: Moment) -> None:
        model, s, program = self.owners[e.model], self.spreads[e.spread], self.programs[e.loss]
        need(model.optimizer is not None, "nothing to train with")
        frames = {f: self.frames[f] for f in e.frames}
        cells = {n: self.cell(v) for n, v in e.data_inputs}
        levels = {"logprobs": "token", "entropy": "token", "sum_squares": "token", "values": "token", "scores": "seq",
                  "end_values": "seq"}
        for n, f, what in e.model_outputs:
            rows = {r: term(what, self.models[e.model][1], self.values[f"{f}.tokens"].of[r]) for r in self.rows(f)}
            cells[n] = Cell(levels[what], f if levels[what] == "token" else frames[f].row_space, False, rows)
        need(len(cells) == len(e.data_inputs) + len(e.model_outputs), "one input given twice")
        views = {f: View(frames[f], self.rows(f)) for f in e.frames}
        made = evaluate(program, cells, views, {}, 0)
        known = check_loss(program, model.head_name, e, frames)
        need(all(n in known for n, _ in e.outputs), "a metric that no training has")
        version = (self.models[e.model][1], repr(program), repr(model.optimizer), model.planned_updates, s.minibatches,
                   s.epochs, s.shuffle, s.call, self.plan.header.seed, e.nonfinite, e.router_bias_update_rate, e.rate and self.cell(e.rate).of[0], tuple(made[n].of[0] for n in sorted(made)))
        self.models[e.model] = now.stamp, term("train", *version)
        for n, v in e.outputs:
            self._make(v, now, {0: term(n, *version)}, False, "batch")

    def _compute(self, e: Compute, now: Moment) -> None:
        views = {f: View(self.frames[f], self.rows(f)) for f in e.frames}
        cells = {n: self.cell(v) for n, v in e.inputs}
        need(len(cells) == len(e.inputs), "one input given twice")
        found = evaluate(self.programs[e.program], cells, views, self.functions, now.times)
        for n, v in e.outputs:
            record, cell = self.records[v], found[n]
            here = WIDE if record.extent == "array" else space(self.frames, record)
            need((record.level, here) == (cell.level, cell.space), f"{v} is something else")
            self._make(v, now, cell.of, cell.truth, "response", "row", "prompt", "batch", "array")

    def _derive(self, e: Derive, now: Moment) -> None:
        f = self.frames[e.frame]
        made = self.derived[e.frame, now.stamp] = derived(self, e)
        if e.op != "restrict":
            both = ([made.lens.get(r, (0, 0))[i] for r in range(f.count)] for i in (0, 1))
            self.lens[e.frame] = Lens(now.stamp, *map(tuple, both))  # type: ignore[arg-type]
            need({*self.rows(e.frame)} == made.of.keys(), f"{e.frame} has other rows than it says")
        self._lens_of(e.frame)
        need(e.values, "a frame of no values")
        sources = {w: [v for v, x in e.values if x == w] for _, w in e.values}
        for w, own in sources.items():
            new, held = self.records[w], [(self.records[v], self.values[v]) for v in own]
            need(len(held) == (len(e.parts) if e.op == "concat" else 1), f"{w} is made of too many values, or too few")
            need(all((v.extent, v.level) == (new.extent, new.level) for v, _ in held), "kept as something else")
            need(new.frame == e.frame and new.extent not in ("columns", "lengths", "cache"), f"{w} is of other rows")
            if new.extent == "prompt":
                need(e.op in ("where", "restrict") and self._above(f, held[0][0]), f"{own[0]} is of other prompts")
                of = {i: held[0][1].of[i] for i in self.ids(new)}
            elif new.extent == "tokens" and made.tokens is not None:
                of = dict(made.tokens)
            elif new.extent == "response" and made.logprobs is not None:
                need(own == [f"{e.source}.logprobs"], f"{own[0]} is of a part alone")
                of = dict(made.logprobs)
            else:
                order = e.parts if e.op == "concat" else (e.source,)
                for (v, _), part in zip(held, order):
                    above = e.op in ("where", "restrict") and v.level == "seq" and self._above(f, v)
                    rows = v.frame == part or v.level == "seq" and space(self.frames, v) == self.frames[part].row_space
                    need(above or rows or self._selected(f, v), f"{v.id} is of other rows")
                of = {n: held[order.index(part)][1].of[r] for n, (part, r) in made.of.items()}
            self._make(w, now, of, held[0][1].truth, new.extent)

    def _selected(self, f: IndexedFrame, v: Value) -> bool:
        """Whether a value is of a frame that a selection goes back to."""
        while f.selected_from:
            f = self.frames[f.selected_from]
            if f.id == v.frame:
                return True
        return False

    def space_of(self, value: str) -> str:
        return space(self.frames, self.records[value]) if self.records[value].level == "seq" else ""

    def tokenizer(self, frame: IndexedFrame) -> str:
        return frame.tokenizer or self.data[frame.data].tokenizer

    def begins(self, sequence: int, with_: int) -> bool:
        """Whether a sequence begins with another one, as far as somebody knows."""
        while sequence != with_ and sequence in self.before:
            sequence = self.before[sequence]
        return sequence == with_

    def _above(self, f: IndexedFrame, v: Value) -> bool:
        """Whether the rows of a value are those that a selection was taken from, under the same numbers."""
        of = self.frames[v.frame]
        while f.selected_from:
            f = self.frames[f.selected_from]
            same = of.prompt_space == f.prompt_space if v.level == "prompt" else of.row_space == f.row_space
            if v.frame == f.id or same:
                return True
        return False

    def _lens_of(self, frame: str) -> Lens:
        tells = self.frames[frame].present_in or frame
        need(tells in self.lens, f"the lengths of {frame} are not known")
        return self.lens[tells]

    def _empty(self, value: str) -> None:
        v = self.records[value]
        f = self.frames[v.frame]
        if v.extent == "lengths":
            self.lens[v.frame] = Lens(-1, (0,) * f.count, (0,) * f.count)
        else:
            self.values[value] = Held(-1, {}, v.dtype == "bool")

    def _collect(self, e: Collect, now: Moment) -> None:
        f, into = self.frames[e.frame], self.frames[e.into]
        need((now.turn + 1) * f.count <= into.count and f.per_prompt == into.per_prompt, "no room for this turn")
        for v, w in e.values:
            old, new = self.records[v], self.records[w]
            need((old.frame, new.frame) == (e.frame, e.into), "rows of another frame")
            need((old.extent, old.level) == (new.extent, new.level), "collected as something else")
            if old.extent == "lengths":
                a, b, here = self.lens[e.into], self.lens[e.frame], now.turn * f.count
                sides = (a.prompt, b.prompt), (a.response, b.response)
                both = ((*x[:here], *y, *x[here + f.count :]) for x, y in sides)
                self.lens[e.into] = Lens(now.stamp, *both)  # type: ignore[arg-type]
                continue
            shift = now.turn * (f.count // f.per_prompt if old.extent == "prompt" else f.count)
            more = {i + shift: x for i, x in self.values[v].of.items()}
            self._make(w, now, {**self.values[w].of, **more}, self.values[v].truth, old.extent)
