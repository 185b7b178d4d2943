// The staircase: sliders, a strip of bars per level, and the arithmetic of the chosen step.

import { h, s, set, show } from "./dom.js";
import { staircase } from "./staircase.js";
import { fixed, reason, short } from "./surrogate.js";

const LEVELS = [
  ["kl", "KL to the reference", "log π_old − log π_ref"],
  ["reward", "reward", "r"],
  ["return", "return", "G = r + γ G′"],
  ["value", "value", "V(s), the critic’s estimate of G"],
  ["residual", "TD residual", "δ = r + γ V′ − V"],
  ["advantage", "advantage (GAE)", "A = δ + γλ A′"],
  ["ratio", "ratio", "ρ = π_θ / π_old"],
  ["objective", "clipped surrogate", "J = min( ρA, clip(ρ, 1−ε, 1+ε) A )"],
];
const WIDTH = 640;
const HEIGHT = 62;
const visible = (token) => token.replaceAll("\n", "⏎") || "∅";
const n = (x) => (x < 0 ? `(${short(x)})` : short(x));

// One staircase at a time: a choice of episodes, each {name, about, …numbers}.
export function makeStairs(episodes) {
  const body = h("div");
  const select = h("select", { id: "episode", onchange: () => begin(episodes[select.value]) }, episodes.map((one, i) => h("option", { value: i }, one.name)));
  const begin = (episode) => show(body, h("p", { class: "hint", id: "about" }, episode.about), stairs(episode));
  begin(episodes[0]);
  return h("div", {}, h("div", { class: "controls" }, h("label", {}, h("span", {}, "episode"), select)), body);
}

function stairs(episode) {
  const last = episode.log_probs.length - 1;
  const count = episode.old_log_probs.length;
  const text = Boolean(episode.tokens);
  const levelsShown = LEVELS.filter(([key]) => text || key !== "kl");
  const state = { beta: episode.beta ?? 0, gamma: episode.gamma, lambda: episode.gae_lambda, clip: episode.clip, epoch: last, step: Math.max(0, count - 8) };
  const strips = levelsShown.map(([key, name, formula]) => makeStrip(key, name, formula, count, choose));
  const words = (episode.tokens ?? []).map((token, t) => h("span", { role: "option", onclick: () => choose(t) }, visible(token)));
  const chain = h("div", { class: "chain", id: "chain", "aria-live": "polite" });
  const controls = h("div", { class: "controls wide", id: "stairs-controls" },
    text ? slider("beta", "β of the KL", 0, 1, 0.01) : [],
    slider("gamma", "γ, discount", 0, 1, 0.01), slider("lambda", "λ of GAE", 0, 1, 0.01),
    slider("clip", "ε of the clip", 0, 0.5, 0.005), slider("epoch", "epoch", 0, last, 1),
    h("button", { type: "button", id: "recorded", onclick: recorded }, "As recorded"));

  function slider(key, label, min, max, step) {
    const output = h("output", { for: key });
    const input = h("input", { type: "range", id: key, min, max, step, oninput: () => { state[key] = Number(input.value); draw(); } });
    const element = h("label", {}, h("span", {}, label), input, output);
    element.refresh = () => {
      input.value = state[key];
      show(output, key === "epoch" ? `${state.epoch + 1} of ${last + 1}` : short(state[key]));
    };
    return element;
  }

  function recorded() {
    Object.assign(state, { beta: episode.beta ?? 0, gamma: episode.gamma, lambda: episode.gae_lambda, clip: episode.clip, epoch: last });
    draw();
  }

  function choose(step) {
    state.step = Math.min(Math.max(step, 0), count - 1);
    draw();
  }

  function draw() {
    for (const element of controls.children) element.refresh?.();
    const rule = { low: state.clip, high: state.clip, dual: null };
    const levels = staircase(episode, state.beta, state.gamma, state.lambda, rule, state.epoch);
    levelsShown.forEach(([key], i) => strips[i].draw(levels[key], levels.terms, state, key === "ratio" ? rule : null));
    words.forEach((word, t) => word.setAttribute("aria-selected", String(t === state.step)));
    const name = text ? `Token ${state.step}, “${visible(episode.tokens[state.step])}”` : `Step ${state.step}`;
    show(chain, h("h3", {}, `${name}: the arithmetic`), arithmetic(levels, rule));
  }

  function arithmetic(levels, rule) {
    const t = state.step;
    const end = t === count - 1;
    const it = levels.terms[t];
    const [g, l] = [short(state.gamma), short(state.lambda)];
    const [r, v] = [levels.reward[t], levels.value[t]];
    const ahead = episode.terminated[t] ? 0 : episode.next_values[t];
    const next = (name) => (end ? 0 : levels[name][t + 1]);
    const row = (name, text, value, taken = false) =>
      h("div", { class: taken ? "taken" : null }, h("dt", {}, name), h("dd", {}, `${text} = `, h("b", {}, fixed(value, 3))), h("span", { class: "mark" }, taken ? "taken" : ""));
    return [
      h("dl", {},
        text ? [row("KL", `log π_old − log π_ref = ${short(episode.old_log_probs[t])} − ${n(episode.ref_log_probs[t])}`, levels.kl[t]),
          row("reward", `r = ${end ? `score − β KL = ${short(episode.score)}` : "0"} − ${short(state.beta)} · ${n(levels.kl[t])}`, r)] : [],
        row("return", `G = r + γ G′ = ${short(r)} + ${g} · ${n(next("return"))}`, levels.return[t]),
        row("TD residual", `δ = r + γ V′ − V = ${short(r)} + ${g} · ${n(ahead)} − ${n(v)}`, levels.residual[t]),
        row("advantage", `A = δ + γλ A′ = ${short(levels.residual[t])} + ${g} · ${l} · ${n(next("advantage"))}`, levels.advantage[t]),
        row("ratio", `ρ = exp(log π_θ − log π_old) = exp(${short(episode.log_probs[state.epoch][t])} − ${n(episode.old_log_probs[t])})`, it.ratio),
        row("unclipped", `ρA = ${short(it.ratio)} · ${n(it.advantage)}`, it.unclipped, it.branch === "unclipped"),
        row("clipped", `clip(ρ) A = ${short(it.held)} · ${n(it.advantage)}`, it.clipped, it.branch === "clipped"),
        row("objective", `J = min(${short(it.unclipped)}, ${short(it.clipped)})`, it.value)),
      h("p", { class: "why" }, reason(it, rule)),
      h("p", { class: "hint" }, end ? `${text ? "The answer ends" : "The pole fell"} here, so V′ and everything after it is 0.` : "A here is not normalised; most runs shift and scale it over the batch."),
    ];
  }

  draw();
  return h("div", {}, controls, words.length ? h("div", { class: "steps text", id: "tokens" }, words) : [], h("div", { class: "halves" },
    h("div", { class: "strips", tabindex: "0", role: "slider", id: "step", "aria-label": text ? "token of the answer" : "step of the episode", "aria-valuemin": "0", "aria-valuemax": String(count - 1),
      onkeydown: (event) => {
        const by = { ArrowRight: 1, ArrowLeft: -1, Home: -count, End: count }[event.key];
        if (by === undefined) return;
        event.preventDefault();
        choose(state.step + by);
        set(event.currentTarget, { "aria-valuenow": String(state.step) });
      } }, strips.map((strip) => strip.element)), chain));
}

