// A new run: a spec is pasted, planned, and started when its memory, time and cost are as they should be.

import { get, post } from "./api.js";
import { comparisonOf, othersPanel } from "./devices.js";
import { confirmed, onceKey, problemList } from "./dialogs.js";
import { cell, figureCell, fill, h, note, panel, table } from "./dom.js";
import { bytes, duration, number, percent, usd } from "./format.js";

const PLAN_MS = 130_000, COMPARE_MS = 250_000; // a comparison of all devices of the price book takes up to a minute

// As EXAMPLE of control/api/runs.py. Paths are absolute, on the service's machine; other names are the hub's.
const EXAMPLE = `name: math
model:
  path: Qwen/Qwen2.5-0.5B-Instruct
prompts:
  path: agentica-org/DeepScaleR-Preview-Dataset
  prompt_field: problem
  chat_template: true
  held_out:
    fraction: 0.01
rewards:
  - type: math
steps: 100
`;

export function newView(root) {
  document.title = "New run · rlhfless";
  const text = h("textarea", { id: "spec", rows: 18, spellcheck: "false", oninput: () => edited() });
  text.value = EXAMPLE;
  const earlier = h("select", { id: "earlier" }, h("option", { value: "" }, "none: lengths are assumed"));
  const plan = h("button", { class: "primary" }, "Plan");
  const start = h("button", { type: "button", disabled: true, onclick: () => begin().catch(refused) }, "Start the run");
  const problems = h("ul", { class: "problems" }), answer = h("div", { class: "content plan", role: "status", "aria-label": "Plan" });
  const form = h("form", { class: "panel", onsubmit: (event) => { event.preventDefault(); planRun(); } },
    h("label", { for: "spec" }, "Spec, as YAML or JSON"), text,
    h("div", { class: "tools" }, h("label", { for: "earlier", class: "check" }, "Response lengths of", earlier), h("span", { class: "buttons" }, plan, start)), h("div", { role: "alert" }, problems));
  root.append(h("div", { class: "head" }, h("h1", {}, "New run")), h("div", { class: "planner" }, form, answer));
  let planned = null; // the spec that was planned, and whether it fits
  const closed = new AbortController();

  function edited() {
    planned = null;
    start.disabled = true;
  }

  function refused(error) {
    if (error.name === "AbortError") return;
    fill(problems, problemList(error));
  }

  async function spec() {
    const { load } = await import("./js-yaml.esm.min.mjs");
    let found;
    try {
      found = load(text.value);
    } catch (error) {
      throw error.mark ? new Error(`line ${error.mark.line + 1}: ${error.reason}`) : error;
    }
    if (!found || typeof found !== "object" || Array.isArray(found)) throw new Error("a spec has keys: model, prompts, rewards, steps");
    return found;
  }

  /** On the run's own devices, which takes a moment; others are compared when they are asked for. */
  function planRun() {
    fill(answer);
    return computed("planning", async () => {
      const asked = await spec();
      const found = await ask("/v1/runs:plan", asked, PLAN_MS);
      planned = { spec: asked, fits: found.chosen.fits, key: onceKey() };
      start.disabled = false;
      const others = h("div");
      fill(answer, planOf(found), othersPanel(others, () => computed("comparing", async () => fill(others, comparisonOf(await ask("/v1/runs:compare", asked, COMPARE_MS))))));
    });
  }

  const ask = (path, asked, timeout) => post(path, { spec: asked, lengths_of: earlier.value || null }, { timeout, signal: closed.signal });

  async function computed(what, work) {
    plan.disabled = true;
    fill(problems);
    const began = Date.now(), waits = h("p", { class: "muted", "aria-live": "off" });
    const timer = setInterval(() => { waits.textContent = `${what} for ${duration((Date.now() - began) / 1000)}`; }, 200);
    answer.append(waits);
    try {
      await work();
    } catch (error) {
      refused(error);
    } finally {
      clearInterval(timer);
      plan.disabled = false;
      waits.remove();
    }
  }

  async function begin() {
    if (!planned.fits && !(await confirmed("Start it anyway?", "By the plan it does not fit on the devices.", "Start the run"))) return;
    start.disabled = true;
    try {
      const made = await post("/v1/runs", planned.spec, { "Idempotency-Key": planned.key });
      note(`${made.name} is queued`);
      location.hash = `#/runs/${encodeURIComponent(made.id)}`;
    } finally {
      start.disabled = false;
    }
  }

  async function refresh() {
    const { data } = await get("/v1/runs?limit=50", { signal: closed.signal });
    const known = new Set([...earlier.options].map((one) => one.value));
    earlier.append(...data.filter((run) => run.step && !known.has(run.id)).map((run) => h("option", { value: run.id }, run.id)));
  }

  return { refresh, close: () => closed.abort() };
}

