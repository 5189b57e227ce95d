// The producer groups: how checks reach them, and the health of their endpoints.

import { html, useRef } from "../vendor/htm-preact.js";
import { call, Problem } from "../lib/api.js";
import { clock, count, duration, NONE, rate } from "../lib/format.js";
import { ratesBetween, useLive } from "../lib/live.js";
import { useLoad } from "../lib/load.js";
import { to } from "../lib/router.js";
import { Age, Badge, Empty, Facts, Failure, Heading, Loading, Pages, Panel, Table, Time } from "../parts/common.js";
import { answerText, Health } from "./overview.js";

const LIMIT = 100;
const FIGURES_EVERY_S = 2;

export function Groups({ query }) {
  const page = Number(query.page ?? 1);
  const { data, problem, at, reload } = useLoad(
    (signal) => call("/groups", { query: { limit: LIMIT, cursor: query.cursor }, signal }),
    [query.cursor ?? null],
  );
  const live = useLive();
  const figures = new Map((live.data?.groups ?? []).map((group) => [group.group, group]));
  return html`
    <${Heading} title="Groups">${at ? html`<span class="hint">as of ${clock(at)}</span>` : null}<button class="small" onClick=${reload}>Refresh</button><//>
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${!data && !problem ? html`<${Loading} what="groups" />` : null}
    ${data
      ? html`<div class=${problem || live.status === "lost" ? "stale" : ""}><${Table} caption="Groups" columns=${[{ label: "Group", kind: "wide" }, { label: "Checks" }, { label: "Endpoints" }, { label: "Pending", kind: "number" }, { label: "Parked", kind: "number" }, { label: "In check", kind: "number" }, { label: "Topics" }]}
          rows=${data.groups.map((group) => rowOf(group, figures.get(group.group)))}
          empty=${page > 1 ? html`<${Empty} title="No more groups.">The groups of this page have been deleted.<//>` : html`<${Empty} title="No group yet.">A service registers itself with <code>PATCH /v1/groups/{name}</code>.<//>`} /></div>
          ${live.data?.groups_left_out ? html`<p class="hint">The list shows live figures for the ${count(live.data.groups.length)} groups with the most parked and pending transactions. Open any other group to see its figures.</p>` : null}
          <${Pages} page=${page} next=${data.next} address=${(target) => to("groups", null, target)} />`
      : null}`;
}

function rowOf(group, figures) {
  return {
    id: group.group,
    cells: [
      html`<a href=${to("groups", group.group)}>${group.group}</a>`,
      group.check.mode === "pull" ? "fetched" : "sent to URLs",
      figures && group.check.mode === "push" ? html`<${Health} group=${figures} />` : html`<span class="hint">${group.check.mode === "pull" ? "none" : "not asked yet"}</span>`,
      html`<a href=${to("transactions", null, { state: "prepared", group: group.group })}>${count(figures?.pending)}</a>`,
      html`<a href=${to("transactions", null, { state: "parked", group: group.group })}>${count(figures?.parked)}</a>`,
      count(figures?.checks_in_flight),
      group.topics.length > 3 ? `${group.topics.slice(0, 3).join(", ")} and ${group.topics.length - 3} more` : group.topics.join(", "),
    ],
  };
}

