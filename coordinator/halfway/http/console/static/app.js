// The frame around the views: the caller, the current view, and the state of the connection to the coordinator.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { call, Problem, unreachable } from "./lib/api.js";
import { dismiss } from "./lib/bulk.js";
import { clock, countOf, instancesText, warningsOf } from "./lib/format.js";
import { start, stop, tryNow, useLive } from "./lib/live.js";
import { to, useRoute } from "./lib/router.js";
import { callerKind, currentKey, onRefused, publicId, signOut } from "./lib/session.js";
import { Bulk } from "./parts/bulk.js";
import { Badge, Empty, Failure, Heading, Loading, Note, useTick } from "./parts/common.js";
import { Failures } from "./views/failures.js";
import { Group, Groups } from "./views/groups.js";
import { Login } from "./views/login.js";
import { Overview } from "./views/overview.js";
import { Transaction } from "./views/transaction.js";
import { Transactions } from "./views/transactions.js";

const VIEWS = [
  ["overview", "Overview"],
  ["transactions", "Transactions"],
  ["groups", "Groups"],
  ["failures", "Failures"],
];
const THEMES = ["auto", "light", "dark"];
const RETRY_MS = 2000;

function App() {
  const [access, setAccess] = useState("checking"); // checking, login, expired, granted
  const [problem, setProblem] = useState(null);
  useEffect(() => onRefused(() => {
    stop();
    setAccess((before) => (before === "granted" ? "expired" : before === "expired" ? "expired" : "login"));
    signOut();
  }), []);
  useEffect(() => {
    if (access === "granted") start();
    if (access !== "checking") return undefined;
    let timer = null;
    const check = async () => {
      try {
        await call("/groups", { query: { limit: 1 } });
        setProblem(null);
        setAccess("granted");
      } catch (error) {
        if (error instanceof Problem && error.status === 401) {
          setAccess("login");
          return;
        }
        setProblem(error instanceof Problem ? error : unreachable());
        timer = setTimeout(check, RETRY_MS);
      }
    };
    void check();
    return () => clearTimeout(timer);
  }, [access]);
  if (access === "checking") {
    return html`<main class="login"><h1 class="waiting">halfway</h1>${problem ? html`<${Failure} problem=${problem} />` : html`<${Loading} what="the console" />`}</main>`;
  }
  if (access !== "granted") return html`<${Login} expired=${access === "expired"} onDone=${() => setAccess("granted")} />`;
  const leave = () => {
    stop();
    dismiss();
    signOut();
    setAccess("checking");
  };
  return html`<${Frame} onSignOut=${leave} />`;
}

function Frame({ onSignOut }) {
  const route = useRoute();
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <header class="top">
      <a class="brand" href=${to("overview")}><img src="icon.svg" alt="" width="20" height="20" /> halfway</a>
      <nav aria-label="Views">${VIEWS.map(([view, label]) => html`<a key=${view} href=${to(view)} aria-current=${route.view === view ? "page" : null}>${label}</a>`)}</nav>
      <div class="top-side">
        <${Connection} />
        <${Theme} />
        ${currentKey() ? html`<span class="caller">${callerKind() ?? "key"} <span class="mono">${publicId() ?? ""}</span></span><button class="small quiet" onClick=${onSignOut}>Sign out</button>` : null}
      </div>
    </header>
    <${Warnings} />
    <main id="main" tabindex="-1"><${Bulk} /><${View} route=${route} key=${`${route.view}/${route.id ?? ""}`} /></main>`;
}

// The fragment of the URL names the view, so a link within the page cannot use it.
function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

function View({ route }) {
  switch (route.view) {
    case "overview":
      return html`<${Overview} />`;
    case "transactions":
      return route.id === null ? html`<${Transactions} query=${route.query} />` : html`<${Transaction} id=${route.id} />`;
    case "groups":
      return route.id === null ? html`<${Groups} query=${route.query} />` : html`<${Group} name=${route.id} />`;
    case "failures":
      return html`<${Failures} />`;
    default:
      return html`<${Heading} title="Not found" /><${Empty} title="There is no such view.">The URL names the view “${route.view}”. <a href=${to("overview")}>Go to the overview</a><//>`;
  }
}

function Connection() {
  const { status } = useLive();
  const [tone, word] = { live: ["good", "live"], lost: ["bad", "not connected"], connecting: ["info", "connecting"] }[status];
  return html`<span role="status"><${Badge} of=${word} tone=${tone} /></span>`;
}

// Warnings above every view: the figures are stale, an instance is unsafe, or the figures do not include everything.
function Warnings() {
  const { status, data, receivedAt, retryAt, problem } = useLive();
  useTick(1);
  const away = data?.away ?? [];
  const unsafe = warningsOf(data);
  const wait = retryAt === null ? 0 : Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  return html`<div class="warnings">
    ${status === "lost"
      ? html`<${Note} tone="bad" role="alert" title="Not connected to the coordinator.">
          ${problem ? `${problem.detail} ` : null}${receivedAt ? `Figures are stale, as of ${clock(receivedAt)}. ` : null}${retryAt === null ? null : `Next attempt in ${wait} s. `}<button class="link" onClick=${tryNow}>Try now</button>
        <//>`
      : null}
    ${unsafe.length > 0
      ? html`<${Note} tone="bad" role="alert" title="The coordinator is unsafe.">
          ${unsafe[0].detail} (${instancesText(unsafe[0])})${unsafe.length > 1 ? html` And ${countOf(unsafe.length - 1, "other warning")}: see the <a href=${to("overview")}>overview</a>.` : null}
        <//>`
      : null}
    ${away.length > 0
      ? html`<${Note} tone="warn" role="alert" title=${awayText(away)}>
          Figures do not include ${away.length === 1 ? "it" : "them"}, and lists wait for ${away.length === 1 ? "it" : "them"}. ${away[0].detail}
        <//>`
      : null}
  </div>`;
}

function awayText(away) {
  const shards = away.filter((place) => place.shard !== null).map((place) => place.shard);
  if (shards.length === 0) return `The instance ${away[0].instance ?? ""} is not available.`;
  return shards.length === 1 ? `Shard ${shards[0]} is not available.` : `Shards ${shards.join(", ")} are not available.`;
}

function Theme() {
  const [theme, setTheme] = useState(document.documentElement.dataset.theme ?? "auto");
  const change = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    if (next === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem("halfway.theme", next);
    } catch {
      // The theme then applies to this page only.
    }
    setTheme(next);
  };
  return html`<button class="small quiet" onClick=${change} aria-label="Theme: ${theme}. Change it">Theme: ${theme}</button>`;
}

render(html`<${App} />`, document.getElementById("app"));
