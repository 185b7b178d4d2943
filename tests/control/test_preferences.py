"""Laws of rewards that are learned from comparisons of clips."""

from typing import Any

import numpy as np
import pytest
import torch

from surefoot import SurefootError
from surefoot.control.collect import preferences
from surefoot.control.collect.preferences import Clips, Preferences, RewardModels
from surefoot.control.horizon import fixed_horizon
from surefoot.control.world import ControlWorld
from surefoot.functional import bradley_terry_loss
from surefoot.functional.preferences import labelled_clip_loss

from .tiny import Clockwork, clockworks, fresh_state, one_by_one, world_of

ROLLOUT = {"environments": 2, "steps": 7}
TRUNCATED = [((7, "truncated"), (5, "truncated")), ((8, "truncated"),)]


def clockwork_world(**fields: Any) -> tuple[ControlWorld, Preferences]:
    """Two environments, clips of three steps."""
    settings = {"labels": 4, "segment": 3, **fields}
    world = world_of(one_by_one(clockworks(TRUNCATED)), rollout=ROLLOUT, preferences=settings)
    learning = world.collector.preferences
    assert learning is not None
    return world, learning


def test_without_wrong_labels_the_loss_is_that_of_bradley_and_terry_and_with_them_it_is_bounded() -> None:
    first, second = torch.randn(2, 50)
    torch.testing.assert_close(
        labelled_clip_loss(first, second, torch.ones(50), 0.0), bradley_terry_loss(first, second), rtol=1e-4, atol=1e-5
    )
    swapped = labelled_clip_loss(second, first, torch.zeros(50), 0.1)
    torch.testing.assert_close(labelled_clip_loss(first, second, torch.ones(50), 0.1), swapped)
    sure_and_wrong = labelled_clip_loss(torch.tensor(-1e4), torch.tensor(1e4), torch.tensor(1.0), 0.1)
    torch.testing.assert_close(sure_and_wrong, -torch.tensor(0.05).log())


@pytest.fixture(scope="module")
def fitted() -> tuple[RewardModels, torch.Tensor]:
    """Models of a reward that is linear in the first input, and the steps of 400 clips."""
    draw = torch.Generator().manual_seed(1)
    x = 3 + 2 * torch.randn(200, 2, 5, 4, generator=draw)
    first, second = x[..., 0].sum(-1).unbind(-1)
    models = RewardModels(4, seed=1, weight_decay=10.0)
    models.fit(x, (first > second).float(), x.flatten(0, 2), seed=1)
    return models, x.flatten(0, 2)


def test_reward_models_rank_clips_that_nobody_has_labelled(fitted: tuple[RewardModels, torch.Tensor]) -> None:
    unseen = 3 + 2 * torch.randn(300, 2, 5, 4, generator=torch.Generator().manual_seed(2))
    truth, learned = unseen[..., 0].sum(-1), fitted[0].rewards(unseen).sum(-1)
    same = (truth[:, 0] > truth[:, 1]) == (learned[:, 0] > learned[:, 1])
    assert same.float().mean() > 0.9


