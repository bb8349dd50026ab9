// A figure of a run: a title, a legend with the newest values, the chart, and its data as a table.

import { cell, fill, h, say, table } from "./dom.js";
import { measured } from "./format.js";
import { drawCurves } from "./svg.js";

const sizes = new ResizeObserver((found) => { for (const one of found) one.target.redraw?.(); });

/**
 * `make(data)` gives what is drawn, with {legend: [{name, tone, value, line}], columns, rows()}, or null: nothing yet.
 * `draw(plot, made)` draws it.
 */
export function figure({ title, help, make, draw = drawCurves, wide = false }) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": title, tabindex: wide ? null : "0" });
  const legend = h("ul", { class: "legend" });
  const data = h("div", { class: "data", tabindex: "0", role: "region", "aria-label": `Data of ${title}`, hidden: true });
  const toggle = h("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-label": `Data of ${title} as a table`, title: "Data as a table", onclick: () => tell(data.hidden) }, "⊞");
  const element = h("figure", { class: `chart ${wide ? "tall nothing" : ""}` }, h("figcaption", {}, h("h3", { title: help }, title), legend, wide ? null : toggle), plot, data);
  let made = null;
  if (wide) say(plot, "reading the trace");
  plot.redraw = () => { if (made && plot.clientWidth) draw(plot, made); };
  sizes.observe(plot);

  function tell(open) {
    data.hidden = !open;
    toggle.setAttribute("aria-expanded", String(open));
    rows();
  }

  function rows() {
    if (data.hidden || !made) return;
    const body = made.rows().map((row) => h("tr", { role: "row" }, row.map((value, at) => cell(made.columns[at], { class: "num" }, value))));
    fill(data, table(title, made.columns.map((name) => ({ title: name, class: "num" })), body));
  }

  return {
    element,
    show(found) {
      made = make(found);
      element.classList.toggle("nothing", made === null);
      if (made === null) { say(plot, "not measured"); return; }
      fill(legend, made.legend.map((one) => h("li", {}, h("span", { class: `key ${one.line ?? ""} c-${one.tone}`, "aria-hidden": "true" }), one.name, one.value ? h("b", {}, ` ${one.value}`) : null)));
      plot.setAttribute("aria-label", `${title}. ${made.summary ?? made.legend.map((one) => `${one.name} ${one.value ?? ""}`).join(", ")}`);
      plot.redraw();
      rows();
      element.dataset.drawn = "";
    },
    close: () => sizes.unobserve(plot),
  };
}

/** The newest value of a series, in words. */
export const newest = (series) => (series ? measured(series.values.at(-1) ?? NaN, series.unit) : "");
