// The statistics from the coordinator, asked for again and again, once for all views.

import { useEffect, useState } from "../vendor/htm-preact.js";
import { call, Problem } from "./api.js";
import { Ring } from "./ring.js";

const POINTS = 600;
const EVERY_S = 2;
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 15;

export const SERIES = ["commits", "rollbacks", "prepares", "checks_commit", "checks_rollback", "checks_unknown", "checks_none"];

export const live = {
  status: "connecting", // connecting, live, lost
  data: null,
  previous: null, // the answer before
  rates: {}, // per second, between these two
  receivedAt: null, // when the figures arrived, by the local clock
  lostAt: null,
  retryAt: null,
  problem: null,
  connections: 0, // how often the coordinator was reached again: views load again when it changes
  ring: new Ring(SERIES, POINTS),
};

const listeners = new Set();
let stopping = null;
let retryNow = null;

function update(change) {
  Object.assign(live, change);
  for (const listener of listeners) listener();
}

export function start() {
  stop();
  const stopper = new AbortController();
  stopping = stopper;
  update({ status: "connecting", data: null, previous: null, rates: {}, receivedAt: null, lostAt: null, problem: null });
  live.ring.clear();
  void follow(stopper.signal);
}

export function stop() {
  stopping?.abort();
  stopping = null;
}

export function tryNow() {
  retryNow?.();
}

async function follow(stopped) {
  let failures = 0;
  while (!stopped.aborted) {
    let waitS = EVERY_S;
    try {
      setStatistics(await call("/statistics", { query: { samples: live.data === null ? true : null }, signal: stopped }));
      failures = 0;
    } catch (error) {
      const problem = error instanceof Problem ? error : null;
      if (stopped.aborted || problem?.status === 401) return;
      waitS = problem?.retryAfterS ?? Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** failures) * (0.75 + Math.random() / 2);
      failures += 1;
      update({ status: "lost", lostAt: live.lostAt ?? Date.now(), retryAt: Date.now() + waitS * 1000, problem });
    }
    await sleep(waitS, stopped);
  }
}

// Waits until the time is over, `stopped` is aborted, or `tryNow` is called.
function sleep(seconds, stopped) {
  return new Promise((resolve) => {
    const done = () => {
      clearTimeout(timer);
      stopped.removeEventListener("abort", done);
      retryNow = null;
      resolve();
    };
    const timer = setTimeout(done, seconds * 1000);
    stopped.addEventListener("abort", done);
    retryNow = done;
  });
}

function setStatistics(data) {
  let last = live.data === null ? null : live.data.counted;
  for (const counted of [...data.samples, data.counted]) {
    const isComparable = last !== live.data?.counted || live.data?.counted_by === data.counted_by;
    if (counted.at !== last?.at) live.ring.push(Date.parse(counted.at), last !== null && isComparable ? ratesOf(last, counted) : {});
    last = counted;
  }
  const isNew = live.status !== "live";
  const isNewer = data.at !== live.data?.at; // concurrent callers share one answer
  update({
    ...(isNewer ? { previous: live.data, rates: ratesBetween(live.data, data) } : {}),
    data,
    status: "live",
    receivedAt: Date.now(),
    lostAt: null,
    retryAt: null,
    problem: null,
    connections: live.connections + (isNew ? 1 : 0),
  });
}

// The rates between two answers: none if they have not added up the same instances.
export function ratesBetween(before, after) {
  return before && before.counted_by === after.counted_by ? ratesOf(before.counted, after.counted) : {};
}

// The rates of an instance between the last two answers: none if it has started since.
export function ratesOfInstance({ url, since, counted }) {
  const before = live.previous?.instances.find((instance) => instance.url === url && instance.since === since);
  return before ? ratesOf({ ...before.counted, at: live.previous.at }, { ...counted, at: live.data.at }) : {};
}

// A total that has become smaller has no rate: a group was deleted. Nor has one of the same answer.
function ratesOf(before, { at, ...totals }) {
  const seconds = (Date.parse(at) - Date.parse(before.at)) / 1000;
  return Object.fromEntries(Object.entries(totals).map(([name, total]) => [name, total < before[name] || seconds === 0 ? NaN : (total - before[name]) / seconds]));
}

// Renders the component again with each change.
export function useLive() {
  const [, render] = useState(0);
  useEffect(() => {
    const listener = () => render((turn) => (turn + 1) % 1_000_000);
    listeners.add(listener);
    listener(); // The data may have changed between the first render and this effect.
    return () => listeners.delete(listener);
  }, []);
  return live;
}
