// The turns of a trajectory, in the form and the colours that were chosen last.

import { h, number, seconds, visible } from "./dom.js";
import { drawRun, key, versions } from "./tokens.js";

export const FORMS = ["rendered", "raw", "record"];
export const kept = { mode: "mask", form: "rendered" };
const MARKS = /<\|[^|<>]{1,40}\|>|<\/?(?:tool_call|tool_response|think|tools)>/g;

/** Text with the marks of the template faint. */
function rendered(text) {
  const parts = [];
  let from = 0;
  for (const found of text.matchAll(MARKS)) {
    parts.push(visible(text.slice(from, found.index)), h("span", { class: "mark" }, visible(found[0])));
    from = found.index + found[0].length;
  }
  return h("bdi", { class: "prose" }, parts, visible(text.slice(from)));
}

/** Text with visible line ends. */
const raw = (text) => h("bdi", { class: "prose code" }, visible(text).replaceAll("\n", "↵\n"));

function call(one) {
  const given = Object.entries(one.arguments).map(([name, value]) => [
    h("dt", {}, visible(name)),
    h("dd", {}, h("pre", {}, visible(typeof value === "string" ? value : JSON.stringify(value, null, 1)))),
  ]);
  return h(
    "div",
    { class: "call" },
    h("b", {}, visible(one.name || "malformed call")),
    one.error && h("p", { class: "bad" }, visible(one.error)),
    h("dl", {}, given),
  );
}

function turn(run, index, names, oldest, span) {
  const title = run.mask ? `turn ${names.turn} · model` : "tools and template";
  const held = versions(run);
  const range = held.length ? ` · v${held[0]}${held.at(-1) === held[0] ? "" : `–${held.at(-1)}`}` : "";
  const head = h(
    "h4",
    {},
    title,
    h("small", {}, ` ${number(run.tokens)} tokens${range}${span ? ` · ${seconds(span[3])}` : ""}`),
  );
  const body = kept.form === "raw" ? raw(run.text) : drawRun(run, kept.mode, oldest);
  const calls =
    run.calls.length && kept.form === "rendered"
      ? h(
          "div",
          { class: "calls" },
          h("small", {}, `${run.calls.length} tool call${run.calls.length > 1 ? "s" : ""}`),
          run.calls.map(call),
        )
      : null;
  return h("article", { class: `turn ${run.mask ? "model" : "tools"}`, "data-run": index }, head, body, calls);
}

/** The images of a segment in the order of their places in its text. */
function pictures(names, picture) {
  if (!names.length) return null;
  const each = names.map((name, place) => h("figure", {}, picture(name), h("figcaption", {}, `image ${place + 1}`)));
  return h("div", { class: "pictures" }, each);
}

/** All turns of a record in the present form and colours; `runs` gets each drawn run by its number. */
export function drawTurns(record, runs, { prompt: open = true, picture } = {}) {
  const all = record.segments.flatMap((segment) => segment.runs);
  const held = all.flatMap(versions);
  const oldest = held.reduce((a, b) => Math.min(a, b), Infinity);
  const newest = held.reduce((a, b) => Math.max(a, b), -Infinity);
  const models = (record.extra.trace ?? []).filter(([kind]) => kind === "model");
  const known = models.length === all.filter((run) => run.mask).length;
  const names = { turn: 0 };
  const segments = record.segments.map((segment, i) => {
    const text = kept.form === "raw" ? raw(segment.prompt) : rendered(segment.prompt);
    const prompt = h(
      "details",
      { class: "turn prompt", open: open && segment.prompt.length < 2000 },
      h(
        "summary",
        {},
        `prompt${record.segments.length > 1 ? ` of segment ${i + 1}` : ""} · ${number(segment.prompt_tokens)} tokens`,
      ),
      text,
    );
    return h(
      "section",
      { class: "segment" },
      prompt,
      picture ? pictures(record.images?.[i] ?? [], picture) : null,
      segment.runs.map((run) => {
        if (run.mask) names.turn += 1;
        return turn(run, runs.push(run) - 1, names, oldest, run.mask && known ? models[names.turn - 1] : null);
      }),
    );
  });
  return [kept.form === "rendered" ? key(kept.mode, oldest, newest) : null, segments];
}
