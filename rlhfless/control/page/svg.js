// Curves as SVG. Colours are classes (style.css), so light and dark need no second drawing. This is the page's own: a
// general chart library takes longer to be evaluated than the whole page may take to be complete.

import { h } from "./dom.js";

const MARGIN = { left: 48, right: 12, top: 8, bottom: 22 };
const TICK_PX = 38; // between two ticks of the y axis, at least

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

/** Round numbers between two values, about `count` of them. */
export function ticks(low, high, count, whole = false) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(count, 1), size = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max([1, 2, 2.5, 5, 10].find((factor) => factor * size >= raw * 0.999) * size, whole ? 1 : 0);
  if (whole && step % 1) return ticks(low, high, count / 2, whole);
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at++) found.push(Number((at * step).toPrecision(12)));
  return found;
}

/** A tick as short as its neighbours allow: 0.5 between 0 and 1, 1e-3 on a logarithmic axis. */
function label(value, { log, prefix = "", suffix = "" }, step) {
  if (log) return value >= 0.01 && value < 10_000 ? String(value) : value.toExponential(0).replace("e+", "e");
  let digits = 0;
  while (digits < 9 && Math.abs(step * 10 ** digits - Math.round(step * 10 ** digits)) > 1e-6 * step * 10 ** digits) digits++;
  return `${value < 0 ? "−" : ""}${prefix}${Math.abs(value).toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits })}${suffix}`;
}

/** Powers of ten in between. */
const powers = (low, high) => Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, at) => Math.floor(low) + at).filter((power) => power >= low - 0.02 && power <= high + 0.02).map((power) => 10 ** power);

const fine = (value) => value !== null && Number.isFinite(value);

/** Lowest and highest of all values that are drawn, with some air. */
function domain(parts, { log, zero }) {
  let low = zero ? 0 : Infinity, high = -Infinity;
  for (const values of parts) for (const value of values) if (fine(value) && (!log || value > 0)) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low > high) return [0, 1];
  if (log) return [Math.log10(low) - 0.15, Math.log10(high) + 0.15];
  const air = (high - low || Math.abs(high) || 1) * 0.06;
  return [zero ? 0 : low - air, high + air];
}

function path(xs, ys, x, y) {
  let text = "", pen = "M";
  for (let at = 0; at < xs.length; at++) {
    const place = fine(ys[at]) ? y(ys[at]) : NaN;
    if (Number.isNaN(place)) { pen = "M"; continue; }
    text += `${pen}${x(xs[at]).toFixed(1)},${place.toFixed(1)}`;
    pen = "L";
  }
  return text;
}

