// The training as a whole: the loss over steps, and how the gradient flows through the depth.

import { make, makeChoice } from "./elements.js";
import { LineChart } from "./linechart.js";
import { formatNumber } from "./numbers.js";
import { findPlace } from "./scales.js";
import { markSteps } from "./explorer.js";
import { nameSteps } from "./inspector.js";

export async function makeLoss(data, findings) {
  const names = Object.keys(data.facts.scalars.names);
  if (!names.length) return null;
  const chart = new LineChart({ label: "A number of the steps over time", height: 230 });
  const select = make("select", { "aria-label": "Which number" }, ...names.map((name) => make("option", { value: name, text: name })));
  let isLog = false;
  const choice = makeChoice("Loss scale", [{ value: "linear", text: "Linear" }, { value: "log", text: "Log" }], (value) => {
    isLog = value === "log";
    draw();
  });
  choice.show("linear");
  const draw = async () => {
    const { steps, values, low, high } = await data.scalar(select.value);
    chart.show({
      xs: steps,
      values,
      low,
      high,
      isLog,
      markers: markSteps(findings),
      describe: (place) => [
        { text: `${select.value} ${formatNumber(values[place])}`, kind: "strong" },
        { text: `step ${steps[place]}`, kind: "soft" },
      ],
    });
  };
  select.addEventListener("change", draw);
  select.value = names.includes("loss") ? "loss" : names[0];
  await draw();
  const title = make("h2", { text: "Training curve" });
  return {
    element: make("div", { class: "card" }, make("div", { class: "card-head" }, title, select, choice.element), chart.element),
    draw,
  };
}

export async function makeFlow(data, findings, onPick) {
  const stats = data.kinds.includes("gradient") ? ["rms", "l2"].filter((stat) => data.stats("gradient").includes(stat)) : [];
  if (!stats.length) return null;
  const { first } = data.columns;
  const start = findings.length ? Math.max(0, findPlace(first, findings[0].step) - 1) : first.length - 1;
  const slider = make("input", { type: "range", min: 0, max: Math.max(0, first.length - 1), value: start, id: "flow-step" });
  const output = make("output", { for: "flow-step", class: "quiet" });
  const chart = new LineChart({ label: "Size of the gradient of each output over depth", height: 200 });
  let [stat] = stats;
  const sites = data.sites("gradient");
  const places = sites.map((_, at) => at);
  const draw = async () => {
    const table = await data.table("gradient", stat);
    const column = Number(slider.value);
    const values = places.map((row) => table.value(row, column));
    const [low, high] = findBand(table);
    output.textContent = nameSteps(data.columns, column);
    slider.setAttribute("aria-valuetext", output.textContent);
    chart.show({
      xs: places,
      values,
      low,
      high,
      isLog: true,
      isBad: values.map((value) => value === Infinity),
      xTicks: [
        { x: 0, text: "input side", anchor: "start" },
        { x: places.length - 1, text: "loss side", anchor: "end" },
      ],
      onPick: (place) => onPick(place, column),
      describe: (place) => [
        { text: sites[place].address, kind: "name" },
        { text: `${formatNumber(values[place])} at ${nameSteps(data.columns, column)}`, kind: "strong" },
        { text: `from ${formatNumber(low[place])} to ${formatNumber(high[place])} in the whole run`, kind: "soft" },
      ],
    });
  };
  slider.addEventListener("input", draw);
  const choice = makeChoice(
    "Gradient size",
    stats.map((value) => ({ value, text: value === "rms" ? "RMS" : "L2" })),
    (value) => {
      stat = value;
      draw();
    },
  );
  choice.show(stat);
  await draw();
  const element = make(
    "div",
    { class: "card" },
    make("div", { class: "card-head" }, make("h2", { text: "Gradient flow over depth" }), stats.length > 1 ? choice.element : null),
    chart.element,
    make("div", { class: "slider" }, make("label", { for: "flow-step", text: "Step" }), slider, output),
  );
  return {
    element,
    draw,
    setColumn(column) {
      slider.value = column;
      draw();
    },
  };
}

const bands = new WeakMap();

function findBand(table) {
  if (!bands.has(table)) {
    const low = [];
    const high = [];
    for (let row = 0; row < table.rows; row += 1) {
      const own = table.logs.subarray(row * table.columns, (row + 1) * table.columns).filter(Number.isFinite);
      low.push(own.length ? 2 ** own.reduce((one, other) => Math.min(one, other)) : NaN);
      high.push(own.length ? 2 ** own.reduce((one, other) => Math.max(one, other)) : NaN);
    }
    bands.set(table, [low, high]);
  }
  return bands.get(table);
}
