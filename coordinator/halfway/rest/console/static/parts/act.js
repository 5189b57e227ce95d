// Acting by hand: a preview of what is found, a reason, and a job on the coordinator.

import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { call, newId, Problem, unreachable } from "../lib/api.js";
import { count, duration, many, NONE } from "../lib/format.js";
import { useLoad } from "../lib/load.js";
import { go, to } from "../lib/router.js";
import { Badge, Failure, Loading, Note } from "./common.js";

const RATE = 50;
const MOST_RATE = 500;
const MOST_REASON_BYTES = 1024;
const MOST = 100_000; // of one job
const SHOWN = 5;

export const ACTIONS = {
  check: {
    label: "Check",
    verb: "Check",
    of: ["prepared"],
    effect: "Each group is asked now what became of its transactions. Its answers decide, as with any check.",
  },
  resume: {
    label: "Resume",
    verb: "Resume",
    of: ["parked"],
    effect: "They are prepared again, with their count of checks at 0, and their groups are asked again.",
  },
  commit: {
    label: "Commit",
    verb: "Commit",
    of: ["prepared", "parked"],
    final: true,
    effect: "Their messages go to their topics, for every consumer. This is final, whatever the local transactions did.",
  },
  rollback: {
    label: "Roll back",
    verb: "Roll back",
    of: ["prepared", "parked"],
    final: true,
    effect: "Their messages are dropped and never seen by a consumer. This is final, whatever the local transactions did.",
  },
};

// The actions that a transaction in this state allows; all of them if the state is not known.
export function actionsFor(state) {
  return Object.keys(ACTIONS).filter((action) => !state || ACTIONS[action].of.includes(state));
}

export function ActButtons({ actions, suffix = "", onChoose }) {
  return html`${actions.map((action) => html`<button key=${action} onClick=${() => onChoose(action)}>${ACTIONS[action].label}${suffix}…</button>`)}`;
}

// `target` is {ids} or {filter}; `said` tells it in words.
export function ActDialog({ action, target, said, onClose }) {
  const wanted = ACTIONS[action];
  const place = useRef(null);
  const [jobId] = useState(() => newId("console"));
  const [reason, setReason] = useState("");
  const [rate, setRate] = useState(RATE);
  const [sending, setSending] = useState(false);
  const [problem, setProblem] = useState(null);
  const preview = useLoad(
    (signal) => call("/jobs", { method: "POST", body: { action, ...target, preview: true }, signal }),
    [action, target],
  );
  useEffect(() => {
    place.current.showModal();
  }, []);

  const found = preview.data ? Math.min(preview.data.count, MOST) : null;
  const tooLong = new TextEncoder().encode(reason).length > MOST_REASON_BYTES;
  const rateFits = Number.isInteger(rate) && rate >= 1 && rate <= MOST_RATE;
  const ready = found !== null && found > 0 && reason.trim() !== "" && !tooLong && rateFits && !sending;
  const begin = async (event) => {
    event.preventDefault();
    if (!ready) return;
    setSending(true);
    setProblem(null);
    try {
      await call("/jobs", { method: "POST", body: { id: jobId, action, ...target, reason: reason.trim(), rate } });
      onClose();
      go(to("jobs", jobId));
    } catch (error) {
      setProblem(error instanceof Problem ? error : unreachable());
      setSending(false);
    }
  };
  const close = (event) => {
    event?.preventDefault();
    if (!sending) onClose();
  };
  return html`<dialog ref=${place} aria-labelledby="act-title" onCancel=${close} onClose=${close}>
    <form onSubmit=${begin} method="dialog">
      <h2 id="act-title">${wanted.verb} ${said}</h2>
      <${Preview} preview=${preview} action=${action} />
      <p class="effect">${wanted.final ? html`<${Badge} of="final" tone="warn">final<//> ` : null}${wanted.effect}</p>
      <label class="field">Reason <span class="hint">kept as the remark of each one and in the audit trail</span>
        <textarea name="reason" rows="2" required value=${reason} onInput=${(event) => setReason(event.currentTarget.value)} autofocus></textarea>
      </label>
      ${tooLong ? html`<p class="wrong" role="alert">The reason is longer than ${count(MOST_REASON_BYTES)} bytes.</p>` : null}
      ${found !== 1
        ? html`<label class="field inline">At most <input name="rate" type="number" min="1" max=${MOST_RATE} value=${rate} onInput=${(event) => setRate(event.currentTarget.valueAsNumber)} /> a second
            <span class="hint">${found && rateFits ? `about ${duration(Math.ceil(found / rate))} in all` : ""}</span></label>`
        : null}
      ${problem ? html`<${Failure} problem=${problem} />` : null}
      ${problem?.status === 0 ? html`<p class="hint">It is not known whether the job was accepted. To start it again is harmless: it has the same id.</p>` : null}
      <div class="buttons">
        <button type="button" onClick=${close}>Cancel</button>
        <button type="submit" class=${wanted.final ? "danger" : "primary"} disabled=${!ready}>${sending ? "Sending…" : `${wanted.verb} ${found === null ? "" : count(found)}`}</button>
      </div>
    </form>
  </dialog>`;
}

function Preview({ preview, action }) {
  const { data, problem, reload } = preview;
  if (problem) return html`<${Failure} problem=${problem} reload=${reload} />`;
  if (!data) return html`<${Loading} what="what it finds" />`;
  if (data.count === 0) {
    return html`<${Note} tone="info">Nothing that it finds is ${ACTIONS[action].of.join(" or ")}: there is nothing to do.<//>`;
  }
  const shown = data.sample.slice(0, SHOWN);
  return html`<div class="preview">
    <p><strong>${many(data.count, "transaction")}</strong> ${data.count === 1 ? "matches" : "match"}. ${data.more ? `One job takes the oldest ${count(MOST)}.` : null} ${shown.length > 0 && shown.length < data.count ? `The oldest ${shown.length}:` : null}</p>
    <ul>${shown.map((one) => html`<li key=${one.id}><${Badge} of=${one.state} /> <span class="mono">${one.id}</span> <span class="hint">${one.group} · ${one.topics.join(", ") || NONE}</span></li>`)}</ul>
  </div>`;
}
