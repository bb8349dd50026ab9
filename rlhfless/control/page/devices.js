// Devices and placements of a planned run, side by side.

import { cell, figureCell, fill, h, panel, s, table } from "./dom.js";
import { duration, number, percent, usd } from "./format.js";

export function othersPanel(body, compare) {
  const button = h("button", { type: "button", onclick: (event) => { event.currentTarget.disabled = true; compare(); } }, "Compare other devices");
  fill(body, h("p", { class: "muted hint" }, "The service's devices, the best of the price book, and placements on them: up to a minute."));
  return panel("Other devices", { class: "flush", actions: button }, body);
}

export function comparisonOf({ rows, sensitivity, tried, left_out: left }) {
  const known = rows.filter((row) => row.predicted);
  const body = rows.map((row) => {
    const { kind, count, placement, predicted, on_front: best, step_usd: step, usd_per_million_tokens: tokens, energy_kwh: energy } = row;
    return h("tr", { role: "row", class: best ? "chosen" : "" },
      cell("Devices", { class: "name", "data-value": `${kind} ${count}` }, `${count} × ${kind}`), cell("Placement", {}, placement), figureCell("Run time", predicted?.wall_s ?? null, duration), figureCell("Run cost", predicted?.cost_usd ?? null, usd),
      figureCell("Per step", step, usd), figureCell("Per M tokens", tokens, usd), figureCell("kWh a step", energy, number), cell("Remarks", { class: "muted wide" }, remarkOf(row)));
  });
  const figures = ["Run time", "Run cost", "Per step", "Per M tokens", "kWh a step"].map((title) => ({ title, class: "num", sort: "ascending" }));
  const columns = [{ title: "Devices", sort: "ascending" }, { title: "Placement", sort: "ascending" }, ...figures, { title: "Remarks", class: "wide" }];
  return [known.length ? frontPlot(known) : null, table("Other devices", columns, body, { class: "cards" }),
    left ? h("p", { class: "muted hint" }, `${left} of the ${tried} choices that were tried are left out: the worst by the run's contract.`) : null, sensitivityOf(rows, sensitivity)];
}

function remarkOf({ quantization, speculation, share_prefixes: shared, on_front: best, shares, predicted, no_engine: planOnly, nearest_change: change, problems, reason }) {
  const [busiest, share] = Object.entries(shares).sort((a, b) => b[1] - a[1])[0] ?? [];
  const draws = [quantization !== "off" && quantization, speculation !== "off" && `drafts of ${speculation}`, !shared && "prompts not shared"];
  const found = predicted ? [best && "on the front", `${busiest} works ${percent(share)} of the time`] : [change ? `fits with ${change}` : problems[0] ?? reason];
  return [...draws, planOnly, ...found].filter(Boolean).join("; ");
}

/** Which rows are the fastest and the cheapest at other prices and lengths. */
function sensitivityOf(rows, changes) {
  const named = (row) => `${rows[row - 1].count} × ${rows[row - 1].kind}, ${rows[row - 1].placement}`;
  const items = changes.map(({ change, stays, fastest, cheapest, unknown }) => h("li", {},
    `${change}: ${stays ? "the same rows are" : `${named(fastest)} is`} the fastest${stays ? " and" : `, ${named(cheapest)}`} the cheapest${unknown.length ? `; not known for ${unknown.join(", ")}` : ""}`));
  return items.length ? h("ul", { class: "muted", "aria-label": "If prices or lengths are others" }, ...items) : null;
}

/** Time and cost of all that fit, on logarithmic axes; the front is a line. */
function frontPlot(rows) {
  const width = 640, height = 240, left = 64, bottom = 28;
  const times = rows.map((row) => row.predicted.wall_s), costs = rows.map((row) => row.predicted.cost_usd);
  const scale = (values, from, to) => {
    const [low, high] = [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
    return (value) => from + (high > low ? (Math.log(value) - low) / (high - low) : 0.5) * (to - from);
  };
  const x = scale(times, left, width - 12), y = scale(costs, height - bottom, 12);
  const at = ({ predicted }) => `${x(predicted.wall_s).toFixed(1)},${y(predicted.cost_usd).toFixed(1)}`;
  const best = rows.filter((row) => row.on_front).sort((a, b) => a.predicted.wall_s - b.predicted.wall_s);
  const label = (row) => `${row.count} × ${row.kind}, ${row.placement}: ${duration(row.predicted.wall_s)}, ${usd(row.predicted.cost_usd)}`;
  return s("svg", { viewBox: `0 0 ${width} ${height}`, class: "front", role: "img", "aria-label": `Run time and cost; on the front: ${best.map(label).join("; ")}` },
    s("polyline", { class: "line", points: best.map(at).join(" ") }),
    ...rows.map((row) => s("circle", { cx: x(row.predicted.wall_s), cy: y(row.predicted.cost_usd), r: row.on_front ? 5 : 3, class: row.on_front ? "best" : "other" }, s("title", {}, label(row)))),
    s("text", { x: left, y: height - 8 }, duration(Math.min(...times))), s("text", { x: width - 12, y: height - 8, "text-anchor": "end" }, duration(Math.max(...times))),
    s("text", { x: left - 8, y: height - bottom, "text-anchor": "end" }, usd(Math.min(...costs))), s("text", { x: left - 8, y: 18, "text-anchor": "end" }, usd(Math.max(...costs))));
}
