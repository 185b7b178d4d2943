"""Every golden case, in float64 at its tolerance and in float32 at its own; and a proof that none was left out.

A case's function returns what Surefoot computes under the names of the case's ``expected``. Names that begin with
``buggy_``, ``wrong_`` or ``naive_`` are known mistakes: what is returned as ``correct`` must differ from them.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot import functional as F

CASES: dict[str, dict[str, Any]] = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "golden" / "golden.json").read_text(encoding="utf-8"))
}

OTHER_LIBRARIES = {
    "categorical_invalid_action_mask": "control/test_distributions.py",
    "multidiscrete": "control/test_distributions.py",
    "diag_gaussian": "control/test_distributions.py",
    "gymnasium_normalizereward_truncation_leak": "control/test_normalise.py",
    "lr_linear_anneal": "core/test_learner.py",
    "adam_torch_vs_tf_eps": "core/test_learner.py",
    "rm_gain_bias_normalisation": "language/test_golden_text.py",
}
"""cases that are not of pure functions: the file that tests what has them"""

LEFT_OUT = {
    "rlhf_nplus_trl_compat_score_after_eos": "a neighbour's variant: here the score sits on the last response token",
    "engstrom_ppo_paper_normalised_score": "a benchmark's score, not a formula of learning",
}
"""cases that no test covers, and why"""

KEYS_LEFT_OUT = {
    ("advantage_normalisation_ddof", "ddof1_torch"): "neighbours' unbiased variance; ours is biased",
    ("masked_mean_var_whiten", "var_unbiased"): "neighbours' unbiased variance; ours is biased",
    ("masked_mean_var_whiten", "whiten_unbiased_valid"): "neighbours' unbiased variance; ours is biased",
}

MISTAKES = ("buggy_", "wrong_", "naive_")

Inputs = dict[str, Any]
Make = Callable[[Any], Tensor]
CHECKS: dict[str, Callable[[Inputs, Make], dict[str, Any]]] = {}


def covers(*names: str) -> Callable[[Any], Any]:
    def register(check: Any) -> Any:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


def credit(inputs: Inputs, make: Make, lam: float | None = None, **changed: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, returns, successors) of a case, with zeros for the flags it does not name."""
    x = {**inputs, **changed}
    rewards, values = make(x["rewards"]), make(x["values"])
    terminated = make(x.get("terminated", [0] * len(rewards)))
    truncated = make(x.get("truncated", [0] * len(rewards)))
    mask = make(x["mask"]) if "mask" in x else None
    following = F.successor_values(
        values,
        make(x["last_value"]),
        truncated=truncated,
        final_values=make(x["final_values"]) if "final_values" in x else None,
        mask=mask,
    )
    advantages = F.gae(
        rewards,
        values,
        following,
        terminated=terminated,
        truncated=truncated,
        gamma=x["gamma"],
        lam=x["lam"] if lam is None else lam,
        mask=mask,
    )
    return advantages, advantages + values, following


def gradient(output: Tensor, source: Tensor) -> Tensor:
    return torch.autograd.grad(output.sum(), source, retain_graph=True)[0]


@covers(
    "gae_no_done",
    "gae_terminated_t1",
    "gae_truncated_t1",
    "gae_terminated_at_rollout_end",
    "gae_lambda0_is_td_error",
    "gae_lambda1_is_mc_minus_v",
    "gae_gamma0",
    "gae_single_step",
)
def check_gae(x: Inputs, make: Make) -> dict[str, Any]:
    advantages, returns, _ = credit(x, make)
    return {"advantages": advantages, "returns": returns}


@covers("gae_trap_truncation_as_termination")
def check_truncation(x: Inputs, make: Make) -> dict[str, Any]:
    return {"correct": credit(x, make)[0]}


@covers("nstep_advantages_lambda_weighted_equals_gae")
def check_n_step(x: Inputs, make: Make) -> dict[str, Any]:
    rewards, values = make(x["rewards"]), make(x["values"])
    following = F.successor_values(values, make(x["last_value"]))
    none, lam, steps = torch.zeros(len(rewards)), x["lam"], len(rewards)
    by_n = [
        F.n_step_advantages(rewards, values, following, terminated=none, truncated=none, gamma=x["gamma"], n=n)
        for n in range(1, steps + 1)
    ]
    table = [[by_n[n][t] for n in range(steps - t)] for t in range(steps)]
    mixed = [(1 - lam) * sum(lam**k * a for k, a in enumerate(row[:-1])) + lam ** (len(row) - 1) * row[-1] for row in table]
    assert torch.allclose(credit(x, make)[0], torch.stack(mixed))
    return {"nstep_advantages": table, "lambda_weighted": mixed}


