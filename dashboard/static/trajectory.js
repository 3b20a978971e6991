// One trajectory, turn by turn.

import { address } from "./address.js";
import { get, of } from "./api.js";
import { h, number, seconds, svg, table, visible } from "./dom.js";
import { about, drawRun, key, MODES, versions } from "./tokens.js";
import { shown } from "./trajectories.js";

const FORMS = ["rendered", "raw", "record"];
const kept = { mode: "mask", form: "rendered" };
const MARKS = /<\|[^|<>]{1,40}\|>|<\/?(?:tool_call|tool_response|think|tools)>/g;

/** Text as it is meant: marks of the template faint, blank lines at the ends dropped. */
export function rendered(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(MARKS)) {
    parts.push(visible(text.slice(from, found.index)), h("span", { class: "mark" }, found[0]));
    from = found.index + found[0].length;
  }
  return h("bdi", { class: "prose" }, parts, visible(text.slice(from)));
}

/** Text as it is: each line's end shown. */
const raw = (text) => h("bdi", { class: "prose code" }, visible(text).replaceAll("\n", "↵\n"));

function call(one) {
  const given = Object.entries(one.arguments).map(([name, value]) => [h("dt", {}, visible(name)), h("dd", {}, h("pre", {}, visible(typeof value === "string" ? value : JSON.stringify(value, null, 1))))]);
  return h("div", { class: "call" }, h("b", {}, visible(one.name || "a call that cannot be read")), one.error && h("p", { class: "bad" }, visible(one.error)), h("dl", {}, given));
}

function turn(run, index, names, oldest, span) {
  const title = run.mask ? `turn ${names.turn} · model` : "tools and template";
  const held = versions(run), range = held.length ? ` · v${held[0]}${held.at(-1) === held[0] ? "" : `–${held.at(-1)}`}` : "";
  const head = h("h4", {}, title, h("small", {}, ` ${number(run.tokens)} tokens${range}${span ? ` · ${seconds(span[3])}` : ""}`));
  const body = kept.form === "raw" ? raw(run.text) : drawRun(run, kept.mode, oldest);
  const calls = run.calls.length && kept.form === "rendered" ? h("div", { class: "calls" }, h("small", {}, `${run.calls.length} tool call${run.calls.length > 1 ? "s" : ""}`), run.calls.map(call)) : null;
  return h("article", { class: `turn ${run.mask ? "model" : "tools"}`, "data-run": index }, head, body, calls);
}

function timing(spans) {
  if (!spans.length) return null;
  const end = Math.max(...spans.map(([, , start, took]) => start + took)) || 1;
  const bars = spans.map(([kind, name, start, took], i) => {
    const bar = svg("rect", { class: `span ${kind}`, x: (600 * start) / end, width: Math.max(1.5, (600 * took) / end), y: { model: 2, tool: 18, reward: 34 }[kind] ?? 34, height: 12 });
    bar.append(svg("title", {}, `${i + 1}. ${visible(kind)} ${visible(name)}: ${seconds(took)} from ${seconds(start)}`));
    return bar;
  });
  const sums = Object.entries(Object.groupBy(spans, ([kind]) => kind)).map(([kind, some]) => h("span", { class: `entry ${kind}` }, `${visible(kind)} `, h("b", {}, seconds(some.reduce((sum, one) => sum + one[3], 0)))));
  return h("figure", { class: "timing" }, svg("svg", { viewBox: "0 0 600 48", preserveAspectRatio: "none", role: "img", "aria-label": "timing" }, bars), h("p", { class: "readout" }, sums, h("span", { class: "entry" }, `in all ${seconds(end)}`)));
}

function facts(record, step) {
  const { kind, component, reason } = record.outcome;
  const pairs = { step, reward: record.reward, advantage: record.advantage, outcome: [kind, component, reason].filter(Boolean).join(" "), turns: record.num_turns,
    source: record.data_source, agent: record.extra.agent, worker: record.extra.worker, attempt: record.extra.attempt };
  return h("p", { class: "facts" }, Object.entries(pairs).filter(([, value]) => value !== undefined && value !== "").map(([name, value]) => h("span", { class: "pair" }, `${name} `, h("b", {}, number(value)))));
}

