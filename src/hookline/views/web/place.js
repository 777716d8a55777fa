// The place where two runs part: what stands there on both sides, and what differs between them.

import { make } from "./elements.js";
import { formatNumber, plural } from "./numbers.js";
import { RULE_WORDS, readNumber } from "./diffdata.js";

const FEW_NAMES = 12;

export function makePlace(facts, onShow) {
  const { place } = facts;
  if (!place) return [];
  const lines = make("dl", { class: "finding-facts" });
  const add = (name, ...content) => lines.append(make("div", {}, make("dt", { text: name }), make("dd", {}, ...content)));
  const table = make("table", { class: "sides" });
  const head = make("tr", {}, make("td"), ...["A", "B"].map((text) => make("th", { text, scope: "col" })));
  const rows = place.sides.map(([name, one, other]) =>
    make(
      "tr",
      { class: one !== other ? "is-other" : "" },
      make("th", { text: name, scope: "row" }),
      make("td", { text: one }),
      make("td", { text: other }),
    ),
  );
  table.append(make("thead", {}, head), make("tbody", {}, ...rows));
  if (place.word) add("What", make("span", { text: place.word }));
  if (place.blamed) add("To blame", make("span", { text: place.blamed }));
  if (place.operation) add("Operation", make("code", { text: place.operation }));
  if (place.causes.length) add("Likely cause", makeList(place.causes));
  if (place.graft) add("Grafted", make("span", { text: place.graft }));
  if (place.candidates.length) add("Could also be", makeList(place.candidates));
  const show = make("button", { type: "button", class: "link-button", text: "Show in the list", onclick: onShow });
  const title = make("h2", { text: "Where they part" });
  return [make("div", { class: "section-head" }, title), make("div", { class: "card" }, table, lines.children.length ? lines : null, place.isListed ? show : null)];
}

function makeList(texts) {
  return make("ul", { class: "evidence" }, ...texts.map((text) => make("li", { text })));
}

// How the sites of the two found each other, and which did not.
export function makeAlignment({ alignment, titles }) {
  const counts = alignment.rules.map(([rule, count]) => `${plural(count, "pair")} ${RULE_WORDS[rule] ?? rule}`).join(", ");
  const parts = [make("p", { text: counts ? `${counts}.` : "No site of one matches one of the other." })];
  if (alignment.renamed.length) {
    const rows = alignment.renamed.map(([one, other]) =>
      make("tr", {}, make("td", { text: one || "(the model)" }), make("td", { text: other || "(the model)" })),
    );
    const head = make("tr", {}, make("th", { text: `A  ${titles[0]}`, scope: "col" }), make("th", { text: `B  ${titles[1]}`, scope: "col" }));
    const table = make("table", { class: "sides renamed" }, make("thead", {}, head), make("tbody", {}, ...rows));
    const title = plural(alignment.renamedCount, "module");
    parts.push(make("details", {}, make("summary", { text: `${title} of another name` }), table));
  }
  const lists = [
    ["A", alignment.aloneA, alignment.aloneCountA],
    ["B", alignment.aloneB, alignment.aloneCountB],
  ].map(([side, names, count]) => makeAlone(side, names, count));
  parts.push(make("div", { class: "alone-lists" }, ...lists));
  return [
    make("div", { class: "section-head" }, make("h2", { text: "How they were matched" })),
    make("div", { class: "card alignment" }, ...parts),
  ];
}

function makeAlone(side, names, count) {
  const box = make("div", {}, make("h4", { text: `Only in ${side}: ${count ? plural(count, "site") : "none"}` }));
  const list = make("div", { class: "site-list alone-list" });
  const add = (some) => list.append(...some.map((text) => make("code", { text })));
  add(names.slice(0, FEW_NAMES));
  if (names.length > FEW_NAMES) {
    const more = make("button", { type: "button", class: "link-button", text: `and ${count - FEW_NAMES} more` });
    more.addEventListener("click", () => {
      more.remove();
      add(names.slice(FEW_NAMES));
      if (count > names.length) list.append(make("span", { class: "quiet", text: `and ${count - names.length} that are not listed here` }));
    });
    list.append(more);
  }
  box.append(list);
  return box;
}

// The numbers under the sentence.
export function listHeadFacts({ head, counts, titles }) {
  const found = [["A", titles[0]], ["B", titles[1]]];
  const number = (name, value, suffix = "") => {
    if (value !== null && value !== undefined) found.push([name, formatNumber(readNumber(value)) + suffix]);
  };
  if (head.direction) found.push(["Found in", head.direction]);
  if (head.step !== null && head.step !== undefined) found.push(["Step", String(head.step)]);
  if (head.introduced !== 0) number("Introduced", head.introduced);
  number(head.introduced === null ? "Agree to" : "Agree before to", head.agree_to);
  number("Limit", head.limit);
  number("Floor", head.floor);
  found.push(["Pairs", plural(counts.pairs, "site")]);
  if (counts.over) found.push(["Beyond the limit", String(counts.over)]);
  return found;
}
