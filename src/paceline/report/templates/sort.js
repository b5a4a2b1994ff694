"use strict";
// Sorts a table by the column whose heading is pressed, a second time the other way round.
for (const table of document.querySelectorAll("table.runs")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => heading.querySelector("button").addEventListener("click", () => {
    const usual = heading.dataset.first;
    const other = usual === "ascending" ? "descending" : "ascending";
    const order = heading.getAttribute("aria-sort") === usual ? other : usual;
    for (const each of headings) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", order);
    const key = row => row.cells[column].dataset.key;
    const by = (a, b) => heading.dataset.first === "descending" ? Number(a) - Number(b) : a.localeCompare(b);
    const rows = [...table.tBodies[0].rows];
    // What isn't known stays at the end, whichever way round.
    const known = rows.filter(row => key(row) !== "").sort((a, b) => by(key(a), key(b)));
    if (order === "descending") known.reverse();
    table.tBodies[0].append(...known, ...rows.filter(row => key(row) === ""));
  }));
}
