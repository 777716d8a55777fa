// The page of a report: opens the data, puts the parts together, light or dark, on screen or paper.

import { listFindings, openData } from "./data.js";
import { find, make } from "./elements.js";
import { Explorer } from "./explorer.js";
import { makeFindings } from "./findings.js";
import { formatCount, formatNumber } from "./numbers.js";
import { makeFlow, makeLoss } from "./overview.js";

const KINDS_OF_VERDICT = { error: "Error", warning: "Warning", info: "Worth knowing", "": "No findings" };

function preferredTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = theme === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", `Show in ${theme === "dark" ? "light" : "dark"} colours`);
}

function addFact(name, value) {
  find("facts").append(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
}

async function showFacts(data) {
  const { run, severity, model, cost } = data.facts;
  find("verdict-kind").textContent = KINDS_OF_VERDICT[severity];
  find("run-name").textContent = run.name;
  find("status").replaceChildren(make("span", { class: "status", text: run.status, "data-status": run.status }));
  if (run.steps) addFact("Steps", `${run.first_step} to ${run.last_step}`);
  addFact("Sites", formatCount(run.sites));
  if (run.ranks > 1) addFact("Ranks", String(run.ranks));
  if (model.type) addFact("Model", `${model.type}, ${formatCount(model.parameters)} parameters`);
  const loss = await data.scalar("loss");
  if (loss && loss.values.length) {
    const ends = [loss.values[0], loss.values[loss.values.length - 1]];
    addFact("Loss", ends.map((value) => (Number.isNaN(value) ? "NaN" : formatNumber(value))).join(" → "));
  }
  if (typeof cost.overhead === "number") addFact("Cost of watching", `${(cost.overhead * 100).toFixed(1)} %`);
}

function showFooter({ cost, notes, environment, run }) {
  const parts = [];
  if (cost.line) parts.push(make("p", { text: `Cost: ${cost.line}.` }));
  if (notes.length) {
    parts.push(make("h3", { text: "Notes" }), make("ul", {}, ...notes.map((text) => make("li", { text }))));
  }
  if (environment.length) {
    const rows = environment.map(([name, value]) => make("tr", {}, make("th", { text: name, scope: "row" }), make("td", { text: value })));
    const table = make("table", { class: "environment" }, make("tbody", {}, ...rows));
    parts.push(make("details", {}, make("summary", { text: "Environment" }), table));
  }
  parts.push(make("p", { class: "quiet" }, make("code", { text: run.path })));
  find("footer").replaceChildren(...parts);
}

// On paper everything is open and light; afterwards it is as before.
function preparePrinting(applyTheme) {
  let before = null;
  const begin = () => {
    if (before) return;
    const closed = [...document.querySelectorAll(".finding:not([open])")];
    for (const one of closed) one.open = true;
    before = { closed, theme: document.documentElement.dataset.theme };
    applyTheme("light");
  };
  const end = () => {
    if (!before) return;
    for (const one of before.closed) one.open = false;
    applyTheme(before.theme);
    before = null;
  };
  addEventListener("beforeprint", begin);
  addEventListener("afterprint", end);
  const paper = matchMedia("print");
  paper.addEventListener("change", () => (paper.matches ? begin() : end()));
}

async function start() {
  setTheme(preferredTheme());
  const data = await openData(find("data").textContent);
  const { facts } = data;
  const findings = listFindings(facts);
  await showFacts(data);
  showFooter(facts);
  if (!data.kinds.length || !data.columns.first.length) {
    find("explorer").replaceChildren(make("p", { class: "quiet", text: "Nothing was measured at any site in this run." }));
    find("findings").replaceChildren(...makeFindings(facts.groups, () => {}));
    document.documentElement.dataset.ready = "yes";
    return;
  }
  const explorer = new Explorer(data, findings, document.documentElement.dataset.theme);
  find("explorer").replaceChildren(explorer.element);
  const show = async ({ place, step }) => {
    await explorer.goTo(place, step);
    find("explorer").scrollIntoView({ behavior: "smooth", block: "start" });
  };
  find("findings").replaceChildren(...makeFindings(facts.groups, show));
  const first = findings.find((one) => one.place) ?? null;
  await explorer.start(first?.place ?? null, first?.step ?? null);
  const loss = await makeLoss(data, findings);
  const flow = await makeFlow(data, findings, (row, column) => explorer.setKind("gradient", row, data.columns.first[column]));
  find("overview").replaceChildren(...[loss, flow].filter(Boolean).map((one) => one.element));
  const applyTheme = (theme) => {
    setTheme(theme);
    explorer.setTheme(theme);
    loss?.draw();
    flow?.draw();
  };
  const toggle = () => applyTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  find("theme").addEventListener("click", toggle);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(preferredTheme()));
  preparePrinting(applyTheme);
  document.documentElement.dataset.ready = "yes";
}

start().catch((error) => {
  const problem = find("problem");
  problem.hidden = false;
  problem.textContent = `This page could not be shown in full: ${error.message}. It needs a browser of 2023 or later.`;
  throw error;
});
