"""ReaL's formats, pairs of many answers, and chat messages on both sides of a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.runtime.data import open_source
from rldsl.runtime.data.implicit_prompts import with_implicit_prompt
from tests.data.makers import WRITERS, declared, jsonl, opened, texts, wrong

FORMATS = list(WRITERS)
PARTS = ("prompt", "chosen", "rejected")
REAL = [{"prompt": "1+1=", "pos_answers": ["2"], "neg_answers": ["3"], "id": 7},
        {"prompt": "2+2=", "pos_answers": ["4", "04", "004"], "neg_answers": ["5", "6", "7"], "id": 8},
        {"prompt": "3+3=", "pos_answers": ["6", "06"], "neg_answers": ["1", "2"], "id": 9}]


@pytest.mark.parametrize("format", FORMATS)
def test_answers_of_both_sides_make_pairs_one_after_another(tmp_path: Path, tokenizer: str, format: str) -> None:
    source = opened(tmp_path, tokenizer, REAL, "pairs", format, batch=6)
    assert texts(source) == {"chosen": ["1+1=2$", "2+2=4$", "2+2=04$", "2+2=004$", "3+3=6$", "3+3=06$"],
                             "rejected": ["1+1=3$", "2+2=5$", "2+2=6$", "2+2=7$", "3+3=1$", "3+3=2$"]}
    assert source.columns(0, 1)[2] == {"prompt": "2+2=", "pos_answers": "04", "neg_answers": "6", "id": 8}
    assert source.table.place(2) == source.table.place(3) != source.table.place(4)


def test_pairs_are_shuffled_and_batched_as_rows(tmp_path: Path, tokenizer: str) -> None:
    source = opened(tmp_path, tokenizer, REAL, "pairs", batch=2, shuffle=True)
    seen = [text for step in range(3) for text in texts(source, step)["chosen"]]
    assert sorted(seen) == sorted(["1+1=2$", "2+2=4$", "2+2=04$", "2+2=004$", "3+3=6$", "3+3=06$"])
    assert source.passes == 10 / 3


def test_one_answer_in_each_list_and_lists_under_other_names(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1+1=", "good": ["2"], "bad": ["3"]}, {"prompt": "2+2=", "good": "4", "bad": "5"}]
    source = opened(tmp_path, tokenizer, rows, "pairs", columns=(("prompt", "prompt"), ("chosen", "good"),
                                                                ("rejected", "bad")))
    assert texts(source)["chosen"] == ["1+1=2$", "2+2=4$"] and source.columns(0, 1)[0]["good"] == "2"


def test_our_names_come_before_theirs(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"prompt": "1+1=", "chosen": "2", "rejected": "3", "pos_answers": [], "neg_answers": 4}]
    assert texts(opened(tmp_path, tokenizer, rows, "pairs"))["chosen"] == ["1+1=2$"]


@pytest.mark.parametrize("format", FORMATS)
def test_reals_prompts_and_answers(tmp_path: Path, tokenizer: str, format: str) -> None:
    rows = [{"id": "a", "prompt": "1+1=", "answer": "2"}, {"id": "b", "prompt": "2+2=", "answer": "4"}]
    source = opened(tmp_path, tokenizer, rows, "answers", format)
    assert texts(source) == {"": ["1+1=2$", "2+2=4$"]} and source.columns(0, 1) == rows


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize("format", FORMATS)
def test_chat_on_both_sides(tmp_path: Path, chat: str, format: str) -> None:
    rows = [{"prompt": [turn("user", f"{i}+1")], "chosen": [turn("assistant", str(i + 1))],
             "rejected": [turn("assistant", "0")]} for i in range(2)]
    assert texts(opened(tmp_path, chat, rows, "pairs", format)) == {
        "chosen": ["u.0+1 a.1$", "u.1+1 a.2$"], "rejected": ["u.0+1 a.0$", "u.1+1 a.0$"]}


def test_text_and_turns_end_alike(tmp_path: Path, chat: str) -> None:
    """What a template writes behind the last end of a sequence is not part of the response."""
    prompt = [turn("user", "1+1")]
    rows = [{"prompt": prompt, "answer": "2"}, {"prompt": prompt, "answer": [turn("assistant", "2")]}]
    frame = opened(tmp_path, chat, rows, "answers").step(0, 1)[""]
    assert frame.tokens[0].tolist() == frame.tokens[1].tolist() and frame.response_lens == [2, 2]


def test_many_turns_and_many_answers(tmp_path: Path, chat: str) -> None:
    rows = [{"prompt": [turn("user", "1"), turn("assistant", "2"), turn("user", "3")],
             "pos_answers": [[turn("assistant", "4"), turn("assistant", "5")], [turn("assistant", "6")]],
             "neg_answers": [[turn("assistant", "7")], [turn("assistant", "8")]]}]
    found = texts(opened(tmp_path, chat, rows, "pairs", batch=2))
    assert found["chosen"] == ["u.1 a.2$ u.3 a.4$ a.5$", "u.1 a.2$ u.3 a.6$"]


def test_a_template_without_an_end_gets_one(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    from tests.tiny import make_tokenizer

    made = make_tokenizer(tmp_path / "t")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made.save_pretrained(tmp_path / "t")
    rows = [{"prompt": [turn("user", "1+1=")], "answer": [turn("assistant", "2")]}]
    assert texts(opened(tmp_path, str(tmp_path / "t"), rows, "answers")) == {"": ["1+1=2$"]}


def test_fields_that_a_message_lacks_are_not_given_to_the_template(tmp_path: Path) -> None:
    """Arrow gives each message the fields of all."""
    from tests.tiny import make_tokenizer

    made = make_tokenizer(tmp_path / "t")
    made.chat_template = ("{% for m in messages %}{% if m.name is defined %}*{{ m.name }}*{% endif %}"
                          "{{ m.content }}{% endfor %}")
    made.save_pretrained(tmp_path / "t")
    rows = [{"prompt": [{**turn("user", "1+1="), "name": "2"}]}, {"prompt": [turn("user", "1+1=")]}]
    assert texts(opened(tmp_path, str(tmp_path / "t"), rows, format="parquet")) == {"": ["*2*1+1=", "1+1="]}


# ------------------------------------------------------------------------------- prompts that both sides begin with

ASKED, YES, NO = turn("user", "1+1"), turn("assistant", "2"), turn("assistant", "3")


@pytest.mark.parametrize("format", FORMATS)
def test_a_prompt_that_both_sides_begin_with(tmp_path: Path, chat: str, format: str) -> None:
    """As in TRL's datasets: a chat, and a chat next to a prompt that is text."""
    for number, more in enumerate(({}, {"prompt": "1+1"}, {"id": 3})):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = opened(folder, chat, [{"chosen": [ASKED, YES], "rejected": [ASKED, NO], **more}], "pairs", format)
        assert texts(source) == {"chosen": ["u.1+1 a.2$"], "rejected": ["u.1+1 a.3$"]}
        assert source.columns(0, 1) == [{**more, "prompt": [ASKED], "chosen": [YES], "rejected": [NO]}]
        assert source.note == "data d: the prompt of 1 row is what `chosen` and `rejected` begin with"


