// The history of a transaction as a timeline, and where its messages are in Kafka.

import { html } from "../vendor/htm-preact.js";
import { bytes, duration, NONE } from "../lib/format.js";
import { Badge, Failure, Loading, Note, Table, Time } from "./common.js";

const WORDS = {
  prepared: ["Prepared", "info"],
  check: ["Checked", "info"],
  verdict_recorded: ["Verdict recorded", "info"],
  parked: ["Parked", "warn"],
  resumed: ["Resumed", "info"],
  unknown: ["The service answered unknown", "info"],
  committed: ["Committed", "good"],
  rolled_back: ["Rolled back", "calm"],
};

export function History({ data, problem, at, reload }) {
  if (!data) return problem ? html`<${Failure} problem=${problem} reload=${reload} />` : html`<${Loading} what="the history" />`;
  return html`
    ${problem ? html`<${Failure} problem=${problem} at=${at} reload=${reload} />` : null}
    ${data.missing.length > 0 ? html`<${Note} tone="warn" title="The history is not complete.">${data.missing.join(" ")}<//>` : null}
    <ol class="history">${data.events.map((event, index) => html`<${Event} key=${index} of=${event} before=${data.events[index - 1] ?? null} />`)}</ol>`;
}

function Event({ of, before }) {
  const [word, tone] = WORDS[of.event] ?? [of.event, "calm"];
  const since = before ? (Date.parse(of.at) - Date.parse(before.at)) / 1000 : null;
  return html`<li class="event tone-${of.event === "check" ? toneOf(of) : tone}">
    <span class="mark" aria-hidden="true"></span>
    <div class="when"><${Time} at=${of.at} />${since === null ? null : html`<span class="hint">+${since < 0.0005 ? "0 s" : duration(since)}</span>`}</div>
    <div class="what">
      <p class="event-title"><b>${word}</b>${of.attempt === null ? null : ` no. ${of.attempt}`}${of.event === "check" ? html` <${Verdict} of=${of} />` : null}${of.cause ? html` <span class="hint">by ${of.cause}</span>` : null}</p>
      ${of.detail ? html`<p class="detail">${of.detail}</p>` : null}
      ${of.remark ? html`<p class="remark"><span class="hint">Remark:</span> ${of.remark}</p>` : null}
    </div>
  </li>`;
}

function toneOf(check) {
  return { commit: "good", rollback: "calm" }[check.verdict] ?? "info";
}

function Verdict({ of }) {
  if (of.verdict === null) return null;
  return html`<${Badge} of=${of.verdict} tone=${toneOf(of)} />`;
}

export function Places({ of }) {
  return html`
    ${of.messages_detail ? html`<p class="hint">${of.messages_detail}</p>` : null}
    <${Table} caption="Where each message is in Kafka" columns=${[{ label: "Message" }, { label: "Topic", kind: "wide" }, { label: "Partition", kind: "number" }, { label: "Offset", kind: "number" }, { label: "Size", kind: "number" }]}
      rows=${of.messages.map((message) => ({ id: message.message, cells: [message.message, html`<span class="mono">${message.topic}</span>`, message.partition ?? NONE, message.offset ?? NONE, bytes(message.size)] }))}
      empty=${null} />`;
}
