// The two runs next to each other in the order of execution: which sites there are, what is folded.

import { SECTION_NAMES, colourOf, sampleDistances } from "./diffdata.js";
import { formatNumber, formatPower, plural } from "./numbers.js";
import { makePalette } from "./colours.js";
import { announce, make, makeChoice } from "./elements.js";
import { RowList } from "./rowlist.js";
import { PairDetails } from "./pairdetails.js";

const KEPT = 2;
const LEAST_FOLD = 4;
const DEEPEST = 8;
const ROWS_HELP =
  "Click a row to see its numbers. Arrow keys move, n and p go to the next and the previous site " +
  "that differs, Enter opens what is folded. Below the limit cells are blue, beyond it orange.";

export class SideBySide {
  constructor(data, theme) {
    this.data = data;
    this.palette = makePalette(theme, true);
    this.filter = "";
    this.mode = data.facts.same ? "all" : "folded";
    this.opened = new Set();
    this.list = new RowList({
      label: "Sites of both runs in the order of execution",
      draw: (item) => this.drawItem(item),
      colour: (item) => this.colourItem(item),
      handlers: {
        onChoose: (at, isKey) => this.choose(at, isKey),
        onKey: (event, at) => this.onKey(event, at),
      },
    });
    this.details = new PairDetails(data);
    this.element = make("div", { class: "side-by-side" });
    this.build();
    this.refresh();
  }

  build() {
    const { facts } = this.data;
    const modes = [
      { value: "folded", text: "Folded" },
      { value: "all", text: "All" },
      { value: "differing", text: "Differing" },
    ];
    this.modeChoice = makeChoice("Show", modes, (mode) => {
      this.mode = mode;
      this.refresh();
    });
    this.modeChoice.show(this.mode);
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
    this.legend = make("div", { class: "legend" });
    const words = this.data.first < 0 ? "Nearest to the limit" : "First difference";
    const first = make("button", { type: "button", class: "plain-button", id: "to-first", text: words });
    first.addEventListener("click", () => this.goToFirst());
    const names = make(
      "div",
      { class: "rows-head", "aria-hidden": "true" },
      make("span", { text: `A  ${facts.titles[0]}` }),
      make("span", { class: "rows-head-middle", text: "r" }),
      make("span", { class: "rows-head-middle", text: "verdict" }),
      make("span", { class: "rows-head-b", text: `B  ${facts.titles[1]}` }),
    );
    this.element.append(
      make("div", { class: "section-head" }, make("h2", { text: "Site by site" }), this.count),
      make(
        "div",
        { class: "toolbar" },
        this.modeChoice.element,
        first,
        make("label", { class: "field field-wide", for: "filter" }, make("span", { text: "Filter" }), this.search),
      ),
      make(
        "div",
        { class: "explorer-body" },
        make(
          "div",
          { class: "map-side" },
          make("div", { class: "map-frame rows-card" }, names, this.list.element),
          make("div", { class: "map-foot" }, this.legend),
          make("p", { class: "quiet help", id: "rows-help", text: ROWS_HELP }),
        ),
        this.details.element,
      ),
    );
    this.drawLegend();
  }

  setTheme(theme) {
    this.palette = makePalette(theme, true);
    this.drawLegend();
    this.list.redraw();
    this.details.redraw();
  }

  // Which rows are listed: sections, sites, and folds of sites that agree.
  refresh() {
    const { rows } = this.data;
    const words = this.filter.trim().toLowerCase().split(/\s+/).filter(Boolean);
    const matches = (row) => words.every((word) => row.text.includes(word.replaceAll("*", "")));
    const wanted = [];
    rows.forEach((row, at) => {
      // What a module is given was mostly given back by another, and is listed there.
      const isListed = this.mode === "all" || !row.same || row.isFirst;
      if (isListed && matches(row) && (this.mode !== "differing" || row.isOver)) wanted.push(at);
    });
    const items = [];
    let section = null;
    let part = [];
    const flush = () => {
      items.push(...(this.mode === "folded" ? this.foldRows(part) : part.map((row) => ({ row }))));
      part = [];
    };
    for (const at of wanted) {
      if (rows[at].section !== section) {
        flush();
        section = rows[at].section;
        items.push({ section, count: wanted.filter((one) => rows[one].section === section).length });
      }
      part.push(at);
    }
    flush();
    const total = plural(rows.length, "site");
    this.count.textContent = wanted.length < rows.length ? `${wanted.length} of ${total}` : total;
    this.list.show(items);
    this.placeChosen();
  }

  // Replace what agrees, far from what does not, by one line each.
  foldRows(part) {
    const { rows } = this.data;
    const isNear = new Uint8Array(part.length);
    part.forEach((row, at) => {
      if (!rows[row].isOver) return;
      for (let near = at - KEPT; near <= at + KEPT; near += 1) if (near >= 0 && near < part.length) isNear[near] = 1;
    });
    const items = [];
    for (let at = 0; at < part.length; ) {
      let end = at;
      while (end < part.length && !isNear[end]) end += 1;
      if (end - at >= LEAST_FOLD && !this.opened.has(part[at])) {
        items.push({ fold: part.slice(at, end) });
        at = end;
      } else if (end > at) {
        for (; at < end; at += 1) items.push({ row: part[at] });
      } else {
        items.push({ row: part[at] });
        at += 1;
      }
    }
    return items;
  }

  drawItem(item) {
    if (item.section !== undefined) return this.drawSection(item);
    return item.fold ? this.drawFold(item) : this.drawPair(this.data.rows[item.row]);
  }

  drawSection({ section, count }) {
    const text = `${SECTION_NAMES[section] ?? section}`;
    return make(
      "div",
      { class: "row-section", role: "row" },
      make("span", { role: "gridcell", text }),
      make("span", { class: "quiet", role: "gridcell", text: plural(count, "site") }),
    );
  }

