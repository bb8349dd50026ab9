// The list of runs: newest first, live.

import { get } from "./api.js";
import { cell, fill, h, head, note, pill, say, table } from "./dom.js";
import { ago, DASH, dateTime, duration, number, usd } from "./format.js";

const PER_PAGE = 50;
const GROUPS = {
  all: [],
  active: ["queued", "validating", "provisioning", "running", "pausing", "cancelling"],
  paused: ["paused"],
  ended: ["succeeded", "failed", "cancelled"],
};
/** `sort`: what the service calls it, and which order comes first. */
const COLUMNS = [
  { title: "Run", sort: ["name", "asc"] }, { title: "Status", sort: ["status", "asc"] }, { title: "Progress", sort: ["progress", "desc"] },
  { title: "Reward", class: "num", sort: ["reward", "desc"] }, { title: "Held out", class: "num", sort: ["held_out", "desc"] }, { title: "Cost", class: "num", sort: ["cost", "desc"] },
  { title: "Time left", class: "num", sort: ["time_left", "asc"] }, { title: "Started", class: "num", sort: ["started", "desc"] },
];
const MOST_COMPARED = 8;

export function runsView(root) {
  const entries = new Map(); // id -> {row, run}
  const chosen = new Set(); // ids of runs to compare
  const heard = new Map(); // id -> run, as the stream told it while a page of the list was on its way
  let group = "all", after = null, more = false, loading = false, closed = false;
  let sort = null, order = null; // newest first
  document.title = "Runs · rlhfless";

  const body = h("tbody", { role: "rowgroup" });
  const list = table("Runs", [], [], { class: "runs cards" });
  list.replaceChild(body, list.tBodies[0]);
  const sorts = h("select", { class: "phone", "aria-label": "Order", onchange: () => arrange(...(sorts.value ? sorts.value.split(" ") : [null, null])) },
    h("option", { value: "" }, "Newest first"), COLUMNS.map(({ title, sort: [name, way] }) => h("option", { value: `${name} ${way}` }, `By ${title.toLowerCase()}`)));
  const compare = h("a", { class: "button", hidden: true }, "Compare");
  const empty = h("p", { class: "empty", hidden: true });
  const older = h("button", { type: "button", class: "older", hidden: true, onclick: () => page() }, "Show older runs");
  const find = h("input", { type: "search", placeholder: "Filter by name or label", "aria-label": "Filter by name or label", oninput: () => sift() });
  const tabs = Object.keys(GROUPS).map((name) =>
    h("button", { type: "button", "aria-pressed": String(name === group), onclick: () => choose(name) }, name[0].toUpperCase() + name.slice(1)));
  const devices = h("p", { class: "muted devices" });

  root.append(
    h("div", { class: "head" }, h("h1", {}, "Runs"), devices),
    h("div", { class: "tools" }, h("div", { class: "segments", role: "group", "aria-label": "Status" }, tabs), sorts, compare, find, h("a", { class: "button primary", href: "#/new" }, "New run")),
    h("div", { class: "panel flush" }, list, empty), older);

  const seen = new IntersectionObserver((found) => { if (found[0].isIntersecting && more) page(); }, { rootMargin: "300px" });
  seen.observe(older);

  function choose(name) {
    group = name;
    tabs.forEach((tab, place) => tab.setAttribute("aria-pressed", String(Object.keys(GROUPS)[place] === name)));
    refresh();
  }

  function heads() {
    const ways = { asc: "ascending", desc: "descending" };
    fill(list.tHead.rows[0], h("th", { scope: "col", role: "columnheader", class: "choose" }, h("span", { class: "unseen" }, "Compare")),
      COLUMNS.map((one) => head(one, one.sort[0] === sort ? ways[order] : null, () => arrange(one.sort[0], one.sort[0] === sort ? { asc: "desc", desc: "asc" }[order] : one.sort[1]))));
  }
  heads();

  function arrange(name, way) {
    [sort, order] = [name, way];
    const focused = list.tHead.contains(document.activeElement);
    heads();
    if (focused) list.tHead.querySelector("[aria-sort] button").focus();
    refresh().catch((error) => note(error.message, "error"));
  }

  function pick(id, on) {
    if (on && chosen.size === MOST_COMPARED) { note(`At most ${MOST_COMPARED} runs are compared.`, "error"); return false; }
    chosen[on ? "add" : "delete"](id);
    compare.hidden = chosen.size < 2;
    compare.href = `#/compare/${[...chosen].map(encodeURIComponent).join(",")}`;
    say(compare, `Compare ${chosen.size} runs`);
    return on;
  }

  const matches = (run) => {
    const words = find.value.trim().toLowerCase();
    const text = `${run.id} ${run.status_reason} ${Object.entries(run.metadata).map((pair) => pair.join("="))}`.toLowerCase();
    return words.split(/\s+/).every((word) => text.includes(word));
  };

  function sift() {
    let count = 0;
    for (const { row, run } of entries.values()) {
      row.hidden = !matches(run);
      count += row.hidden ? 0 : 1;
    }
    empty.hidden = count > 0 || loading;
    list.hidden = count === 0;
    if (count) return;
    if (entries.size) fill(empty, "No run matches.");
    else if (group !== "all") fill(empty, `No run is ${group}.`);
    else fill(empty, "No runs yet. ", h("a", { href: "#/new" }, "Paste a spec"), ", or start one with ", h("code", {}, "rlhfless runs create run.yaml"), " or POST /v1/runs.");
  }

  async function page() {
    if (loading) return;
    loading = true;
    heard.clear();
    const asked = JSON.stringify([group, sort, order]);
    try {
      const query = new URLSearchParams({ limit: PER_PAGE });
      if (after) query.set("after", after);
      if (sort) { query.set("sort", sort); query.set("order", order); }
      for (const status of GROUPS[group]) query.append("status", status);
      const found = await get(`/v1/runs?${query}`);
      if (closed || asked !== JSON.stringify([group, sort, order])) return;
      const rows = [];
      for (const listed of found.data) {
        const run = heard.get(listed.id) ?? listed;
        if (!belongs(run)) continue;
        if (entries.has(run.id)) { update(run); continue; }
        const entry = { run, row: rowOf(run, chosen, pick) };
        entries.set(run.id, entry);
        rows.push(entry.row);
      }
      body.append(...rows);
      after = found.data.at(-1)?.id ?? after;
      more = found.has_more;
      older.hidden = !more;
    } finally {
      loading = false;
    }
    sift();
  }

  async function refresh() {
    after = null;
    loading = false;
    entries.clear();
    body.replaceChildren();
    await Promise.all([page(), free()]);
  }

  async function free() {
    const { data } = await get("/v1/devices");
    say(devices, data.map((kind) => `${kind.free} of ${kind.total} × ${kind.kind} free`).join("  ·  "));
  }

  function update(run) {
    const entry = entries.get(run.id);
    const row = rowOf(run, chosen, pick);
    const focused = entry.row.contains(document.activeElement) && document.activeElement.localName;
    entry.row.replaceWith(row);
    Object.assign(entry, { run, row });
    if (focused) row.querySelector(focused).focus();
  }

  function changed(run) {
    heard.set(run.id, run);
    if (entries.has(run.id)) {
      if (belongs(run)) update(run);
      else deleted(run.id);
    } else if (belongs(run) && sort === null && newer(run)) {
      const entry = { run, row: rowOf(run, chosen, pick) };
      entries.set(run.id, entry);
      body.prepend(entry.row);
    }
    sift();
  }

  const belongs = (run) => group === "all" || GROUPS[group].includes(run.status);
  const newer = (run) => [...entries.values()].every((entry) => entry.run.created_at < run.created_at);

  function deleted(id) {
    entries.get(id)?.row.remove();
    entries.delete(id);
    sift();
  }

  // Ages of what does not change otherwise.
  const timer = setInterval(() => {
    for (const time of body.querySelectorAll("time")) say(time, ago(Number(time.dataset.unix)));
    free().catch(() => {});
  }, 15_000);

  return { refresh, changed, deleted, close: () => { closed = true; clearInterval(timer); seen.disconnect(); } };
}

