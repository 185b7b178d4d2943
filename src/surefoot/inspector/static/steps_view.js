// One row of a trace: its steps or tokens, coloured by a quantity, and every number of the selected one.

import { getJson, fine, real, short, steps, visible } from "./api.js";
import { agrees, audit, credit, nStep, visit } from "./chain.js";
import { h, set, show } from "./dom.js";
import { makeFrame } from "./frame_view.js";
import { evaluate, gradientText, reason } from "./surrogate.js";

const COLOURS = {
  reward: { title: "reward", of: (row, t) => row.rewards[t] },
  kl: { title: "KL", of: (row, t) => row.reward_parts.kl[t], has: (row) => row.reward_parts.kl },
  value: { title: "value", of: (row, t) => row.values[t], has: (row) => row.visits.values || row.values.some((x) => x) },
  td: { title: "TD residual", of: (row, t) => row.td_residuals[t], has: (_, trace) => trace.baseline === "critic" },
  advantage: { title: "advantage", of: (row, t) => row.advantages[t] },
  ratio: { title: "ratio", of: (row, t, k) => Math.log(row.visits.ratio[k][t]), shown: (row, t, k) => row.visits.ratio[k][t], visit: true },
  branch: { title: "branch", visit: true },
};
const NUMBERS = ["rewards", "values", "next_values", "td_residuals", "advantages", "returns", "old_log_probs", "ref_log_probs", "beyond"];
const FINDS = { clipped: "clipped", ratio: "largest ratio", best: "best advantage", worst: "worst advantage", truncated: "truncated" };

// In control, t counts the time steps of the episode; on text, the tokens of the response. Both begin at 0. A step is one of the
// run's budget, as in metrics.jsonl.

