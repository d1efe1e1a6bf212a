"use strict";
const turns = document.getElementById("turns");
for (const section of document.querySelectorAll("section.turn")) {
  const link = document.createElement("a");
  link.href = "#" + section.id;
  link.textContent = section.querySelector("h2").textContent.split(":")[0];
  turns.append(link);
}
for (const box of document.querySelectorAll("[data-hide]"))
  box.addEventListener("change", () => document.body.classList.toggle("no-" + box.dataset.hide, !box.checked));
document.getElementById("full").addEventListener("change", (event) =>
  document.body.classList.toggle("full", event.target.checked));
for (const map of document.querySelectorAll("svg.map"))
  map.addEventListener("click", (event) => {
    const box = map.getBoundingClientRect();
    const targets = map.dataset.targets.split(" ");
    const at = Math.min(targets.length - 1, Math.floor(((event.clientX - box.left) / box.width) * targets.length));
    location.hash = `t${map.dataset.turn}s${targets[at]}`;
  });
// what is far away has only an estimated height until it is seen, so a jump needs a second look
const settle = (left) => {
  const target = location.hash && document.getElementById(location.hash.slice(1));
  if (!target) return;
  target.scrollIntoView();
  if (left > 0) setTimeout(settle, 60, left - 1);
};
window.addEventListener("hashchange", () => settle(3));
settle(3);
for (const table of document.querySelectorAll("table")) {
  let sorted = null;
  table.querySelectorAll("th").forEach((head, column) =>
    head.addEventListener("click", () => {
      const value = (row) => row.cells[column].textContent;
      const number = (row) => parseFloat(value(row));
      const rows = [...table.tBodies[0].rows];
      const numeric = rows.every((row) => !Number.isNaN(number(row)));
      // numbers are wanted largest first, words in order; the same column again turns round
      const sign = (numeric ? -1 : 1) * (sorted === column ? -1 : 1);
      rows.sort((a, b) => sign * (numeric ? number(a) - number(b) : value(a).localeCompare(value(b))));
      sorted = sorted === column ? null : column;
      table.tBodies[0].append(...rows);
    }));
}
