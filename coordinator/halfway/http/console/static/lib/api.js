// Calls of the REST interface (docs/api.md). The console uses nothing else.

import { currentKey, refused } from "./session.js";

const TIMEOUT_S = 30;
const TRANSIENT = new Set([0, 429, 502, 503, 504]);

export class Problem extends Error {
  constructor({ status, code, detail, retryAfterS = null, fields = {} }) {
    super(detail);
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.retryAfterS = retryAfterS;
    this.fields = fields;
  }

  // Whether the same call may succeed later.
  get isTransient() {
    return TRANSIENT.has(this.status);
  }
}

// Relative to the page, so that a proxy can serve the API below its own path.
export function apiUrl(path, query = {}) {
  const url = new URL(`../v1${path}`, location.href.split("#")[0]);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  return url;
}

export function request(path, { method = "GET", query, body, headers = {}, signal } = {}) {
  const key = currentKey();
  const allHeaders = { ...headers };
  if (key !== null) allHeaders.Authorization = `Bearer ${key}`;
  if (body !== undefined) allHeaders["Content-Type"] = "application/json";
  return fetch(apiUrl(path, query), {
    method,
    headers: allHeaders,
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
    redirect: "error",
    referrerPolicy: "no-referrer",
  });
}

// Returns the JSON of the response; throws a Problem if the response is not a success.
export async function call(path, options = {}) {
  const timeout = AbortSignal.timeout(TIMEOUT_S * 1000);
  const signal = options.signal ? AbortSignal.any([options.signal, timeout]) : timeout;
  try {
    const response = await request(path, { ...options, signal });
    if (!response.ok) throw await problemOf(response);
    return response.status === 204 ? null : await response.json();
  } catch (error) {
    if (error instanceof Problem || options.signal?.aborted) throw error;
    throw unreachable();
  }
}

export function unreachable() {
  return new Problem({ status: 0, code: "unreachable", detail: "The coordinator does not answer." });
}

export async function problemOf(response) {
  let document = {};
  try {
    document = await response.json();
  } catch {
    // The page of a proxy, or an empty body.
  }
  const wait = Number(response.headers.get("Retry-After"));
  const problem = new Problem({
    status: response.status,
    code: document.error_code ?? `http_${response.status}`,
    detail: document.detail ?? `The coordinator answered HTTP ${response.status}.`,
    retryAfterS: Number.isFinite(wait) && wait > 0 ? wait : null,
    fields: document,
  });
  if (problem.status === 401) refused();
  return problem;
}
