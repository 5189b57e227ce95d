// The producer groups: how they are asked, and how well that goes.

import { html } from "../vendor/htm-preact.js";
import { call, Problem } from "../lib/api.js";
import { clock, count, duration, NONE, rate } from "../lib/format.js";
import { useLive } from "../lib/live.js";
import { useLoad } from "../lib/load.js";
import { to } from "../lib/router.js";
import { Age, Badge, Empty, Facts, Failure, Heading, Loading, Pages, Panel, Table, Time } from "../parts/common.js";
import { answerOf, Health } from "./overview.js";

const LIMIT = 100;
const FIGURES_EVERY_S = 2;

export function Groups({ query }) {
  const page = Number(query.page ?? 1);
  const { data, problem, at, reload } = useLoad(
    (signal) => call("/groups", { query: { limit: LIMIT, cursor: query.cursor }, signal }),
    [query.cursor ?? null],
  );
  const live = useLive();
  const figures = new Map((live.data?.groups ?? []).map((one) => [one.group, one]));
  return html`
    <${Heading} title="Groups">${at ? html`<span class="hint">as of ${clock(at)}</span>` : null}<button class="small" onClick=${reload}>Refresh</button><//>
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${!data && !problem ? html`<${Loading} what="groups" />` : null}
    ${data
      ? html`<div class=${problem || live.status === "lost" ? "stale" : ""}><${Table} caption="Groups" columns=${[{ label: "Group", kind: "wide" }, { label: "Asked" }, { label: "Endpoints" }, { label: "Pending", kind: "number" }, { label: "Parked", kind: "number" }, { label: "In check", kind: "number" }, { label: "Topics" }]}
          rows=${data.groups.map((group) => rowOf(group, figures.get(group.group)))}
          empty=${page > 1 ? html`<${Empty} title="Nothing more.">What was here has been deleted since.<//>` : html`<${Empty} title="No group yet.">A service registers itself with <code>PUT /v1/groups/{name}</code>.<//>`} /></div>
          ${live.data?.groups_left_out ? html`<p class="hint">Figures come for the ${count(live.data.groups.length)} groups with the most that is parked or pending; of others open the group.</p>` : null}
          <${Pages} page=${page} next=${data.next} address=${(place) => to("groups", null, place)} />`
      : null}`;
}

