// One transaction: its state, its history, and its messages on demand.

import { html, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "../lib/api.js";
import { bytes, clock, count, NONE } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ActButtons, ActDialog, actionsFor } from "../parts/act.js";
import { Age, Badge, Copy, Empty, Facts, Failure, Heading, Loading, Note, Panel, Time } from "../parts/common.js";
import { History, Places } from "../parts/history.js";
import { Messages } from "../parts/messages.js";

const LIVE_EVERY_S = 2;

export function Transaction({ id }) {
  const path = `/transactions/${encodeURIComponent(id)}`;
  const [acting, setActing] = useState(null);
  const { data, problem, at, reload } = useLoad(async (signal) => withoutPayload(await call(path, { signal })), [path], {
    everyS: (transaction) => (transaction.state === "prepared" ? LIVE_EVERY_S : null),
  });
  // The history is loaded again whenever the state or the count of checks changes.
  const history = useLoad((signal) => call(`${path}/history`, { signal }), [path, data?.state ?? null, data?.checks ?? null]);
  const gone = problem && (problem.status === 404 || problem.status === 410);
  const state = data?.state ?? history.data?.state;
  return html`
    <nav class="crumbs" aria-label="Where this is"><a href=${to("transactions")}>Transactions</a></nav>
    <${Heading} title=${id}>${state ? html`<${Badge} of=${state} />` : null}<${Copy} text=${id} what="the id" /><//>
    ${problem && !gone ? html`<${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />` : null}
    ${gone && !history.data
      ? html`<${Empty} title=${problem.status === 410 ? "The transaction has ended, and its outcome is no longer stored." : "No such transaction."}>${problem.detail}<//>`
      : null}
    ${!data && !problem ? html`<${Loading} what="the transaction" />` : null}
    ${data ? html`<${Actions} of=${data} onChoose=${setActing} reload=${reload} />` : null}
    ${data ? html`<${Panel} title="State" tone=${problem ? "stale" : ""}><${State} of=${data} history=${history} /><//>` : null}
    ${gone && !history.data ? null : html`<${Panel} title="History"><${History} ...${history} /><//>`}
    ${data ? html`<${Panel} title="Messages"><${Messages} path=${path} of=${data} /><//>` : null}
    ${history.data && history.data.messages.length > 0
      ? html`<${Panel} title="Places in Kafka"><${Places} of=${history.data} /><//>`
      : null}
    ${acting ? html`<${ActDialog} action=${acting.action} target=${acting.target} description=${acting.description} onClose=${() => { setActing(null); reload(); }} />` : null}`;
}

// The payload is dropped: the user has not asked for it yet.
function withoutPayload({ messages, ...fields }) {
  return { ...fields, hasPayload: messages !== null };
}

function Actions({ of, onChoose, reload }) {
  const [check, setCheck] = useState(null);
  const kind = callerKind();
  const mayEnd = kind === null || kind === "operator";
  if (kind === "reader") return null;
  const actions = actionsFor(of.state).filter((action) => action !== "check" && mayEnd);
  const checkNow = async () => {
    setCheck({ problem: null, text: "Asking…" });
    try {
      await call(`/transactions/${encodeURIComponent(of.id)}/check`, { method: "POST" });
      setCheck({ problem: null, text: `Accepted at ${clock(Date.now())}: the group is asked. Its answer will be in the history.` });
      reload();
    } catch (error) {
      setCheck({ problem: error instanceof Problem ? error : unreachable(), text: null });
    }
  };
  if (actions.length === 0 && of.state !== "prepared") return null;
  return html`<div class="actions">
      ${of.state === "prepared" ? html`<button class="primary" onClick=${checkNow}>Check now</button>` : null}
      <${ActButtons} actions=${actions} onChoose=${(action) => onChoose({ action, target: { id: of.id }, description: of.id })} />
      ${of.state === "parked" && mayEnd
        ? html`<button onClick=${() => onChoose({ action: "resume", target: { filter: { state: "parked", group: of.group } }, description: `all parked of ${of.group}` })}>Resume all parked of ${of.group}…</button>`
        : null}
    </div>
    ${check?.text ? html`<${Note} tone="info">${check.text}<//>` : null}
    ${check?.problem ? html`<${Failure} problem=${check.problem} />` : null}`;
}

// Only a prepared transaction contains the time of its last check. For others, it is in the history.
function lastCheck(of, history) {
  if (of.last_check_at) return html`<${Time} at=${of.last_check_at} />`;
  if (of.checks === 0 && of.state === "prepared") return NONE;
  if (!history.data) return history.problem ? "not known: the history cannot be read" : "…";
  const last = history.data.events.findLast((event) => event.event === "check");
  if (last) return html`<${Time} at=${last.at} />`;
  return of.checks > 0 ? "not known: its record is gone" : NONE;
}

function State({ of, history }) {
  const ended = of.ended_at !== null;
  return html`<${Facts} of=${[
    ["Group", html`<a href=${to("groups", of.group)}>${of.group}</a>`],
    ["Topics", of.topics.join(", ")],
    ["Prepared", html`<${Time} at=${of.prepared_at} /> (<${Age} at=${of.prepared_at} /> ago)`],
    ["Size", of.size === null ? null : bytes(of.size)],
    ["Checks sent", count(of.checks)],
    ended ? null : ["Next check", of.next_check_at ? html`<${Time} at=${of.next_check_at} />` : NONE],
    ["Last check", lastCheck(of, history)],
    of.last_error ? ["Last error", html`<span class="long-text">${of.last_error}</span>`] : null,
    of.commit_verdict ? ["Verdict recorded", "commit was said, but could not be written; policy never rolls it back"] : null,
    of.parked_at ? ["Parked", html`<${Time} at=${of.parked_at} />`] : null,
    of.reason ? ["Why parked", html`<span class="long-text">${of.reason}</span>`] : null,
    ended ? ["Ended", html`<${Time} at=${of.ended_at} /> by ${of.cause ?? "unknown"}`] : null,
    of.remark ? ["Remark", html`<span class="long-text">${of.remark}</span>`] : null,
  ]} />`;
}
