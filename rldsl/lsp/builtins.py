"""The words that the compiler itself knows, with what an editor shows of them. A test compares the names with the
compiler's own tables."""

from __future__ import annotations

# name -> (signature, meaning)
FUNCTIONS: dict[str, tuple[str, str]] = {
    "exp": ("exp(x)", "e to the power of x."),
    "log": ("log(x)", "The natural logarithm."),
    "log1p": ("log1p(x)", "log(1 + x), exact near 0."),
    "expm1": ("expm1(x)", "exp(x) - 1, exact near 0."),
    "sqrt": ("sqrt(x)", "The square root."),
    "abs": ("abs(x)", "The magnitude."),
    "sigmoid": ("sigmoid(x)", "1 / (1 + exp(-x))."),
    "logsigmoid": ("logsigmoid(x)", "log(sigmoid(x)), stable."),
    "stop_gradient": ("stop_gradient(x)", "x as a constant: no gradient flows through it."),
    "sum": ("sum(x by LEVEL)", "The sum; over the whole batch, on all ranks, without `by`."),
    "mean": ("mean(x by LEVEL)", "The mean; over the whole batch, on all ranks, without `by`."),
    "std": ("std(x by LEVEL, unbiased=true)", "The standard deviation; 0 for one element."),
    "var": ("var(x by LEVEL, unbiased=true)", "The variance; 0 for one element."),
    "count": ("count(x by LEVEL)", "The number of elements; of sequences, for a batch."),
    "min": ("min(a, b) or min(x by LEVEL)", "The smaller of two, or the smallest of many."),
    "max": ("max(a, b) or max(x by LEVEL)", "The larger of two, or the largest of many."),
    "clip": ("clip(x, low, high)", "x within bounds."),
    "where": ("where(condition, a, b)", "a where the condition holds, else b."),
    "next": ("next(x)", "token -> token: the following token's value, 0 at the last."),
    "prev": ("prev(x)", "token -> token: the preceding token's value, 0 at the first."),
    "last": ("last(x)", "token -> seq: the value at the last token."),
    "at_end": ("at_end(s, batch)", "seq -> token: the value at the last token, 0 elsewhere."),
    "cumsum": ("cumsum(x)", "token -> token: the running sum."),
    "discount": ("discount(x, g)", "token -> token: y_t = x_t + g * y_(t+1)."),
    "len": ("len(batch)", "seq: the number of response tokens."),
    "over": ("over(x, kept)", "The values of x for the rows of a selection."),
    "choice": ("choice(word, \"a\", \"b\")", "The word, which must be one of the others; known at compile time."),
    "quantile": ("quantile(x, q)", "The value below which the share q of all elements of the batch lies."),
    "uniform": ("uniform(x)", "A random number in (0, 1) for each element of x, the same on every placement."),
    "mesh": ("mesh(a:b) or mesh(n0:n1, d0:d1)", "A range of ranks; or nodes by devices."),
}

# call -> (signature, what it gives)
CALLS: dict[str, tuple[str, str]] = {
    "next": ("next()", "The step's rows of a data source."),
    "generate": ("generate(prompt, n=1, max_new_tokens=256, ...)", "n completions of each prompt."),
    "logprobs": ("logprobs(batch)", "token: log-probabilities of the responses, at the temperature of the sampling."),
    "entropy": ("entropy(batch)", "token: the entropy of the distribution that each token was drawn from."),
    "values": ("values(batch)", "token: the value of the state before each token."),
    "score": ("score(batch)", "seq: the reward model's score at the last token."),
    "train": ("train(batch, loss=..., minibatches=1, epochs=1, shuffle=true)",
              "Optimizer steps on a batch; one for each minibatch of each epoch."),
}

CONSTRUCTORS: dict[str, tuple[str, str]] = {
    "causal_lm": ("causal_lm(path, dtype=\"float32\", invariant=false)",
                  "A language model from a HuggingFace directory."),
    "value_model": ("value_model(path)", "A model with one value a token."),
    "reward_model": ("reward_model(path)", "A model with one score a sequence."),
    "lora": ("lora(r=8, alpha=16, targets=[]) or lora(path)", "Low-rank adapters, which alone are trained."),
    "jsonl": ("jsonl(path, batch=, ...)", "Rows of a file with one JSON object a line."),
    "parquet": ("parquet(path, batch=, ...)", "Rows of a Parquet file, or of all in a directory."),
    "hf": ("hf(path, batch=, ...)", "Rows of a directory that `Dataset.save_to_disk` wrote."),
    "adamw": ("adamw(lr=, betas=[0.9, 0.999], eps=1e-8, weight_decay=0, warmup=0, schedule=constant, clip_grad=1)",
              "AdamW with decoupled weight decay (Loshchilov & Hutter 2019)."),
}
