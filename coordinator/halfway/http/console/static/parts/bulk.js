// The bulk action of this page, above every view: its progress, how to stop it, and what failed.

import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { becameOf, dismiss, isActive, MAX_FAILURES, MAX_FOLLOWED, startAgain, stop, useBulk } from "../lib/bulk.js";
import { count, countOf, duration, words } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { to } from "../lib/router.js";
import { ACTIONS } from "./act.js";
import { Badge, Failure, Table } from "./common.js";

const BECAME_EVERY_S = 2;

export function Bulk() {
  const run = useBulk();
  return run ? html`<${Run} run=${run} key=${run.aborted} />` : null;
}

// What became of what was resumed: asked for again as long as the panel is open.
function Became({ run }) {
  const { data, problem } = useLoad((signal) => becameOf(run, signal), [run.description], { everyS: () => BECAME_EVERY_S });
  const one = ([state, number]) => {
    const text = `${count(number)} ${words(state)}`;
    return state === "parked" ? html`<a href=${to("transactions", null, { ...run.filter, error: "", state })}>${text} again</a>` : text;
  };
  return html`
    ${problem ? html`<${Failure} problem=${problem} />` : null}
    ${data ? html`<p>${run.followed.size < MAX_FOLLOWED ? "Since then" : `Of the last ${count(MAX_FOLLOWED)}`}: ${data.map((entry, index) => html`${index > 0 ? ", " : ""}${one(entry)}`)}.</p>` : null}`;
}

function Run({ run }) {
  const heading = useRef(null);
  // The dialog that started it is gone, and the focus with it.
  useEffect(() => heading.current?.focus({ preventScroll: true }), []);
  const settled = run.done + run.meanwhile + run.failed;
  const total = run.left === null ? null : settled + run.left;
  const active = isActive(run);
  const text = total === null ? countOf(settled, "transaction") : `${count(settled)} of ${count(total)}`;
  const tenths = total ? Math.floor((settled / total) * 10) * 10 : 0;
  return html`<section class="panel" aria-labelledby="bulk-title">
    <header>
      <h2 id="bulk-title" tabindex="-1" ref=${heading}>${ACTIONS[run.action].verb} ${run.description}</h2>
      <div class="panel-side">
        <${Badge} of=${run.state} />
        ${active ? html`<button onClick=${stop} disabled=${run.state === "stopping"}>Stop</button>` : null}
        ${run.state === "stopped" || run.state === "failed" ? html`<button onClick=${startAgain}>Go on with the rest</button>` : null}
        ${active ? null : html`<button onClick=${dismiss}>Close</button>`}
      </div>
    </header>
    <p class="unseen" role="status">${run.state}${active ? `, ${tenths} %` : `: ${text}, ${count(run.failed)} failed`}${run.waiting ? ", waiting for the coordinator" : ""}</p>
    <div class="bar bulk-bar"><progress value=${settled} max=${Math.max(1, total ?? 1)} aria-label="Progress: ${text}"></progress><span>${text}</span></div>
    ${active
      ? html`<p class="hint">At most ${countOf(run.rate, "transaction")} per second${run.left === null ? "" : `: about ${run.left === 0 ? "0 s" : duration(Math.ceil(run.left / run.rate))} left`}. It runs in this page: it ends if you close or reload it. Start it again, and it acts on the rest.</p>`
      : null}
    ${run.waiting ? html`<${Failure} problem=${run.waiting} />` : null}
    ${run.problem ? html`<${Failure} problem=${run.problem} />` : null}
    ${run.state === "stopped" ? html`<p>It was stopped. The rest is unchanged.</p>` : null}
    <ul class="results">
      <li><${Badge} of="done">${run.action === "check" ? "asked" : "done"}<//> <b>${count(run.done)}</b></li>
      ${run.meanwhile > 0 ? html`<li><${Badge} of="changed meanwhile" /> <b>${count(run.meanwhile)}</b> <span class="hint">ended, parked or resumed before it was their turn</span></li>` : null}
      <li><${Badge} of="failed" tone=${run.failed > 0 ? "bad" : "calm"} /> <b>${count(run.failed)}</b></li>
    </ul>
    ${run.action === "check" && run.done > 0 ? html`<p class="hint">“asked” means that the group was asked. Its answer is in the history of each transaction.</p>` : null}
    ${!active && run.followed.size > 0 ? html`<${Became} run=${run} />` : null}
    <p class="hint">Reason: <span class="long-text">${run.reason}</span></p>
    ${run.failures.length > 0
      ? html`<details class="failures" open>
          <summary>${run.failed > MAX_FAILURES ? `The last ${count(MAX_FAILURES)} that failed` : "What failed"}</summary>
          <${Table} caption="Transactions that failed" columns=${[{ label: "Transaction", kind: "wide" }, { label: "Why", kind: "wide" }]}
            rows=${run.failures.map(({ id, code, detail }) => ({
              id,
              cells: [html`<a class="mono" href=${to("transactions", id)}>${id}</a>`, html`<span class="long-text">${detail} <span class="code">${code}</span></span>`],
            }))} />
        </details>`
      : null}
  </section>`;
}
