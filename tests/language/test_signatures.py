"""Reward functions with TRL and verifiers signatures, async functions, and functions passed as Python objects."""

import asyncio
import functools
import json
import re
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import surefoot
from surefoot.errors import SurefootError
from surefoot.language.data.chat import Dialogue
from surefoot.language.data.rows import write_rows
from surefoot.language.rewards.signatures import signature_of
from surefoot.language.rewards.terms import FunctionReward, WeightedSum
from surefoot.recipes.callables import import_object, is_importable, object_path, take_functions

PROMPTS = ["one: ", "two: ", "three: "]
RESPONSES = ["a", "bb", "ccc"]
COLUMNS = {"answer": ["a", "b", "ccc"], "level": [1, 2, 3]}
CHAT = [Dialogue([{"role": "user", "content": prompt}], {}) for prompt in PROMPTS]


def score(function: Any, prompts: Any = PROMPTS, columns: Any = COLUMNS, **options: Any) -> list[float]:
    return FunctionReward(function, **options)(prompts, RESPONSES, columns).total.tolist()


def error(function: Any, **options: Any) -> str:
    with pytest.raises(SurefootError) as raised:
        score(function, **options)
    return str(raised.value)


# ---- TRL --------------------------------------------------------------------------------------------------------------------


def test_trl_function_gets_lists_and_columns_by_name() -> None:
    seen: dict[str, Any] = {}

    def reward(completions, answer, **kwargs):
        seen.update(kwargs)
        return [float(text == truth) for text, truth in zip(completions, answer, strict=True)]

    assert score(reward) == [1, 0, 1]
    assert seen == {"prompts": PROMPTS, "level": [1, 2, 3]}


def test_trl_function_gets_message_completions_for_message_prompts() -> None:
    def reward(prompts, completions):
        assert prompts[0] == [{"role": "user", "content": "one: "}]
        assert [list(one) for one in completions[0]] == [["role", "content"]]
        assert {one[0]["role"] for one in completions} == {"assistant"}
        return [len(one[0]["content"]) for one in completions]

    assert score(reward, CHAT) == [1, 2, 3]


def test_none_from_a_trl_function_adds_zero_and_stays_valid() -> None:
    def easy(completions, level):
        return [1.0 if one < 3 else None for one in level]

    async def hard(completions, level):
        return [None if one < 3 else 5.0 for one in level]

    scores = WeightedSum([FunctionReward(easy), FunctionReward(hard)])(PROMPTS, RESPONSES, COLUMNS)
    assert scores.total.tolist() == [1, 1, 5]
    assert scores.valid.all()


def test_arguments_of_the_trl_trainer_are_rejected_unless_optional() -> None:
    text = error(lambda completion_ids, completions: [0.0] * 3)
    assert "requires 'completion_ids'; available: answer, completions, level, prompts" in text
    assert score(lambda completions, trainer_state=None: [trainer_state is None] * 3) == [1, 1, 1]


# ---- verifiers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_verifiers_function_is_called_once_per_row(asynchronous: bool) -> None:
    def rubric(prompt, completion, answer, state, info, task):
        assert (state["prompt"], state["completion"], state["answer"]) == (prompt, completion, answer)
        assert state["input"]["level"] in (1, 2, 3)
        assert (info, task) == ({}, "")
        return float(completion == answer)

    async def later(completion, answer):
        await asyncio.sleep(0)
        return float(completion == answer)

    assert score(later if asynchronous else rubric) == [1, 0, 1]


def test_verifiers_function_gets_messages_and_the_columns_of_its_row() -> None:
    def rubric(completion, level, **kwargs):
        assert "answer" in kwargs
        return len(completion[-1]["content"]) * level

    assert score(rubric, CHAT) == [1, 4, 9]
    assert score(lambda state: len(state["completion"])) == [1, 2, 3]
    assert score(lambda completion, level, times: times * level, arguments={"times": 2}) == [2, 4, 6]


def test_functions_of_trl_and_verifiers_get_all_turns_after_the_prompt_and_others_get_them_before_the_response() -> None:
    turns: list[dict[str, Any]] = [{"role": "user", "content": "2*3?"}, {"role": "assistant", "content": "", "tool_calls": []}]
    prompts = [Dialogue([*turns, {"role": "tool", "content": "6"}], {"tools": [{"name": "multiply"}]}, asked=1)] * 3

    def trl(prompts, completions, tools=None):
        assert [[one["role"] for one in talk] for talk in (prompts[0], completions[0])] == [
            ["user"],
            ["assistant", "tool", "assistant"],
        ]
        return [len(talk[-1]["content"]) + len(tools[0]) for talk in completions]

    assert score(trl, prompts) == [2, 3, 4]
    assert score(lambda prompt, completion: len(prompt) * len(completion), prompts) == [3, 3, 3]
    assert score(lambda prompts, responses: [len(prompt) for prompt in prompts], prompts) == [3, 3, 3]


