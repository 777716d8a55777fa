// A line chart in SVG with axes, a band, markers and a reading under the pointer. Knows no report.

import { linearScale, logScale, stepTicks, findPlace } from "./scales.js";
import { hideTooltip, makeSvg, make, onResize, showTooltip } from "./elements.js";
import { formatNumber } from "./numbers.js";

const LEFT = 58;
const RIGHT = 14;
const TOP_EDGE = 14;
const BOTTOM = 32;

export class LineChart {
  constructor({ label, height }) {
    this.height = height;
    this.svg = makeSvg("svg", { class: "chart", role: "img", "aria-label": label });
    this.element = make("div", { class: "chart-host" }, this.svg);
    this.model = null;
    this.svg.addEventListener("pointermove", (event) => this.onPointer(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("click", (event) => {
      const place = this.placeAt(event);
      if (place !== null) this.model.onPick?.(place);
    });
    onResize(this.element, () => this.draw());
  }

  // model: xs (rising), values, low?, high?, isBad?[], isLog, markers [{x, colour, text}], cursor (x),
  // describe(place) -> lines, xTicks? [{x, text}], yName, onPick?(place)
  show(model) {
    this.model = model;
    this.draw();
  }

  draw() {
    const { model } = this;
    const width = this.element.clientWidth;
    if (!model || !width) return;
    this.svg.setAttribute("viewBox", `0 0 ${width} ${this.height}`);
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("height", this.height);
    const { xs } = model;
    const [low, high] = this.findReach();
    const isLog = model.isLog && low > 0;
    this.x = linearScale(xs[0], xs[xs.length - 1], LEFT, width - RIGHT);
    if (xs.length === 1) this.x = linearScale(xs[0] - 1, xs[0] + 1, LEFT, width - RIGHT);
    const make_scale = isLog ? logScale : linearScale;
    this.y = make_scale(low, high, this.height - BOTTOM, TOP_EDGE);
    this.isLog = isLog;
    this.svg.replaceChildren(
      this.drawGrid(width),
      this.drawBand(),
      this.drawLine(),
      this.drawBad(),
      this.drawMarkers(),
      makeSvg("g", { class: "chart-hover" }),
    );
  }

  findReach() {
    const { values, low, high, isLog } = this.model;
    let least = Infinity;
    let most = -Infinity;
    for (const line of [values, low, high].filter(Boolean)) {
      for (const value of line) {
        if (!Number.isFinite(value) || (isLog && value <= 0)) continue;
        if (value < least) least = value;
        if (value > most) most = value;
      }
    }
    if (least > most) return isLog ? [0.1, 1] : [0, 1];
    if (isLog) return most / least < 1.5 ? [least / 1.5, most * 1.5] : [least / 1.1, most * 1.1];
    const margin = (most - least) * 0.06 || Math.abs(most) * 0.1 || 1;
    return [least - margin, most + margin];
  }

  drawGrid(width) {
    const group = makeSvg("g", { class: "chart-grid" });
    const bottom = this.height - BOTTOM;
    for (const tick of this.y.ticks(4)) {
      const y = this.y(tick);
      group.append(
        makeSvg("line", { x1: LEFT, x2: width - RIGHT, y1: y, y2: y }),
        makeSvg("text", { x: LEFT - 8, y: y + 3.5, "text-anchor": "end", text: this.y.format(tick) }),
      );
    }
    const { xs, xTicks } = this.model;
    const wanted = Math.max(2, Math.floor(width / 90));
    const ticks = xTicks ?? stepTicks(xs[0], xs[xs.length - 1], wanted).map((x) => ({ x, text: String(x) }));
    for (const { x, text, anchor } of ticks) {
      group.append(makeSvg("text", { x: this.x(x), y: bottom + 18, "text-anchor": anchor ?? "middle", text }));
    }
    group.append(makeSvg("line", { class: "chart-axis", x1: LEFT, x2: width - RIGHT, y1: bottom, y2: bottom }));
    return group;
  }

  drawBand() {
    const { xs, low, high } = this.model;
    if (!low || !high) return makeSvg("g");
    const there = [];
    xs.forEach((x, at) => {
      if (this.isDrawable(low[at]) && this.isDrawable(high[at])) there.push(at);
    });
    const upper = there.map((at) => `${this.round(this.x(xs[at]))},${this.round(this.y(high[at]))}`);
    const lower = there.map((at) => `${this.round(this.x(xs[at]))},${this.round(this.y(low[at]))}`).reverse();
    return makeSvg("polygon", { class: "chart-band", points: [...upper, ...lower].join(" ") });
  }

  drawLine() {
    const { xs, values } = this.model;
    const group = makeSvg("g");
    let path = "";
    let isOpen = false;
    let count = 0;
    for (let at = 0; at < xs.length; at += 1) {
      // Statistics that are taken in few steps are joined over the gaps; a bad value is a break.
      if (Number.isNaN(values[at]) && !this.model.isBad?.[at]) continue;
      if (!this.isDrawable(values[at])) {
        isOpen = false;
        continue;
      }
      path += `${isOpen ? "L" : "M"}${this.round(this.x(xs[at]))} ${this.round(this.y(values[at]))}`;
      isOpen = true;
      count += 1;
    }
    group.append(makeSvg("path", { class: "chart-line", d: path }));
    if (count > 0 && count <= 40) {
      xs.forEach((x, at) => {
        if (this.isDrawable(values[at])) {
          group.append(makeSvg("circle", { class: "chart-dot", cx: this.x(x), cy: this.y(values[at]), r: 2.2 }));
        }
      });
    }
    return group;
  }

  // Steps whose value is not finite are a bar at the top: they have no height of their own.
  drawBad() {
    const { xs, values, isBad } = this.model;
    const group = makeSvg("g", { class: "chart-bad" });
    let start = null;
    for (let at = 0; at <= xs.length; at += 1) {
      const bad = at < xs.length && (isBad ? isBad[at] : Number.isNaN(values[at]) || !Number.isFinite(values[at]));
      if (bad && start === null) start = at;
      if (!bad && start !== null) {
        const x1 = this.x(xs[start]);
        const x2 = this.x(xs[at - 1]);
        group.append(makeSvg("rect", { x: x1 - 2, width: Math.max(4, x2 - x1 + 4), y: TOP_EDGE - 10, height: 5, rx: 2 }));
        start = null;
      }
    }
    return group;
  }

  drawMarkers() {
    const group = makeSvg("g");
    const { markers = [], cursor } = this.model;
    const ends = { y1: TOP_EDGE - 4, y2: this.height - BOTTOM };
    for (const { x, colour, text } of markers) {
      const line = makeSvg("line", { class: "chart-marker", x1: this.x(x), x2: this.x(x), ...ends }, makeSvg("title", { text }));
      line.style.stroke = colour;
      group.append(line);
    }
    if (cursor !== null && cursor !== undefined) {
      group.append(makeSvg("line", { class: "chart-cursor", x1: this.x(cursor), x2: this.x(cursor), ...ends }));
    }
    return group;
  }

  placeAt(event) {
    const { xs } = this.model;
    const x = this.x.invert(event.clientX - this.svg.getBoundingClientRect().left);
    const place = findPlace(xs, x);
    const next = Math.min(place + 1, xs.length - 1);
    return Math.abs(xs[next] - x) < Math.abs(xs[place] - x) ? next : place;
  }

  onPointer(event) {
    if (this.model && this.x) this.read(this.placeAt(event), event);
  }

  read(place, event) {
    const group = this.svg.querySelector(".chart-hover");
    group?.replaceChildren();
    if (place === null || !group) {
      hideTooltip();
      return;
    }
    const { xs, values } = this.model;
    const x = this.x(xs[place]);
    group.append(makeSvg("line", { x1: x, x2: x, y1: TOP_EDGE, y2: this.height - BOTTOM }));
    if (this.isDrawable(values[place])) group.append(makeSvg("circle", { cx: x, cy: this.y(values[place]), r: 3.5 }));
    showTooltip(this.model.describe(place), event.clientX, event.clientY);
  }

  isDrawable(value) {
    return Number.isFinite(value) && (!this.isLog || value > 0);
  }

  round(value) {
    return Math.round(value * 10) / 10;
  }
}

export function describeValue(value, isBad) {
  return isBad && !Number.isFinite(value) ? "not finite" : formatNumber(value);
}
