"""Contexts of conversations, over the structures of eight families: what a reply adds is what the template writes, and
a template that rewrites is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rldsl.diag import Failure
from rldsl.runtime.environments.chat import ChatTemplate
from rldsl.runtime.environments.contract import Speaks
from tests.environments.families import FAMILIES, QWEN25, TOOL, Family, ends, make
from tests.samples import thorough_between

TOKENIZERS = {name: make(family) for name, family in FAMILIES.items()}
THINKING = ("Qwen3", "gpt-oss")  # leave out thinking once the user speaks again
WORDS = st.text(st.sampled_from("ab 1{}\"'\n<|>"), min_size=1, max_size=8).map(lambda t: f"v{t}v")


def chat(name: str, speaks: Speaks = "tool") -> ChatTemplate:
    tokenizer = TOKENIZERS[name]
    return ChatTemplate(tokenizer, ends(tokenizer, FAMILIES[name]), "tok", [TOOL] if speaks == "tool" else [], speaks)


CHATS = {(name, speaks): chat(name, speaks) for name in FAMILIES for speaks in ("tool", "user")
         if speaks == "tool" or name not in THINKING}


@pytest.mark.parametrize("name, speaks", thorough_between(CHATS))
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_conversation_in_pieces_is_what_the_template_renders(name: str, speaks: Speaks, data: st.DataObject) -> None:
    """Contexts and turns, one after the other, are the rendering of all messages, token by token."""
    made, tokenizer = CHATS[name, speaks], TOKENIZERS[name]
    messages: list[dict[str, Any]] = [{"role": "user", "content": data.draw(WORDS)}]
    pieces = list(made.first(messages))
    for _ in range(data.draw(st.integers(1, 3))):
        before = made._text(messages)
        if speaks == "tool":
            several = data.draw(st.integers(1, 2)) if made.many_calls else 1
            calls = [{"type": "function", "id": f"call{i:05}",
                      "function": {"name": "add", "arguments": {"b": data.draw(WORDS)}}} for i in range(several)]
            turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
            answers = [{"role": "tool", "name": "add", "content": data.draw(WORDS), "tool_call_id": c["id"]}
                       for c in calls]
            thought = data.draw(st.booleans())
            turn |= {"reasoning_content": "hm"} if name == "Qwen3" and thought else {}
            turn |= {"thinking": "hm"} if name == "gpt-oss" and thought else {}
        else:
            turn, answers = {"role": "assistant", "content": data.draw(WORDS)}, [
                {"role": "user", "content": data.draw(WORDS)}]
        after = made._text([*messages, turn, *answers])
        messages += [turn, *answers]
        # what a model would have sampled: what the template adds, up to the stop token of the turn
        reply = made.reply([{k: v for k, v in m.items() if k != "tool_call_id"} for m in answers], cut=False)
        whole = made._ids(messages)
        assert after.startswith(before) and tuple(whole[: len(pieces)]) == tuple(pieces)
        assert whole[len(whole) - len(reply):] == reply
        sampled = whole[len(pieces): len(whole) - len(reply)]
        assert sampled[-1] in made.ends
        assert made.reply(answers, cut=True) == (sampled[-1], *reply)
        pieces += [*sampled, *reply]
    assert tuple(pieces) == made._ids(messages)
    assert tokenizer.decode(pieces) == made._text(messages)


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_from_sampled_ids(name: str) -> None:
    made, tokenizer, family = CHATS[name, "tool"], TOKENIZERS[name], FAMILIES[name]
    turn = made.turn(tokenizer(family.call, add_special_tokens=False)["input_ids"], ())
    assert turn.calls == ({"name": "add", "arguments": {"a": 2, "b": "x y"}},)
    turn = made.turn(tokenizer(family.text, add_special_tokens=False)["input_ids"], ())
    assert turn.calls == () and turn.content.endswith("It is 4.")


def refused(template: str, speaks: Speaks = "tool", ends_of: tuple[str, ...] = ("<|im_end|>",)) -> tuple[str, str]:
    family = Family(template, (*FAMILIES["Qwen3"].markers, "<|other|>"), ends_of, "")
    tokenizer = make(family)
    with pytest.raises(Failure) as caught:
        ChatTemplate(tokenizer, ends(tokenizer, family), "models/sft", [TOOL] if speaks == "tool" else [], speaks)
    (found,) = caught.value.diagnostics
    assert found.place == "models/sft" and found.help
    return f"{found.code} {found.title}", "\n".join(found.notes)


def test_thinking_that_is_left_out_later_is_refused_with_both_renderings() -> None:
    title, notes = refused(FAMILIES["Qwen3"].template, "user")
    assert title == ("RL0718 the chat template leaves out the thinking of earlier turns when a conversation continues")
    where, before, after = notes.split("\n")
    assert where == "of turn 1 of the model and its answer (role `user`)"
    assert before.startswith("before: ") and "x7thought7x" in before
    assert after.startswith("after: ") and "x7thought7x" not in after and "x7said7x" in after


def test_a_generation_prompt_that_history_does_not_have_is_refused() -> None:
    template = QWEN25.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think></think>{% endif %}")
    assert template != QWEN25
    title, notes = refused(template)
    assert title == "RL0718 the chat template rewrites earlier turns when a conversation continues"
    assert "before: " in notes and "<think></think>'" in notes and "after: " in notes
    assert notes.startswith("what begins a turn of the model is rendered differently once turn 1 of the model and its "
                            "answer (role `tool`) follow\n")


LAST = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.index < messages | length - 2"
        " %}%%{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


@pytest.mark.parametrize("template, what, when", [
    (LAST.replace("%%", "{{ m.content.split('</think>')[-1] }}"), "the thinking of turn 1 of the model", 2),
    (LAST.replace("%%", ""), "turn 1 of the model", 2),
    ("{{ messages | length }}" + LAST, "the first message (role `user`)", 1),
    (LAST.replace("m.role == 'assistant'", "m.role == 'user' and loop.index > 1").replace("%%", "..."),
     "answer 1 (role `user`)", 3),
])
def test_the_message_that_is_rewritten_is_named(template: str, what: str, when: int) -> None:
    title, notes = refused(template, "user")
    assert title == "RL0718 the chat template rewrites earlier turns when a conversation continues"
    where, before, after = notes.split("\n")
    assert where == (f"{what} is rendered differently once turn {when} of the model and its answer (role `user`) follow")
    assert before.startswith("before: ") and after.startswith("after: ") and before[8:] != after[7:]


@pytest.mark.parametrize("old, new, title", [
    ("{{ m.content }}\n</tool_response>", "</tool_response>", "leaves out messages of the role `tool`"),
    ('"arguments": {{ call.function.arguments | tojson }}', "", "leaves out turns of the model"),
    ("{%- if tools %}", "{{ messages | length }}{%- if tools %}", "rewrites earlier turns"),
    ("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}",
     "rejects these messages: no tools here"),
    ("{{ m.content }}\n</tool_response>", "{{ loop.index }}{{ m.content }}\n</tool_response>",
     "renders an answer differently in a longer conversation"),
])
def test_templates_that_cannot_be_used(old: str, new: str, title: str) -> None:
    assert old in QWEN25
    assert title in refused(QWEN25.replace(old, new, 1))[0]


@pytest.mark.parametrize("template, title, help", [
    ("{% for m in messages %}\n{{ m.content }", "the chat template has a syntax error in its line 2: ", "correct it: "),
    ("{{ raise_exception('no') }}", "the chat template rejects these messages: no", "`raise_exception`: messages of "
     "this environment have the role `user`"),
    ("{{ messages[0].content + 1 }}", "the chat template fails with these messages: TypeError: ", "is wrong, or they lack"),
])
def test_the_help_fits_what_is_wrong_with_a_template(template: str, title: str, help: str) -> None:
    family = Family(template, FAMILIES["Qwen3"].markers, ("<|im_end|>",), "")
    tokenizer = make(family)
    with pytest.raises(Failure) as caught:
        ChatTemplate(tokenizer, ends(tokenizer, family), "models/sft", [], "user")
    (found,) = caught.value.diagnostics
    assert found.code == "RL0718" and title in found.title and help in found.help, found
    assert "chat_template.jinja" in found.help and ("role" in found.help) == ("raise_exception" in template)


def test_a_stop_token_that_the_template_does_not_write() -> None:
    title, notes = refused(QWEN25, ends_of=("<|other|>",))
    assert "does not end a turn of the model with a stop token" in title and "stop tokens: '<|other|>'" in notes


def test_a_template_that_wants_arguments_as_text() -> None:
    """As DeepSeek's: it joins them with a string, which a mapping is not."""
    family = FAMILIES["Qwen2.5"]
    template = QWEN25.replace("call.function.arguments | tojson", "'' + call.function.arguments")
    assert template != QWEN25
    tokenizer = make(Family(template, family.markers, family.ends, family.call))
    made = ChatTemplate(tokenizer, ends(tokenizer, family), "models/sft", [TOOL], "tool")
    assert made.text_arguments and made.many_calls
    answers = [{"role": "tool", "name": "add", "content": "4"}]
    assert made.reply(answers, False) == CHATS["Qwen2.5", "tool"].reply(answers, False)
    assert not any(chat.text_arguments for chat in CHATS.values())


