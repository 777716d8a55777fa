// The findings, each root cause with what follows from it. Knows how a finding is written, and no
// map: whoever makes the list says what happens when a finding is to be shown there.

import { formatNumber, plural } from "./numbers.js";
import { make } from "./elements.js";

const FEW_SITES = 12;

export function makeFindings(groups, onShow) {
  if (!groups.length) return [];
  const heading = make("div", { class: "section-head" }, make("h2", { text: "Findings" }), make("p", { text: countFindings(groups) }));
  const list = make("div", { class: "finding-list" });
  groups.forEach((group, at) => list.append(makeGroup(group, at === 0, onShow)));
  return [heading, list];
}

function countFindings(groups) {
  const all = groups.flatMap(({ root, follows }) => [root, ...follows]);
  const words = ["error", "warning", "info"].map((severity) => {
    const count = all.filter((one) => one.severity === severity).length;
    return count ? (severity === "info" ? `${count} info` : plural(count, severity)) : null;
  });
  const causes = groups.length < all.length ? ` from ${plural(groups.length, "cause")}` : "";
  return words.filter(Boolean).join(", ") + causes;
}

function makeGroup({ root, follows }, isOpen, onShow) {
  const summary = make(
    "summary",
    {},
    make("span", { class: "pill", "data-severity": root.severity, text: root.severity }),
    make("span", { class: "finding-rule", text: root.rule }),
    make("code", { class: "finding-site", text: root.site || "the training" }),
    make("span", { class: "finding-more", text: countOthers(root, follows) }),
    make("span", { class: "finding-step", text: `step ${root.step}` }),
  );
  const body = make("div", { class: "finding-body" }, make("p", { class: "finding-message", text: root.message }));
  body.append(...makeDetails(root));
  if (follows.length) body.append(makeFollows(follows, onShow));
  if (root.place) {
    body.append(make("button", { type: "button", class: "link-button", text: "Show in the map", onclick: () => onShow(root) }));
  }
  return make("details", { class: "finding", "data-severity": root.severity, open: isOpen }, summary, body);
}

function countOthers(root, follows) {
  const words = [];
  if (root.others.length) words.push(`+${plural(root.others.length, "site")}`);
  if (follows.length) words.push(`+${plural(follows.length, "finding")}`);
  return words.join(", ");
}

function makeDetails(finding) {
  const parts = [];
  const facts = make("dl", { class: "finding-facts" });
  const add = (name, ...content) => facts.append(make("div", {}, make("dt", { text: name }), make("dd", {}, ...content)));
  if (finding.hint) add("Try", make("span", { text: finding.hint }));
  if (finding.value !== null || finding.threshold !== null) add("Measured", make("span", { text: describeValues(finding) }));
  if (finding.evidence.length) {
    add("Evidence", make("ul", { class: "evidence" }, ...finding.evidence.map((text) => make("li", { text }))));
  }
  if (finding.source) add("Source", make("code", { text: finding.source }), makeSnippet(finding.snippet));
  const inputs = finding.more?.inputs;
  if (Array.isArray(inputs) && inputs.length && typeof inputs[0] === "object") add("Inputs", makeInputs(inputs));
  if (finding.others.length) add("Other sites", makeSites(finding.others));
  if (facts.children.length) parts.push(facts);
  return parts;
}

function describeValues({ value, threshold }) {
  if (threshold === null) return formatNumber(value);
  return value === null ? `threshold ${formatNumber(threshold)}` : `${formatNumber(value)} against a threshold of ${formatNumber(threshold)}`;
}

function makeSnippet(snippet) {
  if (!snippet) return null;
  const rows = snippet.lines.map((text, at) => {
    const number = snippet.first + at;
    return make(
      "div",
      { class: number === snippet.line ? "code-line code-here" : "code-line" },
      make("span", { class: "code-number", text: String(number), "aria-hidden": "true" }),
      make("span", { class: "code-text", text: text || " " }),
    );
  });
  return make("pre", { class: "snippet" }, ...rows);
}

function makeInputs(inputs) {
  const names = ["name", "shape", "dtype", "min", "max", "nan", "inf", "zeros"].filter((name) => inputs.some((one) => one[name] !== undefined));
  const show = (value) => {
    if (Array.isArray(value)) return value.join("×");
    return typeof value === "number" ? formatNumber(value) : String(value ?? "–");
  };
  return make(
    "table",
    { class: "inputs" },
    make("thead", {}, make("tr", {}, ...names.map((text) => make("th", { text, scope: "col" })))),
    make("tbody", {}, ...inputs.map((one) => make("tr", {}, ...names.map((name) => make("td", { text: show(one[name]) }))))),
  );
}

function makeSites(sites) {
  const list = make("div", { class: "site-list" });
  const add = (names) => list.append(...names.map((text) => make("code", { text })));
  add(sites.slice(0, FEW_SITES));
  if (sites.length > FEW_SITES) {
    const more = make("button", { type: "button", class: "link-button", text: `and ${sites.length - FEW_SITES} more` });
    more.addEventListener("click", () => {
      more.remove();
      add(sites.slice(FEW_SITES));
    });
    list.append(more);
  }
  return list;
}

function makeFollows(follows, onShow) {
  const items = follows.map((one) =>
    make(
      "li",
      {},
      make("span", { class: "pill", "data-severity": one.severity, text: one.severity }),
      make("span", { class: "finding-rule", text: one.rule }),
      make("span", { text: one.message }),
      one.place ? make("button", { type: "button", class: "link-button", text: "Show", onclick: () => onShow(one) }) : null,
    ),
  );
  return make("div", { class: "follows" }, make("h3", { text: "What follows from it" }), make("ul", {}, ...items));
}
