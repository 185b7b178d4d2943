"""What ends a response, and its text without that: special tokens as stop texts, for rewards and for environments."""

from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.core.rollout import LearnerState
from surefoot.errors import SurefootError
from surefoot.language.data.rows import write_rows
from surefoot.language.data.tokens import Tokens
from surefoot.language.online.world import LanguageWorld
from surefoot.language.sampling.ends import EndDetector, Ends

from . import tiny

USER, SYSTEM = "⟨user⟩", "⟨system⟩"
FILES = """
SEEN = []

def seen(responses):
    SEEN.extend(responses)
    return [float("⟨system⟩" in response) for response in responses]

class Tools:
    def reset(self, row):
        return [{"role": "user", "content": "hi"}]
    def step(self, response):
        SEEN.append(response)
        return [{"role": "user", "content": "go on"}], 0.0, True
"""


@pytest.fixture(scope="module")
def tokens() -> Tokens:
    return Tokens(tiny.tokenizer())


def ids_of(tokens: Tokens, text: str) -> list[int]:
    return [int(i) for i in tokens.tokenizer(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("stop", "written", "plain", "special"),
    [
        ((), "a⟨system⟩b⟨eos⟩", "ab", "a⟨system⟩b"),
        ((USER,), "a⟨system⟩b⟨user⟩", "ab", "a⟨system⟩b"),
        ((USER, "b"), "a⟨system⟩b", "a", "a⟨system⟩"),
        ((f"{USER}\n",), "a⟨system⟩b⟨user⟩\n", "ab", "a⟨system⟩b"),
        ((f"\n{USER}",), "a\n\n⟨user⟩", "a\n", "a\n"),
        (("s",), "⟨system⟩a⟨user⟩", "a", "⟨system⟩a⟨user⟩"),
        (("⟨pad⟩",), "a⟨pad⟩", "a", "a"),
        ((), "⟨eos⟩", "", ""),
    ],
)
def test_text_lacks_the_end_and_special_tokens_only_unless_kept(
    stop: tuple[str, ...], written: str, plain: str, special: str, tokens: Tokens
) -> None:
    ends, ids = Ends(tokens, stop), ids_of(tokens, written)
    assert (ends.text(ids), ends.text(ids, special=True)) == (plain, special)
    detector = EndDetector(ends.ids, ends.stop, ends.decode, tiny.VOCABULARY, torch.device("cpu"))
    assert detector.length(ids) == (0 if stop == ("s",) else len(ids)), "a stop text is not part of a special token's name"
    assert ends.loses_special(ids) == (SYSTEM in written)


def test_reply_does_not_repeat_the_end_that_a_stop_text_is(tokens: Tokens) -> None:
    reply = [{"role": "user", "content": "c"}]
    whole = tokens.encode_reply(reply, ids_of(tokens, "b"))
    assert whole[0] == tokens.eos_id
    assert tokens.encode_reply(reply, [*ids_of(tokens, "b"), whole[0]]) == whole[1:]
    marked = Tokens(tiny.tokenizer())
    marked.eos_ids = (2,)  # the template's end is a stop text, not EOS
    assert marked.encode_reply(reply, [9, 1], Ends(marked, ("⟨eos⟩",)).ids) == whole[1:]
    assert marked.encode_reply(reply, [9, *whole[:2]]) == whole[2:], "a stop text of a special token and more"


def world(folder: Path, root: Path, **changes: Any) -> LanguageWorld:
    """A world whose responses are ⟨system⟩, "a" and ⟨user⟩, which ends them."""
    (root / "others.py").write_text(FILES)
    write_rows(rows := root / "rows.jsonl", [{"prompt": [{"role": "user", "content": "hi"}]}] * 4)
    table = {"algorithm": "GRPO", "sampling": {"prompts": 4, "samples": 4, "max_tokens": 8, "stop": [USER]}, **changes}
    made = tiny.world_of(tiny.fields_of(folder, rows, f"{root / 'others.py'}:seen", **table))
    ids = [made.tokens.special_id(SYSTEM), ids_of(made.tokens, "a")[0], made.tokens.special_id(USER)]
    tiny.set_probabilities(made.policy.model, ids, (0.3, 0.2, 0.5))
    return made


def texts_seen(made: LanguageWorld) -> list[str]:
    """What the file's environment, or else its reward, gets in one rollout."""
    function: Any = made.reward.function if made.environments is None else made.environments.make.step
    seen = function.__globals__["SEEN"]
    seen.clear()
    rollout = made.collector.collect(LearnerState.seeded(1, 16))
    assert rollout.metrics["eos_rate"] > 0.9
    return list(seen)


def test_rewards_get_special_tokens_by_a_switch(folders: dict[str, Path], tmp_path: Path) -> None:
    made = world(folders["llama"], tmp_path)
    plain = texts_seen(made)
    assert set("".join(plain)) == {"a"}
    row = made.collector.collect(LearnerState.seeded(1, 16)).metrics
    assert (row["reward"], row["special_tokens"]) == (0.0, pytest.approx(0.4, abs=0.25))
    terms = [f"{tmp_path / 'others.py'}:seen"]
    with_names = texts_seen(world(folders["llama"], tmp_path, reward={"terms": terms, "special_tokens": True}))
    assert [text.replace(SYSTEM, "") for text in with_names] == plain
    assert any(SYSTEM in text for text in with_names)
    assert not any(USER in text for text in with_names), "the end is no part of the text"


def test_environments_get_special_tokens_always(folders: dict[str, Path], tmp_path: Path) -> None:
    turns = {"environment": f"{tmp_path / 'others.py'}:Tools"}
    seen = texts_seen(world(folders["llama"], tmp_path, turns=turns))
    assert any(SYSTEM in text for text in seen)
    assert not any(USER in text for text in seen)


@pytest.mark.parametrize("argument", ["after", "separator"])
def test_reward_that_looks_for_a_special_token_needs_the_switch(
    argument: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    term: dict[str, Any] = {"function": "surefoot.verifiers:numeric", "arguments": {"after": f"{SYSTEM} ", "answer": ["1"]}}
    if argument == "separator":
        (tmp_path / "steps.py").write_text("def each(steps):\n    return [[0.0] * len(row) for row in steps]\n")
        term = {"function": f"{tmp_path / 'steps.py'}:each", "per": "step", "separator": SYSTEM}
    with pytest.raises(SurefootError, match=f"{argument}='{SYSTEM}.*a special token.*set reward.special_tokens = true"):
        world(folders["llama"], tmp_path, reward={"terms": [term]})
