// The current state, and what needs attention first.

import { html, useState } from "../vendor/htm-preact.js";
import { clock, count, countOf, duration, instancesText, NONE, rate, warningsOf } from "../lib/format.js";
import { ratesOfInstance, useLive } from "../lib/live.js";
import { to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ActDialog } from "../parts/act.js";
import { Chart } from "../parts/chart.js";
import { Age, AsOf, Badge, Empty, Heading, Loading, Panel, Table } from "../parts/common.js";

const ENDS = [
  { name: "commits", label: "commits", line: "line-1" },
  { name: "rollbacks", label: "rollbacks", line: "line-2" },
];
const CHECKS = [
  { name: "checks_commit", label: "commit", line: "line-1" },
  { name: "checks_rollback", label: "rollback", line: "line-2" },
  { name: "checks_unknown", label: "unknown", line: "line-3" },
  { name: "checks_none", label: "no verdict", line: "line-4" },
];
const GROUPS_SHOWN = 10;

export function Overview() {
  const { data, rates, status, ring } = useLive();
  const [acting, setActing] = useState(null);
  if (!data) return html`<${Heading} title="Overview" /><${Loading} what="figures" />`;
  const { totals } = data;
  const stale = status === "live" ? "" : "stale";
  return html`
    <${Heading} title="Overview"><${AsOf} /><//>
    <div class="tiles ${stale}">
      <${Tile} label="Pending" value=${count(totals.pending)} href=${to("transactions", null, { state: "prepared" })} detail="prepared, not ended" />
      <${Tile} label="Parked" value=${count(totals.parked)} href=${to("transactions", null, { state: "parked" })} tone=${totals.parked > 0 ? "warn" : ""} detail=${totals.parked > 0 ? "waiting for an operator" : "none to decide"} />
      <${Tile} label="Oldest pending" value=${totals.pending === 0 ? NONE : duration(Math.round(totals.oldest_pending_s))} detail="since its prepare" />
      <${Tile} label="Prepares" value=${rate(rates.prepares)} detail="per second" />
      <${Tile} label="Ends" value=${rate(rates.commits + rates.rollbacks)} detail="per second" />
      <${Tile} label="Being ended" value=${count(totals.resolving)} detail="in the lane" />
    </div>
    <${Attention} data=${data} onResume=${(group, parked) => setActing({ group, parked })} />
    <div class="columns ${stale}">
      <${Panel} title="Ends"><${Chart} title="Ends per second" ring=${ring} series=${ENDS} /><${Ends} /><//>
      <${Panel} title="Checks"><${Chart} title="Answers per second" ring=${ring} series=${CHECKS} /><${Checks} /><//>
    </div>
    <div class="columns ${stale}">
      <${Panel} title="Groups" side=${html`<a href=${to("groups")}>All groups</a>`}><${BusiestGroups} groups=${data.groups} leftOut=${data.groups_left_out} /><//>
      <${Panel} title="Instances"><${Instances} instances=${data.instances} /><//>
    </div>
    ${data.shards.length > 0 ? html`<${Panel} title="Shards" tone=${stale}><${Shards} shards=${data.shards} /><//>` : null}
    ${acting
      ? html`<${ActDialog} action="resume" target=${{ filter: { state: "parked", group: acting.group } }} description="all parked of ${acting.group}" onClose=${() => setActing(null)} />`
      : null}`;
}

function Tile({ label, value, detail, href, tone = "" }) {
  const content = html`<span class="tile-label">${label}</span><span class="tile-value">${value}</span><span class="tile-detail">${detail}</span>`;
  return href ? html`<a class="tile ${tone ? `tone-${tone}` : ""}" href=${href}>${content}</a>` : html`<div class="tile">${content}</div>`;
}

// One line for each problem that does not resolve itself, with its evidence and a link to act on it.
function Attention({ data, onResume }) {
  const mayResume = callerKind() === null || callerKind() === "operator";
  const items = warningsOf(data).map((warning) => ({
    id: warning.id,
    tone: "bad",
    word: "unsafe",
    text: html`<span>${warning.check}, ${instancesText(warning)}</span><span class="evidence">${warning.detail}</span>`,
  }));
  for (const group of data.groups) {
    const broken = group.endpoints.filter((endpoint) => !endpoint.well);
    if (group.parked > 0) {
      items.push({
        id: `parked-${group.group}`,
        tone: "warn",
        word: "parked",
        text: html`<a href=${to("transactions", null, { state: "parked", group: group.group })}>${countOf(group.parked, "transaction")} of ${group.group}</a>${evidence(broken)}`,
        act: mayResume ? html`<button class="small" onClick=${() => onResume(group.group, group.parked)}>Resume…</button>` : null,
      });
    } else if (group.breaker === "open" || broken.length > 0) {
      items.push({
        id: `broken-${group.group}`,
        tone: "bad",
        word: group.breaker === "open" ? "breaker open" : "broken",
        text: html`<a href=${to("groups", group.group)}>${group.group}</a>${evidence(broken)}`,
      });
    }
  }
  for (const topic of data.failures.topics) {
    items.push({ id: `topic-${topic.topic}`, tone: "bad", word: "not written", text: html`<a href=${to("failures")}>topic ${topic.topic}</a><span class="evidence">${topic.detail}</span>` });
  }
  const bad = data.failures.quarantined.filter((entry) => entry.error_code !== null);
  const { refused } = data.failures;
  if (refused.length > 0 || bad.length > 0) {
    const held = [refused.length > 0 ? `${countOf(refused.length, "end")} refused` : "", bad.length > 0 ? `${countOf(bad.length, "write")} in quarantine` : ""].filter(Boolean).join(", ");
    items.push({ id: "held", tone: "bad", word: "held back", text: html`<a href=${to("failures")}>${held}</a><span class="evidence">${[...refused, ...bad][0].detail}</span>` });
  }
  if (items.length === 0) {
    return html`<${Panel} title="Needs attention" tone="quiet"><p class="calm"><${Badge} of="nothing" tone="good" /> Nothing is parked, every endpoint that was asked is healthy${callerKind() === "group" ? "" : ", every topic can be written"}.</p><//>`;
  }
  return html`<${Panel} title="Needs attention" side=${html`<span class="hint">${countOf(items.length, "item")}</span>`}>
    <ul class="attention">${items.slice(0, 20).map((item) => html`<li key=${item.id}><${Badge} of=${item.word} tone=${item.tone} /><div>${item.text}</div>${item.act ?? null}</li>`)}</ul>
    ${items.length > 20 ? html`<p class="hint">and ${count(items.length - 20)} more, in <a href=${to("groups")}>Groups</a> and <a href=${to("failures")}>Failures</a></p>` : null}
  <//>`;
}

