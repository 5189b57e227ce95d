// The last points of several series, in a fixed amount of memory.

export class Ring {
  constructor(names, length) {
    this.length = length;
    this.times = new Float64Array(length);
    this.series = Object.fromEntries(names.map((name) => [name, new Float64Array(length)]));
    this.next = 0;
    this.count = 0;
  }

  // A series that has no value gets a gap.
  push(time, values) {
    this.times[this.next] = time;
    for (const [name, points] of Object.entries(this.series)) points[this.next] = values[name] ?? NaN;
    this.next = (this.next + 1) % this.length;
    this.count = Math.min(this.count + 1, this.length);
  }

  // Calls `visit(time, value)` for each point of a series, oldest first.
  each(name, visit) {
    const points = this.series[name];
    for (let number = 0; number < this.count; number += 1) {
      const index = (this.next - this.count + number + this.length) % this.length;
      visit(this.times[index], points[index]);
    }
  }

  clear() {
    this.count = 0;
  }
}
