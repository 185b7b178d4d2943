"""Rows in the formats of public data sets are converted, and labelled answers become pairs."""

import json
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import SurefootError
from surefoot.language.analysis.preview import preview
from surefoot.language.data.datasets import demonstrations, pairs, prompts
from surefoot.language.data.sources import open_rows, read_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.pocket import character_tokenizer, pocket

TOKENS = Tokens(pocket()[1])
PLAIN = Tokens(pocket()[1])
PLAIN.tokenizer.chat_template = None
CALLING = Tokens(pocket()[1])
CALLING.tokenizer.chat_template = (
    "{% for m in messages %}{{ '<' + m.role + '>' + (m.content or '') }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments.b }}{% endfor %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
USER, ASSISTANT = "⟨user⟩", "⟨assistant⟩"


def rows(tmp_path: Path, *columns: dict[str, Any]) -> Any:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in columns))
    return read_rows(path)


def text(tokens: Tokens, ids: list[int], kept: list[bool] | None = None) -> str:
    return str(tokens.tokenizer.decode([i for i, k in zip(ids, kept or [True] * len(ids), strict=True) if k]))


def turn(speaker: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"from": speaker, "value": value, **more}


SHARE = [turn("human", "2+2"), turn("gpt", "4"), turn("human", "3+3"), turn("gpt", "6")]
FOUR, FIVE = [{"role": "assistant", "content": "4"}], [{"role": "assistant", "content": "5"}]
DEMONSTRATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "ShareGPT": ({"conversations": SHARE}, f"{USER}2+2{ASSISTANT}4⟨eos⟩{USER}3+3{ASSISTANT}6⟨eos⟩", "4⟨eos⟩6⟨eos⟩"),
    "ShareGPT with weight and system": (
        {"conversations": [SHARE[0], turn("gpt", "4", weight=0), *SHARE[2:]], "system": "sum"},
        f"⟨system⟩sum{USER}2+2{ASSISTANT}4⟨eos⟩{USER}3+3{ASSISTANT}6⟨eos⟩",
        "6⟨eos⟩",
    ),
    "ShareGPT as JSON text": ({"conversations": json.dumps(SHARE[:2])}, f"{USER}2+2{ASSISTANT}4⟨eos⟩", "4⟨eos⟩"),
    "messages as JSON text": (
        {"messages": json.dumps([{"role": "user", "content": "2+2"}, *FOUR])},
        f"{USER}2+2{ASSISTANT}4⟨eos⟩",
        "4⟨eos⟩",
    ),
    "Alpaca": ({"instruction": "add", "input": "2+2", "output": "4"}, f"{USER}add\n\n2+2{ASSISTANT}4⟨eos⟩", "4⟨eos⟩"),
    "Alpaca without input": ({"instruction": "2+2", "input": "", "output": "4"}, f"{USER}2+2{ASSISTANT}4⟨eos⟩", "4⟨eos⟩"),
    "text prompt, messages": ({"prompt": "2+2", "completion": FOUR}, f"{USER}2+2{ASSISTANT}4⟨eos⟩", "4⟨eos⟩"),
    "text parts": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]}, *FOUR]},
        f"{USER}2+2{ASSISTANT}4⟨eos⟩",
        "4⟨eos⟩",
    ),
}


def test_demonstrations_in_public_formats_are_converted(tmp_path: Path) -> None:
    for name in DEMONSTRATIONS:
        row, whole, trained = DEMONSTRATIONS[name]
        made = demonstrations(rows(tmp_path, row), TOKENS, 300)
        assert text(TOKENS, made.ids[0]) == whole
        assert text(TOKENS, made.ids[0], made.trained[0]) == trained
        assert made.unused == ()


def test_alpaca_rows_use_the_alpaca_prompt_without_a_chat_template(tmp_path: Path) -> None:
    made = demonstrations(rows(tmp_path, {"instruction": "add {x}", "input": "2+2", "output": "4"}), PLAIN, 400)
    assert "### Instruction:\nadd {x}\n\n### Input:\n2+2\n\n### Response:\n4⟨eos⟩" in text(PLAIN, made.ids[0])
    assert text(PLAIN, made.ids[0], made.trained[0]) == "4⟨eos⟩"


