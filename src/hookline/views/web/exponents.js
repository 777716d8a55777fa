// How large the elements of one site are, over time: exponents as rows, steps as columns.

import { formatPower } from "./numbers.js";
import { makePalette, pixelToText, shadeOf } from "./colours.js";
import { hideTooltip, make, onResize, readStyle, showTooltip, sizeCanvas } from "./elements.js";

const SUBNORMAL = 0;
const LAST_BIN = 255;
const BIAS = 127;
const MOST_LEVEL = 15;
const GUTTER = 58;
const EDGE = 14;
const FOOT = 22;

export class ExponentMap {
  constructor({ height }) {
    this.height = height;
    this.canvas = make("canvas", { role: "img", "aria-label": "Exponents of the elements over time" });
    this.element = make("div", { class: "chart-host" }, this.canvas);
    this.model = null;
    this.canvas.addEventListener("pointermove", (event) => this.onPointer(event));
    this.canvas.addEventListener("pointerleave", hideTooltip);
    onResize(this.element, () => this.draw());
  }

  // model: steps[], low (the first bin), bins, levels [steps, bins], theme
  show(model) {
    this.model = model;
    this.rows = listRows(model);
    this.draw();
  }

  draw() {
    const { model, rows } = this;
    const width = this.element.clientWidth;
    if (!model || !width || !rows.length) return;
    const context = sizeCanvas(this.canvas, width, this.height);
    context.clearRect(0, 0, width, this.height);
    const palette = makePalette(model.theme, false);
    this.cell = [(width - GUTTER - EDGE) / model.steps.length, (this.height - FOOT - 4) / rows.length];
    rows.forEach((bin, row) => {
      model.steps.forEach((_, column) => {
        const level = model.levels[column * model.bins + bin - model.low] ?? 0;
        if (!level) return;
        context.fillStyle = bin === LAST_BIN ? palette.names.bad : pixelToText(shadeOf(palette, 0.12 + (0.88 * level) / MOST_LEVEL));
        const x = GUTTER + column * this.cell[0];
        context.fillRect(x, 2 + row * this.cell[1], Math.max(1, this.cell[0] - 0.5), Math.max(1, this.cell[1] - 0.5));
      });
    });
    this.drawAxes(context, width);
  }

  drawAxes(context, width) {
    const { model, rows } = this;
    context.font = `11px ${readStyle("--sans")}`;
    context.fillStyle = readStyle("--soft");
    context.textAlign = "right";
    context.textBaseline = "middle";
    const stride = Math.max(1, Math.ceil(15 / this.cell[1]));
    let lowest = Infinity;
    rows.forEach((bin, row) => {
      const y = 2 + (row + 0.5) * this.cell[1];
      const isSpecial = bin === SUBNORMAL || bin === LAST_BIN;
      if (!isSpecial && (bin - BIAS) % stride !== 0) return;
      if (!isSpecial && rows[rows.length - 1] === SUBNORMAL && rows.length - 1 - row < stride) return;
      if (Math.abs(y - lowest) < 10) return;
      lowest = y;
      context.fillText(nameBin(bin), GUTTER - 8, y);
    });
    context.strokeStyle = readStyle("--line");
    context.strokeRect(GUTTER - 0.5, 1.5, width - GUTTER - EDGE + 1, this.height - FOOT - 2);
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(String(model.steps[0]), GUTTER, this.height - FOOT + 6);
    if (model.steps.length > 1) {
      context.textAlign = "right";
      context.fillText(String(model.steps[model.steps.length - 1]), width - EDGE, this.height - FOOT + 6);
    }
  }

  onPointer(event) {
    const { model, rows } = this;
    if (!this.cell) return;
    const column = Math.floor((event.offsetX - GUTTER) / this.cell[0]);
    const row = Math.floor((event.offsetY - 2) / this.cell[1]);
    if (column < 0 || column >= model.steps.length || row < 0 || row >= rows.length) {
      hideTooltip();
      return;
    }
    const level = model.levels[column * model.bins + rows[row] - model.low] ?? 0;
    const share = level ? `about ${formatShare(2 ** (level - MOST_LEVEL))} of the elements` : "no element";
    const lines = [{ text: describeBin(rows[row]), kind: "strong" }, { text: share }, { text: `step ${model.steps[column]}`, kind: "soft" }];
    showTooltip(lines, event.clientX, event.clientY);
  }
}

// The bins that a site has, the largest first; zero and what is not finite stand apart.
function listRows({ low, bins, levels, steps }) {
  const isFilled = (bin) => steps.some((_, column) => levels[column * bins + bin - low]);
  const all = Array.from({ length: bins }, (_, at) => low + at);
  const filled = all.filter((bin) => bin !== SUBNORMAL && bin !== LAST_BIN && isFilled(bin));
  const rows = [];
  if (all.includes(LAST_BIN) && isFilled(LAST_BIN)) rows.push(LAST_BIN);
  for (let bin = filled[filled.length - 1]; bin >= filled[0]; bin -= 1) rows.push(bin);
  if (all.includes(SUBNORMAL) && isFilled(SUBNORMAL)) rows.push(SUBNORMAL);
  return rows;
}

function nameBin(bin) {
  if (bin === LAST_BIN) return "NaN, Inf";
  return bin === SUBNORMAL ? "zero" : `2${formatPower(bin - BIAS)}`;
}

function describeBin(bin) {
  if (bin === LAST_BIN) return "NaN or Inf";
  if (bin === SUBNORMAL) return "zero, or too small for a normal float32";
  return `from 2${formatPower(bin - BIAS)} to 2${formatPower(bin - BIAS + 1)}`;
}

function formatShare(share) {
  return share >= 0.01 ? `${Math.round(share * 100)} %` : `1 in ${Math.round(1 / share).toLocaleString("en")}`;
}
