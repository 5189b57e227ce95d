// Numbers, times and durations as text.

const NUMBER = new Intl.NumberFormat("en-US");
const RATE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const CLOCK = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const DAY = new Intl.DateTimeFormat("en-GB", { day: "2-digit", month: "short" });
const UNITS = [
  [86_400, "d"],
  [3_600, "h"],
  [60, "m"],
];

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : NUMBER.format(value);
}

export function rate(value) {
  return value === null || value === undefined || Number.isNaN(value) ? NONE : RATE.format(value);
}

// "countOf(1, 'transaction')" is "1 transaction".
export function countOf(value, noun, plural = `${noun}s`) {
  return `${count(value)} ${value === 1 ? noun : plural}`;
}

// Seconds in their two largest units: 3 h 20 m, 45 s, 120 ms.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return NONE;
  if (seconds > 0 && seconds < 1) return `${Math.max(1, Math.round(seconds * 1000))} ms`;
  if (seconds < 10) return `${RATE.format(seconds)} s`;
  let rest = Math.round(seconds);
  const parts = [];
  for (const [size, unit] of UNITS) {
    if (rest >= size && parts.length < 2) {
      parts.push(`${Math.floor(rest / size)} ${unit}`);
      rest %= size;
    }
  }
  if (rest > 0 && parts.length < 2 && seconds < 3_600) parts.push(`${rest} s`);
  return parts.join(" ");
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1024) return countOf(value, "byte");
  const exponent = Math.min(3, Math.floor(Math.log2(value) / 10));
  return `${RATE.format(value / 1024 ** exponent)} ${["", "KiB", "MiB", "GiB"][exponent]}`;
}

// The local time of day, with the date unless it is today.
export function clock(time) {
  if (time === null || time === undefined) return NONE;
  const at = new Date(time);
  const text = CLOCK.format(at);
  return at.toDateString() === new Date().toDateString() ? text : `${DAY.format(at)} ${text}`;
}

export function ageS(time, now = Date.now()) {
  return Math.max(0, (now - Date.parse(time)) / 1000);
}

export function words(state) {
  return state.replaceAll("_", " ");
}

// What is unsafe, once for all instances that warn of it.
export function warningsOf(data) {
  const found = new Map();
  for (const instance of data?.instances ?? []) {
    for (const { check, detail } of instance.warnings) {
      const id = `${check} ${detail}`;
      if (!found.has(id)) found.set(id, { id, check, detail, instances: [] });
      found.get(id).instances.push(instance.url || "this instance");
    }
  }
  return [...found.values()];
}

export function instancesText({ instances }) {
  return instances.length === 1 ? instances[0] : countOf(instances.length, "instance");
}
