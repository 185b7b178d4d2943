"""Files become token ids, or an error that names the file and the line."""

import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from surefoot.errors import SurefootError
from surefoot.language.analysis.best_of import chosen_row
from surefoot.language.analysis.preview import preview
from surefoot.language.data.datasets import demonstrations, drop_notes, pairs, prompts, repeat_prompts
from surefoot.language.data.sources import read_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.pocket import pocket
from surefoot.language.pairs import pair_row

TOKENS = Tokens(pocket()[1])
ASK, ANSWER, WORSE = (
    {"role": role, "content": text} for role, text in (("user", "2+2"), ("assistant", "4"), ("assistant", "55"))
)
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {"a": "number", "b": "number"}}}
ROWS = [{"prompt": "ab", "completion": "c"}, {"prompt": "d", "completion": "ef"}, {"prompt": "g", "completion": "hijk"}]


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    import pyarrow
    from pyarrow.parquet import write_table

    write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def saved(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    shuffled = datasets.Dataset.from_list([rows[-1], *rows[:-1]])
    shuffled.select([*range(1, len(rows)), 0]).save_to_disk(path, num_shards=2)  # indices and shards are not ours to see
    return path


# ---- files ------------------------------------------------------------------------------------------------------------


def test_lines_are_counted_as_an_editor_counts_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a\xe2\x80\xa8b"}\r\n\n  \n{"text": "c"}')
    rows = read_rows(tmp_path / "a.jsonl")
    assert [row.columns["text"] for row in rows] == ["a\u2028b", "c"]
    assert [row.where[-6:] for row in rows] == ["line 1", "line 4"]


def test_rows_that_datasets_saved_are_those_in_its_order(tmp_path: Path) -> None:
    path = saved(tmp_path / "data", ROWS)
    rows = read_rows(path)
    assert [row.columns for row in rows] == ROWS
    assert [row.where for row in rows] == [f"{path}, row {n}" for n in (1, 2, 3)]


def test_a_line_that_is_not_an_object_is_named(tmp_path: Path) -> None:
    for content, expected in [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: is not JSON \(JSONDecodeError"),
        (b'{"text": "a"}\nnull\n', r"line 2: is null; write one JSON object per line"),
        (b'{"text": "\xff"}\n', r"line 1: is not UTF-8"),
        (b"[" * 100_000, r"line 1: is not JSON \(RecursionError"),
        (b"", r"a\.jsonl: has no rows"),
    ]:
        (tmp_path / "a.jsonl").write_bytes(content)
        with pytest.raises(SurefootError, match=expected):
            read_rows(tmp_path / "a.jsonl")


def test_a_missing_file_or_one_of_another_format_is_a_one_line_error(tmp_path: Path) -> None:
    jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(SurefootError, match=r"trian\.jsonl: no such file; did you mean '.*train\.jsonl'\?$"):
        read_rows(tmp_path / "trian.jsonl")
    (tmp_path / "a.parquet").write_text("no")
    with pytest.raises(SurefootError, match=r"a\.parquet: can't be read as Parquet \(ArrowInvalid"):
        read_rows(tmp_path / "a.parquet")
    with pytest.raises(SurefootError, match=r"was not saved by datasets \(no state\.json\)"):
        read_rows(tmp_path)
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "a.parquet"}]}')
    with pytest.raises(SurefootError, match=r"can't be read \(ArrowInvalid"):
        read_rows(tmp_path)