@pytest.mark.parametrize("format", FORMATS)
def test_a_text_that_both_sides_begin_with(tmp_path: Path, tokenizer: str, format: str) -> None:
    source = opened(tmp_path, tokenizer, [{"chosen": "1+1=2", "rejected": "1+1=3"}], "pairs", format)
    assert texts(source) == {"chosen": ["1+1=2$"], "rejected": ["1+1=3$"]}
    assert source.step(0, 1)["chosen"].prompt_lens == [4]


@pytest.mark.parametrize("chosen, rejected, prompt, rest", [  # what `extract_prompt` of TRL 1.16 makes of them
    ("a b c", "a b d", "a b", (" c", " d")), ("ab", "ac", "a", ("b", "c")), ("a bc", "a d", "a", (" bc", " d")),
    ("abc", "abcd", "ab", ("c", "cd")), ("abc", "abc", "ab", ("c", "c")), ("  a", "  b", " ", (" a", " b")),
    ([ASKED, YES], [ASKED, YES], [ASKED], ([YES], [YES])),
    ([ASKED, YES, ASKED, YES], [ASKED, YES, ASKED, NO], [ASKED, YES, ASKED], ([YES], [NO])),
    ([ASKED, YES], [ASKED, NO, YES], [ASKED], ([YES], [NO, YES])),
])
def test_what_is_the_prompt(chosen: Any, rejected: Any, prompt: Any, rest: tuple[Any, Any]) -> None:
    found = with_implicit_prompt({"chosen": chosen, "rejected": rejected, "x": 1}, dict(zip(PARTS, PARTS, strict=True)))
    assert [found[name] for name in PARTS] == [prompt, *rest] and found["x"] == 1