function rowOf(group, figures) {
  return {
    id: group.group,
    cells: [
      html`<a href=${to("groups", group.group)}>${group.group}</a>`,
      group.check.mode === "pull" ? "fetches its checks" : "by URL",
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
  const live = useLive();
  const leftOut = live.data !== null && live.data.groups_left_out > 0 && !live.data.groups.some((one) => one.group === name);
  // Live figures are of the groups with the most to look at; those of another one are asked for.
  const own = useLoad(async (signal) => (leftOut ? await call("/statistics", { query: { group: name }, signal }) : null), [name, leftOut], {
    everyS: () => (leftOut ? FIGURES_EVERY_S : null),
  });
  const figures = (leftOut ? own.data : live.data)?.groups.find((one) => one.group === name) ?? null;
  return html`
    <nav class="crumbs" aria-label="Where this is"><a href=${to("groups")}>Groups</a></nav>
    <${Heading} title=${name}>${figures ? html`<${Health} group=${figures} />` : null}<//>
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${!data && !problem ? html`<${Loading} what="the group" />` : null}
    ${data
      ? html`<div class="columns">
          <${Panel} title="Now" tone=${live.status === "lost" ? "stale" : ""}>${figures ? html`<${Now} of=${figures} />` : html`<p class="hint">There are no figures of it yet.</p>`}<//>
          <${Panel} title="Policy"><${Policy} of=${data.policy} /><//>
        </div>
        <${Panel} title="How it is asked"><${Asked} group=${data} figures=${figures} /><//>
        <${Panel} title="Topics that it may write to"><ul class="chips">${data.topics.map((topic) => html`<li key=${topic} class="mono">${topic}</li>`)}</ul>
          <p class="hint">Registered ${clock(data.created_at)}, changed ${clock(data.updated_at)}</p><//>
        <${Panel} title="Keys"><${Keys} name=${name} /><//>`
      : null}`;
}

function Now({ of }) {
  return html`<${Facts} of=${[
    ["Pending", html`<a href=${to("transactions", null, { state: "prepared", group: of.group })}>${count(of.pending)}</a>`],
    ["Parked", html`<a href=${to("transactions", null, { state: "parked", group: of.group })}>${count(of.parked)}</a>`],
    ["Prepares a second", rate(of.prepares_per_s)],
    ["Ends a second", rate(of.ends_per_s)],
    ["Checks in flight", count(of.checks_in_flight)],
    ["Checks due", count(of.checks_due)],
    ["Breaker", of.breaker === "open" ? html`<${Badge} of="open" /> not asked${of.breaker_until ? html` until <${Time} at=${of.breaker_until} />` : null}` : html`<${Badge} of="closed" />`],
  ]} />`;
}

function Policy({ of }) {
  return html`<${Facts} of=${[
    ["First check after", duration(of.first_check_after_s)],
    ["Then every", duration(of.check_interval_s)],
    ["At most every", duration(of.max_interval_s)],
    ["Checks at most", count(of.max_checks)],
    ["Oldest", duration(of.max_age_s)],
    ["Then", of.on_exhausted === "rollback" ? "it is rolled back" : "it is parked"],
  ]} />`;
}

function Asked({ group, figures }) {
  if (group.check.mode === "pull") return html`<p>It fetches its checks: <code>GET /v1/groups/${group.group}/checks</code>.</p>`;
  const endpoints = figures?.endpoints ?? [];
  return html`<ul class="urls">${group.check.urls.map((url) => html`<li key=${url} class="mono">${url}</li>`)}</ul>
    <${Table} caption="Endpoints as they answered last" columns=${[{ label: "Endpoint", kind: "wide" }, { label: "Health" }, { label: "Answer" }, { label: "Took", kind: "number" }, { label: "When", kind: "number" }]}
      rows=${endpoints.map((one) => ({
        id: one.host,
        cells: [
          html`<span class="mono">${one.host}</span>`,
          one.well ? html`<${Badge} of="well" tone="good" />` : html`<${Badge} of="broken" tone="bad" />`,
          html`${one.status === null ? null : `HTTP ${one.status} `}<span class="known">${one.detail === null ? "" : answerOf(one)}</span>`,
          one.duration_s === null ? NONE : duration(one.duration_s),
          html`<${Age} at=${one.at} /> ago`,
        ],
      }))}
      empty=${html`<p class="hint">It has not been asked since the instances began.</p>`} />`;
}

function Keys({ name }) {
  const { data, problem } = useLoad(async (signal) => {
    try {
      return await call("/keys", { query: { name, limit: 100 }, signal });
    } catch (error) {
      if (error instanceof Problem && (error.status === 409 || error.status === 403)) return { keys: null, why: error };
      throw error;
    }
  }, [name]);
  if (problem) return html`<${Failure} problem=${problem} />`;
  if (!data) return html`<${Loading} what="keys" />`;
  if (data.keys === null) {
    return html`<p class="hint">${data.why.status === 409 ? "Access control is off: nobody is asked for a key." : "Only an operator's key shows whose keys there are."}</p>`;
  }
  const own = data.keys.filter((key) => key.kind === "group" && key.name === name);
  return html`<${Table} caption="Keys of the group" columns=${[{ label: "Public id", kind: "wide" }, { label: "Shown as" }, { label: "Made" }, { label: "Expires" }]}
    rows=${own.map((key) => ({ id: key.id, cells: [html`<span class="mono">${key.id}</span>`, key.certificate ? html`certificate <span class="mono">${key.certificate}</span>` : "key", html`<${Time} at=${key.created_at} />`, key.expires_at ? html`<${Time} at=${key.expires_at} />` : "never"] }))}
    empty=${html`<p class="hint">It has no key: an operator makes one with <code>halfway keys create</code>.</p>`} />`;
}