def test_no_template_and_no_family() -> None:
    assert refused("")[0] == "RL0718 this tokenizer has no chat template"
    title, notes = refused(QWEN25.replace("<tool_call>", "<my_call>"))
    assert title == "RL0719 how the model of this tokenizer calls tools is not known" and "Mistral" in notes


def test_a_template_that_ignores_tools_is_named() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for text, says in ((template, True), (template + "{{ tools }}", False)):
        family = Family(text, FAMILIES["Qwen3"].markers, ("<|im_end|>",), "")
        tokenizer = make(family)
        with pytest.raises(Failure) as caught:
            ChatTemplate(tokenizer, ends(tokenizer, family), "models/sft", [TOOL], "tool")
        assert ("does not use `tools`" in caught.value.diagnostics[0].help) is says


def test_a_short_answer_is_not_mistaken_for_the_turn() -> None:
    made = CHATS["Qwen2.5", "tool"]
    for content in ("x", "7", "", "x7said7x", "add"):
        reply = made.reply([{"role": "tool", "name": "add", "content": content}], False)
        assert TOKENIZERS["Qwen2.5"].decode(list(reply)) == (
            f"\n<|im_start|>user<tool_response>\n{content}\n</tool_response>"
            "<|im_end|>\n<|im_start|>assistant\n")
