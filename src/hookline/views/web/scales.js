// From numbers to pixels, and where the ticks go. Knows no data and no page.

import { formatNumber, formatPower } from "./numbers.js";

export function linearScale(low, high, start, end) {
  const span = high - low || 1;
  const scale = (value) => start + ((value - low) / span) * (end - start);
  scale.invert = (pixel) => low + ((pixel - start) / (end - start)) * span;
  scale.ticks = (count) => linearTicks(low, high, count);
  scale.format = formatNumber;
  return scale;
}

export function logScale(low, high, start, end) {
  const inner = linearScale(Math.log10(low), Math.log10(high), start, end);
  const scale = (value) => inner(Math.log10(value));
  scale.invert = (pixel) => 10 ** inner.invert(pixel);
  scale.ticks = (count) => logTicks(low, high, count);
  scale.format = (value) => {
    const exponent = Math.log10(value);
    const isPower = Math.abs(exponent - Math.round(exponent)) < 1e-9;
    return isPower && Math.abs(exponent) > 2.5 ? `10${formatPower(Math.round(exponent))}` : formatNumber(value);
  };
  return scale;
}

export function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const ticks = [];
  for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) ticks.push(at * step);
  return ticks;
}

export function stepTicks(low, high, count) {
  return [...new Set(linearTicks(low, high, count).map(Math.round))];
}

export function logTicks(low, high, count) {
  const span = Math.log10(high / low);
  if (span < 0.35) return linearTicks(low, high, count);
  const first = Math.floor(Math.log10(low) + 1e-9);
  const last = Math.ceil(Math.log10(high) - 1e-9);
  const decades = last - first;
  const factors = span <= 1.3 ? [1, 2, 3, 5] : span <= 2.5 ? [1, 3] : [1];
  const stride = Math.max(1, Math.ceil(decades / Math.max(1, count)));
  const ticks = [];
  for (let exponent = first; exponent <= last; exponent += stride) {
    for (const factor of factors) {
      const tick = factor * 10 ** exponent;
      if (tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9)) ticks.push(tick);
    }
  }
  return ticks;
}

// The place of the last number that is not greater; 0 where all are.
export function findPlace(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sorted[middle] <= value) low = middle;
    else high = middle - 1;
  }
  return low;
}

export function quantiles(values, shares) {
  const sorted = Float32Array.from(values).sort();
  return shares.map((share) => sorted[Math.round(share * (sorted.length - 1))]);
}
