// The staircase of one step, from its reward to what was maximised, with every number of the trace worked out again.
// A line is {name, text, value, recorded, ok}: the arithmetic as it is written, what it gives, what the trace has.

import { fine, short } from "./api.js";
import { judge } from "./surrogate.js";

const TOLERANCE = 2e-5; // of float32 sums, beside the largest number in them

export function agrees(value, recorded, ...parts) {
  if (!Number.isFinite(recorded) || !Number.isFinite(value)) return Object.is(value, recorded);
  return Math.abs(value - recorded) <= TOLERANCE * (1 + Math.max(Math.abs(recorded), ...parts.map(Math.abs)));
}

const n = (x) => (x < 0 ? `(${short(x)})` : short(x));
const line = (name, text, value, recorded, ...parts) => ({ name, text, value, recorded, ok: agrees(value, recorded, ...parts), digits: name === "ratio" ? fine : short });

// The next decision of the policy in the row, or null where its episode or the batch ends here.
function later(row, t) {
  if (row.terminated[t] || row.truncated[t]) return null;
  for (let i = t + 1; i < row.mask.length; i++) if (row.mask[i]) return i;
  return row.first + row.mask.length < row.length ? -1 : null; // beyond what was sent
}

export function credit(trace, row, t, valueLambda = "none") {
  const [r, v, beyond] = [row.rewards[t], row.values[t], row.terminated[t] ? 0 : row.next_values[t]];
  const found = [];
  const parts = row.reward_parts;
  if (parts.kl && row.ref_log_probs && row.old_log_probs) {
    const [p, q] = [row.old_log_probs[t], row.ref_log_probs[t]];
    found.push(line("KL to the reference", `log π − log π_ref = ${short(p)} − ${n(q)}`, p - q, parts.kl[t], p, q));
  }
  if (parts.score && parts.kl && row.reference_beta !== null && row.reference_beta !== undefined) {
    const [s, kl, beta] = [parts.score[t], parts.kl[t], row.reference_beta];
    found.push(line("reward", `r = score − β · KL = ${short(s)} − ${short(beta)} · ${n(kl)}`, s - beta * kl, r, s, beta * kl));
  } else {
    const raw = parts.environment?.[t] ?? parts.score?.[t];
    const scaled = raw !== undefined && !agrees(raw, r);
    found.push({ name: "reward", text: scaled ? `r, after normalisation of ${short(raw)}` : "r", value: r, recorded: r, ok: true });
  }
  const ahead = row.terminated[t] ? "0" : n(beyond);
  found.push(line("TD residual", `δ = r + γ V′ − V = ${short(r)} + ${short(trace.gamma)} · ${ahead} − ${n(v)}`, r + trace.gamma * beyond - v,
    row.td_residuals[t], r, v, beyond));
  const [delta, a, target] = [row.td_residuals[t], row.advantages[t], row.returns[t]];
  const next = later(row, t);
  if (trace.baseline === "critic") {
    const following = next === null ? 0 : next < 0 ? row.beyond : row.advantages[next];
    const decay = trace.gamma * trace.gae_lambda;
    found.push(next === null
      ? line("advantage", `A = δ, the last one = ${short(delta)}`, delta, a)
      : line("advantage", `A = δ + γλ A′ = ${short(delta)} + ${short(trace.gamma)} · ${short(trace.gae_lambda)} · ${n(following)}`,
        delta + decay * following, a, delta, following));
    if (valueLambda === "none" || valueLambda === trace.gae_lambda) found.push(line("critic’s target", `R̂ = A + V = ${short(a)} + ${n(v)}`, a + v, target, a, v));
    else found.push({ name: "critic’s target", text: `R̂, at λ = ${short(valueLambda)}`, value: target, recorded: target, ok: true });
  } else {
    if (next === null || next >= 0) {
      const following = next === null ? 0 : row.returns[next];
      found.push(line("return", `G = r + γ G′ = ${short(r)} + ${short(trace.gamma)} · ${n(following)}`, r + trace.gamma * following, target, r, following));
    }
    if (trace.baseline === null) found.push(line("advantage", "A = G", target, a));
    else if (trace.baseline === "mean") found.push(line("advantage", `A = G − mean = ${short(target)} − ${n(target - a)}`, target - (target - a), a, target));
    else found.push(line("advantage", "A, of the response among its group", row.advantages[row.mask.indexOf(true)], a));
  }
  return found;
}