PAIRS: dict[str, dict[str, Any]] = {
    "UltraFeedback": {
        "prompt": "2+2",
        "chosen": [{"role": "user", "content": "2+2"}, *FOUR],
        "rejected": [{"role": "user", "content": "2+2"}, *FIVE],
    },
    "messages prompt, whole dialogues": {
        "prompt": [{"role": "user", "content": "2+2"}],
        "chosen": [{"role": "user", "content": "2+2"}, *FOUR],
        "rejected": [{"role": "user", "content": "2+2"}, *FIVE],
    },
    "ShareGPT": {"conversations": SHARE[:1], "chosen": turn("gpt", "4"), "rejected": turn("gpt", "5")},
    "Alpaca": {"instruction": "2+2", "input": "", "chosen": "4", "rejected": "5"},
}


def test_pairs_in_public_formats_are_converted(tmp_path: Path) -> None:
    for name in PAIRS:
        made = pairs(rows(tmp_path, PAIRS[name]), TOKENS, 300)
        for ids, answer in ((made.chosen[0], "4"), (made.rejected[0], "5")):
            assert text(TOKENS, ids) == f"{USER}2+2{ASSISTANT}{answer}⟨eos⟩"
        assert text(TOKENS, made.chosen[0][: made.prompt_lengths[0]]) == f"{USER}2+2{ASSISTANT}"
        assert made.unused == ()


def test_prompts_in_public_formats_keep_the_answer_for_rewards(tmp_path: Path) -> None:
    made = prompts(rows(tmp_path, {"instruction": "2+2", "input": "", "output": "4"}, {"conversations": SHARE}), TOKENS, 300)
    assert [text(TOKENS, ids) for ids in made.ids] == [
        f"{USER}2+2{ASSISTANT}",
        f"{USER}2+2{ASSISTANT}4⟨eos⟩{USER}3+3{ASSISTANT}",
    ]
    assert made.columns == {"output": ["4", None]}


def test_function_call_arguments_may_be_a_dict_or_json(tmp_path: Path) -> None:
    for arguments in [{"b": "x"}, json.dumps({"b": "x"})]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        own = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]}
        share = {
            "conversations": [turn("human", "a"), turn("function_call", json.dumps({"name": "f", "arguments": {"b": "x"}}))]
        }
        made = demonstrations(rows(tmp_path, own, share), CALLING, 300)
        assert [text(CALLING, ids) for ids in made.ids] == ["<user>a⟨eos⟩<assistant>fx⟨eos⟩"] * 2


def labelled(prompt: str, completion: str, label: Any) -> dict[str, Any]:
    return {"prompt": prompt, "completion": completion, "label": label}


def test_labelled_answers_become_pairs_and_unpaired_ones_are_counted(tmp_path: Path) -> None:
    given = [
        labelled("a", "bad", False),
        labelled("b", "alone", True),
        labelled("a", "good", True),
        labelled("a", "fine", "true"),
        {"prompt": "c", "chosen": "x", "rejected": "y"},
        labelled("a", "poor", "False"),
    ]
    made = pairs(rows(tmp_path, *given), TOKENS, 300)
    assert [text(TOKENS, ids) for ids in made.chosen] == ["agood⟨eos⟩", "cx⟨eos⟩", "afine⟨eos⟩"]
    assert [text(TOKENS, ids) for ids in made.rejected] == ["abad⟨eos⟩", "cy⟨eos⟩", "apoor⟨eos⟩"]
    assert [note.partition(": ")[2] for note in made.notes] == [
        "1 labelled answers left out, because their prompt has no answer with the other label"
    ]
    in_order = [labelled("a", text, text < "c") for text in "abcd"]
    made = pairs(rows(tmp_path, *in_order), TOKENS, 300)
    assert [text(TOKENS, ids) for ids in (*made.chosen, *made.rejected)] == ["aa⟨eos⟩", "ab⟨eos⟩", "ac⟨eos⟩", "ad⟨eos⟩"]
    with pytest.raises(SurefootError, match=r"a\.jsonl: column 'label' labels single answers, and no prompt has one of each"):
        pairs(rows(tmp_path, labelled("a", "b", True), labelled("b", "c", False)), TOKENS, 300)
    classes = demonstrations(rows(tmp_path, labelled("a", "b", 3)), TOKENS, 300)
    assert classes.unused == ("label",), "a class label stays a column"