function makeStrip(key, name, formula, count, choose) {
  const svg = s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "strip", role: "img", "aria-label": `${name} of every step` });
  const shown = h("b", {});
  const wide = WIDTH / count;

  function draw(values, terms, state, rule) {
    const base = key === "ratio" ? 1 : 0;
    const low = Math.min(base, ...values, rule ? 1 - rule.low : base);
    const high = Math.max(base, ...values, rule ? 1 + rule.high : base);
    const span = high - low || 1;
    const y = (value) => 3 + ((high - value) / span) * (HEIGHT - 6);
    show(
      svg,
      rule ? s("rect", { x: 0, width: WIDTH, y: y(1 + rule.high), height: Math.max(0, y(1 - rule.low) - y(1 + rule.high)), class: "band" }) : null,
      values.map((value, t) => {
        const kind = key === "objective" ? (terms[t].direction > 0 ? "raise" : terms[t].direction < 0 ? "lower" : "still") : "plain";
        return s("g", { class: "cell", "data-level": key, "data-t": t, "data-value": value, "data-branch": key === "objective" ? terms[t].branch : null, onclick: () => choose(t) },
          s("rect", { x: t * wide, width: wide, y: 0, height: HEIGHT, class: t === state.step ? "chosen" : "hit" }),
          s("rect", { x: t * wide + 1.5, width: wide - 3, y: Math.min(y(value), y(base)), height: Math.max(1.2, Math.abs(y(value) - y(base))), class: `bar ${kind}` }));
      }),
      s("line", { x1: 0, x2: WIDTH, y1: y(base), y2: y(base), class: "axis" }),
    );
    show(shown, fixed(values[state.step], 3));
  }

  const element = h("div", { class: "level", "data-name": key }, h("div", { class: "about" }, h("strong", {}, name), h("span", {}, formula), shown), svg);
  return { element, draw };
}
