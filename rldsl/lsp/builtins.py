"""The names that the compiler knows, with what an editor shows of them. Built-in functions come from
`plan/operators.py`, models and their calls from `plan/heads.py`; a test compares the other names with the compiler's
tables."""

from __future__ import annotations

from rldsl.plan.heads import HEADS, OUTPUTS
from rldsl.plan.operators import BUILTINS

# name -> (signature, meaning)
FUNCTIONS: dict[str, tuple[str, str]] = {
    **{f.name: (f.signature, f.summary) for f in BUILTINS.values()},
    "mesh": ("mesh(a:b) or mesh(n0:n1, d0:d1)", "A range of ranks, or of nodes and devices."),
}

# call -> (signature, what it gives)
CALLS: dict[str, tuple[str, str]] = {
    "next": ("next() or next(weight=...)",
             "The next batch of rows from a data source; with a weight, rows drawn by the numbers that they have."),
    "add": ("add(gen)", "Keep sequences, with the values that `with` names, for later steps. When the buffer is full, "
            "the oldest leave."),
    "sample": ("sample(k) or sample(k, weight=...)",
               "k different sequences of the buffer, drawn by the numbers that they were added with; fewer if it has "
               "fewer."),
    "generate": ("generate(prompt, n=1, max_new_tokens=256, ...)",
                 "n completions of each prompt; with `env=`, n conversations with an environment."),
    **{o.call: (f"{o.call}(batch)", f"{o.level}: {o.meaning}.") for o in OUTPUTS.values()},
    "train": ("train(batch, loss=..., minibatches=1, epochs=1, shuffle=true)",
              "Train on a batch: one optimizer step per minibatch and epoch."),
}

# field of sequences -> (how it is written, what it is)
FIELDS: dict[str, tuple[str, str]] = {
    "logprobs": ("gen.logprobs", "token: log-probabilities of the sampled tokens"),
    "finished": ("gen.finished", "seq: the response ended with an end-of-sequence token or stop string"),
    "version": ("gen.version", "token: how many steps old the parameters were that sampled it (`lag`, `per_step`)"),
    "reward": ("gen.reward", "seq, of a conversation: what the environment's `get_reward` returned"),
    "turns": ("gen.turns", "seq, of a conversation: turns of the model"),
    "stopped": ("gen.stopped", "seq, of a conversation: 0 if it ended of itself, else a number that says why"),
    "branch": ("gen.branch", "seq, of a conversation: which of its branches the sequence is, from 0"),
    "branches": ("gen.branches", "seq, of a conversation: how many branches it has"),
    "turn_reward": ("gen.turn_reward", "turn: the reward that the environment gave for a turn"),
    "chosen": ("pair.chosen", "the preferred response"),
    "rejected": ("pair.rejected", "the rejected response"),
    "at": ("cuts.at", "seq: how many tokens of the response each prefix has"),
}

# option of a call or of the flow, where its name alone says too little -> (how it is written, what it does)
OPTIONS: dict[str, tuple[str, str]] = {
    "lag": ("flow f(steps=..., lag=k) or generate(..., lag=k)",
            "A step trains on responses whose generation began k steps earlier, so both run at the same time. It "
            "pays where generation has its own devices and takes about as long as training; on shared devices it "
            "only makes responses older. `rlc sim` and the line above the flow say what it gains or loses."),
    "per_step": ("generate(..., per_step=N)",
                 "Up to N new tokens of a response in one step; what has not ended continues in the next step, under "
                 "newer parameters. It pays where a few responses are much longer than the others: fewer slots are "
                 "idle, but what continues is prefilled again, and is older."),
}

CONSTRUCTORS: dict[str, tuple[str, str]] = {
    **{h.name: (f"{h.name}(path, dtype=\"float32\", invariant=false)", h.meaning) for h in HEADS.values()},
    "lora": ("lora(r=8, alpha=16, targets=[]) or lora(path)", "Low-rank adapters; only the adapters are trained."),
    "jsonl": ("jsonl(path, batch=, ...)", "Rows of a file with one JSON object per line."),
    "parquet": ("parquet(path, batch=, ...)", "Rows of a Parquet file, or of all Parquet files in a directory."),
    "hf": ("hf(name, split=, batch=, ...)", "Rows of a dataset of the Hub, or of a saved directory of `datasets`."),
    "adamw": ("adamw(lr=, betas=[0.9, 0.999], eps=1e-8, weight_decay=0, warmup=0, schedule=constant, clip_grad=1)",
              "AdamW with decoupled weight decay (Loshchilov & Hutter 2019)."),
    "adamw_8bit": ("adamw_8bit(lr=, betas=[0.9, 0.999], eps=1e-8, weight_decay=0, warmup=0, schedule=constant, "
                   "clip_grad=1)", "AdamW whose state has 8 bits per element (Dettmers et al. 2022)."),
    "sgd": ("sgd(lr=, momentum=0, nesterov=false, weight_decay=0, warmup=0, schedule=constant, clip_grad=1)",
            "Stochastic gradient descent; weight decay is added to the gradient."),
    "adafactor": ("adafactor(lr=, beta2_decay=-0.8, eps=1e-3, clip_threshold=1, weight_decay=0, clip_grad=1)",
                  "Adafactor without a first moment (Shazeer & Stern 2018): state of rows and columns only."),
    "muon": ("muon(lr=, momentum=0.95, nesterov=true, ns_steps=5, adjust_lr=original, adamw_lr=, weight_decay=0)",
             "Muon (Jordan et al. 2024) for the matrices of layers, AdamW for everything else."),
    "group": ("group(patterns..., lr_scale=, weight_decay=)",
              "Options of the parameters whose names match one of the patterns, inside an optimizer."),
}
