# %% [markdown]
# # From REINFORCE to PPO in six rungs
#
# PPO trains walking robots and chat models. At first sight it has many parts: ratios, clips, a critic, advantages. But it is
# one old and simple idea, REINFORCE, plus five fixes. Each fix solves one problem of the algorithm before it, and each is one
# switch in Surefoot. Here you turn the switches on one at a time. Every rung is explained with numbers small enough to do by
# hand, and is then trained on a real task.
#
# | rung | name | adds | reduces |
# |---|---|---|---|
# | 0 | `REINFORCE` | make actions likelier in proportion to the return that followed | |
# | 1 | `REINFORCE_BASELINE` | subtract the mean return | noise |
# | 2 | `ACTOR_CRITIC` | subtract a critic's prediction | noise |
# | 3 | `A2C` | replace part of the return with the critic's prediction | noise |
# | 4 | `PPO_UNCLIPPED` | train on each batch many times | wasted data |
# | 5 | `PPO_CLIP` | stop changing an action's probability once it has changed enough | steps that are too long |
#
# You need some Python, and no reinforcement learning. **A line that begins with `assert` checks the claim in the text
# above it**: if a claim were false, the notebook would stop there. The formulas are those of [the math](../math.md). To run
# the notebook yourself, from the top of the repository:
#
# ```
# pip install -e ".[notebook]" jupyterlab
# jupyter lab docs/notebooks/ladder.ipynb
# ```
#
# (`jupyter execute --inplace docs/notebooks/ladder.ipynb` runs it without an editor.) It takes a minute and a half on one core.

# %%
import os
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import surefoot
from surefoot import functional as F
from surefoot.compare.ladder import sample_gradients
from surefoot.compare.statistics import noise_of
from surefoot.core.algorithms import switches_between

STEPS = int(os.environ.get("SUREFOOT_NOTEBOOK_STEPS", 20_000))  # of each run
ENOUGH = STEPS >= 20_000  # with fewer, the claims about learning are not checked
SEEDS = (1, 2, 3) if ENOUGH else (1,)

torch.set_printoptions(precision=3, sci_mode=False)
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The task
#
# CartPole: a pole stands on a cart. At every step the **policy** $\pi_\theta$ observes four numbers, the **state** $s_t$, and
# picks an **action** $a_t$: push left, or push right. Each step that the pole stays up earns a **reward** of 1. An **episode**
# ends when the pole falls, or after 500 steps. $\theta$ are the weights of a small network whose two outputs become two
# probabilities.
#
# To compare the six rungs on one task, we need one function that trains a rung and keeps everything else the same: network,
# optimizer, learning rate, discount, batch size, seeds.

# %%
SAME = {"optimizer": {"learning_rate": 1e-3, "schedule": "constant"}, "evaluation": {"episodes": 0}}
RUNS = {}


def fitted(name):
    """A rung with the settings of the task: the discount, and the number of epochs if batches are reused."""
    rung = replace(surefoot.ALGORITHMS[name], gamma=0.98)
    return replace(rung, reuse=surefoot.Reuse(epochs=20, minibatches=1)) if rung.reuse else rung


def climb(name):
    """Train one rung on every seed, and keep the metrics of each iteration."""
    rung = fitted(name)
    # Batches of 256 steps. Without a critic a batch consists of whole episodes, so the last episode is completed.
    rollout = {"environments": 1, "at_least": 256} if rung.needs_whole_episodes else {"environments": 8, "steps": 32}
    RUNS[name] = []
    for seed in SEEDS:
        rows = []
        surefoot.train("CartPole-v1", rung, steps=STEPS, seed=seed, rollout=rollout, callback=rows.append, **SAME)
        RUNS[name].append(rows)
    print(f"{name}: {rows[-1]['updates']:,} updates; mean return of the last 100 episodes, each seed:", *map(round, ends(name)))


def ends(name):
    """The mean return of the last 100 training episodes, for each seed."""
    return [rows[-1]["episode_return"] for rows in RUNS[name]]


def mean(numbers):
    return sum(numbers) / len(numbers)


# %% [markdown]
# ## Rung 0: REINFORCE
#
# Try an action. If the rewards that follow are high, make it likelier. The sum of the rewards from step $t$ on is its
# **return**. Later rewards count a little less:
#
# $$G_t = r_t + \gamma G_{t+1}.$$
#
# An episode of five steps, with $\gamma = 0.9$:

