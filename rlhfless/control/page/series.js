// The shown series of a run's metrics: read whole once, then followed step by step.

import { get } from "./api.js";

const POINTS = 300; // per metric: what a chart of some 400 pixels can show

/** `load()` reads what is new, `narrow(range)` says which steps are wanted: {last: 100}, {from, to}, or null for all. */
export function seriesOf(path, names) {
  let series = {}, read = null, range = null, begun = 0, newest = 0;

  const bounds = (step) => (range?.last ? [step - range.last, null] : range ? [range.from - 1, range.to] : [-1, null]);

  async function load(step) {
    // One step back: the evaluation after a step comes later than the step's own metrics.
    const whole = read === null, [after, until] = bounds(step), asked = range;
    const from = Math.max(whole ? after : read - 1, -1);
    if (until !== null && from >= until) return;
    const query = new URLSearchParams([...names.map((name) => ["name", name]), ["points", POINTS], ["after_step", from]]);
    if (until !== null) query.set("until_step", until);
    const order = ++begun;
    const found = await get(`${path}/metrics?${query}`);
    if (asked !== range || order < newest) return; // others are wanted meanwhile, or are here: a later answer came sooner
    newest = order;
    if (whole) series = {};
    read = found.step;
    for (const one of found.series) {
      const known = series[one.name];
      const keep = known ? known.steps.filter((at) => at <= from).length : 0;
      series[one.name] = known ? { ...one, steps: [...known.steps.slice(0, keep), ...one.steps], values: [...known.values.slice(0, keep), ...one.values] } : one;
      // The service thins them, or cuts them to the last steps, again next time.
      if (series[one.name].steps.length > Math.min(2 * POINTS, 1.2 * (range?.last ?? Infinity))) read = null;
    }
  }

  return {
    load,
    narrow(next) { range = next; read = null; },
    get range() { return range; },
    get all() { return series; },
  };
}
