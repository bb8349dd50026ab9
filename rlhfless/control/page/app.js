// Which view is shown, by the address after the #, and what changes meanwhile.

import { follow } from "./api.js";
import { fill, h, say } from "./dom.js";
import { compareView } from "./compare.js";
import { fleetView } from "./fleet.js";
import { newView } from "./new.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";

const main = document.getElementById("main");
let view = null;
let shown = null; // what the view is of: a tab of the same run is no other view

function route() {
  const [name, id, tab] = location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  if (name === "runs" && id) return { what: `run ${id}`, open: () => runView(main, id, tab), tab };
  if (name === "compare" && id) return { what: `compare ${id}`, open: () => compareView(main, [...new Set(id.split(","))]) };
  if (name === "new") return { what: "new", open: () => newView(main) };
  if (name === "fleet") return { what: "fleet", open: () => fleetView(main) };
  return { what: "runs", open: () => runsView(main) };
}

function show() {
  if (location.hash === "#main") return; // the skip link
  const next = route();
  for (const link of document.querySelectorAll("header nav a")) {
    const here = link.hash.startsWith(next.what === "fleet" ? "#/fleet" : "#/runs");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (next.what === shown) {
    view.tab?.(next.tab);
    return;
  }
  const first = shown === null;
  view?.close();
  fill(main);
  shown = next.what;
  view = next.open();
  view.refresh().catch(failed);
  if (!first) { main.focus({ preventScroll: true }); scrollTo(0, 0); }
}

function failed(error) {
  if (error.name === "AbortError") return;
  fill(main, h("div", { class: "empty" }, h("h1", {}, error.status === 404 ? "Not found" : "That did not work"),
    h("p", {}, error.message), h("p", {}, h("a", { href: "#/runs" }, "All runs"))));
}

const live = document.getElementById("live");
function state(name, text) {
  live.dataset.state = name;
  say(document.getElementById("live-text"), text);
}

let stop = null;
let opened = false;
/** A tab that is not seen has no stream: a browser opens six connections to a service at most. */
function watch() {
  stop?.abort();
  stop = null;
  if (document.hidden) return;
  stop = new AbortController();
  follow("/v1/events", {
    signal: stop.signal,
    opened: () => {
      state("on", "live");
      if (opened) view.refresh().catch(failed); // what changed while there was no stream
      opened = true;
    },
    event: (type, data) => (type === "run" ? view.changed?.(data) : view.deleted?.(data.id)),
    lost: () => state("off", "reconnecting"),
  });
}

addEventListener("hashchange", show);
document.addEventListener("visibilitychange", watch);
document.querySelector(".skip").addEventListener("click", (event) => { event.preventDefault(); main.focus(); });
show();
watch();
