// Manual actions on one transaction, or on all that a filter finds: how many match, a reason, a rate.

import { html, useLayoutEffect, useRef, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "../lib/api.js";
import { actOnOne, isActive, MAX_RATE, start, useBulk } from "../lib/bulk.js";
import { count, countOf, duration, NONE } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { Badge, Failure, Loading, Note } from "./common.js";

const RATE = 50;
const MAX_REASON_BYTES = 1024;
const SAMPLE = 5;

export const ACTIONS = {
  check: {
    label: "Check",
    verb: "Check",
    states: ["prepared"],
    effect: "Each group is asked for the outcome of its transactions now. Its answers count, as for any check.",
  },
  resume: {
    label: "Resume",
    verb: "Resume",
    states: ["parked"],
    effect: "The transactions are prepared again with their count of checks reset to 0, and their groups are asked again.",
  },
  commit: {
    label: "Commit",
    verb: "Commit",
    states: ["prepared", "parked"],
    final: true,
    effect: "The messages are written to their topics, and every consumer sees them. This is final, even if the local transactions rolled back.",
  },
  rollback: {
    label: "Roll back",
    verb: "Roll back",
    states: ["prepared", "parked"],
    final: true,
    effect: "The messages are dropped, and no consumer ever sees them. This is final, even if the local transactions committed.",
  },
};

// The actions that are possible in a state; all actions if the state is not known.
export function actionsFor(state) {
  return Object.keys(ACTIONS).filter((action) => !state || ACTIONS[action].states.includes(state));
}

export function ActButtons({ actions, suffix = "", onChoose }) {
  return html`${actions.map((action) => html`<button key=${action} onClick=${() => onChoose(action)}>${ACTIONS[action].label}${suffix}…</button>`)}`;
}

// `target` is {id}, {ids} or {filter}; `description` is the same in words.
export function ActDialog({ action, target, description, onClose }) {
  const { verb, final, effect } = ACTIONS[action];
  const dialog = useRef(null);
  const [reason, setReason] = useState("");
  const [rate, setRate] = useState(RATE);
  const [sending, setSending] = useState(false);
  const [problem, setProblem] = useState(null);
  const isOne = target.id !== undefined;
  const states = ACTIONS[action].states.filter((state) => !target.filter?.state || target.filter.state === state);
  const named = target.ids?.length ?? (isOne ? 1 : null);
  const preview = useLoad((signal) => (named !== null ? { count: named, sample: [] } : matches(target.filter, states, signal)), [action, target]);
  const busy = isActive(useBulk()) && !isOne;
  // Before the next key or click: it would go to the page behind.
  useLayoutEffect(() => {
    dialog.current.showModal();
  }, []);

  const items = preview.data?.count ?? null;
  const isTooLong = new TextEncoder().encode(reason).length > MAX_REASON_BYTES;
  const isRateValid = Number.isInteger(rate) && rate >= 1 && rate <= MAX_RATE;
  const ready = items !== null && items > 0 && reason.trim() !== "" && !isTooLong && isRateValid && !sending && !busy;
  const submit = async (event) => {
    event.preventDefault();
    if (!ready) return;
    if (!isOne) {
      start({ action, states, filter: target.filter, ids: target.ids, description, reason: reason.trim(), rate });
      onClose();
      return;
    }
    setSending(true);
    setProblem(null);
    try {
      await actOnOne(action, target.id, reason.trim());
      onClose();
    } catch (error) {
      setProblem(error instanceof Problem ? error : unreachable());
      setSending(false);
    }
  };
  const close = (event) => {
    event?.preventDefault();
    if (!sending) onClose();
  };
  return html`<dialog ref=${dialog} aria-labelledby="act-title" onCancel=${close} onClose=${close}>
    <form onSubmit=${submit} method="dialog">
      <h2 id="act-title">${verb} ${description}</h2>
      ${isOne ? null : html`<${Preview} preview=${preview} action=${action} />`}
      <p class="effect">${final ? html`<${Badge} of="final" tone="warn">final<//> ` : null}${effect}</p>
      <label class="field">Reason <span class="hint">stored as the remark of each transaction and in the audit trail</span>
        <textarea name="reason" rows="2" required value=${reason} onInput=${(event) => setReason(event.currentTarget.value)} autofocus></textarea>
      </label>
      ${isTooLong ? html`<p class="error" role="alert">The reason is longer than ${count(MAX_REASON_BYTES)} bytes.</p>` : null}
      ${!isOne
        ? html`<label class="field inline">At most <input name="rate" type="number" min="1" max=${MAX_RATE} value=${rate} onInput=${(event) => setRate(event.currentTarget.valueAsNumber)} /> per second
            <span class="hint">${items && isRateValid ? `about ${duration(Math.ceil(items / rate))} in total` : ""}</span></label>`
        : null}
      ${problem ? html`<${Failure} problem=${problem} />` : null}
      ${problem?.status === 0 ? html`<p class="hint">It is not known whether it was done. It is safe to send it again: nothing is done twice.</p>` : null}
      ${busy ? html`<${Note} tone="warn">Another action runs in this page. Stop it first, or wait until it is done.<//>` : null}
      <div class="buttons">
        <button type="button" onClick=${close}>Cancel</button>
        <button type="submit" class=${final ? "danger" : "primary"} disabled=${!ready}>${sending ? "Sending…" : `${verb} ${items === null ? "" : count(items)}`}</button>
      </div>
    </form>
  </dialog>`;
}

// How many match, and the oldest of them.
async function matches(filter, states, signal) {
  const pages = await Promise.all(states.map((state) => call("/transactions", { query: { ...filter, state, limit: SAMPLE }, signal })));
  return { count: pages.reduce((sum, page) => sum + page.count, 0), sample: pages.flatMap((page) => page.transactions) };
}

function Preview({ preview, action }) {
  const { data, problem, reload } = preview;
  if (problem) return html`<${Failure} problem=${problem} reload=${reload} />`;
  if (!data) return html`<${Loading} what="the preview" />`;
  if (data.count === 0) {
    return html`<${Note} tone="info">No matching transaction is ${ACTIONS[action].states.join(" or ")}: there is nothing to do.<//>`;
  }
  const sample = data.sample.slice(0, SAMPLE);
  return html`<div class="preview">
    <p><strong>${countOf(data.count, "transaction")}</strong> ${data.count === 1 ? "matches" : "match"}. ${sample.length > 0 && sample.length < data.count ? `The oldest ${sample.length}:` : null}</p>
    <ul>${sample.map((transaction) => html`<li key=${transaction.id}><${Badge} of=${transaction.state} /> <span class="mono">${transaction.id}</span> <span class="hint">${transaction.group} · ${transaction.topics.join(", ") || NONE}</span></li>`)}</ul>
  </div>`;
}
