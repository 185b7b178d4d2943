// The inspector: runs, and four ways to look at them. Where one is stands in the address, so that it can be kept and sent.

import { ask, steps } from "./api.js";
import { makeClip } from "./clip_view.js";
import { makeCurves } from "./curves.js";
import { h, show, themeButton } from "./dom.js";
import { makeSamples } from "./samples_view.js";
import { makeSteps } from "./steps_view.js";

const EVERY = 2000;
const page = document.getElementById("page");
const body = h("div", { id: "view" });
const state = { runs: [], metrics: {}, view: null };
window.surefoot = { frames: [] };

const VIEWS = {
  curves: { title: "Curves", make: makeCurves, for: () => true },
  steps: { title: "Steps", make: makeSteps, for: (run) => run.traces.length },
  clip: { title: "Clip", make: makeClip, for: () => true },
  samples: { title: "Samples", make: makeSamples, for: (run) => run.samples.length || run.videos.length },
};

const tabs = h("nav", { "aria-label": "views" }, Object.entries(VIEWS).map(([name, view]) => h("a", { href: `#${name}`, "data-view": name }, view.title)));
const list = h("ul", { class: "runs", id: "runs" });

function place() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [name in VIEWS ? name : "curves", rest.map(Number).map((x) => (Number.isFinite(x) ? x : 0))];
}

function route() {
  const [name, rest] = place();
  for (const link of tabs.children) link.dataset.view === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  if (state.view?.name === name && state.view.go) return state.view.go(rest);
  state.view?.close?.();
  if (state.runs.some(VIEWS[name].for)) {
    const made = VIEWS[name].make(state, rest);
    state.view = { name, ...made };
    show(body, made.element);
  } else {
    state.view = { name };
    show(body, h("p", { class: "empty" }, name === "steps" ? "These runs have no traces yet. They are written while a run is trained, unless traces.rows = 0."
      : "These runs have neither samples nor films. surefoot watch makes a film of an agent; a language model's samples come with each evaluation."));
  }
}

function told(run, i) {
  const where = `${steps(run.steps)}${run.budget ? ` of ${steps(run.budget)}` : ""} steps`;
  return h("li", {}, h("span", { class: `dot run-${i % 6}` }), h("b", {}, run.name), h("span", {}, [run.algorithm, run.trained].filter(Boolean).join(" · ")),
    h("span", { class: "far" }, run.finished || (run.budget && run.steps >= run.budget) ? `finished, ${where}` : where));
}

async function refresh() {
  const before = JSON.stringify(state.runs);
  const found = await ask("api/runs");
  Object.assign(state, found);
  if (JSON.stringify(state.runs) === before) return false;
  show(list, state.runs.map(told));
  return true;
}

async function watch() {
  try {
    if (document.visibilityState === "visible" && (await refresh())) await state.view?.refresh?.();
    page.classList.remove("away");
  } catch {
    page.classList.add("away");
  }
  setTimeout(watch, EVERY);
}

try {
  await refresh();
  document.title = `${state.runs.map((run) => run.name).join(", ")} · Surefoot`;
  show(page, h("header", {}, h("div", {}, h("p", { class: "brand" }, "Surefoot"), list), themeButton()), tabs,
    h("p", { class: "gone", role: "status" }, "The server does not answer; what is here stays."), body);
  window.addEventListener("hashchange", route);
  route();
  setTimeout(watch, EVERY);
} catch (error) {
  show(page, h("p", { class: "empty" }, String(error.message)));
}
