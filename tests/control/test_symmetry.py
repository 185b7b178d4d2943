"""Laws of ``rollout.symmetry``: the update learns from mirror images as from steps of the policy itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

import surefoot
from surefoot import SurefootError
from surefoot.control.world import ControlWorld
from surefoot.core.credit import assign_credit
from surefoot.core.learner import Learner
from surefoot.core.rollout import LearnerState, Metrics, Rollout
from surefoot.recipes.reading import make_recipe
from surefoot.runs.factory import make_learner

from .tiny import Sampled

SMALL: dict[str, Any] = {
    "rollout": {"environments": 2, "steps": 16},
    "network": {"hidden": [8]},
    "objective": {"reuse": {"epochs": 2, "minibatches": 2}},
    "evaluation": {"episodes": 0},
}


def cart_pole(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Left becomes right."""
    return -observations, 1 - actions


def pendulum(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """The angle and its speed change their sign; cosine, sine, speed are observed."""
    return observations * torch.tensor([1.0, -1.0, -1.0]), -actions


def nothing(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    return observations, actions


MIRRORS = {"CartPole-v1": cart_pole, "Pendulum-v1": pendulum, "tensor/CartPole-v1": cart_pole, "tensor/Pendulum-v1": pendulum}


def collected(task: str, function: Any = None, **changes: Any) -> tuple[ControlWorld, Learner, Rollout, LearnerState]:
    """A rollout with mirror images if there is a function."""
    rollout = SMALL["rollout"] | ({} if function is None else {"symmetry": "tests:mirror"})
    recipe = make_recipe({"task": task, **SMALL, **changes, "rollout": rollout})
    world = ControlWorld(recipe, functions={} if function is None else {"rollout.symmetry": function})
    state = LearnerState.seeded(1, 10_000)
    return world, make_learner(recipe, world.policy), world.collector.collect(state), state


NORMALISED = {"observations": True, "rewards": True}


@pytest.mark.parametrize(
    ("task", "normalise"),
    [("CartPole-v1", {}), ("Pendulum-v1", NORMALISED), ("tensor/CartPole-v1", NORMALISED), ("tensor/Pendulum-v1", {})],
)
def test_images_have_the_rewards_and_credit_of_their_steps_and_the_likelihood_of_the_policy(
    task: str, normalise: dict[str, bool]
) -> None:
    world, _, rollout, _ = collected(task, MIRRORS[task], normalise=normalise)
    plain, _, alone, _ = collected(task, normalise=normalise)
    assert rollout.steps == alone.steps == 32
    credit = assign_credit(rollout, world.recipe.objective)
    for name in ("rewards", "values", "next_values", "terminated", "truncated", "mask"):
        for half in getattr(rollout, name).chunk(2):
            assert torch.equal(half, getattr(alone, name)), name
    assert torch.equal(*credit.advantages.chunk(2))
    assert torch.equal(*credit.returns.chunk(2))
    observed, actions = [x.chunk(2) for x in (rollout.inputs["observation"], rollout.actions)]
    assert torch.equal(observed[0], alone.inputs["observation"])
    images = MIRRORS[task](observed[0], actions[0])
    assert torch.equal(actions[1], images[1])
    if not normalise:
        assert torch.equal(observed[1], images[0])
    with torch.no_grad():
        evaluation = world.policy(rollout.inputs, rollout.actions)
    torch.testing.assert_close(rollout.old_log_probs, evaluation.log_probs)
    for each in (world, plain):
        each.close()


def gradient(learner: Learner, rollout: Rollout, state: LearnerState) -> Tensor:
    """The first gradient, of the whole batch."""
    credit = assign_credit(rollout, learner.objective)
    learner.update(rollout, credit, state)
    return torch.cat([optimizer.gradients for optimizer in learner.optimizers.values()])


def test_images_equal_to_the_steps_do_not_change_the_gradient() -> None:
    """As those of a symmetric policy do: a mean over twice the rows."""
    gradients, once = [], {"reuse": {"epochs": 1, "minibatches": 1}}
    for function in (None, nothing):
        world, learner, rollout, state = collected("Pendulum-v1", function, objective=once)
        gradients.append(gradient(learner, rollout, state))
        world.close()
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_the_gradient_of_a_symmetric_policy_is_symmetric_with_images() -> None:
    """A linear policy without bias that prefers nothing: the bias of its action gets no gradient."""
    biases = []
    for function in (None, cart_pole):
        world, learner, rollout, state = collected("CartPole-v1", function)
        with torch.no_grad():
            for parameter in world.policy.parameters():
                parameter.zero_()
        rollout = replace(rollout, old_log_probs=None)
        credit = assign_credit(rollout, learner.objective)
        del state
        head = world.policy.actor_head.bias
        evaluation = world.policy(rollout.inputs, rollout.actions)
        (of_bias,) = torch.autograd.grad((evaluation.log_probs * credit.advantages).sum(), head)
        biases.append(float(of_bias.abs().max()))
        world.close()
    assert biases[1] < 1e-4 < biases[0]


def test_a_run_with_images_resumes_exactly(tmp_path: Path) -> None:
    settings = {**SMALL, "rollout": SMALL["rollout"] | {"symmetry": pendulum}, "checkpoint": {"every": 32}, "seed": 3}
    whole = surefoot.train("Pendulum-v1", steps=128, run_dir=tmp_path / "whole", **settings)

    def stop(metrics: Metrics) -> bool:
        return float(metrics["steps"] or 0) >= 64

    surefoot.train("Pendulum-v1", steps=128, run_dir=tmp_path / "cut", callback=stop, **settings)
    resumed = surefoot.resume(tmp_path / "cut")
    for (name, a), b in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_a_trace_of_an_image_can_not_be_replayed_and_the_run_goes_on(tmp_path: Path) -> None:
    rollout = SMALL["rollout"] | {"symmetry": cart_pole}
    surefoot.train("CartPole-v1", steps=64, run_dir=tmp_path / "run", **SMALL | {"rollout": rollout}, traces={"rows": 4})
    trace = surefoot.read_trace(next((tmp_path / "run" / "traces").iterdir()))
    assert {bool(row.about) for row in trace.rows} == {True, False}
    assert all(bool(row.about) == (row.row < 2) for row in trace.rows)


def raising(observations: Tensor, actions: Tensor) -> None:
    raise KeyError("leg")


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (raising, r"raised KeyError.*leg.* for observations and actions of 32 steps; fix it"),
        (
            lambda x, a: (x[:, :2], a),
            r"returned observation as \[32, 2\] torch.float32; return a tensor \[32, 3\] torch.float32",
        ),
        (lambda x, a: (x, a.double()), r"returned actions as \[32, 1\] torch.float64; return a tensor \[32, 1\] torch.float32"),
        (lambda x, a: ({"arm": x}, a), r"returned observation as dict; return a tensor \[32, 3\]"),
        (lambda x, a: (x + 1, a), r"applied twice, it returns other observation; make it a mirror, which undoes itself"),
    ],
)
def test_an_invalid_symmetry_is_rejected_in_one_line(function: Any, error: str) -> None:
    with pytest.raises(SurefootError, match=rf"^rollout\.symmetry='tests:mirror': {error}"):
        collected("Pendulum-v1", function)


