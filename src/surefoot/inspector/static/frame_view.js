// The frame of a traced step, where its episode was filmed: the state in which the step's action was chosen. A film has one
// frame for every step and one after the last, so a frame is found by its share of the whole, whatever the film's speed.

import { h, show } from "./dom.js";

export function makeFrame(choose) {
  const video = h("video", { muted: true, playsinline: true, preload: "auto", id: "film" });
  const caption = h("span", {});
  const play = h("button", { type: "button", id: "play", onclick: () => (video.paused ? begin() : video.pause()) }, "Play");
  const element = h("figure", { id: "frame", hidden: true }, video, h("figcaption", {}, play, caption));
  let row = null;
  let wanted = 0;
  let following = false; // the steps follow the film, which is not to be sought back to them

  const shown = () => Math.min(row.length, Math.floor((video.currentTime / video.duration) * (row.length + 1)));

  function load(next, source) {
    row = next;
    element.hidden = row.tokens !== null || !(row.filmed || row.to_film);
    video.hidden = play.hidden = !row.filmed;
    const command = row.filmed || !row.to_film ? null : row.to_film;
    const why = row.not_filmed ? `Not filmed: ${row.not_filmed}. To try again: ` : "Not filmed yet. This draws the very episode, replayed from its seed and actions: ";
    show(caption, command ? [why, h("code", {}, command)] : []);
    delete element.dataset.step;
    if (row.filmed) video.src = source;
    else video.removeAttribute("src");
  }

  function begin() {
    if (shown() === row.length) video.currentTime = 0;
    video.play();
  }

  function seek(t) {
    if (following) return;
    wanted = row.first + t;
    if (!row.filmed || !(video.duration > 0)) return; // "loadedmetadata" will
    if (shown() === wanted) return tell();
    delete element.dataset.step;
    video.currentTime = ((wanted + 0.5) * video.duration) / (row.length + 1); // the middle of its frame
  }

  function tell() {
    const at = shown();
    element.dataset.step = at;
    show(caption, at === row.length ? "After the last step." : `Before step ${row.episode_step + at} of episode ${row.episode}, replayed: it showed the policy the same as in training.`);
    const t = at - row.first;
    if (at !== wanted && t >= 0 && t < row.mask.length) { // whoever plays the film walks along the steps
      wanted = at;
      following = true;
      choose(t);
      following = false;
    }
  }

  video.addEventListener("loadedmetadata", () => seek(wanted - row.first));
  video.addEventListener("seeked", () => video.duration > 0 && tell());
  for (const event of ["play", "pause"]) video.addEventListener(event, () => show(play, video.paused ? "Play" : "Pause"));
  video.addEventListener("timeupdate", () => !video.paused && video.duration > 0 && tell());
  video.addEventListener("ended", tell);
  return { element, load, seek };
}
