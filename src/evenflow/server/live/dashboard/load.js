// One click puts a load on the server: chats, and long prompts beside them, as ordinary requests of this page.
// The server decides the load, at live/load.

import { Completion, Refused } from "./completion.js";
import { authorization, refusal } from "./key.js";
import { duration, plural, share } from "./words.js";

const SHOW_MS = 250;
const element = (id) => document.getElementById(id);
const quantile = (sorted, share) => sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)];

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, 1000 * Math.max(0, seconds));
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

export class Load {
  constructor() {
    this.model = "";
    this.targets = []; // those in force since the page was opened, with the time of each: { since, seconds }
    this.stopper = null;
    this.button = element("load");
    this.note = element("load-note");
    this.state = element("load-state");
    this.table = element("load-table");
    this.bar = element("load-progress");
    this.button.addEventListener("click", () => (this.stopper === null ? this.run() : this.stopper.abort()));
  }

  // The target in force; null if the policy has none.
  setTarget(seconds) {
    if (this.targets.at(-1)?.seconds !== seconds) this.targets.push({ since: performance.now(), seconds });
  }

  async run() {
    this.stopper = new AbortController();
    this.done = { chat: [], prompt: [] };
    this.open = { chat: 0, prompt: 0 };
    this.button.textContent = "Stop the load";
    let outcome;
    try {
      outcome = await this.send();
    } catch (error) {
      outcome = this.reason(error);
    }
    this.stopper.abort(); // requests still open
    this.stopper = null;
    clearInterval(this.timer);
    this.state.hidden = true;
    this.button.textContent = "Put a load on it";
    this.note.textContent = this.began === null ? outcome : `${outcome} ${this.summary()}`;
  }

  async send() {
    this.began = null;
    const { signal } = this.stopper;
    const response = await fetch("live/load", { headers: authorization(), signal });
    if (!response.ok) throw new Refused(response.status, await refusal(response));
    const load = await response.json();
    this.began = performance.now();
    this.note.textContent = `Sending ${load.title}. Change the target meanwhile.`;
    this.bar.max = load.send_s;
    this.show();
    this.state.hidden = false;
    this.table.hidden = true;
    this.timer = setInterval(() => this.show(), SHOW_MS);
    const isOver = pause(load.stop_after_s, signal).then(() => "Time is over; what was open was stopped.");
    const isAnswered = Promise.all(load.sessions.map((session) => this.runSession(session, load.send_s, signal)));
    isOver.catch(() => {}); // the sessions see the same signal
    return Promise.race([isAnswered.then(() => "The load has ended."), isOver]);
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }

  async runSession({ kind, requests }, sendS, signal) {
    for (const { at, content, max_tokens } of requests) {
      await pause(at - this.seconds, signal);
      if (this.seconds > sendS) return;
      const completion = new Completion();
      this.done[kind].push(completion);
      this.open[kind] += 1;
      const messages = [{ role: "user", content }];
      await completion.run({ model: this.model, messages, max_tokens, temperature: 0 }, signal);
      this.open[kind] -= 1;
    }
  }

  reason(error) {
    if (error.name === "AbortError") return "Stopped.";
    const isBusy = error instanceof Refused && (error.status === 429 || error.status === 503);
    return isBusy ? `The server has no room for a load now: ${error.message}` : `The load was ended: ${error.message}`;
  }

  show() {
    this.bar.value = this.seconds;
    const { chat, prompt } = this.open;
    const gap = this.gaps().at(-1);
    const longest = gap === undefined ? "" : `, longest gap so far ${duration(gap)}`;
    element("load-figures").textContent = `${plural(chat, "chat")} and ${plural(prompt, "long prompt")} open${longest}`;
  }

  // Of the chats, in ascending order.
  gaps() {
    return this.done.chat.flatMap((completion) => completion.gaps).sort((a, b) => a - b);
  }

  // The chats' gaps by the target that was in force. If it changed within a gap, the higher one counts.
  gapsByTarget() {
    const targetAt = (time) => this.targets.findLast(({ since }) => since <= time)?.seconds ?? null;
    const found = new Map();
    for (const { times, gaps } of this.done.chat) {
      gaps.forEach((gap, index) => {
        const [before, after] = [targetAt(times[index]), targetAt(times[index + 1])];
        const target = before === null || after === null ? null : Math.max(before, after);
        if (!found.has(target)) found.set(target, []);
        found.get(target).push(gap);
      });
    }
    return found;
  }

  summary() {
    const { chat, prompt } = this.done;
    const sent = `Sent ${plural(chat.length, "chat")} and ${plural(prompt.length, "long prompt")} in ${duration(this.seconds)}.`;
    const rows = [...this.gapsByTarget()].map(([target, gaps]) => rowOf(target, gaps));
    this.table.tBodies[0].replaceChildren(...rows);
    this.table.hidden = !rows.length;
    return sent;
  }
}

// One target that was tried.
function rowOf(target, gaps) {
  gaps.sort((a, b) => a - b);
  const inTime = target === null ? "–" : share(gaps.filter((gap) => gap <= target).length / gaps.length);
  const quantiles = [0.5, 0.99, 1].map((part) => duration(quantile(gaps, part)));
  const row = document.createElement("tr");
  for (const text of [target === null ? "none" : duration(target), gaps.length, ...quantiles, inTime]) {
    row.insertCell().textContent = text;
  }
  return row;
}