export function makeSteps(state, at) {
  const first = Math.max(0, state.runs.findIndex((run) => run.traces.length));
  const chosen = { run: first, steps: null, index: 0, t: 0, k: 0, colour: "advantage" };
  let trace = null;
  let row = null;
  let latest = 0;
  let unfolded = false;

  const run = h("select", { id: "steps-run", onchange: () => go([Number(run.value)]) });
  const when = h("input", { type: "range", id: "iteration", min: 0, value: 0, oninput: () => go([chosen.run, current().traces[Number(when.value)]]) });
  const position = h("output", { for: "iteration" });
  const rows = h("div", { class: "rows", id: "rows", role: "listbox", "aria-label": "rows of the trace" });
  const hits = h("div", { id: "hits" });
  const note = h("p", { class: "hint", id: "most-clipped", role: "status" });
  const where = h("span", { class: "jump", id: "jump", hidden: true });
  let list = [];
  const find = h("div", { class: "finds", role: "group", "aria-label": "find" }, Object.entries(FINDS).map(([what, title]) =>
    h("button", { type: "button", "data-find": what, "aria-pressed": "false", onclick: (event) => search(what, event.currentTarget) }, title)));
  const colours = h("div", { class: "finds", role: "group", "aria-label": "colour by" });
  const pass = h("input", { type: "range", id: "visit", min: 0, value: 0, oninput: () => choose({ k: Number(pass.value) }) });
  const passLabel = h("output", { for: "visit" });
  const cells = h("div", { class: "steps", id: "steps", role: "listbox", "aria-label": "steps of the row", "aria-orientation": "horizontal" });
  const prompt = h("p", { class: "prompt", id: "prompt" });
  const scale = h("p", { class: "legend" });
  const checked = h("p", { id: "audit", class: "hint", role: "status" });
  const chain = h("div", { id: "chain", class: "chain", "aria-live": "polite" });
  const visits = h("div", { id: "visits", class: "scroll" });
  const paging = h("p", { class: "hint" });
  const frame = makeFrame((t) => choose({ t }));

  const current = () => state.runs[chosen.run];

  const api = () => `api/runs/${current().number}`;

  // Without a place in the run, the step that was clipped most is shown.
  async function go(place) {
    const number = ++latest;
    let [wanted, at, index, t, k] = place;
    chosen.run = state.runs[wanted]?.traces.length ? wanted : first;
    const traces = current().traces;
    if (at === undefined) {
      show(note, "looking for the most clipped trace …");
      const found = await getJson(`${api()}/clipped`).catch(() => null);
      if (number !== latest) return;
      show(note, found ? clippedNote(found) : []);
      if (found && found.steps !== null) [at, index, t, k] = [found.steps, found.index, found.t, found.visit];
    }
    chosen.steps = traces.includes(at) ? at : traces.at(-1);
    show(run, state.runs.map((one, i) => h("option", { value: i, disabled: !one.traces.length, selected: i === chosen.run }, one.name)));
    set(when, { max: traces.length - 1 });
    when.value = traces.indexOf(chosen.steps);
    try {
      trace = await getJson(`${api()}/traces/${chosen.steps}`);
      if (number !== latest) return;
      show(position, `iteration ${trace.iteration}, step ${steps(trace.steps)}`);
      show(rows, trace.rows.map((one, i) => line(one, i)));
      chosen.index = Math.min(index ?? 0, trace.rows.length - 1);
      await load(t ?? 0, k, number);
    } catch (error) {
      show(checked, error.message);
    }
  }

  function clippedNote(found) {
    const among = found.counted < found.traces ? `${found.counted} of ${steps(found.traces)} traces, those with the highest clip_active` : `${found.traces} trace${found.traces === 1 ? "" : "s"}`;
    return found.steps === null ? `No sample is clipped in ${among}.`
      : `Most clipped trace: step ${steps(found.steps)}, with ${steps(found.clipped)} of ${steps(found.samples)} samples without gradient (${Math.round((100 * found.clipped) / found.samples)} %); of ${among}.`;
  }

  const episode = (one) => (one.episode === null || one.episode === undefined ? `environment ${one.row}` : `episode ${steps(one.episode)}, environment ${one.row}`);

  function line(one, i) {
    const what = one.prompt === null ? episode(one) : visible(one.prompt);
    const times = one.prompt === null ? `t = ${one.first_t}–${one.first_t + one.length - 1} · ` : "";
    const share = one.visits ? Math.round((100 * one.stopped) / one.visits) : 0;
    return h("button", { type: "button", role: "option", onclick: () => go([chosen.run, chosen.steps, i]) },
      h("b", {}, what), h("span", {}, `${times}${one.length} ${one.prompt === null ? "step" : "token"}${one.length === 1 ? "" : "s"} · reward ${short(one.reward)} · largest ρ ${short(one.ratio_max)}`
        + `${share ? ` · ${share} % clipped` : ""}${one.truncated ? " · truncated" : ""}`));
  }

  async function load(t, k, number) {
    const from = Math.max(0, Math.floor(t / 4096) * 4096);
    const found = await getJson(`${api()}/traces/${chosen.steps}/rows/${chosen.index}?from=${from}`);
    if (number !== latest) return;
    row = found;
    for (const name of NUMBERS) row[name] = real(row[name]);
    for (const part of [row.reward_parts, row.visits]) for (const name of Object.keys(part)) part[name] = real(part[name]);
    [...rows.children].forEach((button, i) => button.setAttribute("aria-selected", String(i === chosen.index)));
    const text = row.tokens !== null;
    prompt.hidden = !text;
    show(prompt, text ? visible(row.prompt ?? "") : "");
    cells.classList.toggle("text", text);
    show(cells, row.mask.map((kept, i) => h("span", { role: "option", "data-t": i, class: kept ? "" : "masked", tabindex: "-1" }, text ? visible(row.tokens[i]) || "∅" : "")));
    const known = Object.entries(COLOURS).filter(([, each]) => !each.has || each.has(row, trace));
    show(colours, known.map(([name, each]) => h("button", { type: "button", "data-colour": name, onclick: () => choose({ colour: name }) }, each.title)));
    if (!known.some(([name]) => name === chosen.colour)) chosen.colour = "advantage";
    set(pass, { max: Math.max(0, row.visits.updates.length - 1) });
    const more = row.length > row.mask.length;
    show(paging, more ? `t = ${steps(row.first_t + row.first)} to ${steps(row.first_t + row.first + row.mask.length - 1)}, of ${steps(row.length)} in the row. ` : "", more
      ? [["earlier", row.first - 4096], ["later", row.first + 4096]].filter(([, to]) => to >= 0 && to < row.length).map(([name, to]) =>
        h("button", { type: "button", onclick: () => go([chosen.run, chosen.steps, chosen.index, to]) }, name)) : []);
    const result = audit(trace, row, current().value_lambda);
    checked.dataset.wrong = result.wrong.length;
    checked.dataset.count = result.count;
    show(checked, result.wrong.length
      ? `${steps(result.wrong.length)} of ${steps(result.count)} numbers differ from the trace, the first at ${result.wrong[0].t}: ${result.wrong[0].name}`
      : `✓ ${steps(result.count)} numbers of this row recomputed from the numbers that they depend on: all match.`);
    frame.load(row, `${api()}/traces/${chosen.steps}/rows/${chosen.index}/video`);
    choose({ t: Math.min(Math.max(0, t - row.first), row.mask.length - 1), k: Math.min(k ?? row.visits.updates.length - 1, row.visits.updates.length - 1) });
  }

  function choose(next) {
    Object.assign(chosen, next);
    history.replaceState(null, "", `#steps/${[chosen.run, chosen.steps, chosen.index, row.first + chosen.t, chosen.k].join("/")}`);
    pass.value = chosen.k;
    show(passLabel, `pass ${chosen.k + 1} of ${row.visits.updates.length}`);
    for (const button of colours.children) button.setAttribute("aria-pressed", String(button.dataset.colour === chosen.colour));
    paint();
    [...cells.children].forEach((cell, i) => {
      cell.setAttribute("aria-selected", String(i === chosen.t));
      cell.tabIndex = i === chosen.t ? 0 : -1;
    });
    const [cell, room] = [cells.children[chosen.t], cells.clientHeight - 40];
    if (cell && Math.abs(cell.offsetTop - cells.offsetTop - cells.scrollTop - room / 2) > room / 2) cells.scrollTop = cell.offsetTop - cells.offsetTop - room / 2;
    explain();
    frame.seek(chosen.t);
  }

  function paint() {
    const by = COLOURS[chosen.colour];
    const there = (t) => row.mask[t] && (!by.visit || row.visits.updates[chosen.k]?.[t] >= 0);
    if (chosen.colour === "branch") {
      [...cells.children].forEach((cell, t) => {
        const flows = there(t) && ["unclipped", "log_prob", "weighted"].includes(row.branches[row.visits.branch[chosen.k][t]]);
        cell.style.background = !there(t) ? "" : flows ? "var(--up-wash)" : "var(--down-wash)";
        cell.setAttribute("aria-label", label(t, there(t) ? row.branches[row.visits.branch[chosen.k][t]] : "not visited"));
      });
      show(scale, h("span", { class: "swatch raise" }), "gradient flows", h("span", { class: "swatch lower" }), "clipped or left out");
      return;
    }
    const values = row.mask.map((_, t) => (there(t) ? by.of(row, t, chosen.k) : null));
    const most = Math.max(1e-9, ...values.filter((x) => x !== null && Number.isFinite(x)).map(Math.abs));
    [...cells.children].forEach((cell, t) => {
      const x = values[t];
      const share = x === null || !Number.isFinite(x) ? 0 : Math.round(70 * Math.sqrt(Math.abs(x) / most));
      cell.style.background = share ? `color-mix(in srgb, var(--${x > 0 ? "up" : "down"}) ${share}%, transparent)` : "";
      cell.setAttribute("aria-label", label(t, `${by.title} ${short((by.shown ?? by.of)(row, t, chosen.k))}`));
    });
    const [low, high] = by.shown ? [Math.exp(-most), Math.exp(most)] : [-most, most];
    show(scale, h("span", { class: "swatch full-down" }), short(low), h("span", { class: "swatch" }), by.shown ? "1" : "0", h("span", { class: "swatch full-up" }), short(high));
  }

  const label = (t, text) => `${row.tokens ? `token ${visible(row.tokens[t])} at ` : ""}t = ${row.first_t + row.first + t}: ${text}`;

  function explain() {
    const [t, k] = [chosen.t, chosen.k];
    const at = `t = ${steps(row.first_t + row.first + t)}`;
    const name = row.tokens ? h("span", {}, "Token ", h("code", {}, visible(row.tokens[t]) || "∅"), ` at ${at}`) : `${at} of ${episode(row)}`;
    const parts = [row.actions[t]].flat();
    const drawn = parts.every(Number.isInteger) ? "" : ", as sampled: before any rescaling and clipping to the bounds";
    const action = row.tokens ? "" : `: action ${parts.map(short).join(", ")}${drawn}`;
    const end = `${action}${row.terminated[t] ? " · terminated" : row.truncated[t] ? " · truncated" : ""}`;
    if (!row.mask[t]) {
      show(chain, h("h3", {}, name, end), h("p", { class: "why" }, "The policy did not choose this: it is masked, and nothing is learned from it."));
      show(visits);
      return;
    }
    const lines = [credit(trace, row, t, current().value_lambda), visit(trace, row, t, k)];
    const finite = [row.visits.ratio[k]?.[t], row.visits.advantages[k]?.[t]].every(Number.isFinite);
    const it = trace.rule && row.visits.updates[k]?.[t] >= 0 && row.old_log_probs && finite ? evaluate(row.visits.ratio[k][t], row.visits.advantages[k][t], trace.rule) : null;
    show(chain, h("h3", {}, name, end), h("dl", {}, lines[0].map(written)), nSteps(nStep(trace, row, t)),
      h("h3", {}, lines[1].length ? `Pass ${k + 1}, after ${steps(row.visits.updates[k][t])} ${row.visits.updates[k][t] === 1 ? "update" : "updates"}` : `Pass ${k + 1}: not visited`),
      h("dl", {}, lines[1].map(written), it ? h("div", { "data-term": "gradient" }, h("dt", {}, "gradient"), h("dd", {}, h("b", {}, gradientText(it))), h("dd")) : null),
      finite ? (it ? h("p", { class: "why" }, reason(it, trace.rule)) : null) : h("p", { class: "why" }, "The inputs of the loss are not finite: nothing can be learned from them."));
    const seen = row.visits;
    show(visits, h("table", { class: "visits" },
      h("thead", {}, h("tr", {}, ["pass", "ρ", "Â", "J", "branch", ...(seen.values ? ["V"] : [])].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, seen.updates.map((_, i) => (seen.updates[i][t] < 0 ? null : h("tr", { class: i === k ? "here" : "", onclick: () => choose({ k: i }) },
        [i + 1, ...["ratio", "advantages", "surrogate"].map((each) => (each === "ratio" ? fine : short)(seen[each][i][t])), row.branches[seen.branch[i][t]].replace("_", " "),
          ...(seen.values ? [short(seen.values[i][t])] : [])].map((x) => h("td", {}, String(x)))))))));
  }

  // The n-step level, folded: the first few advantages, those between, the last, and their mean.
  function nSteps(found) {
    if (!found) return null;
    const [few, all] = [found.steps.slice(0, 6), found.steps];
    const [between, last] = [all.slice(6, -1), all.length > 6 ? [all.at(-1)] : []];
    const cells = (...texts) => h("tr", {}, texts.map((text) => h("td", {}, text)));
    const each = (step) => cells(String(step.n), short(step.sum), agrees(step.telescoped, step.sum, found.value) ? "✓" : h("span", { class: "wrong" }, `✗ ${short(step.telescoped)}`),
      short(step.weight), short(step.weight * step.sum));
    const total = (steps, of) => steps.reduce((sum, step) => sum + of(step), 0);
    return h("details", { id: "n-step", open: unfolded, ontoggle: (event) => { unfolded = event.currentTarget.open; } },
      h("summary", {}, "A as a weighted mean of n-step advantages"),
      h("p", { class: "hint" }, `A⁽ⁿ⁾ = δ + γ δ′ + … (n residuals) = r + γ r′ + … + γⁿ V − V: n rewards, then the critic. Weights (1 − λ) λⁿ⁻¹ with λ = ${short(trace.gae_lambda)}; the last has what is left.`),
      h("div", { class: "scroll" }, h("table", { class: "visits" },
        h("thead", {}, h("tr", {}, ["n", "A⁽ⁿ⁾", "= r + … − V", "weight", "weight · A⁽ⁿ⁾"].map((title) => h("th", { scope: "col" }, title)))),
        h("tbody", {}, few.map(each), between.length ? cells(`7 to ${steps(all.length - 1)}`, "", "", short(total(between, (step) => step.weight)), short(total(between, (step) => step.weight * step.sum))) : null,
          last.map(each), found.beyond ? cells("later", "", "", "", short(found.beyond)) : null))),
      h("dl", {}, written(found.mean)));
  }

  function written(each) {
    return h("div", { class: each.taken ? "taken" : "", "data-term": each.name }, h("dt", {}, each.name), h("dd", {}, each.text, " = ", h("b", {}, (each.digits ?? short)(each.value))),
      h("dd", { class: "mark" }, each.taken ? "taken" : each.recorded === null ? "" : each.ok ? h("span", { title: `the trace has ${each.recorded}` }, "✓") : h("span", { class: "wrong" }, `✗ ${short(each.recorded)}`)));
  }

  cells.addEventListener("click", (event) => {
    const cell = event.target.closest("[data-t]");
    if (cell) choose({ t: Number(cell.dataset.t) });
  });
  cells.addEventListener("keydown", (event) => {
    const last = row.mask.length - 1;
    const to = { ArrowLeft: chosen.t - 1, ArrowRight: chosen.t + 1, Home: 0, End: last }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    choose({ t: Math.min(Math.max(to, 0), last) });
    cells.children[chosen.t].focus();
  });

  async function search(what, button) {
    const on = button.getAttribute("aria-pressed") === "true";
    for (const each of find.children) each.setAttribute("aria-pressed", "false");
    where.hidden = true;
    list = [];
    if (on) return show(hits);
    button.setAttribute("aria-pressed", "true");
    show(hits, h("p", { class: "hint" }, "searching all traces …"));
    const searched = chosen.run;
    const found = await getJson(`${api()}/find/${what}`);
    if (button.getAttribute("aria-pressed") !== "true") return;
    list = found.map((hit) => [searched, hit.steps, hit.index, hit.t, hit.visit]);
    show(hits, found.length ? h("ol", {}, found.map((hit, i) => h("li", {}, h("button", { type: "button", onclick: () => jump(what, i) },
      hit.text === null ? `t = ${steps(hit.at)}` : visible(hit.text) || "∅", h("span", {}, ` ρ ${short(hit.ratio)} · A ${short(hit.advantage)} · step ${steps(hit.steps)}`)))))
      : h("p", { class: "hint" }, "The traces of this run contain none."));
    if (found.length) jump(what, 0);
  }

  // Go to a hit; the buttons beside it lead to the next and the previous one.
  async function jump(what, i) {
    const to = h("button", { type: "button", id: "next-hit", disabled: i === list.length - 1, onclick: () => jump(what, i + 1) }, "next");
    const back = h("button", { type: "button", id: "previous-hit", disabled: i === 0, onclick: () => jump(what, i - 1) }, "previous");
    show(where, h("b", {}, `${FINDS[what]}: ${i + 1} of ${list.length}`), back, to);
    where.hidden = false;
    [...hits.querySelectorAll("button")].forEach((each, n) => each.setAttribute("aria-current", String(n === i)));
    const button = hits.querySelectorAll("button")[i];
    const room = button.closest("ol");
    room.scrollTop = button.offsetTop - room.offsetTop - room.clientHeight / 2;
    await go(list[i]);
    if (matchMedia("(max-width: 900px)").matches) where.scrollIntoView({ block: "start" });
  }

  const element = h("div", { class: "drill" },
    h("form", { class: "controls wide", onsubmit: (event) => event.preventDefault() }, h("label", {}, h("span", {}, "run"), run), h("label", {}, h("span", {}, "iteration"), when, position),
      h("label", {}, h("span", {}, "pass"), pass, passLabel),
      h("button", { type: "button", id: "to-clipped", onclick: () => go([chosen.run]) }, "Most clipped")), note,
    h("div", { class: "columns" },
      h("aside", {}, h("h2", {}, "Rows"), rows, h("h2", {}, "Find"), find, hits),
      h("div", {}, where, h("div", { class: "byline" }, h("span", { class: "hint" }, "colour by"), colours), prompt, cells, scale, paging, checked,
        h("div", { class: "halves even" }, chain, h("div", {}, frame.element, visits)))));
  go(at);
  return {
    element, go,
    refresh() {
      set(when, { max: current().traces.length - 1 });
    },
  };
}