@pytest.mark.parametrize("row", [
    {"chosen": "ab", "rejected": "cd"}, {"chosen": "a ", "rejected": "b"}, {"chosen": [YES], "rejected": [NO]},
    {"chosen": "a", "rejected": "a"}, {"chosen": [], "rejected": []}, {"chosen": "", "rejected": ""},
    {"chosen": "ab", "rejected": [YES]}, {"chosen": None, "rejected": None}, {"chosen": ["ab"], "rejected": ["ac"]},
    {"prompt": "a", "chosen": "ab", "rejected": "ac"}, {"prompt": None, "chosen": "ab", "rejected": "ac"},
    {"prompt": [ASKED], "chosen": [ASKED, YES], "rejected": [ASKED, NO]},
    {"prompt": [ASKED], "chosen": "ab", "rejected": "ac"}, {"prompt": "1+1", "chosen": [YES], "rejected": [NO]}])
def test_rows_that_are_not_split(row: dict[str, Any]) -> None:
    """They are checked as they are, like those of other data."""
    assert with_implicit_prompt(row, dict(zip(PARTS, PARTS, strict=True))) is row


@pytest.mark.parametrize("format", FORMATS)
def test_sides_with_nothing_in_common(tmp_path: Path, tokenizer: str, format: str) -> None:
    rows = [{"chosen": "1+1=2", "rejected": "1+1=3"}, {"chosen": "1+1=2", "rejected": "2+1=3"}]
    with pytest.raises(Failure) as caught:
        opened(tmp_path, tokenizer, rows, "pairs", format)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0746" and found.notes[-1].startswith("a pair needs no prompt if both sides begin with it")
    assert str(found.place).endswith(":2") or format != "jsonl"


def test_a_prompt_of_another_name_is_not_made_up(tmp_path: Path, tokenizer: str) -> None:
    data = declared(jsonl(tmp_path, [{"chosen": "1+1=2", "rejected": "1+1=3"}]), tokenizer, "pairs",
                    columns=(("prompt", "question"), ("chosen", "chosen"), ("rejected", "rejected")))
    (found,) = wrong(data)
    assert found.code == "RL0746" and "`question` is missing" in found.title


# --------------------------------------------------------------------------------------------------- equal sides

FINE = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
EQUAL = {"prompt": "1+1=", "chosen": "2", "rejected": "2"}


@pytest.mark.parametrize("format", FORMATS)
def test_pairs_with_equal_sides_are_reported(tmp_path: Path, tokenizer: str, format: str) -> None:
    """All is read as before."""
    source = opened(tmp_path, tokenizer, [FINE, FINE, EQUAL, EQUAL], "pairs", format)
    (found,) = source.warnings
    assert (found.code, found.severity) == ("RL0802", "warning")
    assert found.title == "`chosen` and `rejected` are equal in 2 of 4 pairs" and found.notes
    assert found.place == source.table.place(2) and len(source.table) == 4