function evidence(broken) {
  if (broken.length === 0) return null;
  const [first] = broken;
  return html`<span class="evidence">${first.host}: ${answerText(first)}, <${Age} at=${first.at} /> ago</span>`;
}

// Those that ever ended; for a group, whose statistics lack them, those since the start.
function Ends() {
  const { totals, counted } = useLive().data;
  const rows = (commits, rollbacks) => [["commit", "commits", commits], ["rollback", "rollbacks", rollbacks]];
  if (callerKind() === "group") {
    return html`<${Totals} caption="Ends by outcome" label="Outcome" rows=${rows(counted.commits, counted.rollbacks)} empty="No transaction has ended since the instances started." />`;
  }
  return html`<${Totals} caption="Ends by outcome" label="Outcome" ever="Ever" rows=${rows(sum(totals.committed), sum(totals.rolled_back))} empty="No transaction has ended yet." />${
    totals.counted_since ? html`<p class="hint">Through every restart, since ${clock(totals.counted_since)}. ${causes("Committed", totals.committed)}${causes("Rolled back", totals.rolled_back)}</p>` : null}`;
}

function sum(byCause) {
  return Object.values(byCause).reduce((left, right) => left + right, 0);
}

function causes(word, byCause) {
  return Object.entries(byCause).sort().map(([cause, number], index) => html`${index === 0 ? `${word} by ` : ", "}<span class="nowrap">${cause} ${count(number)}</span>`).concat(sum(byCause) ? ". " : "");
}

function Checks() {
  const { counted } = useLive().data;
  const rows = ["commit", "rollback", "unknown", "none"].map((verdict) => [verdict, `checks_${verdict}`, counted[`checks_${verdict}`]]);
  return html`<${Totals} caption="Checks by verdict" label="Verdict" rows=${rows} empty="No check has been sent since the instances started." />`;
}

