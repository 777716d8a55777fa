// The map of all sites over all steps, with what is chosen in it.

import { KIND_NAMES, STATS } from "./data.js";
import { formatNumber, plural } from "./numbers.js";
import { quantiles, findPlace } from "./scales.js";
import { makePalette, pixelToText, shadeOf } from "./colours.js";
import { announce, hideTooltip, make, makeChoice, readStyle, showTooltip } from "./elements.js";
import { Heatmap } from "./heatmap.js";
import { Inspector, describeCell, nameSteps } from "./inspector.js";

const AROUND = 30;
const HELP =
  "Click a cell to see its site. Drag to zoom into steps, double-click to see all. " +
  "Arrow keys move, Enter chooses, plus and minus zoom, 0 shows all steps.";

export class Explorer {
  constructor(data, findings, theme) {
    this.data = data;
    this.findings = findings;
    this.theme = theme;
    this.kind = data.kinds[0];
    this.stat = data.stats(this.kind)[0];
    this.isRelative = false;
    this.filter = "";
    this.chosen = null;
    this.map = new Heatmap({
      label: "Heat map of sites against steps",
      height: 600,
      handlers: {
        onHover: (row, column, event) => this.onHover(row, column, event),
        onLeave: hideTooltip,
        onSelect: (row, column) => this.select(this.rows[row], column),
        onMove: (row, column) => this.say(row, column),
        onZoom: (isZoomed) => {
          this.reset.hidden = !isZoomed;
        },
      },
    });
    this.inspector = new Inspector(data);
    this.element = make("div", { class: "explorer" });
    this.build();
  }

  build() {
    const { data } = this;
    const kinds = data.kinds.map((value) => ({ value, text: KIND_NAMES[value] }));
    this.kindChoice = makeChoice("Sites", kinds, (kind) => this.setKind(kind));
    this.statSelect = make("select", { id: "stat", onchange: () => this.setStat(this.statSelect.value) });
    this.colourChoice = makeChoice(
      "Colour",
      [{ value: "absolute", text: "Value" }, { value: "relative", text: "Change" }],
      (value) => {
        this.isRelative = value === "relative";
        this.refresh();
      },
    );
    this.colourChoice.show("absolute");
    this.search = make("input", {
      type: "search",
      id: "filter",
      placeholder: "Filter sites, such as attn",
      spellcheck: "false",
      autocomplete: "off",
      oninput: () => {
        this.filter = this.search.value;
        this.refresh();
      },
    });
    this.count = make("span", { class: "quiet", id: "site-count" });
    this.reset = make("button", { type: "button", class: "link-button", text: "Show all steps", hidden: true });
    this.reset.addEventListener("click", () => this.map.zoom(0, this.map.model.columns));
    this.legend = make("div", { class: "legend" });
    this.element.append(
      make("div", { class: "section-head" }, make("h2", { text: "Every site, every step" }), this.count),
      make(
        "div",
        { class: "toolbar" },
        this.kindChoice.element,
        make("label", { class: "field", for: "stat" }, make("span", { text: "Statistic" }), this.statSelect),
        make("div", { class: "field" }, make("span", { text: "Colour by" }), this.colourChoice.element),
        make("label", { class: "field field-wide", for: "filter" }, make("span", { text: "Filter" }), this.search),
      ),
      make(
        "div",
        { class: "explorer-body" },
        make(
          "div",
          { class: "map-side" },
          make("div", { class: "map-frame" }, this.map.element),
          make("div", { class: "map-foot" }, this.legend, this.reset),
          make("p", { class: "quiet help", id: "heat-help", text: HELP }),
        ),
        this.inspector.element,
      ),
    );
  }

  async start(place, step) {
    if (place) [this.kind] = place;
    await this.setKind(this.kind, place ? place[1] : 0, step);
  }

  // Go to one site at one step, and look closely at the steps around it.
  async goTo(place, step) {
    this.search.value = "";
    this.filter = "";
    await this.start(place, step);
    const { column } = this.chosen;
    if (this.map.model.columns > 2 * AROUND) this.map.zoom(column - AROUND, column + AROUND / 2);
  }

