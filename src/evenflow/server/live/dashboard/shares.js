// The tables of classes and tenants: running and waiting requests, gaps and first tokens.

import { count, duration } from "./words.js";

const pair = (quantiles) => quantiles.map(duration).join(" · ");

// Fills a table with rows of text, or shows its note when there are none.
function fill(name, rows) {
  const table = document.getElementById(name);
  table.hidden = rows.length === 0;
  document.getElementById(`no-${name}`).hidden = rows.length > 0;
  const body = table.tBodies[0];
  while (body.rows.length > rows.length) body.deleteRow(-1);
  rows.forEach((texts, place) => {
    const row = body.rows[place] ?? body.insertRow();
    texts.forEach((text, column) => {
      const cell = row.cells[column] ?? row.insertCell();
      if (cell.textContent !== text) cell.textContent = text;
    });
  });
}

export function showShares({ classes, tenants }) {
  fill(
    "classes",
    classes.map((one) => [one.name, count(one.running), count(one.waiting), pair(one.ttft), pair(one.tbt)]),
  );
  fill(
    "tenants",
    tenants.map((one) => [one.name, count(one.running), count(one.waiting)]),
  );
}
