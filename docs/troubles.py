"""What a person sees when training goes wrong, each by the finding that explains it: docs/generate.py writes a page of them.

A symptom has a heading in their words, a page to read more on, and made-up runs in which the finding holds.
"""

from typing import Any


def rows(count: int, **values: Any) -> list[dict[str, Any]]:
    """Rows of a run's metrics, each value a number or a function of the iteration."""
    columns = values.items()
    return [
        {"iteration": i, "steps": 100 * i} | {name: value(i) if callable(value) else value for name, value in columns}
        for i in range(1, count + 1)
    ]


WAVE = {"episode_return": lambda i: 20 + i % 2}
SURE = {"reward": lambda i: i / 100}
Symptoms = dict[str, tuple[str, str, list[list[dict[str, Any] | None] | dict[str, str] | str]]]
"""name of a finding -> heading, page, runs: their rows, the errors of their trackers by name, or what is wrong with files"""
TROUBLES: dict[str, Symptoms] = {
    "Nothing is learned": {
        "return_flat": (
            "What is earned does not rise",
            "how-to/read-the-metrics.md",
            [rows(100, kl=0.01, **WAVE), rows(100, kl=1e-9, **WAVE), rows(100, kl=0.01, episode_return=-200.0)],
        ),
        "no_reward_signal": (
            "Every answer earns the same",
            "how-to/train-on-a-verifier.md",
            [
                rows(100, reward=0.0, groups_without_signal=1.0),
                rows(100, reward=lambda i: min(1.0, i / 80), groups_without_signal=lambda i: float(i >= 80)),
            ],
        ),
        "observation_constant": (
            "The observation never changes",
            "how-to/observations-and-actions.md#spaces",
            [rows(100, observations_constant=1.0, **SURE), rows(100, observations_constant=2.0, **SURE)],
        ),
        "few_groups_with_signal": (
            "Most groups of answers earn the same",
            "how-to/groups-of-answers.md",
            [rows(100, groups_without_signal=0.9, **SURE)],
        ),
        "clip_idle": (
            "The clip never acts",
            "how-to/clip-table.md",
            [rows(100, clip_active=0.0, ratio_outside=0.0, kl=1e-5, **SURE)],
        ),
        "preferences_at_chance": (
            "A reward model or DPO learns no preference",
            "how-to/align-your-own-model.md#2-a-reward-model",
            [rows(100, policy_loss=0.69, held_out_loss=0.693, held_out_accuracy=0.51)],
        ),
        "loss_flat": (
            "The loss of SFT does not fall",
            "how-to/align-your-own-model.md#1-sft",
            [rows(100, policy_loss=lambda i: 2 + 0.01 * (i % 2))],
        ),
        "unusable_start": (
            "Answers are random letters",
            "how-to/align-your-own-model.md#1-sft",
            [rows(100, entropy=4.6, reward=lambda i: i / 100), rows(100, policy_loss=lambda i: 7 - i / 100)],
        ),
        "no_step_taken": ("TRPO hardly takes a step", "how-to/trust-regions.md", [rows(100, step_taken=0.2, **SURE)]),
        "passes_end_at_once": (
            "`target_kl` stops almost at once",
            "how-to/read-the-metrics.md",
            [rows(100, stopped_early=1.0, epochs=0.05, **SURE)],
        ),
    },
    "It gets worse": {
        "return_collapsed": (
            "What was gained is lost again",
            "how-to/read-the-metrics.md",
            [rows(100, episode_return=lambda i: 80.0 + i % 2 if 20 < i < 70 else 20.0 + i % 2, kl=0.02)],
        ),
        "chosen_less_likely": (
            "After DPO, the model writes worse than before",
            "how-to/align-your-own-model.md#dpo-from-pairs-without-a-reward-model",
            [
                rows(
                    100,
                    held_out_accuracy=0.8,
                    held_out_margin=lambda i: i / 50,
                    held_out_chosen_moved=lambda i: -i / 2.0,
                )
            ],
        ),
        "loss_rose": (
            "The held-out loss rises",
            "how-to/align-your-own-model.md#1-sft",
            [
                rows(100, policy_loss=lambda i: 2 / i, held_out_loss=lambda i: 1 + abs(i - 20) / 50),
                rows(100, policy_loss=lambda i: 1 + abs(i - 20) / 20),
            ],
        ),
        "entropy_collapsed": (
            "The policy always does the same",
            "how-to/read-the-metrics.md",
            [rows(100, episode_return=20.0, entropy=lambda i: max(0.01, 0.69 - 0.03 * i), kl=0.02)],
        ),
        "kl_runaway": (
            "Each batch moves the policy far",
            "how-to/trust-regions.md",
            [rows(100, kl=0.8, ratio_outside=0.6, **SURE)],
        ),
        "clip_saturated": (
            "The clip silences much of the batch",
            "how-to/clip-table.md",
            [rows(100, clip_active=0.4, kl=0.05, **SURE)],
        ),
        "critic_misleads": (
            "Explained variance is negative",
            "how-to/train-on-a-verifier.md#does-the-critic-know",
            [rows(100, value_loss=1.0, explained_variance=-1.5, **SURE)],
        ),
    },
    "It learns the wrong thing": {
        "reward_hacked": (
            "The reward rises and the answers get worse",
            "how-to/align-your-own-model.md#3-ppo",
            [rows(100, gold=lambda i: 1 - i / 50, **SURE)],
        ),
        "left_reference": (
            "The model is far from where it began",
            "how-to/align-your-own-model.md#3-ppo",
            [rows(100, kl_reference=lambda i: i / 100, kl_reference_response=lambda i: float(i), **SURE)],
        ),
        "responses_cut": (
            "Answers never end",
            "how-to/write-a-reward.md",
            [rows(100, eos_rate=0.0, **SURE), rows(100, eos_rate=0.3, **SURE)],
        ),
        "special_tokens_dropped": (
            "The reward never sees `<answer>`",
            "how-to/write-a-reward.md",
            [rows(100, special_tokens=0.9, **SURE)],
        ),
    },
    "A tracker lacks rows": {
        "tracker_failed": (
            "W&B or another tracker stopped",
            "how-to/log-to-trackers.md#when-a-tracker-fails",
            [{"wandb": "CommError: API request failed: connection refused"}],
        ),
    },
    "It does not resume": {
        "checkpoints_lost": (
            "The checkpoints are not there",
            "how-to/resume.md#further-details",
            ["there is no checkpoint, but there is best/8192"],
        ),
        "files_damaged": (
            "A file is not what the run wrote",
            "how-to/resume.md#damaged-files",
            ["model: model.safetensors does not match its SHA-256 (changed or damaged)"],
        ),
    },
    "A number looks wrong": {
        "wrong_start": (
            "The ratio is not 1 before the first step",
            "how-to/your-own-network.md",
            [rows(100, ratio_at_start=1.02, **SURE)],
        ),
        "sampler_differs": (
            "The sampler has other probabilities than the trainer",
            "how-to/sample-with-vllm.md",
            [rows(100, sampler_kl=0.2, **SURE)],
        ),
        "negative_kl": (
            "A KL is negative",
            "math.md#kl-divergence",
            [rows(100, kl_reference=-0.02, **SURE), rows(100, kl_reference=lambda i: -0.002 if i == 9 else 0.05, **SURE)],
        ),
        "normaliser_saturated": (
            "Normalised numbers are cut off",
            "math.md#normalisation",
            [rows(100, observations_clipped=0.2, **SURE)],
        ),
        "observation_outside": (
            "Observations are outside their space",
            "how-to/your-own-environment.md#faulty-environments",
            [rows(100, observations_outside=0.3, **SURE)],
        ),
        "metrics_damaged": (
            "`metrics.jsonl` is damaged",
            "how-to/resume.md",
            [[*rows(50, **SURE), None]],
        ),
    },
}
