// The statistics from the coordinator, asked for again and again, once for all views.

import { useEffect, useState } from "../vendor/htm-preact.js";
import { call, Problem } from "./api.js";
import { Ring } from "./ring.js";

const POINTS = 600;
const EVERY_S = 2;
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 15;

export const SERIES = ["commit", "rollback", "prepares", "check_commit", "check_rollback", "check_unknown", "check_none"];

export const live = {
  status: "connecting", // connecting, live, lost
  data: null,
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
  update({ status: "connecting", data: null, receivedAt: null, lostAt: null, problem: null });
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
      setStatistics(await call("/statistics", { signal: stopped }));
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
  live.ring.push(Date.parse(data.at), pointOf(data));
  const isNew = live.status !== "live";
  update({
    status: "live",
    data,
    receivedAt: Date.now(),
    lostAt: null,
    retryAt: null,
    problem: null,
    connections: live.connections + (isNew ? 1 : 0),
  });
}

export function pointOf(data) {
  const point = { prepares: data.totals.prepares_per_s, commit: 0, rollback: 0, check_commit: 0, check_rollback: 0, check_unknown: 0, check_none: 0 };
  for (const end of data.ends) point[end.outcome] += end.per_s;
  for (const check of data.checks) point[`check_${check.verdict}`] += check.per_s;
  return point;
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
