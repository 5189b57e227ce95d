// Jobs: manual actions on many transactions, their progress, and the result for each transaction.

import { html, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "../lib/api.js";
import { clock, count, countOf, duration, NONE } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { go, to } from "../lib/router.js";
import { callerKind } from "../lib/session.js";
import { ACTIONS } from "../parts/act.js";
import { Badge, Copy, Empty, Facts, Failure, Heading, Loading, Note, Pages, Panel, Table, Time } from "../parts/common.js";

const FINAL_STATES = new Set(["stopped", "done", "failed"]);
const RESULTS = ["", "waiting", "done", "unchanged", "failed", "replaced"];
const EVERY_S = 1;
const LIST_EVERY_S = 5;
const LIMIT = 100;

// An accepted job has changed nothing yet; a job that is done has a result for each transaction.
const WORDS = { accepted: "accepted, not started", running: "running", stopping: "stopping", stopped: "stopped", done: "done", failed: "failed" };

export function Jobs() {
  const { data, problem, at, reload } = useLoad((signal) => call("/jobs", { signal }), [], {
    everyS: ({ jobs }) => (jobs.every((job) => FINAL_STATES.has(job.state)) ? LIST_EVERY_S : EVERY_S),
  });
  return html`
    <${Heading} title="Jobs">${at ? html`<span class="hint">as of ${clock(at)}</span>` : null}<//>
    <${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />
    ${(data?.away ?? []).length > 0 ? html`<${Note} tone="warn" title="Not all instances answered.">Jobs on ${data.away.map((place) => place.instance).join(", ")} are not shown: ${data.away[0].detail}<//>` : null}
    ${!data && !problem ? html`<${Loading} what="jobs" />` : null}
    ${data
      ? html`<div class=${problem ? "stale" : ""}><${Table} caption="Jobs" columns=${[{ label: "Job", kind: "wide" }, { label: "State" }, { label: "Action" }, { label: "Progress" }, { label: "Failed", kind: "number" }, { label: "By" }, { label: "Reason", kind: "wide" }]}
          rows=${data.jobs.map((job) => ({
            id: job.id,
            cells: [
              html`<a class="mono" href=${to("jobs", job.id)}>${job.id}</a><div class="hint"><${Time} at=${job.accepted_at} /></div>`,
              html`<${Badge} of=${job.state}>${WORDS[job.state]}<//>`,
              ACTIONS[job.action]?.label ?? job.action,
              html`<${ProgressBar} job=${job} />`,
              count(job.results.failed ?? 0),
              job.by ?? NONE,
              html`<span class="long-text">${job.reason}</span>`,
            ],
          }))}
          empty=${html`<${Empty} title="No jobs.">Filter <a href=${to("transactions", null, { state: "parked" })}>transactions</a>, and act on all matching ones.<//>`} /></div>`
      : null}`;
}

function ProgressBar({ job }) {
  const text = job.found === null ? "searching" : `${count(job.finished)} of ${count(job.found)}`;
  return html`<div class="bar"><progress value=${job.found === null ? 0 : job.finished} max=${Math.max(1, job.found ?? 1)} aria-label="Progress: ${text}"></progress><span>${text}</span></div>`;
}