const band = (text, low, high) => `${text(low)} to ${text(high)}`;

function planOf(found) {
  const { chosen } = found, cost = chosen.predicted;
  const tiles = [
    ["Devices", `${chosen.count} × ${chosen.kind}`, chosen.fits ? `fits, ${chosen.placement}` : "does not fit"],
    ["Run time", cost && duration(cost.wall_s), cost && band(duration, cost.wall_low_s, cost.wall_high_s)],
    ["Run cost", cost && usd(cost.cost_usd), cost && band(usd, cost.cost_low_usd, cost.cost_high_usd)],
    ["Step time", cost && duration(cost.step_s), `${found.steps} steps`],
    ["Model", `${number(found.parameters / 1e6)} M`, `parameters · ${number(found.sequence_tokens)} tokens at most`],
  ];
  const why = [...chosen.problems, chosen.nearest_change && `It fits with: ${chosen.nearest_change}`, chosen.reason && `No time and cost: ${chosen.reason}`].filter(Boolean);
  return [
    h("dl", { class: "tiles" }, tiles.map(([name, value, more]) => h("div", { class: value ? "" : "none" }, h("dt", {}, name), h("dd", {}, h("b", {}, value ?? "–"), h("span", {}, more ?? ""))))),
    why.length ? h("div", { class: "failure" }, h("h2", {}, chosen.fits ? "What is not known" : "Why it does not fit"), h("ul", {}, why.map((one) => h("li", {}, one)))) : null,
    memoryPanel(found.memory),
    panel("What this rests on", {}, h("ul", { class: "basis" }, h("li", {}, `Response lengths: ${found.lengths}`), found.missing.map((one) => h("li", {}, `Better with ${one}`)))),
  ];
}

function memoryPanel({ devices, host_bytes: host }) {
  const rows = devices.flatMap((device) => device.functions.flatMap((part) => part.phases.map((phase) => h("tr", { role: "row" },
    cell("Devices", {}, `${device.count} × ${device.kind}`), cell("Function", { class: "name" }, part.function), cell("Phase", {}, phase.name),
    figureCell("Memory", phase.size_bytes, bytes), figureCell("Of the device", phase.size_bytes / device.memory_bytes, percent),
    cell("Largest parts", { class: "muted wide" }, Object.entries(phase.parts).sort((a, b) => b[1] - a[1]).slice(0, 3).map(([name, size]) => `${name} ${bytes(size)}`).join(", "))))));
  const columns = [{ title: "Devices", sort: "ascending" }, { title: "Function", sort: "ascending" }, { title: "Phase", sort: "ascending" }, { title: "Memory", class: "num", sort: "descending" },
    { title: "Of the device", class: "num", sort: "descending" }, { title: "Largest parts", class: "wide" }];
  return panel("Memory per device and phase", { class: "flush", actions: h("span", { class: "muted small" }, `and ${bytes(host)} of the host`) }, table("Memory per device and phase", columns, rows, { class: "cards" }));
}
