// Compare two answers, or two clips: one pair at a time, by key or by button. The next pair comes when the label is on the disk.
import { getJson, post } from "./api.js";
import { h, show, themeButton } from "./dom.js";

const KEYS = { ArrowLeft: "left", 1: "left", ArrowRight: "right", 2: "right", ArrowDown: "equal", 0: "equal", s: "skip" };
const WORDS = { equal: () => "equal", skip: () => "can't say", left: () => `${state.noun} 1`, right: () => `${state.noun} 2` };
const DEAF = 150; // milliseconds after drawing in which keys are ignored
const page = document.getElementById("page");
const theme = themeButton();
const clips = new Map(); // videos of this pair and the next two by address: they load before they are shown
let state = null, drawnAt = 0, busy = false, paused = false;

function clip(source) {
  if (!clips.has(source)) {
    const video = h("video", { src: source, playsinline: true, preload: "auto" });
    video.muted = true;
    clips.set(source, video);
  }
  return clips.get(source);
}

function answer(side, what) {
  const inside = what.video ? clip(what.video) : h("span", { class: "said" }, what.text || "(no text)");
  const [name, key] = [WORDS[side](), side === "left" ? "← or 1" : "→ or 2"];
  return h("button", { type: "button", id: side, class: "answer", "aria-pressed": String(state.pair.chosen === side),
    "aria-label": `Choose ${name}, on the ${side}${what.video ? "" : `: ${what.text}`}`, onclick: () => choose(side) },
  h("b", {}, name[0].toUpperCase() + name.slice(1), keyed(key)), inside);
}

const keyed = (key) => h("span", { class: "key" }, ` (${key})`);
const button = (id, title, key, act) => h("button", { type: "button", id, onclick: act }, title, keyed(key));

function left() {
  const seconds = (state.total - state.done) * state.seconds;
  return !state.done ? "" : seconds < 90 ? ", about a minute left" : `, about ${Math.round(seconds / 60)} minutes left`;
}

function draw(next) {
  state = next;
  const enough = state.complete ? h("p", { id: "after" }, state.after) : null;
  const top = [
    h("header", {}, h("h1", {}, state.pair ? state.question : "Thank you: these were all pairs"), theme),
    h("p", { class: "hint", id: "progress", role: "status" }, `${state.done} of ${state.total}${state.pair ? left() : ""}`),
    h("progress", { max: state.total, value: state.done, "aria-hidden": "true" }), enough,
  ];
  const undoing = button("undo", "Undo", "Backspace", undo);
  const middle = !state.pair ? [h("p", {}, "Every choice is saved; you may close this page."), h("div", { class: "choices" }, undoing)]
    : paused ? [h("p", {}, "Paused."), h("div", { class: "choices" }, button("pause", "Go on", "P", pause))]
      : [state.done ? null : h("p", { id: "how" }, `Choose the better ${state.noun}: click it, or press its key. Each choice is saved at once; you may stop at any time. A few pairs come twice.`),
        h("p", { class: "prompt", id: "prompt" }, state.pair.prompt),
        h("div", { class: "answers" }, answer("left", state.pair.left), answer("right", state.pair.right)),
        h("div", { class: "choices" }, button("equal", "Equal", "↓", () => choose("equal")), button("skip", "Can't say", "S", () => choose("skip")),
          undoing, button("pause", "Pause", "P", pause))];
  show(page, top, middle, h("p", { class: "error", id: "error", role: "alert" }), last());
  const shown = [...document.querySelectorAll("video")];
  for (const [source, video] of clips) if (!state.next.includes(source) && !shown.includes(video)) clips.delete(source);
  state.next.forEach(clip);
  drawnAt = performance.now();
  together(shown);
}

function last() {
  if (!state.last.length) return null;
  const row = (one) => h("li", {}, h("button", { type: "button", onclick: () => again(one.key) }, h("span", {}, one.about), h("b", {}, WORDS[one.choice]())));
  return h("details", { id: "last" }, h("summary", {}, "Change one of the last labels"), h("ol", { class: "last" }, state.last.map(row)));
}

async function together(videos) {
  await Promise.all(videos.map((video) => video.error || video.readyState > 2 || new Promise((ready) => {
    for (const event of ["canplay", "error"]) video.addEventListener(event, ready, { once: true });
  })));
  if (videos.some((video) => video.error && video.isConnected)) show(document.getElementById("error"), "A clip can't be played: choose “Can't say”.");
  const start = () => { for (const video of videos) { video.currentTime = 0; video.play().catch(() => {}); } };
  for (const video of videos) video.onended = () => { if (videos.every((each) => each.ended)) start(); }; // "loop" would drift apart
  start();
}

async function send(request) {
  if (busy) return;
  busy = true;
  try {
    draw(await request());
  } catch (error) {
    show(document.getElementById("error") ?? page, `${error.message}. Every choice before this one is saved.`);
  }
  busy = false;
}

const choose = (choice) => {
  const now = performance.now();
  if (!state?.pair || paused || now - drawnAt < DEAF) return;
  send(() => post("api/label", { key: state.pair.key, choice, ms: Math.round(now - drawnAt), row: state.row }));
};
const undo = () => state && send(() => post("api/undo", { row: state.row }));
const again = (key) => send(() => getJson(`api/pair?key=${encodeURIComponent(key)}`));

function pause() {
  paused = !paused;
  draw(state);
}

addEventListener("keydown", (event) => {
  if (event.repeat || event.ctrlKey || event.metaKey || event.altKey) return;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  const choice = KEYS[key];
  if (choice && !paused) { event.preventDefault(); choose(choice); }
  else if (key === "Backspace") { event.preventDefault(); undo(); }
  else if (key === "p") { event.preventDefault(); pause(); }
});
send(() => getJson("api/pair"));