export function visit(trace, row, t, k) {
  const seen = row.visits;
  if (!seen.updates[k] || seen.updates[k][t] < 0) return [];
  const [p, rho, used, mean, variance, gain] = ["log_probs", "ratio", "advantages", "mean", "variance", "surrogate"].map((name) => seen[name][k][t]);
  const branch = row.branches[seen.branch[k][t]];
  const found = [];
  const a = row.advantages[t];
  found.push(mean === 0 && variance === 1
    ? line("advantage, as used", "Â = A", a, used)
    : line("advantage, as used", `Â = (A − μ) / √(σ² + 1e−8) = (${short(a)} − ${n(mean)}) / ${short(Math.sqrt(variance + 1e-8))}`,
      (a - mean) / Math.sqrt(variance + 1e-8), used, a / Math.sqrt(variance + 1e-8), mean / Math.sqrt(variance + 1e-8)));
  if (branch === "log_prob") {
    found.push(line("objective", `J = log π · Â = ${short(p)} · ${n(used)}`, p * used, gain, p));
    return found;
  }
  if (row.old_log_probs) {
    const old = row.old_log_probs[t];
    if (trace.ratio === "token") found.unshift(line("ratio", `ρ = exp(log π − log π_old) = exp(${fine(p)} − ${old < 0 ? `(${fine(old)})` : fine(old)})`, Math.exp(p - old), rho, p, old));
    else if (row.length === row.mask.length) {
      const kept = row.mask.flatMap((keep, i) => (keep ? [i] : []));
      const whole = kept.reduce((sum, i) => sum + seen.log_probs[k][i] - row.old_log_probs[i], 0) / kept.length;
      found.unshift(line("ratio", `ρ = exp(mean of log π − log π_old over the response) = exp(${short(whole)})`, Math.exp(whole), rho, p, old));
    }
  }
  if (!trace.rule) {
    found.push(line("objective", `J = ρÂ = ${fine(rho)} · ${n(used)}`, rho * used, gain));
    return found;
  }
  const it = judge(rho, used, trace.rule);
  found.push({ name: "unclipped", text: `ρÂ = ${fine(rho)} · ${n(used)}`, value: it.unclipped, recorded: null, ok: true, taken: branch === "unclipped" });
  found.push({ name: "clipped", text: `clip(ρ, ${fine(1 - trace.rule.low)}, ${fine(1 + trace.rule.high)}) Â = ${fine(it.held)} · ${n(used)}`, value: it.clipped, recorded: null,
    ok: true, taken: branch === "clipped" });
  const least = `min(${short(it.unclipped)}, ${short(it.clipped)})`;
  found.push(line("objective", it.bound === null ? `J = ${least}` : `J = max(${least}, ${short(it.bound)})`, it.value, gain, it.unclipped));
  return found;
}

// Every number of a row, or of the part of it that is here: how many were worked out again, and which do not agree.
export function audit(trace, row, valueLambda) {
  let count = 0;
  const wrong = [];
  for (let t = 0; t < row.mask.length; t++) {
    if (!row.mask[t]) continue;
    const lines = credit(trace, row, t, valueLambda);
    for (let k = 0; k < row.visits.updates.length; k++) lines.push(...visit(trace, row, t, k));
    for (const each of lines) {
      count++;
      if (!each.ok) wrong.push({ t, ...each });
    }
  }
  return { count, wrong };
}
