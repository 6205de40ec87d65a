"""ReaL's formats, pairs of many answers, and chat messages on both sides of a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Failure
from rldsl.runtime.data import open_source
from tests.data.makers import WRITERS, declared, jsonl, opened, texts, wrong

FORMATS = list(WRITERS)
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
    told = [d for d in wrong(declared(tmp_path / "d.jsonl", chat, "pairs")) if d.place == f"{tmp_path}/d.jsonl:3"]
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
