# %% [markdown]
# # From REINFORCE to PPO in six rungs
#
# PPO trains walking robots and chat models. Met all at once it is a lot: ratios, clips, a critic, advantages. But it is one
# old and simple idea, REINFORCE, plus five fixes. Each fix mends one thing that was wrong with what came before, and each is
# one switch in Surefoot. Here you turn them one at a time. Every rung is explained with numbers small enough to do by hand,
# and is then trained on a real task.
#
# | rung | name | adds | fights |
# |---|---|---|---|
# | 0 | `REINFORCE` | make actions likelier in proportion to the return that followed | |
# | 1 | `REINFORCE_BASELINE` | subtract the mean return | noise |
# | 2 | `ACTOR_CRITIC` | subtract what a critic expected | noise |
# | 3 | `A2C` | let the critic stand for part of the return | noise |
# | 4 | `PPO_UNCLIPPED` | learn from each batch many times | wasted data |
# | 5 | `PPO_CLIP` | stop pushing what has moved far enough | steps that are too long |
#
# You need some Python, and no reinforcement learning. **A line that begins with `assert` checks what the text has just
# said**: where a claim were not true, the notebook would stop there. The formulas are those of [the math](../math.md). To run
# the notebook yourself, from the top of the repository:
#
# ```
# pip install -c constraints.txt -e ".[notebook]"
# ```
#
# and open it in an editor that knows notebooks, or in Jupyter. (`jupyter execute docs/notebooks/ladder.ipynb` runs it without
# either.) It takes a minute and a half of one core.

# %%
import os
from dataclasses import replace
from itertools import pairwise

import matplotlib.pyplot as plt
import torch

import surefoot
from surefoot import functional as F
from surefoot.algorithms import switches_between
from surefoot.compare.gradients import noise_of, sample_gradients

STEPS = int(os.environ.get("SUREFOOT_NOTEBOOK_STEPS", 20_000))  # of each training
ENOUGH = STEPS >= 20_000  # with fewer, nothing is claimed about learning
SEEDS = (1, 2, 3) if ENOUGH else (1,)

torch.set_printoptions(precision=3, sci_mode=False)
plt.rcParams.update({"figure.dpi": 80, "axes.spines.top": False, "axes.spines.right": False})

# %% [markdown]
# ## The task
#
# CartPole: a pole stands on a cart. At every step the **policy** $\pi_\theta$ sees four numbers, the **state** $s_t$, and
# picks an **action** $a_t$: push left, or push right. Each step that the pole stays up pays a **reward** of 1. An **episode**
# ends when the pole falls, or after 500 steps. $\theta$ are the weights of a small network whose two outputs become two
# probabilities.
#
# The same six rungs on one task need one function that trains a rung, and keeps everything but the rung the same: network,
# optimizer, learning rate, discount, the size of a batch, the seeds.

# %%
SAME = {"optimizer": {"learning_rate": 1e-3, "schedule": "constant"}, "evaluation": {"episodes": 0}}
RUNS = {}


def fitted(name):
    """A rung with what is the task's business: the discount, and how often a batch is used where it is used again."""
    rung = replace(surefoot.ALGORITHMS[name], gamma=0.98)
    return replace(rung, reuse=surefoot.Reuse(epochs=20, minibatches=1)) if rung.reuse else rung


def climb(name):
    """Train one rung on every seed, and keep the metrics of each iteration."""
    rung = fitted(name)
    # Batches of 256 steps. Without a critic they are made of whole episodes, so the last one is finished.
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
# Try something. If what followed was good, make it likelier. What followed step $t$ is its **return**, the sum of the rewards
# from there on, where later ones count a little less:
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
# REINFORCE goes up
#
# $$\nabla J(\theta) = \mathbb{E}\big[\nabla \log \pi_\theta(a_t \mid s_t)\, G_t\big].$$
#
# That is supervised learning on your own actions, weighted by how well they went. With two actions of probability ½ each, and
# `logits` in place of the network's outputs:

