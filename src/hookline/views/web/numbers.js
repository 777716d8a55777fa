// Numbers and words as people read them. Knows no data and no page.

export function formatNumber(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "Inf" : "-Inf";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) {
    const [digits, exponent] = value.toExponential(2).split("e");
    return `${Number(digits)}e${Number(exponent)}`.replace("-", "−").replace("e-", "e−");
  }
  return String(Number(value.toPrecision(size >= 1000 ? 4 : 3))).replace("-", "−");
}

export function formatCount(value) {
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} B`;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  return Math.round(value).toLocaleString("en");
}

export function formatPower(exponent) {
  const raised = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };
  return [...String(exponent)].map((letter) => raised[letter]).join("");
}

export function plural(count, word) {
  return `${formatCount(count)} ${word}${count === 1 ? "" : "s"}`;
}

// Cut a name in the middle: its beginning and its end tell it apart.
export function shorten(text, length) {
  if (text.length <= length) return text;
  const tail = Math.ceil((length - 1) * 0.6);
  return `${text.slice(0, Math.max(0, length - 1 - tail))}…${text.slice(text.length - tail)}`;
}
