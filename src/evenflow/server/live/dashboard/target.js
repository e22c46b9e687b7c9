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
    this.problem = document.getElementById("target-problem");
    this.off = document.getElementById("target-off");
    this.last = null; // the last target in force, in ms: what the switch goes back to
    this.off.addEventListener("click", () => {
      const ms = this.off.getAttribute("aria-pressed") === "true" ? (this.last ?? Number(this.number.value)) : null;
      clearTimeout(this.timer);
      this.send(ms);
    });
    this.range.addEventListener("input", () => this.change(rounded(toMs(Number(this.range.value)))));
    this.number.addEventListener("input", () => {
      const isValid = this.number.value !== "" && this.number.checkValidity();
      this.problem.textContent = isValid ? "" : "A whole number of 1 to 60,000 ms.";
      this.number.setAttribute("aria-invalid", String(!isValid));
      if (isValid) this.change(Number(this.number.value));
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
        body: JSON.stringify({ tbt_target: ms === null ? null : `${ms}ms` }),
      });
      this.refusal = response.ok ? "" : await refusal(response);
      if (response.ok && ms !== null) this.last = ms; // the feed says it later
    } catch {
      this.refusal = "The target could not be sent.";
    }
    this.say(this.refusal);
    this.isTouched = false;
  }

  // Show the target in force, as the server reports it.
  show({ target, feasible, policy, up }) {
    this.range.disabled = this.number.disabled = this.off.disabled = !up;
    this.off.setAttribute("aria-pressed", String(target === null));
    if (target !== null) this.last = Math.round(1000 * target) || 1;
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
