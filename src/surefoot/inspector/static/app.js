// The inspector: a list of runs and four views. The address contains the position, so it can be bookmarked and shared.

import { getJson, steps } from "./api.js";
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

function position() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  return [name in VIEWS ? name : "curves", rest.map(Number).map((x) => (Number.isFinite(x) ? x : 0))];
}

function route() {
  const [name, rest] = position();
  for (const link of tabs.children) link.dataset.view === name ? link.setAttribute("aria-current", "page") : link.removeAttribute("aria-current");
  if (state.view?.name === name && state.view.go) return state.view.go(rest);
  state.view?.close?.();
  if (state.runs.some(VIEWS[name].for)) {
    const made = VIEWS[name].make(state, rest);
    state.view = { name, ...made };
    show(body, made.element);
  } else {
    state.view = { name };
    show(body, h("p", { class: "empty" }, name === "steps" ? "These runs have no traces yet. Runs write them during training unless traces.rows = 0."
      : "These runs have no samples and no videos. surefoot watch records a video of an agent; runs of language models save samples at each evaluation."));
  }
}

function runItem(run, i) {
  const progress = `${steps(run.steps)}${run.budget ? ` of ${steps(run.budget)}` : ""} steps`;
  return h("li", {}, h("span", { class: `dot run-${i % 6}` }), h("b", {}, run.name), h("span", {}, [run.algorithm, run.trained].filter(Boolean).join(" · ")),
    h("span", { class: "far" }, run.finished || (run.budget && run.steps >= run.budget) ? `finished, ${progress}` : progress),
    run.damage && h("span", { class: "damage" }, run.damage));
}

async function refresh() {
  const before = JSON.stringify(state.runs);
  Object.assign(state, await getJson("api/runs"));
  if (JSON.stringify(state.runs) === before) return false;
  show(list, state.runs.map(runItem));
  return true;
}

async function poll() {
  try {
    if (document.visibilityState === "visible" && (await refresh())) await state.view?.refresh?.();
    page.classList.remove("away");
  } catch {
    page.classList.add("away");
  }
  setTimeout(poll, EVERY);
}

try {
  await refresh();
  document.title = `${state.runs.map((run) => run.name).join(", ")} · Surefoot`;
  show(page, h("header", {}, h("div", {}, h("p", { class: "brand" }, "Surefoot"), list), themeButton()), tabs,
    h("p", { class: "gone", role: "status" }, "The server does not respond. This page shows the last data."), body);
  window.addEventListener("hashchange", route);
  route();
  setTimeout(poll, EVERY);
} catch (error) {
  show(page, h("p", { class: "empty" }, String(error.message)));
}
