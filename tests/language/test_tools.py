"""Tools: what a model's calls become, for ten families of models; bad tools; results, limits, runs that resume exactly."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot import calls as deadlines
from surefoot.errors import SurefootError
from surefoot.language.data.chat import Dialogue, options_of
from surefoot.language.data.rows import write_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.models.pocket import character_tokenizer
from surefoot.language.online import tools as tools_module
from surefoot.language.online.turns import Conversation, Environments, add_turn_rewards, as_samples, tool_metrics
from surefoot.language.rewards.scores import Scores
from surefoot.language.rewards.terms import FunctionReward
from surefoot.language.sampling.ends import Ends
from surefoot.recipes.language import TurnSettings

from . import tiny
from .families import FAMILIES, family_tokens
from .test_public_reward_models import printed

TOOLS = '''
import asyncio, threading, time

def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: One factor.
        b: The other.
    """
    return a * b

async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "waited"

def fails(how: str) -> str:
    """Fail.

    Args:
        how: In which way.
    """
    if how in RAISED:
        raise RAISED[how]
    if how == "hang":
        time.sleep(3)
    return {"nothing": None, "long": "x" * 10_000_000, "half": "\\ud83d", "hang": "late", "empty": ""}[how]

RAISED = {"exit": SystemExit("left"), "cancelled": asyncio.CancelledError(), "wordy": ValueError("x" * 10_000_000)}

def untyped(a, b):
    "Multiply."

def undocumented(a: int) -> int:
    return a

def reset(a: int) -> int:
    return a

class Counter:
    """Counts; the row says from where."""
    made = 0
    def __init__(self, reward=1.0):
        Counter.made, self.reward = Counter.made + 1, reward
    def reset(self, start=0, **row):
        self.count = start
        return f" from {start}"
    def add(self, number: int) -> str:
        """
        Add.

        Args:
            number: How much.
        """
        self.count += number
        return str(self.count)
    def get_reward(self):
        return self.reward * self.count

class Later(Counter):
    async def reset(self, **row):
        return "x"

class Both(Counter):
    def step(self, direction: str) -> str:
        return direction

class Empty:
    def reset(self, **row):
        pass

class Phone(Empty):
    def call(self, number: int) -> str:
        return "busy"

def letters(responses):
    return [float(len(set(response))) for response in responses]