function rowOf(run, chosen, pick) {
  const { reward_mean: reward, "eval/reward_mean": heldOut, "eval/loss": loss } = run.latest;
  const unix = run.started_at ?? run.created_at;
  const label = Object.entries(run.metadata).map(([name, value]) => h("span", { class: "label" }, `${name}=${value}`));
  const box = h("input", { type: "checkbox", "aria-label": `Compare ${run.name} ${run.id.slice(run.name.length + 1)}`, onchange: () => { box.checked = pick(run.id, box.checked); } });
  box.checked = chosen.has(run.id);
  return h("tr", { role: "row" },
    cell("Compare", { class: "choose" }, box),
    cell("Run", { class: "name" }, h("a", { href: `#/runs/${encodeURIComponent(run.id)}` }, run.name), h("span", { class: "id" }, run.id.slice(run.name.length + 1)), label),
    cell("Status", { class: "status" }, pill(run.status), h("span", { class: "reason", title: run.status_reason }, run.status_reason)),
    cell("Progress", { class: "progress" }, progress(run)),
    cell("Reward", { class: "num" }, number(reward ?? NaN)),
    cell("Held out", { class: "num" }, heldOut === undefined && loss !== undefined ? [h("span", { class: "muted" }, "loss "), number(loss ?? NaN)] : number(heldOut ?? NaN)),
    cell("Cost", { class: "num" }, run.cost_usd ? usd(run.cost_usd) : DASH),
    cell("Time left", { class: "num" }, run.left_s === null ? DASH : duration(run.left_s)),
    cell("Started", { class: "num" }, h("time", { "data-unix": unix, datetime: new Date(1000 * unix).toISOString(), title: dateTime(unix) }, ago(unix))));
}

/** Steps done, as a bar and as numbers. */
export function progress(run) {
  return [
    h("progress", { max: run.steps, value: run.step, "aria-label": `Steps of ${run.name}`, class: `s-${run.status}` }),
    h("span", { class: "steps" }, `${run.step}`, h("span", { class: "muted" }, ` / ${run.steps}`)),
  ];
}