# %%
logits = torch.zeros(5, 2, requires_grad=True)
actions = torch.tensor([0, 1, 1, 0, 1])
log_probs = F.token_log_probs(logits, actions)  # one function for both worlds: a token of text is a choice among n, too
(log_probs * returns).sum().backward()
print("push on each action, step by step:\n", logits.grad)
assert (logits.grad.gather(1, actions[:, None]) > 0).all()  # whatever was done is made likelier, always

# %% [markdown]
# Here is what is wrong with it. All returns of CartPole are positive, so **every** action that was taken is made likelier,
# the fatal ones as well. Good ones win only because they are pushed a little harder, and in any one batch chance decides. Let
# us see how far it gets on three seeds. (Some ten seconds.)

# %%
climb("REINFORCE")

# %% [markdown]
# ## Rung 1: subtract the mean
#
# ```python
# REINFORCE_BASELINE = replace(REINFORCE, baseline="mean")
# ```
#
# A slot machine makes the point exactly. It has two levers that pay 10 and 11, and the policy pulls each with probability ½.
# What does one pull tell?

# %%
pays = torch.tensor([10.0, 11.0])


def pushes(weights):
    """What a pull of either lever does to the two logits.   [lever pulled, logit]"""
    logits = torch.zeros(2, requires_grad=True)
    log_probs = F.token_log_probs(logits.expand(2, 2), torch.tensor([0, 1]))
    return torch.stack([torch.autograd.grad(term, logits, retain_graph=True)[0] for term in log_probs * weights])


plain, baseline = pushes(pays), pushes(pays - pays.mean())
print("weighted by the return:\n", plain)
print("weighted by the return − 10.5:\n", baseline)

# %% [markdown]
# Without a baseline a pull of the worse lever pushes *towards the worse lever*, by 5; only the average over both pulls is
# right. With it, either pull says the same, and the right thing. The average has not changed, since a number $b$ that does
# not depend on the action adds nothing to it:
# $\mathbb{E}[b\nabla\log\pi] = b\sum_a \pi\nabla\log\pi = b\nabla\sum_a\pi = b\nabla 1 = 0$. The noise has gone.

# %%
assert torch.allclose(plain.mean(0), baseline.mean(0))  # the same direction on average
noise = [float(each.var(0, correction=0).sum()) for each in (plain, baseline)]
print(f"variance: {noise[0]:.1f} without a baseline, {noise[1]:.1f} with it")
assert noise[0] > 50
assert noise[1] < 1e-9

# %% [markdown]
# On a real task the baseline is the mean return of the batch, and takes away a part of the noise, not all of it.

# %%
climb("REINFORCE_BASELINE")

# %% [markdown]
# ## Rung 2: a critic
#
# ```python
# ACTOR_CRITIC = replace(REINFORCE_BASELINE, baseline="critic")
# ```
#
# One mean for all states is crude. Take six moments: in three the pole stands well, and some 40 steps follow whatever is
# done; in three it is about to fall. The mean return praises every action of the first kind and blames every action of the
# second, though none of them is to praise or to blame. A **critic** $V(s)$ learns what to expect *in this state*; what is
# left over is the **advantage**:
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
# The critic is fitted to the returns by least squares, $(V - G)^2$. Whether it knows anything is told by its **explained
# variance**: 1 is a perfect critic, 0 is no better than the mean.

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
# No better than rung 1, and that is no mistake: look at the explained variance. This critic has had one update per batch, and
# knows next to nothing yet. Theory promises that the *right* $V$ lowers the noise. It promises nothing about *any* $V$. Keep
# that in mind until rung 4, where the critic gets more to learn from.

# %%
if ENOUGH:
    assert max(explained) < 0.3  # next to nothing
    assert mean(ends("ACTOR_CRITIC")) < mean(ends("REINFORCE_BASELINE"))

