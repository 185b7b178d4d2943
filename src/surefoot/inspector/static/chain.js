// All numbers of one step, from its reward to its objective, recomputed from the trace.
// A line is {name, text, value, recorded, ok}: the formula with numbers, its result, and the number in the trace.

import { fine, short } from "./api.js";
import { evaluate } from "./surrogate.js";

const TOLERANCE = 2e-5; // of float32 sums, relative to their largest number

export function agrees(value, recorded, ...parts) {
  if (!Number.isFinite(recorded) || !Number.isFinite(value)) return Object.is(value, recorded);
  return Math.abs(value - recorded) <= TOLERANCE * (1 + Math.max(Math.abs(recorded), ...parts.map(Math.abs)));
}

const n = (x) => (x < 0 ? `(${short(x)})` : short(x));
const line = (name, text, value, recorded, ...parts) => ({ name, text, value, recorded, ok: agrees(value, recorded, ...parts), digits: name === "ratio" ? fine : short });

// The index of the policy's next decision in the row; null if the episode or the batch ends here.
function later(row, t) {
  if (row.terminated[t] || row.truncated[t]) return null;
  for (let i = t + 1; i < row.mask.length; i++) if (row.mask[i]) return i;
  return row.first + row.mask.length < row.length ? -1 : null; // -1: beyond the part that was sent
}

export function credit(trace, row, t, valueLambda = "none") {
  const [r, v, beyond] = [row.rewards[t], row.values[t], row.terminated[t] ? 0 : row.next_values[t]];
  const lines = [];
  const parts = row.reward_parts;
  if (parts.kl && row.ref_log_probs && row.old_log_probs) {
    const [p, q] = [row.old_log_probs[t], row.ref_log_probs[t]];
    lines.push(line("KL to the reference", `log π − log π_ref = ${short(p)} − ${n(q)}`, p - q, parts.kl[t], p, q));
  }
  if (parts.score && parts.kl && row.reference_beta !== null && row.reference_beta !== undefined) {
    const [s, kl, beta] = [parts.score[t], parts.kl[t], row.reference_beta];
    lines.push(line("reward", `r = score − β · KL = ${short(s)} − ${short(beta)} · ${n(kl)}`, s - beta * kl, r, s, beta * kl));
  } else {
    const raw = parts.environment?.[t] ?? parts.score?.[t];
    const scaled = raw !== undefined && !agrees(raw, r);
    lines.push({ name: "reward", text: scaled ? `r, after normalisation of ${short(raw)}` : "r", value: r, recorded: r, ok: true });
  }
  const [delta, a, target] = [row.td_residuals[t], row.advantages[t], row.returns[t]];
  const next = later(row, t);
  if (trace.baseline === "critic") {
    const ahead = row.terminated[t] ? "0" : n(beyond);
    lines.push(line("TD residual", `δ = r + γ V′ − V = ${short(r)} + ${short(trace.gamma)} · ${ahead} − ${n(v)}`, r + trace.gamma * beyond - v,
      row.td_residuals[t], r, v, beyond));
    const following = next === null ? 0 : next < 0 ? row.beyond : row.advantages[next];
    const decay = trace.gamma * trace.gae_lambda;
    lines.push(next === null
      ? line("advantage", `A = δ, at the last step = ${short(delta)}`, delta, a)
      : line("advantage", `A = δ + γλ A′ = ${short(delta)} + ${short(trace.gamma)} · ${short(trace.gae_lambda)} · ${n(following)}`,
        delta + decay * following, a, delta, following));
    if (valueLambda === "none" || valueLambda === trace.gae_lambda) lines.push(line("critic’s target", `R̂ = A + V = ${short(a)} + ${n(v)}`, a + v, target, a, v));
    else lines.push({ name: "critic’s target", text: `R̂, at λ = ${short(valueLambda)}`, value: target, recorded: target, ok: true });
  } else {
    if (next === null || next >= 0) {
      const following = next === null ? 0 : row.returns[next];
      lines.push(line("return", `G = r + γ G′ = ${short(r)} + ${short(trace.gamma)} · ${n(following)}`, r + trace.gamma * following, target, r, following));
    }
    if (trace.baseline === null) lines.push(line("advantage", "A = G", target, a));
    else if (trace.baseline === "mean") lines.push(line("advantage", `A = G − mean = ${short(target)} − ${n(target - a)}`, target - (target - a), a, target));
    else lines.push(line("advantage", "A, of the response within its group", row.advantages[row.mask.indexOf(true)], a));
  }
  return lines;
}

// GAE between the TD residual and the return: the n-step advantages A⁽ⁿ⁾ = δ + γ δ′ + … of a step, each with its weight. The last
// one reaches the end of the episode or of the batch and has all weight that is left. Null without a critic. A line of `steps` is
// {n, sum, telescoped, weight}: the sum of residuals, and r + γ r′ + … + γⁿ V − V, to which it collapses.
export function nStep(trace, row, t) {
  if (trace.baseline !== "critic") return null;
  const [gamma, lambda] = [trace.gamma, trace.gae_lambda];
  const steps = [];
  let [sum, rewards, discount, power, at] = [0, 0, 1, 1, t];
  for (;;) {
    const ahead = row.terminated[at] ? 0 : row.next_values[at];
    sum += discount * row.td_residuals[at];
    rewards += discount * row.rewards[at];
    discount *= gamma;
    steps.push({ n: steps.length + 1, sum, telescoped: rewards + discount * ahead - row.values[t], weight: (1 - lambda) * power });
    const next = later(row, at);
    if (next === null || next < 0) {
      steps.at(-1).weight = power;
      const beyond = next === null ? 0 : discount * power * lambda * row.beyond;
      const mean = steps.reduce((total, step) => total + step.weight * step.sum, beyond);
      return { steps, beyond, value: row.values[t], mean: line("mean", "Σ weight · A⁽ⁿ⁾", mean, row.advantages[t], ...steps.map((step) => step.weight * step.sum)) };
    }
    power *= lambda;
    at = next;
  }
}

