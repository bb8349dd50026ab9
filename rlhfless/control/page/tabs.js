// The other tabs of a run. Each is {update(run), refresh(), follow(), close()}.

import { ask, download, get, post } from "./api.js";
import { newRun } from "./dialogs.js";
import { cell, figureCell, fill, h, note, panel, refill, say, table } from "./dom.js";
import { ago, clock, dateTime, number } from "./format.js";

const EVENTS = 300;
const LOG_LINES = 500;
const LOG_MS = 3000;

/** What happened, newest first, live. */
export function eventsTab(root, { path }) {
  let last = null, run = null;
  const found = [];
  const body = h("ol", { class: "events", reversed: true });
  const steps = h("input", { type: "checkbox", id: "steps-too", onchange: () => draw() });
  const empty = h("p", { class: "empty", hidden: true }, "Nothing yet.");
  root.append(panel("Events", { class: "flush", actions: h("label", { class: "check", for: "steps-too" }, steps, "each step") }, body, empty));

  const wanted = (one) => steps.checked || one.type !== "metrics";
  function draw() {
    const shown = found.filter(wanted).slice(-EVENTS).reverse();
    fill(body, shown.map((one) => h("li", { class: one.level }, h("time", { datetime: new Date(1000 * one.created_at).toISOString(), title: dateTime(one.created_at) }, clock(one.created_at)),
      h("span", { class: `type t-${one.level}` }, one.level === "info" ? one.type : one.level), h("span", { class: "message" }, one.message))));
    empty.hidden = shown.length > 0;
  }

  async function follow() {
    // The first time the newest: most of a long run's events are its steps'.
    last ??= Math.max((run ?? (await get(path))).last_event - 2 * EVENTS, 0);
    for (let more = true; more;) {
      const page = await get(`${path}/events?${new URLSearchParams({ after: last, limit: 1000 })}`);
      found.push(...page.data);
      found.splice(0, found.length - 4 * EVENTS);
      last = page.data.at(-1)?.id ?? last;
      more = page.has_more;
    }
    draw();
  }

  return { update: (now) => { run = now; }, refresh: follow, follow };
}

/** The ends of the run's log and of its driver's. */
export function logsTab(root, { path }) {
  const text = h("pre", { class: "log", tabindex: "0", "aria-label": "Log" });
  const empty = h("p", { class: "empty", hidden: true }, "No log yet: it starts with the run's first driver.");
  root.append(panel("Logs", { class: "flush", actions: h("span", { class: "muted small" }, `last ${LOG_LINES} lines, live`) }, text, empty));
  async function refresh() {
    const found = await (await ask(`${path}/logs?lines=${LOG_LINES}`)).text();
    if (found === text.textContent) return;
    const atEnd = text.scrollTop + text.clientHeight >= text.scrollHeight - 30;
    say(text, found);
    text.hidden = !found;
    empty.hidden = Boolean(found);
    if (atEnd || !text.dataset.seen) text.scrollTop = text.scrollHeight;
    text.dataset.seen = "";
  }
  const timer = setInterval(() => { if (!document.hidden) refresh().catch(() => {}); }, LOG_MS);
  return { update: () => {}, refresh, close: () => clearInterval(timer) };
}

/** Saved models: download one, or start a run from it. */
export function checkpointsTab(root, { id, path }) {
  let run = null, known = null;
  const body = h("div");
  root.append(panel("Checkpoints", { class: "flush" }, body));

  async function save(one) {
    try {
      await download(`${path}/checkpoints/${encodeURIComponent(one.id)}/download`, `${id}-${one.id}.tar`);
    } catch (error) {
      note(error.message, "error");
    }
  }

  function start(one) {
    newRun(derived(run.spec, one.location), one, async (spec, key) => {
      const made = await post("/v1/runs", spec, { "Idempotency-Key": key });
      note(`${made.name} is queued`);
      location.hash = `#/runs/${encodeURIComponent(made.id)}`;
    });
  }

  const row = (one) => h("tr", { role: "row" },
    cell("Checkpoint", { class: "name" }, one.id, one.best ? h("span", { class: "label best", title: one.metric ?? "" }, "best") : null),
    figureCell("Step", one.step, String), figureCell("Score", one.score, number),
    cell("Saved", { class: "num", "data-value": one.created_at, title: dateTime(one.created_at) }, ago(one.created_at)),
    cell("Location", { class: "path" }, h("code", {}, one.location)),
    cell("", { class: "buttons" }, h("button", { type: "button", onclick: () => save(one), "aria-label": `Download ${one.id}` }, "Download"),
      h("button", { type: "button", onclick: () => start(one), "aria-label": `Start a run from ${one.id}` }, "Start a run from here")));

  async function refresh() {
    const { data } = await get(`${path}/checkpoints`);
    if (JSON.stringify(data) === known) return;
    known = JSON.stringify(data);
    const figures = ["Step", "Score", "Saved"].map((title) => ({ title, class: "num", sort: "descending" }));
    const columns = [{ title: "Checkpoint", sort: "ascending" }, ...figures, { title: "Location" }, { title: "Actions", class: "buttons" }];
    refill(body, () => data.length ? table("Checkpoints", columns, data.map(row), { class: "cards" }) : h("p", { class: "empty" }, "None saved yet: checkpoint.every_steps says how often."));
  }

  return { update: (found) => { run = found; }, refresh, follow: refresh };
}

/** The spec of a run that begins with a checkpoint of this one: without what is the service's own. */
function derived(spec, location) {
  const { output, ...rest } = structuredClone(spec);
  rest.model.path = location;
  for (const name of ["ray_address", "trusted_network"]) delete rest.placement?.[name];
  delete rest.logging?.metrics_port;
  return rest;
}

/** The spec, with every default. */
export function specTab(root) {
  const text = h("pre", { class: "log spec", tabindex: "0", "aria-label": "Spec as JSON" });
  const copy = h("button", { type: "button", onclick: async () => { await navigator.clipboard.writeText(text.textContent); note("Copied."); } }, "Copy");
  root.append(panel("Spec", { class: "flush", actions: copy }, text));
  return { update: (run) => say(text, JSON.stringify(run.spec, null, 2)), refresh: async () => {} };
}
