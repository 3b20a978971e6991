// The numbers of each step.

import { get, of } from "./api.js";
import { lineChart, stackedAreas } from "./chart.js";
import { h, percent, plural } from "./dom.js";

const EVERY_MS = 3000;
/** Title, names of columns, settings of the chart. */
export const CHARTS = [
  ["reward", ["reward", "eval/reward"]],
  ["reward, spread in a step", ["reward_std"]],
  ["lengths, tokens", ["response_length_mean", "sampled_length_mean"]],
  ["turns and tool calls per episode", ["num_turns_mean", "episode/tool_calls", "episode/tool_errors"]],
  ["KL", ["kl_k3", "kl_proximal", "kl_reference"]],
  ["entropy", ["entropy"]],
  ["staleness, versions", ["staleness_mean", "staleness_max"]],
  ["mismatch: |Δ logprob| mean", ["logprob_abs_diff_mean"]],
  ["mismatch: |Δ logprob| max", ["logprob_abs_diff_max"]],
  ["effective sample share", ["effective_sample_share"], { low: 0, high: 1 }],
  ["clipped share of tokens", ["clip_fraction_high", "clip_fraction_low", "tokens_rejected_share"]],
  ["throughput, tokens/s", ["tokens_per_s"]],
  ["time of a step, s", ["wall_s", "train_s", "wait_s", "publish_s"]],
  ["bubble: share of a step that the trainer waits", ["bubble"], { low: 0, high: 1, format: percent }],
  ["gradient norm", ["grad_norm"]],
];

/** Title, what a column's name begins and ends with, settings of the chart: a line for each data source. */
export const CHARTS_BY_SOURCE = [
  ["reward by data source", "source/", "/reward"],
  ["curriculum: pass rate by data source", "curriculum/", "/pass_rate", { low: 0, high: 1 }],
  ["curriculum: tasks drawn by data source", "curriculum/", "/drawn"],
  ["curriculum: rows to learn from, by data source", "curriculum/", "/learnable"],
];

/** Returns the wanted columns that the run has. */
export function columns(wanted, names) {
  return wanted.filter((name) => names.includes(name));
}

/** Charts by data source. Rewards need several sources: one would repeat the chart of all rewards. */
export function bySource(names) {
  return CHARTS_BY_SOURCE.map(([title, prefix, suffix, options]) => [
    title,
    names.filter((name) => name.startsWith(prefix) && name.endsWith(suffix)),
    options,
  ]).filter(([, some]) => some.length > 1 || some[0]?.startsWith("curriculum/"));
}

export async function curves(root, { run, repeat, params, go }) {
  const advice = h("p", { class: "advice" }),
    grid = h("div", { class: "charts" }),
    own = h("div", { class: "charts" });
  const picker = h("select", {
    "aria-label": "another metric",
    onchange: () => go("curves", { metric: picker.value }),
  });
  root.append(h("h2", {}, "Curves"), advice, grid, h("h2", {}, "Any metric"), picker, own);
  let seen = -1,
    names = [];
  const fill = () => {
    const chosen = params.get("metric") ?? "";
    picker.replaceChildren(
      h("option", { value: "" }, "choose …"),
      ...names.map((name) => h("option", { value: name }, name)),
    );
    picker.value = chosen;
  };
  await repeat(async () => {
    const { names: all, rows } = await get(of(run, "metrics"), { points: 10 });
    if (rows === seen) return;
    if (all.join() !== names.join()) {
      names = all;
      fill();
    }
    const picked = params.get("metric");
    const charts = [...CHARTS, ...bySource(names)];
    const wanted = [...new Set([...charts.flatMap(([, some]) => columns(some, names)), ...(picked ? [picked] : [])])];
    const [{ steps, series }, old, split] = await Promise.all([
      get(of(run, "metrics"), { name: wanted }),
      get(of(run, "staleness")),
      get(of(run, "split")),
    ]);
    const draw = ([title, some, options]) =>
      lineChart(
        title,
        columns(some, names).map((name) => ({ name, x: steps, y: series[name] })),
        options,
      );
    const drawn = charts.map(draw);
    const bars = stackedAreas(
      "staleness of trained tokens",
      old.steps,
      old.ages.map((age) => (age ? `${plural(age, "version")} old` : "current")),
      old.shares,
    );
    drawn.splice(charts.findIndex(([title]) => title.startsWith("staleness")) + 1, 0, bars);
    grid.replaceChildren(...drawn);
    own.replaceChildren(...(picked ? [draw([picked, [picked]])] : []));
    advice.textContent = `${split.warning} ${split.advice}`.trim();
    seen = rows;
  }, EVERY_MS);
}
