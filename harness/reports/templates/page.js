// Filtering and sorting of the table of cells; without it the table is whole and in the order of the axes.
"use strict";
for (const table of document.querySelectorAll("table.cards")) {
  const body = table.tBodies[0];
  const tools = document.getElementById(table.id + "-tools");
  const words = tools.querySelector("input[type=search]");
  const failing = tools.querySelector("input[type=checkbox]");
  const count = tools.querySelector("output");
  const show = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const row of body.rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !wanted.every(word => text.includes(word)) || (failing.checked && row.dataset.passed === "1");
      shown += !row.hidden;
    }
    count.textContent = shown + " of " + body.rows.length + " shown";
  };
  words.addEventListener("input", show);
  failing.addEventListener("change", show);
  tools.hidden = false;
  show();
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.v ?? row.cells[column].textContent.trim();
      const order = (a, b) => key(a).localeCompare(key(b), "en", { numeric: false });
      const numeric = (a, b) => Number(key(a) || -1) - Number(key(b) || -1);
      const rows = [...body.rows].sort(head.classList.contains("n") ? numeric : order);
      body.append(...(down ? rows.reverse() : rows));
    });
  });
}
