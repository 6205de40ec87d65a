"""The least time that the phases of a step can take on this machine, for `benchmarks/bound.py`.

In: what a model multiplies (`Decoder`), the lengths of its sequences, and the machine (`Machine`). Out: CPU seconds of
each phase.

Counted are matrix products, attention over exact lengths, and what must be read from or written to memory at least:
nothing for norms, activations, rotary embeddings, softmax, sampling, or a second pass over anything. Products are
measured and not computed from a peak: the products of a whole pass one after the other, all layers in turn, so that
weights are as cold as in the pass, each by the fastest of the ways that torch has on this machine for weights as they
are stored, or by our kernels where those are faster. Attention is divided by the rate of the machine's
fastest product, or in decoding by the bandwidth at which as many bytes are read, if that takes longer. So a fraction of
1 is out of reach.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from rldsl.backends.torch.kernels import few_row_products, panel_products
from rldsl.backends.torch.kernels.few_row_products import product_call

BYTES = 4             # of a number: float32
ADAMW_TRANSFERS = 8   # reads of p, g, m, v and g for its norm; writes of p, m, v
AT_LEAST = 0.03       # CPU seconds of a measurement
ROW_COUNTS = 5        # numbers of rows at which decoding is measured; linear in between


@dataclass(frozen=True, slots=True)
class Decoder:
    """What a model without experts multiplies for a token."""

    linears: tuple[tuple[int, int], ...]  # (inputs, outputs) of each linear layer, in order, without the head
    hidden: int      # inputs of the head
    vocab: int       # its outputs
    layers: int      # that attend
    heads: int       # of queries
    kv_heads: int
    head_dim: int
    parameters: int  # that are trained

    @staticmethod
    def of(path: str) -> Decoder:
        """Of a model directory. Errors: ValueError where it multiplies with more than linear layers."""
        from torch import nn
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.pytorch_utils import Conv1D

        config = AutoConfig.from_pretrained(path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        head = model.get_output_embeddings()
        linears = []
        for module in model.modules():
            if module is not head and isinstance(module, nn.Linear | Conv1D):
                shape = module.weight.shape
                linears.append((shape[1], shape[0]) if isinstance(module, nn.Linear) else (shape[0], shape[1]))
        unique = {id(p): p for p in model.parameters()}.values()
        if any(p.dim() > 2 for p in unique):
            raise ValueError(f"{path}: the least time of experts and convolutions is not known")
        heads = config.num_attention_heads
        return Decoder(tuple(linears), config.hidden_size, config.vocab_size, config.num_hidden_layers, heads,
                       getattr(config, "num_key_value_heads", None) or heads,
                       getattr(config, "head_dim", None) or config.hidden_size // heads, sum(p.numel() for p in unique))

    def product_flops(self, rows: int, head_rows: int) -> int:
        """Of the products of a forward pass with weights. rows: tokens; head_rows: those whose logits are wanted."""
        return 2 * (rows * sum(i * o for i, o in self.linears) + head_rows * self.hidden * self.vocab)

    def causal_flops(self, lengths: Sequence[int]) -> int:
        """Of attention over complete sequences: products with keys and with values, only of what a token sees."""
        return 2 * self.layers * self.heads * self.head_dim * sum(n * (n + 1) for n in lengths)

    def decode_flops(self, seen: int) -> int:
        """Of the attention of new tokens that see so many others in all, themselves included."""
        return 4 * self.layers * self.heads * self.head_dim * seen

    def cache_bytes(self, seen: int) -> int:
        """Keys and values that these new tokens read."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES * seen


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of the sequences of a step, in tokens."""

    prompts: tuple[int, ...]    # of the different prompts
    n: int                      # sequences of each
    responses: tuple[int, ...]  # n for each prompt

    @property
    def sequences(self) -> list[int]:
        """Whole ones."""
        return [self.prompts[i // self.n] + r for i, r in enumerate(self.responses)]

    @property
    def tokens(self) -> int:
        """With each different prompt once."""
        return sum(self.prompts) + sum(self.responses)

    def causal_flops(self, decoder: Decoder) -> int:
        """Of attention over all sequences, that inside each different prompt once."""
        again = [n for n in self.prompts for _ in range(self.n - 1)]
        return decoder.causal_flops(self.sequences) - decoder.causal_flops(again)

    def decode_steps(self) -> list[tuple[int, int]]:
        """(sequences, tokens that their new ones see in all) of each pass that decodes; the first token of a response
        comes from its prompt."""
        whole = list(zip((self.prompts[i // self.n] for i in range(len(self.responses))), self.responses, strict=True))
        return [(sum(r > t for _, r in whole), sum(p + t for p, r in whole if r > t))
                for t in range(1, max(self.responses, default=0))]


def timed(function: Callable[[], object], repeats: int = 3) -> float:
    """The least CPU seconds of a call, after one that warms up."""
    function()
    start = time.process_time()
    function()
    times = max(1, int(AT_LEAST / max(time.process_time() - start, 1e-6)))
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        for _ in range(times):
            function()
        best = min(best, (time.process_time() - start) / times)
    return best


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return out


def _few_rows(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if not few_row_products.takes(a, b):
        return torch.mm(a, b.t(), out=out)
    product_call(out, a, b, None)()
    return out


def _panels(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return panel_products.panel_product(a, b) if panel_products.takes(a, b) else torch.mm(a, b.t(), out=out)


# a @ b.T into `out`, or into new memory
Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
WAYS: dict[str, Way] = {
    "mm": lambda a, b, out: torch.mm(a, b.t(), out=out),
    "oneDNN": lambda a, b, out: _onednn(a, b),
    "oneDNN, transposed": lambda a, b, out: _onednn(b, a),
    "few rows": _few_rows,
    "panels": _panels,
    "panels, transposed": lambda a, b, out: _panels(b.contiguous(), a, out.t()),
}


@dataclass(frozen=True, slots=True)
class Product:
    """a @ b.T, with the memory for it."""

    a: torch.Tensor
    b: torch.Tensor
    out: torch.Tensor

    @property
    def kind(self) -> tuple[torch.Size, torch.Size]:
        return self.a.shape, self.b.shape


class Machine:
    """This machine, with the threads that torch now has, and the weights of a model in memory."""

    def __init__(self, decoder: Decoder):
        self.decoder = decoder
        self.weights = [torch.randn(o, i) for i, o in decoder.linears]
        self.head = torch.randn(decoder.vocab, decoder.hidden)
        self.ways = [way for name, way in WAYS.items() if "oneDNN" not in name or _has_onednn()]

    def forward(self, rows: int, head_rows: int) -> float:
        """CPU seconds of the products of a forward pass."""
        return self._all([self._product(torch.randn(count, w.shape[1]), w)
                          for w, count in self._weights(rows, head_rows)])

    def backward(self, rows: int, head_rows: int) -> float:
        """Of those of a backward pass: gradients of inputs and of weights."""
        products = []
        for w, count in self._weights(rows, head_rows):
            x, grad = torch.randn(count, w.shape[1]), torch.randn(count, w.shape[0])
            products += [self._product(grad, w.t()), self._product(grad.t(), x.t())]
        return self._all(products[::-1])

    @cached_property
    def peak(self) -> float:
        """Operations a second of products that fit into caches."""
        best = 0.0
        for size in (256, 512, 1024):
            product = self._product(torch.randn(size, size), torch.randn(size, size))
            best = max(best, *(2 * size**3 / timed(lambda w=way: w(product.a, product.b, product.out))
                               for way in self.ways))
        return best

    def read(self, size: float, working_set: float) -> float:
        """CPU seconds in which `size` bytes are read, of so many that are read in turn."""
        count = max(1, int(min(working_set, 512e6) / 2 / (1 << 20)))  # pairs of tensors of a MiB: L2 holds both
        pairs = [torch.ones(2, 1 << 18) for _ in range(count)]
        seconds = min(timed(lambda: [torch.dot(p[0], p[1]) for p in pairs]), timed(lambda: [p.sum() for p in pairs]))
        return size * seconds / (count * (2 << 20))

    def update(self) -> float:
        """Of the least that an update by AdamW reads and writes."""
        count = min(self.decoder.parameters, 1 << 26)
        x, y = torch.ones(count), torch.ones(count)
        rates = [3 * BYTES * count / timed(lambda: x.add_(y)), 2 * BYTES * count / timed(lambda: x.mul_(1.0)),
                 2 * BYTES * count / timed(lambda: x.copy_(y))]
        return ADAMW_TRANSFERS * BYTES * self.decoder.parameters / max(rates)

    def _weights(self, rows: int, head_rows: int) -> list[tuple[torch.Tensor, int]]:
        return [(w, rows) for w in self.weights if rows] + [(self.head, head_rows)] * bool(head_rows)

    @staticmethod
    def _product(a: torch.Tensor, b: torch.Tensor) -> Product:
        return Product(a, b, torch.empty(a.shape[0], b.shape[0]))

    def _all(self, products: Sequence[Product]) -> float:
        """All in turn, those of a kind by the way that is the fastest for all of that kind."""
        chosen: dict[tuple[torch.Size, torch.Size], Way] = {}
        for kind in {p.kind for p in products}:
            same = [p for p in products if p.kind == kind]
            chosen[kind] = min(self.ways, key=lambda way: timed(lambda: [way(p.a, p.b, p.out) for p in same], 2))
        return timed(lambda: [chosen[p.kind](p.a, p.b, p.out) for p in products])


def _has_onednn() -> bool:
    try:
        _onednn(torch.ones(2, 2), torch.ones(2, 2))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def least_times(machine: Machine, lengths: Lengths) -> dict[str, float]:
    """CPU seconds of each phase. decode: all passes after the prompts, with the logits of each. prefill: each different
    prompt once, with logits of its last token. logprobs: a forward pass of all sequences, each different prompt once,
    with logits of each response token. forward, backward: the same of training. update: of AdamW, with the norm of the
    gradient."""
    decoder, whole = machine.decoder, lengths.tokens
    attention = lengths.causal_flops(decoder) / machine.peak
    forward = machine.forward(whole, sum(lengths.responses)) + attention
    prefill = machine.forward(sum(lengths.prompts), len(lengths.prompts))
    return {"decode": decode_time(machine, lengths),
            "prefill": prefill + decoder.causal_flops(lengths.prompts) / machine.peak,
            "logprobs": forward, "forward": forward,
            "backward": machine.backward(whole, sum(lengths.responses)) + 2 * attention,
            "update": machine.update()}


def decode_time(machine: Machine, lengths: Lengths) -> float:
    """Weights and cache are read in turn, so both are what caches of the processor must hold."""
    decoder, steps = machine.decoder, lengths.decode_steps()
    if not steps:
        return 0.0
    rows = sorted({count for count, _ in steps})
    at = [rows[round(i * (len(rows) - 1) / (ROW_COUNTS - 1))] for i in range(ROW_COUNTS)]
    known = {count: machine.forward(count, count) for count in sorted(set(at))}
    seen = sum(tokens for _, tokens in steps)
    in_turn = BYTES * decoder.parameters + decoder.cache_bytes(seen) / len(steps)
    attention = max(machine.read(decoder.cache_bytes(seen), in_turn), decoder.decode_flops(seen) / machine.peak)
    return sum(_between(known, count) for count, _ in steps) + attention


def _between(known: dict[int, float], rows: int) -> float:
    """Linear between the two neighbors."""
    low, high = max(k for k in known if k <= rows), min(k for k in known if k >= rows)
    return known[low] if low == high else known[low] + (known[high] - known[low]) * (rows - low) / (high - low)
