// "Try it": one streamed chat, and how long its tokens took.

import { EventReader } from "./feed.js";
import { authorization, refusal } from "./key.js";
import { duration, plural } from "./words.js";

const WORDS = "the river ran slowly past the mill and the old wheel turned with it all day long while".split(" ");

// Random, so that the prefix cache never holds it.
function padding(numWords) {
  if (!numWords) return "";
  const words = Array.from({ length: numWords }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
  return `Here is a text.\n${words.join(" ")}.\n\n`;
}

export class Chat {
  constructor() {
    this.model = "";
    this.stopper = null;
    this.answer = document.getElementById("answer");
    this.note = document.getElementById("chat-note");
    this.button = document.getElementById("send"); // also stops the request
    document.getElementById("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopper === null) this.run();
      else this.stopper.abort();
    });
    document.getElementById("message").addEventListener("keydown", (event) => {
      const isSending = event.key === "Enter" && (event.ctrlKey || event.metaKey);
      if (isSending && this.stopper === null) event.target.form.requestSubmit();
    });
  }

  async run() {
    this.stopper = new AbortController();
    this.setBusy(true);
    this.times = [performance.now()]; // when it was sent, then when each piece of text came
    this.answer.textContent = "";
    try {
      await this.stream(this.stopper.signal);
      this.note.textContent = this.summary("Done");
    } catch (error) {
      this.note.textContent = error.name === "AbortError" ? this.summary("Stopped") : error.message;
    }
    this.stopper = null;
    this.setBusy(false);
  }

  setBusy(isBusy) {
    this.button.textContent = isBusy ? "Stop" : "Send";
    if (isBusy) this.note.textContent = "Waiting for the first token…";
  }

  async stream(signal) {
    const message = document.getElementById("message").value;
    const numWords = Number(document.getElementById("padding").value);
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      signal,
      headers: { "Content-Type": "application/json", ...authorization() },
      body: JSON.stringify({
        model: this.model,
        messages: [{ role: "user", content: padding(numWords) + message }],
        max_tokens: Number(document.getElementById("max-tokens").value),
        stream: true,
      }),
    });
    if (!response.ok) throw new Error(await refusal(response));
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      for (const { data } of events.feed(value)) if (data !== "[DONE]") this.take(JSON.parse(data));
    }
  }

  take(piece) {
    if (piece.error) throw new Error(piece.error.message);
    const text = piece.choices?.[0]?.delta?.content;
    if (!text) return;
    if (this.times.length === 1) this.note.textContent = "";
    this.times.push(performance.now());
    const isAtEnd = this.answer.scrollTop + this.answer.clientHeight >= this.answer.scrollHeight - 8;
    this.answer.append(text);
    if (isAtEnd) this.answer.scrollTop = this.answer.scrollHeight;
  }

  summary(word) {
    const [sent, first, ...rest] = this.times;
    if (first === undefined) return `${word} before the first token.`;
    const gaps = rest.map((time, index) => time - this.times[index + 1]);
    const longest = gaps.length ? `, longest gap ${duration(Math.max(...gaps) / 1000)}` : "";
    return `${word}: ${plural(this.times.length - 1, "piece")}, the first after ${duration((first - sent) / 1000)}${longest}.`;
  }
}