# %%
rewards = torch.ones(5)
ends_here = torch.tensor([0, 0, 0, 0, 1])
returns = F.discounted_returns(rewards, torch.zeros(5), terminated=ends_here, truncated=torch.zeros(5), gamma=0.9)
assert torch.isclose(returns[0], torch.tensor(1 + 0.9 + 0.9**2 + 0.9**3 + 0.9**4))
returns

# %% [markdown]
# "Make it likelier" is a step along $\nabla \log \pi_\theta(a_t \mid s_t)$, and "in proportion to the return" is a factor. So
# REINFORCE follows
#
# $$\nabla J(\theta) = \mathbb{E}\big[\nabla \log \pi_\theta(a_t \mid s_t)\, G_t\big].$$
#
# This is supervised learning on the policy's own actions, weighted by their returns. With two actions of probability ½ each,
# and `logits` in place of the network's outputs:

# %%
logits = torch.zeros(5, 2, requires_grad=True)
actions = torch.tensor([0, 1, 1, 0, 1])
log_probs = F.token_log_probs(logits, actions)  # also used for text: a token is a choice among n
(log_probs * returns).sum().backward()
print("gradient of each action's logits, step by step:\n", logits.grad)
assert (logits.grad.gather(1, actions[:, None]) > 0).all()  # every action taken becomes likelier

# %% [markdown]
# This has a problem. All returns of CartPole are positive, so **every** action that was taken becomes likelier,
# even the fatal ones. Good actions win only because their gradient is a little larger, and within one batch chance decides. Now
# train it on three seeds. (This takes about ten seconds.)

# %%
climb("REINFORCE")

# %% [markdown]
# ## Rung 1: subtract the mean
#
# ```python
# REINFORCE_BASELINE = replace(REINFORCE, baseline="mean")
# ```
#
# A slot machine shows why a baseline helps. It has two levers that pay 10 and 11, and the policy pulls each with probability ½.
# What is the gradient from one pull?

# %%
pays = torch.tensor([10.0, 11.0])


def gradients(weights):
    """The gradient of the two logits after a pull of either lever.   [lever pulled, logit]"""
    logits = torch.zeros(2, requires_grad=True)
    log_probs = F.token_log_probs(logits.expand(2, 2), torch.tensor([0, 1]))
    return torch.stack([torch.autograd.grad(term, logits, retain_graph=True)[0] for term in log_probs * weights])


plain, baseline = gradients(pays), gradients(pays - pays.mean())
print("weighted by the return:\n", plain)
print("weighted by the return − 10.5:\n", baseline)

# %% [markdown]
# Without a baseline a pull of the worse lever raises the probability of *the worse lever*, with a gradient of 5; only the
# average over both pulls is right. With the baseline, either pull gives the same gradient, and the right one. The average is
# unchanged, because a number $b$ that does not depend on the action adds nothing to it: $\mathbb{E}[b\nabla\log\pi] = b\sum_a
# \pi\nabla\log\pi = b\nabla\sum_a\pi = b\nabla 1 = 0$. The noise is gone.

# %%
assert torch.allclose(plain.mean(0), baseline.mean(0))  # the same direction on average
noise = [float(each.var(0, correction=0).sum()) for each in (plain, baseline)]
print(f"variance: {noise[0]:.1f} without a baseline, {noise[1]:.1f} with it")
assert noise[0] > 50
assert noise[1] < 1e-9

# %% [markdown]
# On a real task the baseline is the mean return of the batch. It removes part of the noise, not all of it.

# %%
climb("REINFORCE_BASELINE")

# %% [markdown]
# ## Rung 2: a critic
#
# ```python
# ACTOR_CRITIC = replace(REINFORCE_BASELINE, baseline="critic")
# ```
#
# One mean for all states is a poor baseline. Take six steps: in three the pole stands well, and about 40 steps follow after
# either action; in three it is about to fall. The mean return gives every action of the first kind a positive weight and every
# action of the second a negative one, although no action made a difference. A **critic** $V(s)$ predicts the return of *this
# state*. The difference is the **advantage**:
#
# $$\hat A_t = G_t - V(s_t).$$