# %% [markdown]
# ## Rung 3: let the critic stand for part of the return
#
# ```python
# A2C = replace(ACTOR_CRITIC, gae_lambda=0.95)
# ```
#
# A return is made of everything that happens later, and most of that has little to do with this one action. If there is a
# critic, one need not wait for all of it: wait one step, and ask the critic about the rest. That is the **TD residual**: what
# came, plus what is now expected, minus what was expected.
#
# $$\delta_t = r_t + \gamma V(s_{t+1}) - V(s_t)$$
#
# Or wait $n$ steps, $\hat A_t^{(n)}$. Few steps: little noise, but all the critic's mistakes. Many: much noise, few mistakes.
# **Generalised advantage estimation** (GAE) mixes them all, with weights that fall by a factor $\lambda$ each. The mix
# collapses to one line:
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
# Its two ends are old friends: $\lambda = 0$ is the TD residual, and $\lambda = 1$ is rung 2, return minus value. So rung 3
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
# ### What the three fixes do to the noise
#
# Returns after so little training say little. But noise can be measured by itself: take *one* agent, whose critic knows
# something, collect many batches with it, and ask each rung which way it would go. How much do a rung's answers scatter from
# batch to batch? The agent is borrowed from the top of the ladder.

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
# Each fix takes away much of the noise that the one before has left. (Of the last one that is not the whole truth: it trusts
# the critic, and where the critic is wrong some of the signal goes with the noise. How to measure both is said in
# [climb the ladder](../how-to/climb-the-ladder.md).)

# %%
if ENOUGH:
    assert share[0] == 1
    assert all(upper < 0.7 * lower for lower, upper in pairwise(share))  # each takes noise away
    assert share[3] < 0.15  # and the three together most of it

# %% [markdown]
# ## Rung 4: use every batch many times
#
# ```python
# PPO_UNCLIPPED = replace(A2C, reuse=Reuse(epochs=10, minibatches=32))
# ```
#
# So far each batch served one small step and was thrown away. It can't simply be used again: after one step the policy is
# another one, and the batch was collected by the old. The remedy is the **importance ratio**, how much likelier an action has
# become:
#
# $$\rho_t = \frac{\pi_\theta(a_t \mid s_t)}{\pi_\text{old}(a_t \mid s_t)}
# = \exp\big(\log \pi_\theta - \log \pi_\text{old}\big), \qquad \mathbb{E}_{\pi_\text{old}}[\rho A] =
# \mathbb{E}_{\pi_\theta}[A].$$
#
# Weighted by it, samples of the old policy tell about the new one:

# %%
old, new = torch.tensor([0.7, 0.3]), torch.tensor([0.4, 0.6])  # probabilities of two actions
advantages = torch.tensor([-1.0, 2.0])
ratio = F.importance_ratio(new.log(), old.log())
print("ratios", ratio)
assert torch.isclose((old * F.unclipped_surrogate(ratio, advantages)).sum(), (new * advantages).sum())

# %% [markdown]
# And before the first step, where $\rho = 1$, the gradient of $\rho\hat A$ is that of $\log\pi_\theta\,\hat A$. So the first
# step on each batch is that of rung 3; what is new comes after it.

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
# Twenty times the updates from the same number of steps, and it shows: the best seed is well above anything before. But the
# seeds no longer agree. In the run that is saved here the third one has lost all that it had learned. (On another machine it
# may be another seed, or none: that is chance.) The ratios say why. Within one batch some actions became a *hundred* times as
# likely and more. So far away a batch of the old policy says nothing about the new one, and a step can ruin what was learned.

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
# Why do ratios run away? Because nothing ever says "enough". Take a single action that went well, $\hat A = 1$, tried with
# probability 0.1. Going up $\rho\hat A$, every step makes it likelier, until it is certain. PPO takes the **pessimistic
# minimum** with a clipped ratio instead:
#
# $$J = \mathbb{E}_t\Big[\min\big(\rho_t \hat A_t,\ \mathrm{clip}(\rho_t, 1-\varepsilon, 1+\varepsilon)\,\hat A_t\big)\Big],
# \qquad \varepsilon = 0.2.$$