  async setKind(kind, row = null, step = null) {
    const address = this.chosen && this.data.sites(this.kind)[this.chosen.row]?.address;
    this.kind = kind;
    this.kindChoice.show(kind);
    const stats = this.data.stats(kind);
    if (!stats.includes(this.stat) || kind === "update") [this.stat] = stats;
    this.statSelect.replaceChildren(...stats.map((stat) => make("option", { value: stat, text: STATS[stat].name })));
    this.statSelect.value = this.stat;
    const columns = this.data.columns.first.length;
    const column = step === null ? (this.chosen?.column ?? columns - 1) : findPlace(this.data.columns.first, step);
    this.chosen = { row: row ?? this.findLike(address), column };
    await this.refresh();
    this.showChosen();
  }

  // The site of this kind that belongs to the same module as one of another kind.
  findLike(address) {
    const module = (address ?? "").split(":")[0];
    const sites = this.data.sites(this.kind);
    const near = (path) => sites.findIndex((site) => path && site.address.split(":")[0].startsWith(path));
    const found = [near(module), near(module.replace(/\.[^.]*$/, ""))].find((at) => at >= 0);
    return found ?? 0;
  }

  async setStat(stat) {
    this.stat = stat;
    await this.refresh();
    this.inspect();
  }

  setTheme(theme) {
    this.theme = theme;
    this.refresh();
    this.inspect();
  }

  matches(address) {
    const words = this.filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
    return words.every((word) => address.toLowerCase().includes(word.replaceAll("*", "")));
  }

  async refresh() {
    const { data, kind, stat } = this;
    const [table, bad] = await Promise.all([data.table(kind, stat), data.bad(kind)]);
    if (kind !== this.kind || stat !== this.stat) return;
    this.table = table;
    this.bad = bad;
    const sites = data.sites(kind);
    this.rows = sites.map((_, row) => row).filter((row) => this.matches(sites[row].address));
    const { columns } = table;
    const { shares, legend } = this.measure(table);
    const chosen = new Float32Array(this.rows.length * columns);
    const isBad = new Uint8Array(this.rows.length * columns);
    this.rows.forEach((row, at) => {
      chosen.set(shares.subarray(row * columns, (row + 1) * columns), at * columns);
      isBad.set(bad.subarray(row * columns, (row + 1) * columns), at * columns);
    });
    const palette = makePalette(this.theme, this.isRelative);
    const total = plural(sites.length, "site");
    this.count.textContent = this.rows.length < sites.length ? `${this.rows.length} of ${total}` : total;
    this.map.show({
      rows: this.rows.length,
      columns,
      labels: this.rows.map((row) => shortName(sites[row].address)),
      first: data.columns.first,
      shares: chosen,
      isBad,
      palette,
      markers: this.listMarkers(),
    });
    this.drawLegend(legend, palette, bad.includes(1));
    const at = this.rows.indexOf(this.chosen.row);
    if (at >= 0) this.map.place(at, this.chosen.column, { scroll: false });
    else this.map.cursor = null;
    this.map.draw();
  }

  // From numbers to shares of the colour bar; zero is -1, what was not measured NaN.
  measure(table) {
    const { logs } = table;
    const isLinear = STATS[this.stat].isLinear;
    const shares = new Float32Array(logs.length).fill(NaN);
    if (this.isRelative) return this.measureChange(table, shares);
    const finite = logs.filter(Number.isFinite);
    if (isLinear) {
      for (let at = 0; at < logs.length; at += 1) {
        if (logs[at] < Infinity) shares[at] = logs[at] === -Infinity ? -1 : Math.min(1, 2 ** logs[at]);
      }
      return { shares, legend: { ends: ["0", "100 %"] } };
    }
    if (!finite.length) {
      for (let at = 0; at < logs.length; at += 1) if (logs[at] === -Infinity) shares[at] = -1;
      return { shares, legend: { ends: ["0", "0"] } };
    }
    // The outermost half percent would take most of the colours for a few cells.
    let [low, high] = quantiles(finite, [0.005, 0.995]);
    if (high - low < 2) [low, high] = [(low + high) / 2 - 1, (low + high) / 2 + 1];
    for (let at = 0; at < logs.length; at += 1) {
      if (logs[at] === -Infinity) shares[at] = -1;
      else if (logs[at] < Infinity) shares[at] = Math.max(0, Math.min(1, (logs[at] - low) / (high - low)));
    }
    return { shares, legend: { ends: [formatNumber(2 ** low), formatNumber(2 ** high)], middle: formatNumber(2 ** ((low + high) / 2)) } };
  }

