// A heat map on a canvas: rows are names, columns are steps. Knows no report and no page.
//
// Given are logarithms or shares; what they mean is up to the caller. Where there are more columns
// than pixels, a pixel shows the largest, and a bad value before any other.

import { shorten } from "./numbers.js";
import { stepTicks, findPlace } from "./scales.js";
import { shadeOf } from "./colours.js";
import { make, onResize, readStyle, sizeCanvas } from "./elements.js";

const AXIS = 30;
const TOP = 14;
const LEAST_ROW = 3;
const MOST_ROW = 24;
const LABEL_SPACE = 13;
const LETTER = 6.65;

export class Heatmap {
  // handlers: onHover(row, column, event), onLeave(), onSelect(row, column), onMove(row, column)
  constructor({ label, height, handlers }) {
    this.height = height;
    this.handlers = handlers;
    this.model = null;
    this.range = [0, 0];
    this.cursor = null;
    this.hover = null;
    this.drag = null;
    this.image = document.createElement("canvas");
    this.cells = make("canvas", { class: "heat-cells" });
    this.marks = make("canvas", {
      class: "heat-marks",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "heat map",
      "aria-label": label,
      "aria-describedby": "heat-help",
    });
    this.spacer = make("div", { class: "heat-spacer" });
    this.stage = make("div", { class: "heat-stage" }, this.cells, this.marks);
    this.element = make("div", { class: "heat" }, this.stage, this.spacer);
    this.listen();
    onResize(this.element, () => this.layOut());
  }

  // model: rows, columns, labels[], first[], last[], shares (Float32Array, NaN: missing, -1: zero),
  // isBad (Uint8Array), palette, markers [{row, column, colour}]
  show(model) {
    const isOther = !this.model || this.model.columns !== model.columns;
    this.model = model;
    if (isOther) this.range = [0, model.columns];
    this.layOut();
  }

  place(row, column, { scroll = true } = {}) {
    this.cursor = { row, column };
    if (column < this.range[0] || column >= this.range[1]) {
      this.range = [0, this.model.columns];
      this.paint();
    }
    if (scroll) this.reveal(row);
    this.draw();
  }

  layOut() {
    const { model } = this;
    const width = this.element.clientWidth;
    if (!model || !width) return;
    const room = this.height - AXIS - TOP;
    this.rowHeight = Math.max(LEAST_ROW, Math.min(MOST_ROW, room / Math.max(1, model.rows)));
    this.body = Math.min(room, this.rowHeight * model.rows);
    const longest = model.labels.reduce((most, { length }) => Math.max(most, length), 5);
    this.labels = Math.round(Math.min(longest * LETTER + 18, 260, Math.max(90, width * 0.28)));
    this.plot = Math.max(40, width - this.labels - 12);
    const height = Math.round(this.body + AXIS + TOP);
    this.stage.style.height = `${height}px`;
    this.element.style.height = `${height}px`;
    this.spacer.style.height = `${Math.max(0, this.rowHeight * model.rows - this.body)}px`;
    this.size = [width, height];
    this.paint();
    this.draw();
  }

  // Compute the pixels of all rows for the columns that are in view.
  paint() {
    const { model, image } = this;
    if (!model) return;
    const [from, to] = this.range;
    const wide = Math.max(1, Math.min(to - from, Math.round(this.plot * (window.devicePixelRatio || 1))));
    image.width = wide;
    image.height = Math.max(1, model.rows);
    const context = image.getContext("2d");
    const pixels = context.createImageData(wide, image.height);
    const target = new Uint32Array(pixels.data.buffer);
    const { palette, shares, isBad, columns } = model;
    for (let x = 0; x < wide; x += 1) {
      const start = from + Math.floor((x * (to - from)) / wide);
      const end = Math.max(start + 1, from + Math.floor(((x + 1) * (to - from)) / wide));
      for (let row = 0; row < model.rows; row += 1) {
        let best = NaN;
        let bad = 0;
        for (let at = row * columns + start; at < row * columns + end; at += 1) {
          bad |= isBad[at];
          const share = shares[at];
          if (Number.isNaN(best) || share > best) best = share;
        }
        target[row * wide + x] = bad
          ? palette.bad
          : Number.isNaN(best)
            ? palette.missing
            : best < 0
              ? palette.zero
              : shadeOf(palette, best);
      }
    }
    context.putImageData(pixels, 0, 0);
  }

  draw() {
    if (!this.model || !this.size) return;
    this.drawCells();
    this.drawMarks();
  }

