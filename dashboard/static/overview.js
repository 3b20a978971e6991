// The state of the run in one sentence, the main plots, the pipeline of a running run, the newest episodes.

import { address } from "./address.js";
import { get, of } from "./api.js";
import { lineChart } from "./chart.js";
import { bytes, h, number, percent, plural, seconds, table, visible } from "./dom.js";

const REMEMBER_S = 30;

function stage(name, value, most, detail, state = "") {
  const share = most ? Math.min(1, value / most) : 0;
  const gauge = most
    ? h("meter", { min: 0, max: 1, value: share, "aria-label": `${name}: ${number(value)} of ${number(most)}` })
    : null;
  return h(
    "li",
    { class: `stage ${state}`, "data-stage": name },
    h("h3", {}, name),
    h("b", { class: "count" }, number(value)),
    gauge,
    detail.map((line) => h("small", {}, line)),
  );
}

/** Seconds waited by role and cause since the oldest sample, as shares of that time. */
export function waiting(samples) {
  const [first, last] = [samples[0], samples.at(-1)];
  const elapsed = last.at_unix_s - first.at_unix_s;
  if (!(elapsed > 0)) return [];
  const workers = Math.max(1, last.limits["agent.workers"] ?? 0, Object.keys(last.status.workers).length);
  return Object.entries(last.status.waits_s)
    .map(([key, total]) => {
      const [role, cause] = [key.slice(0, key.indexOf(":")), key.slice(key.indexOf(":") + 1)];
      const share = (total - (first.status.waits_s[key] ?? 0)) / elapsed / (role === "agent" ? workers : 1);
      return { role, cause, share: Math.min(1, share), total };
    })
    .filter(({ share, total }) => share >= 0.005 || total >= 0.1)
    .sort((a, b) => b.share - a.share);
}

const SAID = {
  "trainer:batch": "the trainer waits for episodes",
  "trainer:publish": "the trainer waits for the weights to be read",
  "trainer:checkpoint": "the trainer waits for its checkpoint",
  "trainer:spill": "the trainer waits for the archive",
  "agent:admission": "agent workers wait for the trainer: more episodes would be too old",
  "agent:server": "agent workers wait for a rollout server",
};

function waits(samples) {
  const found = waiting(samples);
  if (!found.length)
    return h("p", { class: "quiet" }, samples.length > 1 ? "No part has waited." : "Measuring for a few seconds …");
  const lines = found.map(({ role, cause, share, total }) =>
    h(
      "li",
      { class: share > 0.3 ? "warn" : "" },
      h("meter", { min: 0, max: 1, value: share }),
      ` ${percent(share)} `,
      visible(SAID[`${role}:${cause}`] ?? `${role} waits: ${cause}`),
      h("small", {}, ` (${seconds(total)} since the run began)`),
    ),
  );
  return h("ul", { class: "waits" }, lines);
}

function pipeline({ status, servers, updates, limits }) {
  const { groups, episodes, ages_s: ages } = status;
  const admitted = (limits.max_staleness + 1) * limits.groups_per_step || 0;
  const flight = servers.reduce((sum, server) => sum + server.in_flight, 0);
  const tokens = servers.reduce((sum, server) => sum + server.in_flight_tokens, 0);
  const lag = Math.max(0, ...servers.map((server) => server.lag));
  const old = (name) => (name in ages ? `oldest ${seconds(ages[name])}` : "none waits");
  return h(
    "ol",
    { class: "pipeline", "aria-label": "pipeline" },
    stage("queued groups", groups.queued ?? 0, null, [
      old("queued"),
      status.parked ? `${status.parked} parked by quota` : "",
    ]),
    stage("groups in flight", groups.admitted ?? 0, admitted, [
      old("admitted"),
      `${plural(episodes.leased ?? 0, "episode")} leased`,
    ]),
    stage(
      "requests at servers",
      flight,
      (limits["rollout.max_concurrent"] ?? 0) * servers.length,
      [plural(tokens, "token"), plural(servers.length, "server")],
      servers.length ? "" : "bad",
    ),
    stage("groups ready", groups.ready ?? 0, limits.groups_per_step, [old("ready")]),
    stage("groups in training", groups.shipped ?? 0, limits.groups_per_step, [
      `step ${number(status.step)} of ${number(limits["trainer.steps"])}`,
      `${number(status.committed_step)} durable`,
    ]),
    stage(
      "policy version",
      status.version,
      null,
      [
        lag ? `a server is ${lag} behind` : "all servers hold it",
        `pause p50 ${number(updates.pause_ms_p50)} ms, p99 ${number(updates.pause_ms_p99)} ms`,
      ],
      lag ? "warn" : "",
    ),
  );
}

