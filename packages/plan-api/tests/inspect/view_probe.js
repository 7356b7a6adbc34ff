// Appended to the page by test_view.py: what a reader would notice is put where the test finds it.
const visible = [...document.querySelectorAll(".row > *, th, td, .chip, h1, p")].filter(
  (one) => one.offsetParent,
);
const box = (one) => one.getBoundingClientRect();
const style = (one) => getComputedStyle(one);
const rows = [...document.querySelectorAll(".row")]
  .filter((row) => row.offsetParent)
  .map((row) => [...row.children].filter((one) => one.offsetParent));
const brightness = (one) => {
  const [red, green, blue] = style(one).color.match(/[0-9.]+/g);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
};
const texts = (some) => some.map((one) => one.textContent);
const names = (selector) => [...document.querySelectorAll(selector)].map((one) => one.dataset.name);

// The root's branch is focused, then each key is pressed: where the focus is, and how its branch is.
const press = (key) => {
  document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
  const branch = document.activeElement.parentElement;
  const outline = style(document.activeElement).outlineStyle;
  return [key, branch.dataset.name, branch.open ? "open" : "closed", outline];
};
const walk = [
  "ArrowDown", "ArrowDown", "ArrowRight", "ArrowRight", "End", "ArrowLeft", "ArrowLeft", "ArrowUp",
  "Home", "ArrowUp",
];

document.body.dataset.found = JSON.stringify({
  rows: rows.length,
  clipped: texts(
    visible.filter((one) => one.scrollWidth > one.clientWidth + 1 && style(one).display !== "inline"),
  ),
  overlapping: texts(
    rows.flatMap((row) =>
      row.slice(1).filter((one, at) => box(one).left < box(row[at]).right - 1),
    ),
  ),
  outside: rows.filter((row) => box(row.at(-1)).right > box(row[0].parentElement).right + 1).length,
  open: names("details[open]"),
  found: names(".found"),
  text: brightness(document.body),
  chip: brightness(document.querySelector(".chip")),
  // Last, as it opens and closes branches.
  keys: (document.querySelector("summary").focus({ focusVisible: true }), walk.map(press)),
  loaded: performance.getEntriesByType("resource").length,
});
