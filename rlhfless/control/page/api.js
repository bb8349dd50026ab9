// Requests and the stream of changes. With an API key, which this tab alone keeps, each carries it; an EventSource could
// not, so the stream is read by fetch.

import { askKey } from "./dialogs.js";

const KEY = "rlhfless-key";
const TIMEOUT_MS = 30_000;
const SILENT_MS = 45_000; // the service sends a comment each 15 s
const RETRY_MS = [500, 1000, 2000, 5000, 10_000];

export const key = () => sessionStorage.getItem(KEY) ?? "";

/** An answer other than success; `problems` names every wrong field. */
export class ApiError extends Error {
  constructor(status, error) {
    super(error.message);
    this.status = status;
    this.code = error.code;
    this.param = error.param;
    this.problems = error.problems ?? [];
  }
}

function headers(more = {}) {
  return key() ? { Authorization: `Bearer ${key()}`, ...more } : more;
}

let asking = null;

/** Ask for a key once, however many requests need it. */
async function newKey() {
  asking ??= askKey(key() !== "").then((value) => sessionStorage.setItem(KEY, value)).finally(() => { asking = null; });
  await asking;
}

async function failure(response) {
  try {
    return new ApiError(response.status, (await response.json()).error);
  } catch {
    return new ApiError(response.status, { code: "error", message: `the service answered ${response.status}` });
  }
}

/** The response to a request; asks for a key where the service wants one. Throws ApiError, or TypeError without network. */
export async function ask(path, { method = "GET", body, signal, timeout = TIMEOUT_MS, ...more } = {}) {
  for (;;) {
    const used = key();
    const limit = AbortSignal.timeout(timeout);
    const response = await fetch(path, {
      method,
      headers: headers(body === undefined ? more : { "Content-Type": "application/json", ...more }),
      body: body === undefined ? undefined : JSON.stringify(body),
      signal: signal ? AbortSignal.any([signal, limit]) : limit,
    });
    if (response.ok) return response;
    if (response.status !== 401) throw await failure(response);
    if (used === key()) await newKey();
  }
}

export const get = async (path, options) => (await ask(path, options)).json();
export const post = async (path, body = {}, more = {}) => (await ask(path, { method: "POST", body, ...more })).json();

/** Server-sent events of a response, as {id, type, data}. */
async function* events(response, alive) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    alive();
    text += value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const fields = { type: "message", data: "" };
      for (const line of block.split("\n")) {
        const [name, rest] = [line.slice(0, line.indexOf(":")), line.slice(line.indexOf(":") + 1).replace(/^ /, "")];
        if (name === "data") fields.data += rest;
        else if (name === "event") fields.type = rest;
        else if (name === "id") fields.id = rest;
      }
      if (fields.data) yield fields;
    }
  }
}

/**
 * Follow a stream until `signal` aborts; a stream that breaks or falls silent is opened again. `opened` is called each
 * time it is there: what was missed meanwhile is to be read then.
 */
export async function follow(path, { opened, event, lost, signal }) {
  for (let tries = 0; !signal.aborted; tries++) {
    const own = new AbortController(), used = key();
    let timer = null;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => own.abort(), SILENT_MS);
    };
    try {
      alive();
      const response = await fetch(path, {
        headers: headers({ Accept: "text/event-stream" }),
        signal: AbortSignal.any([signal, own.signal]),
      });
      if (response.status === 401) {
        if (used === key()) await newKey();
        continue;
      }
      if (!response.ok) throw await failure(response);
      tries = 0;
      opened();
      for await (const one of events(response, alive)) event(one.type, JSON.parse(one.data));
    } catch (error) {
      if (signal.aborted) return;
    } finally {
      clearTimeout(timer);
      own.abort();
    }
    lost();
    await new Promise((done) => setTimeout(done, RETRY_MS[Math.min(tries, RETRY_MS.length - 1)]));
  }
}

/** Save a file that needs a key: a link cannot carry one. Without a key a link is all that is needed. */
export async function download(path, name) {
  const link = document.createElement("a");
  link.download = name;
  if (!key()) {
    link.href = path;
    link.click();
    return;
  }
  const response = await fetch(path, { headers: headers() }); // no time limit: it may be gigabytes
  if (!response.ok) throw await failure(response);
  link.href = URL.createObjectURL(await response.blob());
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}
