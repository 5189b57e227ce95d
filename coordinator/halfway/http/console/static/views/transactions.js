// Prepared, parked and recently ended transactions. The filters are in the URL.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { call } from "../lib/api.js";
import { clock } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { go, to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ActButtons, ActDialog, actionsFor } from "../parts/act.js";
import { Age, Badge, Empty, Failure, Heading, Loading, Pages, Table } from "../parts/common.js";

const LIMIT = 50;
const EVERY_S = 5;
const SHARE = 20; // a list is asked for again after so many times what it took: it may be a search through a million
const STATES = ["", "prepared", "parked", "committed", "rolled_back"];
const FILTERS = ["state", "group", "topic", "key", "id", "older_than_s", "younger_than_s", "cause", "error"];
const FINAL_STATES = new Set(["committed", "rolled_back"]);
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
  // They stay selected if they leave the list: else buttons for them would become those for all, under the pointer.
  const [chosen, setChosen] = useState([]);
  const filter = Object.fromEntries(FILTERS.filter((name) => query[name]).map((name) => [name, query[name]]));
  const page = Number(query.page ?? 1);
  const { data, problem, at, loading, reload } = useLoad(
    async (signal) => {
      const begun = performance.now();
      const found = await call("/transactions", { query: { ...filter, cursor: query.cursor, limit: LIMIT }, signal });
      return { ...found, tookS: (performance.now() - begun) / 1000 };
    },
    [filter, query.cursor ?? null],
    { everyS: ({ tookS }) => Math.max(EVERY_S, SHARE * tookS) },
  );
  useEffect(() => setChosen([]), [JSON.stringify([filter, query.cursor])]);
  const actions = actionsOf(filter, data);
  const choose = (id) => setChosen((ids) => (ids.includes(id) ? ids.filter((one) => one !== id) : [...ids, id]));
  const selectable = actions.length > 0 ? data.transactions.filter(({ state }) => !FINAL_STATES.has(state)).map(({ id }) => id) : [];
  const all = selectable.every((id) => chosen.includes(id));
  const act = (action) =>
    setActing(chosen.length > 0 ? { action, target: { ids: chosen }, description: `${chosen.length} selected` } : { action, target: { filter }, description: filterText(filter) });
  const close = () => {
    setActing(null);
    setChosen([]);
    reload();
  };
  return html`
    <${Heading} title="Transactions">
      ${at ? html`<span class="hint">as of ${clock(at)}</span>` : null}
      <button class="small" onClick=${reload} disabled=${loading}>${loading ? "Loading…" : "Refresh"}</button>
    <//>
    <${Filters} filter=${filter} key=${JSON.stringify(filter)} />
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${actions.length > 0
      ? html`<div class="actions">
          ${selectable.length > 0 ? html`<label><input type="checkbox" checked=${all} onChange=${() => setChosen(all ? [] : selectable)} />Select all ${selectable.length} on this page</label>` : null}
          <span>${chosen.length > 0 ? "Selected:" : "All matching:"}</span><${ActButtons} actions=${actions} suffix=${chosen.length > 0 ? ` ${chosen.length} selected` : " all"} onChoose=${act} /></div>`
      : null}
    ${!data && !problem ? html`<${Loading} what="transactions" />` : null}
    ${data ? html`<div class=${problem ? "stale" : ""}><${Rows} transactions=${data.transactions} filtered=${Object.keys(filter).length > 0} page=${page} chosen=${chosen} onChoose=${actions.length > 0 ? choose : null} /></div>` : null}
    ${data ? html`<${Pages} page=${page} next=${data.next} address=${(target) => to("transactions", null, { ...filter, ...target })} />` : null}
    ${acting ? html`<${ActDialog} ...${acting} onClose=${close} />` : null}`;
}

function actionsOf(filter, data) {
  if (callerKind() === "reader" || filter.cause || FINAL_STATES.has(filter.state) || !data || data.transactions.length === 0) return [];
  const all = actionsFor(filter.state);
  return callerKind() === "group" ? all.filter((action) => action === "check") : all;
}

function filterText(filter) {
  const parts = Object.entries(filter).map(([name, value]) => (name.endsWith("_than_s") ? `${name.replace("_than_s", " than")} ${value} s` : `${name} ${value}`));
  return parts.length === 0 ? "everything" : `all with ${parts.join(", ")}`;
}