# %%
returns = torch.tensor([40.0, 38.0, 42.0, 3.0, 2.0, 4.0])
crude = returns.mean().expand(6)
critic = torch.tensor([40.0, 40.0, 40.0, 3.0, 3.0, 3.0])
print("advantage over the mean:  ", returns - crude)
print("advantage over the critic:", returns - critic)

figure, axis = plt.subplots(figsize=(6, 2.4))
axis.bar(torch.arange(6) - 0.2, returns - crude, 0.4, label="return − mean return", color="tab:orange")
axis.bar(torch.arange(6) + 0.2, returns - critic, 0.4, label="return − V(s)", color="tab:blue")
axis.axhline(0, color="black", linewidth=0.8)
axis.set_xticks(range(6), ["stands"] * 3 + ["falls"] * 3)
axis.set_ylabel("weight of the action")
axis.legend(frameon=False)
plt.show()

# %% [markdown]
# The critic is fitted to the returns by least squares, $(V - G)^2$. Its **explained
# variance** measures its quality: 1 is a perfect critic, 0 is no better than the mean.

# %%
print("squared error:     ", F.value_loss(crude, returns).mean(), "and", F.value_loss(critic, returns).mean())
print("explained variance:", F.explained_variance(crude, returns), "and", F.explained_variance(critic, returns))
assert F.explained_variance(crude, returns).abs() < 1e-6
assert F.explained_variance(critic, returns) > 0.99

# %%
climb("ACTOR_CRITIC")
explained = [rows[-1]["explained_variance"] for rows in RUNS["ACTOR_CRITIC"]]
print("explained variance at the end, each seed:", *(f"{value:.2f}" for value in explained))

# %% [markdown]
# This is no better than rung 1, and that is not a bug: look at the explained variance. This critic had one update per batch,
# and has learned almost nothing yet. In theory the *exact* $V$ lowers the noise; an *arbitrary* $V$ need not. Keep that in mind
# until rung 4, where the critic trains on each batch many times.

# %%
if ENOUGH:
    assert max(explained) < 0.3  # almost nothing
    assert mean(ends("ACTOR_CRITIC")) < mean(ends("REINFORCE_BASELINE"))

# %% [markdown]
# ## Rung 3: let the critic predict part of the return
#
# ```python
# A2C = replace(ACTOR_CRITIC, gae_lambda=0.95)
# ```
#
# A return includes everything that happens later, and most of that has little to do with this one action. With a critic you
# need not wait for all of it: wait one step, and use the critic's prediction for the rest. That is the **TD residual**: the
# reward, plus the prediction after the step, minus the prediction before it.
#
# $$\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$$
#
# Or wait $n$ steps, $\hat A_t^{(n)}$. Few steps: little noise, but all of the critic's error. Many: much noise, little error.
# **Generalised advantage estimation** (GAE) is a weighted mean of them all, with weights that fall by a factor $\lambda$ each.
# It reduces to one line:
#
# $$\hat A_t = (1-\lambda)\sum_{n<N} \lambda^{n-1} \hat A_t^{(n)} + \lambda^{N-1}\hat A_t^{(N)}
# \;=\; \delta_t + \gamma\lambda\hat A_{t+1}.$$

# %%
gamma, lam = 0.9, 0.8
episode = {  # four steps; the episode ends after the last
    "rewards": torch.tensor([1.0, 0.0, 2.0, 1.0]),
    "values": torch.tensor([0.5, 1.0, 0.3, 0.8]),
    "next_values": torch.tensor([1.0, 0.3, 0.8, 0.0]),
    "terminated": torch.tensor([0, 0, 0, 1]),
    "gamma": gamma,
}
uncut = {"truncated": torch.zeros(4)}

waits = [F.n_step_advantages(**episode, **uncut, n=n)[0] for n in (1, 2, 3, 4)]
weights = [(1 - lam) * lam**0, (1 - lam) * lam**1, (1 - lam) * lam**2, lam**3]
for n, (advantage, weight) in enumerate(zip(waits, weights, strict=True), 1):
    print(f"wait {n} steps: advantage {advantage:.3f}, weight {weight:.3f}")