# %%
def pull(surrogate, advantage, steps=150, rate=0.02):
    """Go up a surrogate of one sample of one action, and watch its ratio."""
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
assert 1.2 < clipped[-1] < 1.3  # the step that crossed 1.2 was the last

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8))
left.plot(free, color="tab:orange", label="ρÂ")
left.plot(clipped, color="tab:blue", label="with the clip")
left.axhspan(0.8, 1.2, color="0.9")
left.set(xlabel="steps on one sample", ylabel="ratio ρ", title="enough is enough")
left.legend(frameon=False)

ratio = torch.linspace(0, 2, 201)
for advantage, colour in ((1.0, "tab:green"), (-1.0, "tab:red")):
    weight = torch.full_like(ratio, advantage)
    right.plot(ratio, F.unclipped_surrogate(ratio, weight), color=colour, linewidth=0.8, linestyle="--")
    right.plot(ratio, F.clipped_surrogate(ratio, weight, clip=0.2), color=colour, label=f"Â = {advantage:+.0f}")
right.axvspan(0.8, 1.2, color="0.9")
right.set(xlabel="ratio ρ", ylabel="what is maximised", title="flat where it has moved far enough")
right.legend(frameon=False)
plt.show()

# %% [markdown]
# On the flat parts the gradient is zero: that action has been pushed far enough the right way. Elsewhere it is full, also
# *outside* the band if the action has moved the **wrong** way, so that it can come back. Four cases, all there are:

# %%
print("  Â     ρ    min picks   gradient")
for advantage, value in ((1.0, 1.5), (1.0, 0.5), (-1.0, 1.5), (-1.0, 0.5)):
    ratio = torch.tensor(value, requires_grad=True)
    weight = torch.tensor(advantage)
    F.clipped_surrogate(ratio, weight, clip=0.2).backward()
    fires = bool(F.clip_active(ratio, weight, clip=0.2))
    print(f"{advantage:+.0f}    {value}   {'clipped  ' if fires else 'unclipped'}   {float(ratio.grad):+.0f}")
    assert fires == (ratio.grad == 0)
    assert fires == ((advantage > 0) == (value > 1))  # moved the right way, and far enough

# %%
climb("PPO_CLIP")
print("largest ratio in each run:", *(round(max(row["ratio_max"] for row in rows), 1) for rows in RUNS["PPO_CLIP"]))

# %% [markdown]
# All three seeds have learned, and each is above every run of rungs 0 to 3. The clip is no wall: ratios still leave the band
# from 0.8 to 1.2, pushed by other samples that share the weights. It only stops *rewarding* them for it. But hundreds they
# are no longer.

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
# And this is all that tells the six apart. No classes, no trainers: values, each one switch from the one below.

# %%
for lower, upper in pairwise(surefoot.LADDER):
    turned = switches_between(lower, upper)
    assert len(turned) == 1
    print(*(f"{switch}: {before} -> {after}" for switch, (before, after) in turned.items()))

# %% [markdown]
# ## What this does and does not show
#
# Three seeds and 20,000 steps of one small task are an illustration, and no proof. [The benchmark](../benchmarks/ladder.md)
# has five times the steps, and intervals. `surefoot ladder TASK` does it on a task of yours:
# [climb the ladder](../how-to/climb-the-ladder.md).
#
# Try next, above:
#
# - another clip in `climb`: `replace(rung, trust_region=surefoot.Clip(0.5))`;
# - another $\lambda$, 0 and 1 included;
# - more `SEEDS`. Do rung 4's ends move?
#
# Then:
#
# - [The tutorial](../tutorial.md): runs that are killed and resume, recipes, the command line.
# - [The clip table](../how-to/clip-table.md): the four cases with sliders, and on samples of a run.
# - [Other trust regions](../how-to/trust-regions.md): the last switch has more positions, among them TRPO.
# - [Language models](../how-to/align-your-own-model.md): the same objective and the same functions, where an action is a
#   token and the reward a score of the answer.
