// The clip table in the inspector, which requests samples when needed.

import { getJson } from "./api.js";
import { floats, makeDensity } from "./density.js";
import { h } from "./dom.js";
import { makeTable } from "./table.js";

export function makeClip(state) {
  const table = makeTable();
  const element = h("div", {}, h("h2", {}, "The clip table"), h("p", { class: "formula" }, "J = min( ρÂ, clip(ρ, 1−ε, 1+ε) Â )"), table.element);
  gather(state.runs).then((source) => source.runs.length && element.append(makeDensity(source, table).element));
  return { element };
}

async function mostClipped(run, traces) {
  const found = await getJson(`api/runs/${run.number}/clipped`).catch(() => null);
  return Math.max(0, traces.findIndex((trace) => trace.steps === found?.steps));
}

async function gather(runs) {
  const traced = [];
  for (const run of runs) {
    const responses = await Promise.all(run.traces.map((steps) => getJson(`api/runs/${run.number}/traces/${steps}`).catch(() => null)));
    const traces = responses.filter((trace) => trace?.passes).map(({ steps, iteration, passes, rule }) => ({ steps, iteration, passes, rule }));
    if (traces.length) traced.push({ name: run.name, number: run.number, traces, start: await mostClipped(run, traces) });
  }
  const load = async (run, trace, pass) => {
    const { parts } = await getJson(`api/runs/${traced[run].number}/traces/${traced[run].traces[trace].steps}/passes/${pass + 1}`);
    const join = (name) => {
      const arrays = parts.map((part) => floats(part[name]));
      const whole = new Float32Array(arrays.reduce((sum, x) => sum + x.length, 0));
      arrays.reduce((at, x) => (whole.set(x, at), at + x.length), 0);
      return whole;
    };
    return { ratios: join("ratios"), advantages: join("advantages"), total: parts.reduce((sum, part) => sum + part.total, 0) };
  };
  return { runs: traced, load };
}
