"""The grader of the exercises: right answers pass, however they are written, and every planted mistake breaks a law."""

from pathlib import Path

import pytest
import torch
from torch.nn.functional import logsigmoid

from surefoot import functional as F
from surefoot.functional import exercises


def returns(rewards, ends, gamma, *, decay_ends=True):
    total, result = torch.zeros_like(rewards[..., 0]), []
    for t in reversed(range(rewards.shape[-1])):
        total = rewards[..., t] + gamma * (total.masked_fill(ends[..., t], 0) if decay_ends else total)
        result.insert(0, total)
    return torch.stack(result, -1)


def td(rewards, values, next_values, ends, gamma):
    return rewards + gamma * torch.where(ends, 0, next_values) - values


def gae(residuals, ends, gamma, lam):
    return returns(residuals, ends, gamma * lam)


def ratio(new, old):
    return (new - old).exp()


def clipped(ratios, advantages, clip):
    return torch.minimum(ratios * advantages, ratios.clamp(1 - clip, 1 + clip) * advantages)


def kl(log_p, log_q):
    return torch.where(log_p.exp() > 0, log_p.exp() * (log_p - log_q), 0).sum(-1)


def bradley_terry(chosen, rejected):
    return -logsigmoid(chosen - rejected).mean()


RIGHT = {
    "returns": returns,
    "baseline": lambda returns: returns - returns.mean(),
    "td": td,
    "gae": gae,
    "ratio": ratio,
    "clipped": clipped,
    "kl": kl,
    "bradley_terry": bradley_terry,
}
OTHERWISE = {
    "returns": lambda r, ends, gamma: F.discounted_returns(r, r * 0, terminated=ends, truncated=ends & False, gamma=gamma),
    "td": lambda r, v, n, ends, gamma: F.td_residual(r, v, n, terminated=ends, gamma=gamma),
    "clipped": lambda ρ, a, clip: F.clipped_surrogate(ρ, a, clip),
    "kl": lambda p, q: torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").nan_to_num(0).sum(-1),
    "bradley_terry": lambda c, r: torch.nn.functional.softplus(r - c).mean(),
}


def changed(rewards, ends, gamma):
    right = returns(rewards, ends, gamma)
    rewards.zero_()
    return right


