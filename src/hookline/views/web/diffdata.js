// What a page of a difference holds: the two runs as rows, and how far apart they are. Knows no page.

import { decodeTable, openChunks, readChunk } from "./unpacking.js";
import { pixelToText, shadeOf } from "./colours.js";

const UNDER = 8;
const OVER = 4;
const STEP = 0.12;

export const SECTION_NAMES = {
  forward: "Forward",
  backward: "Backward",
  state: "Buffers and parameters",
  "parameter gradient": "Parameter gradients",
  update: "Updates",
};

export const RULE_WORDS = {
  name: "by name",
  wrapper: "by name, without wrappers",
  map: "by your map",
  order: "by order, class and shape",
};

export const HOW_WORDS = {
  same: "",
  concat: "put together",
  transposed: "transposed",
  reshaped: "reshaped",
};

export async function openDifference(text) {
  const { facts, chunks } = await openChunks(text);
  return new DifferenceData(facts, chunks);
}

export class DifferenceData {
  constructor(facts, chunks) {
    this.facts = facts;
    this.chunks = chunks;
    this.rows = facts.rows.map(readRow);
    this.first = this.rows.findIndex((row) => row.isFirst);
    this.nearest = this.rows.reduce((best, row, at, rows) => (row.far > rows[best].far ? at : best), 0);
  }

  // How far the two were apart in each step, against the limit; null where there is one step.
  async history() {
    const { history } = this.facts;
    if (!history) return null;
    const table = decodeTable(await readChunk(this.chunks[history.chunk]), history);
    return { steps: history.shown, rows: history.of, table };
  }
}

// Numbers that JSON cannot hold come as words.
export function readNumber(value) {
  if (typeof value === "number") return value;
  return { infinity: Infinity, "-infinity": -Infinity }[value] ?? NaN;
}

function readRow(given) {
  const row = { ...given, b: given.b === undefined ? { ...given.a, isSame: true } : given.b };
  row.r = readNumber(given.r);
  row.limit = readNumber(given.limit);
  row.floor = readNumber(given.floor);
  // Two values may be equal and still differ: in whether a gradient is wanted of them, say.
  row.isOther = Boolean(given.word) && row.r === 0;
  row.far = row.isOther ? Infinity : compareToLimit(row.r, row.limit);
  row.isOver = ["introduces", "inherits", "missing", "alone"].includes(row.verdict);
  row.text = [row.a?.address, row.b?.address, row.a?.type, row.verdict].join(" ").toLowerCase();
  return row;
}

// The power of ten between r and its limit: NaN where nothing was compared, -Infinity where
// nothing differs at all.
export function compareToLimit(r, limit) {
  if (Number.isNaN(r)) return NaN;
  if (r === 0) return -Infinity;
  return limit > 0 ? Math.log10(r / limit) : Infinity;
}

// Where on a bar of colours a distance is: pale below the limit, a step at it, so that what is
// over it stands out however little it is over. -1 is exactly the same.
export function shareOf(far) {
  if (far === -Infinity) return -1;
  if (far <= 0) return 0.5 + (Math.max(far, -UNDER) / UNDER) * 0.4;
  return 0.5 + STEP + (Math.min(far, OVER) / OVER) * (0.5 - STEP);
}

// Distances from the least to the most that colours tell apart, for a legend.
export function sampleDistances(count) {
  return Array.from({ length: count }, (_, at) => -UNDER + ((UNDER + OVER) * at) / (count - 1));
}

// The colour of a cell and of the text on it.
export function colourOf(palette, far) {
  if (Number.isNaN(far)) return { back: "transparent", text: "inherit" };
  if (far === -Infinity) return { back: palette.names.zero, text: "inherit" };
  if (far === Infinity) return { back: palette.names.bad, text: "#ffffff" };
  const pixel = shadeOf(palette, shareOf(far));
  const light = 0.299 * (pixel & 255) + 0.587 * ((pixel >> 8) & 255) + 0.114 * ((pixel >> 16) & 255);
  return { back: pixelToText(pixel), text: light > 140 ? "#14171c" : "#ffffff" };
}
