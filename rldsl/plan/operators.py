"""Everything that is known of operators and built-in functions, once.

An `Operator` is what programs of a plan are made of (`expr.py`). A `Builtin` is what a user calls; the compiler lowers
it to operators. The type rules, the verifier, the losses, the language server, the table of docs/language.md and the
highlighters derive from these records. What an operator computes is in `runtime/interpreter/expression_ops.py`, under
its name.

`pytest --update-golden tests/docs/test_pages.py tests/editors/test_words.py` writes the table and the highlighters from
these records.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from rldsl.plan.expr import Level

Family = Literal["elementwise", "reduction", "order", "sequence", "rows", "random", "array", "leaf"]
# The unit of a result: of no unit, that of the arguments in `same_unit`, a product's, a quotient's, or what is counted.
UnitRule = Literal["none", "keep", "product", "quotient", "count"]


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator of a plan's programs."""

    name: str  # in a plan
    family: Family  # what kind of operator it is
    arity: int  # number of arguments
    meaning: str  # in words; its arguments are a, b and c
    takes: tuple[Level, ...] = ()  # sequence operators: the levels of the arguments
    gives: Level | None = None  # sequence operators: the level of the result
    condition: bool = False  # the result is true or false
    keeps_truth: bool = False  # the result is true or false if its arguments are, of three the last two
    unit: UnitRule = "none"  # how the unit of the result follows from those of the arguments
    # Elementwise and sequence operators: arguments whose units must fit together; with "keep", the result takes theirs.
    # A reduction with "keep" takes the unit of its first argument.
    same_unit: tuple[int, ...] = ()
    gradient: bool = True  # passes a gradient on to its arguments
    in_loss: bool = True  # False: nowhere in a loss, its metrics included (random numbers, Python functions)
    # A reduction to batch: how the results of ranks become one. "gather": from the elements of all ranks.
    combine: Literal["", "sum", "max", "min", "gather"] = ""


def _unary(name: str, meaning: str, unit: UnitRule = "none", gradient: bool = True,
           keeps_truth: bool = False) -> Operator:
    return Operator(name, "elementwise", 1, meaning, keeps_truth=keeps_truth, unit=unit,
                    same_unit=(0,) if unit == "keep" else (), gradient=gradient)


def _binary(name: str, meaning: str, unit: UnitRule = "none", same: bool = False) -> Operator:
    return Operator(name, "elementwise", 2, meaning, unit=unit, same_unit=(0, 1) if same else ())


def _condition(name: str, meaning: str, arity: int = 2, same: bool = False) -> Operator:
    return Operator(name, "elementwise", arity, meaning, condition=True, same_unit=(0, 1) if same else (),
                    gradient=False)


def _sequence(name: str, takes: tuple[Level, ...], gives: Level, meaning: str, gradient: bool = True,
              keeps_truth: bool = False) -> Operator:
    return Operator(name, "sequence", len(takes), meaning, takes, gives, keeps_truth=keeps_truth, gradient=gradient)


def _rows(name: str, arity: int, meaning: str, keeps_truth: bool = False) -> Operator:
    return Operator(name, "rows", arity, meaning, keeps_truth=keeps_truth, unit="keep", same_unit=(0,), gradient=False,
                    in_loss=False)


def _siblings(name: str, arity: int, meaning: str, keeps_truth: bool = False) -> Operator:
    """In a loss, too, where it needs whole prompts."""
    return replace(_rows(name, arity, meaning, keeps_truth), gradient=True, in_loss=True)


def _array(name: str, arity: int, meaning: str) -> Operator:
    return Operator(name, "array", arity, meaning, gradient=False, in_loss=False)


