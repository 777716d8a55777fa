// One site: its facts, one statistic over the steps, its exponents over time.

import { STATS } from "./data.js";
import { make, makeChoice } from "./elements.js";
import { LineChart, describeValue } from "./linechart.js";
import { ExponentMap } from "./exponents.js";
import { formatNumber } from "./numbers.js";

export class Inspector {
  constructor(data) {
    this.data = data;
    this.scale = null;
    this.current = null;
    this.title = make("h3", { class: "site-name" });
    this.facts = make("p", { class: "site-facts" });
    this.reading = make("p", { class: "site-reading" });
    this.chart = new LineChart({ label: "The chosen statistic of this site over steps", height: 190 });
    this.choice = makeChoice("Scale", [{ value: "log", text: "Log" }, { value: "linear", text: "Linear" }], (value) => {
      this.scale = value;
      this.drawSeries();
    });
    this.chartTitle = make("h4");
    this.exponentsTitle = make("h4", { text: "Exponents of the elements" });
    this.exponents = new ExponentMap({ height: 170 });
    this.none = make("p", { class: "quiet" });
    this.element = make(
      "aside",
      { class: "inspector", "aria-label": "The chosen site" },
      this.title,
      this.facts,
      this.reading,
      make("div", { class: "chart-head" }, this.chartTitle, this.choice.element),
      this.chart.element,
      this.exponentsTitle,
      this.exponents.element,
      this.none,
    );
  }

  // What is shown: kind, stat, row, column, theme, findings [{x, colour, text}], onPick(column)
  async show(chosen) {
    const { data } = this;
    const isOtherStat = this.current?.stat !== chosen.stat;
    this.current = chosen;
    const [table, bad, exponents] = await Promise.all([
      data.table(chosen.kind, chosen.stat),
      data.bad(chosen.kind),
      data.exponents(chosen.kind, chosen.row),
    ]);
    if (this.current !== chosen) return;
    const site = data.sites(chosen.kind)[chosen.row];
    this.title.textContent = site.address;
    this.facts.textContent = [site.type, site.shape.join("×"), site.dtype, site.source].filter(Boolean).join("  ·  ");
    if (isOtherStat || this.scale === null) this.scale = STATS[chosen.stat].isLinear ? "linear" : "log";
    const start = chosen.row * table.columns;
    this.values = table.series(chosen.row);
    this.isBad = bad.subarray(start, start + table.columns);
    this.drawSeries();
    this.drawExponents(exponents);
  }

  drawSeries() {
    const { columns } = this.data;
    const { stat, column, findings, onPick } = this.current;
    const isSigned = this.values.some((value) => value < 0);
    const at = nameSteps(columns, column);
    this.reading.replaceChildren(
      make("strong", { text: describeValue(this.values[column], this.isBad[column]) }),
      make("span", { text: ` ${STATS[stat].name} at ${at}${this.isBad[column] ? ", with NaN or Inf" : ""}` }),
    );
    this.chartTitle.textContent = STATS[stat].name;
    this.choice.element.hidden = isSigned;
    this.choice.show(this.scale);
    this.chart.show({
      xs: columns.first,
      values: this.values,
      isBad: this.isBad,
      isLog: this.scale === "log" && !isSigned,
      markers: findings,
      cursor: columns.first[column],
      onPick,
      describe: (place) => [
        { text: describeValue(this.values[place], this.isBad[place]), kind: "strong" },
        { text: nameSteps(columns, place), kind: "soft" },
        ...(this.isBad[place] ? [{ text: "has NaN or Inf", kind: "bad" }] : []),
      ],
    });
  }

  drawExponents(found) {
    const isThere = Boolean(found && found.levels.some((level) => level > 0));
    this.exponentsTitle.hidden = !isThere;
    this.exponents.element.hidden = !isThere;
    this.none.hidden = isThere;
    this.none.textContent = "No exponent histogram of this site was recorded.";
    if (isThere) this.exponents.show({ ...found, theme: this.current.theme });
  }
}

export function nameSteps(columns, column) {
  const [first, last] = [columns.first[column], columns.last[column]];
  return first === last ? `step ${first}` : `steps ${first} to ${last}, the largest`;
}

export function describeCell(value, isBad, stat) {
  return `${STATS[stat].name} ${isBad && !Number.isFinite(value) ? "not finite" : formatNumber(value)}`;
}
