// What is pending, parked and lately ended; the filters are in the address.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { call } from "../lib/api.js";
import { clock } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { go, to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ActButtons, ActDialog, actionsFor } from "../parts/act.js";
import { Age, Badge, Empty, Failure, Heading, Loading, Pages, Table } from "../parts/common.js";

const LIMIT = 50;
const STATES = ["", "prepared", "parked", "committed", "rolled_back"];
const FILTERS = ["state", "group", "topic", "key", "id", "older_than_s", "younger_than_s", "cause", "error"];
const OF_JOBS = FILTERS.filter((name) => name !== "cause");
const ENDED = new Set(["committed", "rolled_back"]);
const AGES = [
  ["", "any age"],
  ["60", "1 minute and older"],
  ["600", "10 minutes and older"],
  ["3600", "1 hour and older"],
  ["21600", "6 hours and older"],
  ["86400", "1 day and older"],
];
const CAUSES = ["", "producer", "check", "operator", "policy"];

export function Transactions({ query }) {
  const [acting, setActing] = useState(null);
  const filter = Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));
  const page = Number(query.page ?? 1);
  const { data, problem, at, loading, reload } = useLoad(
    (signal) => call("/transactions", { query: { ...filter, cursor: query.cursor, limit: LIMIT }, signal }),
    [filter, query.cursor ?? null],
  );
  const actions = actionsOf(filter, data);
  return html`
    <${Heading} title="Transactions">
      ${at ? html`<span class="hint">as of ${clock(at)}</span>` : null}
      <button class="small" onClick=${reload} disabled=${loading}>${loading ? "Loading…" : "Refresh"}</button>
    <//>
    <${Filters} filter=${filter} key=${JSON.stringify(filter)} />
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${actions.length > 0
      ? html`<div class="actions"><span>All that match:</span><${ActButtons} actions=${actions} suffix=" all" onChoose=${setActing} /></div>`
      : null}
    ${!data && !problem ? html`<${Loading} what="transactions" />` : null}
    ${data ? html`<div class=${problem ? "stale" : ""}><${Rows} transactions=${data.transactions} filtered=${Object.keys(filter).length > 0} page=${page} /></div>` : null}
    ${data ? html`<${Pages} page=${page} next=${data.next} address=${(place) => to("transactions", null, { ...filter, ...place })} />` : null}
    ${acting ? html`<${ActDialog} action=${acting} target=${{ filter: jobFilter(filter) }} said=${said(filter)} onClose=${() => setActing(null)} />` : null}`;
}

function actionsOf(filter, data) {
  if (callerKind() === "reader" || filter.cause || ENDED.has(filter.state) || !data || data.transactions.length === 0) return [];
  const all = actionsFor(filter.state);
  return callerKind() === "group" ? all.filter((action) => action === "check") : all;
}

function jobFilter(filter) {
  const wanted = Object.fromEntries(OF_JOBS.filter((name) => filter[name]).map((name) => [name, filter[name]]));
  for (const name of ["older_than_s", "younger_than_s"]) if (wanted[name]) wanted[name] = Number(wanted[name]);
  return wanted;
}

function said(filter) {
  const parts = Object.entries(jobFilter(filter)).map(([name, value]) => `${name.replace(/_than_s$/, " than, seconds")} ${value}`);
  return parts.length === 0 ? "everything" : `all with ${parts.join(", ")}`;
}

function Filters({ filter }) {
  const [given, setGiven] = useState(filter);
  const set = (name) => (event) => setGiven({ ...given, [name]: event.currentTarget.value });
  const apply = (event) => {
    event?.preventDefault();
    go(to("transactions", null, given));
  };
  // A choice is applied at once, text with Enter or the button.
  const choose = (name) => (event) => go(to("transactions", null, { ...given, [name]: event.currentTarget.value }));
  useEffect(() => setGiven(filter), [JSON.stringify(filter)]);
  const text = (name, label, placeholder) =>
    html`<label class="field">${label}<input name=${name} value=${given[name] ?? ""} placeholder=${placeholder} onInput=${set(name)} autocomplete="off" spellcheck="false" /></label>`;
  const choice = (name, label, options) =>
    html`<label class="field">${label}<select name=${name} value=${given[name] ?? ""} onChange=${choose(name)}>${options.map(([value, word]) => html`<option key=${value} value=${value} selected=${(given[name] ?? "") === value}>${word}</option>`)}</select></label>`;
  const more = ["topic", "key", "cause", "error", "older_than_s"].some((name) => filter[name]);
  return html`<form class="filters" role="search" aria-label="Filter transactions" onSubmit=${apply} method="dialog">
    <div class="filter-row">
      ${choice("state", "State", STATES.map((state) => [state, state === "" ? "all" : state.replace("_", " ")]))}
      ${text("group", "Group", "name")}
      ${text("id", "Id", "begins with")}
      <div class="filter-buttons"><button type="submit" class="primary">Filter</button>${Object.keys(filter).length > 0 ? html`<a class="button" href=${to("transactions")}>Clear</a>` : null}</div>
    </div>
    <details open=${more}>
      <summary>More filters</summary>
      <div class="filter-row">
        ${text("topic", "Topic", "name")} ${text("key", "Message key", "the whole key")} ${text("error", "Last error", "a part of it")}
        ${choice("older_than_s", "Age", AGES)} ${choice("cause", "Ended by", CAUSES.map((cause) => [cause, cause === "" ? "anybody" : cause]))}
      </div>
    </details>
  </form>`;
}

const COLUMNS = [{ label: "Transaction", kind: "wide" }, { label: "State" }, { label: "Group" }, { label: "Topics" }, { label: "Age", kind: "number" }, { label: "Checks", kind: "number" }, { label: "Known", kind: "wide" }];

function Rows({ transactions, filtered, page }) {
  const empty = page > 1
    ? html`<${Empty} title="Nothing more.">What was here has ended or been forgotten since.<//>`
    : filtered
      ? html`<${Empty} title="Nothing matches."><a href=${to("transactions")}>Clear the filters</a>, or look at the audit and the ledger for what ended long ago.<//>`
      : html`<${Empty} title="No transactions.">What is prepared, parked or lately ended is listed here.<//>`;
  return html`<${Table} caption="Transactions" columns=${COLUMNS} empty=${empty}
    rows=${transactions.map((one) => ({
      id: one.id,
      cells: [
        html`<a class="mono" href=${to("transactions", one.id)}>${one.id}</a>`,
        html`<${Badge} of=${one.state} />`,
        one.group,
        one.topics.join(", "),
        html`<${Age} at=${one.prepared_at} />`,
        one.checks,
        html`<${Known} of=${one} />`,
      ],
    }))} />`;
}

function Known({ of }) {
  if (of.state === "parked") return html`<span class="known">${of.reason ?? "parked"}${of.last_error && of.last_error !== of.reason ? html` <span class="hint">${of.last_error}</span>` : null}</span>`;
  if (ENDED.has(of.state)) return html`<span class="known">by ${of.cause ?? "somebody"}${of.remark ? html` <span class="hint">${of.remark}</span>` : null}</span>`;
  return html`<span class="known">${of.commit_verdict ? "a check said commit; not written yet " : ""}${of.last_error ?? ""}</span>`;
}
