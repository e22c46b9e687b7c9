// Wires the page together: events of the feed go to the charts, user actions go to the server.

import { Chat } from "./chat.js";
import { Feed } from "./feed.js";
import { askForKey } from "./key.js";
import { Life } from "./life.js";
import { LineChart } from "./lines.js";
import { Load } from "./load.js";
import { showShares } from "./shares.js";
import { StepPicture } from "./steps.js";
import { StepStore } from "./store.js";
import { TargetControl } from "./target.js";
import { count, duration, share, stallInWords, stepInWords } from "./words.js";

const element = (id) => document.getElementById(id);
const RATE_WINDOW_S = 2;

const store = new StepStore();
const picture = new StepPicture(element("steps"), store, showStep);
const target = new TargetControl();
const life = new Life();
const chat = new Chat(life);
const load = new Load();
const quantiles = { series: [{ colour: 0 }, { colour: 1 }], label: duration };
const shares = { series: [{ colour: 0 }, { colour: 1 }], label: share, top: 1 };
const charts = {
  tbt: new LineChart(element("tbt"), quantiles),
  ttft: new LineChart(element("ttft"), quantiles),
  queue: new LineChart(element("queue"), { series: [{ colour: 0 }, { colour: 1 }], label: count, unit: 1 }),
  kv: new LineChart(element("kv"), shares),
};
const stateWords = {
  connecting: "Connecting…",
  live: "Live",
  lost: "Connection lost. Retrying.",
  locked: "An API key is required.",
  down: "The engine is down and is being restarted.",
  full: "Too many pages are connected to this server. Retrying.",
};
const detailHint = element("step-detail").textContent;
let stallsShown = "";

function setText(id, text) {
  const node = element(id);
  if (node.textContent !== text) node.textContent = text;
}

function setState(state) {
  if (state === "locked") askForKey(() => feed.connect());
  const node = element("state");
  if (node.dataset.state === state) return;
  node.dataset.state = state;
  node.textContent = stateWords[state];
}

function showStep(number) {
  setText("step-detail", number === null ? detailHint : stepInWords(store.get(number)));
}

function showFigures(figures) {
  setState(figures.up ? "live" : "down");
  picture.setClock(figures.now);
  picture.target = charts.tbt.mark = figures.target;
  target.show(figures);
  load.setTarget(figures.target);
  setText("tbt-p50", duration(figures.tbt[0]));
  setText("tbt-p99", duration(figures.tbt[1]));
  setText("ttft-p50", duration(figures.ttft[0]));
  setText("ttft-p99", duration(figures.ttft[1]));
  setText("running", count(figures.running));
  setText("waiting", count(figures.waiting));
  setText("rate", count(store.rate(figures.now, RATE_WINDOW_S)));
  setText("kv-use", share(figures.kv));
  setText("hits", share(figures.hits));
  showShares(figures);
  showStalls(figures.stalls);
  charts.tbt.add(figures.tbt);
  charts.ttft.add(figures.ttft);
  charts.queue.add([figures.running, figures.waiting]);
  charts.kv.add([figures.kv, figures.hits]);
  for (const chart of Object.values(charts)) chart.draw();
}

function showStalls(stalls) {
  const shown = stalls.map((stall) => stall.at).join();
  if (shown === stallsShown) return;
  stallsShown = shown;
  element("no-stalls").hidden = stalls.length > 0;
  element("stalls").replaceChildren(
    ...stalls.map((stall) => {
      const item = document.createElement("li");
      const gap = document.createElement("b");
      const words = stallInWords(stall);
      gap.append(stall.id ? life.button(words.gap, stall.id) : words.gap); // others' requests have no id here
      item.append(gap, words.causes);
      return item;
    }),
  );
}

const feed = new Feed(
  "live/feed",
  {
    hello({ model }) {
      chat.model = load.model = model;
      setText("model", model);
      document.title = `${model} · evenflow`;
    },
    steps(columns) {
      picture.setClock(columns.now);
      store.add(columns);
    },
    figures: showFigures,
    full: () => setState("full"),
  },
  setState,
);

element("pause").addEventListener("click", (event) => {
  const isPaused = !picture.isPaused;
  picture.setPaused(isPaused);
  event.currentTarget.setAttribute("aria-pressed", String(isPaused));
});

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
let lastDrawn = 0;

function frame(time) {
  if (!reducedMotion.matches || picture.chosen !== picture.drawnChoice || time - lastDrawn > 1000) {
    picture.draw();
    lastDrawn = time;
  }
  requestAnimationFrame(frame);
}

addEventListener("resize", () => {
  for (const chart of Object.values(charts)) chart.draw();
});
feed.connect();
requestAnimationFrame(frame);
