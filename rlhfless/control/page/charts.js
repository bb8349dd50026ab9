// Charts by plotly, which comes from its own Python package. A chart is drawn when it is first seen.

import { fill, h, say, table, cell } from "./dom.js";
import { measured } from "./format.js";

let loaded = null;

/** The script of plotly: a few megabytes, loaded once, by a view that has charts. */
export function plotly() {
  loaded ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = document.querySelector('meta[name="plotly"]').content;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => { loaded = null; reject(new Error("the script of the charts could not be loaded; reload the page")); };
    document.head.append(script);
  });
  return loaded;
}

/** A colour of style.css by its name, with an opacity. */
export function colour(name, opacity = 1) {
  const value = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return opacity === 1 ? value : value + Math.round(255 * opacity).toString(16).padStart(2, "0");
}

const CONFIG = { displayModeBar: false, responsive: true, doubleClick: "reset", scrollZoom: false };

/** What all charts share. */
export function layout(more = {}) {
  const axis = { gridcolor: colour("grid"), linecolor: colour("grid"), zeroline: false, tickfont: { color: colour("muted") }, fixedrange: coarse() };
  const { xaxis, yaxis, ...rest } = more;
  return {
    margin: { l: 46, r: 10, t: 8, b: 26 },
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 11, color: colour("text") },
    hovermode: "x unified",
    hoverlabel: { bgcolor: colour("surface"), bordercolor: colour("border"), font: { size: 11, color: colour("text") } },
    showlegend: false,
    dragmode: coarse() ? false : "zoom",
    xaxis: { ...axis, showgrid: false, ticks: "outside", ticklen: 3, tickcolor: colour("grid"), ...xaxis },
    yaxis: { ...axis, nticks: 5, ...yaxis },
    ...rest,
  };
}

/** Fingers scroll the page over a chart; a mouse zooms into it. */
const coarse = () => matchMedia("(pointer: coarse)").matches;

const dark = matchMedia("(prefers-color-scheme: dark)");

/**
 * A figure with a title, a legend with the newest values, the chart, and its data as a table.
 * `make(data)` gives {traces, layout, legend: [{name, colour, value, line}], rows, columns, summary}, or null: nothing yet.
 */
export function figure({ title, help, make, tall = false, plain = false }) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": title });
  const legend = h("ul", { class: "legend" });
  const data = h("div", { class: "data", tabindex: "0", role: "region", "aria-label": `Data of ${title}`, hidden: true });
  const toggle = h("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-label": `Data of ${title} as a table`, title: "Data as a table", onclick: () => tell(data.hidden) }, "⊞");
  const element = h("figure", { class: `chart ${tall ? "tall" : ""}` },
    h("figcaption", {}, h("h3", { title: help }, title), legend, plain ? null : toggle), plot, data);
  let wanted = null, seen = false, closed = false, drawn = false;

  const watch = new IntersectionObserver((found) => {
    if (found.some((one) => one.isIntersecting)) { seen = true; watch.disconnect(); draw(); }
  }, { rootMargin: "150px" });
  watch.observe(element);
  const again = () => draw();
  dark.addEventListener("change", again);

  function tell(open) {
    data.hidden = !open;
    toggle.setAttribute("aria-expanded", String(open));
    if (open) draw();
  }

  async function draw() {
    const made = wanted === null ? null : make(wanted);
    element.classList.toggle("nothing", made === null);
    if (made === null) { say(plot, wanted === null ? "" : "nothing measured yet"); return; }
    fill(legend, made.legend.map((one) => h("li", {}, h("span", { class: `key ${one.line ?? ""} c-${one.colour}`, "aria-hidden": "true" }), one.name, one.value ? h("b", {}, ` ${one.value}`) : null)));
    plot.setAttribute("aria-label", `${title}. ${made.summary ?? made.legend.map((one) => `${one.name} ${one.value ?? ""}`).join(", ")}`);
    if (!data.hidden && made.rows) fill(data, table(title, made.columns.map((name) => ({ title: name, class: "num" })), made.rows.map((row) => h("tr", {}, row.map((value, at) => cell(made.columns[at], { class: "num" }, value))))));
    if (!seen) return;
    const library = await plotly();
    if (closed) return;
    if (!drawn) plot.replaceChildren();
    await library.react(plot, made.traces, layout(made.layout), CONFIG);
    if (!drawn) element.dataset.drawn = "";
    drawn = true;
  }

  return {
    element,
    show: (found) => { wanted = found; draw(); },
    close: () => {
      closed = true;
      watch.disconnect();
      dark.removeEventListener("change", again);
      if (drawn) window.Plotly.purge(plot);
    },
  };
}

/** The newest value of a series, in words. */
export const newest = (series) => (series ? measured(series.values.at(-1) ?? NaN, series.unit) : "");
