"""Where a run may wait for the device or copy to it, each place with its reason: the only home of this list.

A place is a file and a function. `PLACES` are for the whole of a run, `HOT` for what runs again and again while the
device should have work ahead: the passes of a minibatch, and decode steps.
"""

from __future__ import annotations

START = "once, when a run begins"
FILES = "what is stored on a disk passes through the host"
LENGTHS = "the sizes of what follows are numbers of the host"
NUMBERS = "a few numbers of the host, for each call"
METRICS = "numbers for the log, at the end of a call or a step"
AGREE = "ranks agree on what they do next, which the host does"
CAPTURE = "once for each graph, when it is captured"
FLOAT32 = "attention of float32 has no kernel for packed sequences: the host puts those of like lengths together"
EXPERTS = "how many rows go to the experts of each rank is a number of the host"
SUMS = "whole numbers of any size are added by the host"
TALK = "environments hear tokens, and they live on the host"

PLACES: dict[tuple[str, str], str] = {
    # parameters, plans and hosts
    ("backends/torch/kernels/rms_norms.py", "fuse_norms"): START,
    ("backends/torch/model/load_weights.py", "copy_pieces"): START,
    ("backends/torch/model/load_weights.py", "_load_from_parts"): START,
    ("backends/torch/model/lora.py", "init_lora"): START,
    ("backends/torch/model/skeleton.py", "move_buffers"): START,
    ("rldsl/runtime/comm/agreement.py", "ranks_that_differ"): START,
    ("rldsl/runtime/comm/agreement.py", "broadcast_text"): START,
    ("rldsl/runtime/comm/agreement.py", "gather_texts"): START,
    ("rldsl/runtime/comm/content_digests.py", "tables_of_ranks"): START,
    ("rldsl/runtime/comm/world.py", "gather_hosts"): START,
    ("rldsl/runtime/comm/agreement.py", "any_rank"): AGREE,
    # what goes to the host, and comes back
    ("rldsl/runtime/host_memory.py", "HostMemory._pinned_copies"): "the device's memory is free when it returns",
    ("rldsl/runtime/persist/checkpoint_reader.py", "LoadedCheckpoint.fill"): FILES,
    ("rldsl/runtime/persist/model_export.py", "_gather"): FILES,
    ("rldsl/runtime/interpreter/value_events.py", "fetch"): "rows of the data come from the host",
    # generation: at its beginning, at its end, and when sequences begin or end
    ("backends/torch/generate/decode_state.py", "DecodeState.allocate"): NUMBERS,
    ("backends/torch/generate/engine.py", "Engine._poll"): "which sequences have ended, every few steps",
    ("backends/torch/generate/engine.py", "Engine._prefill"): NUMBERS,
    ("backends/torch/generate/engine.py", "Engine.record_samples"): NUMBERS,
    ("backends/torch/generate/clock_ticks.py", "_any_has_work"): AGREE,
    ("backends/torch/generate/generate.py", "generate"): LENGTHS,
    ("backends/torch/generate/generate.py", "shares_prompt"): LENGTHS,
    ("backends/torch/generate/generate.py", "_output"): LENGTHS,
    ("backends/torch/generate/kv_cache.py", "PrefillAttention.__init__"): LENGTHS,
    ("backends/torch/generate/conversations.py", "converse"): LENGTHS,
    ("backends/torch/generate/conversation_state.py", "LiveConversations.output"): TALK,
    ("backends/torch/generate/conversations.py", "Engine.record"): TALK,
    ("backends/torch/generate/conversations.py", "Engine.sample"): TALK,
    # rows of a forward pass, before it begins
    ("backends/torch/kernels/length_buckets.py", "LengthBuckets.__init__"): FLOAT32,
    ("backends/torch/model/attention.py", "VarlenAttention.__init__"): LENGTHS,
    ("backends/torch/model/context_parallel.py", "ContextParallelAttention.__init__"): LENGTHS,
    ("backends/torch/model/context_parallel.py", "Partition.of"): LENGTHS,
    ("backends/torch/model/model_inputs.py", "_own_part"): LENGTHS,
    ("backends/torch/model/experts.py", "TokenDispatcher.of"): EXPERTS,
    ("rldsl/runtime/store.py", "offsets_within"): LENGTHS,
    ("rldsl/runtime/store.py", "ragged_indices"): LENGTHS,
    # arithmetic of the flow, and metrics
    ("backends/torch/train/optimizer.py", "ShardOptimizer._grad_norm"): "whether to clip, and whether it is finite",
    ("rldsl/runtime/comm/row_assignment.py", "RowLengths._read"): LENGTHS,
    ("rldsl/runtime/interpreter/model_events.py", "_write"): LENGTHS,
    ("rldsl/runtime/interpreter/model_events.py", "converse"): METRICS,
    ("rldsl/runtime/interpreter/ragged_index.py", "FrameRows.total"): LENGTHS,
    ("rldsl/runtime/interpreter/ragged_index.py", "RaggedIndex.rows"): LENGTHS,
    ("rldsl/runtime/interpreter/expression_ops.py", "filled"): LENGTHS,
    ("rldsl/runtime/interpreter/expression_ops.py", "sequence"): LENGTHS,
    ("rldsl/runtime/interpreter/exact_sums.py", "exact_sum"): SUMS,
    ("rldsl/runtime/interpreter/minibatch_loss.py", "MinibatchLoss.partials"): METRICS,
    ("rldsl/runtime/interpreter/minibatch_loss.py", "MinibatchLoss.finish"): METRICS,
    ("rldsl/runtime/interpreter/batch_reductions.py", "all_reduced"): SUMS,
    ("rldsl/runtime/interpreter/metric_log.py", "_optional_numbers"): METRICS,
    ("rldsl/runtime/metrics/phase_times.py", "PhaseTimes.seconds"): METRICS,
    ("rldsl/runtime/state/step.py", "StepState.write_number"): METRICS,
}
HOT: dict[tuple[str, str], str] = {
    ("backends/torch/generate/captured_step.py", "CapturedSteps._equal"): CAPTURE,
    ("backends/torch/generate/captured_step.py", "capture_graph"): CAPTURE,
    ("backends/torch/kernels/length_buckets.py", "LengthBuckets.__init__"): FLOAT32,
    ("backends/torch/model/experts.py", "TokenDispatcher.of"): EXPERTS,
}