function ring(area, x, y) {
  const [upper, lower] = [area.upper, area.lower].map((edge) => edge.x.map((value, at) => [value, edge.y[at]]).filter((point) => fine(point[1])));
  const points = [...upper, ...lower.reverse()].map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`);
  return points.length ? `M${points.join("L")}Z` : "";
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

/**
 * Draw curves into `plot`: {areas: [{upper: {x, y}, lower, tone, opacity}], lines: [{name, x, y, tone, dash, dots, format}],
 * read: lines whose values are told at the pointer, log, zero, format: of values, prefix and suffix: of ticks}.
 */
export function drawCurves(plot, chart) {
  const width = plot.clientWidth, height = plot.clientHeight;
  const read = (chart.read ?? chart.lines).filter((line) => line.x.length);
  const first = Math.min(...read.map((line) => line.x[0])), last = Math.max(...read.map((line) => line.x.at(-1)));
  const [low, high] = domain([...chart.areas.flatMap((area) => [area.upper.y, area.lower.y]), ...chart.lines.map((line) => line.y)], chart);
  const right = width - MARGIN.right, bottom = height - MARGIN.bottom;
  const x = (value) => MARGIN.left + ((value - first) / (last - first || 1)) * (right - MARGIN.left);
  const of = chart.log ? (value) => (value > 0 ? Math.log10(value) : NaN) : (value) => value;
  const y = (value) => bottom - ((of(value) - low) / (high - low)) * (bottom - MARGIN.top);
  const rows = chart.log ? powers(low, high) : ticks(low, high, (bottom - MARGIN.top) / TICK_PX);
  const columns = ticks(first, last, Math.min((right - MARGIN.left) / 70, 8), true);
  const cross = s("line", { class: "cross", y1: MARGIN.top, y2: bottom, visibility: "hidden" });
  plot.replaceChildren(s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" },
    rows.map((value) => [s("line", { class: "rule", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }), s("text", { class: "tick", x: MARGIN.left - 7, y: y(value) + 4, "text-anchor": "end" }, label(Number(value.toPrecision(9)), chart, rows[1] - rows[0] || Math.abs(value) || 1))]),
    columns.map((value) => [s("line", { class: "mark", x1: x(value), x2: x(value), y1: bottom, y2: bottom + 3 }), s("text", { class: "tick", x: x(value), y: bottom + 15, "text-anchor": "middle" }, value.toLocaleString("en"))]),
    chart.areas.map((area) => s("path", { class: `area c-${area.tone}`, d: ring(area, x, y), "fill-opacity": area.opacity ?? 0.16 })),
    chart.lines.map((line) => [
      s("path", { class: `line c-${line.tone} ${line.dash ?? ""}`, d: path(line.x, line.y, x, y) }),
      line.dots || line.x.length === 1 ? line.x.map((value, at) => (fine(line.y[at]) ? s("circle", { class: `point c-${line.tone}`, cx: x(value), cy: y(line.y[at]), r: 2 }) : null)) : null,
    ]), cross));
  const steps = read.reduce((most, line) => (line.x.length > most.length ? line.x : most), []);
  tell(plot, { steps, read, x, cross, back: (px) => first + ((px - MARGIN.left) / (right - MARGIN.left)) * (last - first), format: chart.format });
}

/** The values at the pointer, or at the place that arrow keys have moved to. */
function tell(plot, drawn) {
  const known = plot.drawn;
  plot.drawn = drawn;
  if (known) { if (plot.at !== undefined) show(plot, plot.at); return; }
  const leave = () => { plot.at = undefined; plot.querySelector(".tip")?.remove(); plot.drawn.cross.setAttribute("visibility", "hidden"); };
  plot.addEventListener("pointermove", (event) => show(plot, nearest(plot.drawn.steps, plot.drawn.back(event.clientX - plot.getBoundingClientRect().left))));
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("blur", leave);
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageDown: -20, PageUp: 20 }[event.key];
    if (!by) return;
    event.preventDefault();
    const { steps } = plot.drawn;
    show(plot, Math.max(0, Math.min(steps.length - 1, (plot.at ?? steps.length - 1) + by)));
  });
}

function show(plot, at) {
  const { steps, read, x, cross, format } = plot.drawn;
  plot.at = at = Math.min(at, steps.length - 1);
  const step = steps[at], place = x(step);
  for (const name of ["x1", "x2"]) cross.setAttribute(name, place);
  cross.setAttribute("visibility", "visible");
  plot.querySelector(".tip")?.remove();
  const rows = read.map((line) => [line, line.y[nearest(line.x, step)]]).filter(([, value]) => fine(value));
  const tip = h("div", { class: "tip" }, h("b", {}, `step ${step.toLocaleString("en")}`),
    rows.map(([line, value]) => h("span", {}, h("i", { class: `key c-${line.tone} ${line.dash ?? ""}` }), line.name, h("b", {}, ` ${(line.format ?? format)(value)}`))));
  plot.append(tip);
  const right = place > plot.clientWidth / 2;
  tip.style.left = right ? "auto" : `${place + 10}px`;
  tip.style.right = right ? `${plot.clientWidth - place + 10}px` : "auto";
}
