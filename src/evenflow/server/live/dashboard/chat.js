// "Try it": a conversation. Each answer shows its time to first token and longest gap.

import { Completion } from "./completion.js";
import { count } from "./words.js";

const WORDS = "the river ran slowly past the mill and the old wheel turned with it all day long while".split(" ");
const element = (id) => document.getElementById(id);

// Random, so that the prefix cache never holds it.
function padding(numWords) {
  if (!numWords) return "";
  const words = Array.from({ length: numWords }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
  return `Here is a text.\n${words.join(" ")}.\n\n`;
}

export class Chat {
  constructor(life) {
    this.life = life;
    this.model = "";
    this.stopper = null; // of the answer that runs
    this.messages = []; // without the system prompt, which may change
    this.log = element("answer");
    this.isAtEnd = true; // false: the user has scrolled up
    this.note = element("chat-note");
    this.button = element("send"); // also stops the answer
    this.message = element("message");
    element("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.stopper === null) this.send();
    });
    this.button.addEventListener("click", (event) => {
      if (this.stopper === null) return;
      event.preventDefault(); // the form's fields need not be valid to stop
      this.stopper.abort();
    });
    this.message.addEventListener("keydown", (event) => {
      const isSending = event.key === "Enter" && (event.ctrlKey || event.metaKey);
      if (isSending && this.stopper === null) event.target.form.requestSubmit();
    });
    this.log.addEventListener("scroll", () => {
      this.isAtEnd = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    });
    element("new-chat").addEventListener("click", () => this.reset());
  }

  reset() {
    this.stopper?.abort();
    this.messages = [];
    this.log.replaceChildren();
    this.note.textContent = "A new chat.";
    this.message.focus();
  }

  async send() {
    const { messages } = this; // those of this chat, even if a new one begins meanwhile
    const text = this.message.value;
    const numWords = Number(element("padding").value);
    messages.push({ role: "user", content: padding(numWords) + text });
    this.addTurn("user", numWords ? `[${count(numWords)} words] ${text}` : text);
    this.message.value = "";
    element("padding").value = "0"; // the padded message stays in the conversation
    this.stopper = new AbortController();
    this.setBusy(true);
    const note = await this.answer(messages, this.stopper.signal);
    this.stopper = null;
    this.setBusy(false);
    if (messages === this.messages) this.note.textContent = note;
  }

  setBusy(isBusy) {
    this.button.textContent = isBusy ? "Stop" : "Send";
    if (isBusy) this.note.textContent = "Waiting for the first token…";
  }

  // Shows the answer as it streams; returns the closing line. A refused message goes back to its field.
  async answer(messages, signal) {
    const completion = new Completion();
    const turn = this.addTurn("assistant", "");
    let word = "Done";
    try {
      await completion.run(this.body(messages), signal, (text) => this.show(turn, text));
    } catch (error) {
      if (error.name !== "AbortError") {
        const { content } = messages.pop();
        turn.previousElementSibling?.remove();
        turn.remove();
        this.message.value ||= content;
        return `${error.message} Your message is back in its field; a new chat has more room.`;
      }
      word = "Stopped";
    }
    if (completion.text) messages.push({ role: "assistant", content: completion.text });
    else messages.pop();
    const figures = document.createElement("small");
    figures.textContent = `${word}: ${completion.summary}. `;
    if (completion.id) figures.append(this.life.button("What the server did", completion.id));
    turn.append(figures);
    this.scroll();
    return `${word}.`; // for screen readers
  }

  body(messages) {
    const system = element("system").value.trim();
    return {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature: Number(element("temperature").value),
      max_tokens: Number(element("max-tokens").value),
    };
  }

  addTurn(role, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    const words = document.createElement("span");
    words.textContent = text;
    turn.append(words);
    this.log.append(turn);
    this.isAtEnd = true;
    this.scroll();
    return turn;
  }

  show(turn, text) {
    this.note.textContent = "";
    turn.firstChild.append(text);
    this.scroll();
  }

  // To the end, once per frame: reading sizes after every token would keep the page from reading the next one.
  scroll() {
    if (this.isScrolling || !this.isAtEnd) return;
    this.isScrolling = true;
    requestAnimationFrame(() => {
      this.isScrolling = false;
      this.log.scrollTop = this.log.scrollHeight;
    });
  }
}
