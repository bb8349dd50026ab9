// Elements, made by one function. Texts are always text nodes: nothing that a run says is read as HTML.

import { byName } from "./format.js";

/** h("p", {class: "muted", onclick: f}, "text", child, [children]) */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  put(element, ...children);
  return element;
}

/** An SVG element. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) element.setAttribute(name, value);
  element.append(...children.flat(Infinity).filter((child) => child !== null));
  return element;
}

/** Append children; null and false are left out. */
export function put(element, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    element.append(child instanceof Node ? child : String(child));
  }
  return element;
}

/** Replace all children. */
export function fill(element, ...children) {
  element.replaceChildren();
  return put(element, ...children);
}

/**
 * Replace all children by those that `make()` gives; a link or button that had the focus has it again, known by its text.
 * While a pointer is down within the element it waits: a button that is replaced then is never clicked.
 */
export function refill(element, make) {
  if (element.matches(":active")) {
    addEventListener("pointerup", () => setTimeout(refill, 0, element, make), { once: true }); // after the click
    return;
  }
  const held = element.contains(document.activeElement) ? document.activeElement.textContent : null;
  fill(element, make());
  if (held) [...element.querySelectorAll("a, button")].find((one) => one.textContent === held)?.focus();
}

/** Change the text only if it is another one, so that nothing is announced or laid out twice. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A message that goes away; errors stay longer. */
export function note(text, kind = "info") {
  const box = h("div", { class: `note ${kind}` }, text);
  const close = h("button", { type: "button", class: "plain", "aria-label": "Dismiss", onclick: () => box.remove() }, "×");
  box.append(close);
  document.getElementById("notes").append(box);
  setTimeout(() => box.remove(), kind === "error" ? 15000 : 5000);
}

/** At most one call per `ms`, and always one after the last change. */
export function throttled(ms, call) {
  let timer = null, last = -Infinity;
  const run = () => { timer = null; last = performance.now(); call(); };
  const ask = () => { timer ??= setTimeout(run, Math.max(0, last + ms - performance.now())); };
  ask.cancel = () => { clearTimeout(timer); timer = null; };
  return ask;
}

/** A column's head. `direction`: "ascending" or "descending" if the rows are in its order; `sort()` puts them in it. */
export function head(column, direction, sort) {
  const title = sort ? h("button", { type: "button", class: "sort", onclick: sort }, column.title) : column.title;
  return h("th", { scope: "col", role: "columnheader", class: column.class, "aria-sort": direction }, title);
}

const orders = new Map(); // sort orders by caption, because tables are rebuilt on each change: {at, direction}

/**
 * A table with a caption for screen readers. `columns`: [{title, class}]; rows can be sorted by columns with `sort`, of
 * their cells' `data-value` or text. Roles stay where styles change `display`.
 */
export function table(caption, columns, rows, attributes = {}) {
  const body = h("tbody", { role: "rowgroup" }, rows), heads = h("tr", { role: "row" });

  function order(at, direction) {
    orders.set(caption, { at, direction });
    const value = (row) => { const { dataset, textContent } = row.cells[at]; return dataset.value ?? textContent; };
    const sign = direction === "ascending" ? 1 : -1;
    const compare = (a, b) => (Number(value(a)) - Number(value(b)) || byName(value(a), value(b)));
    const known = (row) => value(row) !== "NaN";
    body.append(...rows.filter(known).sort((a, b) => sign * compare(a, b)), ...rows.filter((row) => !known(row)));
  }

  function draw() {
    const { at, direction } = orders.get(caption) ?? {};
    fill(heads, columns.map((one, place) => head(one, place === at ? direction : null, one.sort && (() => {
      order(place, place === at && direction === one.sort ? { ascending: "descending", descending: "ascending" }[direction] : one.sort);
      draw();
      heads.cells[place].querySelector("button").focus();
    }))));
  }

  if (orders.has(caption) && rows.length) order(orders.get(caption).at, orders.get(caption).direction);
  draw();
  return h("table", { role: "table", ...attributes },
    h("caption", { class: "unseen" }, caption), h("thead", { role: "rowgroup" }, heads), body);
}

/** A cell. On a phone, each row is a card, and the title is next to the cell. */
export function cell(title, attributes, ...children) {
  return h("td", { role: "cell", "data-title": title, ...attributes }, ...children);
}

/** A cell with a number, by which rows can be sorted. */
export const figureCell = (title, value, text) => cell(title, { class: "num", "data-value": value ?? NaN }, value === null ? "–" : text(value));

/** A part of the view with a heading. */
export function panel(title, attributes, ...children) {
  const { actions, ...rest } = attributes;
  const id = `h-${title.toLowerCase().replaceAll(/[^a-z]+/g, "-")}`;
  return h("section", { "aria-labelledby": id, ...rest, class: `panel ${rest.class ?? ""}` },
    h("header", {}, h("h2", { id }, title), actions), ...children);
}

/** The status of a run or a replica: a dot and a word. */
export function pill(status) {
  return h("span", { class: `pill s-${status}` }, h("span", { class: "dot", "aria-hidden": "true" }), status);
}
