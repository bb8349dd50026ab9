// Curves by uPlot (uPlot.iife.min.js, a script before the modules), in the colours of style.css. What a chart tells at
// the pointer, by arrow keys too, and the steps that are dragged over.

import { h } from "./dom.js";

const FONT = "11px -apple-system, 'Segoe UI', Inter, Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif";
const AIR = 0.06; // of the y axis, above and below
const DASHES = { dash: [6, 4], dot: [1.5, 3] };
const WHOLE = Array.from({ length: 10 }, (_, power) => [1, 2, 5].map((digit) => digit * 10 ** power)).flat();
const PAGE = 20; // points that PageUp and PageDown pass

const fine = (value) => value !== null && value !== undefined && Number.isFinite(value);

// Colours are read once per scheme: to read them for each line would lay the page out each time.
let colours = {};
const colour = (name) => (colours[name] ??= getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = {};
  for (const plot of document.querySelectorAll(".plot")) plot.uplot?.redraw(false);
});

const faded = (name, opacity) => `color-mix(in srgb, ${colour(name)} ${100 * opacity}%, transparent)`;

/** A tick as short as its neighbours allow: 0.5 between 0 and 1, 2e-7 where all are small. */
function tick(value, increment, { log, prefix = "", suffix = "" }) {
  if (value === null) return "";
  if (log) return value >= 0.01 && value < 10_000 ? String(Number(value.toPrecision(3))) : value.toExponential(0).replace("e+", "e");
  const size = Math.abs(Number(value.toPrecision(9)));
  if (increment < 5e-4) return size ? `${value < 0 ? "−" : ""}${prefix}${size.toExponential()}${suffix}` : `${prefix}0${suffix}`;
  let digits = 0;
  while (digits < 9 && Math.abs(increment * 10 ** digits - Math.round(increment * 10 ** digits)) > 1e-6 * increment * 10 ** digits) digits++;
  return `${value < 0 && size ? "−" : ""}${prefix}${size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })}${suffix}`;
}

const power = (value) => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;

/** Lowest and highest of the y axis, with some air. */
function domain(low, high, { log, zero }) {
  if (!fine(low)) return [0, 1];
  if (log) return [low / 1.4, high * 1.4];
  const air = (high - low || Math.abs(high) || 1) * AIR;
  return [zero ? 0 : low - air, high + air];
}

/** The columns of a chart: its areas' edges, which are not seen themselves, then its lines. */
function columns(chart) {
  const edges = chart.areas.flatMap((area) => [area.upper, area.lower]);
  const positive = (values) => (chart.log ? values.map((value) => (value > 0 ? value : null)) : values);
  return uPlot.join([...edges, ...chart.lines].map(({ x, y }) => [x, positive(y)]));
}

function options(plot, chart) {
  const { factor = 1 } = chart, filter = (_, splits) => (chart.log ? splits.map((value) => (power(value) ? value : null)) : splits);
  const axis = { stroke: () => colour("muted"), font: FONT, ticks: { stroke: () => colour("border"), width: 1, size: 4 }, gap: 4 };
  const edge = { width: 0, points: { show: false } };
  return {
    width: plot.clientWidth, height: plot.clientHeight, padding: [8, 12, 0, 0], legend: { show: false },
    scales: {
      x: { time: false, range: () => plot.chart.range },
      y: { distr: chart.log ? 3 : 1, range: (_, low, high) => domain(low, high, plot.chart) },
    },
    axes: [
      { ...axis, size: 24, space: 60, incrs: chart.across ? chart.across.incrs : WHOLE, grid: { show: false }, values: (_, values) => values.map((value) => told(plot, value)) },
      { ...axis, size: 50, space: 34, grid: { stroke: () => colour("grid"), width: 1, filter }, filter, values: (_, values, __, ___, increment) => values.map((value) => tick(value && value * factor, increment * factor, plot.chart)) },
    ],
    series: [{}, ...chart.areas.flatMap(() => [edge, edge]), ...chart.lines.map((line) => ({
      stroke: () => (line.pale ? faded(line.tone, 0.3) : colour(line.tone)), width: line.pale ? 1 : 1.6, dash: DASHES[line.dash],
      points: { size: 4, space: 14, width: 0, fill: () => colour(line.tone), ...(line.dots ? { show: true } : line.pale ? { show: false } : {}) },
    }))],
    bands: chart.areas.map((area, at) => ({ series: [2 * at + 1, 2 * at + 2], fill: () => faded(area.tone, area.opacity ?? 0.16) })),
    cursor: { y: false, points: { show: false }, drag: { x: true, y: false, setScale: false, dist: 6 }, bind: { dblclick: () => () => { plot.zoom?.(null); return null; } } },
    hooks: { setCursor: [(u) => tell(plot, u)], setSelect: [(u) => dragged(plot, u)] },
  };
}

