// How it stands now, and what somebody should look at first.

import { html, useState } from "../vendor/htm-preact.js";
import { clock, count, duration, many, NONE, rate } from "../lib/format.js";
import { useLive } from "../lib/live.js";
import { to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ActDialog } from "../parts/act.js";
import { Chart } from "../parts/chart.js";
import { Age, AsOf, Badge, Empty, Heading, Loading, Panel, Table } from "../parts/common.js";

const ENDS = [
  { name: "commit", label: "commits", line: "line-1" },
  { name: "rollback", label: "rollbacks", line: "line-2" },
];
const CHECKS = [
  { name: "check_commit", label: "commit", line: "line-1" },
  { name: "check_rollback", label: "rollback", line: "line-2" },
  { name: "check_unknown", label: "unknown", line: "line-3" },
  { name: "check_none", label: "no verdict", line: "line-4" },
];
const GROUPS_SHOWN = 10;

export function Overview() {
  const { data, status, ring } = useLive();
  const [acting, setActing] = useState(null);
  if (!data) return html`<${Heading} title="Overview" /><${Loading} what="figures" />`;
  const { totals } = data;
  const stale = status === "live" ? "" : "stale";
  return html`
    <${Heading} title="Overview"><${AsOf} /><//>
    <div class="tiles ${stale}">
      <${Tile} label="Pending" value=${count(totals.pending)} href=${to("transactions", null, { state: "prepared" })} detail="prepared, not ended" />
      <${Tile} label="Parked" value=${count(totals.parked)} href=${to("transactions", null, { state: "parked" })} tone=${totals.parked > 0 ? "warn" : ""} detail=${totals.parked > 0 ? "they wait for you" : "none waits for you"} />
      <${Tile} label="Oldest pending" value=${totals.pending === 0 ? NONE : duration(Math.round(totals.oldest_pending_s))} detail="since it was prepared" />
      <${Tile} label="Prepares" value=${rate(totals.prepares_per_s)} detail="a second" />
      <${Tile} label="Ends" value=${rate(totals.ends_per_s)} detail="a second" />
      <${Tile} label="Being ended" value=${count(totals.resolving)} detail="in the lane" />
    </div>
    <${Attention} data=${data} onResume=${(group, parked) => setActing({ group, parked })} />
    <div class="columns ${stale}">
      <${Panel} title="Ends"><${Chart} title="Ends a second" ring=${ring} series=${ENDS} /><${EndCauses} ends=${data.ends} /><//>
      <${Panel} title="Checks"><${Chart} title="Answers a second" ring=${ring} series=${CHECKS} /><${Verdicts} checks=${data.checks} /><//>
    </div>
    <div class="columns ${stale}">
      <${Panel} title="Groups" side=${html`<a href=${to("groups")}>All groups</a>`}><${BusiestGroups} groups=${data.groups} leftOut=${data.groups_left_out} /><//>
      <${Panel} title="Instances"><${Instances} instances=${data.instances} /><//>
    </div>
    ${data.shards.length > 0 ? html`<${Panel} title="Shards" tone=${stale}><${Shards} shards=${data.shards} /><//>` : null}
    ${acting
      ? html`<${ActDialog} action="resume" target=${{ filter: { state: "parked", group: acting.group } }} said="what is parked in ${acting.group}" onClose=${() => setActing(null)} />`
      : null}`;
}

function Tile({ label, value, detail, href, tone = "" }) {
  const inside = html`<span class="tile-label">${label}</span><span class="tile-value">${value}</span><span class="tile-detail">${detail}</span>`;
  return href ? html`<a class="tile ${tone ? `tone-${tone}` : ""}" href=${href}>${inside}</a>` : html`<div class="tile">${inside}</div>`;
}

// One line for each thing that does not mend itself, with its evidence and where to act.
function Attention({ data, onResume }) {
  const mayResume = callerKind() === null || callerKind() === "operator";
  const items = [];
  for (const group of data.groups) {
    const broken = group.endpoints.filter((endpoint) => !endpoint.well);
    if (group.parked > 0) {
      items.push({
        id: `parked-${group.group}`,
        tone: "warn",
        word: "parked",
        text: html`<a href=${to("transactions", null, { state: "parked", group: group.group })}>${many(group.parked, "transaction")} of ${group.group}</a>${evidence(broken)}`,
        act: mayResume ? html`<button class="small" onClick=${() => onResume(group.group, group.parked)}>Resume…</button>` : null,
      });
    } else if (group.breaker === "open" || broken.length > 0) {
      items.push({
        id: `broken-${group.group}`,
        tone: "bad",
        word: group.breaker === "open" ? "not asked" : "broken",
        text: html`<a href=${to("groups", group.group)}>${group.group}</a>${evidence(broken)}`,
      });
    }
  }
  for (const topic of data.failures.topics) {
    items.push({ id: `topic-${topic.topic}`, tone: "bad", word: "not written", text: html`<a href=${to("failures")}>topic ${topic.topic}</a><span class="evidence">${topic.detail}</span>` });
  }
  const bad = data.failures.quarantined.filter((one) => one.error_code !== null);
  const { refused } = data.failures;
  if (refused.length > 0 || bad.length > 0) {
    const held = [refused.length > 0 ? `${many(refused.length, "end")} refused` : "", bad.length > 0 ? `${many(bad.length, "write")} in quarantine` : ""].filter(Boolean).join(", ");
    items.push({ id: "held", tone: "bad", word: "held back", text: html`<a href=${to("failures")}>${held}</a><span class="evidence">${[...refused, ...bad][0].detail}</span>` });
  }
  if (items.length === 0) {
    return html`<${Panel} title="Needs attention" tone="quiet"><p class="calm"><${Badge} of="nothing" tone="good" /> Nothing is parked, every endpoint that was asked is well${callerKind() === "group" ? "" : ", every topic can be written"}.</p><//>`;
  }
  return html`<${Panel} title="Needs attention" side=${html`<span class="hint">${many(items.length, "item")}</span>`}>
    <ul class="attention">${items.slice(0, 20).map((item) => html`<li key=${item.id}><${Badge} of=${item.word} tone=${item.tone} /><div>${item.text}</div>${item.act ?? null}</li>`)}</ul>
    ${items.length > 20 ? html`<p class="hint">and ${count(items.length - 20)} more, in <a href=${to("groups")}>Groups</a> and <a href=${to("failures")}>Failures</a></p>` : null}
  <//>`;
}

