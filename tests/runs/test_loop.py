"""A loop of one's own gives the numbers of a run, and goes on exactly after it was saved and loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import pytest
import torch

import surefoot
from surefoot import SurefootError

FIELDS: dict[str, Any] = {
    "preset": "none",
    "steps": 256,
    "engine": "eager",
    "rollout": {"environments": 4, "steps": 16},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "normalise": {"observations": True, "rewards": True},
    "optimizer": {"schedule": "linear"},
    "network": {"hidden": [8]},
    "evaluation": {"every": 256, "episodes": 1},
}


def weights(agent: Any) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = agent.policy.state_dict()
    return {name: value.clone() for name, value in state.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_collect_and_update_until_done_give_the_weights_of_a_run() -> None:
    loop = surefoot.Loop("CartPole-v1", **FIELDS)
    while not loop.done:
        metrics = loop.update(loop.collect())
    assert (loop.state.steps, loop.state.iteration, loop.state.updates) == (256, 4, 16)
    assert metrics["episode_return"] is not None
    assert same(weights(loop.result), weights(surefoot.train("CartPole-v1", display=False, **FIELDS)))


def test_a_saved_loop_goes_on_exactly_with_changed_rewards_and_its_agent_loads(tmp_path: Path) -> None:
    def step(loop: surefoot.Loop) -> None:
        rollout = loop.collect()
        loop.update(replace(rollout, rewards=rollout.rewards - 0.1 * rollout.actions))

    whole, first, second = (surefoot.Loop("CartPole-v1", **FIELDS) for _ in range(3))
    for _ in range(4):
        step(whole)
    for _ in range(2):
        step(first)
    first.save(tmp_path / "half")
    assert same(weights(surefoot.load(tmp_path / "half")), weights(first.result))
    assert second.load(tmp_path / "half") == []
    while not second.done:
        step(second)
    assert same(weights(second.result), weights(whole.result))
    assert not same(weights(whole.result), weights(surefoot.train("CartPole-v1", display=False, **FIELDS)))


def digits(responses: list[str]) -> list[float]:
    return [sum(c.isdigit() for c in response) / max(1, len(response)) for response in responses]


@pytest.mark.parametrize("kind", ["language", "sft"])
def test_a_loop_on_text_goes_on_exactly_after_it_was_saved(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows = [{"prompt": f"{n} plus {n} is ", **({"completion": str(2 * n)} if kind == "sft" else {})} for n in range(8)]
    online: dict[str, Any] = {"reward": digits, "sampling": {"prompts": 2, "samples": 2, "max_tokens": 4}, "algorithm": "GRPO"}
    data: dict[str, Any] = {"data": rows} if kind == "language" else {"data": {"train": rows, "batch": 4}}

    def made() -> surefoot.Loop:
        return surefoot.Loop(kind, model="pocket", steps=12, seed=1, **data, **(online if kind == "language" else {}))

    whole, first, second = made(), made(), made()
    while not whole.done:
        whole.update(whole.collect())
    first.update(first.collect())
    first.save(tmp_path / "third")
    assert second.load(tmp_path / "third") == []
    while not second.done:
        second.update(second.collect())
    assert same(*(loop.policy.state_dict() for loop in (whole, second)))
    texts = [loop.result.generate(["1 plus 1 is "], max_tokens=4) for loop in (first, second)]
    assert [surefoot.load(tmp_path / "third").generate(["1 plus 1 is "], max_tokens=4), texts[1]] == texts


def test_another_recipe_or_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    loop = surefoot.Loop("CartPole-v1", **FIELDS)
    loop.save(tmp_path / "loop")
    with pytest.raises(SurefootError, match=r"seed: 1 -> 2"):
        surefoot.Loop("CartPole-v1", **{**FIELDS, "seed": 2}).load(tmp_path / "loop")
    (tmp_path / "loop" / "state.json").write_text("{}")
    with pytest.raises(SurefootError, match=r"state\.json"):
        loop.load(tmp_path / "loop")


def test_a_task_may_be_a_function_and_a_start_an_agent() -> None:
    agent = surefoot.train("CartPole-v1", display=False, **FIELDS)
    loop = surefoot.Loop(lambda: gymnasium.make("CartPole-v1"), **FIELDS, start=agent)
    assert same(weights(loop.result), weights(agent))
    loop.close()