  drawCells() {
    const { model } = this;
    const context = sizeCanvas(this.cells, ...this.size);
    context.clearRect(0, 0, ...this.size);
    context.imageSmoothingEnabled = false;
    const offset = this.element.scrollTop / this.rowHeight;
    const rows = this.body / this.rowHeight;
    context.drawImage(this.image, 0, offset, this.image.width, rows, this.labels, TOP, this.plot, this.body);
    context.strokeStyle = readStyle("--line");
    context.lineWidth = 1;
    context.strokeRect(this.labels - 0.5, TOP - 0.5, this.plot + 1, this.body + 1);
    context.font = `11px ${readStyle("--mono")}`;
    context.textBaseline = "middle";
    context.textAlign = "right";
    context.fillStyle = readStyle("--soft");
    const stride = Math.max(1, Math.ceil(LABEL_SPACE / this.rowHeight));
    const letters = Math.floor((this.labels - 14) / LETTER);
    const first = Math.ceil(Math.floor(offset) / stride) * stride;
    for (let row = first; row < Math.min(model.rows, offset + rows); row += stride) {
      const y = TOP + (row - offset + 0.5) * this.rowHeight;
      if (y > TOP + 2 && y < TOP + this.body - 2) context.fillText(shorten(model.labels[row], letters), this.labels - 8, y);
    }
    this.drawAxis(context);
  }

  drawAxis(context) {
    const { model } = this;
    const [from, to] = this.range;
    const bottom = TOP + this.body;
    context.textAlign = "center";
    context.textBaseline = "top";
    context.strokeStyle = readStyle("--line");
    const low = model.first[from];
    const high = model.first[to - 1];
    for (const step of stepTicks(low, high, Math.max(2, Math.floor(this.plot / 90)))) {
      const x = Math.round(this.xOf(findPlace(model.first, step)));
      context.beginPath();
      context.moveTo(x + 0.5, bottom + 1);
      context.lineTo(x + 0.5, bottom + 5);
      context.stroke();
      context.fillText(String(step), Math.max(this.labels + 8, Math.min(x, this.labels + this.plot - 12)), bottom + 8);
    }
    context.textAlign = "right";
    context.fillText("step", this.labels - 8, bottom + 8);
  }

  drawMarks() {
    const context = sizeCanvas(this.marks, ...this.size);
    context.clearRect(0, 0, ...this.size);
    for (const { row, column, colour } of this.model.markers) this.drawMarker(context, row, column, colour);
    if (this.drag && Math.abs(this.drag.x - this.drag.start) > 3) {
      context.fillStyle = readStyle("--accent-wash");
      context.fillRect(Math.min(this.drag.x, this.drag.start), TOP, Math.abs(this.drag.x - this.drag.start), this.body);
    }
    if (this.hover) this.outline(context, this.hover, readStyle("--soft"), 1);
    if (this.cursor) {
      const y = this.yOf(this.cursor.row) + this.rowHeight / 2;
      const x = this.xOf(this.cursor.column);
      context.strokeStyle = readStyle("--accent");
      context.globalAlpha = 0.55;
      context.lineWidth = 1;
      context.beginPath();
      if (y > TOP && y < TOP + this.body) {
        context.moveTo(this.labels, y);
        context.lineTo(this.labels + this.plot, y);
      }
      context.moveTo(x, TOP);
      context.lineTo(x, TOP + this.body);
      context.stroke();
      context.globalAlpha = 1;
      this.outline(context, this.cursor, readStyle("--accent"), 2);
    }
  }

  drawMarker(context, row, column, colour) {
    if (column < this.range[0] || column >= this.range[1]) return;
    const x = this.xOf(column);
    context.fillStyle = colour;
    context.beginPath();
    context.moveTo(x - 5, 2);
    context.lineTo(x + 5, 2);
    context.lineTo(x, TOP - 3);
    context.fill();
    const y = row === null ? -1 : this.yOf(row) + this.rowHeight / 2;
    if (y < TOP || y > TOP + this.body) return;
    context.lineWidth = 2;
    context.strokeStyle = colour;
    context.beginPath();
    context.arc(x, y, 7, 0, Math.PI * 2);
    context.stroke();
  }

  outline(context, { row, column }, colour, width) {
    if (column < this.range[0] || column >= this.range[1]) return;
    const y = this.yOf(row);
    if (y + this.rowHeight < TOP || y > TOP + this.body) return;
    const cell = this.plot / (this.range[1] - this.range[0]);
    const wide = Math.max(5, cell);
    const tall = Math.max(5, this.rowHeight);
    context.lineWidth = width;
    context.strokeStyle = colour;
    context.strokeRect(this.xOf(column) - wide / 2, y + this.rowHeight / 2 - tall / 2, wide, tall);
  }

  xOf(column) {
    const [from, to] = this.range;
    return this.labels + ((column + 0.5 - from) / (to - from)) * this.plot;
  }

  yOf(row) {
    return TOP + row * this.rowHeight - this.element.scrollTop;
  }

