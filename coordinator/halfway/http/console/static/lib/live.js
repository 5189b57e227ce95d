// The live statistics from the coordinator: one connection for all views, which is reopened automatically.

import { useEffect, useState } from "../vendor/htm-preact.js";
import { Problem, problemOf, request } from "./api.js";
import { Ring } from "./ring.js";
import { events } from "./stream.js";

const POINTS = 600;
const SILENT_S = 25; // The coordinator sends something every 10 s.
const FIRST_WAIT_S = 0.5;
const LONGEST_WAIT_S = 15;

export const SERIES = ["commit", "rollback", "prepares", "check_commit", "check_rollback", "check_unknown", "check_none"];

export const live = {
  status: "connecting", // connecting, live, lost
  data: null,
  receivedAt: null, // when the coordinator last sent something, by the local clock
  dataAt: null, // when the figures arrived
  lostAt: null,
  retryAt: null,
  problem: null,
  connections: 0, // how many connections were opened: views load again when it changes
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
    let problem = null;
    try {
      await readEvents(stopped, () => {
        failures = 0;
      });
    } catch (error) {
      problem = error instanceof Problem ? error : null;
    }
    if (stopped.aborted || problem?.status === 401) return;
    const wait = problem?.retryAfterS ?? Math.min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** failures) * (0.75 + Math.random() / 2);
    failures += 1;
    update({ status: "lost", lostAt: live.lostAt ?? Date.now(), retryAt: Date.now() + wait * 1000, problem });
    await sleep(wait, stopped);
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

// Reads events from one connection until it ends. Calls `onStatistics` for each statistics event.
async function readEvents(stopped, onStatistics) {
  const own = new AbortController();
  const signal = AbortSignal.any([stopped, own.signal]);
  let silence = setTimeout(() => own.abort(), SILENT_S * 1000);
  try {
    const response = await request("/events", { signal, headers: { Accept: "text/event-stream" } });
    if (!response.ok) throw await problemOf(response);
    for await (const event of events(response.body)) {
      clearTimeout(silence);
      silence = setTimeout(() => own.abort(), SILENT_S * 1000);
      if (event === null) {
        // A heartbeat: the last figures have not changed.
        if (live.data !== null) live.ring.push(Date.parse(live.data.at) + Date.now() - live.dataAt, pointOf(live.data));
        update({ receivedAt: Date.now() });
      } else if (event.event === "statistics") {
        onStatistics();
        setStatistics(JSON.parse(event.data));
      } else if (event.event === "end") {
        const end = JSON.parse(event.data);
        throw new Problem({ status: end.error_code === "unauthenticated" ? 401 : 503, code: end.error_code, detail: end.detail });
      }
    }
  } finally {
    clearTimeout(silence);
    own.abort();
  }
}

function setStatistics(data) {
  live.ring.push(Date.parse(data.at), pointOf(data));
  const isNew = live.status !== "live";
  update({
    status: "live",
    data,
    receivedAt: Date.now(),
    dataAt: Date.now(),
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
