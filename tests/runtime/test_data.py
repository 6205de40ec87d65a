"""Reading data: what a step holds, and one clear message for everything that can be wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rldsl.diag import Diagnostic, Failure
from rldsl.plan.model import Data
from rldsl.runtime.data import Source, open_source
from tests.tiny import CHARACTERS, make_tokenizer, write_jsonl

EOS = 1
ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "level": i % 3} for i in range(11)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(place)
    return str(place)


def declared(path: Path | str, tokenizer: str, kind: Any = "prompts", **more: Any) -> Data:
    roles = {"prompts": ("prompt",), "answers": ("prompt", "answer"), "pairs": ("prompt", "chosen", "rejected")}[kind]
    given = dict(name="d", format="jsonl", path=str(path), row_format=kind, batch=4, columns=tuple((r, r) for r in roles),
                 tokenizer=tokenizer) | more
    return Data(**given)


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(c) + 2 for c in text]


def text(tokens: Any) -> str:
    return "".join("$" if t == EOS else CHARACTERS[t - 2] for t in tokens.tolist())


def opened(tmp_path: Path, tokenizer: str, rows: list[Any] = ROWS, kind: Any = "prompts", **more: Any) -> Source:
    return open_source(declared(write_jsonl(tmp_path / "d.jsonl", rows), tokenizer, kind, **more), 10)


def errors(tmp_path: Path, tokenizer: str, content: bytes | str, kind: Any = "prompts",
           **more: Any) -> tuple[Diagnostic, ...]:
    path = tmp_path / "d.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(Failure) as caught:
        open_source(declared(path, tokenizer, kind, **more), 10).step(0, 1)
    return caught.value.diagnostics


# --------------------------------------------------------------------------------------------------- what is read


def test_prompts_in_file_order_then_around_without_the_tail(tmp_path, tokenizer):
    source = opened(tmp_path, tokenizer, shuffle=False)
    assert [source.batch(step, 1) for step in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    frame = source.step(1, 1)[""]
    assert [text(t) for t in frame.tokens] == ["4+1=", "5+1=", "6+1=", "7+1="]
    assert frame.prompt_lens == [4] * 4 and frame.response_lens == [0] * 4
    assert source.columns(1, 1) == ROWS[4:8] and source.passes == 5.0


def test_shuffled_epochs_are_permutations_by_seed(tmp_path, tokenizer):
    source = opened(tmp_path, tokenizer, batch=11)
    orders = [source.batch(step, seed) for step, seed in ((0, 1), (1, 1), (0, 2))]
    assert all(sorted(order) == list(range(11)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3
    assert source.columns(0, 1) == [ROWS[i] for i in orders[0]]
    assert opened(tmp_path, tokenizer, batch=11).batch(0, 1) == orders[0]


def test_answers_end_and_are_cut(tmp_path, tokenizer):
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "a long one 9+9=", "answer": "18 and more"}]
    source = opened(tmp_path, tokenizer, rows, "answers", batch=2, shuffle=False, max_prompt_tokens=4,
                    max_answer_tokens=3)
    frame = source.step(0, 1)[""]
    assert [text(t) for t in frame.tokens] == ["1+1=2$", "9+9=18 "]
    assert frame.prompt_lens == [4, 4] and frame.response_lens == [2, 3]


def test_pairs_share_prompts_and_columns_have_other_names(tmp_path, tokenizer):
    rows = [{"q": "1+1=", "good": "2", "bad": "11"}]
    source = opened(tmp_path, tokenizer, rows, "pairs", batch=1,
                    columns=(("prompt", "q"), ("chosen", "good"), ("rejected", "bad")))
    frames = source.step(0, 1)
    assert {k: text(f.tokens[0]) for k, f in frames.items()} == {"chosen": "1+1=2$", "rejected": "1+1=11$"}
    assert frames["rejected"].response_lens == [3]


def test_blank_lines_mark_and_last_line_without_newline(tmp_path, tokenizer):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1+1="}\r\n\n   \n{"prompt": "2+2="}')
    source = open_source(declared(path, tokenizer, batch=2, shuffle=False), 1)
    assert [text(t) for t in source.step(0, 1)[""].tokens] == ["1+1=", "2+2="]
    assert source.table.place(1).endswith(":4")


def test_chat_messages_use_the_template(tmp_path, tokenizer):
    made = make_tokenizer(tmp_path / "chat")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    made.save_pretrained(tmp_path / "chat")
    rows = [{"prompt": [{"role": "user", "content": "1+1"}]}]
    source = opened(tmp_path, str(tmp_path / "chat"), rows, batch=1)
    assert source.step(0, 1)[""].tokens[0].tolist() == ids("1+1=")


# ------------------------------------------------------------------------------------------------- what is wrong

GOOD = '{"prompt": "1+1="}\n'


@pytest.mark.parametrize("content, line, code, words", [
    (GOOD + '{"prompt": "1+1="\n', 2, "RL0744", "not valid JSON: expecting ',' delimiter at column 18"),
    (GOOD * 2 + "nonsense\n", 3, "RL0744", "not valid JSON"),
    ("\n\n[1, 2]\n", 3, "RL0745", "this line is a list, not an object"),
    ("17\n", 1, "RL0745", "a number"),
    ("[" * 100_000 + "\n", 1, "RL0744", "nested too deeply"),
    (b'{"prompt": "\xff"}\n', 1, "RL0743", "byte 13 of this line is not UTF-8"),
    ('{"prompt": "\\ud800"}\n', 1, "RL0743", "surrogate"),
    (GOOD + '{"promt": "x"}\n', 2, "RL0746", "the column `prompt` is missing"),
    ('{"prompt": 3}\n', 1, "RL0747", "the column `prompt` is a number, not a string or a list of chat messages"),
    ('{"prompt": null}\n', 1, "RL0747", "null"),
    ('{"prompt": []}\n', 1, "RL0747", "an empty list"),
    ('{"prompt": ["hello"]}\n', 1, "RL0747", "a list, but not of chat messages"),
    (GOOD + '{"prompt": ""}\n', 2, "RL0749", "the prompt is empty"),
    ('{"prompt": [{"role": "user", "content": "x"}]}\n' * 4, 0, "RL0750", "no chat template"),
], ids=lambda v: v if str(v).startswith("RL07") else "")
def test_a_bad_line_is_named(tmp_path, tokenizer, content, line, code, words):
    first, *others = errors(tmp_path, tokenizer, content)
    assert first.code == code and words in first.title and not others
    assert first.place.startswith(f"{tmp_path}/d.jsonl:{line or ''}")


def test_a_missing_column_names_those_there_and_the_nearest(tmp_path, tokenizer):
    (found,) = errors(tmp_path, tokenizer, '{"prompt": "x", "anwser": "y", "id": 3}\n', "answers")
    assert found.notes == ("columns in this row: `prompt`, `anwser`, `id`",) and "did you mean `anwser`?" in found.help


def test_an_answer_must_be_text(tmp_path, tokenizer):
    (found,) = errors(tmp_path, tokenizer, '{"prompt": "x", "answer": 3}\n', "answers")
    assert (found.code, found.title) == ("RL0747", "the column `answer` is a number, not a string or assistant messages")


def test_both_sides_of_a_pair_are_checked(tmp_path, tokenizer):
    found = errors(tmp_path, tokenizer, '{"prompt": "x"}\n', "pairs")
    assert [d.title for d in found] == ["the column `chosen` is missing", "the column `rejected` is missing"]


def test_the_first_errors_and_how_many_more(tmp_path, tokenizer):
    rows = [json.dumps({"prompt": n}) if n % 2 else json.dumps({f"p{n}": "1"}) for n in range(22)]
    found = errors(tmp_path, tokenizer, GOOD + "\n".join(rows) + "\n")
    assert [d.place.rsplit(":")[-1] for d in found] == ["2", "3", "4", "6", "8"]
    assert "the same in 10 other rows: " in found[1].notes[-1] and found[1].notes[-1].endswith(":13, ...")
    assert found[-1].notes[-1] == "and 7 other errors"


def test_an_error_of_many_rows_is_said_once(tmp_path, tokenizer):
    (found,) = errors(tmp_path, tokenizer, GOOD + "bad\n" * 3)
    assert found.place.endswith(":2") and [n.count(":") for n in found.notes] == [3]
    assert found.notes[0].startswith("the same in 2 other rows: ") and found.notes[0].endswith(":4")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file(tmp_path, tokenizer, content):
    (found,) = errors(tmp_path, tokenizer, content)
    assert found.code == "RL0742" and found.place.endswith("d.jsonl")


def test_fewer_rows_than_a_batch(tmp_path, tokenizer):
    (found,) = errors(tmp_path, tokenizer, GOOD * 3)
    assert found.code == "RL0748" and "has 3 rows, but a batch needs 4" in found.title


def test_no_such_file_suggests_one(tmp_path, tokenizer):
    write_jsonl(tmp_path / "prompts.jsonl", ROWS)
    with pytest.raises(Failure) as caught:
        open_source(declared(tmp_path / "promts.jsonl", tokenizer), 1)
    (found,) = caught.value.diagnostics
    assert found.code == "RL0741" and "prompts.jsonl" in found.help and found.place.endswith("promts.jsonl")


def test_a_directory_is_not_a_data_file(tmp_path, tokenizer):
    with pytest.raises(Failure, match="RL0741 this data file cannot be opened"):
        open_source(declared(tmp_path, tokenizer), 1)


def test_a_file_that_changes_during_the_run(tmp_path, tokenizer):
    source = opened(tmp_path, tokenizer)
    with open(tmp_path / "d.jsonl", "a") as file:
        file.write(json.dumps(ROWS[0]))
    with pytest.raises(Failure, match="RL0752"):
        source.step(0, 1)


def test_no_tokenizer_directory(tmp_path):
    with pytest.raises(Failure, match="RL0751 no such tokenizer directory"):
        opened(tmp_path, str(tmp_path / "nothing"))


def test_a_directory_without_a_tokenizer(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(Failure, match="RL0751 the tokenizer cannot be loaded"):
        opened(tmp_path, str(tmp_path / "model"))


def test_answers_need_an_end_of_sequence_token(tmp_path):
    made = make_tokenizer(tmp_path / "endless")
    made.eos_token = None
    made.save_pretrained(tmp_path / "endless")
    with pytest.raises(Failure, match="RL0751 the tokenizer has no end-of-sequence token"):
        opened(tmp_path, str(tmp_path / "endless"), kind="answers")


def test_a_template_that_refuses_the_messages(tmp_path):
    made = make_tokenizer(tmp_path / "chat")
    made.chat_template = "{{ raise_exception('roles must alternate') }}"
    made.save_pretrained(tmp_path / "chat")
    (found,) = errors(tmp_path, str(tmp_path / "chat"), '{"prompt": [{"role": "user", "content": "x"}]}\n' * 4)
    assert found.code == "RL0750" and "roles must alternate" in found.title