export function Group({ name }) {
  const path = `/groups/${encodeURIComponent(name)}`;
  const { data, problem, at, reload } = useLoad((signal) => call(path, { signal }), [path]);
  const last = useRef(null);
  const own = useLoad(async (signal) => {
    const before = last.current;
    last.current = await call("/statistics", { query: { group: name }, signal });
    return { figures: last.current.groups[0] ?? null, rates: ratesBetween(before, last.current) };
  }, [name], { everyS: () => FIGURES_EVERY_S });
  const figures = own.data?.figures ?? null;
  return html`
    <nav class="crumbs" aria-label="Where this is"><a href=${to("groups")}>Groups</a></nav>
    <${Heading} title=${name}>${figures ? html`<${Health} group=${figures} />` : null}<//>
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${!data && !problem ? html`<${Loading} what="the group" />` : null}
    ${data
      ? html`<div class="columns">
          <${Panel} title="Now" tone=${own.problem ? "stale" : ""}>${figures ? html`<${Now} of=${figures} rates=${own.data.rates} />` : html`<p class="hint">There are no figures for this group yet.</p>`}<//>
          <${Panel} title="Policy"><${Policy} of=${data.policy} /><${Limits} of=${data} /><//>
        </div>
        <${Panel} title="Check-back"><${CheckBack} group=${data} figures=${figures} /><//>
        <${Panel} title="Topics that the group may write to"><ul class="chips">${data.topics.map((topic) => html`<li key=${topic} class="mono">${topic}</li>`)}</ul>
          <p class="hint">Registered ${clock(data.created_at)}, changed ${clock(data.updated_at)}</p><//>
        <${Panel} title="Keys"><${Keys} name=${name} /><//>`
      : null}`;
}

function Now({ of, rates }) {
  return html`<${Facts} of=${[
    ["Pending", html`<a href=${to("transactions", null, { state: "prepared", group: of.group })}>${count(of.pending)}</a>`],
    ["Parked", html`<a href=${to("transactions", null, { state: "parked", group: of.group })}>${count(of.parked)}</a>`],
    ["Prepares per second", rate(rates.prepares)],
    ["Ends per second", rate(rates.commits + rates.rollbacks)],
    ["Checks in flight", count(of.checks_in_flight)],
    ["Checks due", count(of.checks_due)],
    ["Circuit breaker", of.breaker === "open" ? html`<${Badge} of="open" /> no checks are sent${of.breaker_until ? html` until <${Time} at=${of.breaker_until} />` : null}` : html`<${Badge} of="closed" />`],
  ]} />`;
}

function Policy({ of }) {
  return html`<${Facts} of=${[
    ["First check after", duration(of.first_check_after_s)],
    ["Check interval", duration(of.check_interval_s)],
    ["Longest interval", duration(of.max_interval_s)],
    ["Maximum checks", count(of.max_checks)],
    ["Maximum age", duration(of.max_age_s)],
    ["Then", of.on_exhausted === "rollback" ? "rolled back" : "parked"],
  ]} />`;
}

function Limits({ of }) {
  const { pending, prepares_per_s: rate, bytes_in_flight: bytes } = of.limits ?? {};
  return html`<${Facts} of=${[
    ["New transactions", of.reject_prepares ? html`<${Badge} of="refused" tone="bad" /> by an operator` : "accepted"],
    ["Own limits", [pending && `${count(pending)} pending`, rate && `${count(rate)} prepares per second`, bytes && `${count(bytes)} bytes in flight`].filter(Boolean).join(", ") || NONE],
  ]} />`;
}

function CheckBack({ group, figures }) {
  if (group.check.mode === "pull") return html`<p>The group fetches its checks: <code>GET /v1/groups/${group.group}/checks</code>.</p>`;
  const endpoints = figures?.endpoints ?? [];
  return html`<ul class="urls">${group.check.urls.map((url) => html`<li key=${url} class="mono">${url}</li>`)}</ul>
    <${Table} caption="Endpoints and their last answers" columns=${[{ label: "Endpoint", kind: "wide" }, { label: "Health" }, { label: "Answer" }, { label: "Duration", kind: "number" }, { label: "When", kind: "number" }]}
      rows=${endpoints.map((endpoint) => ({
        id: endpoint.host,
        cells: [
          html`<span class="mono">${endpoint.host}</span>`,
          endpoint.well ? html`<${Badge} of="healthy" tone="good" />` : html`<${Badge} of="broken" tone="bad" />`,
          html`<span class="long-text">${answerText(endpoint)}</span>`,
          endpoint.duration_s === null ? NONE : duration(endpoint.duration_s),
          html`<${Age} at=${endpoint.at} /> ago`,
        ],
      }))}
      empty=${html`<p class="hint">No check has been sent since the instances started.</p>`} />`;
}

function Keys({ name }) {
  const { data, problem } = useLoad(async (signal) => {
    try {
      return await call("/keys", { query: { name, limit: 100 }, signal });
    } catch (error) {
      if (error instanceof Problem && (error.status === 409 || error.status === 403)) return { keys: null, error };
      throw error;
    }
  }, [name]);
  if (problem) return html`<${Failure} problem=${problem} />`;
  if (!data) return html`<${Loading} what="keys" />`;
  if (data.keys === null) {
    return html`<p class="hint">${data.error.status === 409 ? "Access control is off: no keys are needed." : "Only an operator's key can list keys."}</p>`;
  }
  const own = data.keys.filter((key) => key.kind === "group" && key.name === name);
  return html`<${Table} caption="Keys of the group" columns=${[{ label: "Public id", kind: "wide" }, { label: "Kind" }, { label: "Created" }, { label: "Expires" }]}
    rows=${own.map((key) => ({ id: key.id, cells: [html`<span class="mono">${key.id}</span>`, key.certificate ? html`certificate <span class="mono">${key.certificate}</span>` : "key", html`<${Time} at=${key.created_at} />`, key.expires_at ? html`<${Time} at=${key.expires_at} />` : "never"] }))}
    empty=${html`<p class="hint">The group has no key. An operator creates one with <code>halfway keys create</code>.</p>`} />`;
}
