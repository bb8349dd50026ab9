// Numbers and times as people read them.

const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
// Made once: to make one takes longer than to format a hundred numbers.
const dollars = [0, 2].map((digits) => new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
const cents = new Intl.NumberFormat("en", { minimumSignificantDigits: 2, maximumSignificantDigits: 2 });
const times = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const datesAndTimes = new Intl.DateTimeFormat("en-GB", { dateStyle: "medium", timeStyle: "medium" });

export const DASH = "–";

/** To the cent, and with two significant digits below a dollar: $0.0042 is not nothing. */
export function usd(value) {
  if (!Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  return `${value < 0 ? "−" : ""}$${(size >= 1000 ? dollars[0] : size >= 0.995 || size === 0 ? dollars[1] : cents).format(size)}`;
}

/** About three digits, whatever the size. */
export function number(value) {
  if (!Number.isFinite(value)) return DASH;
  const size = Math.abs(value);
  if (size >= 1000) return grouped.format(value);
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size === 0) return "0";
  if (size >= 0.01) return value.toFixed(size >= 1 ? 2 : 3);
  return value.toExponential(1);
}

/** Of memory, in powers of 1000 as vendors count it. */
export const bytes = (value) => (value < 1e9 ? `${Math.ceil(value / 1e6)} MB` : `${(value / 1e9).toFixed(value < 1e10 ? 1 : 0)} GB`);

export function percent(value) {
  if (!Number.isFinite(value)) return DASH;
  return `${(100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)} %`;
}

/** A duration: the two largest units that matter. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return DASH;
  if (seconds < 0) seconds = 0;
  if (seconds < 1) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 90) return `${seconds.toFixed(0)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.round(hours / 24)} d`;
}

export function ago(unix) {
  if (!unix) return DASH;
  const seconds = Date.now() / 1000 - unix;
  if (seconds < 5) return "just now";
  // One unit is enough for an age.
  const hours = seconds / 3600;
  return `${hours < 1.5 ? duration(seconds) : hours < 36 ? `${Math.round(hours)} h` : `${Math.round(hours / 24)} d`} ago`;
}

export function clock(unix) {
  return times.format(1000 * unix);
}

export function dateTime(unix) {
  return datesAndTimes.format(1000 * unix);
}

/** A value by the unit that the metric declares. */
export function measured(value, unit) {
  if (!Number.isFinite(value)) return DASH;
  if (unit === "seconds") return duration(value);
  if (unit === "usd") return usd(value);
  if (unit === "ratio") return percent(value);
  return number(value);
}

/** An id, shortened to its start and end, where ids differ. */
export const short = (id) => (id.length > 20 ? `${id.slice(0, 10)}…${id.slice(-8)}` : id);

/** Weights by the step that made them; their whole label is run/attempt/step/digest. */
export function version(label) {
  const parts = (label ?? "").split("/");
  if (parts.length !== 4) return short(label || DASH);
  return `step ${parts[2]}${parts[1] === "1" ? "" : `, attempt ${parts[1]}`}`;
}

/** Order names as people do: actor-2 before actor-10. */
export const byName = new Intl.Collator("en", { numeric: true }).compare;
