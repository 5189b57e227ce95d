// The login: the only view without a valid key.

import { html, useState } from "../vendor/htm-preact.js";
import { call, Problem, unreachable } from "../lib/api.js";
import { signIn, signOut } from "../lib/session.js";
import { Note } from "../parts/common.js";

export function Login({ onDone, expired }) {
  const [key, setKey] = useState("");
  const [keep, setKeep] = useState(false);
  const [problem, setProblem] = useState(null);
  const [checking, setChecking] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    setChecking(true);
    setProblem(null);
    signIn(key.trim(), { keep });
    try {
      await call("/groups", { query: { limit: 1 } });
      onDone();
    } catch (error) {
      signOut();
      setProblem(error instanceof Problem ? error : unreachable());
      setChecking(false);
    }
  };
  return html`<main class="login">
    <form class="panel" onSubmit=${submit} method="dialog">
      <h1><img src="icon.svg" alt="" width="28" height="28" /> halfway</h1>
      <p>This coordinator requires a key.</p>
      ${expired && !problem ? html`<${Note} tone="warn">Your key is no longer valid. Sign in again.<//>` : null}
      <label class="field">Key
        <input name="key" type="password" autocomplete="off" spellcheck="false" required autofocus value=${key} onInput=${(event) => setKey(event.currentTarget.value)} placeholder="hw_…" />
      </label>
      <label class="check"><input name="keep" type="checkbox" checked=${keep} onChange=${(event) => setKeep(event.currentTarget.checked)} /> Keep it in this browser when the tab is closed</label>
      ${problem ? html`<${Note} tone="bad" role="alert">${problem.status === 401 ? "This key is not valid: it is mistyped, expired or revoked." : problem.detail}<//>` : null}
      <button type="submit" class="primary" disabled=${checking || key.trim() === ""}>${checking ? "Checking…" : "Sign in"}</button>
    </form>
  </main>`;
}