@covers("discounted_returns_with_done")
def check_returns(x: Inputs, make: Make) -> dict[str, Any]:
    rewards, done = make(x["rewards"]), make(x["done"])
    following = make([math.nan] * (len(rewards) - 1) + [x["bootstrap"]])
    none = torch.zeros_like(done)
    return {"returns": F.discounted_returns(rewards, following, terminated=done, truncated=none, gamma=x["gamma"])}


@covers("reinforce_rtg_and_total")
def check_rewards_to_go(x: Inputs, make: Make) -> dict[str, Any]:
    rewards = make(x["rewards"])
    none = torch.zeros_like(rewards)
    to_go, undiscounted = (
        F.discounted_returns(rewards, none, terminated=none, truncated=none, gamma=gamma) for gamma in (x["gamma"], 1.0)
    )
    return {"reward_to_go": to_go, "total_return": to_go[0], "rtg_undiscounted": undiscounted}


@covers("sb3_reward_trick_equivalence")
def check_reward_trick(x: Inputs, make: Make) -> dict[str, Any]:
    truncated = x["truncated"]
    final = [x["final_value"] if cut else 0.0 for cut in truncated]
    ours, _, _ = credit(x, make, final_values=final)
    nothing = [0] * len(truncated)
    trick, _, _ = credit(x, make, rewards=x["rewards_augmented"], terminated=truncated, truncated=nothing)
    assert torch.allclose(ours, trick)
    return {"advantages": ours}


@covers("ppo_clip_table")
def check_clip_table(x: Inputs, make: Make) -> dict[str, Any]:
    ratio = make([row["ratio"] for row in x["rows"]]).requires_grad_()
    advantages = make([row["adv"] for row in x["rows"]])
    objective = F.clipped_surrogate(ratio, advantages, x["eps"])
    return {
        "objective": objective,
        "grad_wrt_ratio": gradient(objective, ratio),
        "clip_active": F.clip_active(ratio, advantages, x["eps"]),
    }


@covers("ppo_clip_from_probs")
def check_clip_from_probs(x: Inputs, make: Make) -> dict[str, Any]:
    log_probs = make(x["pi_new"]).log().requires_grad_()
    ratio = F.importance_ratio(log_probs, make(x["pi_old"]).log())
    objective = F.clipped_surrogate(ratio, make(x["adv"]), x["eps"])
    return {
        "ratio": ratio,
        "objective": objective,
        "grad_wrt_ratio": gradient(objective, ratio),
        "grad_wrt_logp_new": gradient(objective, log_probs),
    }


@covers("clip_higher_dapo")
def check_clip_higher(x: Inputs, make: Make) -> dict[str, Any]:
    ratio = make(x["ratio"]).requires_grad_()
    objective = F.clipped_surrogate(ratio, make(x["adv"]), x["eps_low"], clip_high=x["eps_high"])
    return {"objective": objective, "grad_wrt_ratio": gradient(objective, ratio)}


@covers("clip_fraction_two_definitions")
def check_clip_fractions(x: Inputs, make: Make) -> dict[str, Any]:
    ratio, advantages = make(x["ratio"]), make(x["adv"])
    log_new, log_old = ratio.log(), torch.zeros_like(ratio)  # samples come from the old policy: it is p
    return {
        "clipfrac_ratio": F.ratio_outside(ratio, x["eps"]).double().mean(),
        "clipfrac_active": F.clip_active(ratio, advantages, x["eps"]).double().mean(),
        "loss": -F.clipped_surrogate(ratio, advantages, x["eps"]).mean(),
        "approx_kl_k1": F.kl_k1(log_old, log_new).mean(),
        "approx_kl_k2": F.kl_k2(log_old, log_new).mean(),
        "approx_kl_k3": F.kl_k3(log_old, log_new).mean(),
    }


@covers("value_loss_clipped_max")
def check_clipped_value_loss(x: Inputs, make: Make) -> dict[str, Any]:
    values = make(x["values_new"]).requires_grad_()
    old, returns, clip = make(x["values_old"]), make(x["returns"]), x["clip"]
    plain, loss = F.value_loss(values, returns), F.value_loss(values, returns, old, clip)
    return {
        "unclipped": plain,
        "clipped": F.value_loss(torch.minimum(torch.maximum(values, old - clip), old + clip), returns),
        "loss_half_mean": loss.mean() / 2,
        "vf_clipfrac": (loss > plain + 1e-6).double().mean(),
        "grad_of_half_mean_wrt_values_new": gradient(loss.mean() / 2, values),
    }


