// Questions to the server.

export async function ask(path) {
  const answer = await fetch(path, { credentials: "same-origin" });
  const told = await answer.json().catch(() => ({ error: `the server said ${answer.status}` }));
  if (!answer.ok) throw new Error(told.error ?? `the server said ${answer.status}`);
  return told;
}

export const steps = (x) => Math.round(x).toLocaleString("en");

// JSON has no numbers that are not finite; the server says them in words.
export const real = (x) => (Array.isArray(x) ? x.map(real) : typeof x === "string" ? Number(x) : x);

const special = (x) => (Number.isNaN(x) ? "NaN" : x === Infinity ? "∞" : x === -Infinity ? "−∞" : null);

// A number of a curve or a trace, short enough for a label.
export function short(told) {
  if (told === null || told === undefined) return "–";
  const x = real(told);
  if (!Number.isFinite(x)) return special(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace("e+", "e").replace(/-/g, "−");
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

// A ratio or a bound of the band: what matters is how far from 1 it is.
export const fine = (x) => special(x) ?? String(Number(x.toPrecision(6))).replace("-", "−");

// What would move a cursor or turn the direction of writing is shown as its number.
export function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu, (c) =>
    c === "\n" ? "⏎" : c === "\t" ? "⇥" : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}
