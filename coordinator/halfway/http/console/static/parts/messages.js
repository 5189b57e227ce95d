// The messages of a transaction. They are fetched only on demand, and only if the API gives them to the caller.

import { html, useEffect, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "../lib/api.js";
import { countOf, NONE } from "../lib/format.js";
import { Badge, Facts, Failure } from "./common.js";

const LONG = 4000;

export function Messages({ path, of }) {
  const [messages, setMessages] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    setMessages(null);
  }, [path, of.state]);
  if (!of.hasPayload) {
    return html`<p class="hint">${of.ended_at ? "The transaction has ended. Its messages are only in their topics, if it was committed." : "Your key may not read its messages."}</p>`;
  }
  if (messages === null) {
    const show = async () => {
      setProblem(null);
      try {
        setMessages((await call(path)).messages ?? []);
      } catch (error) {
        setProblem(error instanceof Problem ? error : unreachable());
      }
    };
    return html`<p>The messages are hidden, because they may contain personal data. <button onClick=${show}>Show the messages</button></p>${problem ? html`<${Failure} problem=${problem} />` : null}`;
  }
  return html`<p>${countOf(messages.length, "message")}. <button onClick=${() => setMessages(null)}>Hide the messages</button></p>
    <ol class="messages">${messages.map((message, index) => html`<li key=${index}><${Message} of=${message} /></li>`)}</ol>`;
}

function Message({ of }) {
  return html`<${Facts} of=${[
      ["Topic", html`<span class="mono">${of.topic}</span>`],
      ["Partition", of.partition === null ? "by its key" : of.partition],
      ["Key", html`<${Data} of=${of.key} />`],
      ...of.headers.map((header) => [html`Header <span class="mono">${header.name}</span>`, html`<${Data} of=${header.value} />`]),
    ]} />
    <div class="value"><span class="hint">Value</span> <${Data} of=${of.value} whole=${true} /></div>`;
}

function Data({ of, whole = false }) {
  const [all, setAll] = useState(false);
  if (of === null) return html`<${Badge} of="null" tone="calm" />`;
  if (typeof of === "object") return html`<${Badge} of="binary" tone="calm">binary, base64<//> <span class="mono data">${of.data}</span>`;
  const text = whole ? indented(of) : of;
  if (text === "") return html`<${Badge} of="empty" tone="calm" />`;
  const shown = all ? text : text.slice(0, LONG);
  return html`${whole ? html`<pre class="payload">${shown}</pre>` : html`<span class="mono data">${shown}</span>`}
    ${shown.length < text.length ? html` <button class="link" onClick=${() => setAll(true)}>Show all ${text.length} characters</button>` : null}`;
}

// Indents JSON, but only if its content stays the same: JavaScript would round some numbers.
function indented(text) {
  try {
    const formatted = JSON.stringify(JSON.parse(text), null, 2);
    return formatted.replace(/\s/g, "") === text.replace(/\s/g, "") ? formatted : text;
  } catch {
    return text;
  }
}
