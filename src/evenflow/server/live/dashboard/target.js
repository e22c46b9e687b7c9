// The target: a slider over orders of magnitude, a field for exact figures, and what the server says to it.

import { authorization, refusal } from "./key.js";
import { duration } from "./words.js";

const LEAST_MS = 5;
const MOST_MS = 2000;
const QUIET_MS = 200; // after the last movement

const toMs = (place) => LEAST_MS * (MOST_MS / LEAST_MS) ** (place / 100);
const toPlace = (ms) => Math.round((100 * Math.log(ms / LEAST_MS)) / Math.log(MOST_MS / LEAST_MS));
// Two figures are as exact as a slider gets.
const rounded = (ms) => Number(ms.toPrecision(2));

export class TargetControl {
  constructor() {
    this.range = document.getElementById("target-range");
    this.number = document.getElementById("target-number");
    this.note = document.getElementById("target-note");
    this.timer = null;
    this.isSending = false;
    this.isTouched = false; // the user's wish has not been answered yet
    this.range.addEventListener("input", () => this.wish(rounded(toMs(Number(this.range.value)))));
    this.number.addEventListener("input", () => {
      if (this.number.value !== "" && this.number.checkValidity()) this.wish(Number(this.number.value));
    });
    document.getElementById("target-form").addEventListener("submit", (event) => event.preventDefault());
  }

  wish(ms) {
    this.isTouched = true;
    this.place(ms);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.send(ms), QUIET_MS);
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
        body: JSON.stringify({ tbt_target: ms / 1000 }),
      });
      this.say(response.ok ? "" : await refusal(response));
    } catch {
      this.say("The target could not be sent.");
    }
    this.isTouched = false;
  }

  // What is in force, by the server's own word.
  show({ target, feasible, policy, up }) {
    this.range.disabled = this.number.disabled = !up;
    if (!this.isTouched && target !== null && document.activeElement !== this.number) this.place(1000 * target);
    if (target === null && up) this.say(`The policy ${policy} keeps no target. Choose one to change that.`);
    else if (feasible !== null && feasible !== undefined) {
      this.say(`This target cannot be kept with the streams that decode now; ${duration(feasible)} could.`);
    } else this.say("");
  }

  say(text) {
    if (this.note.textContent !== text) this.note.textContent = text;
  }
}
