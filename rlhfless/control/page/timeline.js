// Devices over time: the last steps of a run by function, and the last minutes of a cluster by run.

import { figure } from "./charts.js";
import { s } from "./dom.js";
import { byName, duration } from "./format.js";

/** Kinds of work, in the order of the legend, with their colours. */
const WORK = {
  load_weights: ["loads weights", "slate"], generate: ["generates", "blue"], precompute: ["prefixes", "blue"], held_out: ["evaluates", "sky"], score: ["scores", "amber"], logprobs: ["reference", "teal"], taught: ["teachers", "lilac"], values: ["critic computes values", "olive"], columns: ["own columns", "lilac"],
  evaluate: ["old logprobs", "lilac"], critic_learn: ["critic learns", "olive"], learn: ["learns", "violet"], publish: ["publishes", "rose"], checkpoint: ["saves", "rose"], restore: ["restores", "rose"],
};

/** What a call did. Work of the same kind is named after the function that did it: a critic's pass is not the reference's, which with adapters is the learner's. */
function workOf({ function: name, work }) {
  if (work === "logprobs" && !["reference", "learner"].includes(name)) return name === "critic" ? "values" : name.startsWith("teacher_") ? "taught" : "columns";
  return work === "learn" && name === "critic" ? "critic_learn" : work;
}

const ROW = 26, BAR = 18, TOP = 22, BOTTOM = 24, RIGHT = 12, LETTER = 6.6, LABEL = 56;

/** Seconds between two ticks: as clocks are read. */
const TICKS_S = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 21600, 86400];

const minutes = (value) => `${Math.floor(value / 60)}:${String(Math.floor(value % 60)).padStart(2, "0")}`;

export function timelineFigure() {
  return figure({ title: "Devices over the last steps", help: "What each device did; pale where it was held without work", make, draw, wide: true });
}

export function clusterFigure() {
  return figure({ title: "Devices over the last minutes", help: "Which run worked on each device: strong where it generated, paler where another function worked", make: makeCluster, draw, wide: true });
}

const RUNS = ["blue", "violet", "teal", "amber", "rose", "lilac", "sky", "slate"];

/** Bars by run: work of a call is done by one function, and the learner's and the reference's are paler than the actors'. */
function makeCluster(found) {
  const rows = found.rows.filter((row) => row.bars.length).sort((a, b) => byName(a.device, b.device));
  if (!rows.length) return null;
  const runs = [...new Set(rows.flatMap((row) => row.bars.map((bar) => bar.run_id)))].sort();
  const toneOf = (run) => RUNS[runs.indexOf(run) % RUNS.length];
  const bars = rows.flatMap((row, place) => row.bars.map((bar) => ({ ...bar, work: workOf(bar), place, device: row.device, tone: toneOf(bar.run_id), opacity: bar.function === "generation" ? 1 : 0.5 })));
  const origin = Math.min(...bars.map((bar) => bar.start_s)), until = Math.max(...bars.map((bar) => bar.end_s)) - origin;
  const legend = runs.map((run) => ({ name: run, tone: toneOf(run), line: "area" }));
  return { rows, bars, origin, until, legend, steps: [], summary: `${rows.length} devices, ${runs.length} runs, ${duration(until)}` };
}

function make(found) {
  const rows = found.rows.filter((row) => row.bars.length).sort((a, b) => byName(a.device, b.device));
  if (!rows.length) return null;
  const bars = rows.flatMap((row, place) => row.bars.map((bar) => ({ ...bar, work: workOf(bar), place, device: row.device })));
  const origin = Math.min(...bars.map((bar) => bar.start_s)), until = Math.max(...bars.map((bar) => bar.end_s)) - origin;
  const steps = new Map();
  for (const bar of bars) if (bar.work && bar.step) steps.set(bar.step, Math.min(steps.get(bar.step) ?? Infinity, bar.start_s - origin));
  const used = new Set(bars.map((bar) => bar.work));
  const legend = [{ name: "held", tone: "slate", line: "pale" }];
  if (bars.some((bar) => !bar.work && bar.state === "starting")) legend.push({ name: "starts", tone: "grey", line: "area" });
  legend.push(...Object.entries(WORK).filter(([work]) => used.has(work)).map(([, [name, tone]]) => ({ name, tone, line: "area" })));
  return { rows, bars, origin, until, legend, steps: [...steps].sort((a, b) => a[0] - b[0]), summary: `${rows.length} devices, ${steps.size} steps, ${duration(until)}` };
}

function draw(plot, { rows, bars, origin, until, steps }) {
  const width = plot.clientWidth, bottom = TOP + ROW * rows.length, height = bottom + BOTTOM;
  const left = 14 + LETTER * Math.max(...rows.map((row) => row.device.length));
  const x = (value) => left + (value / until) * (width - RIGHT - left);
  const held = bars.filter((bar) => !bar.work), work = bars.filter((bar) => bar.work);
  const every = TICKS_S.find((step) => x(step) - x(0) >= 60) ?? until;
  const times = Array.from({ length: Math.floor(until / every) + 1 }, (_, at) => at * every);
  let labelled = -Infinity;
  const marks = steps.map(([step, at]) => {
    const told = x(at) - labelled >= LABEL && x(at) + LABEL - 12 < width;
    if (told) labelled = x(at);
    return [s("line", { class: "mark", x1: x(at), x2: x(at), y1: TOP - 4, y2: bottom }), told ? s("text", { class: "tick", x: x(at) + 3, y: 12 }, `step ${step}`) : null];
  });
  plot.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    rows.map((row, place) => s("text", { class: "tick", x: left - 8, y: TOP + ROW * place + ROW / 2 + 4, "text-anchor": "end" }, row.device)),
    held.map((bar) => rect(bar, bar.state === "starting" ? "grey" : "slate", bar.state === "starting" ? 0.75 : 0.2, x, origin)), marks,
    work.map((bar) => rect(bar, bar.tone ?? WORK[bar.work]?.[1] ?? "grey", bar.opacity ?? 1, x, origin)),
    times.map((value) => s("text", { class: "tick", x: x(value), y: bottom + 16, "text-anchor": "middle" }, minutes(value)))));
}

function rect(bar, tone, opacity, x, origin) {
  const from = x(bar.start_s - origin), name = bar.work ? (WORK[bar.work]?.[0] ?? bar.work) : bar.state === "starting" ? "starts" : "held";
  const text = `${bar.device}: ${bar.run_id ? `${bar.run_id}, ` : ""}${name.startsWith(bar.function) ? name : `${bar.function} ${name}`}${bar.work && bar.step ? `, step ${bar.step}` : ""}, ${duration(bar.end_s - bar.start_s)}`;
  return s("rect", { class: `area c-${tone}`, x: from.toFixed(1), y: TOP + ROW * bar.place + (ROW - BAR) / 2, width: Math.max(x(bar.end_s - origin) - from, 0.8).toFixed(1), height: BAR, "fill-opacity": opacity }, s("title", {}, text));
}
