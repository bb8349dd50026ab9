// The charts of a run over its steps: their metrics and their style. `s` has the series by name.

import { newest } from "./charts.js";
import { byName, duration, measured, number, usd } from "./format.js";

/** Stages of a step, in their order, with their colours. */
const STAGES = [
  ["sync_s", "weights", "slate"], ["generation_s", "generation", "blue"], ["scoring_s", "scoring", "amber"],
  ["reference_s", "reference", "teal"], ["teacher_s", "teachers", "lilac"], ["critic_s", "critic", "olive"], ["columns_s", "own columns", "sky"], ["learn_s", "learning", "violet"], ["checkpoint_s", "checkpoint", "rose"], ["overhead_s", "overhead", "grey"],
];

/** Colours of lines without a fixed colour; after the last colour, lines are dashed. */
const TONES = ["blue", "amber", "teal", "violet", "rose", "sky", "slate"];
export const styled = (place) => ({ tone: TONES[place % TONES.length], dash: [undefined, "dash", "dot"][Math.floor(place / TONES.length) % 3] });

const TABLE_ROWS = 100;

const line = (series, name, tone, more = {}) => ({ name, tone, x: series.steps, y: series.values, ...more });

/** Newest first, for the table under a chart. */
function rows(s, names) {
  const at = names.map((name) => new Map(s[name].steps.map((step, place) => [step, s[name].values[place]])));
  const steps = [...new Set(names.flatMap((name) => s[name].steps))].sort((a, b) => b - a).slice(0, TABLE_ROWS);
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
  const areas = [], lines = [line(mean, "mean", "blue", { smooth: true })];
  const legend = [{ name: s.reward_std ? "mean ± std" : "mean", of: "mean", tone: "blue", value: newest(mean) }];
  if (s.reward_std) {
    const spread = new Map(s.reward_std.steps.map((step, at) => [step, s.reward_std.values[at]]));
    const both = mean.steps.map((step, at) => [step, mean.values[at], spread.get(step)]).filter((one) => one[1] !== null && Number.isFinite(one[2]));
    const x = both.map((one) => one[0]);
    areas.push({ of: "mean", upper: { x, y: both.map((one) => one[1] + one[2]) }, lower: { x, y: both.map((one) => one[1] - one[2]) }, tone: "blue" });
  }
  return chartOf(s, ["reward_mean", "reward_std"], lines, legend, { areas });
}

