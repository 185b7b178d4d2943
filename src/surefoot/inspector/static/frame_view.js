// The video frame of a traced step: the state in which the policy chose the step's action. A video has one frame for every step
// and one after the last, so the position of a frame is a fraction of the duration, at any speed.

import { h, show } from "./dom.js";

export function makeFrame(choose) {
  const video = h("video", { muted: true, playsinline: true, preload: "auto", id: "frame-video" });
  const caption = h("span", {});
  const play = h("button", { type: "button", id: "play", onclick: () => (video.paused ? begin() : video.pause()) }, "Play");
  const element = h("figure", { id: "frame", hidden: true }, video, h("figcaption", {}, play, caption));
  let row = null;
  let target = 0;
  let following = false; // true while the steps follow the video, which must not seek back

  const shown = () => Math.min(row.length, Math.floor((video.currentTime / video.duration) * (row.length + 1)));

  function load(next, source) {
    row = next;
    element.hidden = row.tokens !== null || !(row.has_video || row.video_command);
    video.hidden = play.hidden = !row.has_video;
    const command = row.has_video || !row.video_command ? null : row.video_command;
    const text = row.video_failure ? `No video: ${row.video_failure}. To try again: ` : "No video of this iteration yet. This command replays its episodes from their seeds and actions: ";
    show(caption, command ? [text, h("code", {}, command)] : []);
    delete element.dataset.step;
    if (row.has_video) video.src = source;
    else video.removeAttribute("src");
  }

  function begin() {
    if (shown() === row.length) video.currentTime = 0;
    video.play();
  }

  function seek(t) {
    if (following) return;
    target = row.first + t;
    if (!row.has_video || !(video.duration > 0)) return; // "loadedmetadata" follows
    if (shown() === target) return showStep();
    delete element.dataset.step;
    video.currentTime = ((target + 0.5) * video.duration) / (row.length + 1); // the middle of its frame
  }

  function showStep() {
    const at = shown();
    element.dataset.step = at;
    show(caption, at === row.length ? "After the last step." : `Before t = ${row.first_t + at} of episode ${row.episode}, replayed; the observations are those of training.`);
    const t = at - row.first;
    if (at !== target && t >= 0 && t < row.mask.length) { // select the step that the video shows
      target = at;
      following = true;
      choose(t);
      following = false;
    }
  }

  video.addEventListener("loadedmetadata", () => seek(target - row.first));
  video.addEventListener("seeked", () => video.duration > 0 && showStep());
  for (const event of ["play", "pause"]) video.addEventListener(event, () => show(play, video.paused ? "Play" : "Pause"));
  video.addEventListener("timeupdate", () => !video.paused && video.duration > 0 && showStep());
  video.addEventListener("ended", showStep);
  return { element, load, seek };
}