_ALL = (
    _binary("add", "a + b", "keep", same=True), _binary("sub", "a - b", "keep", same=True),
    _binary("mul", "a * b", "product"), _binary("div", "a / b", "quotient"), _unary("neg", "-a", "keep"),
    _binary("pow", "a ** b"),
    _condition("lt", "a < b", same=True), _condition("le", "a <= b", same=True), _condition("gt", "a > b", same=True),
    _condition("ge", "a >= b", same=True), _condition("eq", "a == b", same=True), _condition("ne", "a != b", same=True),
    _condition("and", "both"), _condition("or", "either"), _condition("not", "negation", arity=1),
    _unary("exp", "e ** a"), _unary("log", "natural logarithm"), _unary("expm1", "e ** a - 1, exact near 0"),
    _unary("log1p", "log(1 + a), exact near 0"), _unary("sqrt", "square root"), _unary("abs", "magnitude", "keep"),
    _binary("min", "the smaller", "keep", same=True), _binary("max", "the larger", "keep", same=True),
    _unary("sigmoid", "1 / (1 + exp(-a))"), _unary("logsigmoid", "log(sigmoid(a)), stable"),
    Operator("where", "elementwise", 3, "b where a else c", keeps_truth=True, unit="keep", same_unit=(1, 2)),
    _unary("stop_gradient", "a as a constant", "keep", gradient=False, keeps_truth=True),
    # Reductions: the attribute `to` is the level reached; "batch" reduces over all ranks.
    Operator("sum", "reduction", 1, "sum of a over what is finer than `to`", unit="keep", combine="sum"),
    Operator("mean", "reduction", 1, "mean over the elements of a", unit="keep", combine="sum"),
    Operator("amax", "reduction", 1, "largest", unit="keep", combine="max"),
    Operator("amin", "reduction", 1, "smallest", unit="keep", combine="min"),
    Operator("count", "reduction", 1, "number of elements of a", unit="count", gradient=False, combine="sum"),
    Operator("median", "reduction", 1, "the middle element of a, or the mean of the two in the middle", unit="keep",
             combine="gather"),
    Operator("quantile", "reduction", 2, "the number below which the share b of the elements of a lies, between "
             "neighbors by linear interpolation; b is of level batch", unit="keep", combine="gather"),
    # Attributes `within`, the level inside whose elements a is ordered, and `of`, the space of that level.
    Operator("sort", "order", 1, "the elements of a in ascending order, one at the place of each", unit="keep",
             same_unit=(0,)),
    Operator("rank", "order", 1, "how many elements are smaller, plus half of the others that are equal",
             gradient=False),
    # Of tokens, within prompts.
    Operator("across", "order", 1, "sum of the tokens of a that are as far from the beginning of their responses",
             unit="keep"),
    # Sequence operators work inside each sequence.
    _sequence("next", ("token",), "token", "the following token's value, 0 at the last", keeps_truth=True),
    _sequence("prev", ("token",), "token", "the preceding token's value, 0 at the first", keeps_truth=True),
    _sequence("last", ("token",), "seq", "the value at the last token, 0 for an empty sequence", keeps_truth=True),
    _sequence("at_end", ("seq",), "token", "the value at the last token, 0 elsewhere; attribute `frame`",
              keeps_truth=True),
    _sequence("cumsum", ("token",), "token", "inclusive running sum"),
    _sequence("discount", ("token", "batch"), "token", "y_t = x_t + g * y_{t+1}"),
    _sequence("discount_by", ("token", "token"), "token", "y_t = a_t + b_t * y_{t+1}"),
    _sequence("len", (), "seq", "number of response tokens; attribute `frame`", gradient=False),
    Operator("index", "sequence", 0, "the position of a row among those of its prompt, from 0; attribute `frame`", (),
             "seq", gradient=False, in_loss=False),
    Operator("prompt_len", "sequence", 0, "the number of tokens before the response; attribute `frame`", (), "seq",
             gradient=False, in_loss=False),
    # What relates rows to other rows. Of siblings, which are the present rows of one parent, in ascending order:
    _siblings("next_row", 1, "the next sibling's value, 0 at the last", keeps_truth=True),
    _siblings("prev_row", 1, "the preceding sibling's value, 0 at the first", keeps_truth=True),
    _siblings("cumsum_rows", 1, "inclusive running sum over siblings"),
    _siblings("discount_rows", 2, "y_j = x_j + g * y_{j+1} over siblings; g is of level batch"),
    _siblings("last_row", 1, "the value at the last sibling, as a value of the parent; 0 where there is none",
              keeps_truth=True),
    _rows("at_last_row", 1, "a at the last sibling, 0 at the others", keeps_truth=True),
    # Of rows with the same numbers, where one are a selection of the other, or lie above one:
    _rows("over", 2, "a, a value of a selection, as a value of all rows; b where a row was not selected",
          keeps_truth=True),
    # Of prefixes: a at the last prefix that ends at or before each token; b says how many tokens each prefix has
    _rows("along", 2, "for each token of `frame` the value of the last prefix at or before it, 0 where there is none; "
          "b: the tokens of the prefix"),
    # A number in (0, 1) per element, drawn from the seed, the step, the attribute `call` (the name of the call's
    # statement; "name#2" for its second call), and the row and position of the element. Attribute `frame` at token
    # level.
    Operator("uniform", "random", 0, "a random number per element", in_loss=False),
    Operator("step", "random", 0, "the number of the step, from 1", in_loss=False),
    # What `metric hist` and `metric table` log (`plan/arrays.py`): values of several numbers at the level of the batch.
    _array("histogram", 1, "how many elements of a are in each of `bins` equally wide bins, from `low` to `high`, or "
           "else from the smallest element to the largest"),
    _array("table_rows", 0, "the first `rows` rows of `frame`, with their tokens"),
    _array("table_column", 1, "a, a value of sequences, for the first `rows` rows of `frame`"),
    Operator("input", "leaf", 0, "an input; attribute `name`"),
    Operator("const", "leaf", 0, "a constant; attribute `value`"),
    Operator("py", "leaf", 0, "a user's Python function; attributes `function`, a key of Plan.functions, and `frame`, "
             "the sequences whose rows it is called with", in_loss=False),
)
OPERATORS: dict[str, Operator] = {o.name: o for o in _ALL}
if wrong := [o.name for o in _ALL if (o.family == "reduction") != bool(o.combine)]:
    raise TypeError(f"reductions, and no other operators, say how ranks combine their results: {', '.join(wrong)}")


