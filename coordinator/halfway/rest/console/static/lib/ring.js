// The last points of several series, in a fixed amount of memory however long the page stays open.

export class Ring {
  constructor(names, length) {
    this.length = length;
    this.times = new Float64Array(length);
    this.series = Object.fromEntries(names.map((name) => [name, new Float64Array(length)]));
    this.next = 0;
    this.count = 0;
  }

  // A series without a value has a gap there.
  push(time, values) {
    this.times[this.next] = time;
    for (const [name, points] of Object.entries(this.series)) points[this.next] = values[name] ?? NaN;
    this.next = (this.next + 1) % this.length;
    this.count = Math.min(this.count + 1, this.length);
  }

  // Calls `visit(time, value)` for each point of a series, the oldest first.
  each(name, visit) {
    const points = this.series[name];
    for (let turn = 0; turn < this.count; turn += 1) {
      const place = (this.next - this.count + turn + this.length) % this.length;
      visit(this.times[place], points[place]);
    }
  }

  clear() {
    this.count = 0;
  }
}
