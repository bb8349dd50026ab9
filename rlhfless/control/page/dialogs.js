// What is asked of the user: native dialogs, which keep the focus and close with Escape.

import { h } from "./dom.js";

function open(title, body, buttons, attributes = {}) {
  const dialog = h("dialog", { "aria-labelledby": "dialog-title", ...attributes });
  const form = h("form", { method: "dialog" }, h("h2", { id: "dialog-title" }, title), body, h("div", { class: "buttons" }, buttons));
  dialog.append(form);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return { dialog, form };
}

/** Resolves to the API key that was typed. */
export function askKey(refused) {
  return new Promise((resolve) => {
    const input = h("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
    const text = refused ? "This key is not known, or has been revoked." : "This service asks for an API key.";
    const body = [
      h("p", {}, text, " Make one with ", h("code", {}, "rlhfless keys create"), ". It is kept until this tab is closed."),
      h("label", { for: "key" }, "API key"), input,
    ];
    const { dialog, form } = open("API key", body, h("button", { class: "primary" }, "Continue"));
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", () => resolve(input.value.trim()));
  });
}

/** Resolves to whether the user agrees. */
export function confirmed(title, text, action, danger = true) {
  return new Promise((resolve) => {
    const { dialog } = open(title, h("p", {}, text), [
      h("button", { value: "no" }, "Back"),
      h("button", { value: "yes", class: danger ? "danger" : "primary" }, action),
    ]);
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"));
  });
}

/** What an error says, by key. */
export function problemList(error) {
  const found = error.problems?.length ? error.problems : [{ param: error.param, message: error.message, hint: null }];
  return found.map((p) => h("li", {}, p.param ? h("code", {}, p.param) : null, p.param ? ": " : "", p.message, p.hint ? ` — ${p.hint}` : ""));
}

/** A key by which the service knows a request that is sent again. Off loopback, without TLS, a browser has no UUIDs. */
export const onceKey = () => crypto.randomUUID?.() ?? String(Math.random());

/** A new run from a checkpoint: its name, its steps, and the whole spec. `start` throws what is to be shown. */
export function newRun(spec, checkpoint, start) {
  const name = h("input", { id: "new-name", value: spec.name, required: true, pattern: "[a-z0-9]([a-z0-9\\-]{0,38}[a-z0-9])?" });
  const steps = h("input", { id: "new-steps", type: "number", min: 1, value: spec.steps, required: true });
  const text = h("textarea", { id: "new-spec", rows: 12, spellcheck: "false" });
  text.value = JSON.stringify(spec, null, 2);
  const problems = h("ul", { class: "problems" });
  const body = [
    h("p", {}, "The model is the one of ", h("code", {}, checkpoint.id), "; everything else is as in this run, unless you change it."),
    h("div", { class: "fields" }, h("div", {}, h("label", { for: "new-name" }, "Name"), name), h("div", {}, h("label", { for: "new-steps" }, "Steps"), steps)),
    h("details", {}, h("summary", {}, "The whole spec"), h("label", { for: "new-spec", class: "unseen" }, "Spec as JSON"), text),
    h("div", { role: "alert" }, problems),
  ];
  const go = h("button", { class: "primary" }, "Start the run");
  const { dialog, form } = open(`Start from ${checkpoint.id}`, body, [h("button", { type: "button", onclick: () => dialog.close() }, "Back"), go], { class: "wide" });
  // One key for as long as the dialog is open: a second click, or a second try after a lost answer, makes no second run.
  const idempotency = onceKey();
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    go.disabled = true;
    problems.replaceChildren();
    try {
      const whole = { ...JSON.parse(text.value), name: name.value, steps: Number(steps.value) };
      await start(whole, `${idempotency}-${JSON.stringify(whole).length}-${whole.name}-${whole.steps}`);
      dialog.close();
    } catch (error) {
      problems.append(...problemList(error));
    }
    go.disabled = false;
  });
}