function evidence(broken) {
  if (broken.length === 0) return null;
  const [first] = broken;
  return html`<span class="evidence">${first.host}: ${answerOf(first)}, <${Age} at=${first.at} /> ago</span>`;
}

function EndCauses({ ends }) {
  return html`<${Table} caption="Ends by outcome and cause" columns=${[{ label: "Outcome" }, { label: "By" }, { label: "A second", kind: "number" }, { label: "In all", kind: "number" }]}
    rows=${ends.filter((end) => end.total > 0).map((end) => ({ id: `${end.outcome}-${end.cause}`, cells: [html`<${Badge} of=${end.outcome} />`, end.cause, rate(end.per_s), count(end.total)] }))}
    empty=${html`<p class="hint">Nothing has ended since the instances began.</p>`} />`;
}

function Verdicts({ checks }) {
  return html`<${Table} caption="Checks by verdict" columns=${[{ label: "Verdict" }, { label: "A second", kind: "number" }, { label: "In all", kind: "number" }]}
    rows=${checks.filter((check) => check.total > 0).map((check) => ({ id: check.verdict, cells: [html`<${Badge} of=${check.verdict}>${check.verdict === "none" ? "no verdict" : check.verdict}<//>`, rate(check.per_s), count(check.total)] }))}
    empty=${html`<p class="hint">Nothing has been asked since the instances began.</p>`} />`;
}

function BusiestGroups({ groups, leftOut }) {
  const busiest = [...groups].sort((one, other) => other.parked - one.parked || other.pending - one.pending || (one.group < other.group ? -1 : 1)).slice(0, GROUPS_SHOWN);
  const others = groups.length - busiest.length + leftOut;
  return html`${others > 0 ? html`<p class="hint">The ${busiest.length} with the most that is parked or pending; ${many(others, "other group", "other groups")}.</p>` : null}<${Table} caption="Groups with the most that is parked or pending" columns=${[{ label: "Group" }, { label: "Pending", kind: "number" }, { label: "Parked", kind: "number" }, { label: "Ends/s", kind: "number" }, { label: "Endpoints" }]}
    rows=${busiest.map((group) => ({ id: group.group, cells: [html`<a href=${to("groups", group.group)}>${group.group}</a>`, count(group.pending), count(group.parked), rate(group.ends_per_s), html`<${Health} group=${group} />`] }))}
    empty=${html`<${Empty} title="No group yet.">A service registers itself with <code>PUT /v1/groups/{name}</code>.<//>`} />`;
}

// What an endpoint answered, without its host, which stands beside it.
export function answerOf(endpoint) {
  const said = endpoint.detail ?? (endpoint.status === null ? "" : `HTTP ${endpoint.status}`);
  const host = `${endpoint.host.replace(/^[a-z]+:\/\//, "")}: `;
  return said.startsWith(host) ? said.slice(host.length) : said;
}

export function Health({ group }) {
  if (group.breaker === "open") return html`<${Badge} of="not asked" tone="bad" />`;
  if (group.endpoints.length === 0) return html`<span class="hint">not asked yet</span>`;
  const broken = group.endpoints.filter((endpoint) => !endpoint.well).length;
  if (broken === 0) return html`<${Badge} of="well" tone="good" />`;
  return html`<${Badge} of="broken" tone="bad">${broken === group.endpoints.length ? "broken" : `${broken} of ${group.endpoints.length} broken`}<//>`;
}

function Instances({ instances }) {
  return html`<${Table} caption="Instances" columns=${[{ label: "Instance" }, { label: "Shards" }, { label: "Ends/s", kind: "number" }, { label: "Commit", kind: "number" }, { label: "Lane" }]}
    rows=${instances.map((one) => ({
      id: one.url || "here",
      cells: [
        html`<span class="mono">${one.url || "this instance"}</span>${one.asked ? html` <span class="hint">answers here</span>` : null}<div class="hint">since ${clock(one.since)}</div>`,
        one.shards.length === 0 ? NONE : html`<span class="nowrap" title=${one.shards.join(", ")}>${many(one.shards.length, "shard")}</span>`,
        rate(one.lane?.ends_per_s),
        one.lane?.commit_s ? duration(one.lane.commit_s) : NONE,
        one.lane === null ? NONE : one.lane.last_failure ? html`<${Badge} of="failed" tone="warn">${many(one.lane.failures, "failure")}<//><div class="hint">${one.lane.last_failure.reason}, <${Age} at=${one.lane.last_failure.at} /> ago</div>` : html`<${Badge} of="well" tone="good" />`,
      ],
    }))}
    empty=${html`<p class="hint">Your key shows its own group only.</p>`} />`;
}

function Shards({ shards }) {
  return html`<ol class="shards">${shards.map((one) => {
    const away = one.pending === null;
    return html`<li key=${one.shard} class=${away ? "away" : ""}>
      <b>${one.shard}</b> ${away ? html`<${Badge} of="away" tone="bad" />` : html`<span>${many(one.pending, "pending", "pending")}${one.parked ? `, ${count(one.parked)} parked` : ""}</span>`}
      <span class="hint owner">${one.instance || (away ? "no owner is known" : "this instance")}</span>
      ${one.strays ? html`<span class="hint">${many(one.strays, "stray")}</span>` : null}
    </li>`;
  })}</ol>`;
}
