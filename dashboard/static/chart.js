// Line charts and stacked bars in SVG, drawn by hand.

import { h, number, svg } from "./dom.js";

const WIDTH = 480,
  HEIGHT = 190,
  LEFT = 46,
  RIGHT = 8,
  TOP = 8,
  BOTTOM = 22;
export const COLOURS = 8;

/** Round numbers that cover a range, about `count` of them. */
export function ticks(low, high, count = 4) {
  const span = high - low || Math.abs(high) || 1;
  const rough = span / count,
    power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough) ?? 10 * power;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

function scale(low, high, from, to) {
  const span = high - low || 1;
  return (value) => from + ((value - low) / span) * (to - from);
}

/** [x, y] of the values that are there, in pieces between those that are not. */
function pieces(line, x, y) {
  const found = [[]];
  line.x.forEach((at, i) => {
    if (typeof line.y[i] === "number") found.at(-1).push(`${x(at).toFixed(1)},${y(line.y[i]).toFixed(1)}`);
    else if (found.at(-1).length) found.push([]);
  });
  return found.filter((piece) => piece.length);
}

function axes(x, y, xs, ys) {
  return [
    ...ys.map((at) => svg("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(at), y2: y(at) })),
    ...ys.map((at) => svg("text", { class: "tick y", x: LEFT - 5, y: y(at) + 3 }, number(at))),
    ...xs.map((at) => svg("text", { class: "tick x", x: x(at), y: HEIGHT - 6 }, number(at))),
  ];
}

function frame(title, drawing, readout) {
  const label = `${title} by step`;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label }, drawing);
  return [h("figure", { class: "chart" }, h("figcaption", {}, title), picture, readout), picture];
}

/** Lines `{name, x, y}` over steps; the readout shows the newest values, or those under the pointer. */
export function lineChart(title, lines, { low = null, high = null, format = number } = {}) {
  const values = lines.flatMap((line) => line.y.filter((value) => typeof value === "number"));
  if (!values.length) {
    return h("figure", { class: "chart empty" }, h("figcaption", {}, title), h("p", {}, "not recorded in this run"));
  }
  const steps = lines.flatMap((line) => line.x);
  const [first, last] = [steps.reduce((a, b) => Math.min(a, b)), steps.reduce((a, b) => Math.max(a, b))];
  let bottom = low ?? values.reduce((a, b) => Math.min(a, b)),
    top = high ?? values.reduce((a, b) => Math.max(a, b));
  if (bottom === top) [bottom, top] = [bottom - (Math.abs(bottom) * 0.1 || 1), top + (Math.abs(top) * 0.1 || 1)];
  const x = scale(first, last, LEFT, WIDTH - RIGHT),
    y = scale(bottom, top, HEIGHT - BOTTOM, TOP);
  const drawn = lines.flatMap((line, i) =>
    pieces(line, x, y).map((piece) =>
      piece.length > 1
        ? svg("polyline", { class: `line c${i % COLOURS}`, points: piece.join(" ") })
        : svg("circle", { class: `dot c${i % COLOURS}`, cx: piece[0].split(",")[0], cy: piece[0].split(",")[1], r: 2 }),
    ),
  );
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  const readout = h("p", { class: "readout" });
  const show = (step) => readout.replaceChildren(...legend(lines, step, format));
  const [figure, picture] = frame(
    title,
    [...axes(x, y, ticks(first, last, 5), ticks(bottom, top)), drawn, cursor],
    readout,
  );
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * WIDTH;
    const step = steps.reduce((best, one) => (Math.abs(x(one) - at) < Math.abs(x(best) - at) ? one : best));
    for (const side of ["x1", "x2"]) cursor.setAttribute(side, x(step));
    show(step);
  });
  picture.addEventListener("pointerleave", () => show(last));
  show(last);
  return figure;
}

function legend(lines, step, format) {
  const entries = lines.map((line, i) => {
    const before = line.x.findLastIndex((at, j) => at <= step && typeof line.y[j] === "number");
    const value = before < 0 ? null : line.y[before];
    return h("span", { class: `entry c${i % COLOURS}` }, `${line.name} `, h("b", {}, format(value)));
  });
  return [h("span", { class: "entry" }, `step ${number(step)}`), ...entries];
}

/** Shares [bucket][kind] that add up to 1, as stacked bars. */
export function stackedBars(title, steps, kinds, shares) {
  if (!steps.length) {
    return h("figure", { class: "chart empty" }, h("figcaption", {}, title), h("p", {}, "not recorded in this run"));
  }
  const width = (WIDTH - LEFT - RIGHT) / steps.length,
    y = scale(0, 1, HEIGHT - BOTTOM, TOP);
  const bars = shares.flatMap((row, i) => {
    let under = 0;
    return row.map((share, kind) => {
      const bar = svg(
        "rect",
        {
          class: `bar a${Math.min(kind, COLOURS - 1)}`,
          x: LEFT + i * width,
          width: Math.max(width - 0.5, 0.5),
          y: y(under + share),
          height: y(under) - y(under + share),
        },
        svg("title", {}, `step ${steps[i]}: ${Math.round(100 * share)} % ${kinds[kind]}`),
      );
      under += share;
      return bar;
    });
  });
  const at = (index) => LEFT + (index + 0.5) * width;
  const marks = ticks(0, steps.length - 1, 5).filter(Number.isInteger);
  const names = marks.map((i) => svg("text", { class: "tick x", x: at(i), y: HEIGHT - 6 }, number(steps[i])));
  const levels = [0, 0.5, 1].map((v) => svg("text", { class: "tick y", x: LEFT - 5, y: y(v) + 3 }, `${100 * v} %`));
  const readout = h(
    "p",
    { class: "readout" },
    kinds.map((kind, i) => h("span", { class: `entry a${Math.min(i, COLOURS - 1)}` }, kind)),
  );
  return frame(title, [bars, names, levels], readout)[0];
}
