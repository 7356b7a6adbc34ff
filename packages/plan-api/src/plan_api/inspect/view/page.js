"use strict";
// The page can be read without it; it opens and closes many branches at once.
const branches = [...document.querySelectorAll("details")];
const named = [...document.querySelectorAll("[data-name]")];
const open = (one) => { for (let at = one.closest("details"); at; at = at.parentElement.closest("details")) at.open = true; };

document.getElementById("open").onclick = () => branches.forEach((one) => { one.open = true; });
document.getElementById("close").onclick = () => branches.forEach((one, at) => { one.open = at === 0; });

// Up and Down, Home and End go along the rows that are shown; Left closes a branch, or goes to the
// one around it; Right opens it, or goes to the first in it. Enter and Space are the browser's.
const reachable = () => [...document.querySelectorAll("summary")].filter((one) => one.offsetParent);
const steps = {
  ArrowUp: (rows, at) => rows[at - 1],
  ArrowDown: (rows, at) => rows[at + 1],
  Home: (rows) => rows[0],
  End: (rows) => rows.at(-1),
  ArrowLeft: (rows, at) => {
    const branch = rows[at].parentElement;
    if (!branch.open) return branch.parentElement.closest("details")?.querySelector("summary");
    branch.open = false;
  },
  ArrowRight: (rows, at) => {
    const branch = rows[at].parentElement;
    if (branch.open) return branch.querySelectorAll("summary")[1];
    branch.open = true;
  },
};
document.addEventListener("keydown", (event) => {
  const rows = reachable(), at = rows.indexOf(document.activeElement);
  const step = steps[event.key];
  if (at < 0 || !step || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  step(rows, at)?.focus();
});

// Of equal modules the first is shown: `layers.7` is found as `layers.0`.
const plain = (text) => text.replace(/[^\w]/g, "\\$&");
const shown = (one, text) => {
  for (let at = one.closest("[data-in]"); at; at = at.parentElement.closest("[data-in]")) {
    const { in: prefix, first, last } = at.dataset;
    const number = new RegExp(`(^|\\.)${plain(prefix)}(\\d+)(?=\\.|$)`);
    text = text.replace(number, (whole, dot, n) => +first <= +n && +n <= +last ? `${dot}${prefix}${first}` : whole);
  }
  return text;
};

// Marks names that contain the text, and opens the branches around them.
const find = (text) => {
  const count = named.filter((one) => {
    const here = text !== "" && one.dataset.name.includes(shown(one, text));
    one.classList.toggle("found", here);
    if (here) open(one.matches("details") ? one.parentElement : one);
    return here;
  }).length;
  document.getElementById("count").textContent = text === "" ? "" : `${count} found`;
};
document.getElementById("find").oninput = (event) => find(event.target.value);
// view.html#layers.3 begins with a search.
const asked = decodeURIComponent(location.hash.slice(1));
if (asked) { document.getElementById("find").value = asked; find(asked); document.querySelector(".found")?.scrollIntoView(); }
