// Samples to read: prompts and responses with special tokens, what was expected, and what each reward gave.

import { get } from "./api.js";
import { fill, h, note, refill } from "./dom.js";
import { number, short, version } from "./format.js";

const PER_PAGE = 40;
const TYPING_MS = 250;
const LONG_PROMPT = 600; // characters; a longer one is folded

const RESULTS = { any: "Any reward", failed: "Reward failed", zero: "Reward is 0", nonzero: "Reward is not 0" };

export function samplesTab(root, { path }) {
  const wanted = { search: "", data_set: "", reward: "", result: "any", step: "", prompt_id: "" };
  let samples = [], more = false, run = null, asked = 0, typing = null;

  const choice = (label, name, options) => h("select", { "aria-label": label, onchange: (event) => change({ [name]: event.target.value }) }, options);
  const option = ([value, text]) => h("option", { value }, text);
  const find = h("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "Search prompts and responses", maxlength: "200",
    oninput: () => { clearTimeout(typing); typing = setTimeout(() => change({ search: find.value }), TYPING_MS); } });
  const sets = choice("Data set", "data_set", []), rewards = choice("Reward", "reward", []);
  const results = choice("Result", "result", Object.entries(RESULTS).map(option));
  const step = h("input", { type: "number", min: "0", placeholder: "All steps", "aria-label": "Step", onchange: () => change({ step: step.value }) });
  const clear = h("button", { type: "button", hidden: true, onclick: () => reset() }, "Clear filters");
  const fresh = h("button", { type: "button", class: "primary", hidden: true, onclick: () => { scrollTo(0, 0); load().catch(failed); } }, "Show new samples");
  const tools = h("div", { class: "tools" }, sets, results, rewards, step, clear, fresh, find);
  const top = h("div"), list = h("div", { class: "samples" });
  const empty = h("p", { class: "empty panel", hidden: true });
  const older = h("button", { type: "button", class: "older", hidden: true, onclick: () => load(true).catch(failed) }, "Show older samples");
  root.append(tools, top, list, empty, older);

  const failed = (error) => note(error.message, "error");
  const filtered = () => Object.entries(wanted).some(([name, value]) => value !== "" && !(name === "result" && value === "any") && name !== "reward");

  function change(values) {
    Object.assign(wanted, values);
    load().catch(failed);
  }

  function reset() {
    Object.assign(wanted, { search: "", data_set: "", reward: "", result: "any", step: "", prompt_id: "" });
    for (const one of [find, sets, rewards, step]) one.value = "";
    results.value = "any";
    load().catch(failed);
  }

  function query(extra = {}) {
    const asks = Object.entries({ ...wanted, ...extra }).filter(([name, value]) => value !== "" && value !== undefined && !(name === "result" && value === "any"));
    return `${path}/rollouts?${new URLSearchParams(asks)}`;
  }

  /** The newest samples, or those of steps before the ones that are shown. */
  async function load(onward = false) {
    const mine = ++asked;
    // The last step of a page may go on in the next one: it is read again as a whole.
    const last = onward ? samples.at(-1).step : undefined;
    const found = await get(query({ limit: PER_PAGE, ...(onward ? { before_step: last + (samples[0].step === last ? 0 : 1) } : {}) }));
    if (mine !== asked) return; // a later question is on its way
    samples = onward ? [...samples.filter((one) => one.step !== last || samples[0].step === last), ...found.data] : found.data;
    more = found.has_more;
    fresh.hidden = true;
    draw();
  }

  function draw() {
    options();
    clear.hidden = !filtered();
    rewards.hidden = wanted.result === "any"; // alone it filters nothing
    older.hidden = !more;
    empty.hidden = samples.length > 0;
    empty.textContent = filtered() ? "No sample matches these filters." : "No samples yet: they come with the first step.";
    const one = wanted.prompt_id && samples[0];
    fill(top, one ? h("article", { class: "panel" }, h("header", {}, h("h2", { title: one.prompt_id }, `Prompt ${short(one.prompt_id)} over the steps`), h("button", { type: "button", onclick: () => change({ prompt_id: "" }) }, "All prompts")), question(one)) : null);
    const groups = Map.groupBy(samples, (each) => JSON.stringify([each.step, each.split, each.prompt_id]));
    refill(list, () => [...groups.values()].map(group));
  }

  /** What there is to choose from: the names of the spec, and those of samples. */
  function options() {
    const spec = run?.spec ?? {};
    const names = [...(spec.prompts?.mixture ?? []), ...(spec.evaluation?.sets ?? [])].map((one) => one.name);
    const parts = [...new Set([...(spec.rewards ?? []).map((one) => one.name ?? one.type), ...samples.flatMap((one) => [...Object.keys(one.rewards), ...Object.keys(one.failures)])])];
    const known = [...new Set([...names, ...samples.map((one) => one.data_set)])].filter(Boolean);
    offer(sets, [["", "All sets"], ["train", "Training"], ["held_out", "Held out"], ...known.map((name) => [name, name])], wanted.data_set);
    offer(rewards, [["", "in total"], ...parts.map((name) => [name, name])], wanted.reward);
  }

  function offer(select, entries, value) {
    const kind = JSON.stringify(entries);
    if (select.dataset.kind !== kind) fill(select, entries.map(option));
    select.dataset.kind = kind;
    select.value = value;
  }

  function group(together) {
    const [first] = together;
    const where = [`Step ${first.step}`, first.split === "held_out" ? "held out" : "training", first.data_set].filter(Boolean).join(" · ");
    const title = wanted.prompt_id ? where : `${where} · prompt ${short(first.prompt_id)}`;
    const over = h("button", { type: "button", class: "plain", title: "This prompt in all steps", "aria-label": `Prompt ${short(first.prompt_id)} over the steps`, onclick: () => { scrollTo(0, 0); change({ prompt_id: first.prompt_id, step: "" }); step.value = ""; } }, "Over steps →");
    return h("article", { class: "panel" },
      h("header", {}, h("h2", { title: first.prompt_id }, title), wanted.prompt_id ? null : over),
      wanted.prompt_id ? null : question(first),
      h("div", { class: "responses" }, together.map(response)));
  }

  function question(sample) {
    const prompt = text(sample.prompt, sample, "prompt");
    const row = Object.entries(sample.columns ?? {}).filter(([, value]) => value !== null);
    const expected = Object.entries(sample.expected ?? {});
    return [
      sample.prompt.length > LONG_PROMPT ? h("details", { class: "folded" }, h("summary", {}, `Prompt, ${sample.prompt.length.toLocaleString("en")} characters`), prompt) : prompt,
      expected.length ? h("dl", { class: "expected" }, expected.map(([name, value]) => h("div", {}, h("dt", {}, `${name} expects`), h("dd", {}, value)))) : null,
      row.length ? h("details", { class: "row" }, h("summary", {}, `Other columns: ${row.map(([name]) => name).join(", ")}`), h("dl", {}, row.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, typeof value === "string" ? value : JSON.stringify(value)))))) : null,
    ];
  }

  function response(sample) {
    // Maps: a reward may have any name, such as `constructor`.
    const values = new Map(Object.entries(sample.rewards)), causes = new Map(Object.entries(sample.failures));
    const parts = [...new Set([...values.keys(), ...causes.keys()])].map((name) => {
      const failure = causes.has(name), value = values.get(name) ?? NaN;
      return h("li", { class: failure ? "bad" : value === 0 ? "zero" : "" }, name, h("b", {}, ` ${failure ? "failed" : number(value)}`));
    });
    const failures = [...causes].map(([name, why]) => h("p", { class: "why" }, h("b", {}, name), ` failed: ${why}`));
    const end = { length: ["cut off", "bad"], abort: ["aborted", "bad"] }[sample.finish_reason] ?? ["ended", ""];
    return h("section", { class: "response" },
      h("header", {}, h("b", { class: "total", title: "Total reward" }, number(sample.reward ?? NaN)), h("ul", { class: "parts", "aria-label": "Rewards by part" }, parts)),
      failures,
      sample.turns?.length ? h("ol", { class: "turns" }, sample.turns.map((each) => turn(each, sample))) : sample.response ? text(sample.response, sample, "text") : h("p", { class: "text muted" }, "(empty)"),
      h("p", { class: "facts", title: sample.weights }, sample.greedy ? h("span", { class: "label" }, "greedy") : h("span", {}, `sample ${sample.sample_index}`),
        h("span", {}, `${sample.response_tokens.toLocaleString("en")} tokens`), h("span", { class: end[1] }, sample.turns?.length ? `${sample.turns.length} turns, ended by: ${sample.episode_status}` : end[0]), h("span", {}, `weights of ${version(sample.weights)}`)));
  }

  /** A turn of an episode, with the environment's answers. */
  function turn(each, sample) {
    return h("li", {},
      each.text ? text(each.text, sample, "text") : h("p", { class: "text muted" }, "(empty)"),
      each.calls.map((call) => h("div", { class: call.outcome === "result" ? "call" : "call bad" },
        h("p", { class: "facts" }, h("span", {}, call.tool ? `${call.tool}(${JSON.stringify(call.arguments)})` : "environment"), call.outcome === "result" ? null : h("span", { class: "bad" }, call.outcome), h("span", {}, `${call.wait_s.toFixed(2)} s`)),
        text(call.answer, sample, "text"))));
  }

  /** A text with special tokens and what was searched for apart from the rest. */
  function text(value, sample, kind) {
    const tokens = [...(sample.special_tokens ?? [])].sort((a, b) => b.length - a.length); // the longer one where one begins with another
    const search = wanted.search.toLowerCase();
    const pieces = split(value, tokens).flatMap((part, at) => (at % 2 ? [h("span", { class: "token" }, part)] : searched(part, search)));
    return h("p", { class: kind, tabindex: "0" }, pieces);
  }

  async function follow() {
    if (wanted.step !== "") return;
    const { data } = await get(query({ limit: 1 }));
    if (!data.length || data[0].step === samples[0]?.step) return;
    // Nobody who reads is interrupted: what is new is offered.
    if (samples.length && (scrollY > 200 || root.querySelector("details[open]") || !getSelection().isCollapsed)) fresh.hidden = false;
    else await load();
  }

  return {
    update: (found) => { run = found; options(); },
    refresh: () => load(),
    follow,
    close: () => clearTimeout(typing),
  };
}

/** The parts of a text between tokens, and at odd places the tokens. */
function split(value, tokens) {
  if (!tokens.length) return [value];
  const pattern = tokens.map((token) => token.replaceAll(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|");
  return value.split(new RegExp(`(${pattern})`));
}

function searched(part, search) {
  if (!search) return [part];
  const found = [], lower = part.toLowerCase();
  let from = 0;
  for (let at = lower.indexOf(search); at >= 0; at = lower.indexOf(search, from)) {
    found.push(part.slice(from, at), h("mark", {}, part.slice(at, at + search.length)));
    from = at + search.length;
  }
  return [...found, part.slice(from)];
}
