// Requests to the server, and numbers and text for display.

async function ask(path, options) {
  const response = await fetch(path, { credentials: "same-origin", ...options }).catch(() => {
    throw new Error("No answer: the command in the terminal has ended. Start it again, and open its new address");
  });
  const content = await response.json().catch(() => ({ error: `the server returned status ${response.status}` }));
  if (!response.ok) throw new Error(content.error ?? `the server returned status ${response.status}`);
  return content;
}

export const getJson = (path) => ask(path, {});

// Change something: the server takes JSON from this page alone.
export const post = (path, content) => ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(content) });

export const steps = (x) => Math.round(x).toLocaleString("en");

// JSON can't represent numbers that are not finite; the server sends them as strings.
export const real = (x) => (Array.isArray(x) ? x.map(real) : typeof x === "string" ? Number(x) : x);

const special = (x) => (Number.isNaN(x) ? "NaN" : x === Infinity ? "∞" : x === -Infinity ? "−∞" : null);

// A number of a curve or a trace, short enough for a label.
export function short(value) {
  if (value === null || value === undefined) return "–";
  const x = real(value);
  if (!Number.isFinite(x)) return special(x);
  const size = Math.abs(x);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return x.toExponential(2).replace("e+", "e").replace(/-/g, "−");
  return String(Number(x.toPrecision(4))).replace("-", "−");
}

// A ratio or a bound of the band, with six digits, because its distance from 1 matters.
export const fine = (x) => special(x) ?? String(Number(x.toPrecision(6))).replace("-", "−");

// Replace characters that control the cursor or the direction of writing with escape sequences.
export function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\u2028\u2029]/gu, (c) =>
    c === "\n" ? "⏎" : c === "\t" ? "⇥" : `\\u${c.codePointAt(0).toString(16).padStart(4, "0")}`);
}
