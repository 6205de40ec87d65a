"""The tool loop of TRL's GRPOTrainer and this project's conversations, with the same turns of the model and one class.
Prints JSON: what the class saw, what the model got and the tokens, of each. Runs in a Python that has TRL."""

import asyncio
import inspect
import json
import threading
from types import SimpleNamespace

from trl.trainer import grpo_trainer

from rldsl.plan.function import Function
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.contract import TrlForm
from tests.environments.envs_calculator import Calculator
from tests.environments.families import FAMILIES, ends, make

FAMILY = FAMILIES["Qwen2.5"]
TOKENIZER = make(FAMILY)
ROW = {"prompt": [{"role": "user", "content": "What?"}], "answer": 6, "level": "hard"}


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


TURNS = [TOKENIZER(text + "<|im_end|>", add_special_tokens=False)["input_ids"] for text in (
    call("slowly", seconds=0.02) + call("add", a=1, b=1) + call("nothing") + call("slowly", seconds=0.01),
    call("add", a=1, c=2) + call("add", a=2, b=2), call("break_down", how="raise"), "It is 6.")]


def ours():
    environment = Calculator()
    form = TrlForm(Function("f", "envs_calculator.py", "Calculator", ""), environment)
    chat = ChatTemplate(TOKENIZER, ends(TOKENIZER, FAMILY), "tokenizer", form.tools(), "tool")
    context = chat.first(form.begin(ROW["prompt"], ROW, 1))
    tokens, answers = list(context), []
    for ids in TURNS:
        tokens += ids
        turn = chat.turn(ids, context)
        if turn.calls:
            said = form.answer(turn.content, turn.calls).messages
            context = chat.reply(said, cut=False)
            tokens += context
            answers += said
    return chat, {"calls": environment.calls, "answers": answers, "tokens": tokens, "reward": form.reward()}


def theirs(chat):
    """TRL's loop on a trainer that has only what the loop reads, and whose model says the same turns. Only the calls
    are parsed by our reader: this tokenizer has no response template."""
    def parsed(tokenizer, ids, prefix=None, tools=None):
        turn = chat.turn(list(ids), ())
        message = {"role": "assistant", "content": turn.content}
        calls = [{"type": "function", "function": c} for c in turn.calls]
        return message | ({"tool_calls": calls} if calls else {})

    grpo_trainer.parse_response = parsed
    environment = Calculator()
    methods = [getattr(environment, name) for name, _ in inspect.getmembers(Calculator, inspect.isfunction)
               if name not in ("reset", "get_reward") and not name.startswith("_")]
    (message,) = ROW["prompt"]
    prompt = [{**message, "content": message["content"] + environment.reset(**ROW)}]
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    later = iter(TURNS[1:])
    trainer = SimpleNamespace(
        max_tool_calling_iterations=100, max_completion_length=10**6, use_vllm=False, _is_vlm=False, tools=methods,
        environment_factories={None: Calculator}, _env_tools={None: methods}, _batch_environments=[None],
        _tokenizer=TOKENIZER, processing_class=TOKENIZER, chat_template=None, chat_template_kwargs={}, async_loop=loop,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**6)),
        _sync_tool_dicts=[{m.__name__: m for m in methods if not inspect.iscoroutinefunction(m)}],
        _async_tool_dicts=[{m.__name__: m for m in methods if inspect.iscoroutinefunction(m)}],
        _generate_single_turn=lambda *a, **k: ([next(later)], None))
    trainer._get_tool_suffix_ids = lambda m: grpo_trainer.GRPOTrainer._get_tool_suffix_ids(trainer, m)
    first = list(TOKENIZER.apply_chat_template(prompt, tools=methods, add_generation_prompt=True, return_dict=False))
    _, completions, ids, *_ = grpo_trainer.GRPOTrainer._tool_call_loop(
        trainer, [list(prompt)], [first], [TURNS[0]], [[parsed(TOKENIZER, TURNS[0])]], None, None, {})
    return {"calls": environment.calls, "answers": [m for m in completions[0] if m["role"] == "tool"],
            "tokens": first + list(ids[0]), "reward": environment.get_reward()}


if __name__ == "__main__":
    made, found = ours()
    print("RESULT" + json.dumps([found, theirs(made)]))
