// The target: a logarithmic slider, a field for exact values, and the server's response.

import { authorization, refusal } from "./key.js";
import { duration } from "./words.js";

const MIN_MS = 5;
const MAX_MS = 2000;
const DEBOUNCE_MS = 200; // after the last input

const toMs = (place) => MIN_MS * (MAX_MS / MIN_MS) ** (place / 100);
const toPlace = (ms) => Math.round((100 * Math.log(ms / MIN_MS)) / Math.log(MAX_MS / MIN_MS));
// A slider is accurate to two digits.
const rounded = (ms) => Number(ms.toPrecision(2));

export class TargetControl {
  constructor() {
    this.range = document.getElementById("target-range");
    this.number = document.getElementById("target-number");
    this.note = document.getElementById("target-note");
    this.timer = null;
    this.isSending = false;
    this.isTouched = false; // the user's change has not been confirmed yet
    this.refusal = ""; // why the last change failed
    this.range.addEventListener("input", () => this.change(rounded(toMs(Number(this.range.value)))));
    this.number.addEventListener("input", () => {
      if (this.number.value !== "" && this.number.checkValidity()) this.change(Number(this.number.value));
    });
    document.getElementById("target-form").addEventListener("submit", (event) => event.preventDefault());
  }

  change(ms) {
    this.isTouched = true;
    this.place(ms);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(ms), DEBOUNCE_MS);
  }

  place(ms) {
    if (document.activeElement !== this.range || !this.isTouched) this.range.value = toPlace(ms);
    if (document.activeElement !== this.number || !this.isTouched) this.number.value = Math.round(ms);
    this.range.setAttribute("aria-valuetext", duration(ms / 1000));
  }

  async send(ms) {
    try {
      const response = await fetch("v1/target", {
        method: "PUT",
        headers: { "Content-Type": "application/json", ...authorization() },
        body: JSON.stringify({ tbt_target: `${ms}ms` }),
      });
      this.refusal = response.ok ? "" : await refusal(response);
    } catch {
      this.refusal = "The target could not be sent.";
    }
    this.say(this.refusal);
    this.isTouched = false;
  }

  // Show the target in force, as the server reports it.
  show({ target, feasible, policy, up }) {
    this.range.disabled = this.number.disabled = !up;
    if (!this.isTouched && target !== null && document.activeElement !== this.number) this.place(1000 * target);
    if (target === null && up) this.say(`The policy ${policy} has no target. Set one here to switch to it.`);
    else if (feasible !== null && feasible !== undefined) {
      this.say(`This target cannot be kept under the current load. The lowest feasible target is ${duration(feasible)}.`);
    } else this.say(this.refusal);
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}