@covers("value_loss_plain")
def check_value_loss(x: Inputs, make: Make) -> dict[str, Any]:
    loss = F.value_loss(make(x["values_new"]), make(x["returns"])).mean()
    return {"mse": loss, "half_mse": loss / 2}


@covers("explained_variance")
def check_explained_variance(x: Inputs, make: Make) -> dict[str, Any]:
    true, predicted = make(x["y_true"]), make(x["y_pred"])
    return {
        "ev": F.explained_variance(predicted, true),
        "ev_pred_plus_5": F.explained_variance(predicted + 5, true),
        "ev_perfect": F.explained_variance(true, true),
        "ev_constant_pred": F.explained_variance(torch.full_like(true, 7.0), true),
        "ev_negated": F.explained_variance(-true, true),
        "ev_constant_y": F.explained_variance(predicted, torch.full_like(true, 0.1)),
    }


@covers("advantage_normalisation_ddof")
def check_whiten(x: Inputs, make: Make) -> dict[str, Any]:
    return {"ddof0_numpy_tf": F.whiten(make(x["adv"]), None, eps=x["eps"])}


@covers("categorical_logp_entropy")
def check_categorical(x: Inputs, make: Make) -> dict[str, Any]:
    logits = make(x["logits"]).requires_grad_()
    log_probs = F.token_log_probs(logits.expand(3, 3), torch.arange(3))
    entropy = F.token_entropy(logits)
    return {
        "probs": log_probs.exp(),
        "log_probs": log_probs,
        "entropy": entropy,
        "entropy_shift_by_100": F.token_entropy(logits + 100),
        "grad_entropy_wrt_logits": gradient(entropy, logits),
    }


@covers("kl_categorical_both_directions")
def check_categorical_kl(x: Inputs, make: Make) -> dict[str, Any]:
    p, q = make(x["p"]).log(), make(x["q"]).log()
    return {"kl_p_q": F.categorical_kl(p, q), "kl_q_p": F.categorical_kl(q, p)}


@covers("kl_diag_gaussian_both_directions")
def check_gaussian_kl(x: Inputs, make: Make) -> dict[str, Any]:
    zero, one = (make(x["mean0"]), make(x["log_std0"])), (make(x["mean1"]), make(x["log_std1"]))
    return {"kl_0_1": F.gaussian_kl(*zero, *one), "kl_1_0": F.gaussian_kl(*one, *zero)}


@covers("kl_estimators_expected_value")
def check_kl_expectations(x: Inputs, make: Make) -> dict[str, Any]:
    pi, ref = make(x["pi"]), make(x["ref"])
    estimators = {"E_k1": F.kl_k1, "E_k2": F.kl_k2, "E_k3": F.kl_k3}
    return {
        "kl_pi_ref": F.categorical_kl(pi.log(), ref.log()),
        **{name: (pi * k(pi.log(), ref.log())).sum() for name, k in estimators.items()},
    }


@covers("kl_estimators_expected_gradient_onpolicy")
def check_kl_gradients(x: Inputs, make: Make) -> dict[str, Any]:
    logits, ref = make(x["logits"]).requires_grad_(), make(x["ref_probs"]).log()
    log_pi = F.token_log_probs(logits.expand(3, 3), torch.arange(3))
    pi = log_pi.exp().detach()  # the samples' distribution: no gradient through it
    ratio = F.importance_ratio(log_pi, log_pi.detach())
    estimators = {"k1": F.kl_k1, "k2": F.kl_k2, "k3": F.kl_k3}
    in_loss = {f"{name}_in_loss": gradient(pi * k(log_pi, ref), logits) for name, k in estimators.items()}
    in_reward = {f"{name}_in_reward": gradient(pi * k(log_pi, ref).detach() * log_pi, logits) for name, k in estimators.items()}
    return {
        "true_grad_reverse_kl": gradient(F.categorical_kl(logits, ref), logits),
        "true_grad_forward_kl": gradient(F.categorical_kl(ref, logits), logits),
        **in_loss,
        **in_reward,
        "ratio_times_k3_in_loss": gradient(pi * ratio * F.kl_k3(log_pi, ref), logits),
        "ratio_times_k1_in_loss": gradient(pi * ratio * F.kl_k1(log_pi, ref), logits),
    }


