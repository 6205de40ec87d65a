"""The shards of models that a rank holds, and the parameters on their way to and from them.

In: a run's context. Out: shards, built at their first use.
Invariant: whoever reads a shard's parameters takes it from `shard_to_read`, whoever writes or frees them from
`shard_to_write`; so no rank sees parameters before they have arrived, or changes those that it is still sending.
"""

from __future__ import annotations

import importlib
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rldsl.plan import backends
from rldsl.runtime.backend import Shard
from rldsl.runtime.comm.content_digests import ContentDigest, compare_contents
from rldsl.runtime.comm.reshard import RankReshard
from rldsl.runtime.comm.side_stream import SideStream
from rldsl.runtime.state.context import RunContext, ShardKey
from rldsl.runtime.state.data_reader import DataReader
from rldsl.runtime.state.run_images import RunImages
from rldsl.runtime.store import Pending


@dataclass
class ModelStore:
    """One rank's shards; each is known by its model and layout."""

    context: RunContext                                          # the plan and the communicators
    shards: dict[ShardKey, Shard] = field(default_factory=dict)  # those that were built so far
    # shards whose parameters have no memory at the moment
    freed: set[ShardKey] = field(default_factory=set)
    # read-only tensors that several shards use (`runtime/backend.py`, WeightCache)
    shared_tensors: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    # model directory -> the images of the run as its models read them
    images: dict[str, RunImages] = field(default_factory=dict)
    # realloc event -> what this rank sends and receives in it, once for each dtype that travels
    reshards: dict[int, tuple[RankReshard, ...]] = field(default_factory=dict)
    # shard -> communication into its parameters, or onload, that nobody has waited for yet
    arriving: dict[ShardKey, Pending] = field(default_factory=dict)
    # shard that owns the parameters -> realloc event -> communication that still reads them
    leaving: dict[ShardKey, dict[int, Pending]] = field(default_factory=dict)
    reader: DataReader | None = None  # the sources of images

    @cached_property
    def side(self) -> SideStream:
        """Where reallocs run."""
        return SideStream(self.context.device)

    def shard(self, model: str, layout: str, load: bool = False) -> Shard:
        """The shard, built at its first use, without waiting for anything. A shard that was freed gets memory again;
        its values are undefined until a realloc fills it."""
        key, context = (model, layout), self.context
        if key in self.freed:
            self.freed.discard(key)
            self.shards[key].allocate()
        if key not in self.shards:
            record, where = context.models[model], context.world.layouts[layout]
            build = importlib.import_module(backends.package(where.backend)).build
            self.shards[key] = build(record, where, context.world.meshes[where.mesh], context.world.axes(where),
                                     context.device, load=load, trainable=record.train_layout == layout,
                                     weight_cache=None if key in context.offloaded else self.shared_tensors,
                                     **self._images(record.path))
        return self.shards[key]

    def _images(self, directory: str) -> dict[str, RunImages]:
        """The images of the run as the models of a directory read them, one for all of them, as an argument for
        `Build`; nothing where the run has none, since not every backend takes it."""
        if self.reader is None or not any(data.images for data in self.context.data.values()):
            return {}
        if directory not in self.images:
            self.images[directory] = RunImages(self.reader, directory)
        return {"images": self.images[directory]}

    def compare_weights(self) -> None:
        """Check that all ranks have read the same weights. All ranks call it together, after their loads. RL0769."""
        digests = [ContentDigest.of(d.file, d.what, d.content, d.slices)
                   for shard in self.shards.values() for d in shard.weight_digests()]
        compare_contents(digests, self.context.device)

    def shard_to_read(self, model: str, layout: str) -> Shard:
        """The shard; waits for parameters that are still arriving."""
        pending = self.arriving.pop((model, layout), None)
        if pending is not None:
            pending.finish()
        return self.shards[model, layout]

    def shard_to_write(self, model: str, layout: str) -> Shard:
        """The shard, whose parameters may be written or freed; waits also for sends that still read them."""
        for pending in self.leaving.pop(self.owner(model, layout), {}).values():
            pending.finish()
        return self.shard_to_read(model, layout)

    def owner(self, model: str, layout: str) -> ShardKey:
        """The shard that has the parameters in memory: the one that this one aliases, or itself."""
        return model, self.context.aliases.get((model, layout), layout)

    def free(self, model: str, layout: str) -> None:
        """Free the parameters' memory, until a realloc fills them again."""
        self.shard_to_write(model, layout).free()
        self.freed.add((model, layout))

    def wait_all(self) -> None:
        """Wait for all parameters that are on their way."""
        for key in list(self.arriving):
            self.shard_to_read(*key)
        for sent in self.leaving.values():
            for pending in sent.values():
                pending.finish()
