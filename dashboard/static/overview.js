// The pipeline as it is now: what waits where, which server holds which version, who waits for whom.

import { get, of } from "./api.js";
import { lineChart } from "./chart.js";
import { columns } from "./curves.js";
import { bytes, h, number, percent, seconds, table, visible } from "./dom.js";

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
  "trainer:spill": "the trainer waits for the batch log",
  "agent:admission": "agent workers wait for the trainer: more episodes would be too old",
  "agent:server": "agent workers wait for a rollout server",
};

function waits(samples) {
  const found = waiting(samples);
  if (!found.length)
    return h("p", { class: "quiet" }, samples.length > 1 ? "Nobody has waited." : "Watching for a few seconds …");
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
      `${number(episodes.leased ?? 0)} episodes leased`,
    ]),
    stage(
      "requests at servers",
      flight,
      (limits["rollout.max_concurrent"] ?? 0) * servers.length,
      [`${number(tokens)} tokens`, `${servers.length} servers`],
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
  return table(["server", "version", "pause", "fetch", "load", "requests that went on"], rows);
}

async function split(run, box) {
  const told = await get(of(run, "split"));
  box.replaceChildren(
    told.warning ? h("p", { class: "bad", id: "warning" }, visible(told.warning)) : null,
    h("p", { class: "advice" }, told.advice),
    h(
      "small",
      {},
      `trainer waits ${percent(told.bubble)}, rollouts held back ${percent(told.rollout_idle)}, over the last ${told.steps} steps`,
    ),
  );
}

const ENDED = {
  steps: "steps",
  wall_s: "seconds",
  reward_first: "reward of the first steps",
  reward_last: "reward of the last steps",
  eval_reward: "evaluation's reward",
  episodes_trained: "episodes trained",
  episodes_failed: "episodes failed",
  lost: "episodes lost",
  staleness_max: "most staleness, versions",
};

/** How a run ended: why, what it came to, and its rewards. */
async function ending(run, box) {
  const { ended, summary } = await get(of(run, "end"));
  const { names } = await get(of(run, "metrics"), { points: 10 });
  const wanted = columns(["reward", "eval/reward"], names);
  const { steps, series } = await get(of(run, "metrics"), { name: wanted });
  const rows = Object.entries(ENDED)
    .filter(([name]) => typeof summary[name] === "number")
    .map(([name, said]) => [said, number(summary[name])]);
  for (const [role, count] of Object.entries(summary.restarts ?? {}))
    if (count) rows.push([`restarts of ${visible(role)}`, number(count)]);
  const curve = lineChart(
    "reward",
    wanted.map((name) => ({ name, x: steps, y: series[name] })),
  );
  box.replaceChildren(
    h("p", { id: "ended" }, ended ? `Ended: ${visible(ended)}` : "Nothing says how it ended: it was killed, or it runs elsewhere."),
    ...(rows.length ? [table(["", ""], rows)] : []),
    ...(steps.length ? [h("div", { class: "charts" }, curve)] : []),
  );
}

export async function overview(root, { run, repeat }) {
  const state = h("p", { class: "quiet" }),
    picture = h("div"),
    who = h("div"),
    held = h("div"),
    swapped = h("div"),
    counted = h("div");
  const advice = h("section", { id: "advice" }),
    end = h("section", { id: "end", hidden: true });
  const live = h(
    "section",
    { id: "live", hidden: true },
    picture,
    h("h3", {}, "Who waits for whom, in the last half minute"),
    who,
    h("h3", {}, "Rollout servers"),
    held,
    h("details", {}, h("summary", {}, "Swaps of weights"), swapped),
    h("h3", {}, "Counts"),
    counted,
  );
  root.append(h("h2", {}, "Pipeline"), state, end, live, h("h2", {}, "Split"), advice);
  const samples = [];
  repeat(() => split(run, advice), 5000);
  await repeat(async () => {
    const now = await get(of(run, "live"));
    live.hidden = !now.alive;
    state.textContent = now.alive ? "" : `Not alive: ${visible(now.cause)}.`;
    if (!now.alive && end.hidden) await ending(run, end);
    end.hidden = now.alive;
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