def test_a_function_may_write_into_what_it_gets() -> None:
    def inplace(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        return observations.neg_(), 1 - actions

    world, _, rollout, _ = collected("CartPole-v1", inplace)
    plain, _, alone, _ = collected("CartPole-v1")
    assert torch.equal(rollout.inputs["observation"][:2], alone.inputs["observation"])
    for each in (world, plain):
        each.close()


def test_the_arithmetic_counts_images() -> None:
    world, *_ = collected("Pendulum-v1", pendulum)
    lines = "\n".join(world.arithmetic())
    assert "batch: 2 environments x 16 steps = 32 steps, and their mirror images: 64" in lines
    assert "minibatch: 64 / 2 = 32 steps" in lines
    assert world.recipe.learned_steps == 64
    compiled = make_recipe({"task": "Pendulum-v1", **SMALL, "engine": "compiled", "rollout": world.recipe.rollout.model_dump()})
    assert compiled.compiled_rows == 64
    world.close()


def test_symmetry_is_rejected_for_masks() -> None:
    def masked() -> Sampled:
        return Sampled(spaces.Box(-1, 1, (3,)), spaces.Discrete(2), masked=True)

    recipe = make_recipe({"task": "masked", **SMALL, "rollout": SMALL["rollout"] | {"symmetry": "tests:mirror"}})
    with pytest.raises(
        SurefootError, match=r"rollout\.symmetry='tests:mirror': .* masks actions, and a mask has no mirror image"
    ):
        ControlWorld(recipe, masked, functions={"rollout.symmetry": nothing})
