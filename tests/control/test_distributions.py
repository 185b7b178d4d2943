"""Action distributions: they agree with torch's, sample with the right probabilities, and never take masked actions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch import distributions as torch_distributions

from surefoot.control.policy import Categorical, DiagonalGaussian, MultiCategorical, pad_choices
from surefoot.core.learner import ROUNDING

GOLDEN = Path(__file__).parents[1] / "golden" / "golden.json"
CASES: dict[str, dict[str, Any]] = {case["name"]: case for case in json.loads(GOLDEN.read_text("utf-8"))}

HERE = {"categorical_logp_entropy", "categorical_invalid_action_mask", "diag_gaussian", "multidiscrete"}

precisions = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
seeds = st.integers(0, 2**31 - 1)


def stream(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=stream(seed), dtype=torch.float64)


def gradient(y: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(y, x, retain_graph=True)[0]


def expect(case: dict[str, Any], key: str, ours: Tensor) -> None:
    tolerance = case["tolerance"] if ours.dtype == torch.float64 else case["tolerance_fp32"]
    wanted = torch.tensor(case["expected"][key], dtype=ours.dtype)
    torch.testing.assert_close(ours.detach(), wanted, rtol=0, atol=tolerance)


# ---- golden cases -----------------------------------------------------------------------------------------------------


def test_every_golden_case_of_distributions_is_covered() -> None:
    assert {name for name, case in CASES.items() if case["group"] == "dist"} == HERE


@precisions
def test_golden_categorical(dtype: torch.dtype) -> None:
    case = CASES["categorical_logp_entropy"]
    logits = torch.tensor(case["inputs"]["logits"], dtype=dtype, requires_grad=True)
    policy = Categorical(logits)
    log_probs = Categorical(logits.expand(3, 3)).log_prob(torch.arange(3))
    expect(case, "log_probs", log_probs)
    expect(case, "probs", log_probs.exp())
    expect(case, "entropy", policy.entropy())
    expect(case, "entropy_shift_by_100", Categorical(logits + 100).entropy())
    expect(case, "grad_entropy_wrt_logits", gradient(policy.entropy(), logits))


@precisions
def test_golden_invalid_action_has_no_probability_no_gradient_and_a_finite_entropy(dtype: torch.dtype) -> None:
    case = CASES["categorical_invalid_action_mask"]
    logits = torch.tensor(case["inputs"]["logits"], dtype=dtype, requires_grad=True)
    allowed = torch.tensor(case["inputs"]["mask"], dtype=torch.bool)
    policy = Categorical(logits.masked_fill(~allowed, -math.inf))
    probabilities = Categorical(policy.logits.expand(3, 3)).log_prob(torch.arange(3)).exp()
    expect(case, "probs", probabilities)
    assert probabilities[1] == 0
    expect(case, "entropy", policy.entropy())
    log_prob = policy.log_prob(torch.tensor(2))
    expect(case, "logp_action2", log_prob)
    expect(case, "grad_logp_action2_wrt_logits", gradient(log_prob, logits))
    assert gradient(log_prob, logits)[1] == 0
    assert gradient(policy.entropy(), logits)[1] == 0
    assert gradient(policy.entropy(), logits).isfinite().all()


@precisions
def test_golden_diagonal_gaussian(dtype: torch.dtype) -> None:
    case = CASES["diag_gaussian"]
    mean, log_std = (torch.tensor(case["inputs"][key], dtype=dtype, requires_grad=True) for key in ("mean", "log_std"))
    policy = DiagonalGaussian(mean, log_std)
    log_prob = policy.log_prob(torch.tensor(case["inputs"]["action"], dtype=dtype))
    expect(case, "log_prob", log_prob)
    expect(case, "entropy", policy.entropy())
    expect(case, "grad_logp_wrt_mean", gradient(log_prob, mean))
    expect(case, "grad_logp_wrt_log_std", gradient(log_prob, log_std))


@precisions
def test_golden_multidiscrete(dtype: torch.dtype) -> None:
    case = CASES["multidiscrete"]
    logits = torch.cat([torch.tensor(row, dtype=dtype) for row in case["inputs"]["logits"]])
    policy = MultiCategorical(pad_choices(logits, [len(row) for row in case["inputs"]["logits"]]))
    expect(case, "log_prob", policy.log_prob(torch.tensor(case["inputs"]["action"])))
    expect(case, "entropy", policy.entropy())


# ---- against torch.distributions --------------------------------------------------------------------------------------


@given(seed=seeds, actions=st.integers(1, 6), states=st.integers(1, 5))
def test_categorical_agrees_with_torch(seed: int, actions: int, states: int) -> None:
    p, q = 3 * normal(2, 2, states, actions, seed=seed)
    taken = torch.randint(actions, (2, states), generator=stream(seed))
    ours, theirs = Categorical(p), torch_distributions.Categorical(logits=p)
    torch.testing.assert_close(ours.log_prob(taken), theirs.log_prob(taken))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    kl = torch_distributions.kl_divergence(theirs, torch_distributions.Categorical(logits=q))
    torch.testing.assert_close(ours.kl(Categorical(q)), kl)
    assert torch.equal(ours.mode(), theirs.probs.argmax(-1))


@given(seed=seeds, sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), states=st.integers(1, 4))
def test_several_choices_are_the_sum_of_single_ones(seed: int, sizes: list[int], states: int) -> None:
    p, q = 3 * normal(2, states, sum(sizes), seed=seed)
    taken = torch.stack([torch.randint(n, (states,), generator=stream(seed + i)) for i, n in enumerate(sizes)], -1)
    ours, other = (MultiCategorical(pad_choices(logits.requires_grad_(), sizes)) for logits in (p, q))
    theirs, others = ([torch_distributions.Categorical(logits=x) for x in rows.split(sizes, -1)] for rows in (p, q))
    pairs = [
        (ours.log_prob(taken), sum(part.log_prob(a) for part, a in zip(theirs, taken.unbind(-1), strict=True))),
        (ours.entropy(), sum(part.entropy() for part in theirs)),
        (ours.kl(other), sum(torch_distributions.kl_divergence(a, b) for a, b in zip(theirs, others, strict=True))),
    ]
    for mine, wanted in pairs:
        torch.testing.assert_close(mine, wanted)
        torch.testing.assert_close(gradient(mine.sum(), p), gradient(wanted.sum(), p))
    assert ours.mode().tolist() == torch.stack([part.probs.argmax(-1) for part in theirs], -1).tolist()
    assert (ours.sample(stream(seed)) < torch.tensor(sizes)).all()


@given(seed=seeds, size=st.integers(1, 4), states=st.integers(1, 5))
def test_diagonal_gaussian_agrees_with_torch(seed: int, size: int, states: int) -> None:
    mean_p, log_std_p, mean_q, log_std_q, taken = normal(5, 2, states, size, seed=seed)

    def independent(mean: Tensor, log_std: Tensor) -> torch_distributions.Independent:
        return torch_distributions.Independent(torch_distributions.Normal(mean, log_std.exp()), 1)

    ours, theirs = DiagonalGaussian(mean_p, log_std_p), independent(mean_p, log_std_p)
    torch.testing.assert_close(ours.log_prob(taken), theirs.log_prob(taken))
    torch.testing.assert_close(ours.entropy(), theirs.entropy())
    kl = torch_distributions.kl_divergence(theirs, independent(mean_q, log_std_q))
    torch.testing.assert_close(ours.kl(DiagonalGaussian(mean_q, log_std_q)), kl)
    assert torch.equal(ours.mode(), mean_p)


@pytest.mark.parametrize("choices", [1, 500])
def test_the_magnitude_of_a_log_probability_bounds_its_rounding(choices: int) -> None:
    """Sums of float32 differ from those of float64 by less than the magnitude times epsilon times what the learner allows."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(64, choices, 5, generator=generator)
    mean, actions = (3 * torch.randn(2, 64, choices, generator=generator)).unbind()
    pairs = [
        (MultiCategorical(logits), MultiCategorical(logits.double()), logits.argmin(-1)),
        (
            DiagonalGaussian(mean, torch.full_like(mean, -3.0)),
            DiagonalGaussian(mean.double(), torch.full_like(mean, -3.0).double()),
            actions,
        ),
    ]
    for single, double, taken in pairs:
        exact = double.log_prob(taken if taken.dtype == torch.long else taken.double())
        off = (single.log_prob(taken).double() - exact).abs()
        assert (off <= ROUNDING * torch.finfo(torch.float32).eps * single.magnitude(taken)).all()


