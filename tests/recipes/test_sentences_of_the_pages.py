"""What the how-tos say is rejected is rejected, in one line, when the recipe is read. The words are those of the page."""

from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.vector import SyncVectorEnv

import surefoot
from surefoot import SurefootError
from surefoot.recipes.presets import find_recipe
from surefoot.recipes.reading import make_recipe

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
DATA = {"model": "my/model", "data": {"train": "rows.jsonl"}}
SFT: dict[str, Any] = {"kind": "sft", **DATA}
TEXT: dict[str, Any] = {"kind": "language", **DATA, "reward": {"terms": [{"function": "score.py:score"}]}}
CONTROL: dict[str, Any] = {"task": "CartPole-v1"}
COMPILED: dict[str, Any] = {**SFT, "engine": "compiled"}
UNSUPPORTED = "**Not supported**, each an error of one line"
SENTENCES: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "adapters",
        '`"pocket"` itself is rejected as a base',
        {**SFT, "model": "pocket", "adapter": {"rank": 4}},
        "adapter: model=",
    ),
    (
        "adapters",
        "`--ranks` works as for one process, and `sharding` is rejected",
        {**SFT, "adapter": {"rank": 4, "quantize": "nf4"}, "sharding": "full"},
        "adapter.quantize='nf4': ",
    ),
    (
        "plan-memory",
        "whole on every rank, so `sharding` is rejected",
        {**SFT, "optimizer": {"kind": "adam-8bit"}, "sharding": "full"},
        "optimizer.kind='adam-8bit': ",
    ),
    (
        "plan-memory",
        "can't be offloaded",
        {**TEXT, "offload": ["critic"], "critic": {"own_model": False}},
        r"offload=\['critic'\]: names the critic",
    ),
    ("train-faster", UNSUPPORTED, {**COMPILED, "adapter": {"rank": 4, "dropout": 0.1}}, "engine='compiled': .* dropout"),
    ("train-faster", UNSUPPORTED, {**COMPILED, "adapter": {"rank": 4, "quantize": "nf4"}}, "engine='compiled': .* 4 or 8 bits"),
    ("train-faster", UNSUPPORTED, {**COMPILED, "sharding": "full"}, "engine='compiled': .* sharded"),
    ("train-faster", UNSUPPORTED, {**COMPILED, "gradient_checkpointing": True}, "engine='compiled': .* gradient_checkpointing"),
    ("train-faster", UNSUPPORTED, {**COMPILED, "objective": {"router_coefficient": 0.1}}, "engine='compiled': .* experts"),
    (
        "recipes",
        "Unknown keys are rejected, with a suggestion",
        {**CONTROL, "stepz": 9},
        "stepz=9: unknown key; did you mean 'steps'",
    ),
    (
        "recipes",
        "`--algorithm` of another kind it is rejected",
        {**CONTROL, "algorithm": "PPO_PENALTY", "objective": {"trust_region": {"clip": 0.2}}},
        "trust_region",
    ),
    (
        "groups-of-answers",
        "`prompts × samples` must be divisible by `objective.reuse.minibatches`",
        {**TEXT, "sampling": {"prompts": 3, "samples": 3}, "objective": {"reuse": {"minibatches": 2}}},
        "objective.reuse.minibatches=2: does not divide the 9 responses",
    ),
    (
        "sample-with-vllm",
        "can't be sampled by a server yet",
        {**TEXT, "sampling": {"engine": "vllm"}, "sharding": "full"},
        "sharding",
    ),
    (
        "your-own-environment",
        "LSTMs and action masks are rejected in one line",
        {**CONTROL, "network": {"lstm": 8}, "objective": {"reuse": {"minibatches": 1}}, "rollout": {"symmetry": "s.py:s"}},
        "symmetry",
    ),
    (
        "environments-in-processes",
        "algorithms that need whole episodes reject it",
        {**CONTROL, "algorithm": "REINFORCE", "rollout": {"backend": "native"}},
        "rollout.backend='native': can't collect whole episodes",
    ),
]


@pytest.mark.parametrize(
    ("page", "words", "table", "line"), SENTENCES, ids=[f"{page}: {line}" for page, _, _, line in SENTENCES]
)
def test_what_a_page_says_is_rejected_is_one_line(page: str, words: str, table: dict[str, Any], line: str) -> None:
    assert words in (PAGES / f"{page}.md").read_text("utf-8")
    with pytest.raises(SurefootError, match=line) as error:
        find_recipe(table["task"], {k: v for k, v in table.items() if k != "task"}) if "task" in table else make_recipe(table)
    assert "\n" not in str(error.value)


def without_mode() -> Any:
    made = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2)
    made.metadata = {}
    return made


def failing(left: float) -> float:
    raise ZeroDivisionError("no factor")


FEW: dict[str, Any] = {"steps": 64, "rollout": {"environments": 2, "steps": 16}, "evaluation": {"episodes": 0}}
WORKERS = {**FEW["rollout"], "backend": "workers"}
FACTOR = "A function that raises, or returns no finite factor of at least 0, is rejected before training"
CALLS: list[tuple[str, str, Any, dict[str, Any], str]] = [
    (
        "environments-in-processes",
        "function inside another one, is rejected",
        lambda: gymnasium.make("CartPole-v1"),
        {"rollout": WORKERS},
        "at the top of a module",
    ),
    ("your-own-environment", "A vector environment without a mode", without_mode, {}, "is not an autoreset mode"),
    ("recipes", FACTOR, "CartPole-v1", {"optimizer": {"schedule": failing}}, "optimizer.schedule"),
    ("recipes", FACTOR, "CartPole-v1", {"optimizer": {"schedule": lambda left: float("nan")}}, "optimizer.schedule"),
    ("recipes", FACTOR, "CartPole-v1", {"optimizer": {"schedule": lambda left: -left}}, "optimizer.schedule"),
]


@pytest.mark.parametrize(
    ("page", "words", "task", "fields", "line"), CALLS, ids=[f"{page}: {line}" for page, *_, line in CALLS]
)
def test_what_a_page_says_a_call_rejects_is_one_line_before_training(
    page: str, words: str, task: Any, fields: dict[str, Any], line: str
) -> None:
    assert words in (PAGES / f"{page}.md").read_text("utf-8")
    rows: list[Any] = []
    with pytest.raises(SurefootError, match=line) as error:
        surefoot.train(task, display=None, callback=rows.append, **{**FEW, **fields})
    assert ("\n" in str(error.value), rows) == (False, [])
