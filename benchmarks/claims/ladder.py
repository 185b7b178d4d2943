"""E7: each fix from REINFORCE to PPO, and the noise of the gradients that the fixes leave."""

from pathlib import Path
from typing import Any

from claims import LEDGER, Bound, Cell, Claim, Experiment, Result, Results, difference, single
from claims.training import silent, trained

TASKS = {"CartPole": "CartPole-v1", "Acrobot": "Acrobot-v1"}
SEEDS = tuple(range(1, 11))
FROZEN = (101, 102, 103)
"""seeds of the runs whose θ is frozen"""
RUNGS = ("REINFORCE", "REINFORCE_BASELINE", "ACTOR_CRITIC", "A2C", "PPO_UNCLIPPED", "PPO_CLIP")
BATCHES = 100
FIT_STEPS = 2_000


def rung_cell(short: str, rung: int, seed: int) -> Cell:
    """One rung on one task."""

    def work(folder: Path) -> Result:
        from surefoot.compare.ladder import rung_recipe

        engine = "eager" if rung < 2 else "compiled"  # whole episodes have no static shape
        changes = {"seed": seed, "engine": engine, "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
        return {"rung": rung, **trained(rung_recipe(TASKS[short], rung, changes), folder)}

    name = f"{short}-{rung}-{seed}"
    return Cell(name, work, LEDGER / "E7" / name)


def noise_cell(short: str, seed: int) -> Cell:
    """Gradient noise of the first four rungs at one θ of the top rung, after a tenth of its budget."""

    def work(folder: Path) -> Result:
        from surefoot.compare import cells
        from surefoot.compare.ladder import FROZEN as SHARE
        from surefoot.compare.ladder import rung_recipe
        from surefoot.compare.processes import Parent
        from surefoot.runs import api
        from surefoot.store.checkpoint import latest_checkpoint

        top = rung_recipe(TASKS[short], 5, {"seed": seed, "engine": "compiled", "traces": {"rows": 0}})
        cell = cells.Cell("frozen", top, until=round(SHARE * top.steps))
        cells.train_cell(folder, cell, 0, Parent(silent, print))
        checkpoint = latest_checkpoint(folder / cell.name / "checkpoints")
        assert checkpoint is not None
        return {"seed": seed, "frozen_at": int(checkpoint.name), **noise_at(api.load(checkpoint), short, seed, range(4))}

    name = f"{short}-noise-{seed}"
    return Cell(name, work, LEDGER / "E7" / name)


def noise_at(agent: Any, short: str, seed: int, rungs: Any) -> Result:
    """The relative variance of the rungs' gradients at an agent's θ, with its critic."""
    from surefoot.compare.ladder import rung_recipe, sample_gradients
    from surefoot.compare.statistics import noise_of

    objectives = [rung_recipe(TASKS[short], rung, {}).objective for rung in rungs]
    samples = sample_gradients(agent, objectives, BATCHES, agent.recipe.batch_size, seed)
    noises = noise_of(samples.gradients)
    kept = {RUNGS[rung]: {"variance": of.variance, "relative": of.relative} for rung, of in zip(rungs, noises, strict=True)}
    return {"engine": "compiled", "batches": BATCHES, "noise": kept}


def critic_cell(short: str, seed: int) -> Cell:
    """Noise at the end of A2C: with the critic that it learned in one update per batch, and with one fitted to convergence."""

    def work(folder: Path) -> Result:
        from surefoot.compare.ladder import rung_recipe
        from surefoot.runs import api

        changes = {"seed": seed, "engine": "compiled", "evaluation": {"episodes": 0}, "traces": {"rows": 0}}
        trained(rung_recipe(TASKS[short], 3, changes), folder)
        agent = api.load(folder / f"run-seed{seed}")
        learned = noise_at(agent, short, seed, (1, 2))
        fit_critic(agent, seed)
        fitted = noise_at(agent, short, seed, (1, 2))
        return {"seed": seed, "engine": "compiled", "learned": learned["noise"], "fitted": fitted["noise"]}

    name = f"{short}-critic-{seed}"
    return Cell(name, work, LEDGER / "E7" / name)


def fit_critic(agent: Any, seed: int) -> None:
    """Fit an agent's critic to the returns of ``BATCHES`` other batches of its policy, which stays as it is."""
    import torch

    from surefoot.compare.ladder import rung_recipe
    from surefoot.control.collect import ControlCollector
    from surefoot.control.environments import make_environments
    from surefoot.core.credit import assign_credit
    from surefoot.core.minibatches import rows_of
    from surefoot.core.rollout import LearnerState
    from surefoot.core.seeding import derived_seed

    own, size = derived_seed(seed, "fitted critic"), agent.recipe.batch_size
    whole = rung_recipe(agent.recipe.task, 0, {}).objective
    environments = make_environments(agent.recipe.task, agent.recipe.environment, 1, own)
    collector = ControlCollector(environments, agent, None, at_least=size)
    state, frozen = LearnerState.seeded(own, size * BATCHES), {k: v.clone() for k, v in agent.state_dict().items()}
    inputs, returns = [], []
    for _ in range(BATCHES):
        rollout = collector.collect(state)
        agent.load_state_dict(frozen)  # the collector updated the normalisers
        batch = rows_of(rollout, assign_credit(rollout, whole))
        inputs.append(batch.inputs["observation"] if "observation" in batch.inputs else next(iter(batch.inputs.values())))
        returns.append(batch.returns)
    environments.close()
    observations, targets = torch.cat(inputs), torch.cat(returns)
    key = "observation" if "observation" in batch.inputs else next(iter(batch.inputs))
    parameters = list(agent.policy.critic_parameters())
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    draw = torch.Generator().manual_seed(own)
    for _ in range(FIT_STEPS):
        rows = torch.randint(len(targets), (256,), generator=draw)
        loss = (agent.policy.values({key: observations[rows]}) - targets[rows]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# ---- bounds -----------------------------------------------------------------------------------------------------------


def rung_scores(results: Results, short: str, rung: int, key: str) -> list[float]:
    """A score of a rung's finished seeds."""
    found = (results.get(f"{short}-{rung}-{seed}") for seed in SEEDS)
    return [result[key] for result in found if result is not None]


def step_up(rung: int) -> Any:
    """That a rung learns more than the one below, on each task."""

    def bounds(results: Results) -> list[Bound]:
        return [
            difference(
                f"{RUNGS[rung]} minus {RUNGS[rung - 1]}, {short}",
                [rung_scores(results, short, rung, "average_return")],
                [rung_scores(results, short, rung - 1, "average_return")],
            )
            for short in TASKS
            if rung_scores(results, short, rung, "average_return") and rung_scores(results, short, rung - 1, "average_return")
        ]

    return bounds


def variances(results: Results, ours: str, base: str) -> list[Bound]:
    """The share of the gradient's variance that is left, at each frozen θ."""
    bounds = []
    for short in TASKS:
        found = [results[f"{short}-noise-{seed}"]["noise"] for seed in FROZEN if f"{short}-noise-{seed}" in results]
        if found:
            shares = [noise[ours]["variance"] / noise[base]["variance"] for noise in found]
            bounds.append(single(f"variance of {ours} / {base}, {short}", shares, 1.0, above=False))
    return bounds


def critics(results: Results) -> list[Bound]:
    bounds = []
    for short in TASKS:
        found = [results[f"{short}-critic-{seed}"] for seed in FROZEN if f"{short}-critic-{seed}" in results]
        for kind in ("learned", "fitted") if found else ():
            shares = [run[kind]["ACTOR_CRITIC"]["variance"] / run[kind]["REINFORCE_BASELINE"]["variance"] for run in found]
            bounds.append(single(f"variance with the critic / with the mean, {short}, {kind}", shares, 1.0, above=False))
    return bounds


def safe(results: Results) -> list[Bound]:
    """Final returns and largest ratios with the clip and without, on each task."""
    bounds = []
    for short in TASKS:
        ours, theirs = (rung_scores(results, short, rung, "last_100_mean") for rung in (5, 4))
        if ours and theirs:
            bounds.append(difference(f"final return with the clip minus without, {short}", [ours], [theirs]))
            above = [rung_scores(results, short, rung, "ratio_max") for rung in (5, 4)]
            bounds.append(difference(f"largest ratio, {short}", [above[0]], [above[1]], above=False))
    return bounds


def named(*parts: str) -> Any:
    """Whether a cell belongs to one of these rungs or kinds."""
    return lambda name: name.split("-")[1] in parts


ADDS = {
    1: ("Subtracting the mean return", "Williams 1992; Sutton and Barto 2018, section 13.4"),
    2: ("Subtracting a learned V(s)", "Sutton and Barto 2018, sections 13.4 and 13.5"),
    3: ("GAE with λ = 0.95 in place of λ = 1", "Schulman et al. 2016 (arXiv 1506.02438), section 6"),
    4: ("Using each batch for several epochs", "PPO paper, section 1"),
    5: ("Clipping the ratio", "PPO paper, section 3 and table 1"),
}
CELLS = [
    *(noise_cell(short, seed) for short in TASKS for seed in FROZEN),
    *(rung_cell(short, rung, seed) for short in TASKS for seed in SEEDS for rung in (5, 4, 3, 2, 1, 0)),
    *(critic_cell(short, seed) for short in TASKS for seed in FROZEN),
]
REASONS = {
    2: {
        "refuted": "The critic gets one update per batch, and at the end of A2C the gradient varied more with it than with "
        "the mean return (E7.7); batches differ too."
    },
}
"""why a rung helps or does not, by rung"""
E7 = Experiment(
    key="E7",
    setting="task-rung",
    title="The ladder from REINFORCE to PPO",
    protocol=(
        "`surefoot ladder` on CartPole-v1 (100,000 steps) and Acrobot-v1 (200,000), seeds 1 to 10, on which no preset was "
        "chosen: network, optimizer, γ and reuse are the preset's, λ = 0.95, ε is constant, "
        "advantages are not normalised. The first two learn from whole episodes, the others from 8 environments × 32 steps "
        "(CartPole) or 128 (Acrobot). The score is the average return over the run. Variance: 100 batches of whole episodes at "
        "θ of PPO_CLIP after a tenth of the budget, seeds 101 to 103, and at the end of A2C, with its own critic and with one "
        "fitted for 2,000 steps to 100 other batches."
    ),
    cells={cell.name: cell for cell in CELLS},
    core_hours=1.5,
    claims=(
        *(
            Claim(
                f"E7.{rung}",
                f"{ADDS[rung][0]} makes learning better.",
                ADDS[rung][1],
                f"the average return over the run of {RUNGS[rung]} is above that of {RUNGS[rung - 1]} on both tasks",
                step_up(rung),
                REASONS.get(rung, {}),
                needs=named(str(rung), str(rung - 1)),
            )
            for rung in ADDS
        ),
        Claim(
            "E7.6",
            "A baseline, a critic and GAE each lower the variance of the gradient.",
            "Schulman et al. 2016 (arXiv 1506.02438), sections 2 and 3",
            "at three θ of each task the variance falls from each of the first four rungs to the next",
            lambda results: [
                bound for low, high in zip(RUNGS[1:4], RUNGS[:3], strict=True) for bound in variances(results, low, high)
            ],
            {
                "confirmed": "All rungs were measured on the same batches, with a critic that PPO had fitted.",
                "refuted": "At least one step of the ladder adds noise at these θ.",
            },
            named("noise"),
        ),
        Claim(
            "E7.7",
            "A learned critic is a better baseline than the mean return.",
            "Sutton and Barto 2018, section 13.4",
            "at the end of A2C the variance with the critic is below that with the mean return, for the critic that "
            "A2C learned and for a fitted one",
            critics,
            {
                "confirmed": "Even one update per batch fits V well enough.",
                "refuted": "A fitted critic lowers it; A2C's own, with one update per batch, raises it.",
            },
            named("critic"),
        ),
        Claim(
            "E7.8",
            "The clip makes reuse safe.",
            "PPO paper, section 3",
            "with the clip the final return is higher and the largest ratio of a run smaller than without it, on both tasks",
            safe,
            {
                "confirmed": "Without the clip single actions become many times as likely within one batch, and runs fall "
                "back.",
                "refuted": "The ratios run away without the clip, but on a task of this size returns need not suffer.",
            },
            named("4", "5"),
        ),
    ),
)
EXPERIMENTS = (E7,)