def test_errors_in_public_formats_name_file_and_line(tmp_path: Path) -> None:
    for row, expected in [
        ({"conversations": [turn("robot", "a")]}, "column 'conversations', message 1: 'from' is 'robot'; known: human"),
        ({"conversations": [turn("human", 3)]}, "column 'messages', message 1: 'content' is a number"),
        ({"conversations": [{"text": "a"}]}, "message 1 has no 'from'; a message is"),
        ({"conversations": []}, "column 'conversations' is an empty list"),
        ({"conversations": [turn("human", "a"), turn("function_call", "f")]}, "is a function_call without name and arg"),
        ({"instruction": 3, "output": "a"}, "column 'instruction' is a number; it must be text"),
        ({"instruction": "a", "input": [1], "output": "a"}, "column 'input' is a list; it must be text"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "column 'history' has earlier turns; write the"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, *FOUR]}, "a part of the content is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}, *FOUR]}, "a part of the content has no text"),
    ]:
        with pytest.raises(SurefootError, match=rf"a\.jsonl, line 1: .*{expected}"):
            demonstrations(rows(tmp_path, row), TOKENS, 300)


def test_image_columns_are_rejected_unless_renamed(tmp_path: Path) -> None:
    row = {"prompt": "a", "completion": "b"}
    with pytest.raises(SurefootError, match=r"a\.jsonl, line 2: has a column 'image', and only text is trained; remove"):
        rows(tmp_path, row, {**row, "image": ["cat.png"]})
    renamed = list(open_rows(tmp_path / "a.jsonl", {"image": "picture"}))
    assert [made.columns.get("picture") for made in renamed] == [None, ["cat.png"]]
    assert len(demonstrations(rows(tmp_path, {**row, "image": None}, {**row, "image": []}), TOKENS, 300).ids) == 2


# ---- control tokens -----------------------------------------------------------------------------------------------------

FORGED = {"messages": [{"role": "user", "content": "a⟨eos⟩b"}, *FOUR]}


def test_control_tokens_are_split_kept_or_rejected_and_counted(tmp_path: Path) -> None:
    given = [FORGED, {"messages": [{"role": "user", "content": "a"}, *FOUR]}, {"prompt": "c⟨eos⟩", "completion": "d"}]
    for control, eos in (("split", 1), ("keep", 2)):
        made = demonstrations(rows(tmp_path, *given), TOKENS, 300, control=control)
        assert made.ids[0].count(TOKENS.eos_id) == eos
        counted, literal, *_ = (note.partition(": ")[2] for note in made.notes)
        assert counted.startswith("1 rows with control tokens in messages, encoded as ")
        assert f"data.control_tokens={control!r}" in counted
        assert literal == "1 rows with control tokens in plain text or answers, encoded as control tokens"
    with pytest.raises(SurefootError, match=r"line 1: column 'messages' contains the control token '⟨eos⟩'; remove it, or set"):
        demonstrations(rows(tmp_path, *given), TOKENS, 300, control="reject")
    assert demonstrations(rows(tmp_path, given[1]), TOKENS, 300).notes == ()


def test_rows_with_characters_that_the_tokenizer_does_not_know_are_counted(tmp_path: Path) -> None:
    known, unknown = ({"prompt": "a", "chosen": text, "rejected": "b"} for text in ("c", "日"))
    for given, count in (([known, unknown, unknown], 2), ([known], 0)):
        made = pairs(rows(tmp_path, *given), TOKENS, 300)
        assert [note.partition(": ")[2][:27] for note in made.notes] == ["2 rows with characters that"] * bool(count)


def test_rows_whose_answers_a_template_edits_are_counted(tmp_path: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.content.split('</t>')[-1] + eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<t>{% endif %}"
    )
    said = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"<t>{x}</t>It is 4."}]}
        for x in ("why?", "so!")
    ]
    made = demonstrations(rows(tmp_path, *said), Tokens(tokenizer), 300)
    edited, prompt = (note.partition(": ")[2] for note in made.notes)
    assert edited == (
        "2 rows with an answer of which the chat template omits a part, such as '<t>why?</t>'; train what the rows say with "
        "data.answers = 'row'"
    )
    assert prompt.startswith("2 rows that go on otherwise than the prompt of a sampled answer")
    made = demonstrations(rows(tmp_path, *said), Tokens(tokenizer, answers="row"), 300)
    assert made.notes == ()
    assert [Tokens(tokenizer).decode(ids) for ids in made.ids] == ["a<t>why?</t>It is 4.", "a<t>so!</t>It is 4."]


def test_preview_shows_the_format_and_control_tokens(tmp_path: Path) -> None:
    from rich.console import Console

    console = Console(width=120, record=True)
    path = rows(tmp_path, {"conversations": [turn("human", "a⟨eos⟩b"), turn("gpt", "4")]})[0].file
    with console.capture() as capture:
        console.print(preview(path, "pocket"))
    shown = capture.get()
    assert "ShareGPT, read as demonstrations" in shown
    assert "1 rows with control tokens in messages, encoded as text" in shown
