// One action on every transaction that a filter finds: lists what matches, sends that as a batch, and lists again, no
// faster than a rate. It runs in this page and ends with it. It keeps counts, the last failures, the last that it has
// resumed, and the ids of one page.

import { useEffect, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "./api.js";

export const MAX_RATE = 500;
export const MAX_FAILURES = 100;
export const MAX_FOLLOWED = 1000;
const FOLLOWED_AT_ONCE = 100;
const ITEM_PATIENCE_MS = 60_000; // one transaction is tried for so long, while others have results
const PAUSE_MS = 1000;
const LATER = new Set([429, 503]);
const NEEDS_OPERATOR = new Set(["topic_unavailable", "not_authorised"]); // with one of these statuses, but time does not mend it
const MEANWHILE = new Set([404, 409, 410]); // ended, parked or resumed since it was listed: there is nothing to do

const AFTER = ["committed", "rolled_back", "prepared", "parked", "forgotten"];
const OPEN = new Set(["prepared", "parked"]);

const ACTIVE = new Set(["running", "stopping"]);
const listeners = new Set();
let current = null;

function changed() {
  for (const listener of listeners) listener();
}

// Renders the component again with each change; returns the action that runs or ran last, or null.
export function useBulk() {
  const [, render] = useState(0);
  useEffect(() => {
    const listener = () => render((turn) => (turn + 1) % 1_000_000);
    listeners.add(listener);
    listener();
    return () => listeners.delete(listener);
  }, []);
  return current;
}

export function isActive(run = current) {
  return run !== null && ACTIVE.has(run.state);
}

// `wanted`: {action, states, filter, description, reason, rate}, or with the ids of one page in place of the filter.
// `followed` is what was resumed, by id with its state, the latest last.
export function start(wanted) {
  if (isActive()) return;
  current = { followed: new Map(), ...wanted, state: "running", done: 0, meanwhile: 0, failed: 0, left: null, failures: [], waiting: null, problem: null, wake: null, aborted: new AbortController() };
  addEventListener("beforeunload", warn);
  changed();
  void work(current);
}

export function startAgain() {
  const { action, states, filter, ids, description, reason, rate, followed } = current;
  start({ action, states, filter, ids, description, reason, rate, followed });
}

// Sends no further batch.
export function stop() {
  if (current?.state !== "running") return;
  current.state = "stopping";
  current.wake?.();
  changed();
}

// Forgets the action; one that runs is cut off.
export function dismiss() {
  current?.aborted.abort();
  current?.wake?.();
  current = null;
  removeEventListener("beforeunload", warn);
  changed();
}

// The browser asks before it closes or reloads the page.
function warn(event) {
  event.preventDefault();
}

async function work(run) {
  try {
    if (run.ids) await actOn(run, null);
    else for (const state of run.states) await actOn(run, state);
    run.state = run.state === "stopping" ? "stopped" : "done";
  } catch (error) {
    run.problem = error instanceof Problem ? error : unreachable();
    run.state = "failed";
  }
  if (run === current) {
    run.waiting = null;
    removeEventListener("beforeunload", warn);
    changed();
  }
}

async function actOn(run, state) {
  let cursor = null;
  let nextAt = Date.now();
  const settled = new Set(); // what has its result, of the transactions from the cursor on
  const triedAt = new Map();
  const size = Math.max(1, Math.min(Math.round(run.rate), MAX_RATE));
  while (await until(run, nextAt)) {
    // What is sent has matched a moment ago: what was done since, also by a batch whose answer was lost, is not sent again.
    const page = run.ids
      ? pageOf(run.ids, cursor ?? 0, size)
      : await ask(run, "/transactions", { query: { ...run.filter, state, cursor, limit: size } });
    if (page !== null) {
      const ids = page.transactions.map((transaction) => transaction.id);
      const wanted = ids.filter((id) => !settled.has(id));
      run.left = page.count === null ? null : page.count - (ids.length - wanted.length);
      if (wanted.length > 0) {
        nextAt = Date.now() + (wanted.length / run.rate) * 1000;
        const answers = await send(run, wanted);
        answers?.forEach((answer, index) => {
          const id = wanted[index];
          if (!triedAt.has(id)) triedAt.set(id, Date.now());
          if (settle(run, id, answer, triedAt.get(id))) settled.add(id);
        });
      }
      changed();
      if (ids.every((id) => settled.has(id))) {
        cursor = page.next;
        settled.clear();
        triedAt.clear();
        if (cursor === null) return;
        continue;
      }
    }
    nextAt = Math.max(nextAt, Date.now() + PAUSE_MS);
  }
}

function pageOf(ids, first, size) {
  const next = first + size < ids.length ? first + size : null;
  return { transactions: ids.slice(first, first + size).map((id) => ({ id })), count: ids.length - first, next };
}

// Asks what became of what was resumed, some each time; returns how many are in each state, as far as is known.
export async function becameOf({ followed }, signal) {
  const asked = [...followed.keys()].filter((id) => OPEN.has(followed.get(id))).slice(0, FOLLOWED_AT_ONCE);
  for (const id of asked) follow(followed, id, followed.get(id)); // the next time the others come first
  await Promise.all(asked.map(async (id) => followed.set(id, await stateOf(id, signal))));
  const states = [...followed.values()];
  return AFTER.map((state) => [state, states.filter((one) => one === state).length]).filter(([, number]) => number > 0);
}

function follow(followed, id, state) {
  followed.delete(id);
  followed.set(id, state);
  if (followed.size > MAX_FOLLOWED) followed.delete(followed.keys().next().value);
}

async function stateOf(id, signal) {
  try {
    return (await call(`/transactions/${encodeURIComponent(id)}`, { signal })).state;
  } catch (error) {
    if (error instanceof Problem && (error.status === 404 || error.status === 410)) return "forgotten";
    throw error;
  }
}

// Returns the answer to each item, or null if the batch has no answer.
async function send(run, ids) {
  const kind = run.action === "commit" || run.action === "rollback" ? "end" : run.action;
  const answer = await ask(run, "/batch", batchOf(run.action, ids, run.reason));
  return answer === null ? null : answer[kind];
}

function batchOf(action, ids, reason) {
  const isEnd = action === "commit" || action === "rollback";
  const items = ids.map((id) => (isEnd ? { id, outcome: action, remark: reason } : { id, remark: reason }));
  return { method: "POST", body: { [isEnd ? "end" : action]: items }, headers: isEnd ? { "Halfway-Cause": "operator" } : {} };
}

// Acts on one transaction; throws a Problem if that fails.
export async function actOnOne(action, id, reason) {
  const answer = await call("/batch", batchOf(action, [id], reason));
  const { status, problem } = [...answer.end, ...answer.check, ...answer.resume][0];
  if (status >= 400) throw new Problem({ status, code: problem.error_code, detail: problem.detail, fields: problem });
}

// Returns null if it has to be asked again: the coordinator restarts, or a shard moves.
async function ask(run, path, options) {
  try {
    const answer = await call(path, { ...options, signal: run.aborted.signal });
    run.waiting = null;
    return answer;
  } catch (error) {
    if (!(error instanceof Problem) || !error.isTransient) throw error;
    run.waiting = error;
    changed();
    return null;
  }
}

// Counts the result of a transaction; returns false if it is to be tried again.
function settle(run, id, { status, problem }, triedAt) {
  if (status < 400) {
    run.done += 1;
    if (run.action === "resume") follow(run.followed, id, "prepared");
  } else if (MEANWHILE.has(status)) run.meanwhile += 1;
  else if (LATER.has(status) && !NEEDS_OPERATOR.has(problem.error_code) && Date.now() - triedAt < ITEM_PATIENCE_MS) return false;
  else {
    run.failed += 1;
    run.failures.push({ id, code: problem.error_code, detail: problem.detail });
    if (run.failures.length > MAX_FAILURES) run.failures.shift();
  }
  if (run.left !== null) run.left -= 1;
  return true;
}

// Waits until a time; returns false as soon as the action is to stop.
async function until(run, time) {
  const wait = time - Date.now();
  if (wait > 0 && run.state === "running") {
    await new Promise((resolve) => {
      const timer = setTimeout(resolve, wait);
      run.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
    run.wake = null;
  }
  return run.state === "running" && !run.aborted.signal.aborted;
}
