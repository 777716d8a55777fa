// The page of a report: opens the data, puts the parts together.

import { listFindings, openData } from "./data.js";
import { find, make } from "./elements.js";
import { Explorer } from "./explorer.js";
import { makeFindings } from "./findings.js";
import { addFact, openPage } from "./frame.js";
import { formatCount, formatNumber } from "./numbers.js";
import { makeFlow, makeLoss } from "./overview.js";

const KINDS_OF_VERDICT = { error: "Error", warning: "Warning", info: "Worth knowing", "": "No findings" };

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

async function showReport(theme) {
  const data = await openData(find("data").textContent);
  const { facts } = data;
  const findings = listFindings(facts);
  await showFacts(data);
  showFooter(facts);
  if (!data.kinds.length || !data.columns.first.length) {
    find("explorer").replaceChildren(make("p", { class: "quiet", text: "Nothing was measured at any site in this run." }));
    find("findings").replaceChildren(...makeFindings(facts.groups, () => {}));
    return () => {};
  }
  const explorer = new Explorer(data, findings, theme);
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
  return (other) => {
    explorer.setTheme(other);
    loss?.draw();
    flow?.draw();
  };
}

openPage(showReport);