def test_verifiers_function_with_a_missing_column_is_rejected() -> None:
    text = error(lambda completion, answer: 0.0, columns={})
    assert "requires 'answer'; available: completion, info, prompt, state, task" in text


def test_rows_of_an_async_function_run_concurrently() -> None:
    barrier = []

    async def all_at_once(completion):
        barrier.append(completion)
        while len(barrier) < 3:
            await asyncio.sleep(0)
        return 1.0

    assert score(all_at_once, deadline=10) == [1, 1, 1]


# ---- ambiguity, async, arrays -----------------------------------------------------------------------------------------------


def test_parameter_names_determine_the_signature_style() -> None:
    for function, style in (
        (lambda responses, completions=None: 0, "surefoot"),
        (lambda prompts, answer: 0, "surefoot"),
        (lambda **everything: 0, "surefoot"),
        (lambda completions, **columns: 0, "trl"),
        (functools.partial(lambda completions, scale: 0, scale=2), "trl"),
        (lambda completion, **columns: 0, "verifiers"),
        (lambda state: 0, "verifiers"),
        (len, "surefoot"),
    ):
        if function is len:
            with pytest.raises(ValueError, match="by position only"):
                signature_of(function)
        else:
            assert signature_of(function).style == style


def test_ambiguous_signatures_raise_a_one_line_error() -> None:
    assert "takes completions, as in TRL, and completion, as in verifiers; take one" in error(lambda completion, completions: 0)
    assert "takes state and ** without responses, completions or completion" in error(lambda state, **others: 0)


def test_column_named_like_an_argument_raises_a_one_line_error() -> None:
    text = error(lambda completions: [0.0] * 3, columns={"completions": [1, 2, 3]})
    assert "the rows have a column 'completions', which is the name of another argument; rename the column" in text


def test_async_callable_is_awaited_inside_and_outside_a_running_loop() -> None:
    class Judge:
        async def __call__(self, responses: list[str]) -> list[float]:
            await asyncio.sleep(0)
            return [float(len(response)) for response in responses]

    async def notebook() -> list[float]:
        return score(Judge())

    with ThreadPoolExecutor(1) as thread:  # the browser tests may already run a loop in this thread
        inside = thread.submit(lambda: asyncio.run(notebook())).result()
    assert score(Judge()) == inside == [1, 2, 3]


def test_async_function_keeps_its_event_loop_between_calls() -> None:
    loops = []

    async def reward(completions):
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(completions)

    score(reward), score(reward)
    assert loops[0] is loops[1]
    assert threading.current_thread() is threading.main_thread()


def test_async_function_that_fails_or_hangs_raises_a_one_line_error() -> None:
    async def fails(completion):
        raise RuntimeError("no network")

    async def exits(completions):
        raise SystemExit(3)

    async def hangs(completion):
        await asyncio.sleep(60)

    assert re.search(r"raised RuntimeError: no network \(test_signatures\.py:\d+\); fix the function", error(fails))
    assert "raised RuntimeError: SystemExit: 3" in error(exits)
    assert "took longer than reward.deadline=0.2 s for 3 responses" in error(hangs, deadline=0.2)

    async def works(completion):
        return 1.0

    assert score(works) == [1, 1, 1], "the event loop must still run"


def test_column_vectors_are_accepted_like_lists() -> None:
    for array in (np.array([[1.0], [2.0], [3.0]]), torch.tensor([[1.0], [2.0], [3.0]])):
        assert score(lambda responses, array=array: array) == [1, 2, 3]
        assert score(lambda completions, array=array: array) == [1, 2, 3]
        assert "returned 1 numbers for 3" in error(lambda responses, array=array: array.T)


# ---- copies -----------------------------------------------------------------------------------------------------------------


def spoil(*values: Any) -> None:
    """Modify all nested lists and dicts: drop an entry and add a marker."""
    for value in values:
        if isinstance(value, dict):
            spoil(*value.values())
            value["spoiled"] = True
        elif isinstance(value, list):
            spoil(*value)
            value.pop()
            value.append("spoiled")


def seen(modify: Any, *values: Any, also: tuple[Any, ...] = ()) -> float:
    """A number for what a function gets before it modifies it."""
    number = float(zlib.crc32(repr(values).encode()) % 2**20)
    modify(*values, *also)
    return number


STYLES: tuple[Any, ...] = (
    lambda modify: lambda prompts, responses, deck: [seen(modify, prompts, responses, deck)] * 3,
    lambda modify: lambda prompts, completions, deck: [seen(modify, prompts, completions, deck)] * 3,
    lambda modify: lambda prompt, completion, info, state, deck: seen(modify, prompt, completion, info, deck, also=(state,)),
)


