// Several runs over each other: the settings that differ, and a chart for each metric with a line for each run.

import { get } from "./api.js";
import { figure } from "./charts.js";
import { NAMES, styled } from "./curves.js";
import { cell, figureCell, h, note, panel, pill, refill, table, throttled } from "./dom.js";
import { byName, DASH, duration, measured, number, usd } from "./format.js";
import { seriesOf } from "./series.js";
import { chartTools, span } from "./tools.js";

const FOLLOW_MS = 2000;
const FIRST = ["reward_mean", "reward/", "eval/", "loss", "gradient_norm", "value_loss", "explained_variance", "critic_gradient_norm", "entropy", "clipped_", "learning_rate", "reference_kl"];
const LAST = ["response_tokens_mean", "step_s", "generation_tokens_per_s", "cost_usd"];
/** Metrics that a chart of one run shows, but that have no curve here. */
const APART = /^(response_tokens\/|reward_std$|(critic_)?gradient_norm_max$|rollout_logprob_difference_max$|(sync|scoring|reference|columns|checkpoint|outside)_s$)/;
const WITHOUT_ZERO = /^(reward|eval|loss|policy_loss|value_loss|explained_variance|algorithm)/;

const MINUTE_S = 60, HOUR_S = 3600, DAY_S = 86400;
/** What the x axis shows: of a run's series, a place for each step that one has; a place in words; distances of ticks. */
const AXES = {
  Steps: null,
  Time: { incrs: [1, 2, 5, 10, 30, ...[1, 2, 5, 10, 30].map((n) => n * MINUTE_S), ...[1, 2, 4, 12].map((n) => n * HOUR_S), ...[1, 2, 5, 10, 30].map((n) => n * DAY_S)],
    place: ({ run }, { at }, began) => at.map((unix) => Math.max(unix - Math.min(began, run.started_at ?? began), 0)), format: (seconds) => (seconds ? duration(seconds) : "0") },
  Cost: { place: (one, { steps }) => steps.map(costs(one.series.all.cost_usd)), format: usd },
};
const NAMED_ALIKE = new Set(["name", "output"]);
const MOST_SETTINGS = 200, MOST_CHARACTERS = 400;

/** The cost after a step: that of the last one before it with a figure. */
function costs({ steps = [], values = [] } = {}) {
  let at = -1;
  return (step) => { while (at + 1 < steps.length && steps[at + 1] <= step) at++; return values[at] ?? 0; };
}

const cut = (text) => (text.length > MOST_CHARACTERS ? `${text.slice(0, MOST_CHARACTERS)}…` : text);

/** Every setting of a spec by its dotted key, such as `rewards.0.weight`; lists of plain values whole. */
function settings(values, prefix = "") {
  return Object.entries(values).flatMap(([key, value]) => {
    const plain = value === null || typeof value !== "object" || (Array.isArray(value) && !value.some((one) => typeof one === "object"));
    return plain ? [[prefix + key, cut(typeof value === "string" ? value : JSON.stringify(value))]] : settings(value, `${prefix}${key}.`);
  });
}

const place = (name) => {
  const at = FIRST.findIndex((one) => name.startsWith(one)), end = LAST.indexOf(name);
  return at >= 0 ? at : FIRST.length + 1 + end;
};

