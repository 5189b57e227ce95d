// What cannot be written, what is held back for it, what the lane keeps apart, and what was skipped.

import { html } from "../vendor/htm-preact.js";
import { bytes, count } from "../lib/format.js";
import { useLive } from "../lib/live.js";
import { to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { Age, AsOf, Badge, Empty, Heading, Loading, Panel, Table, Time } from "../parts/common.js";

const KEPT_APART = {
  suspected: ["tried apart", "info", "a Kafka transaction with it failed: it is written apart from all others until it has proved good"],
  alone: ["tried alone", "warn", "it failed together with others: it is written without any other"],
  refused: ["refused", "bad", "it was tried apart and found bad"],
  watched: ["watched", "info", "the topic is good, a message was not"],
};

export function Failures() {
  const { data, status } = useLive();
  if (!data) return html`<${Heading} title="Failures" /><${Loading} what="figures" />`;
  if (callerKind() === "group") return html`<${Heading} title="Failures" /><${Empty} title="Your key does not show failures.">They concern all groups: an operator or a reader sees them. What could not be written of yours says so itself, as its last error.<//>`;
  const { topics, refused, quarantined, skipped } = data.failures;
  const tone = status === "live" ? "" : "stale";
  return html`
    <${Heading} title="Failures"><${AsOf} /><span class="hint">counted since the instances began</span><//>
    <${Panel} title="Topics that cannot be written" tone=${tone}>
      <${Table} caption="Topics that cannot be written" columns=${[{ label: "Topic", kind: "wide" }, { label: "Why", kind: "wide" }, { label: "Refused", kind: "number" }, { label: "Since" }, { label: "Last" }, { label: "Not tried before" }]}
        rows=${topics.map((one, place) => ({
          id: place,
          cells: [html`<a class="mono" href=${to("transactions", null, { topic: one.topic })}>${one.topic}</a>`, html`<${Why} of=${one} />`, count(one.refused), html`<${Time} at=${one.first_at} />`, html`<${Age} at=${one.last_at} /> ago`, html`<${Time} at=${one.retry_at} />`],
        }))}
        empty=${html`<${Empty} title="Every topic can be written." />`} />
    <//>
    <${Panel} title="Ends that were refused" tone=${tone}>
      <${Table} caption="Ends that were refused" columns=${[{ label: "Transaction", kind: "wide" }, { label: "Topic" }, { label: "Why", kind: "wide" }, { label: "Not tried before" }]}
        rows=${refused.map((one, place) => ({
          id: place,
          cells: [html`<a class="mono" href=${to("transactions", one.id)}>${one.id}</a>`, one.topic ? html`<span class="mono">${one.topic}</span>` : "not known", html`<span class="known">${one.detail}</span>`, html`<${Time} at=${one.retry_at} />`],
        }))}
        empty=${html`<${Empty} title="Nothing is held back." />`} />
    <//>
    <${Panel} title="Writes in quarantine" tone=${tone}>
      <${Table} caption="Writes in quarantine" columns=${[{ label: "What", kind: "wide" }, { label: "How it is treated" }, { label: "Why", kind: "wide" }, { label: "Since" }, { label: "Until" }]}
        rows=${quarantined.map((one, place) => ({ id: place, cells: keptApart(one) }))}
        empty=${html`<${Empty} title="Nothing is kept apart.">No write has made a Kafka transaction fail, or all that did have been written since.<//>`} />
    <//>
    <${Panel} title="Records that were skipped" tone=${tone}>
      <${Table} caption="Records that were skipped" columns=${[{ label: "Topic", kind: "wide" }, { label: "Why", kind: "wide" }, { label: "Records", kind: "number" }, { label: "Last" }]}
        rows=${skipped.map((one) => ({ id: `${one.topic} ${one.reason}`, cells: [html`<span class="mono">${one.topic}</span>`, html`<span class="known">${one.reason}</span>`, count(one.count), html`<${Age} at=${one.last_at} /> ago`] }))}
        empty=${html`<${Empty} title="Nothing was skipped." />`} />
    <//>`;
}

function keptApart(one) {
  const [word, tone, why] = KEPT_APART[one.state] ?? [one.state, "warn", ""];
  return [
    one.id ? html`<a class="mono" href=${to("transactions", one.id)}>${one.id}</a>` : html`topic <a class="mono" href=${to("transactions", null, { topic: one.topic })}>${one.topic}</a>`,
    html`<${Badge} of=${one.state} tone=${tone}>${word}<//>${one.min_bytes ? html`<div class="hint">messages of ${bytes(one.min_bytes)} and more are tried apart</div>` : null}`,
    html`<span class="known">${one.detail ?? why} ${one.error_code ? html`<span class="code">${one.error_code}</span>` : null}</span>`,
    html`<${Age} at=${one.since} /> ago`,
    html`<${Time} at=${one.until} />`,
  ];
}

// The first reason as well if what came later is another one: that may only say that it was tried again in vain.
function Why({ of }) {
  const told = (detail, code) => html`${detail} <span class="code">${code}</span>`;
  return html`<span class="known">${told(of.detail, of.error_code)}${of.first_detail && of.first_detail !== of.detail ? html`<div class="hint">first: ${told(of.first_detail, of.first_error_code)}</div>` : null}</span>`;
}
