// Reads the server's event feed. Reconnects when the connection is lost, and asks for a key when one is missing.
// Uses fetch, because EventSource cannot send a key.

import { authorization } from "./key.js";

const SILENCE_MS = 5000; // the server sends twice a second; after this long it is gone
const MAX_RETRY_MS = 5000;

// Splits a text stream into `event: NAME\ndata: JSON` messages; keeps an incomplete one for the next call.
export class EventReader {
  constructor() {
    this.text = "";
  }

  *feed(text) {
    this.text += text;
    const messages = this.text.split("\n\n");
    this.text = messages.pop();
    for (const message of messages) {
      let name = "message";
      let data = "";
      for (const line of message.split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      yield { name, data };
    }
  }
}

export class Feed {
  // Calls `handlers` by event name, and `onState` with connecting, live, lost or locked.
  constructor(url, handlers, onState) {
    Object.assign(this, { url, handlers, onState });
    this.wait = 500;
    this.isLocked = false;
    this.timer = null;
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden && this.timer !== null) this.connect();
    });
  }

  async connect() {
    clearTimeout(this.timer);
    this.timer = null;
    this.isLocked = false;
    try {
      await this.read();
      this.retry();
    } catch {
      this.retry();
    }
  }

  retry() {
    if (this.isLocked) return;
    this.onState("lost");
    this.timer = setTimeout(() => this.connect(), this.wait);
    this.wait = Math.min(2 * this.wait, MAX_RETRY_MS);
  }

  async read() {
    const stopper = new AbortController();
    const response = await fetch(this.url, { headers: authorization(), signal: stopper.signal });
    if (response.status === 401) {
      this.isLocked = true;
      this.onState("locked");
      return;
    }
    if (!response.ok) throw new Error(`status ${response.status}`);
    this.onState("live");
    this.wait = 500;
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    let silence = setTimeout(() => stopper.abort(), SILENCE_MS);
    try {
      for (;;) {
        const { done, value } = await reader.read();
        clearTimeout(silence);
        if (done) return;
        silence = setTimeout(() => stopper.abort(), SILENCE_MS);
        for (const { name, data } of events.feed(value)) this.handlers[name]?.(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
    }
  }
}
