// One streamed chat completion: its text as it comes, and when each piece came.

import { EventReader } from "./feed.js";
import { authorization, refusal } from "./key.js";
import { duration } from "./words.js";

// A response other than 200.
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export class Completion {
  constructor() {
    this.id = ""; // of the response
    this.text = "";
    this.sent = performance.now();
    this.times = []; // when each piece of text came
  }

  // Sends `body` and calls `onText` with each piece. Throws an AbortError when the signal says so: even then when the
  // rest of the answer has already arrived, so that nothing is shown after Stop.
  async run(body, signal, onText = () => {}) {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({ ...body, stream: true }),
    });
    if (!response.ok) throw new Refused(response.status, await refusal(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { done, value } = await reader.read();
      signal.throwIfAborted();
      if (done) return;
      for (const { data } of events.feed(value)) if (data !== "[DONE]") this.take(JSON.parse(data), onText);
    }
  }

  take(piece, onText) {
    if (piece.error) throw new Error(piece.error.message);
    this.id = piece.id ?? this.id;
    const text = piece.choices?.[0]?.delta?.content;
    if (!text) return;
    this.text += text;
    this.times.push(performance.now());
    onText(text);
  }

  // Seconds between two pieces.
  get gaps() {
    return this.times.slice(1).map((time, index) => (time - this.times[index]) / 1000);
  }

  get summary() {
    if (!this.times.length) return "no text";
    const first = `first token after ${duration((this.times[0] - this.sent) / 1000)}`;
    const { gaps } = this;
    return gaps.length ? `${first}, longest gap ${duration(Math.max(...gaps))}` : first;
  }
}
