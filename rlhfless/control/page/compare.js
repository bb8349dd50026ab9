// Several runs over each other: a chart for each metric, a line for each run.

import { get } from "./api.js";
import { figure } from "./charts.js";
import { NAMES, styled } from "./curves.js";
import { cell, figureCell, h, note, panel, pill, refill, table, throttled } from "./dom.js";
import { byName, DASH, measured, number, usd } from "./format.js";
import { seriesOf } from "./series.js";
import { chartTools, span } from "./tools.js";

const FOLLOW_MS = 2000;
const FIRST = ["reward_mean", "reward/", "eval/", "loss", "gradient_norm", "value_loss", "explained_variance", "critic_gradient_norm", "entropy", "clipped_", "learning_rate", "reference_kl"];
const LAST = ["response_tokens_mean", "step_s", "generation_tokens_per_s", "cost_usd"];
/** What a chart of one run shows, but is no curve of its own here. */
const APART = /^(response_tokens\/|reward_std$|(critic_)?gradient_norm_max$|rollout_logprob_difference_max$|(sync|scoring|reference|columns|checkpoint|outside)_s$)/;
const WITHOUT_ZERO = /^(reward|eval|loss|policy_loss|value_loss|explained_variance|algorithm)/;

const place = (name) => {
  const at = FIRST.findIndex((one) => name.startsWith(one)), end = LAST.indexOf(name);
  return at >= 0 ? at : FIRST.length + 1 + end;
};

export function compareView(root, ids) {
  document.title = "Compare · rlhfless";
  const runs = new Map(); // id -> {run, series, tone, dash}
  const charts = new Map(); // metric -> figure
  const list = h("div"), grid = h("div", { class: "charts" });
  const tools = chartTools({ draw: () => draw(), narrow: async (range) => { for (const one of runs.values()) one.series.narrow(range); await load(); } });
  root.append(h("div", { class: "head" }, h("h1", {}, "Compare")), h("div", { class: "content" }, list, tools.element, grid));

  const label = (one) => {
    const same = [...runs.values()].filter(({ run }) => run.name === one.run.name).length > 1;
    return same ? `${one.run.name} ${one.run.id.slice(-8)}` : one.run.name;
  };

  /** Of one metric: a line for each run that has it. */
  function make(name) {
    const there = [...runs.values()].filter(({ series }) => series.all[name]?.steps.length);
    if (!there.length) return null;
    const { unit } = there[0].series.all[name], text = (value) => measured(value, unit);
    const lines = there.map((one) => ({ name: label(one), tone: one.tone, dash: one.dash, smooth: true, x: one.series.all[name].steps, y: one.series.all[name].values }));
    const rows = () => {
      const at = lines.map(({ x, y }) => new Map(x.map((step, place_) => [step, y[place_]])));
      return [...new Set(lines.flatMap(({ x }) => x))].sort((a, b) => b - a).slice(0, 100).map((step) => [step, ...at.map((one) => text(one.get(step) ?? NaN))]);
    };
    const legend = lines.map((one) => ({ name: one.name, tone: one.tone, line: one.dash, value: text(one.y.at(-1) ?? NaN) }));
    const ticks = unit === "usd" ? { prefix: "$" } : unit === "seconds" ? { suffix: " s" } : unit === "ratio" ? { factor: 100, suffix: " %" } : {};
    return { areas: [], lines, legend, format: text, zero: !WITHOUT_ZERO.test(name), columns: ["Step", ...lines.map((one) => one.name)], rows, ...ticks };
  }

  const draw = throttled(0, () => {
    const names = [...new Set([...runs.values()].flatMap(({ series }) => Object.keys(series.all)))].filter((name) => !APART.test(name));
    for (const name of names.sort((a, b) => place(a) - place(b) || byName(a, b))) {
      if (charts.has(name)) continue;
      const help = [...runs.values()].map(({ series }) => series.all[name]?.help).find(Boolean);
      charts.set(name, figure({ title: name, help, make: () => tools.shown(make(name)), zoom: tools.zoom, optional: true }));
      grid.append(charts.get(name).element);
    }
    const spans = [...runs.values()].map(({ series }) => span(series.all));
    tools.steps(Math.max(...[...runs.values()].map(({ run }) => run.step)), [Math.min(...spans.map(([first]) => first)), Math.max(...spans.map(([, last]) => last))]);
    for (const one of charts.values()) one.show();
    refill(list, runsTable);
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