@pytest.mark.parametrize("rows, count", [
    ([{"prompt": "1", "pos_answers": ["2", "3"], "neg_answers": ["4", "3"]}], "1 of 2 pairs"),
    ([{"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, {"chosen": [ASKED, YES], "rejected": [ASKED, YES]}],
     "1 of 2 pairs"),
    ([{"chosen": "1+1=2", "rejected": "1+1=3"}, {"chosen": "1+1=2", "rejected": "1+1=2"}], "1 of 2 pairs")])
def test_equal_answers_of_lists_and_of_implicit_prompts(tmp_path: Path, chat: str, rows: list[Any], count: str) -> None:
    (found,) = opened(tmp_path, chat, rows, "pairs").warnings
    assert found.title.endswith(f"are equal in {count}") and not found.notes


@pytest.mark.parametrize("rows", [
    [FINE], [{"prompt": "1", "pos_answers": ["2", "3"], "neg_answers": ["3", "2"]}],
    [{"chosen": [ASKED, YES], "rejected": [ASKED, NO]}], [{**FINE, "rejected": "2 "}]])
def test_sides_that_differ(tmp_path: Path, chat: str, rows: list[Any]) -> None:
    assert opened(tmp_path, chat, rows, "pairs").warnings == ()


@pytest.mark.parametrize("format", FORMATS)
def test_sides_that_are_equal_everywhere(tmp_path: Path, tokenizer: str, format: str) -> None:
    """As when one column is named twice."""
    columns = (("prompt", "prompt"), ("chosen", "chosen"), ("rejected", "chosen"))
    with pytest.raises(Failure) as caught:
        opened(tmp_path, tokenizer, [FINE, FINE], "pairs", format, columns=columns)
    (found,) = caught.value.diagnostics
    assert (found.code, found.severity) == ("RL0802", "error") and "equal in every row" in found.title
    assert str(found.place).endswith(":1") and found.help


# ------------------------------------------------------------------------------------------------ calls of tools

CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
ANSWERS = ({"role": "tool", "content": "2"}, YES)
OTHER = {**CALL, "tool_calls": [{"type": "function", "function": {"name": "sub", "arguments": {"b": 1}}}]}
TOOLS = ("{% for m in messages %}{% if m.content is undefined %}{% for c in m.tool_calls %}({{ c.function.name }}"
         "{{ c.function.arguments | tojson }}){% endfor %}{% else %}{{ m.role[0] }}.{{ m.content }}{% endif %}"
         "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")


@pytest.mark.parametrize("format", FORMATS)
def test_messages_without_content(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, format: str,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Of OpenAI's format: `content` is missing or null where a message calls tools. Templates see none in both, and of
    the arguments those that the row has."""
    from tests.tiny import make_tokenizer

    made = make_tokenizer(tmp_path / "t")
    made.chat_template = TOOLS
    made.save_pretrained(tmp_path / "t")
    seen: list[str] = []
    monkeypatch.setattr("rldsl.runtime.data.tokens.Tokens._ids", lambda self, text, special: seen.append(text) or (
        [[2]] * len(text) if isinstance(text, list) else [2]))
    rows = [{"chosen": [ASKED, CALL, *ANSWERS], "rejected": [ASKED, CALL, ANSWERS[0], NO]},
            {"chosen": [ASKED, CALL], "rejected": [ASKED, {**OTHER, "content": None}]}]
    opened(tmp_path, str(tmp_path / "t"), rows, "pairs", format).step(0, 1)
    before, end = 'u.1+1(add{"a": 1})', made.eos_token
    assert seen[:2] == [f"{before}{end}t.2", "u.1+1"]
    assert seen[2:] == [f"a.2{end}", f'(add{{"a": 1}}){end}', f"a.3{end}", f'(sub{{"b": 1}}){end}']


@pytest.mark.parametrize("message, note", [
    ({"role": "assistant"}, "message 1 has neither `content` nor `tool_calls`"),
    ({"role": "assistant", "content": None}, "message 1 has neither `content` nor `tool_calls`"),
    ({"role": "assistant", "tool_calls": None, "name": "x"}, "message 1 has neither `content` nor `tool_calls`"),
    ({"content": "2"}, "message 1 has no `role`"), ({"role": 1, "content": "2"}, "message 1 has no `role`")])
def test_messages_that_are_none(tmp_path: Path, chat: str, message: dict[str, Any], note: str) -> None:
    row = {"prompt": [ASKED], "answer": [message]}
    (found,) = wrong(declared(jsonl(tmp_path, [row]), chat, "answers"))
    assert found.code == "RL0747" and found.notes == (note,) and found.place.endswith(":1")
    (tmp_path / "prompts").mkdir()
    (found,) = wrong(declared(jsonl(tmp_path / "prompts", [{"prompt": [ASKED, message]}]), chat))
    assert found.code == "RL0747" and found.notes == (note.replace("1", "2", 1),)


# ------------------------------------------------------------------------------------------------- what is wrong

PROMPT = {"prompt": "1+1="}
USER = {"prompt": [turn("user", "1+1")]}


@pytest.mark.parametrize("row, code, words", [
    ({**PROMPT, "pos_answers": ["2"], "neg_answers": ["3", "4"]}, "RL0757",
     "these answers cannot be paired: `pos_answers` has 1 answers and `neg_answers` has 2 answers"),
    ({**PROMPT, "pos_answers": [], "neg_answers": []}, "RL0757", "the column `pos_answers` has no answers"),
    ({**PROMPT, "pos_answers": ["2"], "neg_answers": "3"}, "RL0757", "`neg_answers` is one answer"),
    ({**PROMPT, "pos_answers": ["2", 3], "neg_answers": ["3", "4"]}, "RL0747",
     "a value of the column `pos_answers` is a number"),
    ({**PROMPT, "pos_answers": [None], "neg_answers": ["3"]}, "RL0747", "is null, not a string or assistant messages"),
    ({**PROMPT, "pos_answers": ["2"]}, "RL0746", "the column `chosen` is missing"),
    ({**PROMPT, "chosen": "2", "neg_answers": ["3"]}, "RL0746", "the column `rejected` is missing"),
    ({**PROMPT, "chosen": "2", "rejected": {"a": 1}}, "RL0747", "the column `rejected` is an object"),
    ({**PROMPT, "chosen": [turn("assistant", "2")], "rejected": "3"}, "RL0747",
     "the column `chosen` has chat messages, but the prompt is a string"),
    ({**USER, "chosen": [turn("user", "1+1"), turn("assistant", "2")], "rejected": "3"}, "RL0747", "a message with the role `user`"),
    ({**USER, "chosen": [{"role": "assistant"}], "rejected": "3"}, "RL0747", "a list, but not of chat messages"),
    ({**PROMPT, "chosen": "\ud800", "rejected": "3"}, "RL0743", "the column `chosen` contains an unpaired surrogate"),
    ({**USER, "chosen": [turn("assistant", "\ud800")], "rejected": "3"}, "RL0743", "an unpaired surrogate"),
], ids=lambda v: v if str(v).startswith("RL07") else "")
def test_a_row_that_makes_no_pair(tmp_path: Path, chat: str, row: dict[str, Any], code: str, words: str) -> None:
    good = {"prompt": "1+1=", **{k: "2" for k in row if k != "prompt"}}
    (tmp_path / "d.jsonl").write_text(json.dumps(good if "chosen" in row else row) + "\n\n" + json.dumps(row) + "\n")
    place = f"{tmp_path}/d.jsonl:3"
    told = [d for d in wrong(declared(tmp_path / "d.jsonl", chat, "pairs")) if place in (d.place, *d.notes[-1:])
            or any(n.endswith(f"in 1 other row: {place}") for n in d.notes)]
    assert told[0].code == code and words in told[0].title and all(d.help for d in told)


@pytest.mark.parametrize("answer, words", [([], "an empty list, not a string or assistant messages"),
                                           (["2"], "a list, but not of chat messages"), (None, "null")])
def test_an_answer_that_is_none(tmp_path: Path, tokenizer: str, answer: Any, words: str) -> None:
    (found,) = wrong(declared(jsonl(tmp_path, [{**PROMPT, "answer": answer}]), tokenizer, "answers"))
    assert found.code == "RL0747" and words in found.title and "assistant" in found.help


def test_a_template_that_writes_the_prompt_otherwise_with_an_answer(tmp_path: Path) -> None:
    from tests.tiny import make_tokenizer

    made = make_tokenizer(tmp_path / "t")
    made.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    made.save_pretrained(tmp_path / "t")
    path = jsonl(tmp_path, [{"prompt": [turn("user", "1")], "answer": [turn("assistant", "2")]}])
    (found,) = wrong(declared(path, str(tmp_path / "t"), "answers", batch=1))
    assert found.code == "RL0750" and found.place.endswith("d.jsonl:1")
    assert found.help == "provide the prompt and the answer as strings"


def test_turns_without_a_template(tmp_path: Path, tokenizer: str) -> None:
    path = jsonl(tmp_path, [{**USER, "answer": [turn("assistant", "2")]}])
    with pytest.raises(Failure, match="RL0750 the prompt is a list of chat messages"):
        open_source(declared(path, tokenizer, "answers", batch=1), 1).step(0, 1)
