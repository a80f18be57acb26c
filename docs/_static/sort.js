/* Turn the headers of long tables into buttons that sort the rows. Without scripts, the tables stay plain. */
const collator = new Intl.Collator("en", { numeric: true });

function value(row, column) {
  const text = row.cells[column].innerText.trim();
  const number = parseFloat(text.replace("−", "-"));
  return Number.isNaN(number) ? text : number;
}

function compare(a, b, direction) {
  if (a === "" || b === "") return (a === "") - (b === ""); // empty cells are last in both directions
  const numbers = typeof a === "number" && typeof b === "number";
  return direction * (numbers ? a - b : collator.compare(a, b));
}

function sort(table, header, column) {
  const rows = [...table.tBodies[0].rows];
  const isText = rows.every((row) => typeof value(row, column) === "string");
  const first = isText ? "ascending" : "descending";
  const other = isText ? "descending" : "ascending";
  const order = header.getAttribute("aria-sort") === first ? other : first;
  for (const cell of header.parentElement.cells) cell.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", order);
  const direction = order === "ascending" ? 1 : -1;
  rows.sort((a, b) => compare(value(a, column), value(b, column), direction));
  table.tBodies[0].append(...rows);
}

for (const table of document.querySelectorAll(".bd-article table")) {
  if (!table.tHead || table.tBodies[0].rows.length < 12) continue;
  table.classList.add("sortable");
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(table, header, column));
    header.append(button);
  });
}
