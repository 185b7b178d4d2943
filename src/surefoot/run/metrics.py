"""Every metric by name: what it means, and when to worry. Display, documentation and findings read this one table."""

from dataclasses import dataclass

from surefoot.rollout import Metrics


@dataclass(frozen=True)
class Metric:
    """One key of metrics.jsonl."""

    meaning: str
    low: float | None = None
    """unhealthy below"""
    high: float | None = None
    """unhealthy above"""
    why_low: str = ""
    why_high: str = ""

    def complaint(self, value: float | None) -> str | None:
        """Why a value is unhealthy, in a few words; None for a healthy or undefined one."""
        if value is None:
            return None
        if self.low is not None and value < self.low:
            return self.why_low
        if self.high is not None and value > self.high:
            return self.why_high
        return None


METRICS: dict[str, Metric] = {
    "iteration": Metric("how many times collect -> credit -> update has run"),
    "steps": Metric("environment steps used so far, of the budget"),
    "updates": Metric("optimizer steps taken so far"),
    "episode_return": Metric("mean undiscounted return of the last 100 training episodes (actions sampled)"),
    "episode_length": Metric("mean length of those episodes, in steps"),
    "episodes": Metric("training episodes finished so far"),
    "evaluation_return": Metric("mean return of the greedy evaluation episodes, when there was one this iteration"),
    "policy_loss": Metric(
        "−J: minus the mean surrogate. Near 0 by construction at ratio 1; its level says nothing about learning"
    ),
    "value_loss": Metric("mean (V − R̂)², in squared units of the (normalised) return"),
    "entropy": Metric("mean entropy of the policy in nats; of a density for Box actions, so it may be negative"),
    "kl": Metric(
        "mean KL(π_old‖π_θ) over the minibatches, estimated by k3 from samples; 0 would mean nothing moved",
        high=0.1,
        why_high="the policy moves far per batch: lower the learning rate or epochs, or set target_kl",
    ),
    "kl_exact": Metric(
        "the same from the distributions' parameters; only with kl_estimator = exact",
        high=0.1,
        why_high="the policy moves far per batch: lower the learning rate or epochs, or set target_kl",
    ),
    "penalty_kl": Metric(
        "the KL(π_old‖π_θ) that a penalty weighs, mean over the minibatches; exact where the distributions are known"
    ),
    "kl_after": Metric(
        "mean KL(π_old‖π_θ) over the whole batch when its updates are over; exact where the distributions are known. Only with "
        "a KL penalty or constraint",
        high=0.1,
        why_high="the penalty does not hold the policy: raise beta, or lower the learning rate or epochs",
    ),
    "beta": Metric("weight of the KL penalty on this batch; where it is adapted, it is halved or doubled after the batch"),
    "step_taken": Metric(
        "TRPO: 1 when the policy moved. 0 with no tries: the gradient or the KL's curvature was zero; 0 after tries: no length "
        "improved the surrogate within δ, and θ was restored"
    ),
    "line_search_tries": Metric("TRPO: lengths of the step that were tried; 1 when the full one was taken"),
    "surrogate_improvement": Metric("TRPO: how much the step raised the surrogate over the whole batch; 0 when none was taken"),
    "ratio_outside": Metric(
        "share of samples with |ρ − 1| > ε, whichever way the gradient goes",
        high=0.5,
        why_high="most ratios have left the clip band: lower the learning rate or epochs",
    ),
    "clip_active": Metric(
        "share of samples where the clipped branch won, so that no gradient flows",
        high=0.4,
        why_high="the clip silences much of the batch: lower the learning rate or epochs",
    ),
    "ratio_max": Metric(
        "the largest ρ of the iteration",
        high=10.0,
        why_high="a ratio ran away: lower the learning rate, or set dual_clip",
    ),
    "ratio_min": Metric("the smallest ρ of the iteration"),
    "ratio_at_start": Metric(
        "the ρ furthest from 1 in the first minibatch, before anything moved; 1 up to rounding",
        low=0.9999,
        high=1.0001,
        why_low="training scores actions differently from the rollout",
        why_high="training scores actions differently from the rollout",
    ),
    "reference_loss": Metric("mean KL to the reference as the loss sees it; only with reference_coefficient"),
    "explained_variance": Metric(
        "1 − Var(R̂ − V)/Var(R̂): 1 is a perfect critic, 0 a constant one; null where returns are constant",
        low=-0.5,
        why_low="the critic predicts worse than a constant: normal in the first iterations, else fit it longer or faster",
    ),
    "advantage_mean": Metric("mean advantage before normalisation"),
    "advantage_std": Metric("standard deviation of the advantages before normalisation"),
    "gradient_norm_policy": Metric("mean gradient norm before clipping (all parameters, or all but a separate critic's)"),
    "gradient_norm_critic": Metric("the same for a critic with its own optimizer"),
    "learning_rate": Metric(
        "of the policy's optimizer, after its schedule; of the critic's under TRPO, where the policy has none"
    ),
    "epochs": Metric("passes over the batch that were finished; of the critic's fit under TRPO"),
    "stopped_early": Metric("1 when target_kl ended the epochs"),
    "seconds_collecting": Metric("time spent acting and scoring"),
    "seconds_learning": Metric("time spent on credit and updates"),
    "steps_per_second": Metric("environment steps per second of the iteration"),
}

TIMING = ("seconds_collecting", "seconds_learning", "steps_per_second")
"""the keys that differ between two otherwise identical runs"""


def complaints(metrics: Metrics) -> dict[str, str]:
    """The unhealthy ones among some metrics: name -> why."""
    found = {name: METRICS[name].complaint(value) for name, value in metrics.items() if name in METRICS}
    return {name: why for name, why in found.items() if why}
