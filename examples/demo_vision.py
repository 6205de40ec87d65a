"""The demo of images: a small vision-language model learns to count circles among squares, first from examples, then by
GRPO, on two ranks.

    python examples/demo_vision.py          # or: make demo-vision

Everything is created under runs/shapes and runs on CPU with gloo: pictures, a character tokenizer and a random
Qwen2.5-VL model with its image processor, a short supervised fine-tuning, then GRPO with an exact-match reward. A third
program measures held-out accuracy, and plain transformers measures it again from the checkpoint.
"""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

from demo import last_metrics, rlc
from tiny import make_vision_model, write_jsonl

ROOT = Path("runs/shapes")
HELD_OUT = 300
STEPS = {"sft": 80, "grpo": 160}
SIDE, CELL = 3, 8  # cells of a picture in each direction, and pixels of a cell
QUESTION = "circles?"


def main() -> int:
    started = time.monotonic()
    prepare(3_300)
    accuracy = {"before": evaluate("base")}
    rlc("vision_sft.rlf", ROOT / "run_sft", steps=STEPS["sft"])
    accuracy["SFT"] = evaluate("sft")
    rlc("vision_grpo.rlf", ROOT / "run_grpo", steps=STEPS["grpo"])
    accuracy["GRPO"] = evaluate("grpo")
    return report(accuracy, plain_transformers(ROOT / "grpo"), time.monotonic() - started)


def prepare(count: int) -> None:
    """Write pictures, rows and the random model, as ordinary files and HuggingFace directories."""
    draw = random.Random(0)
    (ROOT / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        name = f"pictures/{i}.png"
        circles = draw_picture(ROOT / name, draw)
        message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}
        rows.append({"prompt": [message], "image": name, "answer": str(circles)})
    write_jsonl(ROOT / "test.jsonl", rows[:HELD_OUT])
    write_jsonl(ROOT / "train.jsonl", rows[HELD_OUT:])
    make_vision_model(ROOT / "base", characters="0123456789abcdefghijklmnopqrstuvwxyz?\n", scale=0.0, hidden_size=64,
                      intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
                      rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
                      tower={"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "fullatt_block_indexes": [0, 1]},
                      tie_word_embeddings=True, max_position_embeddings=128)


def draw_picture(file: Path, draw: random.Random) -> int:
    """Circles and squares of random sizes and colors, in some of the cells; returns the number of circles."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (SIDE * CELL, SIDE * CELL), tuple(draw.randrange(60) for _ in range(3)))
    pen, circles = ImageDraw.Draw(image), 0
    for cell in range(SIDE * SIDE):
        kind = draw.choice(("circle", "square", "nothing"))
        size = draw.randint(5, CELL - 1)
        x = cell % SIDE * CELL + draw.randint(0, CELL - 1 - size)
        y = cell // SIDE * CELL + draw.randint(0, CELL - 1 - size)
        color = tuple(draw.randint(140, 255) for _ in range(3))
        if kind == "circle":
            pen.ellipse((x, y, x + size, y + size), fill=color)
        elif kind == "square":
            pen.rectangle((x, y, x + size, y + size), fill=color)
        circles += kind == "circle"
    image.save(file)
    return circles


def evaluate(model: str) -> float:
    out = ROOT / f"run_eval_{model}"
    rlc("vision_eval.rlf", out, model_dir=ROOT / model)
    return last_metrics(out)["accuracy"]


def plain_transformers(directory: Path) -> dict[str, float]:
    """Evaluate the checkpoint with transformers alone: greedy accuracy, and the mean log-probability of its answers."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    processor = AutoImageProcessor.from_pretrained(directory, backend="pil")
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    right, total, tokens = 0, 0.0, 0
    for row in map(json.loads, (ROOT / "test.jsonl").read_text().splitlines()):
        inputs = dict(processor(images=[Image.open(ROOT / row["image"])], return_tensors="pt"))
        text = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        count = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
        ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt",
                        add_special_tokens=False).input_ids
        inputs["attention_mask"] = torch.ones_like(ids)
        kinds = (ids == model.config.image_token_id).long()
        with torch.no_grad():
            full = model.generate(ids, **inputs, mm_token_type_ids=kinds, max_new_tokens=2, do_sample=False)
            new = full.shape[1] - ids.shape[1]
            inputs["attention_mask"] = torch.ones_like(full)
            kinds = torch.cat([kinds, kinds.new_zeros(1, new)], 1)
            logits = model(full, **inputs, mm_token_type_ids=kinds).logits[0, ids.shape[1] - 1 : -1]
        answer = full[0, ids.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip() == row["answer"]
        total += logits.log_softmax(-1).gather(1, answer[:, None]).sum().item()
        tokens += len(answer)
    return {"accuracy": right / HELD_OUT, "logprob": total / tokens}


def report(accuracy: dict[str, float], theirs: dict[str, float], seconds: float) -> int:
    ours = last_metrics(ROOT / "run_eval_grpo")
    rule = "-" * 100
    print(f"\n{rule}\nheld-out accuracy of counting circles ({HELD_OUT} pictures)")
    for name, value in accuracy.items():
        print(f"  {name:<10}{value:7.1%}  {'#' * round(60 * value)}")
    print(f"  plain transformers on the checkpoint: {theirs['accuracy']:.1%}; mean log-prob of its answers "
          f"{theirs['logprob']:.6f}, ours {ours['logprob']:.6f}")
    print(f"checkpoint\n  {ROOT / 'grpo'}\ntime\n  {seconds:.0f} s\n{rule}")
    same_answers = abs(theirs["accuracy"] - ours["accuracy"]) < 0.5 / HELD_OUT
    if not same_answers or abs(theirs["logprob"] - ours["logprob"]) > 1e-4:
        sys.exit("transformers and our evaluation disagree on the checkpoint")
    return 0


if __name__ == "__main__":
    sys.exit(main())