  drawFold({ fold }) {
    const most = fold.reduce((best, at) => Math.max(best, this.data.rows[at].r || 0), 0);
    const text = `${plural(fold.length, "site")} ${fold.length === 1 ? "agrees" : "agree"}`;
    return make(
      "div",
      { class: "row-fold", role: "row" },
      make("span", { role: "gridcell", text: `+ ${text}${most > 0 ? ` to ${formatNumber(most)}` : " exactly"}` }),
    );
  }

  drawPair(row) {
    const cell = make("span", { class: "row-r", role: "gridcell", text: describeR(row) });
    const { back, text } = colourOf(this.palette, row.far);
    cell.style.background = back;
    cell.style.color = text;
    const verdict = make("span", { class: "row-verdict", role: "gridcell", text: row.verdict, "data-verdict": row.verdict });
    const kinds = ["row-pair", row.isFirst ? "row-first" : "", row.a ? "" : "row-only-b"];
    return make(
      "div",
      { class: kinds.filter(Boolean).join(" "), role: "row" },
      drawName(row.a, row.depth),
      cell,
      verdict,
      drawName(row.b, row.depth, "row-b"),
    );
  }

  colourItem(item) {
    if (item.section !== undefined) return null;
    const rows = (item.fold ?? [item.row]).map((at) => this.data.rows[at]);
    const far = rows.reduce((best, row) => (row.far > best || Number.isNaN(best) ? row.far : best), NaN);
    if (Number.isNaN(far)) return null;
    return { colour: colourOf(this.palette, far).back, weight: far };
  }

  drawLegend() {
    const bar = make("canvas", { width: 160, height: 10, class: "legend-bar", "aria-hidden": "true" });
    const context = bar.getContext("2d");
    const distances = sampleDistances(160);
    distances.forEach((far, x) => {
      context.fillStyle = colourOf(this.palette, far).back;
      context.fillRect(x, 0, 1, 10);
    });
    const swatch = (colour, text) => {
      const box = make("span", { class: "swatch" });
      box.style.background = colour;
      return make("span", { class: "legend-item" }, box, make("span", { text }));
    };
    const end = (far) => `10${formatPower(Math.round(far))}`;
    this.legend.replaceChildren(
      make(
        "span",
        { class: "legend-item" },
        make("span", { text: `r ÷ limit  ${end(distances[0])}` }),
        bar,
        make("span", { text: end(distances[159]) }),
      ),
      swatch(this.palette.names.zero, "exactly the same"),
      swatch(this.palette.names.bad, "not comparable by r"),
    );
  }

  choose(at, isKey = false) {
    const item = this.list.items[at];
    if (item.fold && !isKey) {
      this.openFold(item);
      return;
    }
    this.list.place(at);
    if (item.row === undefined) {
      announce(this.list.shown.get(at)?.textContent ?? "");
      return;
    }
    this.chosen = item.row;
    const row = this.data.rows[item.row];
    this.details.show(row);
    announce(`${(row.a ?? row.b).address}, r ${describeR(row)}, ${row.verdict}`);
  }

  openFold({ fold }) {
    this.opened.add(fold[0]);
    const { scrollTop } = this.list.host;
    this.refresh();
    this.list.host.scrollTop = scrollTop;
    this.list.drawRows();
  }

  onKey({ key }, at) {
    const { items } = this.list;
    if ((key === "Enter" || key === " ") && items[at]?.fold) {
      this.openFold(items[at]);
      return true;
    }
    if (key !== "n" && key !== "p") return false;
    const step = key === "n" ? 1 : -1;
    for (let near = at + step; near >= 0 && near < items.length; near += step) {
      if (items[near].row !== undefined && this.data.rows[items[near].row].isOver) {
        this.choose(near, true);
        return true;
      }
    }
    return true;
  }

  placeChosen() {
    const at = this.list.items.findIndex((item) => item.row !== undefined && item.row === this.chosen);
    if (at >= 0) this.list.place(at, 0.35);
  }

  goToFirst() {
    this.goTo(this.data.first < 0 ? this.data.nearest : this.data.first);
  }

  // Show one row, whatever is filtered or folded at the moment.
  goTo(row) {
    const isListed = () => this.list.items.findIndex((item) => item.row === row);
    if (isListed() < 0) {
      this.search.value = "";
      this.filter = "";
      if (this.mode !== "all") {
        this.mode = "all";
        this.modeChoice.show("all");
      }
      this.refresh();
    }
    const at = isListed();
    this.choose(at, true);
    this.list.place(at, 0.35);
  }
}

export function describeR({ r, verdict, isOther }) {
  if (isOther) return "≠";
  if (Number.isNaN(r)) return verdict === "alone" ? "" : "–";
  return r === 0 ? "0" : formatNumber(r);
}

// A name whose end is always there: what is cut is the path before it.
function drawName(site, depth, kind = "row-a") {
  const cell = make("span", { class: `row-name ${kind}`, role: "gridcell" });
  if (!site) return cell;
  cell.title = site.address;
  cell.style.paddingLeft = `${Math.min(DEEPEST, depth) * 9}px`;
  const cut = findTail(site.address);
  cell.append(
    make("span", { class: "row-path", text: site.address.slice(0, cut) }),
    make("span", { class: site.isSame ? "row-tail row-same" : "row-tail", text: site.address.slice(cut) }),
  );
  return cell;
}

// Where the last part of an address begins: `act:output` of `blocks.5.mlp.act:output`.
function findTail(address) {
  const end = address.search(/[:#]/);
  return address.lastIndexOf(".", (end < 0 ? address.length : end) - 1) + 1;
}
