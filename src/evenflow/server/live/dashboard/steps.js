// The scrolling chart of steps. Each step is a bar whose width and height are the seconds it took.
// Of several steps within one pixel, the longest is drawn.

import { FONT, palette, roundUp, sizeToBox } from "./canvas.js";
import { duration } from "./words.js";

const LAG_S = 0.3; // drawn this far behind the newest batch, to scroll smoothly between batches
const LEFT = 56; // pixels for the scale

export class StepPicture {
  constructor(canvas, store, onChoose) {
    this.canvas = canvas;
    this.store = store;
    this.onChoose = onChoose; // called with a step's number, or null
    this.offset = null; // the server's clock minus this page's, in seconds
    this.scale = 0.1; // seconds at the top of the chart
    this.isPaused = false;
    this.heldEnd = null; // the time at the right edge while paused
    this.chosen = null;
    this.target = null;
    this.drawnChoice = null;
    this.drawnEnd = NaN; // `heldEnd` of the last draw
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => this.choose(null));
    canvas.addEventListener("blur", () => this.choose(null));
    canvas.addEventListener("keydown", (event) => this.press(event));
  }

  get windowS() {
    return this.canvas.clientWidth < 600 ? 4 : 10;
  }

  // The server's clock was `now` when a batch was sent. Batches with the least delay are the most accurate.
  setClock(now) {
    const offset = now - performance.now() / 1000;
    const isLate = this.offset !== null && offset < this.offset;
    this.offset = isLate ? this.offset + 0.02 * (offset - this.offset) : offset;
  }

  get end() {
    if (this.heldEnd !== null) return this.heldEnd;
    return (this.offset ?? 0) + performance.now() / 1000 - LAG_S;
  }

  hold(isHeld) {
    this.heldEnd = isHeld ? this.end : null;
  }

  setPaused(isPaused) {
    this.isPaused = isPaused;
    this.hold(isPaused || this.chosen !== null);
  }

  choose(number) {
    if (number === this.chosen) return;
    if (number !== null && this.heldEnd === null) this.hold(true);
    if (number === null && !this.isPaused) this.hold(false);
    this.chosen = number;
    this.onChoose(number);
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const plot = box.width - LEFT;
    const time = this.end - ((plot - (event.clientX - box.left - LEFT)) / plot) * this.windowS;
    this.choose(this.stepAt(time));
  }

  stepAt(time) {
    const { store } = this;
    for (let number = store.end - 1; number >= store.first; number--) {
      const slot = store.slot(number);
      if (store.at[slot] - store.seconds[slot] <= time) return time <= store.at[slot] + 0.02 ? number : null;
    }
    return null;
  }

  press(event) {
    const { store } = this;
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 };
    if (event.key === "Escape") this.choose(null);
    else if (event.key in moves && store.end > store.first) {
      const from = this.chosen ?? this.newestInView();
      const to = this.chosen === null ? from : from + moves[event.key];
      this.choose(Math.min(Math.max(to, store.first), store.end - 1));
      const at = store.at[store.slot(this.chosen)];
      if (at > this.heldEnd || at < this.heldEnd - this.windowS) this.heldEnd = at + this.windowS / 4;
    } else return;
    event.preventDefault();
  }

  newestInView() {
    const { store, end } = this;
    for (let number = store.end - 1; number > store.first; number--) {
      if (store.at[store.slot(number)] <= end) return number;
    }
    return store.first;
  }

  draw() {
    if (this.heldEnd !== null && this.chosen === this.drawnChoice && this.drawnEnd === this.heldEnd) return;
    this.drawnEnd = this.heldEnd ?? NaN;
    this.drawnChoice = this.chosen;
    const { context, width, height } = sizeToBox(this.canvas);
    const view = { context, left: LEFT, right: width, bottom: height - 2, top: 18, end: this.end };
    view.perSecond = (view.right - view.left) / this.windowS;
    this.setScale(view);
    view.perHeight = (view.bottom - view.top) / this.scale;
    this.drawScale(view);
    this.drawSteps(view);
    this.drawTarget(view);
  }

  // The steps decide the scale, and the target is within it unless it is far above them.
  setScale(view) {
    const { store } = this;
    let highest = 0;
    for (let number = store.end - 1; number >= store.first; number--) {
      const slot = store.slot(number);
      if (store.at[slot] < view.end - this.windowS) break;
      highest = Math.max(highest, store.seconds[slot]);
    }
    const target = this.target ?? 0;
    const reach = highest ? Math.min(1.3 * target, 2.5 * highest) : 1.3 * target;
    this.scale = roundUp(Math.max(highest, reach, 0.001));
  }

  drawScale({ context, left, right, bottom, top }) {
    const { line, muted } = palette();
    context.font = FONT;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const part of [0, 0.5, 1]) {
      const y = Math.round(bottom - part * (bottom - top)) + 0.5;
      context.fillStyle = line;
      context.fillRect(left, y, right - left, 1);
      context.fillStyle = muted;
      if (part) context.fillText(duration(part * this.scale), left - 6, y);
    }
  }

  drawSteps(view) {
    const { store } = this;
    let waiting = -1; // the longest step within the last pixel
    let pixel = NaN;
    for (let number = store.end - 1; number >= store.first; number--) {
      const slot = store.slot(number);
      const right = view.right - (view.end - store.at[slot]) * view.perSecond;
      if (right < view.left) break;
      if (right - store.seconds[slot] * view.perSecond > view.right) continue;
      if (Math.floor(right) !== pixel) {
        if (waiting >= 0) this.drawStep(view, waiting);
        pixel = Math.floor(right);
        waiting = number;
      } else if (store.seconds[slot] > store.seconds[store.slot(waiting)]) waiting = number;
    }
    if (waiting >= 0) this.drawStep(view, waiting);
  }

  drawStep(view, number) {
    const { store } = this;
    const { context } = view;
    const colours = palette();
    const slot = store.slot(number);
    const right = Math.min(view.right - (view.end - store.at[slot]) * view.perSecond, view.right);
    const start = view.right - (view.end - store.at[slot] + store.seconds[slot]) * view.perSecond;
    const isThin = right - start < 1;
    const left = Math.max(isThin ? Math.floor(right) : start, view.left);
    const width = isThin ? 1 : right - left - (right - left > 4 ? 1 : 0);
    let y = view.bottom;
    const stack = (seconds, colour) => {
      const height = seconds * view.perHeight;
      context.fillStyle = colour;
      context.fillRect(left, y - height, width, height);
      y -= height;
    };
    if (number === this.chosen) {
      context.fillStyle = colours.line;
      context.fillRect(left - 2, view.top, width + 4, view.bottom - view.top);
    }
    stack(store.decodeSeconds[slot], colours.decode);
    for (let chunk = store.chunkFrom[slot]; chunk < store.chunkEnd[slot]; chunk++) {
      const place = store.chunkSlot(chunk);
      stack(store.chunkSeconds[place], colours.chunks[store.chunkRequest[place] % colours.chunks.length]);
    }
    if (store.late[slot]) {
      context.fillStyle = colours.bad;
      context.fillRect(left, Math.max(y - 5, view.top), Math.max(width, 2), 3);
    }
  }

  drawTarget({ context, left, right, bottom, top, perHeight }) {
    if (this.target === null) return;
    const isAbove = this.target > this.scale;
    const y = isAbove ? top + 0.5 : Math.round(bottom - this.target * perHeight) + 0.5;
    context.strokeStyle = context.fillStyle = palette().ink;
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(`target ${duration(this.target)}${isAbove ? " (above this chart)" : ""}`, left + 6, y - 2);
    if (isAbove) return;
    context.lineWidth = 1.5;
    context.setLineDash([6, 4]);
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(right, y);
    context.stroke();
    context.setLineDash([]);
  }
}
