// One run: its status and what can be done with it, and below it one of several tabs.

import { ask, get, post } from "./api.js";
import { confirmed } from "./dialogs.js";
import { fill, h, note, pill, say, throttled } from "./dom.js";
import { ago, dateTime, duration } from "./format.js";
import { overviewTab } from "./overview.js";
import { progress } from "./runs.js";
import { samplesTab } from "./samples.js";
import { checkpointsTab, eventsTab, logsTab, specTab } from "./tabs.js";

const TABS = { "": ["Overview", overviewTab], samples: ["Samples", samplesTab], events: ["Events", eventsTab], logs: ["Logs", logsTab], checkpoints: ["Checkpoints", checkpointsTab], spec: ["Spec", specTab] };
const ENDED = ["succeeded", "failed", "cancelled"];
const FOLLOW_MS = 1000;

export function runView(root, id, firstTab) {
  const path = `/v1/runs/${encodeURIComponent(id)}`;
  let run = null, shown = null, name = null, heard = 0;
  document.title = `${id} · rlhfless`;
  const title = h("h1", {}), status = h("span"), reason = h("p", { class: "reason" }), bar = h("div", { class: "progress" });
  const actions = h("div", { class: "actions" }), meta = h("p", { class: "meta" });
  const links = Object.entries(TABS).map(([tab, [text]]) => [tab, h("a", { href: `#/runs/${encodeURIComponent(id)}${tab && `/${tab}`}` }, text)]);
  const content = h("div", { class: "content" });
  root.append(
    h("div", { class: "head run" },
      h("div", { class: "title" }, h("a", { href: "#/runs", class: "back" }, "Runs"), h("span", { class: "muted", "aria-hidden": "true" }, "/"), title, status, actions),
      reason, bar, meta),
    h("nav", { class: "tabs", "aria-label": "Parts of the run" }, links.map(([, link]) => link)), content);

  async function act(verb, question) {
    if (question && !(await confirmed(...question))) return;
    try {
      draw(await post(`${path}/${verb}`));
    } catch (error) {
      note(error.message, "error");
    }
  }

  function buttons() {
    const button = (text, call, kind = "") => h("button", { type: "button", class: kind, onclick: call }, text);
    const cancel = [`Cancel ${run.name}?`, "It stops for good. What it has saved stays.", "Cancel the run"];
    return [
      ["queued", "validating", "provisioning", "running"].includes(run.status) && button("Pause", () => act("pause")),
      ["paused", "pausing"].includes(run.status) && button("Resume", () => act("resume"), "primary"),
      ![...ENDED, "cancelling"].includes(run.status) && button("Cancel", () => act("cancel", cancel), "danger"),
      ENDED.includes(run.status) && button("Delete", remove, "danger"),
    ];
  }

  async function remove() {
    if (!(await confirmed(`Delete ${run.name}?`, "Its events, metrics and folder go, with the checkpoints in it.", "Delete the run"))) return;
    try {
      await ask(path, { method: "DELETE" });
      location.hash = "#/runs";
    } catch (error) {
      note(error.message, "error");
    }
  }

  function draw(found) {
    const before = run;
    run = found;
    say(title, run.name);
    if (before?.status !== run.status) {
      const focused = actions.contains(document.activeElement);
      fill(status, pill(run.status));
      fill(actions, buttons());
      if (focused) actions.querySelector("button")?.focus();
    }
    say(reason, run.status_reason);
    reason.className = `reason ${run.status === "failed" ? "error" : ""}`;
    fill(bar, progress(run), run.left_s === null ? null : h("span", { class: "muted left" }, `${duration(run.left_s)} left`));
    ages();
    shown?.update(run);
  }

  function ages() {
    if (!run) return;
    const taken = run.started_at && (run.finished_at ?? Date.now() / 1000) - run.started_at;
    fill(meta,
      h("code", { title: "Id of the run" }, run.id),
      h("span", { title: dateTime(run.created_at) }, `created ${ago(run.created_at)}`),
      taken && h("span", {}, run.finished_at ? `took ${duration(taken)}` : `running for ${duration(taken)}`),
      run.attempt > 1 && h("span", {}, `attempt ${run.attempt}`),
      run.priority !== 0 && h("span", {}, `priority ${run.priority}`),
      Object.entries(run.metadata).map(([label, value]) => h("span", { class: "label" }, `${label}=${value}`)));
  }

  function tab(wanted = "") {
    const next = TABS[wanted] ? wanted : "";
    if (next === name && shown) return;
    name = next;
    for (const [one, link] of links) {
      if (one === name) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    shown?.close?.();
    fill(content);
    shown = TABS[name][1](content, { id, path });
    if (run) shown.update(run);
    shown.refresh().catch((error) => error.name === "AbortError" || note(error.message, "error"));
  }

  // What a step brings is read once a second at most, however fast the steps are.
  const follow = throttled(FOLLOW_MS, () => shown?.follow?.().catch(() => {}));
  const timer = setInterval(ages, 15_000);
  tab(firstTab);
  return {
    tab,
    async refresh() {
      const again = run !== null, before = heard;
      const found = await get(path);
      if (heard === before) draw(found); // else the stream brought a newer state while this answer was on its way
      if (again) follow();
    },
    changed(found) {
      if (found.id !== id) return;
      heard++;
      const news = run === null || found.last_event !== run.last_event;
      draw(found);
      if (news) follow(); // else it only says what it does
    },
    deleted(gone) {
      if (gone === id) location.hash = "#/runs";
    },
    close() {
      clearInterval(timer);
      follow.cancel();
      shown?.close?.();
    },
  };
}