def test_several_splits_are_named(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    split = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(tmp_path / "both")
    with pytest.raises(SurefootError, match=r"both: contains one folder per split \(test, train\); give one of them$"):
        read_rows(tmp_path / "both")
    assert len(read_rows(tmp_path / "both" / "train")) == 3


# ---- shapes -----------------------------------------------------------------------------------------------------------


def texts(ids: Sequence[Sequence[int]]) -> list[str]:
    return [TOKENS.tokenizer.decode(row) for row in ids]


def trained(data: Any) -> list[str]:
    """What is trained of each row."""
    rows = zip(data.ids, data.trained, strict=True)
    return texts([[i for i, kept in zip(*row, strict=True) if kept] for row in rows])


def test_demonstrations_of_every_shape(tmp_path: Path) -> None:
    chat = "⟨user⟩2+2⟨assistant⟩4⟨eos⟩"
    shapes: dict[str, tuple[dict[str, Any], str, str]] = {
        "plain": ({"prompt": "ab", "completion": "c"}, "abc⟨eos⟩", "c⟨eos⟩"),
        "conversational": ({"prompt": [ASK], "completion": [ANSWER]}, chat, "4⟨eos⟩"),
        "messages": ({"messages": [ASK, {**ANSWER, "name": "it"}]}, chat, "4⟨eos⟩"),
        "text": ({"text": "abc"}, "abc⟨eos⟩", "bc⟨eos⟩"),
    }
    for write in [jsonl, parquet]:
        for name, (row, whole, answer) in shapes.items():
            rows = demonstrations(read_rows(write(tmp_path / f"{name}.{write.__name__}", [row])), TOKENS, 100)
            assert texts(rows.ids) == [whole], name
            assert trained(rows) == [answer], name
            assert rows.dropped == 0


def test_pairs_of_every_shape(tmp_path: Path) -> None:
    for row, prompt in [
        ({"prompt": "ab", "chosen": "c", "rejected": "dd"}, "ab"),
        ({"chosen": "abc", "rejected": "abdd"}, "ab"),
        ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]}, "⟨user⟩2+2⟨assistant⟩"),
        ({"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]}, "⟨user⟩2+2⟨assistant⟩"),
    ]:
        rows = pairs(read_rows(jsonl(tmp_path / "a.jsonl", [row])), TOKENS, 100)
        answers = ("c", "dd") if isinstance(row["chosen"], str) else ("4", "55")
        assert texts(rows.chosen + rows.rejected) == [f"{prompt}{answer}⟨eos⟩" for answer in answers]
        assert texts([rows.chosen[0][: rows.prompt_lengths[0]]]) == [prompt]
    alike = {"prompt": "ab", "chosen": "cd", "rejected": "ce"}
    assert list(pairs(read_rows(jsonl(tmp_path / "a.jsonl", [alike])), TOKENS, 100).prompt_lengths) == [2]


def test_pairs_of_equal_answers_are_left_out_and_counted(tmp_path: Path) -> None:
    equal = [
        {"chosen": "ab", "rejected": "ab"},
        {"prompt": "a", "chosen": "", "rejected": ""},
        {"chosen": [ASK, ANSWER], "rejected": [ASK, ANSWER]},
    ]
    rows = [*equal, {"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a", "chosen": "b" * 100, "rejected": "c"}]
    data = pairs(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 100)
    assert (texts(data.chosen), data.equal, data.dropped) == (["ab⟨eos⟩"], 3, 1)
    assert drop_notes("a", 100, data)[0] == "a: dropped, because both answers are the same: 3 rows"
    assert drop_notes("a", 100, pairs(read_rows(jsonl(tmp_path / "c.jsonl", rows[3:4])), TOKENS, 100)) == []
    with pytest.raises(SurefootError, match=r"b\.jsonl: chosen and rejected are the same in all 3 rows"):
        pairs(read_rows(jsonl(tmp_path / "b.jsonl", equal)), TOKENS, 100)


def test_two_answers_of_which_one_begins_the_other_leave_something_after_the_prompt(tmp_path: Path) -> None:
    rows = [{"chosen": "ab", "rejected": "a"}, {"chosen": "", "rejected": "a"}]
    data = pairs(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 100)
    assert all(0 < n < len(ids) for n, ids in zip(data.prompt_lengths, data.rejected, strict=True))


SYSTEM = {"role": "system", "content": "be brief"}
MORE = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "no"}]


