// The table of runs: filter, sort, compare, tags, and a trash that runs can be taken back from.

import { getJson, post, short, steps } from "./api.js";
import { h, show } from "./dom.js";

const EVERY = 3000;
const COLUMNS = [
  { key: "name", title: "run", of: (run) => run.name },
  { key: "task", title: "task or model", of: (run) => run.trained },
  { key: "kind", title: "kind", of: (run) => run.kind },
  { key: "algorithm", title: "algorithm", of: (run) => run.algorithm },
  { key: "seed", title: "seed", of: (run) => run.seed, number: true },
  { key: "steps", title: "steps", of: (run) => run.steps, number: true },
  { key: "metric", title: "result", of: (run) => run.metric },
  { key: "last", title: "last", of: (run) => run.last, number: true },
  { key: "best", title: "best", of: (run) => run.best, number: true },
  { key: "status", title: "status", of: (run) => run.status },
  { key: "started", title: "started", of: (run) => run.started, number: true },
  { key: "tags", title: "tags", of: (run) => run.tags.join(", ") },
];

const two = (x) => String(x).padStart(2, "0");
function date(seconds) {
  if (seconds === null) return "–";
  const at = new Date(1000 * seconds);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())} ${two(at.getHours())}:${two(at.getMinutes())}`;
}
const words = (run) => [run.name, run.trained, run.kind, run.algorithm, `seed ${run.seed}`, run.status, ...run.tags].join(" ").toLowerCase();
const address = (names) => `/?${new URLSearchParams(names.map((name) => ["run", name]))}`;

export async function makeRuns(page, gone) {
  const kept = new URLSearchParams(location.hash.slice(1)); // the filter and the order, so that they are there after going back
  const chosen = { sort: COLUMNS.some((column) => column.key === kept.get("sort")) ? kept.get("sort") : "started", down: kept.get("down") !== "0", selected: new Set(), editing: null };
  let table = { folders: [], runs: [], trash: [] };
  let drawn = "";

  const filter = h("input", { type: "search", id: "filter", placeholder: "filter: task, algorithm, tag, running …", "aria-label": "filter runs", value: kept.get("filter") ?? "", oninput: () => draw() });
  const sort = h("select", { id: "sort", onchange: () => order(sort.value, chosen.down) }, COLUMNS.map((column) => h("option", { value: column.key }, column.title)));
  const turn = h("button", { type: "button", id: "turn", "aria-label": "reverse the order", onclick: () => order(chosen.sort, !chosen.down) });
  const compare = h("a", { id: "compare", class: "button" });
  const part = h("button", { type: "button", id: "part", title: "the first iteration and stage in which the two differ, and why", onclick: () => parting([...chosen.selected]) }, "Where they part");
  const remove = h("button", { type: "button", id: "delete", onclick: () => trash([...chosen.selected]) });
  const count = h("span", { class: "hint", role: "status", id: "count" });
  const status = h("p", { id: "status", class: "hint", role: "status" });
  const all = h("input", { type: "checkbox", id: "select-all", "aria-label": "select all shown runs", onchange: () => select(shown().map((run) => run.name), all.checked) });
  const heads = COLUMNS.map((column) => h("th", { scope: "col", class: column.number ? "number" : "", "data-column": column.key },
    h("button", { type: "button", class: "link", onclick: () => order(column.key, chosen.sort === column.key ? !chosen.down : Boolean(column.number)) }, column.title)));
  const rows = h("tbody", {});
  const deleted = h("details", { id: "trash" });
  const element = h("div", { id: "table" },
    h("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, filter, h("label", { class: "narrow" }, h("span", {}, "sort by"), sort), turn, count, h("span", { class: "far" }, compare, part, remove)),
    status, h("div", { class: "scroll" }, h("table", { class: "catalog" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, all), heads)), rows)), deleted);

  const shown = () => {
    const wanted = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const of = COLUMNS.find((column) => column.key === chosen.sort).of;
    const less = (a, b) => {
      const [x, y] = [of(a), of(b)];
      if (x === null || x === undefined || x === "") return y === null || y === undefined || y === "" ? 0 : 1; // what is unknown comes last
      if (y === null || y === undefined || y === "") return -1;
      return (typeof x === "number" ? x - y : String(x).localeCompare(String(y), undefined, { numeric: true })) * (chosen.down ? -1 : 1);
    };
    return table.runs.filter((run) => wanted.every((word) => words(run).includes(word))).sort(less);
  };

  function order(key, down) {
    Object.assign(chosen, { sort: key, down });
    draw();
  }

  function select(names, on) {
    for (const name of names) on ? chosen.selected.add(name) : chosen.selected.delete(name);
    draw();
  }

  function draw() {
    const these = shown();
    history.replaceState(null, "", `#${new URLSearchParams({ ...(filter.value && { filter: filter.value }), sort: chosen.sort, down: chosen.down ? 1 : 0 })}`);
    sort.value = chosen.sort;
    show(turn, chosen.down ? "↓" : "↑");
    heads.forEach((head, i) => head.setAttribute("aria-sort", COLUMNS[i].key === chosen.sort ? (chosen.down ? "descending" : "ascending") : "none"));
    show(count, these.length === table.runs.length ? `${these.length} run${these.length === 1 ? "" : "s"} in ${table.folders.join(", ")}` : `${these.length} of ${table.runs.length} runs`);
    const selected = [...chosen.selected];
    all.checked = these.length > 0 && these.every((run) => chosen.selected.has(run.name));
    compare.hidden = remove.hidden = !selected.length;
    compare.setAttribute("href", `${address(selected)}#curves`);
    show(compare, selected.length > 1 ? `Compare ${selected.length}` : "Open");
    show(remove, `Delete ${selected.length}`);
    part.hidden = selected.length !== 2;
    show(rows, these.map(row));
    show(deleted, h("summary", {}, `Trash (${table.trash.length})`), h("ul", {}, table.trash.map((one) => h("li", {}, one.name,
      h("span", { class: "hint" }, ` deleted ${one.deleted.replace(/^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d).*/, "$1-$2-$3 $4:$5")}`), h("button", { type: "button", onclick: () => restore([one.id]) }, "Restore")))),
    h("p", { class: "hint" }, `Deleted runs are in the folder .trash of ${table.folders.join(", ")} until you remove it.`));
    deleted.hidden = !table.trash.length;
  }

  function row(run) {
    const value = (column) => ({
      name: () => h("a", { href: `${address([run.name])}#curves` }, run.name),
      steps: () => [steps(run.steps), run.budget && run.status !== "finished" ? h("span", { class: "hint" }, ` of ${steps(run.budget)}`) : null],
      last: () => [run.unread ? "…" : short(run.last)],
      best: () => [run.unread ? "…" : short(run.best)],
      status: () => h("span", { class: `state ${run.status}` }, run.status),
      algorithm: () => run.algorithm.split(/(?<=_)/).map((part) => [part, h("wbr")]),
      started: () => date(run.started).split(" ").map((part) => [h("span", {}, part), " "]),
      tags: () => tags(run),
    })[column.key]?.() ?? column.of(run) ?? "–";
    const mark = h("input", { type: "checkbox", "aria-label": `select ${run.name}`, checked: chosen.selected.has(run.name), onchange: (event) => select([run.name], event.target.checked) });
    return h("tr", { "data-run": run.name }, h("td", { class: "select" }, mark), COLUMNS.map((column) => h("td", { class: `c-${column.key}${column.number ? " number" : ""}`, "data-title": column.title },
      value(column), column.key === "name" && run.damage ? h("span", { class: "damage" }, run.damage) : null)));
  }

  function tags(run) {
    if (chosen.editing !== run.name) {
      return h("button", { type: "button", class: "tags", "aria-label": `tags of ${run.name}`, onclick: () => edit(run) }, run.tags.length ? run.tags.map((tag) => h("span", { class: "tag" }, tag)) : h("span", { class: "hint" }, "+ tag"));
    }
    const input = h("input", { type: "text", value: run.tags.join(", "), "aria-label": `tags of ${run.name}, separated by commas`, placeholder: "a, b" });
    input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") save(run, input.value);
      if (event.key === "Escape") stop();
    });
    input.addEventListener("blur", () => chosen.editing === run.name && save(run, input.value));
    return input;
  }

  function edit(run) {
    chosen.editing = run.name;
    draw();
    rows.querySelector(".c-tags input").focus();
  }

  function stop() {
    chosen.editing = null;
    draw();
  }

  async function save(run, text) {
    chosen.editing = null;
    await act(() => post("api/tags", { run: run.name, tags: text.split(",") }));
  }

  async function trash(names) {
    const ids = [];
    for (const name of names) {
      const done = await act(() => post("api/delete", { run: name }));
      if (done) {
        ids.push(done.id);
        chosen.selected.delete(name);
      }
    }
    draw();
    if (ids.length === names.length) show(status);
    if (ids.length) status.append(` Moved ${ids.length === 1 ? names.join(", ") : `${ids.length} runs`} to the trash. `, h("button", { type: "button", id: "undo", onclick: () => restore(ids) }, "Undo"));
  }

  async function parting(names) {
    show(status, `Comparing ${names.join(" and ")} …`);
    const found = await act(() => getJson(`api/diff?${new URLSearchParams({ a: names[0], b: names[1] })}`));
    if (found) show(status, h("span", { id: "parting" }, `${names[0]} and ${names[1]}:`, found.lines.map((line) => h("span", { class: "line" }, line))));
  }

  async function restore(ids) {
    show(status);
    for (const id of ids) await act(() => post("api/restore", { run: id }));
  }

  async function act(change) {
    try {
      const done = await change();
      await refresh();
      return done;
    } catch (error) {
      show(status, h("span", { class: "damage" }, error.message));
      draw();
      return null;
    }
  }

  async function refresh() {
    const fresh = await getJson("api/table");
    const text = JSON.stringify(fresh);
    if (chosen.editing !== null) return; // a redraw would take the text that is being typed
    table = fresh;
    for (const name of chosen.selected) if (!table.runs.some((run) => run.name === name)) chosen.selected.delete(name);
    if (text !== drawn) draw();
    drawn = text;
  }

  async function poll() {
    try {
      if (document.visibilityState === "visible") await refresh();
      page.classList.remove("away");
    } catch (error) {
      page.classList.add("away");
      show(gone, error instanceof TypeError ? "The server does not respond. This page shows the last data." : `${error.message}. This page shows the last data.`);
    }
    setTimeout(poll, EVERY);
  }

  await refresh();
  draw();
  setTimeout(poll, EVERY);
  return { element };
}
