"""The demo of environments: a small model learns a game of three turns that no single answer wins.

    python examples/demo_agent.py          # or: make demo-agent

Everything is created under runs/vault and runs on CPU with gloo: a character tokenizer with a chat template, a random
Qwen3 model, and games of `vault.py`. GRPO trains the model on two ranks; a second program measures how many held-out
games it wins, before and after, and with a single turn. At the end plain transformers plays the same games with the
saved model, without anything of rldsl: its share of wins must be the same.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from demo import rlc
from tiny import make_model, write_jsonl
from vault import LOCKS, Vault

ROOT = Path("runs/vault")
HELD_OUT = 300
# a chat template of few tokens: with `tiny.CHAT_TEMPLATE` a random model would first have to find the digits
TEMPLATE = """{% for m in messages %}{% if m.role == 'user' %}?{{ m.content }}={% else %}{{ m.content }}<eos>{% endif %}
{%- endfor %}"""
TOKENS = {"max_turns": 3, "max_new_tokens": 1}  # as in the programs


def main() -> int:
    started = time.monotonic()
    prepare()
    before = opened("base")
    rlc("vault_grpo.rlf", ROOT / "run_grpo")
    after, single = opened("grpo"), opened("grpo", turns=1)
    theirs = plain_transformers(ROOT / "grpo")
    rule = "-" * 100
    print(f"\n{rule}\nheld-out games won ({HELD_OUT} games, greedy)")
    for name, value in (("before", before), ("after", after), ("one turn", single)):
        print(f"  {name:<10}{value:7.1%}  {'#' * round(60 * value)}")
    print(f"  plain transformers with the saved model: {theirs:.1%}\n"
          f"saved model\n  {ROOT / 'grpo'}\ntime\n  {time.monotonic() - started:.0f} s\n{rule}")
    if abs(theirs - after) > 0.5 / HELD_OUT:
        sys.exit("transformers and our evaluation disagree on the saved model")
    return 0


def prepare() -> None:
    """Write the games and the random model with its tokenizer, as ordinary HuggingFace directories."""
    digits = [f"{i:03d}" for i in range(1000)]
    random.Random(0).shuffle(digits)
    rows = [{"prompt": d[0], **{lock: int(x) for lock, x in zip(LOCKS, d, strict=True)}} for d in digits]
    write_jsonl(ROOT / "test.jsonl", rows[:HELD_OUT])
    write_jsonl(ROOT / "train.jsonl", rows[HELD_OUT:])
    make_model(ROOT / "base", characters="0123456789?=", scale=0.0, chat=TEMPLATE, hidden_size=64,
               intermediate_size=128, num_hidden_layers=2, head_dim=16, tie_word_embeddings=True,
               max_position_embeddings=128)


def opened(model: str, turns: int = 3) -> float:
    """The share of held-out games that a model wins."""
    out = ROOT / f"run_eval_{model}_{turns}"
    rlc("vault_eval.rlf", out, model_dir=ROOT / model, turns=turns)
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["opened"]


def plain_transformers(directory: Path) -> float:
    """The same with transformers alone: what the model says is followed by what the chat template writes for the next
    message, and nothing that it said is encoded again."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def rendered(messages: list[dict[str, str]]) -> str:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    won = 0
    for row in map(json.loads, (ROOT / "test.jsonl").read_text().splitlines()):
        game = Vault()
        game.extras = row
        messages, _ = game.init([{"role": "user", "content": row["prompt"]}])
        ids = tokenizer(rendered(messages), add_special_tokens=False, return_tensors="pt").input_ids
        reward = 0.0
        for _ in range(TOKENS["max_turns"]):
            with torch.no_grad():
                full = model.generate(ids, max_new_tokens=TOKENS["max_new_tokens"], do_sample=False)
            said = full[0, ids.shape[1]:]
            text = tokenizer.decode(said, skip_special_tokens=True)
            answer = game.step(text)
            reward += answer["reward"]
            if answer["done"]:
                break
            turn = [*messages, {"role": "assistant", "content": text}]
            messages = [*turn, *answer["observations"]]
            # what the template writes behind the text, with the end of the turn if the model has not written it
            behind = rendered(messages)[len(rendered(turn[:-1])) + len(text):]
            if said[-1] == tokenizer.eos_token_id:
                behind = behind.removeprefix("<eos>")
            new = tokenizer(behind, add_special_tokens=False, return_tensors="pt").input_ids
            ids = torch.cat([full, new], 1)
        won += reward > 0.99
    return won / HELD_OUT


if __name__ == "__main__":
    sys.exit(main())
