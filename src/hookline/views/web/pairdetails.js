// One site of both runs: how far apart, by which measure, and where in the tensor.

import { HOW_WORDS, RULE_WORDS, readNumber } from "./diffdata.js";
import { formatNumber } from "./numbers.js";
import { make } from "./elements.js";
import { LineChart } from "./linechart.js";

const MOST_CHARTS = 4;
const RARE = ["nan", "posinf", "neginf"];
const FROM_WORDS = {
  tensor: "from the tensors",
  sketch: "estimated from sketches",
  statistics: "at least this, from statistics",
};

export class PairDetails {
  constructor(data) {
    this.data = data;
    this.element = make("aside", { class: "inspector pair", "aria-label": "The chosen site" });
    this.current = null;
    this.charts = [];
    this.element.append(make("p", { class: "quiet", text: "Choose a row to see its numbers." }));
  }

  redraw() {
    for (const chart of this.charts) chart.draw();
  }

  show(row) {
    this.current = row;
    this.charts = [];
    const parts = [
      make("h3", { class: "site-name", text: (row.a ?? row.b).address }),
      this.describeMatch(row),
      this.describeReading(row),
    ];
    if (row.more?.length) parts.push(make("ul", { class: "pair-causes" }, ...row.more.map((text) => make("li", { text }))));
    parts.push(this.makeSides(row));
    const detail = row.detail;
    if (detail) parts.push(...this.makeDetail(row, detail));
    else if (row.a && row.b && row.r !== 0) parts.push(make("p", { class: "quiet pair-hint", text: adviseDetail(row) }));
    this.element.replaceChildren(...parts.filter(Boolean));
    for (const chart of this.charts) chart.draw();
  }

  describeMatch({ a, b, rule, how }) {
    if (!a || !b) return make("p", { class: "site-facts", text: `only in ${a ? "A" : "B"}` });
    const words = [`matched ${RULE_WORDS[rule] ?? rule}`, HOW_WORDS[how] ?? how];
    if (a.address !== b.address) words.unshift(`in B: ${b.address}`);
    return make("p", { class: "site-facts", text: words.filter(Boolean).join("  ·  ") });
  }

  describeReading(row) {
    if (!row.a || !row.b) return null;
    const parts = [make("strong", { text: Number.isNaN(row.r) ? "not compared" : formatNumber(row.r) })];
    if (!Number.isNaN(row.r)) {
      const words = [` relative error, limit ${formatNumber(row.limit)}`];
      if (!Number.isNaN(row.floor)) {
        words.push(`, floor ${formatNumber(row.floor)}`);
        if (row.floor > 0 && row.r > row.floor && Number.isFinite(row.r)) words.push(` (×${formatNumber(row.r / row.floor)})`);
      }
      parts.push(make("span", { text: words.join("") }));
    }
    const verdict = make("span", { class: "row-verdict", text: row.verdict, "data-verdict": row.verdict });
    const words = [row.word, FROM_WORDS[row.measured], row.same ? `the very tensor of ${row.same}` : ""];
    const rest = make("span", { class: "quiet", text: ["", ...words.filter(Boolean)].join("  ·  ") });
    return make("p", { class: "site-reading" }, ...parts, make("br"), verdict, rest);
  }

  // What is known of each side on its own, one line a fact.
  makeSides({ a, b, stats, visit, module, isFirst }) {
    const { settings } = this.data.facts;
    const lines = [
      ["class", a?.type, b?.type],
      ["shape", describeShape(a), describeShape(b)],
      ["dtype", a?.dtype, b?.dtype],
      ["source", a?.source, b?.source],
    ];
    if (visit) lines.push(["visit", String(visit), String(visit)]);
    // At the first difference they are told as its cause.
    if (!isFirst) lines.push(...(settings[module] ?? []));
    this.data.facts.stats.forEach((name, at) => {
      const values = [stats?.[0]?.[at], stats?.[1]?.[at]];
      if (values.every((value) => value === undefined || value === null)) return;
      if (RARE.includes(name) && values.every((value) => value === 0)) return;
      lines.push([name, ...values.map((value) => (value === undefined || value === null ? "" : showNumber(value)))]);
    });
    const rows = lines
      .filter(([, one, other]) => one || other)
      .map(([name, one, other]) =>
        make(
          "tr",
          { class: one !== other ? "is-other" : "" },
          make("th", { text: name, scope: "row" }),
          make("td", { text: one ?? "" }),
          make("td", { text: other ?? "" }),
        ),
      );
    const head = make("tr", {}, make("td"), make("th", { text: "A", scope: "col" }), make("th", { text: "B", scope: "col" }));
    return make("table", { class: "sides" }, make("thead", {}, head), make("tbody", {}, ...rows));
  }

