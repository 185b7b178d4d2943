"""Eight exercises, from the return to Bradley–Terry, and a grader that says which law an answer breaks.

The notebook docs/notebooks/exercises.ipynb asks for the functions. They take and give tensors; time is the last axis.
"""

from collections.abc import Callable, Mapping
from math import log
from typing import Any

import torch
from torch import Tensor

from surefoot.functional.returns import discounted_returns, td_residual

Answer = Callable[..., Any]


def _t(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def _slope(answer: Answer, x: Tensor, *others: Any) -> Tensor:
    """The gradient of the answer's sum with regard to its first argument; 0 where it was detached."""
    x = x.clone().requires_grad_()
    total = answer(x, *others).sum()
    return torch.autograd.grad(total, x)[0] if total.requires_grad else torch.zeros_like(x)


R = _t([1, 2, 3, 4, 5], [0.5, -1, 2, -0.25, 0])  # rewards, returns or residuals of two rows
V = _t([2, -1, 0.5, 3, 1], [0.1, 0.2, -0.3, 0.4, 2])
NEXT = _t([-1, 0.5, 3, 1, 7], [0.2, -0.3, 0.4, 2, -2])
NO = torch.zeros(2, 5, dtype=torch.bool)
ENDS = torch.tensor([[False, False, True, False, False], [False, True, False, False, True]])
LATER = _t(0, 0, 1)  # one reward, two steps later
RATIOS = _t(0.5, 0.9, 1, 1.1, 1.5)
OLD = _t(-1, -2, -800)
NEW = OLD + _t(log(2), -log(4), log(1.5))
P, Q = _t([0.5, 0.5], [0.9, 0.1]), _t([0.25, 0.75], [0.9, 0.1])
NEVER = _t([[1, 0], [1, 0]], [[0.5, 0.5], [1, 0]])  # p and q
CHOSEN, REJECTED = PAIRS = _t([2, 0], [1, 3])
RIGHT = torch.sigmoid(CHOSEN - REJECTED)  # the probability that the chosen answer wins
LOSS = -RIGHT.log().mean()


def _sums(ends: Tensor, gamma: float) -> Tensor:
    return discounted_returns(R, torch.zeros_like(R), terminated=ends, truncated=NO, gamma=gamma)


def _residuals(ends: Tensor) -> Tensor:
    return td_residual(R, V, NEXT, terminated=ends, gamma=0.9)


# For each exercise, from the first idea to the last: a law, what the answer gives, what it should give.
LAWS: dict[str, list[tuple[str, Callable[[Answer], Any], Tensor]]] = {
    "returns": [
        ("with γ = 1 it is the sum of the rewards from t on", lambda f: f(R[0], NO[0], 1.0), _t(15, 14, 12, 9, 5)),
        ("with γ = 0 it is the reward of step t alone", lambda f: f(R, NO, 0.0), R),
        ("G_t = r_t + γ G_{t+1}: a reward k steps later counts γ^k", lambda f: f(LATER, NO[0, :3], 0.5), _t(0.25, 0.5, 1)),
        ("rewards of the next episode don't count: start again at every end", lambda f: f(R, ENDS, 0.9), _sums(ENDS, 0.9)),
    ],
    "baseline": [
        ("returns that are all alike carry no signal: 0", lambda f: f(_t(7, 7, 7)), _t(0, 0, 0)),
        ("the mean is subtracted and nothing else: differences keep their size and sign", lambda f: f(R[1]), R[1] - 0.25),
        ("one mean for the whole batch, not one for each row or step", lambda f: f(R), R - R.mean()),
    ],
    "td": [
        ("δ_t = r_t + γ V(s_{t+1}) − V(s_t)", lambda f: f(R, V, NEXT, NO, 0.9), _residuals(NO)),
        ("after the last step of an episode V(s_{t+1}) counts as 0", lambda f: f(R, V, NEXT, ENDS, 0.9), _residuals(ENDS)),
        (
            "what stands beyond an end may be NaN: select, don't multiply by 0",
            lambda f: f(R, V, NEXT.masked_fill(ENDS, torch.nan), ENDS, 0.9),
            _residuals(ENDS),
        ),
    ],
    "gae": [
        ("with λ = 0 it is the TD residual", lambda f: f(R, NO, 0.9, 0.0), R),
        ("with γ = 0 it is the TD residual", lambda f: f(R, NO, 0.0, 0.9), R),
        ("with λ = 1 it is the discounted sum of the residuals from t on", lambda f: f(R, NO, 0.9, 1.0), _sums(NO, 0.9)),
        ("a residual k steps later counts (γλ)^k", lambda f: f(LATER, NO[0, :3], 0.5, 0.5), _t(1 / 16, 1 / 4, 1)),
        ("nothing flows back across an end; the end's own residual counts", lambda f: f(R, ENDS, 0.9, 0.8), _sums(ENDS, 0.72)),
    ],
    "ratio": [
        ("it is 1 where the policy has not changed, however rare the action", lambda f: f(OLD, OLD), _t(1, 1, 1)),
        ("it is the new probability over the old: exp(log π − log π_old)", lambda f: f(NEW, OLD), _t(2, 0.25, 1.5)),
        ("it has no bound: the clip is another function", lambda f: f(_t(0, -20), _t(-20, 0)), _t(20, -20).exp()),
        ("its gradient is ρ ∇ log π: don't detach it", lambda f: _slope(f, NEW, OLD), _t(2, 0.25, 1.5)),
    ],
    "clipped": [
        (
            "inside the clip it is ρ Â for each step, to be maximised",
            lambda f: f(RATIOS[1:4], _t(2, 2, 2), 0.2),
            _t(1.8, 2, 2.2),
        ),
        (
            "Â > 0: it grows no more above 1 + ε; below 1 − ε it is ρ Â",
            lambda f: f(RATIOS, RATIOS**0, 0.2),
            _t(0.5, 0.9, 1, 1.1, 1.2),
        ),
        (
            "Â < 0: it grows no more below 1 − ε; above 1 + ε it is ρ Â",
            lambda f: f(RATIOS, -(RATIOS**0), 0.2),
            _t(-0.8, -0.9, -1, -1.1, -1.5),
        ),
        ("ε is the third argument", lambda f: f(RATIOS, RATIOS**0, 0.05), _t(0.5, 0.9, 1, 1.05, 1.05)),
        (
            "the gradient of a clipped step is 0, of any other Â",
            lambda f: _slope(f, RATIOS[[4, 0, 4, 0]], _t(1, 1, -1, -1), 0.2),
            _t(0, 1, -1, 0),
        ),
    ],
    "kl": [
        ("it is 0 where both are equal", lambda f: f(Q[0].log(), Q[0].log()), torch.tensor(0.0)),
        ("for each row Σ_a p(a) (log p(a) − log q(a))", lambda f: f(P.log(), Q.log()), (P * (P / Q).log()).sum(-1)),
        ("an action that p never takes adds 0, not NaN, even if q never takes it", lambda f: f(*NEVER.log()), _t(log(2), 0)),
        ("it has no bound: q may be as small as e^-1000", lambda f: f(P[:1].log(), _t([-1000, 0])), _t(500 - log(2))),
    ],
    "bradley_terry": [
        ("equal scores say ½, so the loss is log 2", lambda f: f(CHOSEN, CHOSEN), torch.tensor(log(2))),
        ("it is the mean over pairs of −log σ(chosen − rejected)", lambda f: f(CHOSEN, REJECTED), LOSS),
        ("only differences count: add a constant to all scores", lambda f: f(CHOSEN + 9, REJECTED + 9), LOSS),
        ("for wrong scores that are far apart it is the distance: logsigmoid", lambda f: f(_t(-1000), _t(1000)), _t(2000)[0]),
        (
            "its gradient lifts the chosen score and lowers the rejected one",
            lambda f: _slope(lambda pairs: f(*pairs), PAIRS),
            torch.stack((RIGHT - 1, 1 - RIGHT)) / 2,
        ),
    ],
}


def fault(name: str, answer: Any) -> str | None:
    """The first law of an exercise that an answer breaks, with both values; None where all hold.

    Raises KeyError for a name that is not in LAWS.
    """
    if not callable(answer):
        return "to be written" if answer in (None, ...) else f"is of type {type(answer).__name__}; write a function"
    changed = False

    def watched(*arguments: Any) -> Any:
        nonlocal changed
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        value = answer(*copies)
        pairs = ((x, y) for x, y in zip(arguments, copies, strict=True) if isinstance(x, Tensor))
        changed |= not all(torch.allclose(x, y, rtol=0, atol=0, equal_nan=True) for x, y in pairs)
        return value

    for law, given, right in LAWS[name]:
        try:
            value = given(watched)
        except Exception as error:  # whatever a reader's code raises is a line of the grader
            if isinstance(error, NotImplementedError) and not str(error):
                return "to be written"
            return f"{law}. Yours raises {type(error).__name__}: {error}"
        if changed:
            return "it changes its arguments; work on a copy"
        if not isinstance(value, Tensor):
            return f"{law}. Yours is a {type(value).__name__}; return a tensor"
        if value.shape != right.shape:
            return f"{law}. Yours has the shape {list(value.shape)}, not {list(right.shape)}"
        if not torch.allclose(value.detach().double(), right.double(), atol=1e-6):
            return f"{law}. Yours: {_shown(value)}; expected: {_shown(right)}"
    return None


def grade(answers: Mapping[str, Any]) -> bool:
    """Print a line for each exercise, and return whether all are right.

    ``answers`` holds the functions by name: in a notebook, ``grade(globals())``. Raises TypeError if it is no mapping.
    """
    if not isinstance(answers, Mapping):
        raise TypeError("grade takes the functions by name; call grade(globals())")
    faults = {name: fault(name, answers.get(name)) for name in LAWS}
    for name, what in faults.items():
        print(f"✓ {name}" if what is None else f"✗ {name}: {what}")
    return not any(faults.values())


def _shown(x: Tensor) -> str:
    return str(((x.detach().double() * 1000).round() / 1000).tolist())
