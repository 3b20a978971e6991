// Several runs on the same axes, and the differences between their recipes.

import { get, of } from "./api.js";
import { lineChart } from "./chart.js";
import { CHARTS, columns } from "./curves.js";
import { h, number, table, visible } from "./dom.js";

const MOST = 8;
/** One line for each run: training and evaluation have charts of their own. */
const COMPARED = [["reward", ["reward"]], ["reward of evaluations", ["eval/reward"]], ...CHARTS.slice(1)];

/** Rows [key, value of each run] of the keys whose values differ. */
export function differences(configs) {
  const keys = [...new Set(configs.flatMap(Object.keys))].sort();
  const text = (config, key) => (key in config ? JSON.stringify(config[key]) : "–");
  return keys
    .map((key) => [key, ...configs.map((config) => text(config, key))])
    .filter(([, first, ...others]) => others.some((other) => other !== first));
}

export async function compare(root, { run, params, go }) {
  const runs = await get("runs");
  const wanted = (params.get("with") ?? "")
    .split(",")
    .filter((name) => runs.some((one) => one.name === name) && name !== run);
  const names = [run, ...wanted].slice(0, MOST);
  const tick = ({ name, steps, reward }) =>
    h(
      "label",
      {},
      h("input", {
        type: "checkbox",
        value: name,
        checked: names.includes(name),
        disabled: name === run,
        onchange: change,
      }),
      ` ${visible(name)} `,
      h("small", {}, `${number(steps)} steps, reward ${number(reward)}`),
    );
  const box = h("fieldset", { class: "runs" }, h("legend", {}, `compare ${visible(run)} with (at most ${MOST - 1})`));
  function change() {
    const chosen = [...box.querySelectorAll("input:checked:not(:disabled)")].map((one) => one.value);
    go("compare", { with: chosen.join(",") });
  }
  box.append(...runs.map(tick));
  const answers = await Promise.all(
    names.map(async (name) => {
      const { names: found } = await get(of(name, "metrics"), { points: 10 });
      const known = [...new Set(COMPARED.flatMap(([, some]) => columns(some, found)))];
      const [numbers, config] = await Promise.all([get(of(name, "metrics"), { name: known }), get(of(name, "config"))]);
      return { name, known, numbers, config };
    }),
  );
  const chart = ([title, some, options]) => {
    const lines = answers.flatMap(({ name, known, numbers }) =>
      columns(some, known)
        .slice(0, 1)
        .map((column) => ({ name, x: numbers.steps, y: numbers.series[column] })),
    );
    return lines.length ? lineChart(title, lines, options) : null;
  };
  const apart = differences(answers.map(({ config }) => config)).map((row) => row.map((cell) => visible(cell)));
  root.append(
    h("h2", {}, "Compare runs"),
    box,
    h("div", { class: "charts" }, COMPARED.map(chart)),
    h("h2", {}, "Differences between the recipes"),
    names.length > 1
      ? table(["key", ...names], apart, { id: "differences" })
      : h("p", { class: "quiet" }, "Choose a run above."),
  );
}
