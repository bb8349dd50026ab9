// Devices and replicas, now.

import { get } from "./api.js";
import { cell, figureCell, fill, h, panel, pill, refill, table, throttled } from "./dom.js";
import { ago, byName, duration, usd, version } from "./format.js";
import { clusterFigure } from "./timeline.js";

const LOOK_MS = 3000;

export function fleetView(root) {
  document.title = "Fleet · rlhfless";
  const devices = h("div", { class: "kinds" }), functions = h("div"), rate = h("p", { class: "muted devices" });
  const waits = h("p", { class: "reason", hidden: true }), time = clusterFigure();
  root.append(h("div", { class: "head" }, h("h1", {}, "Fleet"), rate), waits, devices, time.element, functions);

  async function refresh() {
    const [kinds, replicas, work, ready] = await Promise.all([get("/v1/devices"), get("/v1/functions"), get("/v1/devices/timeline?minutes=5"), fetch("/readyz").then((answer) => answer.json())]);
    waits.hidden = ready.waiting_for.length === 0;
    waits.textContent = ready.waiting_for.join("; ");
    fill(devices, kinds.data.length ? kinds.data.map(kindPanel) : h("p", { class: "empty panel" }, "No devices yet."));
    const cost = replicas.data.reduce((sum, one) => sum + one.usd_per_hour, 0);
    fill(rate, replicas.data.length ? `${replicas.data.length} replicas · ${usd(cost)} per hour` : "no replicas");
    time.show(work);
    refill(functions, () => functionsPanel(replicas.data));
  }

  const look = throttled(LOOK_MS, () => refresh().catch(() => {}));
  const timer = setInterval(() => { if (!document.hidden) look(); }, LOOK_MS);
  return { refresh, changed: look, deleted: look, close: () => { clearInterval(timer); look.cancel(); } };
}

/** One kind of device: a square for each, up to a number that can be looked over. */
function kindPanel(kind) {
  const holders = kind.runs.filter((run) => Math.max(run.granted, run.held) > 0), waiting = kind.runs.filter((run) => !run.granted && !run.held);
  const tones = ["blue", "violet", "teal", "amber", "rose"];
  const alone = holders.filter((run) => run.tenants < 2), shared = kind.total - kind.free - alone.reduce((sum, run) => sum + Math.max(run.granted, run.held), 0);
  const squares = kind.total <= 256 ? [
    ...Array.from({ length: alone.length < holders.length ? Math.max(shared, 0) : 0 }, () => h("i", { class: "f-teal" })),
    ...holders.flatMap((run, at) => run.tenants > 1 ? [] : Array.from({ length: Math.max(run.granted, run.held) }, (_, number) => h("i", { class: number < run.held ? `f-${tones[at % tones.length]}` : `o-${tones[at % tones.length]}` }))),
    ...Array.from({ length: kind.free }, () => h("i", {})),
  ] : [];
  const row = (run, tone) => h("li", {}, h("span", { class: `key area ${tone ? `c-${tone}` : ""}`, "aria-hidden": "true" }), h("a", { href: `#/runs/${encodeURIComponent(run.run_id)}` }, run.name),
    h("span", { class: "muted" }, tone ? holding(run) : ` waits for ${run.minimum} since ${duration(Date.now() / 1000 - run.asked_at)}`));
  return panel(kind.kind, {}, h("p", { class: "figure" }, h("b", {}, String(kind.free)), ` of ${kind.total} free`),
    h("div", { class: "squares", "aria-hidden": "true" }, squares),
    h("ul", { class: "holders" }, holders.map((run, at) => row(run, tones[at % tones.length])), waiting.map((run) => row(run, null))));
}

/** A run that has been asked to give devices back holds more than it is granted until its step ends. */
function holding(run) {
  const range = run.maximum > run.minimum ? ` (${run.minimum} to ${run.maximum})` : "";
  if (run.held > run.granted) return ` holds ${run.held}${range}, gives back ${run.held - run.granted} after its step`;
  if (run.tenants > 1) return ` shares ${run.held} by time-slicing with at most ${run.tenants - 1} other${run.tenants > 2 ? "s" : ""}`;
  const why = run.sizes.length && run.size_reason ? `: ${run.size_reason}` : "";
  return ` holds ${run.held}${run.held < run.granted ? ` of ${run.granted}` : ""}${range}${why}`;
}

function functionsPanel(replicas) {
  if (!replicas.length) return h("p", { class: "empty panel" }, "No function has a replica now.");
  const order = [...replicas].sort((a, b) => byName(a.run_id, b.run_id) || byName(a.replica, b.replica));
  const rows = order.map((one) => h("tr", { role: "row" },
    cell("Function", { class: "name" }, one.function), cell("Replica", {}, h("code", {}, one.replica.slice(one.run_id.length + 1) || one.replica)),
    cell("State", { "data-value": one.state }, pill(one.state), h("span", { class: "muted" }, ` ${ago(one.since)}`)), cell("Weights", { title: one.weights }, version(one.weights)),
    cell("Devices", {}, `${one.devices.join(", ")} on ${one.node}`), cell("Run", {}, h("a", { href: `#/runs/${encodeURIComponent(one.run_id)}` }, one.run_id)),
    figureCell("$ per hour", one.usd_per_hour, usd)));
  const columns = ["Function", "Replica", "State", "Weights", "Devices", "Run"].map((title) => ({ title, sort: "ascending" }));
  return panel("Functions", { class: "flush" }, table("Replicas of functions", [...columns, { title: "$ per hour", class: "num", sort: "descending" }], rows, { class: "cards" }));
}
