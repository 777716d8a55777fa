// Making elements. Text only ever becomes text: no string is read as markup here.

const SVG = "http://www.w3.org/2000/svg";

export function make(tag, properties = {}, ...children) {
  return fill(document.createElement(tag), properties, children);
}

export function makeSvg(tag, properties = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), properties, children);
}

function fill(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function find(id) {
  return document.getElementById(id);
}

export function announce(text) {
  find("announce").textContent = text;
}

// One row of choices of which one is taken; the arrow keys move between them, as in any radio group.
export function makeChoice(label, options, onChoose) {
  const name = `choice-${label.replace(/\W+/g, "-")}`;
  const group = make("div", { class: "choice", role: "radiogroup", "aria-label": label });
  for (const { value, text } of options) {
    const input = make("input", { type: "radio", name, value, id: `${name}-${value.replace(/\W+/g, "-")}` });
    input.addEventListener("change", () => onChoose(value));
    group.append(make("label", { for: input.id }, input, make("span", { text })));
  }
  return {
    element: group,
    show(value) {
      for (const input of group.querySelectorAll("input")) input.checked = input.value === value;
    },
  };
}

let tooltip = null;

export function showTooltip(lines, x, y) {
  if (!tooltip) {
    tooltip = make("div", { class: "tooltip", role: "presentation" });
    document.body.append(tooltip);
  }
  tooltip.replaceChildren(...lines.map(({ text, kind }) => make("div", { text, class: kind })));
  tooltip.hidden = false;
  const { width, height } = tooltip.getBoundingClientRect();
  const left = x + 14 + width > window.innerWidth - 8 ? x - 14 - width : x + 14;
  const top = Math.max(8, Math.min(y + 14, window.innerHeight - height - 8));
  tooltip.style.left = `${Math.max(8, left)}px`;
  tooltip.style.top = `${top}px`;
}

export function hideTooltip() {
  if (tooltip) tooltip.hidden = true;
}

// A canvas whose pixels are those of the screen.
export function sizeCanvas(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function readStyle(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function onResize(element, callback) {
  let width = 0;
  new ResizeObserver(([entry]) => {
    const now = Math.round(entry.contentRect.width);
    if (now === width || now === 0) return;
    width = now;
    callback(now);
  }).observe(element);
}
