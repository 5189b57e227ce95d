// Calls of the REST interface (docs/rest.md). The console uses nothing else.

import { currentKey, refused } from "./session.js";

const TIMEOUT_S = 30;
const AGAIN = new Set([0, 429, 502, 503, 504]);

export class Problem extends Error {
  constructor({ status, code, detail, retryAfterS = null, fields = {} }) {
    super(detail);
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.retryAfterS = retryAfterS;
    this.fields = fields;
  }

  // Whether the same call may succeed in a moment.
  get passes() {
    return AGAIN.has(this.status);
  }
}

// Relative to the page, so that a proxy may put the API below a path of its own.
export function apiUrl(path, query = {}) {
  const url = new URL(`../v1${path}`, location.href.split("#")[0]);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

export function request(path, { method = "GET", query, body, headers = {}, signal } = {}) {
  const key = currentKey();
  const sent = { ...headers };
  if (key !== null) sent.Authorization = `Bearer ${key}`;
  if (body !== undefined) sent["Content-Type"] = "application/json";
  return fetch(apiUrl(path, query), {
    method,
    headers: sent,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    redirect: "error",
    referrerPolicy: "no-referrer",
  });
}

// Returns the answer's document; raises a Problem for anything but a good answer.
export async function call(path, options = {}) {
  const late = AbortSignal.timeout(TIMEOUT_S * 1000);
  const signal = options.signal ? AbortSignal.any([options.signal, late]) : late;
  try {
    const answer = await request(path, { ...options, signal });
    if (!answer.ok) throw await problemOf(answer);
    return answer.status === 204 ? null : await answer.json();
  } catch (error) {
    if (error instanceof Problem || options.signal?.aborted) throw error;
    throw unreachable();
  }
}

export function unreachable() {
  return new Problem({ status: 0, code: "unreachable", detail: "The coordinator does not answer." });
}

export async function problemOf(answer) {
  let document = {};
  try {
    document = await answer.json();
  } catch {
    // A proxy's page, or nothing.
  }
  const wait = Number(answer.headers.get("Retry-After"));
  const problem = new Problem({
    status: answer.status,
    code: document.error_code ?? `http_${answer.status}`,
    detail: document.detail ?? `The answer was HTTP ${answer.status}.`,
    retryAfterS: Number.isFinite(wait) && wait > 0 ? wait : null,
    fields: document,
  });
  if (problem.status === 401) refused();
  return problem;
}

// An id that makes a repeated request harmless. (crypto.randomUUID is missing on pages that are not https.)
export function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(10));
  return `${prefix}-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}
