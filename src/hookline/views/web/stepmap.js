// How far two runs are apart over the steps: every pair of sites against every step.

import { compareToLimit, shareOf } from "./diffdata.js";
import { formatNumber } from "./numbers.js";
import { makePalette } from "./colours.js";
import { announce, hideTooltip, make, showTooltip } from "./elements.js";
import { Heatmap } from "./heatmap.js";
import { LineChart } from "./linechart.js";

const STEPS_HELP =
  "Colours as above: the limit in the middle. Click a cell to see its site. " +
  "Drag to zoom into steps, double-click to see all.";

export class StepMap {
  constructor(data, history, { theme, onPick }) {
    this.data = data;
    this.history = history;
    this.theme = theme;
    this.onPick = onPick;
    this.map = new Heatmap({
      label: "Heat map of pairs against steps",
      height: 420,
      handlers: {
        onHover: (row, column, event) => showTooltip(this.describe(row, column), event.clientX, event.clientY),
        onLeave: hideTooltip,
        onSelect: (row, column) => this.select(row, column),
        onMove: (row, column) => announce(this.describe(row, column).map(({ text }) => text).join(", ")),
      },
    });
    this.chart = new LineChart({ label: "The relative error of this site over steps", height: 150 });
    this.title = make("h4");
    this.element = make(
      "div",
      {},
      make("div", { class: "section-head" }, make("h2", { text: "Over the steps" })),
      make("div", { class: "map-frame" }, this.map.element),
      make("p", { class: "quiet help", id: "heat-help", text: STEPS_HELP }),
      make("div", { class: "card steps-card" }, this.title, this.chart.element),
    );
  }

  // Begin at the first difference; the element must be on the page, or nothing can be scrolled to.
  start() {
    this.show();
    const { rows, steps } = this.history;
    const first = Math.max(0, rows.indexOf(this.data.first));
    this.select(first, Math.max(0, steps.indexOf(this.data.facts.head.step)), { isQuiet: true });
  }

  show() {
    const { table, steps, rows } = this.history;
    const shares = new Float32Array(rows.length * steps.length).fill(NaN);
    const isBad = new Uint8Array(shares.length);
    table.logs.forEach((log, at) => {
      // The table holds r against the limit already.
      const far = compareToLimit(2 ** log, 1);
      if (far === Infinity) isBad[at] = 1;
      else if (!Number.isNaN(far)) shares[at] = shareOf(far);
    });
    this.map.show({
      rows: rows.length,
      columns: steps.length,
      labels: rows.map((row) => this.nameOf(row)),
      first: steps,
      shares,
      isBad,
      palette: makePalette(this.theme, true),
      markers: [],
    });
  }

  setTheme(theme) {
    this.theme = theme;
    this.show();
    this.chart.draw();
  }

  nameOf(row) {
    const { a, b } = this.data.rows[row];
    return (a ?? b).address;
  }

  describe(row, column) {
    const ratio = this.history.table.value(row, column);
    const words = Number.isNaN(ratio) ? "not compared" : `${formatNumber(ratio)} of the limit`;
    return [
      { text: this.nameOf(this.history.rows[row]), kind: "name" },
      { text: words, kind: "strong" },
      { text: `step ${this.history.steps[column]}`, kind: "soft" },
    ];
  }

  select(row, column, { isQuiet = false } = {}) {
    const { steps, rows, table } = this.history;
    const values = table.series(row);
    this.map.place(row, column, { scroll: isQuiet });
    this.title.textContent = `${this.nameOf(rows[row])}: r ÷ limit over the steps`;
    this.chart.show({
      xs: steps,
      values,
      isBad: Array.from(values, (value) => value === Infinity),
      isLog: true,
      cursor: steps[column],
      onPick: (place) => this.select(row, place),
      describe: (place) => this.describe(row, place).slice(1),
    });
    if (!isQuiet) this.onPick(rows[row]);
  }
}