  // Each row against its own median: what changes over time, whatever the size.
  measureChange({ logs, rows, columns }, shares) {
    const medians = [];
    const apart = [];
    for (let row = 0; row < rows; row += 1) {
      const own = logs.subarray(row * columns, (row + 1) * columns).filter(Number.isFinite);
      medians.push(own.length ? quantiles(own, [0.5])[0] : NaN);
      for (const log of own) apart.push(Math.abs(log - medians[row]));
    }
    const reach = apart.length ? Math.max(1, Math.min(10, quantiles(apart, [0.995])[0])) : 1;
    for (let at = 0; at < logs.length; at += 1) {
      if (logs[at] === -Infinity) shares[at] = -1;
      else if (logs[at] < Infinity) {
        const away = (logs[at] - medians[Math.floor(at / columns)]) / reach;
        shares[at] = Math.max(0, Math.min(1, 0.5 + away / 2));
      }
    }
    const times = formatNumber(2 ** reach);
    return { shares, legend: { ends: [`1/${times} of its median`, `${times}×`], middle: "median" } };
  }

  drawLegend({ ends, middle }, palette, hasBad) {
    const bar = make("canvas", { width: 160, height: 10, class: "legend-bar", "aria-hidden": "true" });
    const context = bar.getContext("2d");
    for (let x = 0; x < 160; x += 1) {
      context.fillStyle = pixelToText(shadeOf(palette, x / 159));
      context.fillRect(x, 0, 1, 10);
    }
    const swatch = (colour, text) => {
      const box = make("span", { class: "swatch" });
      box.style.background = colour;
      return make("span", { class: "legend-item" }, box, make("span", { text }));
    };
    const words = [make("span", { text: ends[0] }), bar, make("span", { text: ends[1] })];
    this.legend.replaceChildren(
      make("span", { class: "legend-item", title: middle ? `middle: ${middle}` : "" }, ...words),
      hasBad ? swatch(palette.names.bad, "NaN or Inf") : "",
      swatch(palette.names.zero, "zero"),
      swatch(palette.names.missing, "not measured"),
    );
  }

  listMarkers() {
    const { first } = this.data.columns;
    return this.findings.map(({ place, step, severity }) => {
      const at = place && place[0] === this.kind ? this.rows.indexOf(place[1]) : -1;
      return { row: at >= 0 ? at : null, column: findPlace(first, step), colour: readStyle(`--${severity}`) };
    });
  }

  onHover(row, column, event) {
    const own = this.rows[row];
    const lines = this.describe(own, column);
    showTooltip(lines, event.clientX, event.clientY);
  }

  describe(row, column) {
    const isBad = this.bad[row * this.table.columns + column];
    return [
      { text: this.data.sites(this.kind)[row].address, kind: "name" },
      { text: describeCell(this.table.value(row, column), isBad, this.stat), kind: "strong" },
      { text: nameSteps(this.data.columns, column), kind: "soft" },
      ...(isBad ? [{ text: "has NaN or Inf", kind: "bad" }] : []),
    ];
  }

  say(row, column) {
    announce(this.describe(this.rows[row], column).map(({ text }) => text).join(", "));
  }

  select(row, column) {
    this.chosen = { row, column };
    this.inspect();
    this.say(this.rows.indexOf(row), column);
    this.onSelect?.(column);
  }

  showChosen() {
    const at = this.rows.indexOf(this.chosen.row);
    if (at >= 0) this.map.place(at, this.chosen.column);
    this.inspect();
  }

  inspect() {
    const { row, column } = this.chosen;
    this.inspector.show({
      kind: this.kind,
      stat: this.stat,
      row,
      column,
      theme: this.theme,
      findings: markSteps(this.findings),
      onPick: (picked) => {
        this.chosen = { row, column: picked };
        this.showChosen();
      },
    });
  }
}

export function markSteps(findings) {
  return findings.map(({ step, severity, rule }) => ({ x: step, colour: readStyle(`--${severity}`), text: `${rule} at step ${step}` }));
}

function shortName(address) {
  return address.replace(/:output(\.grad)?$/, "").replace(/:(grad|update)$/, "") || "model";
}
