// How PPO works: the staircase of a recorded episode, the loop of four models, and two results, in one page.

import { h, show, themeButton } from "./dom.js";
import { makeFrontier, makeLadder } from "./charts.js";
import { makeRoles } from "./roles.js";
import { makeStep } from "./step_view.js";
import { makeStairs } from "./stairs_view.js";

const data = JSON.parse(document.getElementById("samples").textContent);
const page = document.getElementById("page");

/** A link within the site; in a copy of this page alone, the name of the file. */
function link(href, text) {
  return document.documentElement.dataset.site === undefined ? `${text} (docs/${href.replace(".html", href.includes("clip") ? ".html" : ".md")})` : h("a", { href }, text);
}

function section(title, intro, element) {
  return h("section", {}, h("h2", {}, title), intro.map((text) => h("p", {}, text)), element);
}

show(
  page,
  h("header", {}, h("div", {}, h("h1", {}, "How PPO works"),
    h("p", { class: "formula" }, "from one reward to one step of the policy")), themeButton()),
  section("The staircase", [
    "Each level is computed from the one above it. Move the sliders, and choose a step: V, the actions and their probabilities stay as a run recorded them.",
  ], makeStairs(data.episodes)),
  section("TRPO’s step, and PPO’s", [
    `How far may one batch move the policy? TRPO follows the natural gradient to the edge of KL ≤ δ; PPO lets the clip end each sample’s gain. One update as a run recorded it (${data.step.about}), ` +
    "seen in the plane of two directions among thousands: the gradient, and TRPO’s full step.",
  ], makeStep(data.step)),
  section("Four models in one loop", [
    "PPO on a language model has four roles. Step through an iteration; the numbers are the memory of each role.",
  ], makeRoles(data.roles)),
  section("How far to go: the β frontier", [
    "The reward model is right near the text that it was trained on. Proxy is its score, gold the true one, on held-out prompts of the reviews task; " +
    "the horizontal axis is the root of the KL to the SFT model. Every dot is a run.",
  ], makeFrontier(data.frontier)),
  section("What each fix adds: the ladder", [
    "Six algorithms, each one switch above the one before; the first two learn from whole episodes, which they need. Return in training over environment steps: mean and range over seeds.",
  ], makeLadder(data.ladder)),
  h("p", { class: "hint" }, "Each claim here has a row in ", link("ledger.html", "the ledger"), "; the formulas are in ",
    link("math.html", "the math"), ", and the clip has ", link("reference/clip-table.html", "a table of its own"), "."),
);
