# %% [markdown]
# # From comparisons to a policy
#
# Nobody can write down the reward of a good answer, but people can say which of two answers they prefer. This notebook goes
# the whole way on data that it makes itself: people who err, a reward model by Bradley–Terry, two biases that it learns from
# them, a policy that follows it, and what happens when the policy follows it too far. **A line that begins with `assert`
# checks the claim in the text above it.** The formulas are those of [the math](../math.md). It takes half
# a minute and needs `pip install -e ".[notebook]" jupyterlab`. With a real language model and your own labels:
# [label preferences yourself](../how-to/rounds.md).

# %%
import matplotlib.pyplot as plt
import torch

from surefoot import functional as F
from surefoot.people.agreement import bias, kappa

torch.manual_seed(0)
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## Answers, and what is good about them
#
# An answer is three numbers: how correct it is, how polite, and how long. The **gold reward**, which a real project does
# not have, says that correctness counts, that politeness helps a little, and that length is neither good nor bad.

# %%
GOLD = torch.tensor([1.0, 0.4, 0.0])


def answers(n):
    return torch.randn(n, 3)


def gold(x):
    return x @ GOLD


# %% [markdown]
# ## A person errs
#
# Bradley–Terry is a model of people: $P(a \succ b) = \sigma(r(a) - r(b))$. The closer two answers are, the more often a
# person errs. So two careful people don't always agree, and neither agrees with the gold reward.

# %%
pairs = answers(4000).view(2000, 2, 3)
difference = gold(pairs[:, 0]) - gold(pairs[:, 1])


def person(difference):
    """True where the first answer is preferred."""
    return torch.rand_like(difference) < torch.sigmoid(difference)


one, two = person(difference), person(difference)
right = (one == (difference > 0)).float()
close, far = right[difference.abs() < 0.5].mean(), right[difference.abs() > 2].mean()
print(f"right: {right.mean():.0%}; where the answers are close {close:.0%}, where they are far apart {far:.0%}")
assert close < 0.62 < 0.85 < far

# %% [markdown]
# Two people who both toss a coin agree on half of the pairs, so a share of agreement says little. Cohen's κ is 0 for
# coins and 1 for people who always agree.

# %%
agreement = kappa(list(zip(one.tolist(), two.tolist(), strict=True)))
print(f"they agree on {(one == two).float().mean():.0%} of the pairs: κ = {agreement['kappa']:.2f}")
assert 0.2 < agreement["kappa"] < 0.6

# %% [markdown]
# ## A reward model by Bradley–Terry
#
# Three weights, trained on one person's labels by $-\log \sigma(r(\text{chosen}) - r(\text{rejected}))$. Noise costs
# labels, not the direction: the errors of many pairs cancel, since an error is likelier where it matters less.


# %%
def reward_model(pairs, first, features=slice(None), steps=300):
    """Weights of a linear reward model: Bradley–Terry on pairs [n, 2, 3], where ``first`` [n] says which is preferred."""
    weights = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([weights], 0.05)
    for _ in range(steps):
        scores = pairs[..., features] @ weights[features]
        chosen, rejected = torch.where(first, scores[:, 0], scores[:, 1]), torch.where(first, scores[:, 1], scores[:, 0])
        optimizer.zero_grad()
        F.bradley_terry_loss(chosen, rejected).mean().backward()
        optimizer.step()
    return weights.detach()


def accuracy(weights):
    """On unseen pairs, against the gold reward."""
    fresh = answers(20_000).view(-1, 2, 3)
    return ((fresh @ weights).diff(dim=1) * gold(fresh).diff(dim=1) > 0).float().mean().item()


sizes = (10, 30, 100, 300, 1000, 2000)
curve = [accuracy(reward_model(pairs[:n], one[:n])) for n in sizes]
plt.semilogx(sizes, curve, "o-")
plt.axhline(right.mean(), ls="--", color="grey")
plt.text(10, right.mean() + 0.005, "the person")
plt.xlabel("labels")
plt.ylabel("unseen pairs ranked as gold does")
plt.title("A model of noisy labels becomes better than the person")
plt.show()
assert curve[-1] > right.mean()

# %% [markdown]
# ## Position bias
#
# A tired person clicks left. Where sides are random, such labels are noise, which costs accuracy but does not point anywhere.
# The exact test asks how likely so many lefts would be by chance. 200 labels find a person who picks left in 65 of 100.