def test_each_models_rewards_have_mean_0_and_deviation_1_on_the_known_steps(fitted: tuple[RewardModels, torch.Tensor]) -> None:
    models, known = fitted
    standard = (models(known) - models.shift) / models.scale
    torch.testing.assert_close(standard.mean(1), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(standard.std(1), torch.ones(3), atol=1e-4, rtol=0)


def test_clips_are_consecutive_steps_of_one_episode_whatever_rollouts_they_lie_in() -> None:
    """Rollouts of 7 steps, episodes of 7, 5 and 8, clips of 3."""
    world, learning = clockwork_world()
    for _ in range(6):
        learning.add(world.collector._act_out(fresh_state().generators["sample"], fresh_state().timer))
    environment, episode, t = learning.pool.inputs[..., :3].unbind(-1)
    assert (environment == environment[:, :1]).all()
    assert (episode == episode[:, :1]).all()
    assert t.tolist() == [[3 * k, 3 * k + 1, 3 * k + 2] for k in (t[:, 0] / 3).int().tolist()], (
        "from the reset on, none skipped"
    )
    per_episode = {(0, 0): 2, (0, 1): 1, (1, 0): 2}
    for (row, number), count in per_episode.items():
        assert int(((environment[:, 0] == row) & (episode[:, 0] == number)).sum()) == count
    logged = [[step.reward for step in made.log] for made in world.environments.environments]
    of_first = [rewards for rewards, row in zip(learning.pool.rewards.tolist(), environment[:, 0], strict=True) if row == 0]
    assert of_first[:3] == [logged[0][0:3], logged[0][3:6], logged[0][7:10]]


def test_learned_rewards_replace_the_tasks_in_the_rollout_and_nowhere_else() -> None:
    world, learning = clockwork_world()
    plain = world_of(one_by_one(clockworks(TRUNCATED)), rollout=ROLLOUT)
    state = fresh_state()
    rollout = world.collector.collect(state)
    learned = learning.models.rewards(learning._inputs(acted_of(rollout)))
    torch.testing.assert_close(rollout.rewards, learned)
    truth = [step.reward for step in world.environments.environments[0].log][-7:]
    assert rollout.reward_parts["environment"][0].tolist() == truth
    assert len(learning.labels) == 2, "half of the labels come before the first update"
    assert state.steps == 14, "the clips for the first labels are paid from the budget"
    plain.collector.collect(fresh := fresh_state())
    assert plain.collector.collect(fresh).metrics["episode_return"] == rollout.metrics["episode_return"]


def acted_of(rollout: Any) -> Any:
    return type("Acted", (), {"observed": rollout.inputs, "actions": rollout.actions})


def test_labels_are_asked_for_before_the_first_update_and_at_refits_while_the_policy_explores() -> None:
    _, learning = clockwork_world(labels=20, refits=5, until=0.35)
    state = fresh_state()
    assert learning._due(state) == 10
    learning.models.fits = 1
    due = []
    for share in (0.0, 0.06, 0.08, 0.24, 0.34, 0.36, 1.0):
        state.steps = int(share * state.total_steps)
        due.append(learning._due(state))
    assert due == [10, 10, 12, 16, 18, 20, 20]


def test_a_share_of_the_labels_is_wrong_and_equal_clips_stay_equal() -> None:
    _, learning = clockwork_world(errors=0.3)
    rewards = torch.randn(2000, 2, 3)
    rewards[:100] = 1.0
    pairs = Clips(torch.zeros(2000, 2, 3, 1), rewards, torch.zeros(2000, 2, 3, 0))
    _, labels = learning._by_return(1, pairs, {})
    assert (labels[:100] == 0.5).all()
    truth = rewards.sum(-1)[100:, 0] > rewards.sum(-1)[100:, 1]
    assert 0.25 < float((labels[100:] != truth.float()).float().mean()) < 0.35


def test_accuracy_is_measured_on_labels_before_the_models_are_trained_on_them() -> None:
    """A judge who contradicts the models in every pair."""
    world, learning = clockwork_world(labels=8)
    learning.judge = None
    state = fresh_state()
    world.collector.collect(state)
    assert learning.accuracy is None, "there was nothing to predict with"

    def contrary(number: int, pairs: Clips, tapes: Any) -> Any:
        with torch.no_grad():
            totals = learning.models(pairs.inputs).sum(-1).mean(0)
        return torch.arange(len(totals)), (totals[:, 0] <= totals[:, 1]).float()

    learning._by_return = contrary  # type: ignore[method-assign]
    state.steps = state.total_steps
    learning.ask(state)
    assert learning.accuracy == 0.0
    assert learning.metrics["labels_trained"] == 8


def test_pairs_are_chosen_where_the_models_disagree(monkeypatch: pytest.MonkeyPatch) -> None:
    world, learning = clockwork_world(labels=8)
    world.collector.collect(fresh_state())
    for _ in range(8):
        learning.add(world.collector._act_out(fresh_state().generators["sample"], fresh_state().timer))

    def disagreement(pairs: Clips) -> float:
        with torch.no_grad():
            first, second = learning.models(pairs.inputs).sum(-1).unbind(-1)
        return float(torch.sigmoid(first - second).var(0).mean())

    chosen = disagreement(learning._choose(10))
    monkeypatch.setattr(preferences, "CANDIDATES", 1)
    assert chosen > 1.5 * np.mean([disagreement(learning._choose(10)) for _ in range(5)])


def test_a_task_that_terminates_is_an_error_of_one_line_unless_that_is_kept() -> None:
    ends = [((4, "terminated"),)] * 2
    for terminations in ("reject", "keep"):
        settings = {"labels": 4, "segment": 3, "terminations": terminations}
        world = world_of(one_by_one(clockworks(ends)), rollout=ROLLOUT, preferences=settings)
        if terminations == "keep":
            world.collector.collect(fresh_state())
            continue
        with pytest.raises(SurefootError, match=r"^preferences.terminations='reject': an episode of .* terminated") as raised:
            world.collector.collect(fresh_state())
        assert "fixed_horizon" in str(raised.value)


def test_after_a_rollout_that_was_not_finite_clips_begin_anew() -> None:
    class Broken(Clockwork):
        def step(self, action: Any) -> Any:
            observation, reward, *rest = super().step(action)
            return observation, float("nan") if len(self.log) == 9 else reward, *rest

    environments = [Broken(0, ((20, "truncated"),)), Clockwork(1, ((20, "truncated"),))]
    world = world_of(one_by_one(environments), rollout=ROLLOUT, preferences={"labels": 8, "segment": 3})
    state = fresh_state()
    with pytest.raises(SurefootError, match="not finite"):
        world.collector.collect(state)
    world.collector.collect(state)
    assert world.collector.preferences is not None
    t = world.collector.preferences.pool.inputs[..., 2]
    assert (t[:, 1:] - t[:, :-1] == 1).all()


@pytest.mark.parametrize(
    ("task", "changes", "message"),
    [
        ("FrozenLake-v1", {}, "preferences: reward models read vectors"),
        ("tensor/Pendulum-v1", {}, "makes a vector"),
        ("CartPole-v1", {"rollout": {"backend": "native"}}, "rollout.backend='native': has no single environments"),
        ("Pendulum-v1", {"preferences": {"judge": "people", "errors": 0.1}}, "is for preferences.judge = 'return'"),
        ("Pendulum-v1", {"preferences": {"judge": "people"}, "evaluation": {"patience": 2}}, "waits for a better return"),
    ],
)
def test_what_preferences_cannot_compare_is_an_error_of_one_line(task: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SurefootError, match=message):
        world_of(task, **{"preferences": {"labels": 4}, **changes})


def test_a_fixed_horizon_keeps_the_last_observation_and_rewards_nothing_after_the_end() -> None:
    environment = fixed_horizon("CartPole-v1", 60)
    environment.reset(seed=1)
    steps = [environment.step(1) for _ in range(60)]
    rewards = [reward for _, reward, *_ in steps]
    fell = rewards.index(0.0)
    assert 5 < fell < 20
    assert rewards == [1.0] * fell + [0.0] * (60 - fell)
    assert all((observation == steps[fell - 1][0]).all() for observation, *_ in steps[fell:])
    assert [(terminated, truncated) for _, _, terminated, truncated, _ in steps] == [(False, False)] * 59 + [(False, True)]
    environment.reset(seed=2)
    assert environment.step(0)[1] == 1.0