'''
ASKED = [{"role": "user", "content": "12 times 34?"}]


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(TOOLS)
    return str(tmp_path / "mine.py")


def environments(file: str, *names: str, limit: int = 900, **settings: Any) -> Environments:
    table = {"tools": [f"{file}:{name}" for name in names], "max_turns": 3, "max_calls": 5, **settings}
    if "environment" in table:
        table["environment"] = f"{file}:{table['environment']}"
    return Environments(TurnSettings(**table), (limit, limit))


def call(name: str, **arguments: Any) -> dict[str, Any]:
    made = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def written(tokens: Tokens, message: dict[str, Any], tools: Any, odd: bool = True) -> list[int]:
    """The ids with which a model writes a message after a question; with ``odd``, one a character where no token is special."""
    options = {"tools": tools}
    before = tokens._text(Dialogue(ASKED, options), add_generation_prompt=True)[0]
    text = tokens._text(Dialogue([*ASKED, message], options))[0].removeprefix(before)
    ids = tokens.tokenizer(text, add_special_tokens=False)["input_ids"]
    end = next((place for place, token in enumerate(ids) if token in tokens.eos_ids), len(ids))
    ids = [*ids[:end], ids[end] if end < len(ids) else tokens.eos_ids[-1]]
    if not odd:
        return ids
    added = tokens.tokenizer.added_tokens_decoder

    def single(token: int) -> list[int]:
        characters = tokens.tokenizer.decode([token])
        pieces = [tokens.tokenizer(one, add_special_tokens=False)["input_ids"] for one in characters]
        return [token] if token in added else [i for piece in pieces for i in piece]

    return [i for token in ids for i in single(token)]


def converse(
    made: Environments, tokens: Tokens, turns: Sequence[Sequence[Sequence[int]]], rows: Sequence[dict[str, Any]] | None = None
) -> list[Conversation]:
    """Conversations whose turns are given: for each turn, the ids of each conversation that goes on."""
    script = iter(turns)

    def draw(contexts: Sequence[Sequence[int]], seeds: Sequence[int]) -> Any:
        talks = [Conversation({}, 0, ids=list(ids), own=[True] * len(ids), log_probs=[-1.0] * len(ids)) for ids in next(script)]
        assert len(talks) == len(contexts)
        for talk in talks:
            talk.ended = talk.ids[-1] in tokens.eos_ids
        return as_samples(talks, tokens, torch.device("cpu"))

    rows = rows or [{"prompt": ASKED[0]["content"]} for _ in turns[0]]
    return made.converse(rows, range(len(rows)), draw, Ends(tokens))


# ---- families ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_the_template_writes_is_the_call_that_is_read(family: str) -> None:
    tokens = family_tokens(family)
    tokens.check_calls()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools = [{"type": "function", "function": {"name": "f", "description": "?", "parameters": schema}}]
    message = tokens.parse(written(tokens, call("f", a=12, b="75001"), tools), tokens.render(ASKED, True), tools)
    assert [one["function"] for one in message["tool_calls"]] == [{"name": "f", "arguments": {"a": 12, "b": "75001"}}]


def test_only_an_object_of_strict_json_is_a_call_and_its_other_keys_are_left_out() -> None:
    tokens = family_tokens("hermes")

    def read(body: str) -> Any:
        ids = tokens.tokenizer(f"<tool_call>{body}</tool_call>", add_special_tokens=False)["input_ids"]
        return tokens.parse([*ids, tokens.eos_id], tokens.render(ASKED, True), [])

    odd = [f'{{"name": "f", "arguments": {{"a": {value}}}}}' for value in ("NaN", '"\\ud83d"')]
    assert [read(body) for body in ("[1]", '"f"', "null", "{}", *odd)] == [None] * 6
    assert read('{"name": "f", "number": 3, "arguments": null}')["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_ids_stay_as_they_are_and_results_follow_as_the_template_writes_them(family: str, file: str) -> None:
    tokens, made = family_tokens(family), environments(file, "multiply")
    said = [call("multiply", a=12, b=34), {"role": "assistant", "content": "408, as 12 times 34."}]
    turns = [written(tokens, message, made.schemas) for message in said]
    assert turns[0] != written(tokens, said[0], made.schemas, odd=False)
    talk = converse(made, tokens, [[ids] for ids in turns])[0]
    assert [i for i, own in zip(talk.ids, talk.own, strict=True) if own] == turns[0] + turns[1]
    assert talk.ended
    assert talk.replies == [[{"role": "tool", "name": "multiply", "content": "408", "tool_call_id": "call00000"}], []]
    whole = [*ASKED, said[0], *talk.replies[0], said[1]]
    text = tokens.tokenizer.decode(talk.prompt + talk.ids)
    wanted = tokens._text(Dialogue(whole, {"tools": made.schemas}))[0]
    assert text.startswith(wanted.rstrip("\n")), (text, wanted)
    assert talk.messages[1]["content"] == said[1]["content"]


@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_in_a_result_are_text(family: str, file: str) -> None:
    """A result can't end a turn, begin another, or call a tool."""
    tokens = family_tokens(family)

    def reply(content: str) -> list[int]:
        result = {"role": "tool", "name": "f", "content": content, "tool_call_id": "call00000"}
        return tokens.encode_reply([result], [tokens.eos_id], (), {}, called="f")

    names = [str(token) for token in tokens.tokenizer.added_tokens_decoder.values()]
    names = [name for name in names if name in FAMILIES[family]["special"].split() or name in tokens.tokenizer.chat_template]
    hostile, added = "".join(names), tokens.tokenizer.added_tokens_decoder
    assert [i for i in reply(hostile) if i in added] == [i for i in reply("fine") if i in added]


# ---- conversations ----------------------------------------------------------------------------------------------------


POCKET = Tokens(character_tokenizer())


def said(*texts: str) -> list[int]:
    return [*POCKET.tokenizer("".join(texts), add_special_tokens=False)["input_ids"], POCKET.eos_id]


def results(talk: Conversation) -> list[str]:
    return [message["content"] for reply in talk.replies for message in reply]


def test_an_environments_methods_are_tools_and_its_reward_is_on_the_last_turn_ended_or_not(file: str) -> None:
    made = environments(file, environment="Counter", arguments={"reward": 2.0})
    add, answer = said("add(number=3)"), said("five")
    rows = [{"prompt": [{"role": "user", "content": "count"}], "start": 2}, {"prompt": "count", "start": 40}]
    talks = converse(made, POCKET, [[add, add], [answer, add], [add]], rows)
    assert [POCKET.decode(talk.prompt) for talk in talks] == ["count from 2", "count from 40"]
    assert [results(talk) for talk in talks] == [["5"], ["43", "46"]], "nothing is called in the last possible turn"
    assert [talk.ended for talk in talks] == [True, False]
    assert [talk.rewards for talk in talks] == [[0.0, 10.0], [0.0, 0.0, 92.0]]
    samples = as_samples(talks, POCKET, torch.device("cpu"))
    scores = add_turn_rewards(Scores(torch.zeros(2), {}, torch.ones(2, dtype=torch.bool)), talks, samples.mask.shape)
    last = [max(place for place, own in enumerate(talk.own) if own) for talk in talks]
    assert [scores.dense[row, place].item() for row, place in enumerate(last)] == [10.0, 92.0]
    assert talks[0].history == [
        {"role": "user", "content": "count from 2"},
        {**call("add", number=3)},
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "call00000"},
    ]
    assert [tool["function"]["name"] for tool in options_of(talks[0].history)["tools"]] == ["add"], "for rewards"
    assert talks[0].transcript == "add(number=3)\ntool: 5\nassistant: five\nreward: 10"
    assert tool_metrics(talks) == {"tool_calls": 1.5, "tool_calls_failed": 0.0, "tool_calls_malformed": 0.0}


def test_a_truncated_turn_calls_nothing(file: str) -> None:
    talk = converse(environments(file, environment="Counter"), POCKET, [[said("add(number=3)")[:-1]]])[0]
    assert not results(talk)
    assert talk.rewards == [0.0]
    assert not talk.ended


def test_a_malformed_call_is_a_final_answer_and_unknown_names_and_arguments_are_results(file: str) -> None:
    made = environments(file, "multiply")
    texts = ["multiply(a=,b=3)", "multiply(a=2)", "divide(a=2,b=1)", "12"]
    talks = converse(made, POCKET, [[said(text) for text in texts], [said("0")] * 2])
    assert [talk.ended for talk in talks] == [True] * 4
    assert results(talks[1]) == ["{'error': \"multiply() missing 1 required positional argument: 'b'\"}"]
    assert results(talks[2]) == ["{'error': 'Tool divide not found.'}"]
    assert [talk.malformed for talk in talks] == [1, 0, 0, 0]
    assert not any(talk.environment.faults for talk in talks), "the model's errors are not the tool's"
    assert tool_metrics(talks) == {"tool_calls": 0.5, "tool_calls_failed": 1.0, "tool_calls_malformed": 1 / 6}


def test_tools_run_together_each_with_a_deadline_and_unusable_results_say_so(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = len(deadlines.calls_left())
    made = environments(file, "fails", "wait", tool_deadline=0.5)
    texts = [f'fails(how="{how}")' for how in ("nothing", "long", "half", "exit", "cancelled", "wordy", "hang", "empty")]
    texts += ["wait(seconds=9)"] * 3 + ["wait(seconds=0.01)"]
    began = time.monotonic()
    talks = converse(made, POCKET, [[said(text) for text in texts], [said("so")] * len(texts)])
    assert time.monotonic() - began < 2.5
    seen = [result for talk in talks for result in results(talk)]
    for result, words in zip(
        seen,
        ["nothing", "10,000,000 characters", "half of a character", "left", "Cancelled", "x …", "longer than 0.5 s", ""]
        + ["longer than 0.5 s"] * 3
        + ["waited"],
        strict=True,
    ):
        assert words in result
        assert bool(words) == bool(result)
    assert max(map(len, seen)) < 1_000
    assert len(deadlines.calls_left()) <= left + 1, "coroutines are cancelled"
    monkeypatch.setattr(tools_module, "FEW", 3)
    with pytest.raises(
        SurefootError, match=r"turns.tolerated=0.1: tools failed in 4 of 4 calls; most often: fails raised .*; fix them"
    ):
        converse(environments(file, "fails", tolerated=0.1), POCKET, [[said('fails(how="what")')] * 4, [said("so")] * 4])


def test_calls_of_a_turn_run_in_their_order_and_beyond_the_limit_not_at_all(file: str) -> None:
    made = environments(file, environment="Counter", max_calls=2)
    talk = converse(made, POCKET, [[said("add(number=1)\nadd(number=2)\nadd(number=4)")], [said("3")]])[0]
    assert results(talk) == ["1", "3", "{'error': 'No more than 2 calls are allowed.'}"]
    assert talk.rewards == [0.0, 3.0]
    many = converse(
        environments(file, environment="Counter"), POCKET, [[said(f"add(number={i})") for i in range(40)], [said("x")] * 40]
    )
    assert [results(talk) for talk in many] == [[str(i)] for i in range(40)], "every conversation has its own state"


def test_what_is_no_tool_is_rejected_in_one_line(file: str) -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tools": ["untyped"]}, r"turns.tools\[0\]='.*:untyped': is no tool \(.*type.*\); give untyped a type"),
        ({"tools": ["undocumented"]}, r"turns.tools\[0\]='.*': is no tool \(.*docstring"),
        ({"tools": ["reset"]}, r"turns.tools\[0\]='.*': is reserved; rename it"),
        ({"tools": ["multiply", "multiply"]}, r"turns.tools\[1\]='.*': two tools have this name; rename it"),
        ({"tools": ["Counter"]}, r"turns.tools\[0\]='.*': is no function; name one, or set turns.environment"),
        ({"environment": "Later"}, "turns.environment='.*': reset is a coroutine; write def reset"),
        ({"environment": "Both"}, "turns.environment='.*': it has get_reward, and step.* answers whole turns; rename step"),
        ({"environment": "Phone"}, "turns.environment='.*': has a method call or schemas, which are reserved; rename it"),
        ({"environment": "Empty"}, "turns.environment='.*': has no method step, and none that is a tool"),
    ]
    for table, message in bad:
        with pytest.raises(SurefootError, match=message):
            environments(file, *table.pop("tools", ()), **table)


def test_a_reward_that_is_no_number_leaves_the_conversation_out(file: str) -> None:
    made = environments(file, environment="Counter", arguments={"reward": float("nan")})
    made.tolerated = 1.0
    talk = converse(made, POCKET, [[said("1")]])[0]
    assert talk.failure == "get_reward returned no finite number (nan)"


def test_templates_that_omit_calls_or_read_them_again_are_rejected_at_once(file: str, tmp_path: Path) -> None:
    tokens = Tokens(character_tokenizer())
    template, chat = tokens.tokenizer.response_template, tokens.tokenizer.chat_template
    bad = [
        ({"response_template": None}, "turns.response_template: is missing, and the tokenizer has none"),
        (
            {"response_template": {**template, "start_anchor": "⟨user⟩"}},
            "turns.response_template: reads a call again after its result",
        ),
        (
            {"response_template": {"start_anchor": "⟨assistant⟩", "fields": {"content": {}}}},
            "does not read the call that the chat",
        ),
        (
            {"chat_template": chat.replace("call['function']['name']", "''").replace("value | tojson", "''")},
            "omits the model's calls",
        ),
        ({"chat_template": "{{ messages[0]['content'] }}"}, "omits the model's calls of tools"),
    ]
    for changes, message in bad:
        for name, value in ({"response_template": template, "chat_template": chat} | changes).items():
            setattr(tokens.tokenizer, name, value)
        with pytest.raises(SurefootError, match=message):
            tokens.check_calls()
    tokens = Tokens(character_tokenizer())
    tokens.tokenizer.response_template = None
    (tmp_path / "calls.json").write_text(json.dumps(template))
    environments(file, "multiply", response_template=str(tmp_path / "calls.json")).check(tokens, scored=True)
    with pytest.raises(SurefootError, match=r"gives no rewards; add get_reward\(\), or set reward.terms"):
        environments(file, "multiply").check(tokens, scored=False)
    tokens.tokenizer.save_pretrained(tmp_path / "saved")
    assert "⟨assistant⟩" in (tmp_path / "saved" / "tokenizer_config.json").read_text(), "a run's model keeps it"


# ---- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_with_async_tools_resumes_to_the_same_weights(file: str, tmp_path: Path, folders: dict[str, Path]) -> None:
    write_rows(tmp_path / "rows.jsonl", ({"prompt": f"{i}?"} for i in range(16)))
    table: dict[str, Any] = {
        "algorithm": "GRPO",
        "model": str(folders["llama"]),
        "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 24},
        "sampling": {"prompts": 4, "samples": 2, "max_tokens": 6, "stop": list("nopqrstuvwxyz0123456789")},
        "turns": {"tools": [f"{file}:wait"], "max_turns": 2, "response_template": WAITS},
        "reward": {"terms": [f"{file}:letters"], "missing_eos": "none"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokens, "check_calls", lambda tokens: None)
        whole, cut = tiny.whole_and_resumed("language", tmp_path, 32, **table)
    assert all(torch.equal(value, cut["agent"][name]) for name, value in whole["agent"].items())
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["tool_calls"] > 0.2


WAITS = {
    "start_anchor": "⟨assistant⟩",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": "[a-m]",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "wait", "arguments": {"seconds": 0.001}}},
        },
    },
}
"""reads a call in every turn with one of these letters, so that a random model makes some"""


# ---- TRL --------------------------------------------------------------------------------------------------------------


WORTH = """
class Worth:
    def reset(self, **row):
        self.total = 0

    def multiply(self, a: int, b: int) -> int:
        \"\"\"Multiply two whole numbers.

        Args:
            a: One factor.
            b: The other.
        \"\"\"
        self.total += a * b
        return a * b

    def get_reward(self):
        return self.total / 7


def worth(prompts, completions, **columns):
    calls = [sum(len(one.get("tool_calls") or ()) for one in talk) for talk in completions]
    results = [[one["content"] for one in talk if one["role"] == "tool"] for talk in completions]
    last = [talk[-1].get("content") or "" for talk in completions]
    lengths = [len(prompt) for prompt in prompts]
    return [10.0 * a + len("".join(b)) + 100.0 * len(c) + 1000.0 * d for a, b, c, d in zip(calls, results, last, lengths)]
"""


@pytest.mark.release
def test_ids_masks_and_rewards_are_those_of_trl(tmp_path: Path) -> None:
    """With TRL's templates, which are those of the published models; and for odd calls, with Qwen 3's.

    GLM differs: TRL writes <|observation|> again after a turn that ends with it, and a reward function gets it in the answer. A
    function of TRL gets the last answer parsed, without its thinking; ours gets the text.
    """
    from transformers import AutoTokenizer

    for family in FAMILIES:
        tokens = family_tokens(family)
        tokens.tokenizer.save_pretrained(tmp_path / family)
        (tmp_path / family / "eos.json").write_text(json.dumps(tokens.eos_ids))
    (tmp_path / "tools.py").write_text(WORTH)
    made, compared = environments(str(tmp_path / "tools.py"), environment="Worth", limit=9_000), list[str]()
    reward = FunctionReward(f"{tmp_path / 'tools.py'}:worth")
    for case in printed("SUREFOOT_TRL_PYTHON", "trl_tools.py", str(tmp_path)):
        family = case["family"]
        if "error" in case:
            continue
        tokens = Tokens(AutoTokenizer.from_pretrained(tmp_path / family))
        tokens.eos_ids = tuple(json.loads((tmp_path / family / "eos.json").read_text()))
        turns = case["turns"][: 1 if 0 not in case["mask"] else None]
        talk = converse(made, tokens, [[ids] for ids in turns])[0]
        assert talk.prompt == case["prompt"], family
        ids, mask = case["ids"], case["mask"]
        if family == "glm":
            place = mask.index(0)
            assert ids[place] == ids[place - 1], "the doubled token"
            del ids[place], mask[place]
        assert talk.ids == ids, (family, tokens.tokenizer.decode(talk.ids), tokens.tokenizer.decode(ids))
        assert talk.own == [bool(one) for one in mask]
        answer = str(talk.messages[-1]["content"])
        rewards = [reward([talk.history], [answer], {}).total.item(), sum(talk.rewards)]
        first = 1 if family == "glm" else 0
        assert rewards[first:] == pytest.approx(case["rewards"][first:]), family
        compared.append(family)
    assert set(compared) >= {"hermes", "qwen3", "nemotron", "llama", "gpt_oss", "glm", "lfm"}
    assert compared.count("qwen3") == 7


# ---- generate, chat, environments of others -----------------------------------------------------------------------------


def test_generate_and_chat_have_the_tools_of_the_command_or_of_the_run(file: str, folders: dict[str, Path]) -> None:
    from surefoot.language.chat import Chat, ChatOptions
    from surefoot.language.language_model import load_language_model
    from surefoot.language.online.play import Player
    from surefoot.recipes.reading import make_recipe

    model = load_language_model(str(folders["llama"]))
    model.tokens.tokenizer.response_template = None
    assert not Player(model.model, model.tokens, None).ready
    table = {"kind": "language", "model": "m", "data": {"train": "x"}, "reward": {"terms": ["a:b"]}}
    run = make_recipe({**table, "turns": {"tools": [f"{file}:multiply"]}})
    assert Player(model.model, model.tokens, run).ready
    step = make_recipe({**table, "turns": {"environment": "surefoot.language.tasks.guess:Guess"}})
    assert not Player(model.model, model.tokens, step).ready, "it answers whole turns, of its own rows"
    player = Player(model.model, model.tokens, run, (f"{file}:multiply",))
    with pytest.raises(SurefootError, match=r"turns.response_template: is missing"):
        player.play(["2*3?"])
    model.tokens.tokenizer.response_template = POCKET.tokenizer.response_template
    talks = player.play(["2*3?", "4*5?"], samples=2, max_tokens=5, seed=3)
    assert [talk.start[0]["content"] for talk in talks] == ["2*3?", "2*3?", "4*5?", "4*5?"]
    chat = Chat(model, ChatOptions(max_tokens=5), player)
    pieces: list[str] = []
    assert chat.answer("2*3?", pieces.append) == "".join(pieces)
    assert [message["role"] for message in chat.messages] == ["user", "assistant"]


def test_an_adapter_without_its_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    named = {"fastmcp": ("MCP", {"server": "x.py"}, "mcp"), "verifiers": ("Verifiers", {"taskset": "x:y"}, "verifiers-tasks")}
    named["openenv"] = ("OpenEnv", {"environment": "x:y"}, "openenv")
    for package, (name, arguments, extra) in named.items():
        for module in [package, *(one for one in sys.modules if one.startswith(f"{package}."))]:
            monkeypatch.setitem(sys.modules, module, None)
        settings = TurnSettings(environment=f"surefoot.language.environments:{name}", arguments=arguments)
        with pytest.raises(
            SurefootError, match=rf"turns.arguments.* needs .*, which is not installed; run: pip install .*{extra}\]"
        ):
            Environments(settings, (99, 99))


def test_tools_of_an_mcp_server_are_called_in_memory(tmp_path: Path) -> None:
    pytest.importorskip("fastmcp")
    tool = 'def multiply(a: int, b: int) -> int:\n    "Multiply."\n    return a * b\n'
    (tmp_path / "server.py").write_text(f'from fastmcp import FastMCP\nmcp = FastMCP("x")\n@mcp.tool\n{tool}')
    settings = TurnSettings(environment="surefoot.language.environments:MCP", arguments={"server": f"{tmp_path}/server.py:mcp"})
    talks = converse(Environments(settings, (900, 900)), POCKET, [[said("multiply(a=34,b=12)")] * 3, [said("408")] * 3])
    assert [results(talk) for talk in talks] == [["408"]] * 3
