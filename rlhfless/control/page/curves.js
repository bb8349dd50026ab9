// The charts of a run over its steps: which metrics, and how they are drawn. `s` has the series by name.

import { newest } from "./charts.js";
import { duration, measured, number, percent, usd } from "./format.js";

/** Stages of a step, in their order, with their colours. */
const STAGES = [
  ["sync_s", "weights", "slate"], ["generation_s", "generation", "blue"], ["scoring_s", "scoring", "amber"],
  ["reference_s", "reference", "teal"], ["learn_s", "learning", "violet"], ["checkpoint_s", "checkpoint", "rose"], ["outside_s", "between", "grey"],
];

const TABLE_ROWS = 100;

const line = (series, name, tone, more = {}) => ({ name, tone, x: series.steps, y: series.values, ...more });

/** Newest first, for the table under a chart. */
function rows(s, names) {
  const at = names.map((name) => new Map(s[name].steps.map((step, place) => [step, s[name].values[place]])));
  const steps = s[names[0]].steps.slice(-TABLE_ROWS).reverse();
  return steps.map((step) => [step, ...names.map((name, place) => measured(at[place].get(step) ?? NaN, s[name].unit))]);
}

function chartOf(s, names, lines, legend, more = {}) {
  const there = names.filter((name) => s[name]);
  if (!there.length) return null;
  return { areas: [], lines, legend, format: number, columns: ["Step", ...there], rows: () => rows(s, there), ...more };
}

function reward(s) {
  const mean = s.reward_mean;
  if (!mean) return null;
  const areas = [], lines = [line(mean, "mean", "blue")];
  const legend = [{ name: s.reward_std ? "mean ± std" : "mean", tone: "blue", value: newest(mean) }];
  if (s.reward_std) {
    const spread = new Map(s.reward_std.steps.map((step, at) => [step, s.reward_std.values[at]]));
    const both = mean.steps.map((step, at) => [step, mean.values[at], spread.get(step)]).filter((one) => one[1] !== null && Number.isFinite(one[2]));
    const x = both.map((one) => one[0]);
    areas.push({ upper: { x, y: both.map((one) => one[1] + one[2]) }, lower: { x, y: both.map((one) => one[1] - one[2]) }, tone: "blue" });
  }
  for (const [place, name] of Object.keys(s).filter((one) => one.startsWith("eval/")).slice(0, 2).entries()) {
    const tone = ["teal", "amber"][place], label = name.slice("eval/".length);
    lines.push(line(s[name], `held out: ${label}`, tone, { dots: s[name].steps.length < 40 }));
    legend.push({ name: `held out: ${label}`, tone, value: newest(s[name]) });
  }
  return chartOf(s, ["reward_mean", "reward_std"], lines, legend, { areas });
}

function lengths(s) {
  const [low, middle, high, top] = ["p10", "p50", "p90", "p99"].map((name) => s[`response_tokens/${name}`]);
  if (!middle) return several([["response_tokens_mean", "mean", "violet"]], { zero: true })(s);
  const lines = [line(middle, "median", "violet")], areas = [], legend = [{ name: "median", tone: "violet", value: newest(middle) }];
  const read = [...lines];
  if (low && high) {
    const [upper, lower] = [high, low].map((edge) => ({ x: edge.steps, y: edge.values }));
    areas.push({ upper, lower, tone: "violet" });
    read.push(line(high, "90 %", "lilac"), line(low, "10 %", "lilac"));
    legend.push({ name: "10–90 %", tone: "violet", line: "band", value: `${newest(low)}–${newest(high)}` });
  }
  if (top) {
    lines.push(line(top, "99 %", "rose", { dash: "dot" }));
    read.push(lines.at(-1));
    legend.push({ name: "99 %", tone: "rose", line: "dot", value: newest(top) });
  }
  return chartOf(s, ["response_tokens/p10", "response_tokens/p50", "response_tokens/p90", "response_tokens/p99"], lines, legend, { areas, read, zero: true });
}

function several(names, more = {}) {
  return (s) => {
    const there = names.filter(([name]) => s[name]);
    return chartOf(s, names.map(([name]) => name), there.map(([name, label, tone]) => line(s[name], label, tone)),
      there.map(([name, label, tone]) => ({ name: label, tone, value: newest(s[name]) })), more);
  };
}

/** The values of a series at other steps, in between where it has none. */
function at(series, steps) {
  let place = 0;
  return steps.map((step) => {
    while (place < series.steps.length - 2 && series.steps[place + 1] < step) place++;
    const [a, b] = [series.steps[place], series.steps[place + 1] ?? series.steps[place]], [low, high] = [series.values[place] ?? 0, series.values[place + 1] ?? series.values[place] ?? 0];
    return b > a ? low + ((high - low) * Math.min(Math.max(step - a, 0), b - a)) / (b - a) : low;
  });
}

