// Small components for all views. They put text into the page as text only: no code of the console writes HTML.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { ageS, clock, duration, NONE, words } from "../lib/format.js";
import { useLive } from "../lib/live.js";

const TONES = {
  prepared: "info",
  parked: "warn",
  committed: "good",
  rolled_back: "calm",
  commit: "good",
  rollback: "calm",
  unknown: "info",
  none: "bad",
  running: "info",
  stopping: "warn",
  stopped: "warn",
  done: "good",
  failed: "bad",
  open: "bad",
  closed: "good",
};

// A state as a word, with a colour and a mark of the same meaning.
export function Badge({ of, tone = TONES[of] ?? "calm", children }) {
  return html`<span class="badge tone-${tone}"><span class="mark" aria-hidden="true"></span>${children ?? words(of)}</span>`;
}

export function Time({ at }) {
  return at ? html`<time datetime=${at} title=${at}>${clock(at)}</time>` : NONE;
}

export function Age({ at }) {
  return at ? html`<time datetime=${at} title=${at}>${duration(Math.round(ageS(at)))}</time>` : NONE;
}

// When the live figures arrived.
export function AsOf() {
  const { status, receivedAt } = useLive();
  return html`<span class="hint as-of">${status === "live" ? "" : "stale, "}as of ${clock(receivedAt)}</span>`;
}

export function Heading({ title, children }) {
  const heading = useRef(null);
  useEffect(() => {
    document.title = `${title} · halfway`;
    // Focus lets a screen reader announce the new view. The first view gets none: nobody has navigated yet.
    if (document.body.dataset.navigated) heading.current?.focus({ preventScroll: true });
    document.body.dataset.navigated = "yes";
  }, [title]);
  return html`<div class="heading"><h1 tabindex="-1" ref=${heading}>${title}</h1><div class="heading-side">${children}</div></div>`;
}

export function Panel({ title, side, children, tone = "" }) {
  return html`<section class="panel ${tone}">
    <header><h2>${title}</h2>${side ? html`<div class="panel-side">${side}</div>` : null}</header>
    ${children}
  </section>`;
}

export function Note({ tone = "info", title, children, role = "status" }) {
  return html`<div class="note tone-${tone}" role=${role}>
    <span class="mark" aria-hidden="true"></span><div>${title ? html`<strong>${title}</strong> ` : null}${children}</div>
  </div>`;
}

// Why a call failed, and whether it is retried automatically.
export function Failure({ problem, at = null, reload }) {
  if (!problem) return null;
  const title = problem.status === 403 ? "Not allowed." : problem.status === 0 ? "Not reachable." : problem.isTransient ? "Not available now." : "Refused.";
  return html`<${Note} tone=${problem.isTransient ? "warn" : "bad"} title=${title} role="alert">
    ${problem.detail} <span class="code">${problem.code}</span>
    ${at ? html` The data shown is stale, as of ${clock(at)}.` : null}
    ${problem.isTransient ? " The console retries automatically." : null}
    ${reload ? html` <button class="link" onClick=${reload}>Try now</button>` : null}
  <//>`;
}

export function Loading({ what }) {
  return html`<p class="loading" role="status">Loading ${what}…</p>`;
}

export function Empty({ title, children }) {
  return html`<div class="empty"><p class="empty-title">${title}</p>${children ? html`<p>${children}</p>` : null}</div>`;
}

// `columns`: [{label, kind}], kind "number" or "wide"; `rows`: [{id, cells}]. The roles are explicit because a narrow
// page lays out rows as blocks, and browsers then drop the roles of a table.
export function Table({ caption, columns, rows, empty }) {
  if (rows.length === 0) return empty;
  return html`<table role="table" aria-label=${caption}>
    <thead role="rowgroup"><tr role="row">${columns.map((column) => html`<th role="columnheader" scope="col" class=${column.kind ?? ""}>${column.label}</th>`)}</tr></thead>
    <tbody role="rowgroup">${rows.map(
      (row) => html`<tr role="row" key=${row.id} class=${row.tone ?? ""}>${row.cells.map(
        (cell, index) => html`<td role="cell" class=${columns[index].kind ?? ""} data-label=${columns[index].label}><div>${cell}</div></td>`,
      )}</tr>`,
    )}</tbody>
  </table>`;
}

// Links to other pages: `address({cursor, page})` returns the address of a page, `next` is the cursor of the next one.
export function Pages({ page, next, address }) {
  if (!next && page <= 1) return null;
  return html`<nav class="pages" aria-label="Pages">
    ${page > 1 ? html`<a href=${address({})}>First page</a><button class="small" onClick=${() => history.back()}>Previous page</button>` : null}
    <span>Page ${page}</span>
    ${next ? html`<a class="button small" href=${address({ cursor: next, page: page + 1 })}>Next page</a>` : null}
  </nav>`;
}

export function Facts({ of }) {
  return html`<dl class="facts">${of
    .filter((fact) => fact !== null)
    .map(([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value === null || value === undefined || value === "" ? NONE : value}</dd></div>`)}</dl>`;
}

export function Copy({ text, what }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } catch {
      // The clipboard is not available on this page (no https). The text can still be selected.
    }
  };
  return html`<button class="small quiet" onClick=${copy} aria-label="Copy ${what}">${done ? "Copied" : "Copy"}</button>`;
}

// Renders the component again every `everyS` seconds, so that ages stay right.
export function useTick(everyS) {
  const [, render] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => render((turn) => (turn + 1) % 1_000_000), everyS * 1000);
    return () => clearInterval(timer);
  }, [everyS]);
}