export function visit(trace, row, t, k) {
  const lines = surrogate(trace, row, t, k);
  if (lines.length && row.visits.penalty_kl) lines.push(penalty(trace, row, t, k));
  if (!lines.length || !row.visits.weights) return lines;
  const [w, old, sampler] = [row.visits.weights[k][t], row.old_log_probs[t], row.behaviour_log_probs[t]];
  if (trace.importance_mode.startsWith("sequence")) lines.push({ name: "weight", text: "w of J, from π_old / π_b of the whole response", value: w, recorded: null, ok: true });
  else {
    const ratio = Math.exp(old - sampler);
    const above = trace.importance_mode === "token_mask" ? 0 : trace.importance_cap;
    lines.push(line("weight", `w of J = exp(log π_old − log π_b) = exp(${fine(old)} − ${sampler < 0 ? `(${fine(sampler)})` : fine(sampler)}), ${short(above)} above ${short(trace.importance_cap)}`,
      ratio > trace.importance_cap ? above : ratio, w, old, sampler));
  }
  return lines;
}

// On text the KL follows from the log-probabilities; in control it is that of the whole distributions, which a trace has not.
function penalty(trace, row, t, k) {
  const kl = row.visits.penalty_kl[k][t];
  if (kl === 0 && row.visits.log_probs[k][t] !== row.old_log_probs[t]) return { name: "penalty", text: "0: the KL penalty does not apply to this sample", value: 0, recorded: null, ok: true };
  if (!row.tokens) return { name: "penalty", text: `β · KL(π_old‖π_θ) = ${short(trace.beta)} · ${n(kl)}`, value: trace.beta * kl, recorded: null, ok: true };
  const x = row.visits.log_probs[k][t] - row.old_log_probs[t];
  return line("penalty", `β · (exp(x) − 1 − x) = ${short(trace.beta)} · ${n(kl)} with x = log π − log π_old = ${fine(x)}`, trace.beta * (Math.expm1(x) - x), trace.beta * kl, 1);
}

function surrogate(trace, row, t, k) {
  const seen = row.visits;
  if (!seen.updates[k] || seen.updates[k][t] < 0) return [];
  const [p, rho, used, mean, variance, gain] = ["log_probs", "ratio", "advantages", "mean", "variance", "surrogate"].map((name) => seen[name][k][t]);
  const branch = row.branches[seen.branch[k][t]];
  const lines = [];
  const a = row.advantages[t];
  lines.push(mean === 0 && variance === 1
    ? line("advantage, as used", "Â = A", a, used)
    : line("advantage, as used", `Â = (A − μ) / √(σ² + 1e−8) = (${short(a)} − ${n(mean)}) / ${short(Math.sqrt(variance + 1e-8))}`,
      (a - mean) / Math.sqrt(variance + 1e-8), used, a / Math.sqrt(variance + 1e-8), mean / Math.sqrt(variance + 1e-8)));
  if (branch === "log_prob") {
    lines.push(line("objective", `J = log π · Â = ${short(p)} · ${n(used)}`, p * used, gain, p));
    return lines;
  }
  if (row.old_log_probs) {
    const old = row.old_log_probs[t];
    if (trace.ratio === "token") lines.unshift(line("ratio", `ρ = exp(log π − log π_old) = exp(${fine(p)} − ${old < 0 ? `(${fine(old)})` : fine(old)})`, Math.exp(p - old), rho, p, old));
    else if (row.length === row.mask.length) {
      const kept = row.mask.flatMap((keep, i) => (keep ? [i] : []));
      const whole = kept.reduce((sum, i) => sum + seen.log_probs[k][i] - row.old_log_probs[i], 0) / kept.length;
      lines.unshift(line("ratio", `ρ = exp(mean of log π − log π_old over the response) = exp(${short(whole)})`, Math.exp(whole), rho, p, old));
    }
  }
  if (branch === "left_out") {
    lines.push(line("objective", "J = 0: the response is left out", 0, gain));
    return lines;
  }
  if (branch === "weighted") {
    const weight = Math.min(rho, trace.max_weight);
    lines.push(line("objective", `J = min(ρ, ${short(trace.max_weight)}) Â log π = ${fine(weight)} · ${n(used)} · ${n(p)}`, weight * used * p, gain, p));
    return lines;
  }
  if (!trace.rule) {
    lines.push(line("objective", `J = ρÂ = ${fine(rho)} · ${n(used)}`, rho * used, gain));
    return lines;
  }
  const it = evaluate(rho, used, trace.rule);
  lines.push({ name: "unclipped", text: `ρÂ = ${fine(rho)} · ${n(used)}`, value: it.unclipped, recorded: null, ok: true, taken: branch === "unclipped" });
  lines.push({ name: "clipped", text: `clip(ρ, ${fine(1 - trace.rule.low)}, ${fine(1 + trace.rule.high)}) Â = ${fine(it.held)} · ${n(used)}`, value: it.clipped, recorded: null,
    ok: true, taken: branch === "clipped" });
  const least = `min(${short(it.unclipped)}, ${short(it.clipped)})`;
  lines.push(line("objective", it.bound === null ? `J = ${least}` : `J = max(${least}, ${short(it.bound)})`, it.value, gain, it.unclipped));
  return lines;
}

// Recompute every number of a row, or of the part that was sent: how many, and which differ from the trace.
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
