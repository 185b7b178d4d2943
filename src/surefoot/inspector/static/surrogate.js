// The clipped surrogate of one sample, term by term, as in surefoot.functional.clipped_surrogate and clip_active.
// A rule is {low, high, dual}: ε below 1, ε above 1, and the bound c of the dual clip or null.

export function evaluate(ratio, advantage, rule) {
  const held = Math.min(Math.max(ratio, 1 - rule.low), 1 + rule.high);
  const unclipped = ratio * advantage;
  const clipped = held * advantage;
  const lesser = Math.min(unclipped, clipped);
  const bound = rule.dual !== null && advantage < 0 ? rule.dual * advantage : null;
  const value = bound === null ? lesser : Math.max(lesser, bound);
  const above = ratio > 1 + rule.high;
  const below = ratio < 1 - rule.low;
  let branch = (advantage > 0 && above) || (advantage < 0 && below) ? "clipped" : "unclipped";
  if (bound !== null && ratio > rule.dual) branch = "dual_clip";
  const flows = branch === "unclipped" && advantage !== 0;
  const direction = !flows ? 0 : Math.sign(advantage);
  const side = below ? -1 : above ? 1 : 0;
  return { ratio, advantage, held, unclipped, clipped, lesser, bound, value, branch, flows, direction, side };
}

export function reason(it, rule) {
  const high = short(1 + rule.high);
  const low = short(1 - rule.low);
  if (it.advantage === 0) return "The advantage is zero, so there is no gradient.";
  if (it.branch === "dual_clip")
    return `A bad action whose ratio exceeds ${short(rule.dual)}: the dual clip bounds the penalty, and the gradient is zero.`;
  if (it.side === 0)
    return it.advantage > 0
      ? "A good action with a ratio inside the band: make it more likely."
      : "A bad action with a ratio inside the band: make it less likely.";
  if (it.advantage > 0)
    return it.side > 0
      ? `A good action, already more than ${high} times as likely as before: it moved far enough in the right direction, so leave it.`
      : "A good action that became less likely: it moved in the wrong direction, so the full gradient brings it back.";
  return it.side > 0
    ? "A bad action that became more likely: it moved in the wrong direction, so it gets the full penalty."
    : `A bad action, already less than ${low} times as likely as before: it moved far enough in the right direction, so leave it.`;
}

export function gradientText(it) {
  if (it.direction > 0) return "flows: raises π(a|s)";
  if (it.direction < 0) return "flows: lowers π(a|s)";
  return "zero";
}

// The six counters, and the number of samples without gradient, from two arrays of the same length.
export function count(ratios, advantages, rule) {
  const counts = { good: { below: 0, inside: 0, above: 0 }, bad: { below: 0, inside: 0, above: 0 }, zero: 0, clippedAway: 0 };
  const [low, high] = [1 - rule.low, 1 + rule.high];
  for (let i = 0; i < ratios.length; i++) {
    const [ratio, advantage] = [ratios[i], advantages[i]];
    if (!Number.isFinite(ratio) || !Number.isFinite(advantage)) continue;
    if (advantage === 0) {
      counts.zero++;
      continue;
    }
    const where = ratio < low ? "below" : ratio > high ? "above" : "inside";
    counts[advantage > 0 ? "good" : "bad"][where]++;
    const held = advantage > 0 ? where === "above" : where === "below" || (rule.dual !== null && ratio > rule.dual);
    if (held) counts.clippedAway++;
  }
  return counts;
}

// ---- numbers as text

export function short(x) {
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

export function fixed(x, digits = 2) {
  return x.toFixed(digits).replace(/^-(0(\.0*)?)$/, "$1").replace("-", "−");
}

export function signed(x, digits = null) {
  const text = digits === null ? short(x) : fixed(x, digits);
  return x > 0 ? `+${text}` : text;
}
