// From the text of a page to facts and tables of numbers. Knows no report and no page.

const MISSING = 0;
const ZERO = 1;
const NOT_FINITE = 2;
const FIRST = 3;

function decodeBase64(text) {
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let at = 0; at < letters.length; at += 1) bytes[at] = letters.charCodeAt(at);
  return bytes;
}

async function inflate(bytes) {
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export function readChunk(text) {
  return inflate(decodeBase64(text));
}

// The lines of a text: the facts first, then chunks that wait until they are asked for.
export async function openChunks(text) {
  const [first, ...chunks] = text.trim().split("\n");
  return { facts: JSON.parse(new TextDecoder().decode(await readChunk(first))), chunks };
}

// A number of many rows and columns. `logs` are binary logarithms of magnitudes: NaN where
// nothing was measured, -Infinity for zero, Infinity where nothing was finite.
export class StatTable {
  constructor(rows, columns) {
    this.rows = rows;
    this.columns = columns;
    this.logs = new Float32Array(rows * columns).fill(NaN);
    this.isNegative = null;
  }

  value(row, column) {
    const at = row * this.columns + column;
    const size = 2 ** this.logs[at];
    return this.isNegative && this.isNegative[at] ? -size : size;
  }

  series(row) {
    return Float64Array.from({ length: this.columns }, (_, column) => this.value(row, column));
  }
}

export function decodeTable(bytes, { rows, columns, base, steps, signed }) {
  const table = new StatTable(rows, columns);
  const size = rows * columns;
  if (signed) table.isNegative = new Uint8Array(size);
  for (let row = 0; row < rows; row += 1) {
    let code = 0;
    for (let at = row * columns; at < (row + 1) * columns; at += 1) {
      const folded = bytes[at] | (bytes[size + at] << 8);
      code = (code + ((folded >> 1) ^ -(folded & 1))) & 0xffff;
      if (code === MISSING) continue;
      if (code === ZERO) table.logs[at] = -Infinity;
      else if (code === NOT_FINITE) table.logs[at] = Infinity;
      else {
        const step = code - FIRST;
        table.logs[at] = base + (signed ? step >> 1 : step) / steps;
        if (signed) table.isNegative[at] = step & 1;
      }
    }
  }
  return table;
}
