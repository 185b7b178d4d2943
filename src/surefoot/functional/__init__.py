"""Pure functions of tensors: every formula of policy-gradient learning, from the reward to the loss.

Tensors in, tensors out, any leading shape, time last. Nothing here knows modules, configurations, environments or files;
dtype and device follow the inputs; flags and masks may be bool or 0/1 of any dtype, and True means keep.
"""

from surefoot.functional.critics import explained_variance, value_loss
from surefoot.functional.groups import group_advantages, leave_one_out_advantages, pair_advantages
from surefoot.functional.kl import (
    adapt_kl_penalty,
    adapt_learning_rate,
    categorical_kl,
    covariance_terms,
    gaussian_kl,
    kl_k1,
    kl_k2,
    kl_k3,
    largest_share,
    proportional_kl_control,
)
from surefoot.functional.likelihood import chunked_likelihood, token_entropy, token_log_probs
from surefoot.functional.masking import (
    Aggregation,
    Moments,
    aggregate,
    masked_mean,
    masked_moments,
    masked_var,
    merge_moments,
    whiten,
)
from surefoot.functional.natural_gradient import conjugate_gradient, fisher_vector_product, line_search
from surefoot.functional.preferences import bradley_terry_loss, dpo_loss, ipo_loss, kto_loss, orpo_loss, simpo_loss
from surefoot.functional.returns import discounted_returns, gae, n_step_advantages, successor_values, td_residual
from surefoot.functional.routing import expert_load, load_balance
from surefoot.functional.shaping import kl_shaped_rewards, overlong_penalty, place_scores
from surefoot.functional.surrogates import (
    clip_active,
    clipped_surrogate,
    importance_ratio,
    importance_weights,
    ratio_outside,
    sampler_ratio,
    sequence_ratio,
    unclipped_surrogate,
    weighted_surrogate,
)

__all__ = [
    "Aggregation",
    "Moments",
    "adapt_kl_penalty",
    "adapt_learning_rate",
    "aggregate",
    "bradley_terry_loss",
    "categorical_kl",
    "chunked_likelihood",
    "clip_active",
    "clipped_surrogate",
    "conjugate_gradient",
    "covariance_terms",
    "discounted_returns",
    "dpo_loss",
    "expert_load",
    "explained_variance",
    "fisher_vector_product",
    "gae",
    "gaussian_kl",
    "group_advantages",
    "importance_ratio",
    "importance_weights",
    "ipo_loss",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_shaped_rewards",
    "kto_loss",
    "largest_share",
    "leave_one_out_advantages",
    "line_search",
    "load_balance",
    "masked_mean",
    "masked_moments",
    "masked_var",
    "merge_moments",
    "n_step_advantages",
    "orpo_loss",
    "overlong_penalty",
    "pair_advantages",
    "place_scores",
    "proportional_kl_control",
    "ratio_outside",
    "sampler_ratio",
    "sequence_ratio",
    "simpo_loss",
    "successor_values",
    "td_residual",
    "token_entropy",
    "token_log_probs",
    "unclipped_surrogate",
    "value_loss",
    "weighted_surrogate",
    "whiten",
]
