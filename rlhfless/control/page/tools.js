// What stands above the charts of a view: which steps they show, and how smooth their lines are.

import { h, note } from "./dom.js";
import { smoothed } from "./curves.js";

const RANGES = { "All steps": null, "Last 1,000": { last: 1000 }, "Last 100": { last: 100 } };

let weight = 0; // of smoothing; it stays when another run is looked at

/** `narrow(range)` reads other steps, `draw()` redraws. `zoom` passes the steps that were dragged over to the charts. */
export function chartTools({ narrow, draw }) {
  let range = null;
  const ranges = Object.entries(RANGES).map(([text, wanted]) => h("button", { type: "button", "aria-pressed": String(wanted === null), onclick: () => choose(wanted) }, text));
  const [from, to] = ["First step", "Last step"].map((name) => h("input", { type: "number", min: 0, step: 1, "aria-label": name, onchange: () => zoom([Number(from.value), Number(to.value)]) }));
  const strength = h("output", { for: "smoothing" }, String(weight));
  const smoothing = h("input", { type: "range", id: "smoothing", min: 0, max: 0.99, step: 0.01, value: weight, oninput: () => {
    weight = Number(smoothing.value);
    strength.textContent = weight.toFixed(2);
    draw();
  } });
  const element = h("div", { class: "tools ranges", hidden: true },
    h("label", { class: "check", for: "smoothing" }, "Smoothing", smoothing, strength),
    h("div", { class: "steps-shown", title: "Or drag over a chart; double-click for all" }, "Steps", from, "to", to),
    h("div", { class: "segments", role: "group", "aria-label": "Steps in the charts" }, ranges));

  function choose(wanted) {
    range = wanted;
    Object.values(RANGES).forEach((one, at) => ranges[at].setAttribute("aria-pressed", String(one === wanted)));
    narrow(wanted).catch((error) => note(error.message, "error"));
  }

  function zoom(steps) {
    const [first, last] = steps ?? [0, 0];
    if (steps && !(Number.isInteger(first) && Number.isInteger(last) && first >= 0 && last > first)) {
      note("The last step must be after the first one.", "error");
      return;
    }
    choose(steps ? { from: first, to: last } : null);
  }

  return {
    element,
    zoom,
    /** What a chart shows of what it was made of. */
    shown: (made) => (made && range?.to ? { ...smoothed(made, weight), from: range.from, to: range.to } : smoothed(made, weight)),
    /** The steps of the longest run, and those that are drawn. */
    steps(all, drawn) {
      element.hidden = all < 2;
      ranges.forEach((one, at) => { one.hidden = at > 0 && all <= Object.values(RANGES)[at].last; });
      for (const [input, value] of [[from, range?.from ?? drawn[0]], [to, range?.to ?? drawn[1]]]) if (document.activeElement !== input && Number.isFinite(value)) input.value = value;
    },
  };
}

/** The first and the last step of some series. */
export const span = (series) => {
  const steps = Object.values(series).map((one) => one.steps).filter((one) => one.length);
  return [Math.min(...steps.map((one) => one[0])), Math.max(...steps.map((one) => one.at(-1)))];
};
