// What every page has around its parts: light or dark, facts on top, paper. Knows no data.

import { find, make } from "./elements.js";

function preferredTheme() {
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = theme === "dark" ? "Light" : "Dark";
  find("theme").setAttribute("aria-label", `Show in ${theme === "dark" ? "light" : "dark"} colours`);
}

export function addFact(name, value) {
  find("facts").append(make("div", {}, make("dt", { text: name }), make("dd", { text: value })));
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

// Build a page, then let it follow light and dark. `build(theme)` gives what draws it again in
// another theme; what goes wrong is said on the page.
export async function openPage(build) {
  try {
    setTheme(preferredTheme());
    const redraw = await build(document.documentElement.dataset.theme);
    const applyTheme = (theme) => {
      setTheme(theme);
      redraw(theme);
    };
    const toggle = () => applyTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
    find("theme").addEventListener("click", toggle);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => applyTheme(preferredTheme()));
    preparePrinting(applyTheme);
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    const problem = find("problem");
    problem.hidden = false;
    problem.textContent = `This page could not be shown in full: ${error.message}. It needs a browser of 2023 or later.`;
    throw error;
  }
}