def in_family(op: str, *families: Family) -> bool:
    """Whether `op` is an operator of one of these families; a mutated plan may name anything."""
    return op in OPERATORS and OPERATORS[op].family in families


Form = Literal[  # how calls are lowered
    "elementwise",  # to `operator`, for each element
    "reduction",  # to `operator`; where there is none, by the function in `semantics/composites.py:COMPOSITES`
    "either",  # a reduction with one argument, else elementwise
    "order",  # to `operator`, perhaps with `by`
    "sequence",  # by `semantics/sequence_functions.py:call`
    "frames",  # to nodes of the dataflow graph, by `graph/derive.py`
    "special",  # by the function in `semantics/builtins.py:SPECIAL`
]


@dataclass(frozen=True, slots=True)
class Builtin:
    """A built-in function of the language."""

    name: str  # in a program
    form: Form  # how calls are lowered
    signatures: tuple[tuple[str, str, str], ...]  # (call, levels, meaning), as documented; an editor shows the first
    operator: str = ""  # the operator that a call becomes; "": several or none, made where `form` says
    min_args: int = 1  # positional
    max_args: int = 1  # positional
    options: tuple[str, ...] = ()  # named arguments
    by_prompt: bool = False  # a sequence function that also works `by prompt`, over the sequences of a prompt

    @property
    def signature(self) -> str:
        """All calls: "max(a, b) or max(x)"."""
        return " or ".join(call for call, _, _ in self.signatures)

    @property
    def summary(self) -> str:
        """The meaning of the first call and its levels: "The sum within each M (F -> M)." """
        _, levels, meaning = self.signatures[0]
        return f"{meaning[0].upper()}{meaning[1:]} ({levels})."


def _function(name: str, meaning: str) -> Builtin:
    return Builtin(name, "elementwise", ((f"{name}(x)", "L -> L", meaning),), name)


def _sequence_function(name: str, call: str, levels: str, meaning: str, arguments: int = 1,
                       siblings: str = "") -> Builtin:
    """siblings: the meaning of the same `by prompt`, over the sequences of each prompt; "": there is none."""
    signatures = [(call, levels, meaning)]
    if siblings:
        x, comma, rest = call.removeprefix(f"{name}(").partition(",")
        signatures.append((f"{name}({x.removesuffix(')')} by prompt{comma}{rest or ')'}",
                           levels.replace("token -> seq", "seq -> prompt").replace("token", "seq"), siblings))
    return Builtin(name, "sequence", tuple(signatures), name, arguments, arguments, by_prompt=bool(siblings))