# %%
tired = person(difference[:200]) | (torch.rand(200) < 0.3)
test = bias(int(tired.sum()), 200)
print(f"left in {test['share']:.0%} of 200 labels, p = {test['p']:.1g}")
assert test["p"] < 0.01 < bias(105, 200)["p"]

# %% [markdown]
# ## Length bias
#
# This person takes length for care. Nothing is random about that, so the reward model learns it, and more labels make it
# surer. **A reward model learns what was labelled, not what was meant.**

# %%
LENGTH = 0.8
longer = person(difference + LENGTH * (pairs[:, 0, 2] - pairs[:, 1, 2]))
biased = reward_model(pairs, longer)
honest = reward_model(pairs, one)
print("weights of correct, polite, long: honest", honest, "biased", biased)
assert abs(honest[2]) < 0.2 < 0.6 < biased[2]

# %% [markdown]
# ## A policy follows the reward model
#
# The policy writes answers: a Gaussian whose mean $\theta$ we train by the policy gradient, from the reward model's
# scores. On the way we look at the gold reward too, which the training never sees. Without a penalty the policy goes
# where the reward model says, for ever. With the penalty $\beta\,\text{KL}(\pi_\theta \| \pi_{\text{ref}})$ it stays
# near the answers that were labelled.


# %%
def train(weights, beta, steps=200, batch=256):
    """REINFORCE with a baseline on rewards minus β log(π/π_ref); returns gold, proxy and KL of each step."""
    mean, rows = torch.zeros(3, requires_grad=True), []
    optimizer = torch.optim.Adam([mean], 0.05)
    reference = torch.distributions.Normal(torch.zeros(3), 1.0)
    for _ in range(steps):
        policy = torch.distributions.Normal(mean, 1.0)
        x = policy.sample((batch,))
        log_probs = policy.log_prob(x).sum(-1)
        reward = proxy(x, weights) - beta * (log_probs - reference.log_prob(x).sum(-1)).detach()
        optimizer.zero_grad()
        (-(reward - reward.mean()) * log_probs).mean().backward()
        optimizer.step()
        rows.append([true_reward(x).mean(), proxy(x, weights).mean(), (mean.detach() ** 2).sum() / 2])
    return torch.tensor(rows).T


def proxy(x, weights):
    return x @ weights


def true_reward(x):
    """Far from what was labelled, answers get worse: nobody wants one that is endlessly long."""
    return gold(x) - 0.15 * x[:, 2].clamp(min=0) ** 2


# %% [markdown]
# The reward model has seen answers near the reference alone, where length did no harm.

# %%
free, anchored = train(biased, beta=0.0), train(biased, beta=0.5)
for (true, score, kl), name in ((free, "β = 0"), (anchored, "β = 0.5")):
    (line,) = plt.plot(score, label=f"reward model, {name}")
    plt.plot(true, "--", color=line.get_color(), label=f"gold, {name}")
    print(f"{name}: at the end gold {true[-20:].mean():.2f}, reward model {score[-20:].mean():.2f}, KL {kl[-1]:.1f}")
plt.xlabel("step")
plt.ylabel("reward")
plt.legend()
plt.title("Over-optimisation: the score rises, the truth falls")
plt.show()
assert free[1, -1] > anchored[1, -1]  # the score of the reward model says that no penalty is best
assert free[0, -20:].mean() < free[0].max() - 0.5  # the truth rose, and fell
assert anchored[0, -20:].mean() > free[0, -20:].mean()

# %% [markdown]
# Three remedies, all of them used in practice: a penalty (above), labels of the *new* policy's answers, since it is where the
# reward model is wrong (the next round), and people who are asked about what they did not mean. In Surefoot a run shows both
# curves where a gold reward is known (`surefoot demo language --no-anchor`), and says `reward_hacked` when they part.

# %% [markdown]
# ## The next round
#
# The same number of labels again, by a careful person, on answers of the policy that went too far. A linear reward cannot
# say that length is good near the reference and bad far away, but it can learn which matters where the policy is.

# %%
where = torch.randn(2000, 2, 3) + torch.tensor([2.0, 1.0, 3.0])
truth = true_reward(where.flatten(0, 1)).view(-1, 2)
second = reward_model(where, person(truth[:, 0] - truth[:, 1]))
again = train(second, beta=0.5)
print("weights after the second round:", second)
print(f"gold {again[0, -20:].mean():.2f} after it, {anchored[0, -20:].mean():.2f} before")
assert second[2] < 0 < biased[2]
assert again[0, -20:].mean() > anchored[0, -20:].mean()