// `rows`: [[word, name of the rate, total]]
function Totals({ caption, label, ever = "Since the start", rows, empty }) {
  const { rates } = useLive();
  return html`<${Table} caption=${caption} columns=${[{ label }, { label: "Per second", kind: "number" }, { label: ever, kind: "number" }]}
    rows=${rows.filter(([, , total]) => total > 0).map(([word, name, total]) => ({ id: name, cells: [html`<${Badge} of=${word}>${word === "none" ? "no verdict" : word}<//>`, rate(rates[name]), count(total)] }))}
    empty=${html`<p class="hint">${empty}</p>`} />`;
}

function BusiestGroups({ groups, leftOut }) {
  const busiest = [...groups].sort((left, right) => right.parked - left.parked || right.pending - left.pending || (left.group < right.group ? -1 : 1)).slice(0, GROUPS_SHOWN);
  const others = groups.length - busiest.length + leftOut;
  return html`${others > 0 ? html`<p class="hint">The ${busiest.length} groups with the most parked and pending transactions. There are ${countOf(others, "other group", "other groups")}.</p>` : null}<${Table} caption="Groups with the most parked and pending transactions" columns=${[{ label: "Group" }, { label: "Pending", kind: "number" }, { label: "Parked", kind: "number" }, { label: "Endpoints" }]}
    rows=${busiest.map((group) => ({ id: group.group, cells: [html`<a href=${to("groups", group.group)}>${group.group}</a>`, count(group.pending), count(group.parked), html`<${Health} group=${group} />`] }))}
    empty=${html`<${Empty} title="No group yet.">A service registers itself with <code>PATCH /v1/groups/{name}</code>.<//>`} />`;
}

// The answer of an endpoint, without its host, which is shown next to it.
export function answerText(endpoint) {
  const text = (endpoint.well ? null : endpoint.detail) ?? (endpoint.status === null ? "" : `HTTP ${endpoint.status}`);
  const host = `${endpoint.host.replace(/^[a-z]+:\/\//, "")}: `;
  return text.startsWith(host) ? text.slice(host.length) : text;
}

export function Health({ group }) {
  if (group.breaker === "open") return html`<${Badge} of="breaker open" tone="bad" />`;
  if (group.endpoints.length === 0) return html`<span class="hint">not asked yet</span>`;
  const broken = group.endpoints.filter((endpoint) => !endpoint.well).length;
  if (broken === 0) return html`<${Badge} of="healthy" tone="good" />`;
  return html`<${Badge} of="broken" tone="bad">${broken === group.endpoints.length ? "broken" : `${broken} of ${group.endpoints.length} broken`}<//>`;
}

function Instances({ instances }) {
  return html`<${Table} caption="Instances" columns=${[{ label: "Instance" }, { label: "Shards" }, { label: "Ends/s", kind: "number" }, { label: "Commit", kind: "number" }, { label: "Lane" }]}
    rows=${instances.map((instance) => [instance, ratesOfInstance(instance)]).map(([instance, rates]) => ({
      id: instance.url || "here",
      cells: [
        html`<span class="mono">${instance.url || "this instance"}</span>${instance.asked ? html` <span class="hint">serves this page</span>` : null}<div class="hint">since ${clock(instance.since)}</div>`,
        instance.shards.length === 0 ? NONE : html`<span class="nowrap" title=${instance.shards.join(", ")}>${countOf(instance.shards.length, "shard")}</span>`,
        rate(rates.lane_ends),
        rates.lane_commits > 0 ? duration(rates.lane_s / rates.lane_commits) : NONE,
        instance.last_failure ? html`<${Badge} of="failed" tone="warn">${countOf(instance.counted.lane_failures, "failure")}<//><div class="hint">${instance.last_failure.reason}, <${Age} at=${instance.last_failure.at} /> ago</div>` : html`<${Badge} of="healthy" tone="good" />`,
      ],
    }))}
    empty=${html`<p class="hint">Your key shows only its own group.</p>`} />`;
}

function Shards({ shards }) {
  return html`<ol class="shards">${shards.map((shard) => {
    const away = shard.pending === null;
    return html`<li key=${shard.shard} class=${away ? "away" : ""}>
      <b>${shard.shard}</b> ${away ? html`<${Badge} of="away" tone="bad">not available<//>` : html`<span>${countOf(shard.pending, "pending", "pending")}${shard.parked ? `, ${count(shard.parked)} parked` : ""}</span>`}
      <span class="hint owner">${shard.instance || (away ? "no known owner" : "this instance")}</span>
      ${shard.strays ? html`<span class="hint">${countOf(shard.strays, "stray")}</span>` : null}
    </li>`;
  })}</ol>`;
}