  // The cell under a place; null outside.
  cellAt(x, y, { clamp = false } = {}) {
    if (!this.model || !this.model.rows) return null;
    const [from, to] = this.range;
    const row = Math.floor((y - TOP + this.element.scrollTop) / this.rowHeight);
    const column = from + Math.floor(((x - this.labels) / this.plot) * (to - from));
    const isInside = x < this.labels + this.plot && y >= TOP && y < TOP + this.body && row < this.model.rows;
    if (clamp) return { row, column: Math.max(from, Math.min(to - 1, column)) };
    if (!isInside) return null;
    return { row, column: x < this.labels ? (this.cursor?.column ?? to - 1) : column };
  }

  reveal(row) {
    const top = row * this.rowHeight;
    const { scrollTop } = this.element;
    if (top < scrollTop) this.element.scrollTop = Math.max(0, top - this.body / 3);
    else if (top + this.rowHeight > scrollTop + this.body) this.element.scrollTop = top - this.body / 2;
  }

  zoom(from, to) {
    const { columns } = this.model;
    const start = Math.max(0, Math.min(from, columns - 2));
    this.range = [Math.floor(start), Math.min(columns, Math.max(Math.ceil(to), Math.floor(start) + 2))];
    if (columns < 2) this.range = [0, columns];
    this.paint();
    this.draw();
    this.handlers.onZoom?.(this.range[1] - this.range[0] < columns);
  }

  zoomBy(factor) {
    const [from, to] = this.range;
    const middle = this.cursor && this.cursor.column >= from && this.cursor.column < to ? this.cursor.column : (from + to) / 2;
    const half = ((to - from) * factor) / 2;
    this.zoom(middle - half, middle + half);
  }

  listen() {
    this.element.addEventListener("scroll", () => this.draw(), { passive: true });
    this.marks.addEventListener("pointermove", (event) => this.onPointerMove(event));
    this.marks.addEventListener("pointerleave", () => {
      this.hover = null;
      this.handlers.onLeave();
      this.draw();
    });
    this.marks.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.offsetX < this.labels) return;
      this.drag = { start: event.offsetX, x: event.offsetX };
      this.marks.setPointerCapture(event.pointerId);
    });
    this.marks.addEventListener("pointerup", (event) => this.onPointerUp(event));
    this.marks.addEventListener("dblclick", () => this.zoom(0, this.model.columns));
    this.marks.addEventListener("keydown", (event) => this.onKey(event));
    this.marks.addEventListener("focus", () => {
      if (!this.cursor && this.model?.rows) this.move(0, this.range[1] - 1);
    });
  }

  onPointerMove(event) {
    if (this.drag) this.drag.x = Math.max(this.labels, Math.min(event.offsetX, this.labels + this.plot));
    const cell = this.cellAt(event.offsetX, event.offsetY);
    const isSame = cell && this.hover && cell.row === this.hover.row && cell.column === this.hover.column;
    this.hover = cell;
    if (!cell) this.handlers.onLeave();
    else this.handlers.onHover(cell.row, cell.column, event);
    if (!isSame || this.drag) this.drawMarks();
  }

  onPointerUp(event) {
    const { drag } = this;
    this.drag = null;
    if (drag && Math.abs(drag.x - drag.start) > 6) {
      const ends = [drag.start, drag.x].sort((one, other) => one - other);
      this.zoom(...ends.map((x, at) => this.cellAt(x, TOP, { clamp: true }).column + at));
      return;
    }
    const cell = this.cellAt(event.offsetX, event.offsetY);
    if (cell) this.choose(cell.row, cell.column);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.cursor || !this.model.rows) return;
    const far = event.shiftKey ? 10 : 1;
    const { row, column } = this.cursor;
    const moves = {
      ArrowUp: [row - far, column],
      ArrowDown: [row + far, column],
      ArrowLeft: [row, column - far],
      ArrowRight: [row, column + far],
      Home: [row, this.range[0]],
      End: [row, this.range[1] - 1],
      PageUp: [row - 10, column],
      PageDown: [row + 10, column],
    };
    if (moves[event.key]) this.move(...moves[event.key]);
    else if (event.key === "Enter" || event.key === " ") this.choose(row, column);
    else if (event.key === "+" || event.key === "=") this.zoomBy(0.5);
    else if (event.key === "-") this.zoomBy(2);
    else if (event.key === "0") this.zoom(0, this.model.columns);
    else return;
    event.preventDefault();
  }

  move(row, column) {
    const [from, to] = this.range;
    const near = Math.max(0, Math.min(this.model.rows - 1, row));
    this.place(near, Math.max(from, Math.min(to - 1, column)));
    this.handlers.onMove(this.cursor.row, this.cursor.column);
  }

  choose(row, column) {
    this.place(row, column, { scroll: false });
    this.handlers.onSelect(row, column);
  }
}
