// The figures at the top of a run.

import { duration, number, percent, usd } from "./format.js";

/** Figures at the top of a run, from its newest metrics: [name, value, more]. */
export function tiles(run, usage) {
  const last = run.latest;
  const has = (name) => Number.isFinite(last[name]);
  const fixed = usage?.best_static;
  const saved = fixed ? 1 - fixed.same_cost_usd / fixed.cost_usd : NaN;
  const ends = (s) => `ends ${new Date(Date.now() + 1000 * s).toLocaleString("en-GB", { weekday: "short", hour: "2-digit", minute: "2-digit" })}`;
  return [
    !has("reward_mean") && has("loss")
      ? ["Loss", number(last.loss), has("preference_accuracy") ? `${percent(last.preference_accuracy)} of pairs right` : has("eval/loss") ? `held out ${number(last["eval/loss"])}` : ""]
      : ["Reward", has("reward_mean") ? number(last.reward_mean) : null, has("eval/reward_mean") ? `held out ${number(last["eval/reward_mean"])}` : ""],
    ["Step time", has("step_s") ? duration(last.step_s) : null, has("generation_s") ? `${percent(last.generation_s / last.step_s)} generation` : ""],
    ["Throughput", has("generation_tokens_per_s") ? number(last.generation_tokens_per_s) : null, "tokens/s generated"],
    ["Response", has("response_tokens_mean") ? number(last.response_tokens_mean) : null, has("truncated") ? `tokens · ${percent(last.truncated)} cut off` : "tokens"],
    ["Cost", run.cost_usd ? usd(run.cost_usd) : null, Number.isFinite(saved) ? `${percent(Math.abs(saved))} ${saved >= 0 ? "below" : "above"} best static` : ""],
    ["Device time", run.device_hours ? `${number(run.device_hours)} h` : null, has("actors") ? `${Math.round(last.actors)} actors` : ""],
    ["Time left", run.left_s === null ? null : duration(run.left_s), run.left_s === null ? "" : ends(run.left_s)],
  ];
}
