// The loop of the four models, step by step, with the memory of each role.

import { h, s, show } from "./dom.js";
import { short } from "./surrogate.js";

const SIZES = [0.5, 1, 3, 7, 8, 13, 32, 70];
const TITLES = { policy: "policy π_θ", value: "value V", reference: "reference", reward: "reward model" };
const STAGES = [
  ["The policy samples a response to each prompt.", ["prompt-policy", "policy-response"], ["policy"]],
  ["The reward model scores the whole response: one number at its last token.", ["response-reward"], ["reward"]],
  ["The reference, a frozen copy of the start, gives log π_ref; β · KL is taken off the reward of every token.", ["response-reference"], ["reference"]],
  ["The value model estimates, before every token, how much reward will follow.", ["response-value"], ["value"]],
  ["GAE turns rewards, KL and values into an advantage for every token.", ["reward-credit", "reference-credit", "value-credit"], []],
  ["The policy takes clipped steps along the advantages, and the value model fits the returns. Then the loop begins again.", ["credit-policy", "credit-value"], ["policy", "value"]],
];
const WITHOUT_CRITIC = [
  ...STAGES.slice(0, 3),
  ["The advantage of a response is its reward less the mean of its group: the same number at every token.", ["reward-credit", "reference-credit"], []],
  ["The policy takes clipped steps along the advantages. Then the loop begins again.", ["credit-policy"], ["policy"]],
];
const WIDE = {
  view: [780, 300], box: [132, 62],
  at: { prompt: [70, 60], policy: [236, 60], response: [410, 60], reward: [650, 44], reference: [650, 150], value: [650, 256], credit: [340, 220] },
};
const NARROW = {
  view: [360, 470], box: [112, 60],
  at: { prompt: [62, 44], policy: [180, 44], response: [298, 44], reward: [298, 160], reference: [298, 272], value: [298, 390], credit: [80, 272] },
};
const PLAIN = { prompt: "prompts", response: "responses", credit: "advantages" };

export function makeRoles(roles) {
  const state = { size: 7, way: Object.keys(roles)[1], critic: "own", stage: 0, timer: null };
  const diagram = h("div", { class: "diagram" });
  const words = h("p", { class: "why", id: "stage", "aria-live": "polite" });
  const total = h("output", { id: "total" });
  const narrow = matchMedia("(max-width: 700px)");

  function choice(id, label, options) {
    const select = h("select", { id, onchange: () => { state[id] = id === "size" ? Number(select.value) : select.value; draw(); } },
      options.map(([value, text]) => h("option", { value, selected: String(state[id]) === String(value) }, text)));
    return h("label", {}, h("span", {}, label), select);
  }

  // Bytes of each role; a value head on the policy's trunk is a few thousand numbers, and counts as none.
  function bytes() {
    const each = roles[state.way];
    return Object.fromEntries(Object.keys(TITLES).map((role) =>
      [role, role === "value" && state.critic !== "own" ? 0 : each[role] * state.size * 1e9]));
  }

  const ofLoop = () => (state.critic === "none" ? WITHOUT_CRITIC : STAGES);

  function draw() {
    const layout = narrow.matches ? NARROW : WIDE;
    const held = bytes();
    const stages = ofLoop();
    state.stage = Math.min(state.stage, stages.length - 1);
    const [text, edges, active] = stages[state.stage];
    show(diagram, s("svg", { viewBox: `0 0 ${layout.view.join(" ")}`, role: "img", "aria-label": "the loop of the models" },
      s("defs", {}, s("marker", { id: "head", viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 9, markerHeight: 9, markerUnits: "userSpaceOnUse", orient: "auto-start-reverse" }, s("path", { d: "M0,0L8,4L0,8z" }))),
      [...new Set(stages.flatMap((stage) => stage[1]))].map((edge) => arrow(edge, layout, edges.includes(edge))),
      Object.keys(layout.at).filter((name) => name !== "value" || state.critic !== "none").map((name) => node(name, layout, held, active.includes(name)))));
    show(words, h("b", {}, `${state.stage + 1} of ${stages.length}. `), text);
    const sum = Object.values(held).reduce((a, b) => a + b, 0);
    total.dataset.bytes = sum;
    show(total, `together ${short(sum / 1e9)} GB`);
  }

  function node(name, { at, box }, held, active) {
    const [x, y] = at[name];
    const role = name in TITLES;
    const absent = name === "value" && state.critic !== "own";
    const size = absent ? "a head: ≈ 0" : `${short(held[name] / 1e9)} GB`;
    const high = role ? box[1] : 34;
    return s("g", { class: `node ${role ? "role" : "plain"} ${active ? "active" : ""} ${absent ? "absent" : ""}`, "data-role": role ? name : null, "data-bytes": role ? held[name] : null },
      s("rect", { x: x - box[0] / 2, y: y - high / 2, width: box[0], height: high, rx: 7 }),
      s("text", { x, y: role ? y - 5 : y + 4, "text-anchor": "middle", class: "title" }, role ? TITLES[name] : PLAIN[name]),
      role ? s("text", { x, y: y + 16, "text-anchor": "middle", class: "size" }, size) : null);
  }

  function arrow(edge, { at, box }, active) {
    const [from, to] = edge.split("-");
    const [[x1, y1], [x2, y2]] = [at[from], at[to]];
    const cut = (name, dx, dy) => {
      const high = (name in TITLES ? box[1] : 34) / 2 + 3;
      const scale = Math.min(dx ? (box[0] / 2 + 3) / Math.abs(dx) : Infinity, dy ? high / Math.abs(dy) : Infinity);
      return [dx * scale, dy * scale];
    };
    const a = cut(from, x2 - x1, y2 - y1);
    const b = cut(to, x1 - x2, y1 - y2);
    return s("line", { x1: x1 + a[0], y1: y1 + a[1], x2: x2 + b[0], y2: y2 + b[1], class: active ? "arrow active" : "arrow", "marker-end": "url(#head)", "data-edge": edge });
  }

  function go(by) {
    const count = ofLoop().length;
    state.stage = (state.stage + by + count) % count;
    draw();
  }

  function play() {
    if (state.timer) {
      clearInterval(state.timer);
      state.timer = null;
    } else {
      state.timer = setInterval(() => go(1), 1800);
    }
    show(playing, state.timer ? "Pause" : "Play");
  }

  const playing = h("button", { type: "button", id: "play", onclick: play }, "Play");
  narrow.addEventListener("change", draw);
  draw();
  return h("div", {},
    h("div", { class: "controls" },
      choice("size", "parameters", SIZES.map((size) => [size, `${size} B`])),
      choice("way", "counted", Object.keys(roles).map((way) => [way, way])),
      choice("critic", "critic", [["own", "a model of its own"], ["head", "a head on the policy’s trunk"], ["none", "none (GRPO)"]]), total),
    diagram, words,
    h("div", { class: "controls" }, h("button", { type: "button", id: "back", onclick: () => go(-1) }, "Back"),
      h("button", { type: "button", id: "next", onclick: () => go(1) }, "Next"), playing));
}