# An answer, and a word of the law that it breaks.
MISTAKES = [
    ("returns", lambda r, ends, gamma: r.cumsum(-1), "γ = 1"),
    ("returns", lambda r, ends, gamma: returns(r, ends, 1.0), "γ = 0"),
    ("returns", lambda r, ends, gamma: returns(r, ends, gamma**2), "γ^k"),
    ("returns", lambda r, ends, gamma: returns(r, ends, gamma, decay_ends=False), "next episode"),
    ("returns", lambda r, ends, gamma: returns(r, ends.roll(1, -1), gamma), "next episode"),
    ("returns", changed, "arguments"),
    ("baseline", lambda r: r, "alike"),
    ("baseline", lambda r: (r - r.mean()) / (r.std() + 1e-8), "nothing else"),
    ("baseline", lambda r: r - r.median(), "mean is subtracted"),
    ("baseline", lambda r: r - r.mean(0), "each row or step"),
    ("td", lambda r, v, n, ends, gamma: r + gamma * v - n, "δ_t"),
    ("td", lambda r, v, n, ends, gamma: r + gamma * n - v, "counts as 0"),
    ("td", lambda r, v, n, ends, gamma: (r + gamma * n - v) * ~ends, "counts as 0"),
    ("td", lambda r, v, n, ends, gamma: r + gamma * n * ~ends - v, "NaN"),
    ("gae", lambda d, ends, gamma, lam: returns(d, ends, gamma), "λ = 0"),
    ("gae", lambda d, ends, gamma, lam: returns(d, ends, lam), "γ = 0"),
    ("gae", lambda d, ends, gamma, lam: gae(d, ends, gamma, lam**2), "(γλ)^k"),
    ("gae", lambda d, ends, gamma, lam: gae(d, ends & False, gamma, lam), "across an end"),
    ("ratio", lambda new, old: new - old, "not changed"),
    ("ratio", lambda new, old: (old - new).exp(), "exp"),
    ("ratio", lambda new, old: new.exp() / old.exp(), "rare"),
    ("ratio", lambda new, old: ratio(new, old).detach(), "gradient"),
    ("ratio", lambda new, old: (new - old).clamp(-5, 5).exp(), "no bound"),
    ("clipped", lambda ρ, a, clip: ρ * a, "grows no more above"),
    ("clipped", lambda ρ, a, clip: ρ.clamp(1 - clip, 1 + clip) * a, "below 1 − ε it is"),
    ("clipped", lambda ρ, a, clip: torch.maximum(ρ * a, ρ.clamp(1 - clip, 1 + clip) * a), "Â > 0"),
    ("clipped", lambda ρ, a, clip: -clipped(ρ, a, clip), "maximised"),
    ("clipped", lambda ρ, a, clip: clipped(ρ, a, 0.2), "third"),
    ("clipped", lambda ρ, a, clip: clipped(ρ, a, clip).detach(), "gradient"),
    ("kl", lambda p, q: kl(q, p), "each row"),
    ("kl", lambda p, q: kl(p, q).mean(), "shape"),
    ("kl", lambda p, q: -(p.exp() * q).sum(-1), "equal"),
    ("kl", lambda p, q: (p.exp() * (p.clamp(min=-1e9) - q)).sum(-1), "NaN"),
    ("kl", lambda p, q: kl(p.clamp(-20), q.clamp(-20)), "no bound"),
    ("kl", lambda p, q: (p.exp() * (p.masked_fill_(p == -torch.inf, 0) - q)).sum(-1), "arguments"),
    ("bradley_terry", lambda c, r: bradley_terry(r, c), "mean over pairs"),
    ("bradley_terry", lambda c, r: -logsigmoid(c).mean() - logsigmoid(-r).mean(), "½"),
    ("bradley_terry", lambda c, r: -torch.sigmoid(c - r).log().mean(), "distance"),
    ("bradley_terry", lambda c, r: bradley_terry(c, r.detach()), "lowers"),
    ("bradley_terry", lambda c, r: -logsigmoid(c - r), "shape"),
    ("bradley_terry", lambda c, r: float(bradley_terry(c, r)), "tensor"),
    ("bradley_terry", lambda c, r: c.wrong, "½, so the loss is log 2. Yours raises AttributeError"),
    ("bradley_terry", lambda c, r: logsigmoid(c.long()), "not implemented for 'Long'"),
]


@pytest.mark.parametrize("answers", [RIGHT, {**RIGHT, **OTHERWISE}])
def test_right_answers_pass_however_they_are_written(answers, capsys) -> None:
    assert exercises.grade(answers)
    assert capsys.readouterr().out.count("✓") == len(exercises.LAWS) == 8


def test_each_mistake_breaks_a_law_that_names_it() -> None:
    found = [(name, word, exercises.fault(name, answer)) for name, answer, word in MISTAKES]
    assert [row for row in found if row[2] is None or row[1] not in row[2]] == []


def test_what_is_not_written_yet_is_said(capsys) -> None:
    def td(*_: object) -> None:
        raise NotImplementedError

    assert not exercises.grade({**RIGHT, "td": td, "gae": ..., "kl": 5})
    with pytest.raises(TypeError, match=r"grade\(globals\(\)\)"):
        exercises.grade(gae)
    assert (
        "✗ td: to be written\n✗ gae: to be written\n✓ ratio\n✓ clipped\n✗ kl: is of type int; write" in capsys.readouterr().out
    )


def test_with_all_functions_the_notebooks_last_cell_trains_a_policy(capsys) -> None:
    text = (Path(__file__).parents[2] / "docs" / "notebooks" / "exercises.py").read_text("utf-8")
    begin, end = text.split("\n# %%\ndone = ")
    assert [name for name in exercises.LAWS if f"\ndef {name}(" not in begin] == []
    exec("done = " + end, {**RIGHT, "torch": torch, "grade": exercises.grade})
    assert "epoch 9: loss" in capsys.readouterr().out
