// The first tab of a run: figures, charts over the steps, devices over the last steps, and cost by function.

import { get } from "./api.js";
import { figure } from "./charts.js";
import { CHARTS, NAMES } from "./curves.js";
import { cell, figureCell, fill, h, panel, refill, s, table, throttled } from "./dom.js";
import { duration, percent, usd } from "./format.js";
import { seriesOf } from "./series.js";
import { tiles } from "./tiles.js";
import { timelineFigure } from "./timeline.js";
import { chartTools, span } from "./tools.js";

const SHOWN_STEPS = 6; // of the devices
const TIMELINE_MS = 20_000; // it is read from the trace, by a separate process

export function overviewTab(root, { path }) {
  const series = seriesOf(path, NAMES);
  let usage = null, run = null, untraced = false;
  const numbers = h("dl", { class: "tiles" });
  // Metrics and usage arrive at about the same time: both are drawn at once.
  const draw = throttled(0, () => charts.forEach((one) => one.show({ ...series.all, usage })));
  const tools = chartTools({ draw: () => draw(), narrow: async (range) => { series.narrow(range); await metrics(); } });
  const charts = CHARTS.map((one) => figure({ ...one, make: (found) => tools.shown(one.make(found)), zoom: tools.zoom }));
  const devices = timelineFigure();
  const bill = h("div", { class: "bill" });
  const failure = h("div");
  const nothing = h("p", { class: "panel empty", hidden: true });
  const grid = h("div", { class: "charts" }, charts.map((one) => one.element));
  root.append(failure, nothing, numbers, tools.element, grid, devices.element, bill);

  /** Before the first step there is nothing to draw. */
  function begun(yes, status) {
    nothing.hidden = yes;
    numbers.hidden = grid.hidden = !yes;
    devices.element.hidden = !yes || untraced;
    tools.steps(run.step, span(series.all));
    nothing.textContent = ["failed", "cancelled"].includes(status) ? "It ended before its first step." : "Figures come with the first step.";
  }

  function update(found) {
    run = found;
    begun(run.step > 0, run.status);
    fill(numbers, tiles(run, usage).map(([name, value, more]) => h("div", { class: value === null ? "none" : "" }, h("dt", {}, name), h("dd", {}, h("b", {}, value ?? "–"), h("span", {}, value === null ? "" : more)))));
    fill(failure, run.error ? h("div", { class: "failure", role: "alert" }, h("h2", {}, run.error.param ? h("code", {}, run.error.param) : "Why it stopped"), h("p", {}, run.error.message),
      run.error.problems.length ? h("ul", {}, run.error.problems.map((p) => h("li", {}, p.param ? h("code", {}, `${p.param}: `) : null, p.message, p.hint ? ` — ${p.hint}` : ""))) : null) : null);
  }

  async function metrics() {
    await series.load(run?.step ?? 0);
    if (run) tools.steps(run.step, span(series.all));
    draw();
  }

  async function spent() {
    usage = await get(`${path}/usage`);
    refill(bill, () => billOf(usage));
    if (run) update(run);
    draw();
  }

  let asked = -Infinity, seen = false;
  const watch = new IntersectionObserver((found) => { seen = found.at(-1).isIntersecting; if (seen) timeline(); });

  async function timeline() {
    if (!(seen || untraced) || performance.now() - asked < TIMELINE_MS) return;
    asked = performance.now();
    try {
      devices.show(await get(`${path}/timeline?steps=${SHOWN_STEPS}`));
      untraced = devices.element.classList.contains("nothing");
    } catch {
      untraced = !("drawn" in devices.element.dataset); // no trace yet, or it is kept elsewhere
    }
    devices.element.hidden = untraced;
  }

  const all = () => Promise.all([metrics(), spent(), timeline()]);
  // Not before all above it has its height: to be asked for, the devices must really be seen.
  const refresh = async () => {
    await all();
    requestAnimationFrame(() => setTimeout(() => watch.observe(devices.element), 100));
  };
  return { update, refresh, follow: all, close: () => { draw.cancel(); watch.disconnect(); [...charts, devices].forEach((one) => one.close()); } };
}

