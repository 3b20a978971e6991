// Charts over steps, drawn by uPlot. All charts of a view share the cursor and the zoom: drag to zoom, double click to
// see everything again. Steps are counted from 1, as on the terminal.

import { h, number } from "./dom.js";

const { uPlot } = window;
const HEIGHT = 180;
export const COLOURS = 8;

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const isNumber = (value) => typeof value === "number";
const plots = new Set();
/** Range of steps that the view is zoomed to, also for charts that are drawn anew; null: everything. */
let zoom = null;
let following = false;

const resized = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries)
    if (contentRect.width) target.plot.setSize({ width: Math.floor(contentRect.width), height: HEIGHT });
});
window
  .matchMedia("(prefers-color-scheme: dark)")
  .addEventListener("change", () => plots.forEach((plot) => plot.redraw(false)));

/** Frees the charts of views that were left, and forgets their zoom. */
function sweep() {
  for (const plot of plots) {
    if (plot.root.isConnected || !plot.wasShown) continue;
    resized.unobserve(plot.root.parentElement);
    plots.delete(plot);
    plot.destroy();
  }
  if (!plots.size) zoom = null;
}

function follow(plot) {
  if (following || !plot.wasShown) return;
  const { min, max } = plot.scales.x;
  const all = plot.data[0];
  zoom = min <= all[0] && max >= all.at(-1) ? null : { min, max };
  following = true;
  for (const other of plots) if (other !== plot) other.setScale("x", zoom ?? { min: other.data[0][0], max: other.data[0].at(-1) });
  following = false;
}

const axis = (more) => ({
  stroke: () => style("--faint"),
  grid: { stroke: () => style("--edge"), width: 0.6 },
  ticks: { show: false },
  font: '10px system-ui, "DejaVu Sans", sans-serif',
  ...more,
});

/** A figure with a plot of `data` (x, then a row of values for each series), and what it says below. */
function frame(title, data, series, { low, high, say }) {
  sweep();
  const box = h("div", { class: "plot", role: "img", "aria-label": `${title} by step` });
  const readout = h("p", { class: "readout" });
  const figure = h("figure", { class: "chart" }, h("figcaption", {}, title), box, readout);
  const range = (_, from, to) => {
    const [bottom, top] = [low ?? from ?? 0, high ?? to ?? 1];
    if (bottom !== top) return [bottom, top];
    return bottom ? [bottom - Math.abs(bottom) * 0.1, top + Math.abs(top) * 0.1] : [0, 1];
  };
  const plot = new uPlot(
    {
      width: 320,
      height: HEIGHT,
      legend: { show: false },
      cursor: { sync: { key: "steps" }, y: false, points: { size: 6 } },
      scales: { x: { time: false, range: (_, from, to) => (from === to ? [from - 1, to + 1] : [from, to]) }, y: { range } },
      axes: [
        axis({ size: 24, gap: 2, incrs: [1, 2, 5].flatMap((n) => [1, 10, 100, 1e3, 1e4, 1e5].map((p) => n * p)).sort((a, b) => a - b) }),
        axis({ size: 46, gap: 4, values: (_, splits) => splits.map((value) => number(value)) }),
      ],
      series: [{}, ...series],
      hooks: {
        setCursor: [(self) => readout.replaceChildren(...say(self.cursor.idx ?? self.data[0].length - 1, self.data))],
        setScale: [(self, key) => key === "x" && follow(self)],
      },
    },
    data,
    box,
  );
  box.plot = plot;
  plots.add(plot);
  resized.observe(box);
  requestAnimationFrame(() => {
    if (zoom) plot.setScale("x", zoom);
    plot.wasShown = true;
  });
  readout.replaceChildren(...say(data[0].length - 1, data));
  return figure;
}

function empty(title) {
  return h("figure", { class: "chart empty" }, h("figcaption", {}, title), h("p", {}, "not recorded in this run"));
}

/** One row of steps for all lines, and the values of each: null where a line has none. */
function joined(lines) {
  const clean = lines.map(({ x, y }) => [x.map((step) => step + 1), x.map((_, i) => (isNumber(y[i]) ? y[i] : null))]);
  return clean.length > 1 ? uPlot.join(clean) : clean[0];
}

/** Lines `{name, x, y}` over steps; below them the newest values, or those under the pointer. */
export function lineChart(title, lines, { low = null, high = null, format = number } = {}) {
  if (!lines.some(({ y }) => y.some(isNumber))) return empty(title);
  const series = lines.map(({ name, y }, i) => ({
    label: name,
    stroke: () => style(`--c${i % COLOURS}`),
    width: 1.6,
    spanGaps: true,
    points: { show: y.filter(isNumber).length <= Math.max(1, y.length / 2), size: 5, fill: () => style(`--c${i % COLOURS}`) },
  }));
  const say = (index, data) => [
    h("span", { class: "entry" }, `step ${number(data[0][index])}`),
    ...lines.map(({ name }, i) => {
      const before = data[i + 1].findLastIndex((value, j) => j <= index && isNumber(value));
      const value = before < 0 ? null : data[i + 1][before];
      const step = before >= 0 && before < index ? ` (step ${number(data[0][before])})` : "";
      return h("span", { class: `entry c${i % COLOURS}` }, `${name} `, h("b", {}, format(value)), step);
    }),
  ];
  return frame(title, joined(lines), series, { low, high, say });
}

/** Shares [step][kind] that add up to 1, as areas on each other. */
export function stackedAreas(title, steps, kinds, shares) {
  if (!steps.length) return empty(title);
  const sums = kinds.map((_, kind) => shares.map((row) => row.slice(0, kind + 1).reduce((sum, one) => sum + one, 0)));
  const series = kinds.map((name, i) => ({
    label: name,
    stroke: () => style(`--a${Math.min(i, COLOURS - 1)}`),
    fill: () => style(`--a${Math.min(i, COLOURS - 1)}`),
    paths: uPlot.paths.stepped({ align: 1 }),
    points: { show: steps.length === 1 },
  }));
  const say = (index) =>
    kinds.map((kind, i) =>
      h("span", { class: `entry a${Math.min(i, COLOURS - 1)}` }, `${kind} `, h("b", {}, `${Math.round(100 * (shares[index]?.[i] ?? 0))} %`)),
    );
  // The tallest sum is drawn first, and each lower one over it.
  const data = [steps.map((step) => step + 1), ...sums.toReversed()];
  return frame(title, data, series.toReversed(), { low: 0, high: 1, say });
}
