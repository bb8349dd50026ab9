// The last steps by device: which function worked where, and when a device was held without work.

import { colour, figure } from "./charts.js";
import { byName, duration } from "./format.js";

/** Kinds of work, in the order of the legend, with their colours. */
const WORK = {
  load_weights: ["loads weights", "slate"], generate: ["generates", "blue"], held_out: ["evaluates", "sky"], score: ["scores", "amber"], logprobs: ["reference", "teal"],
  evaluate: ["old logprobs", "lilac"], learn: ["learns", "violet"], publish: ["publishes", "rose"], checkpoint: ["saves", "rose"], restore: ["restores", "rose"],
};

const isHeld = (bar) => !bar.work;

export function timelineFigure() {
  return figure({ title: "Devices over the last steps", help: "What each device did; pale where it was held without work", make, tall: true, plain: true });
}

function make(found) {
  const devices = found.rows.map((row) => row.device).sort(byName);
  if (!devices.length) return null;
  const bars = found.rows.flatMap((row) => row.bars.map((bar) => ({ ...bar, device: row.device })));
  const origin = Math.min(...bars.map((bar) => bar.start_s));
  const place = new Map(devices.map((device, at) => [device, at]));
  const trace = (name, tone, of, width, opacity = 1) => ({
    type: "bar", orientation: "h", name, y: of.map((bar) => place.get(bar.device)), base: of.map((bar) => bar.start_s - origin), x: of.map((bar) => bar.end_s - bar.start_s), width,
    marker: { color: colour(tone, opacity), line: { width: 0 } },
    text: of.map((bar) => `${bar.function} ${name}${bar.step === null ? "" : `, step ${bar.step}`}: ${duration(bar.end_s - bar.start_s)}`), textposition: "none",
    hovertemplate: "%{text}<extra></extra>",
  });
  const held = bars.filter((bar) => isHeld(bar) && bar.state !== "starting"), starting = bars.filter((bar) => isHeld(bar) && bar.state === "starting");
  const traces = [trace("held", "slate", held, 0.72, 0.18), trace("starts", "grey", starting, 0.72, 0.6)];
  const legend = [{ name: "held", colour: "slate", line: "pale" }];
  if (starting.length) legend.push({ name: "starts", colour: "grey", line: "area" });
  for (const [work, [name, tone]] of Object.entries(WORK)) {
    const of = bars.filter((bar) => bar.work === work);
    if (!of.length) continue;
    traces.push(trace(name, tone, of, 0.72));
    legend.push({ name, colour: tone, line: "area" });
  }
  const steps = new Map();
  for (const bar of bars) if (bar.step && bar.work) steps.set(bar.step, Math.min(steps.get(bar.step) ?? Infinity, bar.start_s - origin));
  const marks = [...steps].sort((a, b) => a[0] - b[0]);
  const narrow = innerWidth < 700;
  const until = Math.max(...bars.map((bar) => bar.end_s)) - origin;
  return {
    traces, legend,
    summary: `${devices.length} devices, ${marks.length} steps, ${duration(until)}`,
    layout: {
      barmode: "overlay", hovermode: "closest", margin: { l: 70, r: 10, t: 20, b: 26 }, height: 64 + 26 * devices.length,
      xaxis: { ticksuffix: " s", range: [0, until] },
      yaxis: { tickvals: devices.map((_, at) => at), ticktext: devices, range: [devices.length - 0.5, -0.5], showgrid: false, fixedrange: true },
      shapes: marks.map(([, at]) => ({ type: "line", x0: at, x1: at, yref: "paper", y0: 0, y1: 1, line: { color: colour("border"), width: 1 }, layer: "below" })),
      annotations: marks.filter((_, at) => !narrow || at % 2 === 0).map(([step, at]) => ({ x: at, yref: "paper", y: 1, yanchor: "bottom", xanchor: "left", showarrow: false, text: `step ${step}`, font: { size: 10, color: colour("muted") } })),
    },
  };
}
