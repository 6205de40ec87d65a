"""TRL's GRPOTrainer with a class of environments and greedy decoding. Runs in a Python that has TRL.

    python trl_trainer.py FOLDER

writes FOLDER/model, a tiny model that was fitted to three conversations with tools, and FOLDER/theirs.jsonl, what each
conversation of the trainer's one step asked its environment. The rows are FOLDER/theirs.rows.jsonl, as here.
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils import get_json_schema
from trl import GRPOConfig, GRPOTrainer, chat_template_utils

from tests.environments.envs_recorded import Sums
from tests.environments.families import FAMILIES, make

# of each row: its turns as lists of calls, and the last text; halve(7) fails
TALKS = {
    "1+2+3": (6, [[("add", {"a": 1, "b": 2})], [("add", {"a": 3, "b": 3})]], "It is 6."),
    "8/2": (4, [[("halve", {"a": 8}), ("add", {"a": 2, "b": 2})]], "It is 4."),
    "7/2": (1, [[("halve", {"a": 7})]], "No."),
}


def rows(log):
    return [{"prompt": [{"role": "user", "content": text}], "answer": answer, "log": log, "level": 1}
            for text, (answer, _, _) in TALKS.items()]


def conversation(tokenizer, row, tools):
    """The tokens of a conversation as it should go, and which of them are the model's."""
    env = Sums()
    (message,) = row["prompt"]
    messages = [{**message, "content": message["content"] + env.reset(**row)}]
    _, turns, last = TALKS[message["content"]]
    results = {("add", 1, 2): "3", ("add", 3, 3): "6", ("halve", 8): "4", ("add", 2, 2): "4",
               ("halve", 7): "{'error': 'odd'}"}
    ids, own = [], []
    for calls in [*turns, []]:
        said = "" if calls else last
        turn = {"role": "assistant", "content": said}
        if calls:
            turn["tool_calls"] = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
        context = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template([*messages, turn], tools=tools, return_dict=False)
        end = len(whole) - whole[::-1].index(tokenizer.eos_token_id)
        own += [0] * (len(context) - len(own)) + [1] * (end - len(context))
        ids = whole[:end]
        # coroutines of a turn come last, in both systems
        order = sorted(calls, key=lambda c: c[0] == "halve")
        messages = [*messages, turn, *({"role": "tool", "name": n, "content": results[(n, *a.values())]}
                                       for n, a in order)]
    return ids, own


def fitted(folder):
    tokenizer = make(FAMILIES["Qwen2.5"])
    tokenizer.chat_template = chat_template_utils.qwen2_5_chat_template
    tokenizer.save_pretrained(f"{folder}/model")
    schemas = [get_json_schema(method) for method in (Sums().add, Sums().halve)]
    talks = [conversation(tokenizer, row, schemas) for row in rows(os.devnull)]
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096,
                         pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
                         tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    size = max(len(ids) for ids, _ in talks)
    tokens = torch.tensor([ids + [0] * (size - len(ids)) for ids, _ in talks])
    mask = torch.tensor([own + [0] * (size - len(own)) for _, own in talks]).bool()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(300):
        logits = model(tokens).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits[mask[:, 1:]], tokens[:, 1:][mask[:, 1:]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 5e-3:
            break
    print(f"fitted in {step + 1} steps, loss {loss.item():.4f}", flush=True)
    model.save_pretrained(f"{folder}/model")
    return tokenizer


def main():
    folder = sys.argv[1]
    tokenizer = fitted(folder)
    log = f"{folder}/theirs.jsonl"
    Path(f"{folder}/theirs.rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(log)))
    seen = []

    def noted(completion_ids, **_):
        seen.extend(completion_ids)
        return [0.0] * len(completion_ids)

    arguments = GRPOConfig(
        output_dir=f"{folder}/trl", per_device_train_batch_size=6, num_generations=2, max_steps=1, learning_rate=0.0,
        max_completion_length=600, generation_kwargs={"do_sample": False}, report_to=[], use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", shuffle_dataset=False, beta=0.0, disable_tqdm=True)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32), reward_funcs=noted,
        args=arguments, train_dataset=Dataset.from_list(rows(log)), processing_class=tokenizer,
        environment_factory=Sums)
    trainer.train()
    Path(f"{folder}/theirs.tokens.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