function servers(list) {
  const rows = list.map((server) => [
    visible(server.server_id),
    number(server.version),
    server.lag ? h("b", { class: "warn" }, `${server.lag} behind`) : "newest",
    number(server.in_flight),
    number(server.in_flight_tokens),
    server.accepting ? "yes" : h("b", { class: "bad" }, "no"),
    visible(server.url),
  ]);
  return table(["server", "version", "lag", "in flight", "tokens", "takes requests", "address"], rows, {
    id: "servers",
  });
}

function counts({ status }) {
  const pairs = (values) =>
    Object.entries(values)
      .sort()
      .map(([name, value]) => h("span", { class: "pair" }, `${visible(name)} `, h("b", {}, number(value))));
  const splits = Object.entries(status.other_splits).map(([name, split]) =>
    h("p", {}, h("i", {}, `${visible(name)}: `), pairs(split)),
  );
  return h(
    "div",
    { class: "counts" },
    h("p", {}, h("i", {}, "episodes: "), pairs(status.episodes)),
    h("p", {}, h("i", {}, "groups: "), pairs(status.groups)),
    h("p", {}, h("i", {}, "workers hold: "), pairs(status.workers)),
    splits,
    h("p", {}, h("i", {}, "queue: "), bytes(status.bytes)),
  );
}

function swaps({ updates }) {
  const rows = updates.newest.map((swap) => [
    visible(swap.server_id),
    number(swap.version),
    `${number(1000 * swap.pause_s)} ms`,
    seconds(swap.fetch_s),
    seconds(swap.load_s),
    number(swap.in_flight),
  ]);
  return table(["server", "version", "pause", "fetch", "load", "requests continued"], rows);
}

/** [class, sentence] on the state of the run: from its queue while it runs, then from its folder. */
function sentence(now, { ended, failed, summary }, { steps, series }) {
  const done = steps.length ? steps.at(-1) + 1 : 0;
  const reward = series.reward?.findLast((value) => typeof value === "number");
  const learned = reward === undefined ? "" : `, reward ${number(reward)}`;
  if (now.alive) {
    const total = now.limits["trainer.steps"];
    const wall = (series.wall_s ?? []).slice(1).filter((value) => typeof value === "number").slice(-10);
    const mean = wall.reduce((sum, one) => sum + one, 0) / wall.length;
    const left = wall.length && total > done ? `, about ${seconds(mean * (total - done))} left` : "";
    return ["good", `Running: step ${number(done)} of ${number(total)}${learned}${left}.`];
  }
  const gained =
    typeof summary.reward_first === "number" && typeof summary.reward_last === "number"
      ? `, reward ${number(summary.reward_first)} → ${number(summary.reward_last)}`
      : learned;
  if (failed) return ["bad", `Failed: ${visible(ended)}${gained}.`];
  if (ended) return [/^all \d+ steps|are done$|is reached$/.test(ended) ? "good" : "", `Ended: ${visible(ended)}${gained}.`];
  const last = done ? `The last step was ${number(done)}${learned}.` : "No step was trained.";
  return ["warn", `Not running: ${visible(now.cause)}. ${last}`];
}

const SUMMARY = {
  wall_s: ["time", seconds],
  eval_reward: ["evaluation", number],
  episodes_trained: ["episodes trained", number],
  lost: ["lost", number],
  trained_twice: ["trained twice", number],
  episodes_failed: ["failed", number],
  staleness_max: ["staleness, at most", number],
};

