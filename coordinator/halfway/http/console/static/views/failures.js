// Topics that cannot be written, ends that are refused because of them, the lane's quarantine, and skipped records.

import { html } from "../vendor/htm-preact.js";
import { bytes, count } from "../lib/format.js";
import { useLive } from "../lib/live.js";
import { to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { Age, AsOf, Badge, Empty, Heading, Loading, Panel, Table, Time } from "../parts/common.js";

const QUARANTINE = {
  suspected: ["tried separately", "info", "a Kafka transaction with it failed: it is written separately until a write succeeds"],
  alone: ["tried alone", "warn", "it failed together with others: it is written in a Kafka transaction of its own"],
  refused: ["refused", "bad", "it was tried separately, and failed"],
  watched: ["watched", "info", "the topic can be written, but a message could not"],
};

export function Failures() {
  const { data, status } = useLive();
  if (!data) return html`<${Heading} title="Failures" /><${Loading} what="figures" />`;
  if (callerKind() === "group") return html`<${Heading} title="Failures" /><${Empty} title="Your key does not show failures.">They concern all groups, so only operators and readers see them. If a transaction of your group could not be written, its last error says why.<//>`;
  const { topics, refused, quarantined, skipped } = data.failures;
  const tone = status === "live" ? "" : "stale";
  return html`
    <${Heading} title="Failures"><${AsOf} /><span class="hint">counted since the instances started</span><//>
    <${Panel} title="Topics that cannot be written" tone=${tone}>
      <${Table} caption="Topics that cannot be written" columns=${[{ label: "Topic", kind: "wide" }, { label: "Why", kind: "wide" }, { label: "Refused", kind: "number" }, { label: "Since" }, { label: "Last" }, { label: "Not tried before" }]}
        rows=${topics.map((topic, index) => ({
          id: index,
          cells: [html`<a class="mono" href=${to("transactions", null, { topic: topic.topic })}>${topic.topic}</a>`, html`<${Reason} of=${topic} />`, count(topic.refused), html`<${Time} at=${topic.first_at} />`, html`<${Age} at=${topic.last_at} /> ago`, html`<${Time} at=${topic.retry_at} />`],
        }))}
        empty=${html`<${Empty} title="Every topic can be written." />`} />
    <//>
    <${Panel} title="Ends that were refused" tone=${tone}>
      <${Table} caption="Ends that were refused" columns=${[{ label: "Transaction", kind: "wide" }, { label: "Topic" }, { label: "Why", kind: "wide" }, { label: "Not tried before" }]}
        rows=${refused.map((end, index) => ({
          id: index,
          cells: [html`<a class="mono" href=${to("transactions", end.id)}>${end.id}</a>`, end.topic ? html`<span class="mono">${end.topic}</span>` : "not known", html`<span class="long-text">${end.detail}</span>`, html`<${Time} at=${end.retry_at} />`],
        }))}
        empty=${html`<${Empty} title="No end is refused." />`} />
    <//>
    <${Panel} title="Writes in quarantine" tone=${tone}>
      <${Table} caption="Writes in quarantine" columns=${[{ label: "What", kind: "wide" }, { label: "How it is treated" }, { label: "Why", kind: "wide" }, { label: "Since" }, { label: "Until" }]}
        rows=${quarantined.map((entry, index) => ({ id: index, cells: quarantineCells(entry) }))}
        empty=${html`<${Empty} title="Nothing is in quarantine.">No write made a Kafka transaction fail, or every such write has succeeded since.<//>`} />
    <//>
    <${Panel} title="Records that were skipped" tone=${tone}>
      <${Table} caption="Records that were skipped" columns=${[{ label: "Topic", kind: "wide" }, { label: "Why", kind: "wide" }, { label: "Records", kind: "number" }, { label: "Last" }]}
        rows=${skipped.map((records) => ({ id: `${records.topic} ${records.reason}`, cells: [html`<span class="mono">${records.topic}</span>`, html`<span class="long-text">${records.reason}</span>`, count(records.count), html`<${Age} at=${records.last_at} /> ago`] }))}
        empty=${html`<${Empty} title="Nothing was skipped." />`} />
    <//>`;
}

function quarantineCells(entry) {
  const [word, tone, meaning] = QUARANTINE[entry.state] ?? [entry.state, "warn", ""];
  return [
    entry.id ? html`<a class="mono" href=${to("transactions", entry.id)}>${entry.id}</a>` : html`topic <a class="mono" href=${to("transactions", null, { topic: entry.topic })}>${entry.topic}</a>`,
    html`<${Badge} of=${entry.state} tone=${tone}>${word}<//>${entry.min_bytes ? html`<div class="hint">messages of ${bytes(entry.min_bytes)} and more are tried separately</div>` : null}`,
    html`<span class="long-text">${entry.detail ?? meaning} ${entry.error_code ? html`<span class="code">${entry.error_code}</span>` : null}</span>`,
    html`<${Age} at=${entry.since} /> ago`,
    html`<${Time} at=${entry.until} />`,
  ];
}

// The latest reason, and the first one if it differs: the latest may only say that a retry failed.
function Reason({ of }) {
  const text = (detail, code) => html`${detail} <span class="code">${code}</span>`;
  return html`<span class="long-text">${text(of.detail, of.error_code)}${of.first_detail && of.first_detail !== of.detail ? html`<div class="hint">first: ${text(of.first_detail, of.first_error_code)}</div>` : null}</span>`;
}