def test_kl_to_itself_is_zero() -> None:
    logits, (mean, log_std) = normal(4, 3, seed=1), normal(2, 4, 3, seed=2)
    for policy in (Categorical(logits), DiagonalGaussian(mean, log_std)):
        torch.testing.assert_close(policy.kl(policy), torch.zeros(4, dtype=torch.float64))


# ---- sampling ---------------------------------------------------------------------------------------------------------


def test_categorical_samples_have_the_frequencies_of_their_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    count = 200_000
    taken = Categorical(probabilities.log().expand(count, 4)).sample(stream())
    share = torch.bincount(taken, minlength=4) / count
    four_sigma = 4 * (probabilities * (1 - probabilities) / count).sqrt()
    assert ((share - probabilities).abs() < four_sigma).all()


def test_several_choices_are_sampled_independently_each_by_its_probabilities() -> None:
    first, second, count = torch.tensor([0.2, 0.8]), torch.tensor([0.5, 0.3, 0.2]), 100_000
    logits = pad_choices(torch.cat([first, second]).log(), [2, 3])
    taken = MultiCategorical(logits.expand(count, 2, 3)).sample(stream())
    share = torch.bincount(3 * taken[:, 0] + taken[:, 1], minlength=6) / count
    wanted = (first[:, None] * second).flatten()
    assert ((share - wanted).abs() < 4 * (wanted * (1 - wanted) / count).sqrt()).all()