/** Figures of summary.json in one line. */
function figures(summary) {
  const pairs = Object.entries(SUMMARY)
    .filter(([name]) => typeof summary[name] === "number")
    .map(([name, [text, format]]) => [text, format(summary[name])]);
  for (const [role, count] of Object.entries(summary.restarts ?? {}))
    if (count) pairs.push([`restarts of ${visible(role)}`, number(count)]);
  return pairs.map(([text, value]) => h("span", { class: "pair" }, `${text} `, h("b", {}, value)));
}

const RESOURCES = {
  tokens: ["sampled tokens", number],
  rollout_s: ["time of the rollout devices", seconds],
  trainer_s: ["time of the trainer's devices", seconds],
  box_s: ["time of boxes", seconds],
  judged_calls: ["calls of judges", number],
};

/** For each resource its accounts, the largest first, as shares. */
function accounts(sums) {
  return Object.entries(RESOURCES)
    .filter(([name]) => Object.keys(sums[name] ?? {}).length)
    .map(([name, [title, format]]) => {
      const ordered = Object.entries(sums[name]).sort(([, a], [, b]) => b - a);
      const total = ordered.reduce((sum, [, amount]) => sum + amount, 0);
      const lines = ordered.map(([account, amount]) =>
        h(
          "li",
          {},
          h("meter", { min: 0, max: 1, value: amount / total, "aria-label": visible(account) }),
          ` ${percent(amount / total)} ${visible(account)}`,
          h("small", {}, ` (${format(amount)})`),
        ),
      );
      return h("section", { class: "chart", "data-resource": name }, h("h3", {}, title), h("ul", { class: "waits" }, lines));
    });
}

/** Columns of the tenths of episodes from the shortest to the longest that show the spread. */
function deciles(name) {
  const labels = { 1: "shortest tenth", 3: "3rd", 5: "5th", 7: "7th", 9: "9th", 10: "longest tenth" };
  return Object.fromEntries(Object.entries(labels).map(([number, label]) => [`${name}/${number}`, label]));
}

/** Plots of the overview: title, labels of columns, settings. `outcome/*` stands for every outcome. */
const PLOTS = [
  ["reward", { reward: "training", "eval/reward": "evaluation" }],
  ["tokens per second", { sampled_per_s: "sampled", tokens_per_s: "trained, prompts included" }],
  ["staleness, versions", { staleness_mean: "mean", staleness_max: "largest" }],
  ["time of a step", { wall_s: "whole", train_s: "training", wait_s: "waiting for episodes" }, { format: seconds }],
  ["episodes by outcome", { "outcome/*": "", attempts_failed: "failed attempts" }],
  ["tool calls per episode", { "episode/tool_calls": "calls", "episode/tool_errors": "errors" }],
  ["tokens per episode", { response_length_mean: "response", sampled_length_mean: "sampled by the model" }],
  ["episode lengths by decile, tokens", deciles("length_decile")],
  ["episodes lost for their age, by decile of length", deciles("over_age_share"), { low: 0, format: percent }],
  ["KL divergence", { kl_k3: "to the sampling policy", kl_proximal: "to the proximal policy", kl_reference: "to the reference" }],
  ["share of tokens clipped or rejected", { clip_fraction_high: "clipped above", clip_fraction_low: "clipped below", tokens_rejected_share: "rejected" }],
];

/** [column, label] of the wanted columns that the run has. */
function matching(names, wanted) {
  return Object.entries(wanted).flatMap(([name, label]) =>
    name.endsWith("*")
      ? names.filter((one) => one.startsWith(name.slice(0, -1))).map((one) => [one, one.slice(name.length - 1)])
      : names.includes(name)
        ? [[name, label]]
        : [],
  );
}

function plots(names, { steps, series }) {
  const measured = (name) => series[name]?.some((value) => typeof value === "number");
  return PLOTS.map(([title, wanted, options]) => {
    const lines = matching(names, wanted).filter(([name]) => measured(name));
    return lines.length && lineChart(title, lines.map(([name, label]) => ({ name: label, x: steps, y: series[name] })), options);
  }).filter(Boolean);
}

