// A figure of a run: a title, a legend with the newest values, the chart, and its data as a table.

import { cell, fill, h, say, table } from "./dom.js";
import { measured } from "./format.js";
import { drawCurves } from "./plots.js";

const sizes = new ResizeObserver((found) => { for (const one of found) one.target.redraw?.(); });

/**
 * `make(data)` returns what to draw, with {legend: [{name, tone, value, line, of}], columns, rows()}, or null: nothing yet.
 * An entry of the legend that names a line, itself or by `of`, hides and shows it. `draw(plot, made)` draws it; `zoom`
 * gets the steps that were dragged over; `optional` charts are hidden without data.
 */
export function figure({ title, help, make, draw = drawCurves, wide = false, optional = false, zoom }) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": title, tabindex: wide ? null : "0" });
  const legend = h("ul", { class: "legend" });
  const data = h("div", { class: "data", tabindex: "0", role: "region", "aria-label": `Data of ${title}`, hidden: true });
  const toggle = h("button", { type: "button", class: "plain", "aria-expanded": "false", "aria-label": `Data of ${title} as a table`, title: "Data as a table", onclick: () => tell(data.hidden) }, "⊞");
  const element = h("figure", { class: `chart ${wide ? "tall nothing" : ""}`, hidden: optional }, h("figcaption", {}, h("h3", { title: help }, title), legend, wide ? null : toggle), plot, data);
  const left = new Set(); // lines that are hidden
  let made = null;
  if (wide) say(plot, "reading the trace");
  plot.zoom = zoom;
  plot.redraw = () => { if (made && plot.clientWidth) draw(plot, { ...made, lines: shown(made.lines), read: shown(made.read ?? made.lines), areas: shown(made.areas) }); };
  sizes.observe(plot);

  const shown = (parts) => parts?.filter((one) => !left.has(one.of ?? one.name));

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

  function entry(one) {
    const name = one.of ?? one.name;
    const text = [h("span", { class: `key ${one.line ?? ""} c-${one.tone}`, "aria-hidden": "true" }), one.name, one.value ? h("b", {}, ` ${one.value}`) : null];
    if (made.legend.length < 2 || !made.lines?.some((line) => line.name === name)) return h("li", {}, text);
    const press = (event) => {
      if (!left.delete(name)) left.add(name);
      event.currentTarget.setAttribute("aria-pressed", String(!left.has(name)));
      plot.redraw();
    };
    return h("li", {}, h("button", { type: "button", "aria-pressed": String(!left.has(name)), onclick: press }, text));
  }

  /** The legend, made again only where its entries are others: a button keeps the focus. */
  function describe() {
    const names = JSON.stringify(made.legend.map(({ name, tone }) => [name, tone]));
    if (legend.dataset.names === names) made.legend.forEach((one, at) => { const value = legend.children[at].querySelector("b"); if (value) say(value, ` ${one.value}`); });
    else fill(legend, made.legend.map(entry));
    legend.dataset.names = names;
    plot.setAttribute("aria-label", `${title}. ${made.summary ?? made.legend.map((one) => `${one.name} ${one.value ?? ""}`).join(", ")}`);
  }

  return {
    element,
    show(found) {
      made = make(found);
      element.classList.toggle("nothing", made === null);
      element.hidden = optional && made === null;
      if (made === null) { plot.uplot?.destroy(); plot.uplot = null; say(plot, "not measured"); return; }
      describe();
      plot.redraw();
      rows();
      element.dataset.drawn = "";
    },
    close: () => { sizes.unobserve(plot); plot.uplot?.destroy(); },
  };
}

/** The newest value of a series, in words. */
export const newest = (series) => (series ? measured(series.values.at(-1) ?? NaN, series.unit) : "");