mixed = sum(advantage * weight for advantage, weight in zip(waits, weights, strict=True))
print(f"mixed: {mixed:.3f}    gae: {F.gae(**episode, **uncut, lam=lam)[0]:.3f}")
assert torch.isclose(mixed, F.gae(**episode, **uncut, lam=lam)[0])

# %% [markdown]
# You know both extremes: $\lambda = 0$ is the TD residual, and $\lambda = 1$ is rung 2, return minus value. So rung 3
# differs from rung 2 by one number.

# %%
returns = F.discounted_returns(
    episode["rewards"], torch.zeros(4), terminated=episode["terminated"], truncated=torch.zeros(4), gamma=gamma
)
assert torch.allclose(F.gae(**episode, **uncut, lam=0.0), F.td_residual(**episode))
assert torch.allclose(F.gae(**episode, **uncut, lam=1.0), returns - episode["values"])
print(switches_between(surefoot.ACTOR_CRITIC, surefoot.A2C))

# %%
climb("A2C")

# %% [markdown]
# ### How the three fixes reduce the noise
#
# Returns after so little training show little. But we can measure the noise directly. Take *one* agent with a fitted critic,
# collect many batches with it, and compute each rung's gradient on every batch. How much does a rung's gradient vary from
# batch to batch? The agent is one of the highest rung, `PPO_CLIP`.

# %%
rollout = {"environments": 8, "steps": 32}
agent = surefoot.train("CartPole-v1", fitted("PPO_CLIP"), steps=STEPS // 2, seed=1, rollout=rollout, **SAME)
rungs = [replace(rung, gamma=0.98) for rung in surefoot.LADDER[:4]]
samples = sample_gradients(agent, rungs, batches=50 if ENOUGH else 5, at_least=256, seed=1)
share = [noise.relative for noise in noise_of(samples.gradients)]

names = list(surefoot.ALGORITHMS)[:6]
figure, axis = plt.subplots(figsize=(6, 2.2))
bars = axis.barh(names[:4], share, color="tab:blue")
axis.bar_label(bars, [f"{value:.1%}" for value in share], padding=3)
axis.set(xscale="log", xlabel="variance of the gradient, as a share of REINFORCE's")
axis.invert_yaxis()
plt.show()

# %% [markdown]
# Each fix removes much of the noise that the one before leaves. (For the last one this is not all: it relies on
# the critic, and if the critic is wrong, some of the signal is removed with the noise. [Climb the
# ladder](../how-to/climb-the-ladder.md) explains how to measure both.)

# %%
if ENOUGH:
    assert share[0] == 1
    assert all(upper < 0.7 * lower for lower, upper in pairwise(share))  # each removes noise
    assert share[3] < 0.15  # and the three together most of it

# %% [markdown]
# ## Rung 4: use every batch many times
#
# ```python
# PPO_UNCLIPPED = replace(A2C, reuse=Reuse(epochs=10, minibatches=32))
# ```
#
# So far each batch was used for one small step and then discarded. You can't simply use it again: after one step the policy has
# changed, but the batch came from the old policy. The solution is the **importance ratio**, how much likelier an action has
# become:
#
# $$\rho_t = \frac{\pi_\theta(a_t \mid s_t)}{\pi_\text{old}(a_t \mid s_t)}
# = \exp\big(\log \pi_\theta - \log \pi_\text{old}\big), \qquad \mathbb{E}_{\pi_\text{old}}[\rho A] =
# \mathbb{E}_{\pi_\theta}[A].$$
#
# Weighted by the ratio, samples of the old policy estimate the objective of the new one:

# %%
old, new = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])  # probabilities of two actions
advantages = torch.tensor([-1.0, 2.0])
ratio = F.importance_ratio(new.log(), old.log())
print("ratios", ratio)
assert torch.isclose((old * F.unclipped_surrogate(ratio, advantages)).sum(), (new * advantages).sum())

# %% [markdown]
# Before the first step, where $\rho = 1$, the gradient of $\rho\hat A$ equals that of $\log\pi_\theta\,\hat A$. So the first
# step on each batch is that of rung 3; only the later steps differ.