/** Tokens sampled per second of a step: a column of its own, so that both halves stand in one plot. */
function withSampled(names, told) {
  const { tokens_sampled: tokens, wall_s: wall } = told.series;
  if (!tokens || !wall) return names;
  told.series.sampled_per_s = tokens.map((value, i) => (wall[i] ? value / wall[i] : null));
  return [...names, "sampled_per_s"];
}

async function newest(run, alive) {
  const { rows } = await get(of(run, "trajectories"), { offset: 0, limit: 8 });
  const cells = rows.map((row) => [
    number(row.step + 1),
    h("span", { class: row.reward > 0 ? "good" : "" }, number(row.reward)),
    visible([row.outcome, row.reason].filter(Boolean).join(" ")),
    plural(row.turns, "turn"),
    number(row.tokens),
    h("a", { href: address(run, "trajectory", { episode: row.episode, step: row.step }) }, visible(row.episode)),
  ]);
  if (!rows.length) return h("p", { class: "quiet" }, alive ? "No trajectory is recorded yet." : "No trajectory was recorded.");
  return table(["step", "reward", "outcome", "turns", "tokens", "episode"], cells, { id: "newest" });
}

export async function overview(root, { run, repeat }) {
  const [state, warning, advice] = [
    h("p", { id: "state" }),
    h("p", { class: "bad", id: "warning", hidden: true }),
    h("p", { class: "advice", id: "advice" }),
  ];
  const [facts, grid, episodes] = [h("p", { id: "end" }), h("div", { class: "charts" }), h("div")];
  const [picture, who, held, swapped, counted] = [h("div"), h("div"), h("div"), h("div"), h("div")];
  const live = h(
    "section",
    { id: "live", hidden: true },
    h("h2", {}, "Pipeline"),
    picture,
    h("h3", {}, "Who waits for whom, in the last half minute"),
    who,
    h("h3", {}, "Rollout servers"),
    held,
    h("details", {}, h("summary", {}, "Weight updates"), swapped),
    h("details", {}, h("summary", {}, "Counts"), counted),
  );
  const costs = h("div", { class: "charts" });
  const spent = h("section", { id: "accounts", hidden: true }, h("h2", {}, "Where the cost went"), costs);
  root.append(state, warning, facts, advice, grid, live, spent, h("h2", {}, "Newest episodes"), episodes);
  const samples = [];
  let [now, end, seen] = [null, { summary: {} }, -1];
  const sums = async () => {
    const told = await get(of(run, "split"));
    warning.hidden = !told.warning;
    warning.textContent = visible(told.warning ?? "");
    advice.textContent = told.steps ? told.advice : "";
    end = await get(of(run, "end"));
    costs.replaceChildren(...accounts(await get(of(run, "accounts"))));
    spent.hidden = !costs.children.length;
    const { names, rows } = await get(of(run, "metrics"), { points: 10 });
    if (now && !now.alive) facts.replaceChildren(...figures(end.summary));
    if (rows === seen || !now) return;
    const wanted = [...new Set([...PLOTS.flatMap(([, some]) => matching(names, some).map(([name]) => name)), "tokens_sampled", "wall_s"])];
    const series = await get(of(run, "metrics"), { name: wanted.filter((name) => names.includes(name)) });
    const [kind, text] = sentence(now, end, series);
    state.className = kind;
    state.textContent = text;
    grid.replaceChildren(...plots(withSampled(names, series), series));
    episodes.replaceChildren(await newest(run, now.alive));
    if (now.alive || end.ended) seen = rows;
  };
  repeat(sums, 2000);
  await repeat(async () => {
    const before = now?.alive;
    now = await get(of(run, "live"));
    if (before !== now.alive) seen = -1;
    live.hidden = !now.alive;
    if (!now.alive) return;
    if (samples.at(-1)?.at_unix_s !== now.at_unix_s) samples.push(now);
    while (samples.length > 2 && now.at_unix_s - samples[0].at_unix_s > REMEMBER_S) samples.shift();
    picture.replaceChildren(pipeline(now));
    who.replaceChildren(waits(samples));
    held.replaceChildren(servers(now.servers));
    swapped.replaceChildren(swaps(now));
    counted.replaceChildren(counts(now));
  }, 1000);
}
