// The resolved recipe of each run, field by field: what comes from the preset, and what differs from the preset and the defaults.

import { getJson } from "./api.js";
import { h, show } from "./dom.js";

const text = (value) => (value === null || value === undefined ? "–" : typeof value === "string" ? value : JSON.stringify(value));

export function makeRecipe(state) {
  const several = state.runs.length > 1;
  const fields = h("select", { id: "fields", onchange: () => draw() }, [...(several ? [["different", "different between the runs"]] : []),
    ["set", "not at their default"], ["all", "all"]].map(([value, title]) => h("option", { value }, title)));
  const filter = h("input", { type: "search", id: "field-filter", placeholder: "field or value", "aria-label": "filter fields", oninput: () => draw() });
  const count = h("span", { class: "hint", role: "status" });
  const table = h("div", { class: "scroll", id: "recipe" });
  const element = h("div", {}, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, h("label", {}, h("span", {}, "fields"), fields), filter, count),
    h("p", { class: "legend" }, h("span", { class: "origin recipe" }, "set"), "by the run’s own recipe", h("span", { class: "origin preset" }, "preset"), "by its preset; all others are defaults"), table);
  let recipes = [];

  function draw() {
    const names = [...new Set(recipes.flatMap((recipe) => (recipe.fields ?? []).map((field) => field.name)))];
    const rows = names.map((name) => recipes.map((recipe) => recipe.fields?.find((field) => field.name === name)));
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => {
      const known = row.filter(Boolean);
      const values = new Set(row.map((field) => text(field?.value)));
      const chosen = fields.value === "all" || (fields.value === "set" ? known.some((field) => field.source !== "default") : values.size > 1);
      const content = `${known[0].name} ${known[0].meaning} ${[...values].join(" ")}`.toLowerCase();
      return chosen && words.every((word) => content.includes(word));
    });
    show(count, `${kept.length} of ${rows.length} fields`);
    show(table, recipes.map((recipe, i) => (recipe.error ? h("p", { class: "damage" }, `${state.runs[i].name}: ${recipe.error}`) : null)),
      h("table", { class: "fields" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "field"), state.runs.map((run, i) => h("th", { scope: "col" }, several ? [h("span", { class: `dot run-${i % 6}` }), ` ${run.name}`] : "value")),
        h("th", { scope: "col", class: "meaning" }, "meaning"))),
      h("tbody", {}, kept.map((row) => h("tr", { "data-field": row.find(Boolean).name }, h("th", { scope: "row", title: row.find(Boolean).meaning }, row.find(Boolean).name),
        row.map((field, i) => cell(field, recipes[i])), h("td", { class: "meaning" }, row.find(Boolean).meaning))))));
  }

  function cell(field, recipe) {
    if (!field) return h("td", {}, "–");
    const mark = field.source === "default" ? null : h("span", { class: `origin ${field.source}` }, field.source === "preset" ? `preset ${recipe.preset}` : "set");
    const other = field.source === "recipe" ? field.before : field.source === "preset" ? field.default : null;
    const origin = field.source === "recipe" && recipe.preset && text(field.before) !== text(field.default) ? "preset" : "default";
    return h("td", { "data-source": field.source }, h("code", {}, text(field.value)), mark, other === null || other === undefined ? null : h("span", { class: "hint" }, `${origin} ${text(other)}`));
  }

  async function refresh() {
    recipes = await Promise.all(state.runs.map((run) => getJson(`api/runs/${run.number}/recipe`).catch((error) => ({ error: error.message }))));
    draw();
  }

  refresh();
  return { element };
}