# %%
logits = old.log().requires_grad_()
log_probs = logits.log_softmax(-1)
(by_ratio,) = torch.autograd.grad(F.importance_ratio(log_probs, log_probs.detach()) @ advantages, logits, retain_graph=True)
(by_log,) = torch.autograd.grad(log_probs @ advantages, logits)
assert torch.allclose(by_ratio, by_log)

# %%
climb("PPO_UNCLIPPED")
runaway = [max(row["ratio_max"] for row in rows) for rows in RUNS["PPO_UNCLIPPED"]]
print("largest ratio in each run:", *map(round, runaway))

# %% [markdown]
# Twenty times the updates from the same number of steps help: the best seed is well above all earlier rungs. But the seeds no
# longer agree. In the saved run the third seed has lost everything it learned. (On another machine it may be another seed, or
# none: that is chance.) The ratios show the cause. Within one batch some actions became more than a *hundred* times as likely.
# At that distance a batch of the old policy is no estimate for the new one, and a step can undo what was learned.

# %%
if ENOUGH:
    below = [value for name in names[:4] for value in ends(name)]
    assert max(ends("PPO_UNCLIPPED")) > max(below)
    assert max(runaway) > 50

# %% [markdown]
# ## Rung 5: the clip
#
# ```python
# PPO_CLIP = replace(PPO_UNCLIPPED, trust_region=Clip(0.2))
# ```
#
# Ratios grow without bound because nothing limits them. Take a single action with $\hat A = 1$ that had
# probability 0.1. With $\rho\hat A$, every step makes it likelier, until it is certain. PPO instead takes the
# **minimum** of this objective and its clipped version, a pessimistic bound:
#
# $$J = \mathbb{E}_t\Big[\min\big(\rho_t \hat A_t,\ \mathrm{clip}(\rho_t, 1-\varepsilon, 1+\varepsilon)\,\hat A_t\big)\Big],
# \qquad \varepsilon = 0.2.$$


# %%
def pull(surrogate, advantage, steps=150, rate=0.02):
    """Follow the gradient of a surrogate for one sample of one action, and record its ratio."""
    start = torch.tensor([0.1, 0.9]).log()
    logits, ratios = start.clone(), []
    for _ in range(steps):
        logits.requires_grad_()
        ratio = F.importance_ratio(F.token_log_probs(logits, torch.tensor(0)), F.token_log_probs(start, torch.tensor(0)))
        (gradient,) = torch.autograd.grad(surrogate(ratio, torch.tensor(advantage)), logits)
        logits = (logits + rate * gradient).detach()
        ratios.append(float(ratio.detach()))
    return ratios


free = pull(F.unclipped_surrogate, 1.0)
clipped = pull(lambda ratio, advantage: F.clipped_surrogate(ratio, advantage, clip=0.2), 1.0)
print(f"after 150 steps on one sample: ratio {free[-1]:.2f} without the clip, {clipped[-1]:.2f} with it")
assert free[-1] > 9  # it can't pass 10: 0.1 times 10 is certainty
assert 1.2 < clipped[-1] < 1.3  # the step that crossed 1.2 was the last one

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.plot(free, color="tab:orange", label="ρÂ")
left.plot(clipped, color="tab:blue", label="with the clip")
left.axhspan(0.8, 1.2, color="0.9")
left.set(xlabel="steps on one sample", ylabel="ratio ρ", title="the clip stops the ratio")
left.legend(frameon=False)

ratio = torch.linspace(0, 2, 201)
for advantage, colour in ((1.0, "tab:green"), (-1.0, "tab:red")):
    weight = torch.full_like(ratio, advantage)
    right.plot(ratio, F.unclipped_surrogate(ratio, weight), color=colour, linewidth=0.8, linestyle="--")
    right.plot(ratio, F.clipped_surrogate(ratio, weight, clip=0.2), color=colour, label=f"Â = {advantage:+.0f}")
right.axvspan(0.8, 1.2, color="0.9")
right.set(xlabel="ratio ρ", ylabel="surrogate", title="flat once the action has moved far enough")
right.legend(frameon=False)
plt.show()

# %% [markdown]
# On the flat parts the gradient is zero: that action has moved far enough in the right direction. Elsewhere the gradient is
# full, even *outside* the clip range if the action has moved in the **wrong** direction, so that it is pulled back. There are
# four cases:

# %%
print("  Â     ρ    minimum     gradient")
for advantage, value in ((1.0, 1.5), (1.0, 0.5), (-1.0, 1.5), (-1.0, 0.5)):
    ratio = torch.tensor(value, requires_grad=True)
    weight = torch.tensor(advantage)
    F.clipped_surrogate(ratio, weight, clip=0.2).backward()
    active = bool(F.clip_active(ratio, weight, clip=0.2))
    print(f"{advantage:+.0f}    {value}   {'clipped  ' if active else 'unclipped'}   {float(ratio.grad):+.0f}")
    assert active == (ratio.grad == 0)
    assert active == ((advantage > 0) == (value > 1))  # moved far enough in the right direction

# %%
climb("PPO_CLIP")
print("largest ratio in each run:", *(round(max(row["ratio_max"] for row in rows), 1) for rows in RUNS["PPO_CLIP"]))

# %% [markdown]
# All three seeds have learned, and each is above every run of rungs 0 to 3. The clip does not bound the ratio: ratios still
# leave the range from 0.8 to 1.2, because other samples share the weights. The clip only removes the *incentive* to leave it.
# But the largest ratios are no longer in the hundreds.

# %%
if ENOUGH:
    assert min(ends("PPO_CLIP")) > max(below)
    assert mean(ends("PPO_CLIP")) > mean(ends("PPO_UNCLIPPED"))
    largest = {name: max(row["ratio_max"] for rows in RUNS[name] for row in rows) for name in names}
    assert 1.2 < largest["PPO_CLIP"] < 0.1 * largest["PPO_UNCLIPPED"]

# %% [markdown]
# ## The whole ladder
#
# Each line is the mean of the three seeds; the thin ones are the seeds themselves.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
colours = plt.get_cmap("viridis")(torch.linspace(0.95, 0, 6).numpy())
for name, colour in zip(names, colours, strict=True):
    grid = torch.linspace(0, STEPS, 41)[4:]
    curves = []
    for rows in RUNS[name]:
        known = [row for row in rows if row["episode_return"] is not None]
        last = [max((r for r in known if r["steps"] <= step), key=lambda r: r["steps"], default=known[0]) for step in grid]
        curves.append([row["episode_return"] for row in last])
        left.plot(grid, curves[-1], color=colour, linewidth=0.5, alpha=0.6)
    left.plot(grid, torch.tensor(curves).mean(0), color=colour, linewidth=2, label=name)
    right.bar(name, max(row["ratio_max"] for rows in RUNS[name] for row in rows), color=colour)
left.set(xlabel="steps in the environment", ylabel="return, last 100 episodes", title="learning")
left.legend(frameon=False, fontsize=8)
right.set(yscale="log", ylabel="largest ratio", title="how far actions ran from where they were tried")
right.set_xticks(range(6), [str(rung) for rung in range(6)])
right.set_xlabel("rung")
figure.tight_layout()
plt.show()

# %% [markdown]
# These are all the differences between the six. There are no classes and no trainers, only values, each one switch from the one
# below.

# %%
for lower, upper in pairwise(surefoot.LADDER):
    changed = switches_between(lower, upper)
    assert len(changed) == 1
    print(*(f"{switch}: {before} -> {after}" for switch, (before, after) in changed.items()))

# %% [markdown]
# ## Limits of this notebook
#
# Three seeds and 20,000 steps of one small task are an illustration, not a proof. [The benchmark](../benchmarks/ladder.md)
# has five times the steps, and intervals. `surefoot ladder TASK` does the same on your own task:
# [climb the ladder](../how-to/climb-the-ladder.md).
#
# Try these changes to the code above:
#
# - another clip in `climb`: `replace(rung, trust_region=surefoot.Clip(0.5))`;
# - another $\lambda$, including 0 and 1;
# - more `SEEDS`. Do the results of rung 4 change?
#
# Then read:
#
# - [The tutorial](../tutorial.md): killing and resuming runs, recipes, the command line.
# - [The clip table](../how-to/clip-table.md): the four cases with sliders, and on samples of a run.
# - [Other trust regions](../how-to/trust-regions.md): the last switch has more values, including TRPO.
# - [Language models](../how-to/align-your-own-model.md): the same objective and the same functions; an action is a
#   token and the reward is a score of the answer.