def test_an_answer_may_repeat_its_prompt_and_nothing_is_rendered_twice(tmp_path: Path) -> None:
    for prompt, before in [
        ([ASK], []),
        ([SYSTEM, ASK], []),
        ([SYSTEM, ASK], [ASK]),
        ([ASK], [SYSTEM, ASK]),
        ([{**ASK, "content": "2+2 "}], [ASK]),
        ("2+2\n", [SYSTEM, ASK]),
    ]:
        question = prompt
        if isinstance(prompt, str) or before[:1] == [SYSTEM]:
            question = [*before[:-1], {**ASK, "content": prompt if isinstance(prompt, str) else ASK["content"]}]
        for answer, worse in (([ANSWER], [WORSE]), ([ANSWER, *MORE], [WORSE])):
            row = {
                "prompt": prompt,
                "chosen": [*before, *answer],
                "rejected": [*before, *worse],
                "completion": [*before, *answer],
            }
            rows = read_rows(jsonl(tmp_path / "a.jsonl", [row]))
            data, shown = pairs(rows, TOKENS, 100), demonstrations(rows, TOKENS, 100)
            whole = TOKENS.demonstration({"prompt": question, "completion": answer})
            assert (data.chosen[0], data.chosen_trained[0]) == (shown.ids[0], shown.trained[0]) == whole
            assert data.rejected[0] == TOKENS.demonstration({"prompt": question, "completion": worse})[0]
            assert data.chosen[0][: data.prompt_lengths[0]] == TOKENS.encode_prompt(question)


def test_a_template_without_marks_needs_a_prompt_before_the_assistants_first_message() -> None:
    tokenizer = pocket()[1]
    tokenizer.chat_template = re.sub(r"{% (end)?generation %}", "", tokenizer.chat_template)
    tokens = Tokens(tokenizer)
    for messages in ([ANSWER], [ANSWER, ASK, ANSWER]):
        assert sum(TOKENS.conversation(messages)[1]) == 2 * messages.count(ANSWER)
        with pytest.raises(SurefootError, match=r"^the first message is the assistant's, .*; remove it, or give it weight 0$"):
            tokens.conversation(messages)
    ids, trained = tokens.conversation([{**ANSWER, "weight": 0}, ASK, ANSWER])
    assert texts([ids]) == ["⟨assistant⟩4⟨eos⟩⟨user⟩2+2⟨assistant⟩4⟨eos⟩"]
    assert trained == [*[False] * (len(ids) - 2), True, True]


def test_prompts_bring_the_other_columns_of_their_rows(tmp_path: Path) -> None:
    rows = [
        {"prompt": "ab", "answer": 1},
        {"prompt": "abcdef", "answer": 2},
        {"prompt": [ASK], "hint": "x"},
        {"messages": [ASK, ANSWER]},
    ]
    data = prompts(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 5)
    assert data.prompts == ["ab", [ASK], [ASK]]
    assert texts(data.ids) == ["ab", "⟨user⟩2+2⟨assistant⟩", "⟨user⟩2+2⟨assistant⟩"]
    assert data.columns == {"answer": [1, None, None], "hint": [None, "x", None]}
    assert data.dropped == 1


def test_overlong_rows_are_dropped_and_counted(tmp_path: Path) -> None:
    rows = read_rows(jsonl(tmp_path / "a.jsonl", ROWS))
    data = demonstrations(rows, TOKENS, 4)
    assert texts(data.ids) == ["abc⟨eos⟩", "def⟨eos⟩"], "four tokens fit into four"
    assert len(data.trained) == 2
    assert data.dropped == 1
    both = [{"prompt": "a", "chosen": "b", "rejected": "ccc"}, {"prompt": "a", "chosen": "b", "rejected": "c"}]
    kept = pairs(read_rows(jsonl(tmp_path / "b.jsonl", both)), TOKENS, 4)
    assert (texts(kept.rejected), kept.dropped) == (["ac⟨eos⟩"], 1)


def test_when_every_row_is_dropped_the_error_has_the_shortest_length(tmp_path: Path) -> None:
    for make in [demonstrations, prompts, pairs]:
        row = {"prompt": "ab", "completion": "cd", "chosen": "cd", "rejected": "e"}
        rows = read_rows(jsonl(tmp_path / "a.jsonl", [row, {**row, "prompt": "abc"}]))
        shortest = 2 if make is prompts else 5
        with pytest.raises(SurefootError, match=rf"a\.jsonl: all 2 rows .* has {shortest} tokens and max_length=1; raise"):
            make(rows, TOKENS, 1)


# ---- what a chat template reads beside text ----------------------------------------------------------------------------

WITH_TOOLS = Tokens(pocket()[1])
WITH_TOOLS.tokenizer.chat_template = (
    "{% if tools %}{{ '[' }}{% for tool in tools %}{{ tool.function.name }}{{ tool.function.parameters | tojson }}{% endfor %}"
    "{{ ']' }}{% endif %}{% if think %}{{ '(think)' }}{% endif %}"
    "{% for m in messages %}{{ '<' + m.role + '>' }}"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content or '' }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
