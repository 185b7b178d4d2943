// Responses to the same prompts at two evaluations, side by side; and videos of an agent.

import { getJson, short, steps, visible } from "./api.js";
import { h, show } from "./dom.js";

const inLines = (text) => text.split("\n").map(visible).join("\n");

export function makeSamples(state) {
  const able = state.runs.map((run, i) => [run, i]).filter(([run]) => run.samples.length || run.videos.length);
  const chosen = { run: able[0][1], sort: "order" };
  const run = h("select", { id: "samples-run", onchange: () => pick(Number(run.value)) }, able.map(([one, i]) => h("option", { value: i }, one.name)));
  const before = h("select", { id: "before", onchange: () => draw() });
  const after = h("select", { id: "after", onchange: () => draw() });
  const order = h("select", { id: "order", onchange: () => draw() }, [["order", "original order"], ["gain", "largest gain in reward"], ["loss", "largest loss in reward"]].map(([value, title]) => h("option", { value }, title)));
  const text = h("div", { id: "samples" });
  const videos = h("div", { id: "videos" });
  const selects = h("div", { class: "controls" }, h("label", {}, h("span", {}, "before"), before), h("label", {}, h("span", {}, "after"), after),
    h("label", {}, h("span", {}, "order"), order));
  let latest = 0;

  function pick(number) {
    chosen.run = number;
    const one = state.runs[number];
    const options = () => one.samples.map((at) => h("option", { value: at }, at ? `step ${steps(at)}` : "step 0, before training"));
    show(before, options());
    show(after, options());
    selects.hidden = !one.samples.length;
    if (one.samples.length) [before.value, after.value] = [one.samples[0], one.samples.at(-1)];
    show(videos, one.videos.length ? [h("h2", {}, "Videos"), h("p", { class: "hint" }, "Greedy episodes of a checkpoint, recorded by surefoot watch. The traces contain other episodes, with sampled actions."),
      one.videos.map((name, i) => h("figure", {}, h("video", { controls: true, preload: "metadata", src: `api/runs/${one.number}/videos/${i}` }), h("figcaption", {}, name)))] : []);
    draw();
  }

  async function draw() {
    const one = state.runs[chosen.run];
    if (!one.samples.length) return show(text);
    const number = ++latest;
    const [old, fresh] = await Promise.all([before, after].map((at) => getJson(`api/runs/${one.number}/samples/${at.value}`)));
    if (number !== latest) return;
    const waiting = new Map();
    for (const sample of old) waiting.set(sample.prompt, [...(waiting.get(sample.prompt) ?? []), sample]);
    let pairs = fresh.map((sample) => [waiting.get(sample.prompt)?.shift() ?? null, sample]);
    const gain = ([a, b]) => (a ? (b.reward ?? 0) - (a.reward ?? 0) : 0);
    if (order.value !== "order") pairs = pairs.sort((a, b) => (order.value === "gain" ? gain(b) - gain(a) : gain(a) - gain(b)));
    const cell = (sample) => (sample ? [h("p", { class: "said" }, inLines(sample.response) || "(empty)"),
      h("p", { class: "hint" }, ["reward", "gold", "kl"].filter((name) => name in sample).map((name) => `${name} ${short(sample[name])}`).join(" · "))] : h("p", { class: "hint" }, "not sampled at this step"));
    const missing = pairs.filter(([a]) => !a).length;
    show(text, missing ? h("p", { class: "hint" }, `${missing} of these ${pairs.length} prompts have no earlier response. With data.held_out every evaluation uses the same prompts.`) : null, h("table", { class: "beside" },
      h("thead", {}, h("tr", {}, ["prompt", `before, step ${steps(before.value)}`, `after, step ${steps(after.value)}`].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, pairs.map(([a, b]) => h("tr", {}, h("td", { class: "asked" }, inLines(b.prompt)), h("td", { "data-title": `before, step ${steps(before.value)}` }, cell(a)), h("td", { "data-title": `after, step ${steps(after.value)}` }, cell(b)))))));
  }

  const element = h("div", {}, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() }, h("label", {}, h("span", {}, "run"), run), selects), text, videos);
  pick(chosen.run);
  return { element };
}
