"""One pipeline stage of a HuggingFace model, as this rank's tensor-parallel shard.

In: a model of the plan, a layout and this rank's place in it. Out: a `Stage` whose forward is the family's own code.
Invariants: parameters are exactly the pieces that `sharding/boxes.py` gives this rank; layers of other chunks are
`PassThroughLayer`s, so that the family's forward runs unchanged. Under a layout with `zero`, parameters are rows, and
modules compute with tensors that `zero.py` fills from the rows of all shards.
Errors: RL0330 `invariant=training` under tp or cp needs norms that the family does not have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from rldsl.backends.torch.model.attention import PackedAttention
from rldsl.backends.torch.model.autocast import keep_float32_products
from rldsl.backends.torch.model.chunks import Chunk, LayersDone, chunk_of, end_of_layers
from rldsl.backends.torch.model.experts import SourceGrads
from rldsl.backends.torch.model.fuse_modules import fuse_modules, fuse_ordered_norms
from rldsl.backends.torch.model.gradient_sums import HeadSums, with_gradient_apart
from rldsl.backends.torch.model.held_parameters import Held, held_here, is_matrix, rounds_grad, zero_sharding
from rldsl.backends.torch.model.install_parameters import Installer, round_parameters
from rldsl.backends.torch.model.invariant import Invariant
from rldsl.backends.torch.model.invariant_probe import ordered_heads
from rldsl.backends.torch.model.load_weights import HeldPieces, allocate_parameters, load_config
from rldsl.backends.torch.model.lora import lora_adapters
from rldsl.backends.torch.model.recompute import ActivationCheckpointing
from rldsl.backends.torch.model.row_groups import RowGroups
from rldsl.backends.torch.model.sequence_parallel import SequenceParallel, gathered_children
from rldsl.backends.torch.model.sequences import CurrentPass, connect
from rldsl.backends.torch.model.skeleton import (
    HeadWithoutProducts,
    empty_model,
    has_more,
    logit_form,
    move_buffers,
    only_multiplied,
)
from rldsl.backends.torch.model.tensor_parallel import ColumnParallelInput
from rldsl.backends.torch.model.vision import Vision, features_of, offsets_of
from rldsl.backends.torch.model.weight_copies import WeightCopies
from rldsl.backends.torch.model.zero import ZeroSharding
from rldsl.models.execution import Execution, body_name
from rldsl.models.vision import layers_with_images, vision_family
from rldsl.plan.heads import SCORE_WEIGHT
from rldsl.plan.model import Layout, Mesh, Model
from rldsl.runtime.backend import Axes, Axis, Images, WeightCache
from rldsl.runtime.image_tokens import ids_of
from rldsl.sharding.boxes import Parameter, expand_specs, local_shape
from rldsl.sharding.dtypes import float32_specs

INTO_EMBEDDINGS = ("ctrl",)  # families that write into the embeddings that they are given


class Stage(ActivationCheckpointing):
    """What the rest of the backend reads of a model: one rank's modules and parameters."""

    # whether a backward pass runs in autocast too. The backward of torch's own operations needs none: it has the dtypes
    # of the forward. In our own functions, products of float32 would be rounded to bfloat16
    autocast_in_backward = False
    chunks: list[Chunk]          # of layers, ascending; one, except under a layout with `vpp`
    first: bool  # whether it is the first of the pipeline
    last: bool  # whether it is the last of the pipeline
    hidden_size: int             # H
    vocab_size: int              # V, of the whole model
    head_grad: torch.Tensor | None  # [V_local, H] float32: gradient of the head, where it is kept apart
    vocab_start: int             # the first of these rows
    head_axis: Axis              # over which ranks the head's rows are divided
    vocab_cuts: tuple[int, ...] | None  # of the head's rows, for sums of an invariant model (`tree_sums.py`)
    head_is_biased: bool         # whether the output embedding has a bias
    hidden_scale: float          # with which the last hidden states are multiplied, so that logits are scaled
    logit_cap: float             # c: a logit z counts as c * tanh(z / c); 0: as z
    score: torch.Tensor | None   # [1, H] the score row on the last stage, if the model has one
    residual_dtype: torch.dtype  # of hidden states between layers and stages: float32, whatever the weights are
    matmul_dtype: torch.dtype    # in which matrices are multiplied: the model's dtype
    parameters: dict[str, nn.Parameter]      # HuggingFace name -> local tensor, of parameters that have versions
    base: dict[str, nn.Parameter]            # the same of parameters that never change (a base under adapters)
    to_load: HeldPieces          # of `parameters`, those whose values must still be loaded
    base_to_load: HeldPieces     # of `base`
    held: HeldPieces             # this rank's pieces of `parameters`
    unsharded_held: HeldPieces   # the same as if the layout had no `zero`
    unsharded: Mapping[str, nn.Parameter]    # what modules compute with; `parameters` itself without `zero`
    zero: ZeroSharding | None    # under a layout with `zero`
    ordered_gradients: bool      # gradients have one order of sums, of a model with `invariant=training`
    head_sums: HeadSums | None   # of such a model
    weight_copies: WeightCopies  # of an invariant model, as its products read them
    ordered_heads: Collection[int]  # sizes of heads whose attention in decoding has a kernel, of an invariant model
    joins_leaves: bool           # of such a model: whether a pass may have several leaves
    # of such a model under ep: gradients of experts' weights by the rank of ep whose tokens they come from, [ep, ...]
    source_grads: Mapping[str, torch.Tensor]
    sequence_parallel: SequenceParallel  # divides tokens over tp where layers allow it
    experts: dict[str, nn.Module]  # of each layer here that has some, by the name of the module
    how: Execution               # how the family's modules run on packed sequences
    float32_products: frozenset[str]  # modules of a half-precision model that multiply in float32
    casts: bool                  # whether products of such a model read copies of float32 parameters that are cast
    current: CurrentPass         # the pass under way, which these modules ask for its sequences
    vision: Vision | None = None  # of a model that reads images

    def __init__(self, model: Model, layout: Layout, mesh: Mesh, axes: Axes, device: torch.device, dtype: torch.dtype,
                 matmul_dtype: torch.dtype, weight_cache: WeightCache | None = None, images: Images | None = None):
        """dtype: in which `parameters` are stored. images: see `Build`."""
        pp, cpu = axes.pp, device.type == "cpu"
        self.first, self.last = pp.index == 0, pp.index == pp.size - 1
        self.device, self.matmul_dtype = device, matmul_dtype
        self.residual_dtype = torch.float32
        self.config = load_config(model)
        skeleton, self.how = empty_model(self.config)
        body: nn.Module = skeleton.get_submodule(body_name(skeleton))
        self.float32_products = frozenset() if matmul_dtype == torch.float32 else \
            keep_float32_products(skeleton, device, {p.name for p in expand_specs(
                float32_specs((*model.params, *model.base)), model.layers)})
        self.current = CurrentPass()
        self._read_config(model)
        self._hold_parameters(model, held_here(model, layout, mesh, axes), dtype, weight_cache)
        self._read_signature(skeleton, body, model)
        self._shard_parameters(skeleton, layout.zero, axes, model.invariant_training)
        gathered = gathered_children((*model.params, *model.base))
        self.sequence_parallel = SequenceParallel(axes.tp, bool(gathered) and not self._needs_complete_sequences())
        self.column_input = ColumnParallelInput(axes.tp, self.sequence_parallel)
        self._order_sums(model, axes)
        self._fuse(skeleton, model, axes.cp)
        self._install_parameters(skeleton, model, axes.tp, axes.ep)
        move_buffers(skeleton, device)
        skeleton.eval()
        self.vision = self._vision(skeleton, model, images)
        connect(body, () if self.how.by_rows else self.how.recurrent, self.current,
                compiled=cpu and not model.invariant)
        self.chunks = [chunk_of(body, self.how.layers, self.how.outputs, s, pp.size * layout.vpp, model.layers)
                       for s in range(pp.index, pp.size * layout.vpp, pp.size)]
        for chunk in self.chunks:
            self.sequence_parallel.install([layer for _, layer in chunk.own_layers()], gathered)
        self._wrap_layers()

    # ------------------------------------------------------------------------------------------- steps of building

    def _read_config(self, model: Model) -> None:
        text = self.config.get_text_config()
        self.hidden_scale, self.logit_cap = logit_form(text) if model.head.vocabulary else (1.0, 0.0)
        self.hidden_size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)

    def _hold_parameters(self, model: Model, held: Held, dtype: torch.dtype, weight_cache: WeightCache | None) -> None:
        """Allocate this rank's parameters; tensors that never change are shared with other shards."""
        self.held, self.unsharded_held, self.base_held = held.stored, held.unsharded, held.base
        read_only = not (model.train_layout or model.updated_from or model.base)
        self.parameters, self.to_load = allocate_parameters(model.path, self.held, dtype, self.device,
                                                           weight_cache if read_only else None)
        self.base, self.base_to_load = allocate_parameters(model.path, self.base_held, self.matmul_dtype, self.device,
                                                           weight_cache)

    def _read_signature(self, skeleton: Any, body: nn.Module, model: Model) -> None:
        """What the family's forward takes, and what it does after the last layers."""
        arguments = inspect.signature(body.forward).parameters
        self._arguments = frozenset(arguments)
        # what a later stage gets takes the place of its embeddings, if it can
        self._takes_embeddings = ("inputs_embeds" in arguments and str(self.config.model_type) not in INTO_EMBEDDINGS
                                  and skeleton.get_input_embeddings().weight.shape[-1] == self.hidden_size)
        self._top = HeadWithoutProducts(skeleton) if model.head.vocabulary and has_more(skeleton) else None

    def _shard_parameters(self, skeleton: nn.Module, level: int, axes: Axes, in_leaves: bool) -> None:
        """Under `zero`, allocate what modules compute with, apart from the stored rows."""
        self.unsharded, self.zero = self.parameters, None
        if level:
            self.unsharded = {name: self._allocate_unsharded(name, skeleton) for name in self.held}
            self.zero = zero_sharding(level, self.held, self.parameters, self.unsharded, axes, in_leaves,
                                      self.rounds_grad)

    def _needs_complete_sequences(self) -> bool:
        """Whether some modules need all tokens of a sequence, or read inputs that are not divided by tokens."""
        per_layer_inputs = getattr(self.config.get_text_config(), "hidden_size_per_layer_input", None)
        return bool(self.how.by_rows or self.how.recurrent or per_layer_inputs or layers_with_images(self.config))

    def _order_sums(self, model: Model, axes: Axes) -> None:
        """What sums in one order need: in forward passes (`invariant=true`), and of gradients (`=training`)."""
        self.invariant, self.ordered_gradients = model.invariant, model.invariant_training
        on_cpu = self.device.type == "cpu"
        self.ordered_heads = ordered_heads(model.sizes.head_dim) if model.invariant and on_cpu else ()
        # With cp a leaf is summed over ranks before the next one. What `zero` gathers in half precision cannot have
        # the float32 gradient of several leaves
        self.joins_leaves = self.ordered_gradients and model.sizes.heads > 0 and axes.cp.size == 1 and not (
            self.zero is not None and self.matmul_dtype != torch.float32)
        self.source_grads, self._ep_size = {}, axes.ep.size
        self.head_sums = HeadSums(model.sizes.heads, model.sizes.kv_heads, axes.tp) \
            if self.ordered_gradients and model.sizes.heads else None
        self.weight_copies = WeightCopies(model.invariant and self.zero is None)

    def _fuse(self, skeleton: nn.Module, model: Model, cp: Axis) -> None:
        """Let norms and layers run with fewer kernels. Errors: RL0330."""
        if self.head_sums is None:
            fuse_modules(skeleton, model, self.device)
            return
        ordered = fuse_ordered_norms(skeleton, model, self.device, self.head_sums, cp, self._row_groups)
        self.joins_leaves = self.joins_leaves and ordered

    def _install_parameters(self, skeleton: Any, model: Model, tp: Axis, ep: Axis) -> None:
        """Put local parameters into the modules of the whole model, with their collectives."""
        installer = Installer(skeleton, model, self.config.get_text_config(), self.last, self.device, tp, ep,
                              self.column_input, self.ordered_gradients, self._row_groups, self._source_grads_of,
                              self.weight_copies)
        held = {**self.base_held, **self.unsharded_held}
        local = {**self.base, **self.unsharded}
        found = installer.install(local, held, lora_adapters(model, self.unsharded))
        self._head, self._head_bias, self.head_is_biased = found.head.weight, found.head.bias, found.head.is_biased
        self.vocab_start, self.head_axis, self.vocab_cuts = found.head.start, found.head.axis, found.head.cuts
        self.head_grad, self.score = None, self.unsharded.get(SCORE_WEIGHT)
        self.experts = found.experts
        self.joins_leaves = self.joins_leaves and found.reads_once  # in a pass
        self.casts = False
        if self.matmul_dtype == torch.bfloat16:
            cast = {name for name, (parameter, _) in held.items() if self._is_cast(name, parameter, skeleton)}
            self.casts = any(local[name].dtype == torch.float32 for name in cast)
            round_parameters(skeleton, [name for name, (parameter, _) in held.items()
                                        if name not in cast and not parameter.spec.float32])

    def _vision(self, skeleton: Any, model: Model, images: Images | None) -> Vision | None:
        """The vision tower on the first stage, and what later stages need of it."""
        if not (family := vision_family(self.config)):
            return None
        root = skeleton.get_submodule(body_name(skeleton).rpartition(".")[0])
        return Vision(images, family, self.checkpointed(features_of(root)) if self.first else None,
                      skeleton.get_input_embeddings() if self.first else None, self.device, model.path)

    def _allocate_unsharded(self, name: str, skeleton: nn.Module) -> nn.Parameter:
        """A tensor for modules to compute with, in the dtype that they use: autocast casts matrices of layers."""
        parameter, pieces = self.unsharded_held[name]
        cast = is_matrix(parameter) and self._is_cast(name, parameter, skeleton)
        dtype = self.matmul_dtype if cast else self.parameters[name].dtype
        return nn.Parameter(torch.empty(local_shape(parameter, pieces), dtype=dtype, device=self.device))

    def _is_cast(self, name: str, parameter: Parameter, skeleton: nn.Module) -> bool:
        """Whether autocast casts a parameter wherever it is read."""
        return only_multiplied(name, parameter, skeleton) and name.rpartition(".")[0] not in self.float32_products

    def rounds_grad(self, name: str) -> bool:
        """Whether the gradient of a pass is a bfloat16 number: of what is multiplied in bfloat16."""
        return rounds_grad(name, self.held[name][0], self.matmul_dtype, self.float32_products)

    def _wrap_layers(self) -> None:
        """Give each layer of this stage a forward that can be recomputed, and that unshards its parameters."""
        for i, layer in (numbered_layer for chunk in self.chunks for numbered_layer in chunk.own_layers()):
            forward = self._in_its_pass(layer.forward)
            layer.forward = self.zero.wrap_layer(i, forward) if self.zero else forward
        for chunk in self.chunks:
            if not chunk.last:
                chunk.own[chunk.layers.stop - 1].register_forward_hook(end_of_layers)

    def _in_its_pass(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward that can be recomputed: the backward pass comes when another pass is the current one."""
        def inside(*args: Any, sequences: PackedAttention, **kwargs: Any) -> Any:
            try:
                return self.current.inside(sequences, plain, *args, **kwargs)
            finally:
                self.column_input.forget()

        checkpointed = self.checkpointed(inside)
        return lambda *args, **kwargs: checkpointed(*args, sequences=self.current.sequences, **kwargs)

    def _source_grads_of(self, path: str) -> Callable[[], SourceGrads | None]:
        """What finds the gradients of the weights of an experts module, where they are kept."""
        def found() -> SourceGrads | None:
            up, down = (self.source_grads.get(f"{path}.{name}") for name in ("gate_up_proj", "down_proj"))
            return None if up is None or down is None else (up, down)

        return found

    # ------------------------------------------------------------------------------------------- what others read

    @property
    def is_recurrent(self) -> bool:
        """Whether layers carry a state from token to token."""
        return bool(self.how.recurrent)

    @property
    def shares_prompts(self) -> bool:
        """Whether a pass may have a prompt of several sequences once: no module needs complete sequences, and sums have
        no prescribed order."""
        return not (self.how.by_rows or self.how.recurrent or self.invariant)

    @property
    def head(self) -> torch.Tensor | None:
        """[V_local, H] rows of the output embedding on the last stage, if the model has one; [V_local, H + 1] with
        its bias as the last column, if it has one."""
        head = self._head
        if head is not None and self.head_grad is not None:
            head = with_gradient_apart(head, self.head_grad)
        if head is None or self._head_bias is None:
            return head
        return torch.cat([head, self._head_bias[:, None].to(head.dtype)], 1)  # hidden states end with a 1

    @property
    def copies_head(self) -> bool:
        """Whether sampling multiplies hidden states with a copy of the head: one with its bias (`head`), or in another
        dtype. It does not follow when the parameter changes."""
        return self._head is not None and (self._head_bias is not None or self._head.dtype != self.matmul_dtype)

    def keep_head_grad(self) -> None:
        """From now on the gradient of the head is added to `head_grad`, and not to that of its weight."""
        if self._head is not None:
            self.head_grad = torch.zeros(self._head.shape, device=self.device)

    def keep_source_grads(self, names: Sequence[str]) -> torch.Tensor:
        """From now on the gradients of some experts' weights are added to rows of a table, one for each rank of ep from
        which tokens come, and not to those of the weights. Returns the table, [ep, elements] float32."""
        shapes = [self.unsharded[name].shape for name in names]
        table = torch.zeros(self._ep_size, sum(shape.numel() for shape in shapes), device=self.device)
        parts = table.split([shape.numel() for shape in shapes], 1)
        self.source_grads = {name: part.unflatten(1, shape)
                             for name, part, shape in zip(names, parts, shapes, strict=True)}
        return table

    def _row_groups(self) -> RowGroups:
        """Those of the pass under way, of a model whose gradients have one order."""
        return self.current.row_groups

    def checkpoint_contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """torch's backward pass runs without our modes, so the second forward enters it again."""
        return nullcontext(), self.invariant_mode()

    def invariant_mode(self) -> AbstractContextManager[Any]:
        """In which an invariant model computes."""
        over_query_heads = self.head_sums.over_query_heads if self.head_sums else None
        return Invariant(over_query_heads, self._row_groups, self.weight_copies) if self.invariant else nullcontext()

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, packed_attention: PackedAttention,
                hidden: torch.Tensor | None, number: int = 0) -> torch.Tensor:
        """Run chunk `number`. tokens: [T] int64. positions: [T] int64, or as `vision` has them. hidden: [T, H] from the
        chunk before, None for the first. Returns [T, H]; the last chunk's are after the final norm and in
        `matmul_dtype`, [T, H + 1] with a last column of ones where the head has a bias."""
        chunk = self.chunks[number]
        if self.vision is not None:
            return self._output(chunk, self._read(chunk, self.vision, tokens, positions, packed_attention, hidden))
        inputs = (tokens,) if hidden is None else (tokens, hidden)
        if self.how.by_rows and (copies := self.current.copies) is not None:
            places = torch.arange(len(tokens), device=tokens.device)
            (out,) = packed_attention.by_rows(number, lambda rows, _: (self.current.counting(
                _without_padding(copies, rows[-1]), self._run, chunk, rows[:-1], {}),), (*inputs, places))
        elif self.how.by_rows:
            (out,) = packed_attention.by_rows(number, lambda rows, _: (self._run(chunk, rows, {}),), inputs)
        else:
            options = {"position_ids": positions[None]}
            out = self.current.inside(packed_attention, self._run, chunk, tuple(x[None] for x in inputs), options)[0]
        return self._output(chunk, out)

    def _read(self, chunk: Chunk, vision: Vision, tokens: torch.Tensor, positions: torch.Tensor,
              packed_attention: PackedAttention, read: torch.Tensor | None) -> torch.Tensor:
        """[T, H] after a chunk of a model that reads images. read: as `hidden` of `forward`."""
        options: dict[str, Any] = {"position_ids": positions[None] if positions.dim() == 1 else positions[:, None]}
        if read is None:
            read, more = vision.embeddings(tokens, offsets_of(packed_attention))
            options |= more
        inputs = (ids_of(tokens)[None], read[None])
        out: torch.Tensor = self.current.inside(packed_attention, self._run, chunk, inputs, options)[0]
        return out

    def _output(self, chunk: Chunk, out: torch.Tensor) -> torch.Tensor:
        """What a chunk hands over. out: [T, H] after its layers."""
        if not chunk.last:
            return out.to(self.residual_dtype)
        out = out * self.hidden_scale if self.hidden_scale != 1 else out
        if self._head_bias is not None:
            out = torch.cat([out, out.new_ones(len(out), 1)], 1)
        return out.to(self.matmul_dtype)

    def _run(self, chunk: Chunk, inputs: tuple[torch.Tensor, ...], options: Mapping[str, Any]
             ) -> torch.Tensor:
        """[S, T, H] after a chunk. inputs: tokens [S, T], and hidden states [S, T, H] from the chunk before, or
        embeddings that have been made already."""
        given = {"input_ids": inputs[0]}
        if len(inputs) > 1:
            if chunk.entry is not None:
                chunk.entry.received = inputs[1]
            if self._takes_embeddings:
                given = {"inputs_embeds": inputs[1]}
        options = {k: v for k, v in options.items() if k in self._arguments}
        try:
            out: torch.Tensor = chunk.body(**given, use_cache=False, **options)[0]
        except LayersDone as done:
            return done.hidden
        finally:
            if chunk.entry is not None:
                chunk.entry.received = None
        return out if self._top is None else self._top(inputs[0], out)


def _without_padding(copies: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """[T] -> [S, W], 0 for padding. places: [S, W] in the row; padding is the last token of a sequence again."""
    return copies[places] * (places.diff(dim=1, prepend=places[:, :1] - 1) != 0)
