// Every level of the staircase from rewards to the clipped surrogate, as in surefoot.functional.

import { evaluate } from "./surrogate.js";

// Rewards of an episode. On text: β times the log-ratio to the reference is taken off at every token, and the score is added at the last.
export function rewards(episode, beta) {
  if (!episode.tokens) return episode.rewards;
  return episode.old_log_probs.map((p, t) => (t === episode.tokens.length - 1 ? episode.score : 0) - beta * (p - episode.ref_log_probs[t]));
}

// Discounted returns: G = r + γ G′, 0 after the end.
export function returns(earned, gamma) {
  const out = new Array(earned.length);
  let following = 0;
  for (let t = earned.length - 1; t >= 0; t--) out[t] = following = earned[t] + gamma * following;
  return out;
}

// TD residuals: δ = r + γ V′ − V, with V′ = 0 where terminated.
export function residuals(episode, earned, gamma) {
  return earned.map((reward, t) => reward + gamma * (episode.terminated[t] ? 0 : episode.next_values[t]) - episode.values[t]);
}

// Generalised advantages: A = δ + γλ A′.
export function advantages(deltas, gamma, lambda) {
  const out = new Array(deltas.length);
  let following = 0;
  for (let t = deltas.length - 1; t >= 0; t--) out[t] = following = deltas[t] + gamma * lambda * following;
  return out;
}

// All levels of an episode. rule is {low, high, dual} as for the clip table; epoch counts the passes over the batch from 0.
export function staircase(episode, beta, gamma, lambda, rule, epoch) {
  const earned = rewards(episode, beta);
  const deltas = residuals(episode, earned, gamma);
  const credit = advantages(deltas, gamma, lambda);
  const ratios = episode.log_probs[epoch].map((p, t) => Math.exp(p - episode.old_log_probs[t]));
  const terms = ratios.map((ratio, t) => evaluate(ratio, credit[t], rule));
  return {
    kl: episode.tokens ? episode.old_log_probs.map((p, t) => p - episode.ref_log_probs[t]) : null,
    reward: earned, return: returns(earned, gamma), value: episode.values, residual: deltas, advantage: credit,
    ratio: ratios, objective: terms.map((it) => it.value), terms,
  };
}
