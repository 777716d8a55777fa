// The page of a difference: opens the data and puts the parts together.

import { openDifference } from "./diffdata.js";
import { find, make } from "./elements.js";
import { addFact, openPage } from "./frame.js";
import { listHeadFacts, makeAlignment, makePlace } from "./place.js";
import { SideBySide } from "./sidebyside.js";
import { StepMap } from "./stepmap.js";

function showNotes({ notes, environment }) {
  const parts = [];
  if (notes.length) {
    parts.push(make("h3", { text: "Notes" }), make("ul", {}, ...notes.map((text) => make("li", { text }))));
  }
  if (environment.length) {
    const rows = environment.map(([name, one, other]) =>
      make("tr", {}, make("th", { text: name, scope: "row" }), make("td", { text: one }), make("td", { text: other })),
    );
    const table = make("table", { class: "sides" }, make("tbody", {}, ...rows));
    parts.push(make("h3", { text: "Other on the two sides" }), table);
  }
  find("footer").replaceChildren(...parts);
}

async function showDifference(theme) {
  const data = await openDifference(find("data").textContent);
  const { facts } = data;
  find("verdict-kind").textContent = facts.same ? "No difference" : "They differ";
  for (const [name, value] of listHeadFacts(facts)) addFact(name, value);
  showNotes(facts);
  find("alignment").replaceChildren(...makeAlignment(facts));
  if (!data.rows.length) {
    find("sites").replaceChildren(make("p", { class: "quiet", text: "Nothing was compared at any site." }));
    return () => {};
  }
  const sides = new SideBySide(data, theme);
  find("sites").replaceChildren(sides.element);
  const show = (row) => {
    sides.goTo(row);
    find("sites").scrollIntoView({ behavior: "smooth", block: "start" });
  };
  find("place").replaceChildren(...makePlace(facts, () => show(data.first)));
  sides.goToFirst();
  const history = await data.history();
  const steps = history ? new StepMap(data, history, { theme, onPick: (row) => sides.goTo(row) }) : null;
  if (steps) {
    find("steps").replaceChildren(steps.element);
    steps.start();
  }
  return (other) => {
    sides.setTheme(other);
    steps?.setTheme(other);
  };
}

openPage(showDifference);