export function Job({ id, query }) {
  const result = RESULTS.includes(query.result ?? "") ? (query.result ?? "") : "";
  const path = `/jobs/${encodeURIComponent(id)}`;
  const [stopProblem, setStopProblem] = useState(null);
  const { data, problem, at, reload } = useLoad(
    (signal) => call(path, { query: { result, limit: LIMIT, cursor: query.cursor }, signal }),
    [path, result, query.cursor ?? null],
    { everyS: (job) => (FINAL_STATES.has(job.state) ? null : EVERY_S) },
  );
  const stop = async () => {
    setStopProblem(null);
    try {
      await call(path, { method: "DELETE" });
      reload();
    } catch (error) {
      setStopProblem(error instanceof Problem ? error : unreachable());
    }
  };
  const mayStop = data && !FINAL_STATES.has(data.state) && data.state !== "stopping" && callerKind() !== "reader";
  return html`
    <nav class="crumbs" aria-label="Where this is"><a href=${to("jobs")}>Jobs</a></nav>
    <${Heading} title=${data ? `${ACTIONS[data.action]?.label ?? data.action}: ${data.found === null ? "…" : countOf(data.found, "transaction")}` : "Job"}>
      ${data ? html`<${Badge} of=${data.state}>${WORDS[data.state]}<//>` : null}
      ${mayStop ? html`<button onClick=${stop}>Stop</button>` : null}
    <//>
    ${problem?.status === 404
      ? html`<${Empty} title="There is no such job.">An instance forgets a job after a while, and when it ends. The results of the job stay. To continue, start a job with the same filter again: finished transactions stay as they are.<//>`
      : html`<${Failure} problem=${problem} at=${data ? at : null} reload=${reload} />`}
    <${Failure} problem=${stopProblem} />
    ${!data && !problem ? html`<${Loading} what="the job" />` : null}
    ${data ? html`<${Progress} job=${data} stale=${problem !== null} /><${Items} job=${data} result=${result} query=${query} />` : null}`;
}

function Progress({ job, stale }) {
  const left = job.found === null ? null : job.found - job.finished;
  return html`<${Panel} title="Progress" tone=${stale ? "stale" : ""}>
    <div class="job-bar" role="status"><${ProgressBar} job=${job} /></div>
    ${job.state === "accepted" ? html`<p>The job is accepted: nothing has been changed yet.</p>` : null}
    ${job.state === "running" && left !== null ? html`<p class="hint">At most ${countOf(job.rate, "transaction")} per second: about ${left === 0 ? "0 s" : duration(Math.ceil(left / job.rate))} left.</p>` : null}
    ${job.state === "stopped" ? html`<p>The job was stopped: ${countOf(left ?? 0, "transaction")} not touched.</p>` : null}
    ${job.detail ? html`<p class="detail">${job.detail}</p>` : null}
    ${job.more ? html`<${Note} tone="warn">More transactions matched than one job can act on. Start another job for the rest.<//>` : null}
    <ul class="results">
      <li><${Badge} of="done">${doneWord(job)}<//> <b>${count(job.results.done ?? 0)}</b></li>
      <li><${Badge} of="unchanged" /> <b>${count(job.results.unchanged ?? 0)}</b></li>
      <li><${Badge} of="failed" tone=${job.results.failed > 0 ? "bad" : "calm"} /> <b>${count(job.results.failed ?? 0)}</b></li>
      ${job.results.replaced ? html`<li><${Badge} of="replaced" /> <b>${count(job.results.replaced)}</b> <span class="hint">their ids now belong to other transactions, which were not changed</span></li>` : null}
    </ul>
    ${job.action === "check" ? html`<p class="hint">“asked” means that the group was asked. Its answer is in the history of each transaction.</p>` : null}
    <${Facts} of=${[
      ["Reason", html`<span class="long-text">${job.reason}</span>`],
      ["Transactions", job.ids ? countOf(job.ids, "transaction by id", "transactions by id") : filterText(job.filter)],
      ["By", job.by],
      ["Accepted", html`<${Time} at=${job.accepted_at} />`],
      ["Started", html`<${Time} at=${job.started_at} />`],
      ["Finished", html`<${Time} at=${job.finished_at} />`],
      ["Runs on", job.instance],
      ["Id", html`<span class="mono">${job.id}</span> <${Copy} text=${job.id} what="the job's id" />`],
    ]} />
  <//>`;
}

function doneWord(job) {
  return job.action === "check" ? "asked" : "done";
}

function filterText(filter) {
  const parts = Object.entries(filter ?? {}).filter(([, value]) => value !== null && value !== undefined);
  return parts.length === 0 ? "everything" : parts.map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");
}

function Items({ job, result, query }) {
  const address = (more) => to("jobs", job.id, { result, ...more });
  return html`<${Panel} title="Each transaction" side=${html`<label class="inline">Result <select name="result" value=${result} onChange=${(event) => go(to("jobs", job.id, { result: event.currentTarget.value }))}>${RESULTS.map((option) => html`<option key=${option} value=${option} selected=${option === result}>${option === "" ? "all" : option === "done" ? doneWord(job) : option}</option>`)}</select></label>`}>
    <${Table} caption="Each transaction of the job" columns=${[{ label: "Transaction", kind: "wide" }, { label: "Result" }, { label: "New state" }, { label: "Why", kind: "wide" }, { label: "When" }]}
      rows=${job.items.map((item) => ({
        id: item.id,
        cells: [
          html`<a class="mono" href=${to("transactions", item.id)}>${item.id}</a>`,
          html`<${Badge} of=${item.result}>${item.result === "done" ? doneWord(job) : item.result}<//>`,
          item.state ? html`<${Badge} of=${item.state} />` : NONE,
          item.detail ? html`<span class="long-text">${item.detail} ${item.error_code ? html`<span class="code">${item.error_code}</span>` : null}</span>` : NONE,
          html`<${Time} at=${item.at} />`,
        ],
      }))}
      empty=${html`<${Empty} title=${result === "" ? "No transaction matched." : "No transaction has this result."} />`} />
    <${Pages} page=${Number(query.page ?? 1)} next=${job.next} address=${address} />
  <//>`;
}
