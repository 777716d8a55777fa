// What a report holds: facts at once, tables of numbers when they are asked for. Knows no page.

import { decodeTable, openChunks, readChunk, StatTable } from "./unpacking.js";

export const KIND_NAMES = {
  value: "Forward",
  gradient: "Backward",
  parameter: "Parameters",
  "parameter gradient": "Weight gradients",
  "local gradient": "Local weight gradients",
  update: "Updates",
};

export const STATS = {
  rms: { name: "RMS", isLinear: false },
  absmax: { name: "Largest magnitude", isLinear: false },
  mean: { name: "Mean", isLinear: false },
  std: { name: "Standard deviation", isLinear: false },
  l2: { name: "L2 norm", isLinear: false },
  nonfinite: { name: "NaN + Inf", isLinear: false },
  zero_share: { name: "Share of zeros", isLinear: true },
  ratio: { name: "Update / weight", isLinear: false },
  lost: { name: "Lost updates", isLinear: true },
  dead_share: { name: "Dead units", isLinear: true },
  saturated: { name: "Saturated", isLinear: true },
  outlier: { name: "Outlier channel", isLinear: false },
};

export async function openData(text) {
  const { facts, chunks } = await openChunks(text);
  return new ReportData(facts, chunks);
}

export class ReportData {
  constructor(facts, chunks) {
    this.facts = facts;
    this.columns = facts.columns;
    this.kinds = Object.keys(KIND_NAMES).filter((kind) => facts.maps.some((one) => one.kind === kind));
    this.chunks = chunks;
    this.cache = new Map();
  }

  sites(kind) {
    return this.facts.sites[kind].map(([address, type, shape, dtype, source]) => ({
      address,
      type,
      shape,
      dtype,
      source,
    }));
  }

  stats(kind) {
    const stored = this.facts.maps.filter((one) => one.kind === kind).map((one) => one.stat);
    const shown = Object.keys(STATS).filter((stat) => stat === "nonfinite" || stored.includes(stat));
    return kind === "update" && shown.includes("ratio") ? ["ratio", ...shown.filter((one) => one !== "ratio")] : shown;
  }

  keep(name, compute) {
    if (!this.cache.has(name)) this.cache.set(name, compute());
    return this.cache.get(name);
  }

  chunk(number) {
    return readChunk(this.chunks[number]);
  }

  // The table of a statistic; null where the report does not hold it.
  table(kind, stat) {
    if (stat === "nonfinite") return this.keep(`${kind} sum`, () => this.sumNotFinite(kind));
    const found = this.facts.maps.find((one) => one.kind === kind && one.stat === stat);
    if (!found) return Promise.resolve(null);
    return this.keep(`${kind} ${stat}`, async () => decodeTable(await this.chunk(found.chunk), found));
  }

  async sumNotFinite(kind) {
    const names = ["nan", "posinf", "neginf"];
    const tables = await Promise.all(names.map((name) => this.table(kind, name)));
    const rows = this.facts.sites[kind].length;
    const columns = this.columns.first.length;
    const total = new StatTable(rows, columns);
    total.logs.fill(-Infinity);
    const counts = tables.filter(Boolean);
    for (let at = 0; at < (counts.length ? rows * columns : 0); at += 1) {
      let sum = 0;
      for (const one of counts) if (!Number.isNaN(one.logs[at])) sum += 2 ** one.logs[at];
      if (sum) total.logs[at] = Math.log2(sum);
    }
    return total;
  }

  // Where a value is wrong: NaN, or +Inf. A mask is full of -Inf, and right.
  bad(kind) {
    return this.keep(`${kind} bad`, async () => {
      const tables = await Promise.all(["nan", "posinf"].map((name) => this.table(kind, name)));
      const size = this.facts.sites[kind].length * this.columns.first.length;
      const flags = new Uint8Array(size);
      for (const one of tables.filter(Boolean)) {
        for (let at = 0; at < size; at += 1) if (one.logs[at] > -Infinity) flags[at] = 1;
      }
      return flags;
    });
  }

  // A number of the steps themselves: its mean, and where steps were pooled its extremes.
  async scalar(name) {
    const chunk = this.facts.scalars.names[name];
    if (chunk === undefined) return null;
    const bytes = await this.chunk(chunk);
    const steps = this.facts.scalars.first;
    const numbers = new Float32Array(bytes.buffer);
    const part = (at) => numbers.subarray(at * steps.length, (at + 1) * steps.length);
    const isPooled = numbers.length > steps.length;
    return { steps, values: part(0), low: isPooled ? part(1) : null, high: isPooled ? part(2) : null };
  }

  // The exponents of one site over time; null where there are none.
  async exponents(kind, row) {
    const found = this.facts.exponents[kind];
    if (!found) return null;
    const levels = await this.keep(`${kind} exponents`, () => this.chunk(found.chunk));
    const size = found.steps.length * found.bins;
    return { ...found, levels: levels.subarray(row * size, (row + 1) * size) };
  }
}

// All findings as one list, the root causes first.
export function listFindings(facts) {
  return facts.groups.flatMap(({ root, follows }) => [root, ...follows]);
}