/** Every member of a family: `reward/<part>`. */
function members(family, more = {}) {
  return (s) => {
    const names = Object.keys(s).filter((name) => name.startsWith(`${family}/`)).sort(byName);
    return several(names.map((name, place) => [name, name.slice(family.length + 1), styled(place)]), more)(s);
  };
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

/** A line for each of the metrics that were measured: [name, label, tone or {tone, dash}]. */
function several(names, more = {}) {
  return (s) => {
    const there = names.filter(([name]) => s[name]).map(([name, label, style]) => [name, label, typeof style === "string" ? { tone: style } : style]);
    const few = ([name]) => s[name].steps.length < 40; // evaluations: seen between many steps
    return chartOf(s, names.map(([name]) => name), there.map(([name, label, style]) => line(s[name], label, style.tone, { dash: style.dash, dots: few([name]), smooth: true, format: (value) => measured(value, s[name].unit) })),
      there.map(([name, label, style]) => ({ name: label, tone: style.tone, line: style.dash, value: newest(s[name]) })), more);
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

/** Cost so far, compared with the plan and the best static fleet (its price for the same steps, by the simulator). */
function cost(s) {
  const own = s.cost_usd;
  if (!own) return null;
  const { best_static: fixed, planned } = s.usage ?? {};
  const areas = [], lines = [line(own, "this run", "blue")], legend = [{ name: "this run", tone: "blue", value: newest(own) }];
  if (fixed && fixed.same_cost_usd > 0) {
    const ratio = fixed.cost_usd / fixed.same_cost_usd;
    lines.push({ ...line(own, "best static fleet", "amber", { dash: "dash" }), y: own.values.map((value) => value * ratio) });
    legend.push({ name: `best static (${fixed.actors} actors)`, of: "best static fleet", tone: "amber", line: "dash", value: usd(own.values.at(-1) * ratio) });
  }
  if (planned) {
    const x = [own.steps[0], own.steps.at(-1)], part = (value) => x.map((step) => (value * Math.min(step, planned.steps)) / planned.steps);
    areas.push({ of: "planned", upper: { x, y: part(planned.cost_high_usd) }, lower: { x, y: part(planned.cost_low_usd) }, tone: "teal" });
    lines.push({ name: "planned", tone: "teal", dash: "dot", x: own.steps, y: own.steps.map((step) => (planned.cost_usd * Math.min(step, planned.steps)) / planned.steps) });
    legend.push({ name: "planned", tone: "teal", line: "dot", value: usd(part(planned.cost_usd)[1]) });
  }
  return chartOf(s, ["cost_usd"], lines, legend, { areas, zero: true, format: usd, prefix: "$" });
}

const SHARES = { zero: true, factor: 100, suffix: " %" };

export const CHARTS = [
  { title: "Reward", help: "Mean reward of each step's samples, with one standard deviation", make: reward },
  { title: "Rewards by name", help: "Mean of each part of the reward, before its weight", make: members("reward") },
  { title: "Held out", help: "Figures of the evaluations on held-out prompts", make: members("eval") },
  { title: "Loss", help: "The loss, with KL if it is part of it, and the clipped policy loss alone", make: several([["loss", "loss", "blue"], ["policy_loss", "policy", { tone: "amber", dash: "dot" }]]) },
  { title: "Pairs ranked right", help: "Pairs of a step whose chosen response has the higher reward, by the model that is trained", make: several([["preference_accuracy", "chosen above rejected", "teal"]], SHARES), optional: true },
  { title: "Gradient norm", help: "Before it is clipped, over the optimiser steps", make: several([["gradient_norm", "mean", "blue"], ["gradient_norm_max", "largest", "rose"]], { zero: true }) },
  { title: "Entropy", help: "Mean entropy of the policy over response tokens, in nats", make: several([["entropy", "policy", "violet"]], { zero: true }) },
  { title: "Clipped share", help: "Tokens without gradient because of a clip, of the policy or of the critic's values", make: several([["clipped_low", "lower clip", "teal"], ["clipped_high", "upper clip", "amber"], ["clipped_dual", "dual clip", "rose"], ["value_clipped", "values", "olive"]], SHARES) },
  { title: "Critic loss", help: "The loss of the critic's values", make: several([["value_loss", "values", "olive"]], { zero: true }), optional: true },
  { title: "Explained variance", help: "Share of the variance of the returns that the critic explains: 1 is all of it, below 0 is worse than their mean", make: several([["explained_variance", "returns", "olive"]]), optional: true },
  { title: "Critic's gradient norm", help: "Before it is clipped, over the critic's optimiser steps", make: several([["critic_gradient_norm", "mean", "olive"], ["critic_gradient_norm_max", "largest", "rose"]], { zero: true }), optional: true },
  { title: "Learning rate", help: "Mean over the optimiser steps", make: several([["learning_rate", "rate", "slate"], ["critic_learning_rate", "critic", "olive"]], { zero: true }) },
  { title: "KL divergence", help: "Nats per token: from the reference, and of one step's updates", make: several([["reference_kl", "from the reference", "teal"], ["old_kl", "within the step", "slate"]], { zero: true }) },
  { title: "Engine–learner logprob gap", help: "|learner − engine| logprob of the sampled tokens, in nats, on a logarithmic axis",
    make: several([["rollout_logprob_difference", "mean", "blue"], ["rollout_logprob_difference_max", "largest", "rose"]], { log: true }) },
  { title: "Cut off, without signal", help: "Responses cut off at the longest length; groups whose rewards are all equal, which teach nothing", make: several([["truncated", "cut off", "rose"], ["groups_without_signal", "without signal", "amber"]], SHARES) },
  { title: "Response length", help: "Tokens per response: quantiles of each step", make: lengths },
  { title: "Throughput", help: "Response tokens per second of generation", make: several([["generation_tokens_per_s", "generation", "blue"]], { zero: true }) },
  { title: "Time by stage", help: "Wall time in which each stage worked. Stages overlap: their sum may exceed the step's time", make: stages },
  { title: "Cost", help: "Dollars so far by the price book", make: cost },
  { title: "The algorithm's own figures", help: "What a user's algorithm reports with its loss", make: members("algorithm"), optional: true },
];

/** Metrics that the charts need; a family's name stands for its members. */
export const NAMES = [
  "reward_mean", "reward_std", "reward", "eval", "loss", "policy_loss", "preference_accuracy", "gradient_norm", "gradient_norm_max", "entropy", "clipped_low",
  "clipped_high", "clipped_dual", "value_clipped", "value_loss", "explained_variance", "critic_gradient_norm", "critic_gradient_norm_max", "critic_learning_rate", "learning_rate", "reference_kl", "old_kl", "rollout_logprob_difference", "rollout_logprob_difference_max",
  "truncated", "groups_without_signal", "response_tokens", "response_tokens_mean", "generation_tokens_per_s", ...STAGES.map(([name]) => name), "cost_usd", "algorithm",
];

/**
 * A chart with its lines smoothed: each point the mean of those before it, which weigh `weight` times less with each
 * point. The values as they were measured stay, pale.
 */
export function smoothed(chart, weight) {
  if (!chart || !weight) return chart;
  const change = (one) => (one.smooth ? { ...one, y: averages(one.y, weight), raw: one.y } : one);
  const pale = chart.lines.filter((one) => one.smooth).map((one) => ({ ...one, pale: true, dash: undefined, dots: false }));
  return { ...chart, lines: [...pale, ...chart.lines.map(change)], read: (chart.read ?? chart.lines).map(change) };
}

/** Moving averages; the first ones are of the few values that there are. What was not measured stays a gap. */
export function averages(values, weight) {
  let sum = 0, mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    mass = weight * mass + 1 - weight;
    return sum / mass;
  });
}
