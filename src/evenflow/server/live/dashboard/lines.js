// A small chart of one or more figures over the last two minutes.

import { FONT, palette, roundUp, sizeToBox } from "./canvas.js";

const POINTS = 240;

export class LineChart {
  // `series` is a list of {colour, dash}; `top` is a fixed upper end of the scale, or null.
  constructor(canvas, { series, label, top = null, unit = 0.001 }) {
    Object.assign(this, { canvas, series, label, top, unit });
    this.values = series.map(() => []);
    this.mark = null; // a value to draw as a horizontal line
  }

  add(values) {
    this.values.forEach((kept, index) => {
      kept.push(values[index] ?? null);
      if (kept.length > POINTS) kept.shift();
    });
  }

  draw() {
    const { context, width, height } = sizeToBox(this.canvas);
    const colours = palette();
    const highest = Math.max(this.unit, ...this.values.flat().filter((value) => value !== null));
    const isMarkNear = this.mark !== null && this.mark <= 3 * highest;
    const scale = this.top ?? roundUp(isMarkNear ? Math.max(highest, 1.1 * this.mark) : highest, this.unit);
    const y = (value) => height - 4 - (value / scale) * (height - 20);
    context.fillStyle = colours.line;
    context.fillRect(0, height - 3, width, 1);
    context.fillRect(0, Math.round(y(scale)), width, 1);
    context.font = FONT;
    context.fillStyle = colours.muted;
    context.textBaseline = "bottom";
    context.fillText(this.label(scale), 0, y(scale) - 1);
    if (isMarkNear) this.drawMark(context, width, y(this.mark), colours.ink);
    this.series.forEach((line, index) => this.drawLine(context, width, y, this.values[index], line));
  }

  drawMark(context, width, y, colour) {
    context.strokeStyle = colour;
    context.lineWidth = 1;
    context.setLineDash([4, 4]);
    context.beginPath();
    context.moveTo(0, y);
    context.lineTo(width, y);
    context.stroke();
    context.setLineDash([]);
  }

  drawLine(context, width, y, values, { colour, dash = [] }) {
    const colours = palette();
    context.strokeStyle = colour === "muted" ? colours.muted : colours.chunks[colour];
    context.lineWidth = 2;
    context.setLineDash(dash);
    context.beginPath();
    let isOpen = false;
    values.forEach((value, index) => {
      const x = width - ((values.length - 1 - index) / (POINTS - 1)) * width;
      if (value === null) isOpen = false;
      else if (isOpen) context.lineTo(x, y(value));
      else {
        context.moveTo(x, y(value));
        context.lineTo(x + 0.1, y(value));
        isOpen = true;
      }
    });
    context.stroke();
    context.setLineDash([]);
  }
}