OPTIONS = {"tools": [TOOL], "chat_template_kwargs": {"think": True}}
HEAD = '[add{"a": "number", "b": "number"}](think)<user>2+2<assistant>'


def test_tools_and_settings_of_a_row_reach_the_chat_template(tmp_path: Path) -> None:
    for stored in [lambda value: value, json.dumps]:
        for write in [jsonl, parquet]:
            beside = {name: stored(value) for name, value in OPTIONS.items()}
            shapes = {
                demonstrations: [{"messages": [ASK, ANSWER]}, {"prompt": [ASK], "completion": [ANSWER]}],
                pairs: [
                    {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]},
                    {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE]},
                ],
                prompts: [{"messages": [ASK, ANSWER]}, {"prompt": [ASK]}],
            }
            for make, rows in shapes.items():
                for row in rows:
                    data: Any = make(read_rows(write(tmp_path / f"a.{write.__name__}", [row | beside])), WITH_TOOLS, 200)
                    first = (data.chosen if make is pairs else data.ids)[0]
                    assert texts([first]) == [HEAD if make is prompts else f"{HEAD}4⟨eos⟩"]
                    assert data.unused == ()
                    if make is pairs:
                        assert texts([data.rejected[0], first[: data.prompt_lengths[0]]]) == [f"{HEAD}55⟨eos⟩", HEAD]


def test_rows_without_tools_beside_rows_with_them_are_rendered_without(tmp_path: Path) -> None:
    more = {**TOOL, "function": {**TOOL["function"], "parameters": {"c": "text"}}}
    rows = [{"messages": [ASK, ANSWER], "tools": tools} for tools in ([TOOL], [more], [], None)]
    data = demonstrations(read_rows(parquet(tmp_path / "a.parquet", rows)), WITH_TOOLS, 200)
    plain = "<user>2+2<assistant>4⟨eos⟩"
    one, other = '[add{"a": "number", "b": "number"}]', '[add{"c": "text"}]'
    assert texts(data.ids) == [one + plain, other + plain, plain, plain]


def test_a_message_may_call_tools_in_place_of_its_content(tmp_path: Path) -> None:
    for write in [jsonl, parquet]:
        messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "4"}, ANSWER]
        rows = demonstrations(read_rows(write(tmp_path / f"a.{write.__name__}", [{"messages": messages}])), WITH_TOOLS, 200)
        call = '{"name": "add", "arguments": {"a": 2, "b": 2}}⟨eos⟩'
        assert texts(rows.ids) == [f"<user>2+2<assistant>{call}<tool>4<assistant>4⟨eos⟩"]
        assert trained(rows) == [f"{call}4⟨eos⟩"]


def test_nulls_of_json_are_kept_and_those_of_a_schema_removed(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": None}}}
    messages = [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}]
    listed = tmp_path / "a.json"
    listed.write_text(json.dumps([{"messages": messages}]))
    (tmp_path / "b.json").write_text(json.dumps({"rows": [{"messages": messages}]}, indent=1))
    for path in (jsonl(tmp_path / "a.jsonl", [{"messages": messages}]), listed, tmp_path / "b.json"):
        assert texts(demonstrations(read_rows(path), WITH_TOOLS, 200).ids)[0].count('"b": null') == 1
    stored = parquet(tmp_path / "a.parquet", [{"messages": messages}, {"messages": [ASK, ANSWER]}])
    assert texts(demonstrations(read_rows(stored), WITH_TOOLS, 200).ids)[0].count("null") == 0


def test_a_prompt_keeps_its_tools_wherever_it_is_rendered_again(tmp_path: Path) -> None:
    rows = prompts(read_rows(jsonl(tmp_path / "a.jsonl", [{"prompt": [ASK], **OPTIONS}])), WITH_TOOLS, 200)
    again = repeat_prompts(rows, [0, 0])
    assert [WITH_TOOLS.encode_prompt(prompt) for prompt in again.prompts] == rows.ids * 2
    row = pair_row(rows.prompts[0], "4", "55")
    assert row == {"prompt": [ASK], "chosen": [ANSWER], "rejected": [WORSE], **OPTIONS}
    best = chosen_row(rows.prompts[0], ["4", "55"], [1.0, 0.0], [True, True], None, worst=False)
    assert best == {"prompt": [ASK], "completion": [ANSWER], "reward": 1.0, **OPTIONS}


