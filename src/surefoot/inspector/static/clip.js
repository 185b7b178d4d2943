// The clip table as a separate page, which may contain samples of runs.

import { floats, makeDensity } from "./density.js";
import { h, themeButton } from "./dom.js";
import { makeTable } from "./table.js";

function embedded() {
  const text = document.getElementById("samples")?.textContent ?? "";
  const runs = text.trim() ? JSON.parse(text) : [];
  const join = (parts) => {
    const whole = new Float32Array(parts.reduce((sum, part) => sum + part.length, 0));
    parts.reduce((at, part) => (whole.set(part, at), at + part.length), 0);
    return whole;
  };
  const load = async (run, trace, pass) => {
    const all = runs[run].traces[trace].samples;
    const parts = pass < 0 ? all : [all[pass]];
    return {
      ratios: join(parts.map((part) => floats(part.ratios))), advantages: join(parts.map((part) => floats(part.advantages))),
      total: parts.reduce((sum, part) => sum + part.total, 0),
    };
  };
  return { runs: runs.map((run) => ({ ...run, traces: run.traces.map((trace) => ({ ...trace, passes: trace.samples.length })) })), load };
}

const page = document.getElementById("page");
const clipTable = makeTable();
const source = embedded();
page.append(
  h("header", {}, h("div", {}, h("h1", {}, "The clip table"), h("p", { class: "formula" }, "J = min( ρÂ, clip(ρ, 1−ε, 1+ε) Â )")), themeButton()),
  clipTable.element,
);
if (source.runs.length) page.append(makeDensity(source, clipTable).element);
