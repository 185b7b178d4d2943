# %% [markdown]
# # Exercises: eight functions of PPO
#
# Write eight short functions, from the return to Bradley–Terry. After each, a grader checks the laws that the function must
# obey, and names the first one that it breaks, with your value beside the right one. No function needs more than six lines.
#
# You need `pip install -e ".[notebook]" jupyterlab` and `jupyter lab docs/notebooks/exercises.ipynb` from the top of the
# repository, or VS Code. Arguments and results are PyTorch tensors, and the last axis is time: `rewards[..., t]`. There may be
# axes before it, one for each environment. The [ladder](ladder.ipynb) explains every idea, and [the math](../math.md) has every
# formula.

# %%
import torch

from surefoot.functional.exercises import grade

# %% [markdown]
# ## 1. The return
#
# $G_t = r_t + \gamma G_{t+1}$: rewards to go. `ends[..., t]` is True where step $t$ was the last one of its episode.
# Rewards of the next episode don't count. Go backwards in time.


# %%
def returns(rewards, ends, gamma):
    raise NotImplementedError


# %% [markdown]
# ## 2. A baseline
#
# Subtract the mean of the batch. The expected gradient stays the same, and its noise falls.


# %%
def baseline(returns):
    raise NotImplementedError


# %% [markdown]
# ## 3. The TD residual
#
# $\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$: how much better a step went than the critic expected. After the last step of
# an episode nothing follows. What `next_values` holds there may be anything, even NaN.


# %%
def td(rewards, values, next_values, ends, gamma):
    raise NotImplementedError


# %% [markdown]
# ## 4. GAE
#
# $\hat A_t = \delta_t + \gamma\lambda \hat A_{t+1}$, from residuals. With $\lambda = 0$ it trusts the critic after one
# step, with $\lambda = 1$ not at all.


# %%
def gae(residuals, ends, gamma, lam):
    raise NotImplementedError


# %% [markdown]
# ## 5. The ratio
#
# $\rho_t = \pi_\theta(a_t \mid s_t) / \pi_{\text{old}}(a_t \mid s_t)$, from log-probabilities. A probability may be as
# small as $e^{-300}$. The gradient flows through the new policy.


# %%
def ratio(log_probs, old_log_probs):
    raise NotImplementedError


# %% [markdown]
# ## 6. The clip
#
# $\min\big(\rho_t \hat A_t,\ \text{clip}(\rho_t, 1 - \epsilon, 1 + \epsilon)\, \hat A_t\big)$ for each step: the
# objective, which is maximised.


# %%
def clipped(ratios, advantages, clip):
    raise NotImplementedError


# %% [markdown]
# ## 7. The KL divergence
#
# $\text{KL}(p \,\|\, q) = \sum_a p(a) \log \frac{p(a)}{q(a)}$ for each row, from the log-probabilities of all actions,
# which are on the last axis. An action that $p$ never takes has log-probability $-\infty$, and adds 0.


# %%
def kl(log_p, log_q):
    raise NotImplementedError


# %% [markdown]
# ## 8. Bradley–Terry
#
# A person preferred one answer to another. The loss of a reward model is the mean over pairs of
# $-\log \sigma(\text{chosen} - \text{rejected})$. Scores may be a thousand apart.


# %%
def bradley_terry(chosen, rejected):
    raise NotImplementedError


# %% [markdown]
# ## The grader
#
# Run this cell as often as you like. A line per function: ✓, or the law that it breaks.

# %%
done = grade(globals())

# %% [markdown]
# ## Your functions train a policy
#
# Below is PPO's whole update on one batch of random numbers, made of your functions; run it when all eight are right. The
# solutions are in [`surefoot.functional`](../reference/functional.md), with masks and truncated episodes.

# %%
if done:
    torch.manual_seed(1)
    policy, critic = torch.nn.Linear(4, 2), torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], 0.01)
    states, rewards = torch.randn(8, 33, 4), torch.randn(8, 32)
    ends = torch.zeros(8, 32, dtype=torch.bool)
    actions = torch.randint(2, (8, 32, 1))
    values = critic(states).squeeze(-1).detach()
    advantages = baseline(gae(td(rewards, values[:, :-1], values[:, 1:], ends, 0.99), ends, 0.99, 0.95))
    old = policy(states[:, :-1]).log_softmax(-1).detach()
    for epoch in range(10):
        new = policy(states[:, :-1]).log_softmax(-1)
        rho = ratio(new.gather(-1, actions), old.gather(-1, actions)).squeeze(-1)
        loss = -clipped(rho, advantages, 0.2).mean()
        loss += (critic(states[:, :-1]).squeeze(-1) - returns(rewards, ends, 0.99)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}, KL to the old policy {kl(old, new).mean().item():.4f}")