function Filters({ filter }) {
  const [edited, setEdited] = useState(filter);
  const set = (name) => (event) => setEdited({ ...edited, [name]: event.currentTarget.value });
  const apply = (event) => {
    event?.preventDefault();
    go(to("transactions", null, edited));
  };
  // A selection is applied at once; text is applied with Enter or the button.
  const choose = (name) => (event) => go(to("transactions", null, { ...edited, [name]: event.currentTarget.value }));
  useEffect(() => setEdited(filter), [JSON.stringify(filter)]);
  const text = (name, label, placeholder) =>
    html`<label class="field">${label}<input name=${name} value=${edited[name] ?? ""} placeholder=${placeholder} onInput=${set(name)} autocomplete="off" spellcheck="false" /></label>`;
  const choice = (name, label, options) =>
    html`<label class="field">${label}<select name=${name} value=${edited[name] ?? ""} onChange=${choose(name)}>${options.map(([value, word]) => html`<option key=${value} value=${value} selected=${(edited[name] ?? "") === value}>${word}</option>`)}</select></label>`;
  const more = ["topic", "key", "cause", "error", "older_than_s"].some((name) => filter[name]);
  return html`<form class="filters" role="search" aria-label="Filter transactions" onSubmit=${apply} method="dialog">
    <div class="filter-row">
      ${choice("state", "State", STATES.map((state) => [state, state === "" ? "all" : state.replace("_", " ")]))}
      ${text("group", "Group", "name")}
      ${text("id", "Id", "starts with")}
      <div class="filter-buttons"><button type="submit" class="primary">Filter</button>${Object.keys(filter).length > 0 ? html`<a class="button" href=${to("transactions")}>Clear</a>` : null}</div>
    </div>
    <details open=${more}>
      <summary>More filters</summary>
      <div class="filter-row">
        ${text("topic", "Topic", "name")} ${text("key", "Message key", "the whole key")} ${text("error", "Last error", "a part of it")}
        ${choice("older_than_s", "Age", AGES)} ${choice("cause", "Ended by", CAUSES.map((cause) => [cause, cause === "" ? "any cause" : cause]))}
      </div>
    </details>
  </form>`;
}

const COLUMNS = [{ label: "Transaction", kind: "wide" }, { label: "State" }, { label: "Group" }, { label: "Topics" }, { label: "Age", kind: "number" }, { label: "Checks", kind: "number" }, { label: "Details", kind: "wide" }];

function Rows({ transactions, filtered, page, chosen, onChoose }) {
  const empty = page > 1
    ? html`<${Empty} title="No more transactions.">The transactions of this page have ended or are no longer stored.<//>`
    : filtered
      ? html`<${Empty} title="Nothing matches."><a href=${to("transactions")}>Clear the filters</a>. Transactions that ended long ago are in the audit and in the ledger.<//>`
      : html`<${Empty} title="No transactions.">This list shows prepared, parked and recently ended transactions.<//>`;
  return html`<${Table} caption="Transactions" columns=${COLUMNS} empty=${empty}
    rows=${transactions.map((transaction) => ({
      id: transaction.id,
      cells: [
        html`${onChoose && !FINAL_STATES.has(transaction.state) ? html`<input type="checkbox" aria-label="Select ${transaction.id}" checked=${chosen.includes(transaction.id)} onChange=${() => onChoose(transaction.id)} />` : null}<a class="mono" href=${to("transactions", transaction.id)}>${transaction.id}</a>`,
        html`<${Badge} of=${transaction.state} />`,
        transaction.group,
        transaction.topics.join(", "),
        html`<${Age} at=${transaction.prepared_at} />`,
        transaction.checks,
        html`<${Details} of=${transaction} />`,
      ],
    }))} />`;
}

function Details({ of }) {
  if (of.state === "parked") return html`<span class="long-text">${of.reason ?? "parked"}${of.last_error && !of.reason?.includes(of.last_error) ? html` <span class="hint">${of.last_error}</span>` : null}</span>`;
  if (FINAL_STATES.has(of.state)) return html`<span class="long-text">by ${of.cause ?? "unknown"}${of.remark ? html` <span class="hint">${of.remark}</span>` : null}</span>`;
  return html`<span class="long-text">${of.commit_verdict ? "commit was said; not written yet " : ""}${of.last_error ?? ""}</span>`;
}
