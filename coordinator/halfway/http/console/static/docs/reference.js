// The reference of the API, rendered from openapi.json of the same host. All text is set as text.

import { html, render, useEffect, useState } from "../console/vendor/htm-preact.js";

const METHODS = ["get", "put", "patch", "post", "delete"];
const nameOf = (reference) => reference.replace("#/components/schemas/", "");
const only = (content) => Object.values(content ?? {})[0]?.schema;

// Text of the document: blank lines and list items begin lines, and `text` is code.
function Text({ of }) {
  const lines = String(of ?? "").split(/\n+/).filter(Boolean);
  const parts = (line) => line.split("`").map((part, at) => (at % 2 ? html`<code>${part}</code>` : part));
  return lines.map((line) => html`<p>${parts(line.replace(/^- /, "• "))}</p>`);
}

// The type of a value, with links to named schemas.
function Type({ of }) {
  if (!of) return null;
  if (of.$ref) return html`<a href=${`#schema-${nameOf(of.$ref)}`}>${nameOf(of.$ref)}</a>`;
  const union = of.anyOf ?? of.oneOf ?? of.allOf;
  if (union) return union.map((one, at) => html`${at > 0 && (of.allOf ? " and " : " or ")}<${Type} of=${one} />`);
  if (of.enum) return of.enum.map((one, at) => html`${at > 0 && " | "}<code>${JSON.stringify(one)}</code>`);
  if (of.const !== undefined) return html`<code>${JSON.stringify(of.const)}</code>`;
  if (of.type === "array") return html`list of <${Type} of=${of.items} />`;
  if (of.additionalProperties?.type || of.additionalProperties?.$ref) return html`map to <${Type} of=${of.additionalProperties} />`;
  if (Array.isArray(of.type)) return of.type.join(" or ");
  return of.type ?? (of.properties ? "object" : "any");
}

const NOTED = { minimum: "at least", maximum: "at most", exclusiveMinimum: "above", maxLength: "length at most", maxItems: "items at most", minItems: "items at least" };

function Facts({ of }) {
  const given = Object.keys(NOTED).filter((name) => of?.[name] !== undefined).map((name) => `${NOTED[name]} ${of[name]}`);
  if (of?.default !== undefined && of.default !== null) given.push(`default ${JSON.stringify(of.default)}`);
  return html`<${Text} of=${of?.description} />${given.length > 0 && !of.description && html`<span class="hint">${given.join(", ")}</span>`}`;
}

function Fields({ rows }) {
  return html`<table>
    <thead><tr><th>name</th><th>type</th><th>meaning</th></tr></thead>
    <tbody>${rows.map(({ name, schema, required, where }) => html`<tr>
      <td><code>${name}</code>${where && html` <span class="hint">${where}</span>`}${required && html` <span class="hint">required</span>`}</td>
      <td><${Type} of=${schema} /></td><td><${Facts} of=${schema} /></td></tr>`)}</tbody>
  </table>`;
}

function Operation({ operation, path, method }) {
  const parameters = operation.parameters ?? [];
  return html`<section class="panel" id=${operation.operationId}>
    <h3><span class=${`method ${method}`}>${method.toUpperCase()}</span>${path}</h3>
    <p>${operation.summary}</p><${Text} of=${operation.description} />
    ${parameters.length > 0 && html`<h4>Parameters</h4><${Fields} rows=${parameters.map((one) => ({ ...one, where: one.in }))} />`}
    ${operation.requestBody && html`<h4>Body</h4><p><${Type} of=${only(operation.requestBody.content)} />${!operation.requestBody.required && " (optional)"}</p>`}
    <h4>Answers</h4>
    <table><tbody>${Object.entries(operation.responses).map(([status, answer]) => html`<tr>
      <td>${status}</td><td><${Text} of=${answer.description} /></td>
      <td>${status < "400" && html`<${Type} of=${only(answer.content)} />`}</td></tr>`)}</tbody></table>
  </section>`;
}

function Schema({ name, schema }) {
  const required = new Set(schema.required ?? []);
  const rows = Object.entries(schema.properties ?? {}).map(([field, one]) => ({ name: field, schema: one, required: required.has(field) }));
  return html`<section class="panel" id=${`schema-${name}`}>
    <h3>${name}</h3><${Text} of=${schema.description} />
    ${rows.length > 0 ? html`<${Fields} rows=${rows} />` : html`<p><${Type} of=${schema} /></p>`}
  </section>`;
}

function Reference({ document: { info, paths, components } }) {
  const [wanted, setWanted] = useState("");
  useEffect(() => location.hash && document.getElementById(location.hash.slice(1))?.scrollIntoView(), []);
  const operations = Object.entries(paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => ({ path, method, operation: item[method] })));
  const matches = (text) => text.toLowerCase().includes(wanted.toLowerCase());
  const named = Object.keys(components.schemas).filter(matches);
  return html`<nav aria-label="Contents">
      <input type="search" aria-label="Filter" placeholder="Filter" value=${wanted} onInput=${(event) => setWanted(event.target.value)} />
      <ul>${operations.filter(({ path, operation }) => matches(path + operation.summary)).map(({ path, method, operation }) => html`<li>
        <a href=${`#${operation.operationId}`}><span class=${`method ${method}`}>${method.toUpperCase()}</span>${path}</a></li>`)}</ul>
      <ul>${named.map((name) => html`<li><a href=${`#schema-${name}`}>${name}</a></li>`)}</ul>
    </nav>
    <main>
      <h1>${info.title} ${info.version}: API reference</h1>
      <${Text} of=${info.description} />
      <p>The same as a document: <a href="../openapi.json">openapi.json</a>.</p>
      <h2>Calls</h2>${operations.map((one) => html`<${Operation} ...${one} />`)}
      <h2>Schemas</h2>${Object.entries(components.schemas).map(([name, schema]) => html`<${Schema} name=${name} schema=${schema} />`)}
    </main>`;
}

const root = document.getElementById("reference");
try {
  const answer = await fetch("../openapi.json");
  render(html`<${Reference} document=${await answer.json()} />`, root);
} catch (error) {
  render(html`<main><h1>API reference</h1><p>openapi.json could not be read: ${String(error)}</p></main>`, root);
}