@covers("fisher_vector_product_softmax")
def check_fisher(x: Inputs, make: Make) -> dict[str, Any]:
    logits, v = make(x["logits"]).requires_grad_(), make(x["v"])

    def product(damping: float, reverse: bool) -> Tensor:
        pair = (logits.detach(), logits)
        kl = F.categorical_kl(*(pair[::-1] if reverse else pair))
        return F.fisher_vector_product(kl, [logits], damping)(v)

    assert torch.allclose(product(0.1, reverse=True), product(0.1, reverse=False), atol=1e-6)
    return {"fvp_no_damping": product(0.0, reverse=False), "fvp_damped": product(x["damping"], reverse=False)}


@covers("conjugate_gradient_iterates")
def check_conjugate_gradient(x: Inputs, make: Make) -> dict[str, Any]:
    A, b = make(x["A"]), make(x["b"])
    iterates = {f"x{i}": F.conjugate_gradient(lambda v: A @ v, b, iterations=i) for i in (1, 2, 3)}
    return {**iterates, "exact": F.conjugate_gradient(lambda v: A @ v, b)}


@covers("trpo_full_step_quadratic")
def check_quadratic_step(x: Inputs, make: Make) -> dict[str, Any]:
    matrix, g = make(x["F"]), make(x["g"])
    direction = F.conjugate_gradient(lambda v: matrix @ v + x["damping"] * v, g)
    curvature = direction @ matrix @ direction
    beta = (2 * x["max_kl"] / curvature).sqrt()
    step = beta * direction
    return {
        "search_dir": direction,
        "beta": beta,
        "step": step,
        "quadratic_kl": step @ matrix @ step / 2,
        "expected_improve": g @ step,
        "expected_improve_formula": (2 * x["max_kl"] * (g @ direction)).sqrt(),
    }


@covers("trpo_step_softmax_uniform", "trpo_step_baselines_rule")
def check_trust_region_step(x: Inputs, make: Make) -> dict[str, Any]:
    old = make(x["probs"]).log()
    advantages, shrink = make(x["adv"]), x["backtrack_coeff"]
    limit = x["max_kl"] * x.get("kl_tolerance", 1.0)
    logits = old.clone().requires_grad_()
    surrogate = (logits.softmax(-1) * advantages).sum()
    g = gradient(surrogate, logits)
    matvec = F.fisher_vector_product(F.categorical_kl(old, logits), [logits], x["damping"])
    direction = F.conjugate_gradient(matvec, g)
    beta = (2 * x["max_kl"] / (direction @ matvec(direction))).sqrt()
    trace: list[dict[str, Any]] = []

    def evaluate(step: Tensor) -> tuple[Tensor, Tensor]:
        new = old + step
        kl, improvement = F.categorical_kl(old, new), (new.softmax(-1) * advantages).sum() - surrogate.detach()
        trace.append(
            {
                "k": len(trace),
                "frac": shrink ** len(trace),
                "kl_old_new": kl,
                "kl_new_old": F.categorical_kl(new, old),
                "improve": improvement,
                "accepted": bool(kl <= limit and improvement > 0),
            }
        )
        return improvement, kl

    step = F.line_search(evaluate, beta * direction, limit, shrink, x["max_backtracks"])
    assert step is not None
    result = {
        "grad": g,
        "search_dir": direction,
        "beta": beta,
        "full_step": beta * direction,
        "trace": list(trace),
        "accepted_k": len(trace) - 1,
        "new_probs": (old + step).softmax(-1),
    }
    if "kl_tolerance" in x:  # the neighbour's rule takes a step that ours, KL <= max_kl, has to shorten
        ours = F.line_search(evaluate, beta * direction, x["max_kl"], shrink, x["max_backtracks"])
        assert ours is not None
        assert torch.allclose(ours, beta * direction * shrink)
    return result


@covers("ppo_penalty_adaptive_beta")
def check_adaptive_penalty(x: Inputs, make: Make) -> dict[str, Any]:
    return {"beta_next": [F.adapt_kl_penalty(x["beta"], d, x["d_targ"]) for d in x["d"]]}


@covers("ziegler_adaptive_kl_code")
def check_proportional_control(x: Inputs, make: Make) -> dict[str, Any]:
    step, horizon = x["n_steps"], x["horizon"]
    return {"beta_next": [F.proportional_kl_control(x["beta"], kl, x["target"], step, horizon) for kl in x["kl"]]}


