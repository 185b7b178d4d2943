"""Every metric by name: its meaning and its healthy range. Display, documentation and findings use this table.

This module imports no torch.
"""

from collections.abc import Iterable
from dataclasses import dataclass


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


METRICS: dict[str, Metric] = {
    "iteration": Metric("how many times collect -> credit -> update has run"),
    "steps": Metric("environment steps, or rows or responses, used so far, of the budget"),
    "updates": Metric("optimizer steps taken so far"),
    "episode_return": Metric(
        "mean undiscounted return of the last 100 training episodes (actions sampled); of several agents also that of each, "
        "`episode_return_NAME`"
    ),
    "episode_length": Metric("mean length of those episodes, in steps"),
    "episode_is_success": Metric("mean of `is_success` in the last info of those episodes; other numbers with rollout.info"),
    "episode_success": Metric("the same of `success`"),
    "episodes": Metric("training episodes finished so far"),
    "labels_trained": Metric("labelled pairs of clips that the reward models were trained on; only with preferences"),
    "label_accuracy": Metric(
        "share of the newest of these labels that the reward models predicted before they were trained on them. The models "
        "disagreed most on those pairs, so near 0.5 is no alarm"
    ),
    "truncations_estimated": Metric(
        "share of the truncations whose final observation a tensor environment did not return: the value of the observation "
        "before stands in; absent if all were returned"
    ),
    "observations_constant": Metric("parts of the observation that were the same in all steps of the iteration"),
    "observations_outside": Metric(
        "share of the steps whose observation has a number outside the bounds of its space; only where there are bounds"
    ),
    "observations_clipped": Metric(
        "share of the normalised numbers of observations that are at ±normalise.clip; only where they are normalised",
        high=0.05,
        why_high="the normaliser cuts much of what is seen: usual in the first iteration, else raise normalise.clip, "
        "or scale observations in the environment",
    ),
    "rewards_clipped": Metric(
        "share of the normalised rewards that are at ±normalise.clip; only where they are normalised",
        high=0.05,
        why_high="the normaliser cuts many rewards: usual in the first iteration, else raise normalise.clip, "
        "or scale rewards in the environment",
    ),
    "actions_clipped": Metric(
        "share of the sampled numbers of Box actions that are clipped to their bounds; near 1 from the start on, see "
        "normalise.actions"
    ),
    "evaluation_return": Metric("mean return of the greedy evaluation episodes, when there was one this iteration"),
    "evaluation_is_success": Metric("mean of `is_success` in the last info of those episodes; other numbers with rollout.info"),
    "evaluation_success": Metric("the same of `success`"),
    "reward": Metric("mean score of the responses of this iteration, missing ends treated, before the KL is taken off"),
    "gold": Metric(
        "mean score by the gold function (the true goal), never trained on. Reward up and gold down is reward hacking"
    ),
    "score_std": Metric("standard deviation of those scores; 0 means that nothing can be learned from them"),
    "kl_reference": Metric("mean log π − log π_ref per token, on samples of π: KL(π‖π_ref)"),
    "kl_reference_response": Metric(
        "the same summed over each response, in nats",
        high=50.0,
        why_high="the policy has left the reference far behind: raise reference.beta, or lower the learning rate",
    ),
    "reference_beta": Metric("β of the KL in the reward; moves where reference.target is set"),
    "response_length": Metric("mean tokens per response, EOS included"),
    "eos_rate": Metric("share of responses that ended by themselves, and were not cut by the length limit"),
    "special_tokens": Metric(
        "share of responses with special tokens besides their end, which rewards don't get; not with reward.special_tokens"
    ),
    "turns": Metric("mean turns of the model in a conversation, where an environment answers"),
    "tool_calls": Metric("mean calls of tools in a conversation"),
    "tool_calls_failed": Metric("share of the calls whose result is an error: of the tool, or an unknown name or argument"),
    "tool_calls_malformed": Metric("share of the turns with a call that can't be read; such a turn is a final answer"),
    "distinct_2": Metric("different bigrams / all bigrams of the iteration's responses; a fall to half is mode collapse"),
    "repeated": Metric(
        "share of responses that are equal to another one of the iteration",
        high=0.5,
        why_high="many responses are equal: as it should be where an answer has one truth or prompts are few; else mode "
        "collapse, against which reference.beta or the entropy bonus is raised",
    ),
    "groups_without_signal": Metric(
        "share of the sampled prompts whose responses all earn the same (missing ends and length counted), or of which fewer "
        "than two have a score: comparing them teaches nothing",
        high=0.8,
        why_high="most prompts are too easy or too hard for the model: use others, more samples, or sampling.rounds",
    ),
    "sampling_rounds": Metric("rounds of prompts that were sampled to fill this iteration's batch; only with sampling.rounds"),
    "overlong_penalty": Metric("mean soft penalty on length; part of the reward"),
    "without_score": Metric(
        "share of responses for which a reward function gave no number, or whose environment failed; they are masked"
    ),
    "sampler_gap": Metric(
        "largest difference between the sampler's and the trainer's log-probability of a token; not measured with "
        "sampling.old_log_probs = update",
        high=1e-2,
        why_high="the sampler and the trainer disagree about the policy; with precision = bfloat16 some is normal",
    ),
    "sampler_kl": Metric(
        "mean KL(π_b‖π_old) per token, by k3 from samples, where π_b is the sampler's policy; only where its arithmetic is not "
        "the trainer's: bfloat16, or an engine of another package",
        high=0.01,
        why_high="the sampler is not the trained policy: look for stale weights or low precision in it, or set importance_cap",
    ),
    "sampler_lag": Metric("optimizer steps between the weights that sampled and those that are trained, with sampling.ahead"),
    "responses_missing": Metric(
        "share of responses that the sampling server did not return; they are masked",
        high=0.05,
        why_high="the server fails: read its log, and lower server.at_once",
    ),
    "held_out_loss": Metric(
        "mean −log π per token on held-out demonstrations, or per held-out pair or labelled answer; nats. KTO: its loss, "
        "without a unit"
    ),
    "held_out_accuracy": Metric(
        "share of held-out pairs in which the chosen answer has the higher score; in DPO by the implicit reward β·(log π − "
        "log π_ref), where a draw counts half. Labelled answers: in reward models the share with the label's sign, in KTO "
        "that of all pairs of a good and a bad answer"
    ),
    "held_out_margin": Metric(
        "DPO: mean implicit reward of the chosen answers of held-out pairs less that of the rejected; KTO: of the good answers "
        "less that of the bad"
    ),
    "held_out_chosen_log_prob": Metric(
        "DPO: mean Σ log π of the chosen (KTO: good) held-out answers, in nats. If it falls faster than the margin grows, "
        "the model moves to answers that are in no pair: raise reference.beta"
    ),
    "held_out_rejected_log_prob": Metric("DPO: mean Σ log π of the rejected (KTO: bad) held-out answers, in nats"),
    "held_out_chosen_moved": Metric(
        "DPO: mean log π − log π_ref of the chosen (KTO: good) held-out answers, in nats. Below 0 they are less likely than "
        "under the reference"
    ),
    "held_out_reward": Metric("mean score of sampled answers to held-out prompts, when there was an evaluation"),
    "held_out_gold": Metric("the same by the gold function"),
    "held_out_log_likelihood": Metric(
        "mean log π per token, in nats, of the demonstrations in evaluation.demonstrations, at temperature 1. A fall is "
        "what the reward costs in capability: tenths are usual, more than one means that language is lost"
    ),
    "held_out_kl": Metric("nats per response that these answers are away from the reference"),
    "held_out_length": Metric("mean tokens of these answers"),
    "held_out_eos_rate": Metric("share of these answers that ended by themselves"),
    "held_out_turns": Metric("mean turns of the model in the conversations about held-out rows"),
    "held_out_distinct_2": Metric("different bigrams / all bigrams of these answers"),
    "data_epochs": Metric("passes over the training rows so far"),
    "kto_baseline": Metric("KTO: z₀, the mean log π − log π_ref of answers to other prompts, at least 0, in nats"),
    "tokens": Metric("trained tokens of the batch"),
    "seconds_sampling": Metric(
        "time spent on sampling responses; part of seconds_collecting, unless sampling.ahead lets the learner work meanwhile"
    ),
    "seconds_scoring": Metric("time spent in the reward; part of seconds_collecting"),
    "tokens_per_second": Metric("sampled tokens per second of sampling"),
    "policy_loss": Metric(
        "−J: minus the mean surrogate. Near 0 by construction at ratio 1; its level does not measure learning. In SFT and "
        "reward models it is the cross-entropy"
    ),
    "value_loss": Metric("mean (V − R̂)², in squared units of the (normalised) return"),
    "entropy": Metric("mean entropy of the policy per action, in nats; of a density for Box actions, so it may be negative"),
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
        "the KL(π_old‖π_θ) that a penalty weighs, mean over the minibatches; exact where the distributions are known. KL_COV: "
        "0 at the samples that its penalty does not apply to"
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
    "weight_clipped": Metric(
        "share of samples whose weight is bounded at objective.trust_region.max_weight; CISPO only",
        high=0.4,
        why_high="the bound shortens much of the batch: lower the learning rate or epochs",
    ),
    "left_out": Metric(
        "share of samples in responses that moved further than drop_above_kl; only where it is set",
        high=0.4,
        why_high="much of the batch is stale: lower the learning rate or epochs, or raise drop_above_kl",
    ),
    "importance_weight": Metric(
        "mean weight π_old / π_b of a sample, after importance_cap",
        low=0.9,
        high=1.1,
        why_low="the cap or the mask takes much of the batch: see sampler_kl",
        why_high="the sampler's policy is not the trained one: see sampler_kl",
    ),
    "importance_capped": Metric(
        "share of samples whose π_old / π_b is above importance_cap",
        high=0.1,
        why_high="the sampler's policy is not the trained one: see sampler_kl",
    ),
    "ratio_max": Metric(
        "the largest ρ of the iteration", high=10.0, why_high="a ratio ran away: lower the learning rate, or set dual_clip"
    ),
    "ratio_min": Metric("the smallest ρ of the iteration"),
    "ratio_at_start": Metric(
        "the ρ furthest from 1 in the first minibatch, before anything moved; 1 up to rounding",
        low=0.9999,
        high=1.0001,
        why_low="training scores actions differently from the rollout; slightly, and with a small σ, it is rounding",
        why_high="training scores actions differently from the rollout; slightly, and with a small σ, it is rounding",
    ),
    "preference_loss": Metric(
        "ONLINE_DPO: mean DPO loss of the pairs of the iteration, before its update; below 0.69 if the implicit rewards "
        "rank new answers as the reward does"
    ),
    "preference_accuracy": Metric(
        "ONLINE_DPO: share of the pairs whose better answer has the higher implicit reward, β·(log π − log π_ref), before the "
        "update"
    ),
    "reference_loss": Metric("mean KL to the reference as the loss sees it; only with reference_coefficient"),
    "router_loss": Metric(
        "load-balancing loss of a mixture of experts, before its weight: the experts per token where all get alike, more where "
        "some get more; only with router_coefficient"
    ),
    "sft_loss": Metric(
        "mean −log π per token of the demonstrations that are mixed into the updates, before its weight; only with "
        "mixing.sft_coefficient"
    ),
    "explained_variance": Metric(
        "1 − Var(R̂ − V)/Var(R̂): 1 is a perfect critic, 0 a constant one; null where returns are constant, and "
        "meaningless where they nearly are",
        low=-0.5,
        why_low="the critic predicts worse than a constant: normal at first and without a value loss, meaningless where "
        "returns are nearly constant, else fit it longer or faster",
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
    "steps_per_second": Metric("steps per second of the iteration"),
    "cpu_cores": Metric(
        "CPU cores that the run and its worker processes used on average since the iteration before, with evaluations and "
        "checkpoints; 1 is one core"
    ),
    "memory_gb": Metric(
        "memory of the run and its worker processes at the end of the iteration, in 10⁹ bytes; what they share counts for each"
    ),
    "gpu_memory_gb": Metric("memory that torch holds on the GPU of the run, in 10⁹ bytes; only if device is a GPU"),
    "gpu_percent": Metric("share of the time in which that GPU computes, in percent; only with the package nvidia-ml-py"),
}

SYSTEM = ("cpu_cores", "memory_gb", "gpu_memory_gb", "gpu_percent")
"""the run's use of the machine, measured by ``MachineUse``"""
TIMING = (
    "seconds_collecting",
    "seconds_learning",
    "seconds_sampling",
    "seconds_scoring",
    "steps_per_second",
    "tokens_per_second",
    *SYSTEM,
)
"""the keys that differ between two otherwise identical runs"""


SHOWN = {
    "episode_return": ("return, last 100", "{:,.1f}"),
    "evaluation_return": ("return, greedy", "{:,.1f}"),
    "episode_length": ("episode length", "{:,.0f}"),
    "episode_is_success": ("success, last 100", "{:.1%}"),
    "evaluation_is_success": ("success, greedy", "{:.1%}"),
    "episode_success": ("success, last 100", "{:.1%}"),
    "evaluation_success": ("success, greedy", "{:.1%}"),
    "reward": ("reward", "{:+.3f}"),
    "gold": ("gold", "{:+.3f}"),
    "held_out_reward": ("reward, held out", "{:+.3f}"),
    "held_out_gold": ("gold, held out", "{:+.3f}"),
    "held_out_loss": ("loss, held out", "{:.4f}"),
    "held_out_log_likelihood": ("log π, held out", "{:+.3f}"),
    "held_out_accuracy": ("accuracy, held out", "{:.1%}"),
    "kl_reference_response": ("KL to reference, nats", "{:.2f}"),
    "response_length": ("response length", "{:.1f}"),
    "eos_rate": ("ended by EOS", "{:.1%}"),
    "distinct_2": ("distinct bigrams", "{:.2f}"),
    "data_epochs": ("epochs of the data", "{:.2f}"),
    "tokens_per_second": ("tokens/s, sampling", "{:,.0f}"),
    "steps_per_second": ("steps/s", "{:,.0f}"),
    "policy_loss": ("policy loss", "{:+.4f}"),
    "sft_loss": ("loss of demonstrations", "{:.4f}"),
    "value_loss": ("value loss", "{:.4f}"),
    "kl": ("KL to π_old (k3)", "{:.4f}"),
    "kl_after": ("KL after the batch", "{:.4f}"),
    "beta": ("β of the penalty", "{:.3g}"),
    "step_taken": ("step taken", "{:.0f}"),
    "ratio_outside": ("ratio outside clip", "{:.1%}"),
    "clip_active": ("clip active", "{:.1%}"),
    "explained_variance": ("explained variance", "{:+.2f}"),
    "entropy": ("entropy, nats", "{:.3f}"),
}
"""what a newcomer should look at while a run goes on: its label and its format"""


_TITLES = {"cpu_cores": "CPU cores", "memory_gb": "memory, GB", "gpu_memory_gb": "GPU memory, GB", "gpu_percent": "GPU load, %"}


def title_of(metric: str) -> str:
    """The name of a metric in words, for pages and tables."""
    return _TITLES.get(metric) or (SHOWN[metric][0] if metric in SHOWN else metric.replace("_", " "))


def shown(metrics: Iterable[str]) -> dict[str, tuple[str, str]]:
    """``SHOWN`` for a run with these metrics: the loss of SFT, reward models and DPO is no policy loss."""
    label, form = SHOWN["policy_loss"]
    online = {"episode_return", "reward"} & set(metrics)
    return SHOWN | {"policy_loss": (label if online else "loss", form)}