def test_noise_of_zero_does_not_make_an_impossible_action_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """−log 0 against −inf would be NaN, and argmax takes NaN for the largest."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda self, generator: self.zero_())
    for policy in (Categorical(torch.tensor([-math.inf, 0.0])), MultiCategorical(torch.tensor([[-math.inf, 0.0]]))):
        assert policy.sample(stream()).flatten().tolist() == [1]


def test_categorical_samples_do_not_depend_on_the_level_of_the_logits() -> None:
    logits = normal(1000, 5, seed=3)
    assert torch.equal(Categorical(logits).sample(stream(4)), Categorical(logits + 50).sample(stream(4)))


def test_gaussian_samples_have_the_mean_and_standard_deviation_of_the_distribution() -> None:
    mean, log_std, count = torch.tensor([2.0, -1.0]), torch.tensor([0.5, -2.0]), 200_000
    taken = DiagonalGaussian(mean.expand(count, 2), log_std.expand(count, 2)).sample(stream())
    std = log_std.exp()
    assert ((taken.mean(0) - mean).abs() < 4 * std / math.sqrt(count)).all()
    assert ((taken.std(0) - std).abs() < 4 * std / math.sqrt(2 * count)).all()
    within_one_std = ((taken - mean).abs() < std).float().mean(0)
    assert ((within_one_std - 0.6827).abs() < 0.005).all()
    assert abs(torch.corrcoef(taken.T)[0, 1]) < 0.01


@pytest.mark.parametrize("kind", [Categorical, DiagonalGaussian])
def test_the_same_stream_gives_the_same_samples_and_another_gives_others(kind: Any) -> None:
    shape = (1, 64, 3) if kind is Categorical else (2, 64, 3)
    policy, before = kind(*normal(*shape, seed=5)), torch.get_rng_state()
    assert torch.equal(policy.sample(stream(7)), policy.sample(stream(7)))
    assert torch.equal(torch.get_rng_state(), before), "the global generator is left alone"
    assert not torch.equal(policy.sample(stream(7)), policy.sample(stream(8)))


@given(seed=seeds, forbidden=st.lists(st.booleans(), min_size=2, max_size=6).filter(lambda row: not all(row)))
def test_sampling_never_takes_an_action_whose_logit_is_minus_infinity(seed: int, forbidden: list[bool]) -> None:
    logits = normal(500, len(forbidden), seed=seed).masked_fill(torch.tensor(forbidden), -math.inf)
    policy = Categorical(logits)
    for taken in (policy.sample(stream(seed)), policy.mode()):
        assert not torch.tensor(forbidden)[taken].any()
        assert policy.log_prob(taken).isfinite().all()


def test_sampling_gives_one_action_per_state_of_any_leading_shape() -> None:
    assert Categorical(normal(2, 3, 4, seed=6)).sample(stream()).shape == (2, 3)
    assert DiagonalGaussian(*normal(2, 2, 3, 4, seed=6)).sample(stream()).shape == (2, 3, 4)
