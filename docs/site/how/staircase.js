// Every level of the staircase from rewards to the clipped surrogate, as in surefoot.functional.

import { evaluate } from "./surrogate.js";

// Discounted returns: G = r + γ G′, 0 after the end.
export function returns(rewards, gamma) {
  const out = new Array(rewards.length);
  let following = 0;
  for (let t = rewards.length - 1; t >= 0; t--) out[t] = following = rewards[t] + gamma * following;
  return out;
}

// TD residuals: δ = r + γ V′ − V, with V′ = 0 where terminated.
export function residuals(episode, gamma) {
  return episode.rewards.map((reward, t) => reward + gamma * (episode.terminated[t] ? 0 : episode.next_values[t]) - episode.values[t]);
}

// Generalised advantages: A = δ + γλ A′.
export function advantages(deltas, gamma, lambda) {
  const out = new Array(deltas.length);
  let following = 0;
  for (let t = deltas.length - 1; t >= 0; t--) out[t] = following = deltas[t] + gamma * lambda * following;
  return out;
}

// All levels of an episode. rule is {low, high, dual} as for the clip table; epoch counts the passes over the batch from 0.
export function staircase(episode, gamma, lambda, rule, epoch) {
  const deltas = residuals(episode, gamma);
  const credit = advantages(deltas, gamma, lambda);
  const ratios = episode.log_probs[epoch].map((p, t) => Math.exp(p - episode.old_log_probs[t]));
  const terms = ratios.map((ratio, t) => evaluate(ratio, credit[t], rule));
  return {
    reward: episode.rewards, return: returns(episode.rewards, gamma), value: episode.values, residual: deltas, advantage: credit,
    ratio: ratios, objective: terms.map((it) => it.value), terms,
  };
}