export function compareView(root, ids) {
  document.title = "Compare · rlhfless";
  const runs = new Map(); // id -> {run, series, tone, dash}
  const charts = new Map(); // metric -> figure
  const list = h("div"), grid = h("div", { class: "charts" });
  let axis = "Steps";
  const tools = chartTools({ draw: () => draw(), narrow: async (range) => { for (const one of runs.values()) one.series.narrow(range); await load(); } });
  const axes = Object.keys(AXES).map((name) => h("button", { type: "button", "aria-pressed": String(name === axis), onclick: () => turn(name) }, name));
  tools.element.append(h("div", { class: "segments", role: "group", "aria-label": "X axis" }, axes));
  root.append(h("div", { class: "head" }, h("h1", {}, "Compare")), h("div", { class: "content" }, list, tools.element, grid));

  function turn(name) {
    axis = name;
    for (const one of axes) one.setAttribute("aria-pressed", String(one.textContent === name));
    draw();
  }

  /** The places and values of a line; those that are not after the one before are left out. */
  function along(one, series, across) {
    if (!across) return { x: series.steps, y: series.values };
    const began = Math.min(...Object.values(one.series.all).map(({ at }) => at[0] ?? Infinity));
    const x = across.place(one, series, began), ahead = [];
    for (const [index, value] of x.entries()) if (!ahead.length || value > x[ahead.at(-1)]) ahead.push(index);
    return { x: ahead.map((index) => x[index]), y: ahead.map((index) => series.values[index]) };
  }

  const label = (one) => {
    const same = [...runs.values()].filter(({ run }) => run.name === one.run.name).length > 1;
    return same ? `${one.run.name} ${one.run.id.slice(-8)}` : one.run.name;
  };

  /** Of one metric: a line for each run that has it. */
  function make(name) {
    const there = [...runs.values()].filter(({ series }) => series.all[name]?.steps.length);
    if (!there.length) return null;
    const { unit } = there[0].series.all[name], text = (value) => measured(value, unit), across = AXES[axis];
    const lines = there.map((one) => ({ name: label(one), tone: one.tone, dash: one.dash, smooth: true, ...along(one, one.series.all[name], across) }));
    const rows = () => {
      const at = there.map((one) => one.series.all[name]).map(({ steps, values }) => new Map(steps.map((step, place_) => [step, values[place_]])));
      return [...new Set(at.flatMap((one) => [...one.keys()]))].sort((a, b) => b - a).slice(0, 100).map((step) => [step, ...at.map((one) => text(one.get(step) ?? NaN))]);
    };
    const legend = lines.map((one) => ({ name: one.name, tone: one.tone, line: one.dash, value: text(one.y.at(-1) ?? NaN) }));
    const ticks = unit === "usd" ? { prefix: "$" } : unit === "seconds" ? { suffix: " s" } : unit === "ratio" ? { factor: 100, suffix: " %" } : {};
    return { areas: [], lines, legend, format: text, zero: !WITHOUT_ZERO.test(name), columns: ["Step", ...lines.map((one) => one.name)], rows, across, ...ticks };
  }

  function shown(name) {
    const made = tools.shown(make(name));
    return made?.across ? { ...made, from: undefined, to: undefined } : made; // from and to are steps
  }

  const draw = throttled(0, () => {
    const names = [...new Set([...runs.values()].flatMap(({ series }) => Object.keys(series.all)))].filter((name) => !APART.test(name));
    for (const name of names.sort((a, b) => place(a) - place(b) || byName(a, b))) {
      if (charts.has(name)) continue;
      const help = [...runs.values()].map(({ series }) => series.all[name]?.help).find(Boolean);
      charts.set(name, figure({ title: name, help, make: () => shown(name), zoom: (steps) => { if (axis === "Steps" || steps === null) tools.zoom(steps); }, optional: true }));
      grid.append(charts.get(name).element);
    }
    const spans = [...runs.values()].map(({ series }) => span(series.all));
    tools.steps(Math.max(...[...runs.values()].map(({ run }) => run.step)), [Math.min(...spans.map(([first]) => first)), Math.max(...spans.map(([, last]) => last))]);
    for (const one of charts.values()) one.show();
    refill(list, () => [runsTable(), settingsTable()]);
  });

  function runsTable() {
    const rows = [...runs.values()].map((one) => {
      const { run } = one, others = [...runs.keys()].filter((id) => id !== run.id).map(encodeURIComponent).join(",");
      return h("tr", { role: "row" },
        cell("Run", { class: "name" }, h("span", { class: `key ${one.dash ?? ""} c-${one.tone}`, "aria-hidden": "true" }), h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, label(one))),
        cell("Status", {}, pill(run.status)), figureCell("Steps", run.step, String), figureCell("Reward", run.latest.reward_mean ?? null, number), figureCell("Held out", run.latest["eval/reward_mean"] ?? null, number),
        figureCell("Cost", run.cost_usd, (value) => (value ? usd(value) : DASH)),
        cell("", { class: "buttons" }, runs.size > 1 ? h("a", { href: `#/compare/${others}`, "aria-label": `Leave out ${label(one)}` }, "Leave out") : null));
    });
    const figures = ["Steps", "Reward", "Held out", "Cost"].map((title) => ({ title, class: "num", sort: "descending" }));
    const columns = [{ title: "Run", sort: "ascending" }, { title: "Status", sort: "ascending" }, ...figures, { title: "Actions", class: "buttons" }];
    return panel("Runs", { class: "flush" }, table("Runs compared", columns, rows, { class: "cards" }));
  }

  /** The settings of the runs that are not alike. */
  function settingsTable() {
    const there = [...runs.values()], each = there.map(({ run }) => new Map(settings(run.spec)));
    const names = [...new Set(each.flatMap((one) => [...one.keys()]))].filter((name) => !NAMED_ALIKE.has(name) && new Set(each.map((one) => one.get(name))).size > 1);
    if (there.length < 2) return null;
    if (!names.length) return panel("Settings that differ", {}, h("p", { class: "muted" }, "All settings are the same."));
    const rows = names.sort(byName).slice(0, MOST_SETTINGS).map((name) => h("tr", { role: "row" }, cell("Setting", { class: "name" }, name),
      each.map((one, at) => cell(label(there[at]), {}, one.get(name) ?? DASH))));
    const columns = ["Setting", ...there.map(label)].map((title) => ({ title, sort: title === "Setting" ? "ascending" : undefined }));
    return panel("Settings that differ", { class: "flush" }, table("Settings that differ", columns, rows, { class: "cards" }));
  }

  async function load() {
    await Promise.all([...runs.values()].map(({ run, series }) => series.load(run.step)));
    draw();
  }

  async function refresh() {
    const found = await Promise.all(ids.map((id) => get(`/v1/runs/${encodeURIComponent(id)}`)));
    for (const [at, run] of found.entries()) {
      const series = runs.get(run.id)?.series ?? seriesOf(`/v1/runs/${encodeURIComponent(run.id)}`, [...NAMES, "step_s"]);
      runs.set(run.id, { run, series, ...styled(at) });
    }
    await load();
  }

  const follow = throttled(FOLLOW_MS, () => load().catch((error) => note(error.message, "error")));
  return {
    refresh,
    changed(run) {
      if (!runs.has(run.id)) return;
      Object.assign(runs.get(run.id), { run });
      follow();
    },
    close() { follow.cancel(); draw.cancel(); for (const one of charts.values()) one.close(); },
  };
}
