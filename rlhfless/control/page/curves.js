// The charts of a run over its steps: which metrics, and how they are drawn. `s` has the series by name.

import { colour, newest } from "./charts.js";
import { duration, measured, number, percent, usd } from "./format.js";

/** Stages of a step, in their order, with their colours. */
const STAGES = [
  ["sync_s", "weights", "slate"], ["generation_s", "generation", "blue"], ["scoring_s", "scoring", "amber"],
  ["reference_s", "reference", "teal"], ["learn_s", "learning", "violet"], ["checkpoint_s", "checkpoint", "rose"], ["outside_s", "between", "grey"],
];

const STEP = { hoverformat: ",d", unifiedhovertitle: { text: "step %{x}" } };

function line(series, name, tone, more = {}) {
  return { type: "scatter", mode: "lines", name, x: series.steps, y: series.values, line: { color: colour(tone), width: 1.6, shape: "linear", ...more.line }, hovertemplate: "%{y:.4~g}", ...more, ...(more.line ? { line: { color: colour(tone), width: 1.6, ...more.line } } : {}) };
}

/** The area between two curves. */
function band(steps, low, high, tone) {
  const edge = { type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip", x: steps };
  return [{ ...edge, y: low }, { ...edge, y: high, fill: "tonexty", fillcolor: colour(tone, 0.16) }];
}

/** Newest first, for the table under a chart. */
function rows(s, names) {
  const first = s[names[0]];
  const at = names.map((name) => new Map(s[name].steps.map((step, place) => [step, s[name].values[place]])));
  return first.steps.slice(-100).reverse().map((step) => [step, ...names.map((name, place) => measured(at[place].get(step) ?? NaN, s[name].unit))]);
}

function chartOf(s, names, traces, legend, layout = {}) {
  const there = names.filter((name) => s[name]);
  if (!there.length) return null;
  return { traces, legend, layout: { ...layout, xaxis: { ...STEP, ...layout.xaxis } }, columns: ["Step", ...there], rows: rows(s, there) };
}

function reward(s) {
  const mean = s.reward_mean;
  if (!mean) return null;
  const traces = [], legend = [];
  if (s.reward_std) {
    const spread = new Map(s.reward_std.steps.map((step, at) => [step, s.reward_std.values[at]]));
    const at = mean.steps.map((step, place) => [step, mean.values[place], spread.get(step)]).filter((one) => one[1] !== null && Number.isFinite(one[2]));
    traces.push(...band(at.map((one) => one[0]), at.map((one) => one[1] - one[2]), at.map((one) => one[1] + one[2]), "blue"));
  }
  traces.push(line(mean, "mean", "blue"));
  legend.push({ name: "mean ± std", colour: "blue", value: newest(mean) });
  for (const [place, name] of Object.keys(s).filter((one) => one.startsWith("eval/")).slice(0, 2).entries()) {
    const tone = ["teal", "amber"][place];
    traces.push({ ...line(s[name], name.slice(5), tone), mode: "lines+markers", marker: { size: 4, color: colour(tone) } });
    legend.push({ name: `held out: ${name.slice(5)}`, colour: tone, value: newest(s[name]) });
  }
  return chartOf(s, ["reward_mean", "reward_std"], traces, legend);
}

function lengths(s) {
  const [low, middle, high, top] = ["p10", "p50", "p90", "p99"].map((name) => s[`response_tokens/${name}`]);
  if (!middle) {
    const mean = s.response_tokens_mean;
    return mean ? chartOf(s, ["response_tokens_mean"], [line(mean, "mean", "violet")], [{ name: "mean", colour: "violet", value: newest(mean) }]) : null;
  }
  const traces = [], legend = [{ name: "median", colour: "violet", value: newest(middle) }];
  if (low && high) {
    // Each curve keeps other steps of a long run: the area has two edges of its own.
    traces.push({ type: "scatter", mode: "lines", line: { width: 0 }, fill: "toself", fillcolor: colour("violet", 0.16), hoverinfo: "skip", x: [...low.steps, ...high.steps.toReversed()], y: [...low.values, ...high.values.toReversed()] });
    legend.push({ name: "10–90 %", colour: "violet", line: "band", value: `${newest(low)}–${newest(high)}` });
  }
  traces.push(line(middle, "median", "violet"));
  if (top) {
    traces.push(line(top, "99 %", "rose", { line: { width: 1.2, dash: "dot" } }));
    legend.push({ name: "99 %", colour: "rose", line: "dot", value: newest(top) });
  }
  return chartOf(s, ["response_tokens/p10", "response_tokens/p50", "response_tokens/p90", "response_tokens/p99"], traces, legend, { yaxis: { rangemode: "tozero" } });
}

function several(names) {
  return (s) => {
    const there = names.filter(([name]) => s[name]);
    return chartOf(s, names.map(([name]) => name), there.map(([name, label, tone]) => line(s[name], label, tone)),
      there.map(([name, label, tone]) => ({ name: label, colour: tone, value: newest(s[name]) })));
  };
}

/** Differences of logprobs span powers of ten: their axis is logarithmic. Its ticks are 1e-3, because plotly writes
 *  superscripts with inline styles, which the policy of the page forbids. */
function gap(s) {
  const made = several([["rollout_logprob_difference", "mean", "blue"], ["rollout_logprob_difference_max", "largest", "rose"]])(s);
  return made && { ...made, layout: { ...made.layout, yaxis: { type: "log", dtick: 1, tickformat: ".0e" } } };
}

function stages(s) {
  const there = STAGES.filter(([name]) => s[name]?.values.some((value) => value > 0));
  const traces = there.map(([name, label, tone]) => ({
    type: "scatter", mode: "lines", name: label, x: s[name].steps, y: s[name].values, stackgroup: "stages", stackgaps: "interpolate",
    line: { width: 0.6, color: colour(tone) }, fillcolor: colour(tone, 0.55), hovertemplate: "%{y:.1f} s",
  }));
  const made = chartOf(s, there.map(([name]) => name), traces, there.map(([name, label, tone]) => ({ name: label, colour: tone, line: "area", value: newest(s[name]) })), { yaxis: { ticksuffix: " s", rangemode: "tozero" } });
  return made && { ...made, rows: rows(s, there.map(([name]) => name)) };
}

/** Cost so far, beside the plan and the best static fleet (its price for the same steps, by the simulator). */
function cost(s) {
  const own = s.cost_usd;
  if (!own) return null;
  const { best_static: fixed, planned } = s.usage ?? {};
  const traces = [line(own, "this run", "blue", { hovertemplate: "$%{y:.2f}" })];
  const legend = [{ name: "this run", colour: "blue", value: newest(own) }];
  if (fixed && fixed.same_cost_usd > 0) {
    const ratio = fixed.cost_usd / fixed.same_cost_usd;
    traces.push({ ...line({ ...own, values: own.values.map((value) => value * ratio) }, "best static fleet", "amber", { line: { width: 1.4, dash: "dash" }, hovertemplate: "$%{y:.2f}" }) });
    legend.push({ name: `best static (${fixed.actors} actors)`, colour: "amber", line: "dash", value: usd(own.values.at(-1) * ratio) });
  }
  if (planned) {
    const last = own.steps.at(-1), part = Math.min(last / planned.steps, 1), until = [0, part * planned.steps];
    traces.unshift(...band(until, [0, part * planned.cost_low_usd], [0, part * planned.cost_high_usd], "teal"),
      { type: "scatter", mode: "lines", name: "planned", x: until, y: [0, part * planned.cost_usd], line: { color: colour("teal"), width: 1.4, dash: "dot" }, hovertemplate: "$%{y:.2f}" });
    legend.push({ name: "planned", colour: "teal", line: "dot", value: usd(part * planned.cost_usd) });
  }
  return chartOf(s, ["cost_usd"], traces, legend, { yaxis: { tickprefix: "$", rangemode: "tozero" } });
}

export const CHARTS = [
  { title: "Reward", help: "Mean reward of each step's samples, with one standard deviation", make: reward },
  { title: "Response length", help: "Tokens per response: quantiles of each step", make: lengths },
  { title: "Time by stage", help: "Wall time in which each stage worked. Stages overlap: their sum may exceed the step's time", make: stages },
  { title: "Cost", help: "Dollars so far by the price book", make: cost },
  { title: "KL divergence", help: "Nats per token: from the reference, and of one step's updates", make: several([["reference_kl", "from the reference", "teal"], ["old_kl", "within the step", "slate"]]) },
  { title: "Engine–learner logprob gap", help: "|learner − engine| logprob of the sampled tokens, in nats", make: gap },
];

/** Metrics that the charts and the tiles need. */
export const NAMES = [
  "reward_mean", "reward_std", "eval", "response_tokens", "response_tokens_mean", "reference_kl", "old_kl", "rollout_logprob_difference",
  "rollout_logprob_difference_max", ...STAGES.map(([name]) => name), "cost_usd",
];

/** Figures at the top of a run, from its newest metrics. */
export function tiles(run, usage) {
  const last = run.latest;
  const has = (name) => Number.isFinite(last[name]);
  const fixed = usage?.best_static;
  const saved = fixed ? 1 - fixed.same_cost_usd / fixed.cost_usd : NaN;
  return [
    ["Reward", has("reward_mean") ? number(last.reward_mean) : null, has("reward_std") ? `± ${number(last.reward_std)}` : ""],
    ["Step time", has("step_s") ? duration(last.step_s) : null, has("generation_s") ? `${percent(last.generation_s / last.step_s)} generation` : ""],
    ["Throughput", has("generation_tokens_per_s") ? number(last.generation_tokens_per_s) : null, "tokens/s generated"],
    ["Response", has("response_tokens_mean") ? number(last.response_tokens_mean) : null, has("truncated") ? `tokens · ${percent(last.truncated)} cut off` : "tokens"],
    ["Cost", run.cost_usd ? usd(run.cost_usd) : null, Number.isFinite(saved) ? `${percent(Math.abs(saved))} ${saved >= 0 ? "below" : "above"} best static` : ""],
    ["Device time", run.device_hours ? `${number(run.device_hours)} h` : null, has("actors") ? `${number(last.actors).replace(/\.0+$/, "")} actors` : ""],
    ["Time left", run.left_s === null ? null : duration(run.left_s), run.left_s === null ? "" : `ends ${new Date(Date.now() + 1000 * run.left_s).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" })}`],
  ];
}
