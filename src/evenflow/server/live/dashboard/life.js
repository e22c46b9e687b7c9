// "One request": its life from arrival to end, as the server recorded it.

import { authorization, refusal } from "./key.js";
import { eventsOfLife } from "./words.js";

const MAX_ROWS = 300;
const element = (id) => document.getElementById(id);

export class Life {
  constructor() {
    this.wanted = ""; // the id that was asked for last
    element("close-life").addEventListener("click", () => {
      element("life").hidden = true;
    });
  }

  // A button that shows the request with this id.
  button(text, id) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "link";
    button.textContent = text;
    button.addEventListener("click", () => this.show(id));
    return button;
  }

  async show(id) {
    this.wanted = id;
    const { note, requests } = await this.fetch(id);
    if (this.wanted !== id) return;
    const rows = requests.flatMap(eventsOfLife);
    const hidden = Math.max(0, rows.length - MAX_ROWS);
    element("life-id").textContent = id;
    element("life-note").textContent = hidden ? `${hidden} more rows are in /v1/requests/ID/chunks.` : note;
    element("life-table").hidden = !rows.length;
    element("life-table").tBodies[0].replaceChildren(...rows.slice(0, MAX_ROWS).map(rowOf));
    element("life").hidden = false;
    element("life").focus();
    element("life").scrollIntoView({ block: "nearest" });
  }

  async fetch(id) {
    try {
      const response = await fetch(`v1/requests/${encodeURIComponent(id)}/chunks`, { headers: authorization() });
      if (!response.ok) return { note: await refusal(response), requests: [] };
      return { note: "", requests: (await response.json()).requests };
    } catch {
      return { note: "The server cannot be reached.", requests: [] };
    }
  }
}

function rowOf({ texts, isLate }) {
  const row = document.createElement("tr");
  if (isLate) row.className = "late";
  for (const text of texts) row.insertCell().textContent = text;
  return row;
}