_FUNCTIONS = (
    _function("exp", "e to the power of x"),
    _function("log", "the natural logarithm"),
    _function("expm1", "exp(x) - 1, accurate near 0"),
    _function("log1p", "log(1 + x), accurate near 0"),
    _function("sqrt", "the square root"),
    _function("abs", "the absolute value"),
    _function("sigmoid", "1 / (1 + exp(-x))"),
    _function("logsigmoid", "log(sigmoid(x)), numerically stable"),
    Builtin("min", "either", (("min(a, b)", "L, L -> L", "the smaller"),
                              ("min(x)", "F -> batch", "the minimum"),
                              ("min(x by M)", "F -> M", "the minimum within each M")), "amin", max_args=2),
    Builtin("max", "either", (("max(a, b)", "L, L -> L", "the larger"),
                              ("max(x)", "F -> batch", "the maximum"),
                              ("max(x by M)", "F -> M", "the maximum within each M")), "amax", max_args=2),
    Builtin("clip", "special", (("clip(x, low, high)", "L, L, L -> L", "x clipped to [low, high]"),),
            min_args=3, max_args=3),
    Builtin("where", "elementwise", (
        ("where(c, a, b)", "L, L, L -> L",
         "a where the condition c holds, else b; a constant c is evaluated at compile time"),), "where", 3, 3),
    _function("stop_gradient", "x, treated as a constant by differentiation"),
    Builtin("sum", "reduction", (("sum(x)", "F -> batch", "the sum over the whole batch, across all ranks"),
                                 ("sum(x by M)", "F -> M", "the sum within each M")), "sum"),
    Builtin("mean", "reduction", (("mean(x)", "F -> batch", "the mean over the whole batch"),
                                  ("mean(x by M)", "F -> M", "the mean within each M")), "mean"),
    Builtin("count", "reduction", (("count(x)", "F -> batch", "the number of elements"),
                                   ("count(x by M)", "F -> M", "the number within each M"),
                                   ("count(gen)", "sequences -> batch", "the number of sequences, prompts or pairs")),
            "count"),
    Builtin("std", "reduction", (
        ("std(x, unbiased=true)", "F -> batch",
         "the standard deviation, divided by n - 1 (`unbiased=false`: by n); 0 for a single element"),
        ("std(x by M, unbiased=true)", "F -> M", "the same within each M")), options=("unbiased",)),
    Builtin("var", "reduction", (
        ("var(x, unbiased=true)", "F -> batch",
         "the variance, divided by n - 1 (`unbiased=false`: by n); 0 for a single element"),
        ("var(x by M, unbiased=true)", "F -> M", "the same within each M")), options=("unbiased",)),
    Builtin("logsumexp", "reduction", (
        ("logsumexp(x)", "F -> batch", "log(sum(exp(x))), numerically stable"),
        ("logsumexp(x by M)", "F -> M", "the same within each M"))),
    Builtin("median", "reduction", (
        ("median(x)", "F -> batch", "the median of all elements, across all ranks; of an even number, the mean of the "
         "two in the middle"),
        ("median(x by M)", "F -> M", "the same within each M")), "median"),
    Builtin("quantile", "reduction", (
        ("quantile(x, q)", "F, batch -> batch",
         "the q-quantile of all elements, across all ranks, with linear interpolation"),
        ("quantile(x by M, q)", "F, batch -> M", "the same within each M")), "quantile", 2, 2),
    Builtin("sort", "order", (
        ("sort(x)", "F -> F", "the elements of x in ascending order: the smallest is where the first element was"),
        ("sort(x by M)", "F -> F", "the same within each M")), "sort"),
    Builtin("rank", "order", (
        ("rank(x)", "F -> F", "for each element how many others are smaller, plus half of those that are equal"),
        ("rank(x by M)", "F -> F", "the same within each M")), "rank"),
    Builtin("across", "order", (
        ("across(x by prompt)", "token -> token", "for each token the sum over the tokens at the same position of all "
         "responses to its prompt"),), "across"),
    _sequence_function("len", "len(gen)", "sequences -> seq", "the number of response tokens"),
    _sequence_function("next", "next(x)", "token -> token", "the value at the next token, 0 at the last",
                       siblings="the value of the next sequence of the prompt, 0 at the last"),
    _sequence_function("prev", "prev(x)", "token -> token", "the value at the previous token, 0 at the first",
                       siblings="the value of the previous sequence of the prompt, 0 at the first"),
    _sequence_function("cumsum", "cumsum(x)", "token -> token", "the running sum",
                       siblings="the running sum over the sequences of the prompt"),
    Builtin("discount", "sequence", (
        ("discount(x, g)", "token, batch -> token", "y_t = x_t + g y_{t+1}"),
        ("discount(x, g)", "token, L -> token", "y_t = x_t + g_t y_{t+1}, with a factor for each token, sequence or "
         "prompt"),
        ("discount(x by prompt, g)", "seq, batch -> seq", "y_t = x_t + g y_{t+1} over the sequences of the prompt")),
        "discount", 2, 2, by_prompt=True),
    _sequence_function("last", "last(x)", "token -> seq", "the value at the last token; 0 for an empty response",
                       siblings="the value of the last sequence of the prompt"),
    Builtin("at_end", "sequence", (
        ("at_end(s)", "seq -> token", "s at the last token, 0 elsewhere"),
        ("at_end(s, gen)", "seq, sequences -> token", "the same, if s belongs to both sequences of a pair"),
        ("at_end(s, cuts)", "seq, prompts -> seq", "s at the last [prefix](#prefixes) of each sequence, 0 elsewhere"),
        ("at_end(s by prompt)", "seq -> seq", "s at the last sequence of each prompt, 0 elsewhere")),
        "at_end", max_args=2, by_prompt=True),
    Builtin("over", "sequence", (
        ("over(x, kept)", "F, sequences -> F", "the values of x for the rows of a [selection](#selection)"),
        ("over(x, gen, y)", "seq, sequences, batch -> seq",
         "values x of a [selection](#selection) of `gen` as values of all of `gen`: y where a row was not selected")),
        min_args=2, max_args=3),
    Builtin("along", "sequence", (
        ("along(v, gen)", "seq, sequences -> token",
         "for each token of `gen` the value v of the last [prefix](#prefixes) that ends before it"),),
        min_args=2, max_args=2),
    Builtin("prefixes", "frames", (
        ("prefixes(gen, at=TEXT, most=m)", "sequences -> prompts",
         "the beginnings of each response as prompts: see [prefixes](#prefixes)"),
        ("prefixes(gen, every=n, most=m)", "sequences -> prompts", "the same, every n tokens"),
        ("prefixes(gen, fractions=[0.5])", "sequences -> prompts", "the same, at fractions of the response")),
        options=("at", "every", "fractions", "most")),
    Builtin("pick", "frames", (
        ("pick(gen, x)", "sequences, seq -> sequences",
         "of each prompt the sequence with the largest x, the first of equals; see "
         "[sequences from sequences](#sequences-from-sequences)"),),
        min_args=2, max_args=2),
    Builtin("whole", "frames", (
        ("whole(more)", "sequences -> sequences",
         "with all that models generated of each sequence as the response; see "
         "[training on whole chains](#training-on-whole-chains)"),),
        min_args=1, max_args=1),
    Builtin("others", "frames", (
        ("others(gen)", "sequences -> sequences",
         "for each sequence the other sequences of its prompt; see "
         "[all pairs of a prompt](#all-pairs-of-a-prompt)"),),
        min_args=1, max_args=1),
    Builtin("pair", "frames", (
        ("pair(best, worst)", "sequences, sequences -> pairs",
         "pairs of a chosen and a rejected side; see "
         "[sequences from sequences](#sequences-from-sequences)"),),
        min_args=2, max_args=2),
    Builtin("concat", "frames", (
        ("concat(gen, more)", "sequences, sequences -> sequences",
         "the rows of several batches as one, with the values that all of them have; see "
         "[concatenating](#concatenating)"),),
        min_args=2, max_args=99),
    Builtin("uniform", "special", (
        ("uniform(x)", "F -> F", "a random number in the open interval (0, 1) for each element of x"),), "uniform"),
    Builtin("step_number", "special", (
        ("step_number()", "-> batch", "the number of the step, from 1"),), "step", 0, 0),
    Builtin("choice", "special", (
        ('choice(word, "a", "b")', "text, text, text -> text",
         "`word`, which must be one of the others; evaluated at compile time"),), min_args=2, max_args=99),
)
BUILTINS: dict[str, Builtin] = {f.name: f for f in _FUNCTIONS}
if wrong := [f.name for f in _FUNCTIONS if f.operator and f.operator not in OPERATORS]:
    raise TypeError(f"built-in functions of operators that do not exist: {', '.join(wrong)}")
ORDERS = tuple(f.name for f in _FUNCTIONS if f.form == "order")
REDUCTIONS = tuple(f.name for f in _FUNCTIONS if f.form in ("reduction", "either"))
