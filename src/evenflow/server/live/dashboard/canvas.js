// Shared by all charts: canvases at device resolution, the page's colours, scales with round figures.

export function sizeToBox(canvas) {
  const box = canvas.getBoundingClientRect();
  const ratio = window.devicePixelRatio || 1;
  const width = Math.round(box.width * ratio);
  const height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  return { context, width: box.width, height: box.height };
}

let colours = null;

export function palette() {
  if (colours === null) {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => style.getPropertyValue(name).trim();
    colours = {
      ink: read("--ink"),
      muted: read("--muted"),
      line: read("--line"),
      decode: read("--decode"),
      bad: read("--bad"),
      accent: read("--accent"),
      chunks: Array.from({ length: 8 }, (_, index) => read(`--chunk-${index}`)),
    };
  }
  return colours;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  colours = null;
});

// The smallest round multiple of `unit` that is at least `value`.
export function roundUp(value, unit = 0.001) {
  const wanted = Math.max(value / unit, 1);
  const power = 10 ** Math.floor(Math.log10(wanted) + 1e-9);
  const factor = [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((candidate) => candidate * power >= wanted * (1 - 1e-9));
  return factor * power * unit;
}

export const FONT = "12px system-ui, sans-serif";
