// A long list of which only the rows in view are elements. Knows no data: what an item is and how
// it looks is up to the caller.

import { make, onResize, readStyle, sizeCanvas } from "./elements.js";

const ROW = 26;
const SPARE = 8;
const STRIP = 14;

export class RowList {
  // draw(item, at) -> element; colour(item) -> text or null; handlers: onChoose(at), onKey(event, at)
  constructor({ label, draw, colour, handlers }) {
    this.draw = draw;
    this.colour = colour;
    this.handlers = handlers;
    this.items = [];
    this.shown = new Map();
    this.cursor = null;
    this.body = make("div", { class: "rows-body" });
    this.host = make(
      "div",
      { class: "rows", tabindex: "0", role: "grid", "aria-label": label, "aria-describedby": "rows-help" },
      this.body,
    );
    this.strip = make("canvas", { class: "rows-strip", "aria-hidden": "true" });
    this.window = make("div", { class: "rows-window" });
    this.element = make(
      "div",
      { class: "rows-frame" },
      this.host,
      make("div", { class: "rows-aside" }, this.strip, this.window),
    );
    this.listen();
    onResize(this.element, () => this.refresh());
  }

  show(items) {
    this.items = items;
    this.cursor = null;
    this.shown.clear();
    this.body.replaceChildren();
    this.body.style.height = `${items.length * ROW}px`;
    this.host.setAttribute("aria-rowcount", items.length);
    this.refresh();
  }

  refresh() {
    this.drawRows();
    this.drawStrip();
  }

  // Draw all rows in view once more, as after a change of colours.
  redraw() {
    this.shown.clear();
    this.body.replaceChildren();
    this.refresh();
  }

  drawRows() {
    const { scrollTop, clientHeight } = this.host;
    const from = Math.max(0, Math.floor(scrollTop / ROW) - SPARE);
    const to = Math.min(this.items.length, Math.ceil((scrollTop + clientHeight) / ROW) + SPARE);
    for (const [at, element] of this.shown) {
      if (at >= from && at < to) continue;
      element.remove();
      this.shown.delete(at);
    }
    // In the order of the list: whoever reads the elements reads them in that order.
    const [top] = this.shown.keys();
    const above = document.createDocumentFragment();
    const below = document.createDocumentFragment();
    for (let at = from; at < to; at += 1) {
      if (!this.shown.has(at)) (at < top ? above : below).append(this.makeRow(at));
    }
    this.body.prepend(above);
    this.body.append(below);
    this.shown = new Map([...this.body.children].map((element) => [Number(element.id.slice(4)), element]));
    this.moveWindow();
  }

  makeRow(at) {
    const element = this.draw(this.items[at], at);
    element.classList.add("row");
    element.id = `row-${at}`;
    element.setAttribute("aria-rowindex", at + 1);
    element.setAttribute("aria-selected", String(at === this.cursor));
    element.style.top = `${at * ROW}px`;
    return element;
  }

  // All rows at once in a narrow strip: a pixel shows the farthest of the rows it stands for.
  drawStrip() {
    const height = this.host.clientHeight;
    if (!height) return;
    const context = sizeCanvas(this.strip, STRIP, height);
    context.fillStyle = readStyle("--hair");
    context.fillRect(0, 0, STRIP, height);
    const scale = Math.min(height / Math.max(1, this.items.length), ROW);
    const best = new Array(Math.ceil(height)).fill(null);
    this.items.forEach((item, at) => {
      const found = this.colour(item);
      if (!found) return;
      const last = Math.max(Math.floor(at * scale), Math.ceil((at + 1) * scale) - 1);
      for (let y = Math.floor(at * scale); y <= last; y += 1) {
        if (!best[y] || found.weight > best[y].weight) best[y] = found;
      }
    });
    best.forEach((found, y) => {
      if (!found) return;
      context.fillStyle = found.colour;
      context.fillRect(0, y, STRIP, 1);
    });
    this.scale = scale;
    this.moveWindow();
  }

  moveWindow() {
    const { scrollTop, clientHeight } = this.host;
    const scale = (this.scale ?? 1) / ROW;
    this.window.style.top = `${scrollTop * scale}px`;
    this.window.style.height = `${Math.max(6, Math.min(clientHeight, this.items.length * ROW) * scale)}px`;
  }

  // Put the cursor on a row; `where` is how far down it then is, as a share of the height.
  place(at, where = null) {
    const before = this.shown.get(this.cursor);
    before?.setAttribute("aria-selected", "false");
    this.cursor = at;
    const top = at * ROW;
    const { scrollTop, clientHeight } = this.host;
    if (where !== null) this.host.scrollTop = top - clientHeight * where;
    else if (top < scrollTop) this.host.scrollTop = top;
    else if (top + ROW > scrollTop + clientHeight) this.host.scrollTop = top + ROW - clientHeight;
    this.drawRows();
    this.shown.get(at)?.setAttribute("aria-selected", "true");
    this.host.setAttribute("aria-activedescendant", `row-${at}`);
  }

  listen() {
    this.host.addEventListener("scroll", () => this.drawRows(), { passive: true });
    this.body.addEventListener("click", (event) => {
      const row = event.target.closest(".row");
      if (row) this.handlers.onChoose(Number(row.id.slice(4)));
    });
    this.host.addEventListener("keydown", (event) => this.onKey(event));
    const jump = (event) => {
      const share = (event.clientY - this.strip.getBoundingClientRect().top) / (this.scale ?? 1);
      this.host.scrollTop = share * ROW - this.host.clientHeight / 2;
    };
    const aside = this.strip.parentElement;
    aside.addEventListener("pointerdown", (event) => {
      aside.setPointerCapture(event.pointerId);
      jump(event);
    });
    aside.addEventListener("pointermove", (event) => {
      if (event.buttons & 1) jump(event);
    });
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.items.length) return;
    const page = Math.max(1, Math.floor(this.host.clientHeight / ROW) - 1);
    const now = this.cursor ?? 0;
    const moves = {
      ArrowUp: now - 1,
      ArrowDown: now + 1,
      PageUp: now - page,
      PageDown: now + page,
      Home: 0,
      End: this.items.length - 1,
    };
    if (event.key in moves) {
      this.handlers.onChoose(Math.max(0, Math.min(this.items.length - 1, moves[event.key])), true);
      event.preventDefault();
    } else if (this.handlers.onKey(event, now)) event.preventDefault();
  }
}