@covers("ziegler_adaptive_kl_paper")
def check_proportional_control_of_the_paper(x: Inputs, make: Make) -> dict[str, Any]:
    horizon = round(1 / x["K_beta"])  # the paper's gain K is n/horizon
    return {"beta_next": [F.proportional_kl_control(x["beta"], kl, x["target"], 1, horizon) for kl in x["kl"]]}


@covers("masked_mean_var_whiten")
def check_masked_statistics(x: Inputs, make: Make) -> dict[str, Any]:
    data, mask = make(x["x"]), make(x["mask"])
    return {
        "mean": F.masked_mean(data, mask),
        "var_biased": F.masked_var(data, mask),
        "whiten_biased_valid": F.whiten(data, mask)[mask.bool()],
    }


@covers("loss_aggregation_modes")
def check_aggregation(x: Inputs, make: Make) -> dict[str, Any]:
    loss, mask = make(x["token_loss"]), make(x["mask"])
    return {
        "token_mean": F.aggregate(loss, mask, "token-mean"),
        "seq_mean_token_mean": F.aggregate(loss, mask, "sequence-mean"),
        "seq_mean_token_sum": F.aggregate(loss, mask, "sequence-sum"),
        "dr_grpo_constant": F.aggregate(loss, mask, "constant", max_length=x["max_len"]),
    }


@covers("grad_accum_token_mean")
def check_accumulation(x: Inputs, make: Make) -> dict[str, Any]:
    loss, mask = make(x["token_loss"]), make(x["mask"])
    terms = [
        F.aggregate(part, kept, "token-mean", denominator=mask.sum())
        for part, kept in zip(loss.split(x["micro_batch_size"]), mask.split(x["micro_batch_size"]), strict=True)
    ]
    return {"correct": sum(terms), "correct_per_microbatch_terms": terms}


@covers("grpo_group_advantages")
def check_group_advantages(x: Inputs, make: Make) -> dict[str, Any]:
    rewards = make([x["rewards"]])
    return {
        "std_ddof1_eps1e4": F.group_advantages(rewards)[0],
        "std_ddof0_eps1e8": F.group_advantages(rewards, ddof=0, eps=1e-8)[0],
        "verl_ddof1_eps1e6": F.group_advantages(rewards, eps=1e-6)[0],
        "no_std": F.group_advantages(rewards, scale=False)[0],
    }


@covers("rloo_advantages")
def check_leave_one_out(x: Inputs, make: Make) -> dict[str, Any]:
    return {"advantages": F.leave_one_out_advantages(make([x["rewards"]]))[0]}


@covers("dpo_loss")
def check_dpo(x: Inputs, make: Make) -> dict[str, Any]:
    chosen, rejected = make(x["logp_chosen"]).requires_grad_(), make(x["logp_rejected"]).requires_grad_()
    ref_chosen, ref_rejected, beta = make(x["ref_chosen"]), make(x["ref_rejected"]), x["beta"]
    loss = F.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta)
    return {
        # The case's "logits" come before beta.
        "logits": -torch.expm1(loss).log() / beta,
        "loss": loss,
        "ipo_loss": F.ipo_loss(chosen, rejected, ref_chosen, ref_rejected, beta),
        "loss_label_smoothing_0_1": F.dpo_loss(chosen, rejected, ref_chosen, ref_rejected, beta, label_smoothing=0.1),
        "reward_chosen": beta * F.kl_k1(chosen, ref_chosen),
        "reward_rejected": beta * F.kl_k1(rejected, ref_rejected),
        "grad_wrt_logp_chosen": gradient(loss, chosen),
        "grad_wrt_logp_rejected": gradient(loss, rejected),
    }


@covers("bradley_terry_rm_loss")
def check_bradley_terry(x: Inputs, make: Make) -> dict[str, Any]:
    chosen, rejected = make(x["r_chosen"]).requires_grad_(), make(x["r_rejected"])
    loss = F.bradley_terry_loss(chosen, rejected)
    return {
        "loss_per_pair": loss,
        "loss_mean": loss.mean(),
        "accuracy": (loss < math.log(2) - 1e-6).double().mean(),
        "grad_wrt_chosen_per_pair": gradient(loss, chosen),
    }


