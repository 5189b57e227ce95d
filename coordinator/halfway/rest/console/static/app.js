// The frame around the views: who is signed in, where one is, and whether the coordinator is heard.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { call, Problem, unreachable } from "./lib/api.js";
import { clock } from "./lib/format.js";
import { start, stop, tryNow, useLive } from "./lib/live.js";
import { to, useRoute } from "./lib/router.js";
import { callerKind, currentKey, onRefused, publicId, signOut } from "./lib/session.js";
import { Badge, Empty, Failure, Heading, Loading, Note, useTick } from "./parts/common.js";
import { Failures } from "./views/failures.js";
import { Group, Groups } from "./views/groups.js";
import { Job, Jobs } from "./views/jobs.js";
import { Login } from "./views/login.js";
import { Overview } from "./views/overview.js";
import { Transaction } from "./views/transaction.js";
import { Transactions } from "./views/transactions.js";

const VIEWS = [
  ["overview", "Overview"],
  ["transactions", "Transactions"],
  ["groups", "Groups"],
  ["failures", "Failures"],
  ["jobs", "Jobs"],
];
const THEMES = ["auto", "light", "dark"];
const ASK_AGAIN_MS = 2000;

function App() {
  const [entry, setEntry] = useState("asking"); // asking, login, again, in
  const [problem, setProblem] = useState(null);
  useEffect(() => onRefused(() => {
    stop();
    setEntry((before) => (before === "in" ? "again" : before === "again" ? "again" : "login"));
    signOut();
  }), []);
  useEffect(() => {
    if (entry === "in") start();
    if (entry !== "asking") return undefined;
    let timer = null;
    const ask = async () => {
      try {
        await call("/groups", { query: { limit: 1 } });
        setProblem(null);
        setEntry("in");
      } catch (error) {
        if (error instanceof Problem && error.status === 401) {
          setEntry("login");
          return;
        }
        setProblem(error instanceof Problem ? error : unreachable());
        timer = setTimeout(ask, ASK_AGAIN_MS);
      }
    };
    void ask();
    return () => clearTimeout(timer);
  }, [entry]);
  if (entry === "asking") {
    return html`<main class="login"><h1 class="waiting">halfway</h1>${problem ? html`<${Failure} problem=${problem} />` : html`<${Loading} what="the console" />`}</main>`;
  }
  if (entry !== "in") return html`<${Login} again=${entry === "again"} onDone=${() => setEntry("in")} />`;
  const leave = () => {
    stop();
    signOut();
    setEntry("asking");
  };
  return html`<${Frame} onLeave=${leave} />`;
}

function Frame({ onLeave }) {
  const route = useRoute();
  return html`
    <a class="skip" href="#main" onClick=${skip}>Skip to the view</a>
    <header class="top">
      <a class="brand" href=${to("overview")}><img src="icon.svg" alt="" width="20" height="20" /> halfway</a>
      <nav aria-label="Views">${VIEWS.map(([view, label]) => html`<a key=${view} href=${to(view)} aria-current=${route.view === view ? "page" : null}>${label}</a>`)}</nav>
      <div class="top-side">
        <${Connection} />
        <${Theme} />
        ${currentKey() ? html`<span class="who">${callerKind() ?? "key"} <span class="mono">${publicId() ?? ""}</span></span><button class="small quiet" onClick=${onLeave}>Sign out</button>` : null}
      </div>
    </header>
    <${Warnings} />
    <main id="main" tabindex="-1"><${View} route=${route} key=${`${route.view}/${route.id ?? ""}`} /></main>`;
}

// The fragment is the address of a view, so a link to a place in the page has to be followed by hand.
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
    case "jobs":
      return route.id === null ? html`<${Jobs} />` : html`<${Job} id=${route.id} query=${route.query} />`;
    default:
      return html`<${Heading} title="Not found" /><${Empty} title="There is no such view.">The address names “${route.view}”. <a href=${to("overview")}>Go to the overview</a><//>`;
  }
}

function Connection() {
  const { status } = useLive();
  const [tone, word] = { live: ["good", "live"], lost: ["bad", "not connected"], connecting: ["info", "connecting"] }[status];
  return html`<span role="status"><${Badge} of=${word} tone=${tone} /></span>`;
}

// What makes the figures stale or less than whole; above every view.
function Warnings() {
  const { status, data, receivedAt, retryAt, problem } = useLive();
  useTick(1);
  const away = data?.away ?? [];
  const wait = retryAt === null ? 0 : Math.max(0, Math.ceil((retryAt - Date.now()) / 1000));
  return html`<div class="warnings">
    ${status === "lost"
      ? html`<${Note} tone="bad" role="alert" title="Not connected to the coordinator.">
          ${problem ? `${problem.detail} ` : null}${receivedAt ? `Figures are stale: they are as of ${clock(receivedAt)}. ` : null}${retryAt === null ? null : `Next try in ${wait} s. `}<button class="link" onClick=${tryNow}>Try now</button>
        <//>`
      : null}
    ${away.length > 0
      ? html`<${Note} tone="warn" role="alert" title=${awaySaid(away)}>
          Figures are without ${away.length === 1 ? "it" : "them"}, and lists wait for ${away.length === 1 ? "it" : "them"}. ${away[0].detail}
        <//>`
      : null}
  </div>`;
}

function awaySaid(away) {
  const shards = away.filter((one) => one.shard !== null).map((one) => one.shard);
  if (shards.length === 0) return `The instance ${away[0].instance ?? ""} is away.`;
  return shards.length === 1 ? `Shard ${shards[0]} is away.` : `Shards ${shards.join(", ")} are away.`;
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
      // Then it holds for this page only.
    }
    setTheme(next);
  };
  return html`<button class="small quiet" onClick=${change} aria-label="Theme: ${theme}. Change it">Theme: ${theme}</button>`;
}

render(html`<${App} />`, document.getElementById("app"));