  makeDetail(row, detail) {
    const lines = [];
    const add = (name, value) => lines.push(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
    if (detail.largest) {
      const { error, at, a, b } = detail.largest;
      add("Largest error", `${showNumber(error)} at [${at.join(", ")}]: ${showLong(a)} in A, ${showLong(b)} in B`);
    }
    if (detail.mean !== undefined) add("Mean error", `${showNumber(detail.mean)} (B − A)`);
    if (detail.cosine !== undefined) add("Cosine", describeCosine(readNumber(detail.cosine)));
    if (detail.ulp) add("ULP apart", `${showNumber(detail.ulp[0])} in the middle, ${showNumber(detail.ulp[1])} at 99 %`);
    if (detail.close !== undefined) add("Close", `${describeShare(detail.close)} of the elements are within a thousandth`);
    const parts = [make("dl", { class: "pair-measures" }, ...lines)];
    for (const profile of (detail.profiles ?? []).slice(0, MOST_CHARTS)) parts.push(...this.makeProfile(row, profile));
    return parts;
  }

  makeProfile(row, { name, size, stride, values }) {
    const chart = new LineChart({ label: `Relative error along ${name}`, height: 130 });
    const numbers = values.map(readNumber);
    const places = numbers.map((_, at) => at * stride);
    const least = Math.min(...numbers.filter((value) => value > 0));
    const most = Math.max(...numbers.filter(Number.isFinite));
    chart.show({
      xs: places,
      values: numbers,
      isBad: numbers.map((value) => value === Infinity),
      isLog: most / least > 30 && numbers.every((value) => value > 0),
      describe: (place) => [
        { text: `${formatNumber(numbers[place])} relative error`, kind: "strong" },
        { text: `${name}, ${namePlaces(places[place], stride, size)}`, kind: "soft" },
      ],
    });
    this.charts.push(chart);
    const title = make("h4", { text: `Relative error along ${name} (${size})` });
    return [title, chart.element];
  }
}

// How to see more than is here.
function adviseDetail({ measured, a }) {
  if (measured === "tensor") return `difference.profile("${a.address}") tells where in the tensor they differ.`;
  return "Recorded with tensors=True, this would show where in the tensor they differ.";
}

function namePlaces(place, stride, size) {
  return stride === 1 ? `index ${place}` : `${place} to ${Math.min(place + stride, size) - 1}, the largest`;
}

function describeShape(site) {
  if (!site?.shape) return undefined;
  return site.shape.length ? site.shape.join("×") : "one number";
}

function showNumber(value) {
  return typeof value === "number" ? formatNumber(value) : formatNumber(readNumber(value));
}

// Two values that differ little are told apart by their last digits.
function showLong(value) {
  const number = readNumber(value);
  return Number.isFinite(number) ? String(Number(number.toPrecision(7))) : formatNumber(number);
}

// Most cosines are so near to one that only the distance tells anything.
function describeCosine(value) {
  const away = 1 - value;
  if (away <= 0) return "1";
  return away < 1e-3 ? `1 − ${formatNumber(away)}` : formatNumber(value);
}

function describeShare(share) {
  const percent = readNumber(share) * 100;
  return `${percent > 99.9 && percent < 100 ? "> 99.9" : formatNumber(percent)} %`;
}