@covers("rlhf_shaped_rewards_3_tokens")
def check_rlhf_rewards(x: Inputs, make: Make) -> dict[str, Any]:
    log_probs, ref = make([x["logp"]]), make([x["ref_logp"]])
    mask = torch.ones(1, 3)
    scores = F.place_scores(make([x["score"]]), mask)
    rewards = F.kl_shaped_rewards(scores, log_probs, ref, mask, x["kl_coef"])
    penalties = F.kl_shaped_rewards(torch.zeros_like(scores), log_probs, ref, mask, x["kl_coef"])
    advantages, returns, _ = credit(
        x, make, rewards=rewards[0].tolist(), terminated=[0, 0, 1], last_value=math.nan, truncated=[0, 0, 0]
    )
    k1 = F.kl_k1(log_probs, ref)[0]
    return {
        "k1": k1,
        "rewards": rewards[0],
        "advantages": advantages,
        "returns": returns,
        "seq_kl": k1.sum(),
        "non_score_reward_sum": penalties.sum(),
        "rlhf_reward": rewards.sum(),
    }


@covers("logprob_temperature")
def check_temperature(x: Inputs, make: Make) -> dict[str, Any]:
    logits, token = make(x["logits"]), torch.tensor(x["token"])
    return {"correct": F.token_log_probs(logits, token, x["temperature"]), "untempered": F.token_log_probs(logits, token)}


@covers("sft_masked_cross_entropy")
def check_sft(x: Inputs, make: Make) -> dict[str, Any]:
    labels = torch.tensor(x["shifted_labels"])
    mask = labels != x["ignore_index"]
    losses = -F.token_log_probs(make(x["shifted_logits"]), labels.clamp(min=0))
    return {"token_losses": losses[mask], "loss": F.aggregate(losses, mask, "token-mean")}


@covers("gae_tool_tokens_skipped", "gae_masked_autoreset_row_with_final_values")
def check_masked_gae(x: Inputs, make: Make) -> dict[str, Any]:
    advantages, _, following = credit(x, make)
    return {"advantages": advantages, "successor_values_on_kept_steps": following[make(x["mask"]).bool()]}


def assert_close(ours: Any, expected: Any, tolerance: float, where: str) -> None:
    """The same structure, and every number within an absolute tolerance."""
    if isinstance(expected, dict):
        assert ours.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_close(ours[key], value, tolerance, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(ours) == len(expected), where
        for i, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_close(a, b, tolerance, f"{where}[{i}]")
    elif expected == "nan":
        assert math.isnan(float(ours)), where
    elif isinstance(expected, bool):
        assert bool(ours) is expected, where
    else:
        ours = float(ours.detach()) if isinstance(ours, Tensor) else float(ours)
        assert abs(ours - expected) <= tolerance, f"{where}: {ours} != {expected}"


def as_close(ours: Any, expected: Any, tolerance: float) -> bool:
    try:
        assert_close(ours, expected, tolerance, "")
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("name", sorted(CHECKS))
def test_golden_case(name: str) -> None:
    case = CASES[name]
    for dtype, tolerance in ((torch.float64, case["tolerance"]), (torch.float32, case["tolerance_fp32"])):
        ours = CHECKS[name](case["inputs"], lambda x, dtype=dtype: torch.tensor(x, dtype=dtype))
        for key, expected in case["expected"].items():
            if key.startswith(MISTAKES):
                assert not as_close(ours["correct"], expected, 1e-3), f"{name}: returns the known mistake {key}"
            elif (name, key) not in KEYS_LEFT_OUT:
                assert_close(ours[key], expected, tolerance, f"{name}.{key}")


def test_every_golden_case_is_covered_or_left_out_for_a_reason() -> None:
    assert sorted([*CHECKS, *OTHER_LIBRARIES, *LEFT_OUT]) == sorted(CASES)
    tests = Path(__file__).parents[1]
    for name, file in OTHER_LIBRARIES.items():
        assert f'"{name}"' in (tests / file).read_text("utf-8"), f"{file} does not read {name}"
    assert all(LEFT_OUT.values())
    assert all(key in CASES[name]["expected"] for name, key in KEYS_LEFT_OUT)


def test_the_golden_comparison_itself_can_fail() -> None:
    case = CASES["gae_truncated_t1"]
    ours = CHECKS["gae_truncated_t1"](case["inputs"], lambda x: torch.tensor(x, dtype=torch.float64))
    assert as_close(ours, case["expected"], case["tolerance"])
    ours["advantages"] = ours["advantages"] + 1e-6
    assert not as_close(ours, case["expected"], case["tolerance"])