function billOf(usage) {
  if (!usage.functions.length) return null;
  const most = Math.max(...usage.functions.map((row) => row.busy_device_s + row.idle_device_s + row.cold_device_s));
  const rows = usage.functions.map((row) => {
    const all = row.busy_device_s + row.idle_device_s + row.cold_device_s;
    return h("tr", { role: "row" },
      cell("Function", { class: "name" }, row.function), cell("Devices", {}, row.kind),
      cell("Time held", { class: "wide" }, shareBar(row, all / most)),
      figureCell("Busy", row.busy_device_s / all, percent), figureCell("Idle", row.idle_device_s / all, percent), figureCell("Starting", row.cold_device_s / all, percent),
      figureCell("Starts", row.cold_starts, String), figureCell("Device time", all, duration), figureCell("Cost", row.cost_usd, usd));
  });
  const columns = [{ title: "Function", sort: "ascending" }, { title: "Devices", sort: "ascending" }, { title: "Time held", class: "wide" },
    ...["Busy", "Idle", "Starting", "Starts", "Device time", "Cost"].map((title) => ({ title, class: "num", sort: "descending" }))];
  const bill = panel("Cost by function", { class: "flush" }, table("Cost by function", columns, rows, { class: "cards" }));
  const plan = plannedAndMeasured(usage);
  return plan ? [h("div", { class: "stack" }, bill, comparison(usage)), plan] : [bill, comparison(usage)];
}

/** Busy, idle and starting as parts of one bar, as long as the function's share of the largest. */
function shareBar(row, share) {
  const parts = [["blue", row.busy_device_s, 1], ["slate", row.idle_device_s, 0.45], ["amber", row.cold_device_s, 1]];
  const all = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  let at = 0;
  return s("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true", class: "share" }, parts.map(([tone, value, opacity]) => {
    const width = (100 * share * value) / all;
    at += width;
    return s("rect", { class: `area c-${tone}`, x: at - width, y: 0, width, height: 8, "fill-opacity": opacity });
  }));
}

/** This run compared with the best static fleet. */
function comparison(usage) {
  const { best_static: fixed } = usage;
  const rows = [["This run, so far", usage.cost_usd, null, ""]];
  if (fixed && fixed.same_cost_usd > 0) {
    const ratio = fixed.cost_usd / fixed.same_cost_usd;
    rows.push([`Best static fleet, ${fixed.actors} actors`, usage.cost_usd * ratio, ratio - 1, `the same ${fixed.steps} steps, simulated`]);
  }
  const columns = [{ title: "Compared" }, { title: "Cost", class: "num" }, { title: "Against this run", class: "num" }, { title: "Basis" }];
  const body = rows.map(([name, value, more, basis]) => h("tr", { role: "row" }, cell("Compared", { class: "name" }, name), cell("Cost", { class: "num" }, usd(value)),
    cell("Against this run", { class: `num ${more > 0 ? "good" : ""}` }, more === null ? "–" : `${more >= 0 ? "+" : "−"}${percent(Math.abs(more))}`), cell("Basis", { class: "muted" }, basis)));
  return panel("Compared", { class: "flush" }, table("Cost compared", columns, body, { class: "cards" }));
}

/** The prediction before the run started, compared with the run: for a step, and for all steps at the current pace. */
function plannedAndMeasured({ planned, measured }) {
  if (!planned) return null;
  const all = planned.steps, of = (value, steps = 1) => (measured ? value * steps : null);
  const rows = [
    ["Step time", duration, planned.step_s, planned.wall_low_s / all, planned.wall_high_s / all, of(measured?.step_s)],
    ["Step cost", usd, planned.cost_usd / all, planned.cost_low_usd / all, planned.cost_high_usd / all, of(measured?.step_usd)],
    ["Run time", duration, planned.wall_s, planned.wall_low_s, planned.wall_high_s, of(measured?.step_s, all)],
    ["Run cost", usd, planned.cost_usd, planned.cost_low_usd, planned.cost_high_usd, of(measured?.step_usd, all)],
  ];
  const names = ["Predicted", "Band", "Measured", "Off by"];
  const columns = [{ title: "" }, ...names.map((title) => ({ title, class: "num" }))];
  const body = rows.map(([name, unit, mean, low, high, found]) => {
    const off = found === null ? null : found / mean - 1;
    return h("tr", { role: "row" }, cell("", { class: "name" }, name), cell(names[0], { class: "num" }, unit(mean)), cell(names[1], { class: "num muted" }, `${unit(low)} to ${unit(high)}`),
      cell(names[2], { class: "num" }, found === null ? "–" : unit(found)), cell(names[3], { class: "num", title: found >= low && found <= high ? "within the band" : null }, off === null ? "–" : `${off >= 0 ? "+" : "−"}${percent(Math.abs(off))}`));
  });
  const basis = h("span", { class: "muted small" }, `${all} steps planned, ${measured?.steps ?? 0} measured`);
  return panel("Predicted and measured", { class: "flush", actions: basis }, table("Predicted and measured", columns, body, { class: "cards" }));
}
