// The inspector: a table of runs, or a list of runs and their views. The address contains the position, so it can be bookmarked.

import { getJson, post, steps } from "./api.js";
import { makeClip } from "./clip_view.js";
import { makeCurves } from "./curves.js";
import { h, show, themeButton } from "./dom.js";
import { makeFindings } from "./findings_view.js";
import { makeLabels } from "./labels_view.js";
import { makeProfile } from "./profile_view.js";
import { makeRecipe } from "./recipe_view.js";
import { makeRuns } from "./runs_view.js";
import { makeSamples } from "./samples_view.js";
import { makeSteps } from "./steps_view.js";

const EVERY = 2000;
const page = document.getElementById("page");
const body = h("div", { id: "view" });
const state = { runs: [], metrics: {}, catalog: false, view: null };
const chosen = new URLSearchParams(location.search).getAll("run");
window.surefoot = { frames: [] };

const VIEWS = {
  curves: { title: "Curves", make: makeCurves, for: () => true },
  steps: { title: "Steps", make: makeSteps, for: (run) => run.traces.length },
  clip: { title: "Clip", make: makeClip, for: () => true },
  samples: { title: "Samples", make: makeSamples, for: (run) => run.samples.length || run.videos.length },
  findings: { title: "Findings", make: makeFindings, for: () => true },
  labels: { title: "Labels", make: makeLabels, for: (run) => run.labelled },
  recipe: { title: "Recipe", make: makeRecipe, for: () => true },
  profile: { title: "Profile", make: makeProfile, for: (run) => run.profiled },
};

const EMPTY = {
  steps: "These runs have no traces yet. Runs write them during training unless traces.rows = 0.",
  samples: "These runs have no samples and no videos. surefoot watch records a video of an agent; runs of language models save samples before training and at each evaluation.",
  labels: "No labels: this page shows those of surefoot rounds, which asks people to compare answers. For labels of clips: surefoot label RUN --report.",
  profile: "These runs have no profile. surefoot train … --profile measures where the seconds of an iteration go, and writes it when training ends.",
};

const tabs = h("nav", { "aria-label": "views" }, Object.entries(VIEWS).map(([name, view]) => h("a", { href: `#${name}`, "data-view": name }, view.title)));
const list = h("ul", { class: "runs", id: "runs" });
const gone = h("p", { class: "gone", role: "status" });

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
    const waiting = name === "labels" && state.runs.map((run) => run.waiting).filter(Boolean).join(" ");
    state.view = { name, refresh: route };
    show(body, h("p", { class: "empty" }, waiting || EMPTY[name]));
  }
}

function runItem(run, i) {
  const progress = `${steps(run.steps)}${run.budget > run.steps ? ` of ${steps(run.budget)}` : ""} steps`;
  return h("li", {}, h("span", { class: `dot run-${i % 6}` }), h("b", {}, run.name), h("span", {}, [run.algorithm, run.kind === "control" || !run.trained ? run.trained : `from ${run.trained}`].filter(Boolean).join(" · ")),
    h("span", { class: "far", title: `steps are ${run.unit}` }, run.finished || (run.budget && run.steps >= run.budget) ? `finished, ${progress}` : progress),
    run.waiting && h("span", { class: "hint" }, run.waiting), run.damage && h("span", { class: "damage" }, run.damage));
}

async function refresh() {
  const before = JSON.stringify(state.runs);
  Object.assign(state, await getJson(`api/runs?${new URLSearchParams(chosen.map((name) => ["run", name]))}`));
  if (JSON.stringify(state.runs) === before) return false;
  show(list, state.runs.map(runItem));
  return true;
}

async function poll() {
  try {
    if (document.visibilityState === "visible" && (await refresh())) await state.view?.refresh?.();
    page.classList.remove("away");
  } catch (error) {
    page.classList.add("away");
    show(gone, error instanceof TypeError ? "The server does not respond. This page shows the last data." : `${error.message}. This page shows the last data.`);
  }
  setTimeout(poll, EVERY);
}

// An address that lets in one other browser on this machine.
function inviteButton() {
  const address = h("input", { readonly: true, id: "invitation", "aria-label": "address for another browser", onfocus: () => address.select() });
  const copy = h("button", { type: "button", onclick: () => navigator.clipboard.writeText(address.value).then(() => show(copy, "Copied")) }, "Copy");
  const note = h("p", { class: "hint" });
  const dialog = h("dialog", {}, h("form", { method: "dialog" }, h("h2", {}, "Let in another browser"), note, h("div", { class: "pair" }, address, copy), h("button", { class: "quiet" }, "Close")));
  const open = async () => {
    show(copy, "Copy");
    try {
      const made = await post("api/invite", {});
      address.value = made.address;
      show(note, `Open this address in the other browser, on this machine. It works once, for ${made.minutes} minutes.`);
    } catch (error) {
      show(note, error.message);
    }
    dialog.showModal();
  };
  return [h("button", { type: "button", class: "quiet", id: "invite", onclick: open }, "Invite"), dialog];
}

function headed(title, ...rest) {
  show(page, h("header", {}, h("div", {}, h("h1", { class: "brand" }, state.catalog ? h("a", { href: "/", id: "all" }, "Surefoot") : "Surefoot",
    state.catalog && chosen.length ? h("a", { href: "/", class: "back" }, "all runs") : null), title), h("div", { class: "tools" }, inviteButton(), themeButton())), ...rest);
}

try {
  await refresh();
  if (state.catalog && !chosen.length) {
    document.title = "Runs · Surefoot";
    headed(null, gone, body);
    show(body, (await makeRuns(page, gone)).element);
  } else {
    document.title = `${state.runs.map((run) => run.name).join(", ")} · Surefoot`;
    headed(list, tabs, gone, body);
    window.addEventListener("hashchange", route);
    route();
    setTimeout(poll, EVERY);
  }
} catch (error) {
  show(page, h("p", { class: "empty" }, String(error.message)), chosen.length ? h("p", {}, h("a", { href: "/" }, "all runs")) : null);
}