function stages(s) {
  const there = STAGES.filter(([name]) => s[name]?.values.some((value) => value > 0));
  if (!there.length) return null;
  // Of a long run each series keeps other steps: they are added up at all of them.
  const x = [...new Set(there.flatMap(([name]) => s[name].steps))].sort((a, b) => a - b);
  let lower = x.map(() => 0);
  const areas = there.map(([name, , tone]) => {
    const upper = at(s[name], x).map((value, place) => value + lower[place]);
    const area = { upper: { x, y: upper }, lower: { x, y: lower }, tone, opacity: 0.62 };
    lower = upper;
    return area;
  });
  const read = there.map(([name, label, tone]) => line(s[name], label, tone, { dash: "area" })).reverse();
  const legend = there.map(([name, label, tone]) => ({ name: label, tone, line: "area", value: newest(s[name]) }));
  return chartOf(s, there.map(([name]) => name), [], legend, { areas, read, zero: true, format: duration, suffix: " s" });
}

/** Cost so far, beside the plan and the best static fleet (its price for the same steps, by the simulator). */
function cost(s) {
  const own = s.cost_usd;
  if (!own) return null;
  const { best_static: fixed, planned } = s.usage ?? {};
  const areas = [], lines = [line(own, "this run", "blue")], legend = [{ name: "this run", tone: "blue", value: newest(own) }];
  if (fixed && fixed.same_cost_usd > 0) {
    const ratio = fixed.cost_usd / fixed.same_cost_usd;
    lines.push({ ...line(own, "best static fleet", "amber", { dash: "dash" }), y: own.values.map((value) => value * ratio) });
    legend.push({ name: `best static (${fixed.actors} actors)`, tone: "amber", line: "dash", value: usd(own.values.at(-1) * ratio) });
  }
  if (planned) {
    const x = [own.steps[0], own.steps.at(-1)], part = (value) => x.map((step) => (value * Math.min(step, planned.steps)) / planned.steps);
    areas.push({ upper: { x, y: part(planned.cost_high_usd) }, lower: { x, y: part(planned.cost_low_usd) }, tone: "teal" });
    lines.push({ name: "planned", tone: "teal", dash: "dot", x: own.steps, y: own.steps.map((step) => (planned.cost_usd * Math.min(step, planned.steps)) / planned.steps) });
    legend.push({ name: "planned", tone: "teal", line: "dot", value: usd(part(planned.cost_usd)[1]) });
  }
  return chartOf(s, ["cost_usd"], lines, legend, { areas, zero: true, format: usd, prefix: "$" });
}

export const CHARTS = [
  { title: "Reward", help: "Mean reward of each step's samples, with one standard deviation", make: reward },
  { title: "Response length", help: "Tokens per response: quantiles of each step", make: lengths },
  { title: "Time by stage", help: "Wall time in which each stage worked. Stages overlap: their sum may exceed the step's time", make: stages },
  { title: "Cost", help: "Dollars so far by the price book", make: cost },
  { title: "KL divergence", help: "Nats per token: from the reference, and of one step's updates", make: several([["reference_kl", "from the reference", "teal"], ["old_kl", "within the step", "slate"]], { zero: true }) },
  { title: "Engine–learner logprob gap", help: "|learner − engine| logprob of the sampled tokens, in nats, on a logarithmic axis",
    make: several([["rollout_logprob_difference", "mean", "blue"], ["rollout_logprob_difference_max", "largest", "rose"]], { log: true }) },
];

/** Metrics that the charts need. */
export const NAMES = [
  "reward_mean", "reward_std", "eval", "response_tokens", "response_tokens_mean", "reference_kl", "old_kl", "rollout_logprob_difference",
  "rollout_logprob_difference_max", ...STAGES.map(([name]) => name), "cost_usd",
];

/** Figures at the top of a run, from its newest metrics: [name, value, more]. */
export function tiles(run, usage) {
  const last = run.latest;
  const has = (name) => Number.isFinite(last[name]);
  const fixed = usage?.best_static;
  const saved = fixed ? 1 - fixed.same_cost_usd / fixed.cost_usd : NaN;
  const ends = (s) => `ends ${new Date(Date.now() + 1000 * s).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" })}`;
  return [
    ["Reward", has("reward_mean") ? number(last.reward_mean) : null, has("reward_std") ? `± ${number(last.reward_std)}` : ""],
    ["Step time", has("step_s") ? duration(last.step_s) : null, has("generation_s") ? `${percent(last.generation_s / last.step_s)} generation` : ""],
    ["Throughput", has("generation_tokens_per_s") ? number(last.generation_tokens_per_s) : null, "tokens/s generated"],
    ["Response", has("response_tokens_mean") ? number(last.response_tokens_mean) : null, has("truncated") ? `tokens · ${percent(last.truncated)} cut off` : "tokens"],
    ["Cost", run.cost_usd ? usd(run.cost_usd) : null, Number.isFinite(saved) ? `${percent(Math.abs(saved))} ${saved >= 0 ? "below" : "above"} best static` : ""],
    ["Device time", run.device_hours ? `${number(run.device_hours)} h` : null, has("actors") ? `${Math.round(last.actors)} actors` : ""],
    ["Time left", run.left_s === null ? null : duration(run.left_s), run.left_s === null ? "" : ends(run.left_s)],
  ];
}