def test_unused_columns_are_named_once(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASK, {**ANSWER, "note": "it"}], "id": 3, "source": None},
        {"messages": [ASK, ANSWER], "id": 4, "source": None, "prompt": "2+2", "tools": []},
        {"text": "abc", "tools": [TOOL]},
    ]
    shown = demonstrations(read_rows(jsonl(tmp_path / "a.jsonl", rows)), TOKENS, 100)
    assert shown.unused == ("messages[].note", "id", "prompt", "tools")
    both = {"prompt": "a", "chosen": "b", "rejected": "c", "score": 1.5, "messages": [ASK]}
    assert pairs(read_rows(jsonl(tmp_path / "b.jsonl", [both])), TOKENS, 100).unused == ("score", "messages")
    assert prompts(read_rows(jsonl(tmp_path / "b.jsonl", [both])), TOKENS, 100).columns.keys() >= {"score", "messages"}


def test_messages_of_weight_0_are_read_and_not_trained(tmp_path: Path) -> None:
    long = [ASK, {**ANSWER, "weight": 0}, {**ASK, "weight": 0}, {**WORSE, "weight": 1}, ASK, ANSWER]
    rows = read_rows(jsonl(tmp_path / "a.jsonl", [{"messages": long}]))
    whole = TOKENS.demonstration({"messages": [{key: message[key] for key in ("role", "content")} for message in long]})
    for template in (None, pocket()[1].chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")):
        tokens = Tokens(pocket()[1])
        tokens.tokenizer.chat_template = template or tokens.tokenizer.chat_template
        data = demonstrations(rows, tokens, 100)
        assert data.ids == [whole[0]]
        assert trained(data) == ["55⟨eos⟩4⟨eos⟩"]
        assert data.unused == ()
        last = demonstrations(read_rows(jsonl(tmp_path / "b.jsonl", [{"messages": [*long[:5], long[1]]}])), tokens, 100)
        assert texts(last.ids) == ["⟨user⟩2+2⟨assistant⟩4⟨eos⟩⟨user⟩2+2⟨assistant⟩55⟨eos⟩"], (
            "nothing is kept after what is trained"
        )


# ---- errors -----------------------------------------------------------------------------------------------------------


def test_errors_of_a_row_name_file_and_line(tmp_path: Path) -> None:
    rendered = {"messages": [ASK, ANSWER]}
    both = {"chosen": [ASK, ANSWER], "rejected": [ASK, WORSE]}
    for make, row, expected in [
        (demonstrations, {"promt": "a", "completion": "b"}, r"missing column 'prompt'; did you mean 'promt'\?; a demonst"),
        (demonstrations, {}, "missing column 'prompt'; .*; columns here: none$"),
        (demonstrations, {"text": 3}, "column 'text' is a number; it must be text"),
        (demonstrations, {"prompt": "a", "completion": None}, "column 'completion' is null; it must be text or a list of"),
        (demonstrations, {"prompt": [ASK], "completion": "4"}, "columns differ: 'prompt' is messages, 'completion' is text"),
        (demonstrations, {"messages": "hello"}, "column 'messages' is text; it must be a list of messages"),
        (demonstrations, {"messages": []}, "column 'messages' is an empty list"),
        (demonstrations, {"messages": [ASK, {"role": "assistant"}]}, "column 'messages', message 2 has no 'content'"),
        (demonstrations, {"messages": [ASK, {**ANSWER, "content": None}]}, "message 2: 'content' is null; it must be text"),
        (demonstrations, {"messages": [ASK]}, "no message is the assistant's"),
        (pairs, {"chosen": "b", "rejected": [ASK, ANSWER]}, "columns differ: 'chosen' is text, 'rejected' is messages"),
        (pairs, {"chosen": [ANSWER], "rejected": [WORSE]}, "begin differently, so there is no prompt"),
        (demonstrations, {"messages": [ASK, {**ANSWER, "weight": 0.5}]}, "message 2: 'weight' is 0.5; it must be 0 "),
        (demonstrations, {"messages": [ASK, {**ANSWER, "weight": True}]}, "message 2: 'weight' is True; it must be 0 "),
        (demonstrations, {"messages": [{**ASK, "weight": 1}, ANSWER]}, "message 1: 'weight' is 1, but only the assistant's"),
        (demonstrations, {"messages": [ASK, {**ANSWER, "weight": 0}]}, "every message of the assistant has weight 0"),
        (demonstrations, {"messages": [ASK, {**ANSWER, "tool_calls": "f()"}]}, "message 2: 'tool_calls' is text; it must be a"),
        (demonstrations, {"messages": [{**ASK, "content": None, "tool_calls": [CALL]}]}, "message 1: 'content' is null"),
        (demonstrations, {**rendered, "tools": [TOOL]}, "column 'tools' has no effect, because the chat temp"),
        (demonstrations, {**rendered, "tools": "get"}, "column 'tools' is text that is not JSON"),
        (demonstrations, {**rendered, "tools": ["get"]}, "column 'tools', tool 1 is text; it must be an obj"),
        (pairs, {**both, "chat_template_kwargs": {"think": True}}, "'think' has no effect"),
        (prompts, {"prompt": [ASK], "chat_template_kwargs": {"tokenize": False}}, "'tokenize' can't be set by a row"),
        (pairs, {"prompt": [ASK], "chosen": [ASK], "rejected": [ASK, WORSE]}, "column 'chosen' has nothing after the prompt"),
        (pairs, {**both, "prompt": "2+2", "chosen": [SYSTEM, ASK, ANSWER]}, "have different messages before the prompt"),
        (prompts, {"prompt": [ASK, ANSWER]}, "ends with a message of the assistant"),
        (prompts, {"messages": [ANSWER]}, "has nothing before the answer"),
    ]:
        fine = {"prompt": "a", "completion": "b", "chosen": "b", "rejected": "c"}
        rows = read_rows(jsonl(tmp_path / "a.jsonl", [fine, row]))
        with pytest.raises(SurefootError, match=rf"a\.jsonl, line 2: .*{expected}"):
            make(rows, TOKENS, 100)
    deaf = Tokens(pocket()[1])
    deaf.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = read_rows(jsonl(tmp_path / "a.jsonl", [{"messages": [ASK, {**ANSWER, "tool_calls": [CALL]}]}]))
    with pytest.raises(SurefootError, match="ignores 'tool_calls' of a message; remove the row"):
        demonstrations(rows, deaf, 100)


# ---- preview ----------------------------------------------------------------------------------------------------------


def printed(path: Path, **options: Any) -> tuple[str, str]:
    """What a preview prints, without and with the codes of its colours."""
    console = Console(file=io.StringIO(), record=True, width=100, force_terminal=True, color_system="truecolor")
    console.print(preview(path, "pocket", **options))
    return console.export_text(clear=False), console.export_text(styles=True)


def test_a_preview_colours_what_is_trained_and_counts_the_rest(tmp_path: Path) -> None:
    plain, colours = printed(jsonl(tmp_path / "a.jsonl", ROWS), rows=1, max_length=4)
    assert "abc⟨eos⟩" in plain
    assert "def⟨eos⟩" not in plain, "one row was asked for"
    assert "demonstrations │ 2 of 3 rows" in plain
    assert "1 longer than 4 tokens" in plain
    assert "8, of which 5 trained (62%)" in plain
    assert "4 to 4, median 4" in plain
    bold_green, dim = "\x1b[1;32m", "\x1b[2m"
    assert f"{dim}ab\x1b[0m{bold_green}c⟨eos⟩\x1b[0m" in colours


def test_a_preview_names_dropped_rows_and_unused_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "chosen": "c", "rejected": "dd", "score": 1}, {"prompt": "ab", "chosen": "c", "rejected": "c"}]
    both, _ = printed(jsonl(tmp_path / "a.jsonl", rows))
    assert "pairs    │ 1 of 2 rows" in both
    assert "equal    │ 1 whose answers are the same, dropped" in both
    assert "not used │ score" in both
    question, _ = printed(jsonl(tmp_path / "b.jsonl", [{"prompt": "a", "answer": 2}]))
    assert "for rewards │ answer" in question
    shown, _ = printed(jsonl(tmp_path / "c.jsonl", [{"messages": [{**ASK, "note": "[b]me[/b]"}, ANSWER]}]))
    assert "not used       │ messages[].note" in shown
