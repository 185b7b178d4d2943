"""Every number of a trace from the ones below it, in plain Python from the definitions; nothing here imports a formula."""

import math

import pytest

from surefoot.core.traces import BRANCHES, Trace, TracedRow


def check_chain(trace: Trace, normalised: str | None, ratios: bool = True) -> set[str]:
    """Assert that all of it adds up, and say which branches were met.

    normalised   "minibatch" or "batch", as the objective says; "minibatch" may differ from pass to pass
    ratios       whether the surrogate has them
    """
    assert trace.rows
    met: set[str] = set()
    for row in trace.rows:
        kept = [t for t, keep in enumerate(row.mask.tolist()) if keep]
        assert kept[0] == 0
        assert kept[-1] == len(row.mask) - 1
        check_credit(trace, row, kept)
        for visit in range(len(row.visits.updates)):
            met |= check_visit(trace, row, kept, visit, normalised, ratios)
    return met


def close(x: float) -> object:
    return pytest.approx(x, rel=2e-5, abs=2e-5)


def check_credit(trace: Trace, row: TracedRow, kept: list[int]) -> None:
    """δ = r + γV′ − V; A = δ + γλA′ up to the end of the piece, and R̂ = A + V. Without a critic A is the return."""
    r, v, following = row.rewards.tolist(), row.values.tolist(), row.next_values.tolist()
    delta, a, returns = row.td_residuals.tolist(), row.advantages.tolist(), row.returns.tolist()
    ended = (row.terminated | row.truncated).tolist()
    assert not any(ended[t] for t in kept[:-1]), "a piece ends where its episode does"
    later, later_return = 0.0, 0.0
    for t in reversed(kept):
        beyond = 0.0 if row.terminated[t] else following[t]
        assert delta[t] == close(r[t] + trace.gamma * beyond - v[t])
        if trace.baseline == "critic":
            later = delta[t] + trace.gamma * trace.gae_lambda * later
            assert a[t] == close(later)
            assert returns[t] == close(later + v[t])
        else:
            later_return = r[t] + trace.gamma * later_return
            assert returns[t] == close(later_return)
            assert trace.baseline is not None or a[t] == returns[t]
    if trace.baseline in ("group", "leave_one_out", "pair"):
        assert len({a[t] for t in kept}) == 1, "every token of a response is worth the same"
    if trace.baseline == "mean":
        assert {round(returns[t] - a[t], 4) for t in kept} == {round(returns[kept[0]] - a[kept[0]], 4)}


def check_visit(trace: Trace, row: TracedRow, kept: list[int], visit: int, normalised: str | None, ratios: bool) -> set[str]:
    """ρ = exp(log π − log π_old), of each token or of their mean; Â = (A − μ)/√(σ² + 1e-8); the surrogate is the pessimistic
    branch.
    """
    seen, met = row.visits, set()
    old_log_probs = seen.log_probs[visit] if row.old_log_probs is None else row.old_log_probs
    log_ratios = [float(seen.log_probs[visit, t]) - float(old_log_probs[t]) for t in kept]
    flows = seen.gradient_flows[visit].tolist()
    for t in range(len(row.mask)):
        if t not in kept or seen.updates[visit, t] < 0:
            assert seen.updates[visit, t] == -1
            assert not flows[t]
            continue
        log_prob, rho, used = (float(x[visit, t]) for x in (seen.log_probs, seen.ratio, seen.advantages))
        mean, variance, gain = (float(x[visit, t]) for x in (seen.mean, seen.variance, seen.surrogate))
        branch = BRANCHES[int(seen.branch[visit, t])]
        log_ratio = log_prob - float(old_log_probs[t]) if trace.ratio == "token" else sum(log_ratios) / len(log_ratios)
        assert rho == close(math.exp(log_ratio))
        if normalised is None:
            assert (mean, variance) == (0.0, 1.0)
            assert used == float(row.advantages[t])
        else:
            assert used == close((float(row.advantages[t]) - mean) / math.sqrt(variance + 1e-8))
        met.add(branch)
        if not ratios:
            assert branch == "log_prob"
            assert gain == close(log_prob * used)
            assert flows[t]
            continue
        if branch in ("weighted", "left_out"):
            bound = math.inf if trace.max_weight is None else trace.max_weight
            assert gain == (0 if branch == "left_out" else close(min(rho, bound) * used * log_prob))
            assert (branch == "weighted") == flows[t] == (trace.max_weight is not None)
            away = sum(-x for x in log_ratios) / len(log_ratios)
            assert branch == "weighted" or (used < 0 < away)
            continue
        terms = {"unclipped": rho * used}
        if trace.clip is not None:
            terms["clipped"] = min(max(rho, 1 - trace.clip), 1 + (trace.clip_high or 0.0)) * used
        if trace.dual_clip is not None:
            terms["dual_clip"] = trace.dual_clip * used
        wanted = min(terms["unclipped"], terms.get("clipped", math.inf))
        if trace.dual_clip is not None and used < 0:
            wanted = max(wanted, terms["dual_clip"])
        assert gain == close(wanted)
        assert gain == close(terms[branch])
        assert flows[t] == (branch == "unclipped")
        if flows[t]:  # the unclipped term moves with ρ, so where it is taken it is no worse than what would stand still
            assert all(rho * used <= other + 1e-6 for name, other in terms.items() if name == "clipped")
    return met