@pytest.mark.parametrize("prompts", [PROMPTS, CHAT], ids=["text", "messages"])
@pytest.mark.parametrize("style", STYLES, ids=["surefoot", "trl", "verifiers"])
def test_functions_that_modify_their_arguments_do_not_affect_other_calls(style: Any, prompts: Any) -> None:
    deck = {"cards": [1, 2, 3]}  # the samples of one prompt share one object
    columns = {"deck": [deck] * 3}
    before = repr((prompts, columns))
    expected = FunctionReward(style(lambda *_: None))(prompts, RESPONSES, columns).total.tolist()
    reward = WeightedSum([FunctionReward(style(spoil)), FunctionReward(style(spoil))])
    for scores in (reward(prompts, RESPONSES, columns) for _ in range(2)):
        assert [part.tolist() for part in scores.parts.values()] == [expected, expected]
    assert repr((prompts, columns)) == before


# ---- Python objects ---------------------------------------------------------------------------------------------------------


def lengths(responses: list[str]) -> list[float]:
    return [-float(len(response)) for response in responses]


class Reward:
    def __call__(self, responses: list[str]) -> list[float]:
        return [0.0] * len(responses)


def test_name_is_importable_only_if_it_refers_to_the_same_object() -> None:
    assert is_importable(object_path(lengths))
    assert import_object("reward", object_path(lengths)) is lengths
    for thing in (Reward(), lambda responses: [], functools.partial(lengths)):
        assert not is_importable(object_path(thing)), object_path(thing)


def test_functions_are_extracted_from_every_form_of_a_reward() -> None:
    path = object_path(lengths)
    for given in (lengths, [lengths], {"terms": lengths}, {"terms": [{"function": lengths}]}):
        assert take_functions(given) == ({"terms": [{"function": path}]}, {"reward.terms[0].function": lengths})
    mixed, functions = take_functions([{"model": "runs/reward"}, {"function": lengths, "weight": 2.0}])
    assert mixed == {"terms": [{"model": "runs/reward"}, {"function": path, "weight": 2.0}]}
    assert functions == {"reward.terms[1].function": lengths}
    assert take_functions({"gold": lengths})[1] == {"reward.gold": lengths}
    assert take_functions("file.py:f") == ({"terms": "file.py:f"}, {})
    assert take_functions("none") == ("none", {})


def fields(folder: Path, tmp_path: Path, **changes: Any) -> dict[str, Any]:
    write_rows(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    table: dict[str, Any] = {
        "model": str(folder),
        "steps": 8,
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 16},
    }
    table |= {"sampling": {"prompts": 4, "max_tokens": 4}, "objective": {"reuse": {"epochs": 1, "minibatches": 1}}}
    table["checkpoint"] = {"every": 4}
    table["display"] = False
    return table | changes


def rewards(run: Path) -> list[float]:
    return [json.loads(line)["reward"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_with_a_local_function_resumes_only_if_it_is_passed_again(folders: dict[str, Path], tmp_path: Path) -> None:
    calls = []

    def local(completions):
        calls.append(len(completions))
        return [-float(len(text)) for text in completions]

    given = fields(folders["llama"], tmp_path, reward=local)
    surefoot.train("language", run_dir=tmp_path / "whole", **given)
    surefoot.train("language", run_dir=tmp_path / "cut", callback=lambda metrics: True, **given)
    assert len(rewards(tmp_path / "cut")) < len(rewards(tmp_path / "whole"))
    with pytest.raises(
        SurefootError, match=r"reward\.terms\[0\]\.function=.*local.*: was passed as a Python object.*resume\(run"
    ):
        surefoot.resume(tmp_path / "cut")
    with pytest.raises(
        SurefootError, match=r"the run has reward\.terms\[0\]\.function=.*local.*pass the functions that it began"
    ):
        surefoot.resume(tmp_path / "cut", reward=lengths)
    surefoot.resume(tmp_path / "cut", reward=local, display=False)
    assert rewards(tmp_path / "cut") == rewards(tmp_path / "whole")
    assert set(calls) == {4}


def test_run_with_module_functions_resumes_by_their_names(folders: dict[str, Path], tmp_path: Path) -> None:
    reward = {"terms": [{"function": lengths, "weight": 0.5}], "gold": lengths}
    given = fields(folders["llama"], tmp_path, reward=reward)
    model = surefoot.train("language", run_dir=tmp_path / "whole", **given)
    surefoot.train("language", run_dir=tmp_path / "cut", callback=lambda metrics: True, **given)
    assert len(rewards(tmp_path / "cut")) < len(rewards(tmp_path / "whole"))
    surefoot.resume(tmp_path / "cut", display=False)
    assert rewards(tmp_path / "cut") == rewards(tmp_path / "whole")
    assert surefoot.evaluate(model, data=str(tmp_path / "rows.jsonl"), rows=2)["held_out_gold"] is not None