/** A place of the x axis, in words. */
const told = (plot, value) => (plot.chart.across?.format ?? ((step) => step.toLocaleString("en")))(value);

function dragged(plot, u) {
  const { left, width } = u.select;
  if (width < 1) return;
  u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  const [from, to] = [left, left + width].map((px) => Math.round(u.posToVal(px, "x")));
  if (to > from) plot.zoom?.([from, to]);
}

/**
 * Draw curves into `plot`: {areas: [{upper: {x, y}, lower, tone, opacity}], lines: [{name, x, y, tone, dash, dots, pale,
 * format}], read: lines whose values are told at the pointer, log, zero, format: of values, prefix and suffix: of ticks,
 * factor of ticks to values, from and to: steps, across: {format} of an x axis other than steps}. `plot.zoom` gets the steps that were dragged over; null for all.
 */
export function drawCurves(plot, chart) {
  const there = (chart.read ?? chart.lines).filter((line) => line.x.length);
  const first = chart.from ?? Math.min(...there.map((line) => line.x[0])), last = chart.to ?? Math.max(...there.map((line) => line.x.at(-1)));
  plot.chart = { ...chart, read: there, range: last > first ? [first, last] : [first - 1, first + 1] };
  const kind = JSON.stringify([chart.areas.map((area) => [area.tone, area.opacity]), chart.lines.map(({ tone, dash, dots, pale }) => [tone, dash, dots, pale]), chart.log, chart.across?.format.name]);
  if (plot.uplot && plot.kind === kind) {
    plot.uplot.setSize({ width: plot.clientWidth, height: plot.clientHeight });
    plot.uplot.setData(columns(chart));
    return;
  }
  if (!plot.kind) plot.addEventListener("keydown", (event) => move(plot, event));
  if (!plot.kind) plot.addEventListener("blur", () => plot.uplot.setCursor({ left: -10, top: -10 }));
  plot.kind = kind;
  plot.uplot?.destroy();
  plot.replaceChildren();
  plot.uplot = new uPlot(options(plot, chart), columns(chart), plot);
}

/** Arrow keys move the place whose values are told. */
function move(plot, event) {
  const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -PAGE, PageUp: PAGE }[event.key];
  if (!by) return;
  event.preventDefault();
  const u = plot.uplot, steps = u.data[0], at = u.cursor.idx ?? steps.length;
  const next = Math.max(0, Math.min(steps.length - 1, at + by));
  u.setCursor({ left: u.valToPos(steps[next], "x"), top: 0 });
}

/** The place of the value nearest to `wanted` in a sorted list. */
function nearest(sorted, wanted) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < wanted) low = middle;
    else high = middle;
  }
  return wanted - sorted[low] < sorted[high] - wanted ? low : high;
}

/** The values at the pointer, or at the place that arrow keys have moved to. */
function tell(plot, u) {
  plot.querySelector(".tip")?.remove();
  const { left, idx } = u.cursor;
  if (idx === null || idx === undefined || left < 0) return;
  const step = u.data[0][idx], { read, format } = plot.chart;
  const rows = read.map((line) => [line, nearest(line.x, step)]).filter(([line, at]) => fine(line.y[at])).map(([line, at]) => {
    const text = line.format ?? format;
    return h("span", {}, h("i", { class: `key c-${line.tone} ${line.dash ?? ""}` }), line.name, h("b", {}, ` ${text(line.y[at])}`), line.raw ? ` (${text(line.raw[at])})` : null);
  });
  const place = u.valToPos(step, "x") + u.over.offsetLeft;
  const tip = h("div", { class: `tip ${place > plot.clientWidth / 2 ? "before" : ""}` }, h("b", {}, `${plot.chart.across ? "" : "step "}${told(plot, step)}`), rows);
  tip.style.setProperty("--at", `${place}px`);
  plot.append(tip);
}