/** All turns of a record in the present form and colours; `runs` gets each drawn run by its number. */
export function drawTurns(record, runs, { prompt: open = true } = {}) {
  const all = record.segments.flatMap((segment) => segment.runs), held = all.flatMap(versions);
  const oldest = held.reduce((a, b) => Math.min(a, b), Infinity), newest = held.reduce((a, b) => Math.max(a, b), -Infinity);
  const models = (record.extra.trace ?? []).filter(([kind]) => kind === "model");
  const known = models.length === all.filter((run) => run.mask).length;
  const names = { turn: 0 };
  const segments = record.segments.map((segment, i) => {
    const text = kept.form === "raw" ? raw(segment.prompt) : rendered(segment.prompt);
    const prompt = h("details", { class: "turn prompt", open: open && segment.prompt.length < 2000 }, h("summary", {}, `prompt${record.segments.length > 1 ? ` of segment ${i + 1}` : ""} · ${number(segment.prompt_tokens)} tokens`), text);
    return h("section", { class: "segment" }, prompt, segment.runs.map((run) => {
      if (run.mask) names.turn += 1;
      return turn(run, runs.push(run) - 1, names, oldest, run.mask && known ? models[names.turn - 1] : null);
    }));
  });
  return [kept.form === "rendered" ? key(kept.mode, oldest, newest) : null, segments];
}

export async function trajectory(root, { run, params, go, keys }) {
  const [episode, step] = [params.get("episode") ?? "", params.get("step") ?? "0"];
  const record = await get(of(run, "trajectory"), { episode, step });
  const body = h("div", { class: "turns" }), bar = h("div", { class: "choices", role: "toolbar" }), told = h("output", { class: "readout", id: "token" }, "point at a token");
  let runs = [];
  const choices = (all, name) => all.map((one) => h("button", { type: "button", "aria-pressed": String(kept[name] === one), onclick: () => pick(name, one) }, one));
  const draw = () => {
    runs = [];
    bar.replaceChildren(...choices(FORMS, "form"), h("span", { class: "gap" }), ...choices(MODES, "mode"));
    const turns = kept.form === "record" ? [h("pre", { class: "record" }, visible(JSON.stringify(record, null, 1)))] : drawTurns(record, runs).flat(2).filter(Boolean);
    body.replaceChildren(...turns);
  };
  const pick = (name, value) => { kept[name] = value; draw(); };
  const tell = (event) => {
    const token = event.target.closest?.("[data-token]");
    if (token) told.textContent = about(runs[token.closest("[data-run]").dataset.run], Number(token.dataset.token));
  };
  body.addEventListener("pointerover", tell);
  body.addEventListener("click", tell);
  const task = episode.slice(0, episode.lastIndexOf("#"));
  root.append(h("h2", {}, visible(episode)), facts(record, Number(step)),
    h("p", { class: "line" }, h("a", { href: address(run, "group", { task, step }) }, "group side by side (g)"), " ", h("a", { href: address(run, "trajectories", shown.run === run ? shown.filters : {}) }, "back to the list (Esc)")),
    timing(record.extra.trace ?? []) ?? "", bar, told, body,
    h("details", {}, h("summary", {}, "metrics of the episode"), table(["metric", "value"], Object.entries(record.metrics).map(([name, value]) => [visible(name), number(value)]))));
  draw();
  const beside = (by) => async () => {
    if (shown.run !== run || shown.index === undefined) return;
    const offset = shown.index + by;
    if (offset < 0 || offset >= shown.total) return;
    const { rows: [row] } = await get(of(run, "trajectories"), { ...shown.filters, offset, limit: 1 });
    if (!row) return;
    shown.index = offset;
    go("trajectory", { episode: row.episode, step: row.step });
  };
  keys({ m: () => pick("mode", "mask"), l: () => pick("mode", "logprob"), v: () => pick("mode", "version"),
    r: () => pick("form", FORMS[(FORMS.indexOf(kept.form) + 1) % FORMS.length]), j: beside(1), k: beside(-1),
    g: () => go("group", { task, step }), Escape: () => go("trajectories", shown.run === run ? shown.filters : {}) });
}
