// An SVG chart: one line per series over the last minutes. Its values are also in the text alternative.

import { html } from "../vendor/htm-preact.js";
import { rate } from "../lib/format.js";

const WIDTH = 600;
const HEIGHT = 120;
const SPANS_MIN = [1, 2, 5, 10, 15];
const MAX_GAP_MS = 15_000;

// `series`: [{name, label, line}]; `line` is the CSS class of the line and of its mark in the legend.
export function Chart({ title, ring, series, unit = "per second" }) {
  const end = newest(ring);
  const minutes = SPANS_MIN.find((span) => end - oldest(ring) <= span * 60_000) ?? SPANS_MIN.at(-1);
  const spanMs = minutes * 60_000;
  const ago = `${minutes} min`;
  const lines = series.map((item) => ({ ...item, ...pointsOf(ring, item.name, end - spanMs, end) }));
  const top = roundUp(Math.max(...lines.map((line) => line.top), 0));
  const values = lines.map((line) => `${line.label} ${rate(line.latest)}`).join(", ");
  return html`<figure class="chart">
    <figcaption>
      <span class="chart-title">${title}</span>
      <ul class="legend">${lines.map((line) => html`<li key=${line.name}><span class="swatch ${line.line}" aria-hidden="true"></span>${line.label} <b>${rate(line.latest)}</b></li>`)}</ul>
    </figcaption>
    <div class="plot">
      <svg viewBox="0 0 ${WIDTH} ${HEIGHT}" preserveAspectRatio="none" role="img" aria-label="${title}, ${unit}, the last ${ago}. Now: ${values}.">
        ${[0, 0.5, 1].map((part) => html`<line class="grid" x1="0" x2=${WIDTH} y1=${yOf(part)} y2=${yOf(part)} />`)}
        ${lines.map((line) => html`<path key=${line.name} class="line ${line.line}" d=${pathOf(line.points, top, spanMs)} />`)}
      </svg>
      <span class="top">${rate(top)}</span><span class="bottom">0</span>
      <span class="from">${ago} ago</span><span class="to">now</span>
    </div>
  </figure>`;
}

function newest(ring) {
  return ring.count === 0 ? 0 : ring.times[(ring.next - 1 + ring.length) % ring.length];
}

function oldest(ring) {
  return ring.count === 0 ? 0 : ring.times[(ring.next - ring.count + ring.length) % ring.length];
}

function pointsOf(ring, name, begin, end) {
  const points = [];
  let top = 0;
  let latest = null;
  ring.each(name, (time, value) => {
    latest = value;
    if (time < begin) return;
    points.push([time - end, value]);
    if (value > top) top = value;
  });
  return { points, top, latest };
}

function pathOf(points, top, spanMs) {
  let path = "";
  let before = null;
  for (const [time, value] of points) {
    if (Number.isNaN(value)) {
      before = null;
      continue;
    }
    const x = (((time + spanMs) / spanMs) * WIDTH).toFixed(1);
    path += `${before === null || time - before > MAX_GAP_MS ? "M" : "L"}${x} ${yOf(value / top).toFixed(1)}`;
    before = time;
  }
  return path;
}

function yOf(part) {
  return HEIGHT - 2 - part * (HEIGHT - 4);
}

// The smallest of 1, 2, 5, 10, 20, … that is not below a value.
function roundUp(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}
