// One trajectory, turn by turn.

import { address } from "./address.js";
import { bitmap, get, of } from "./api.js";
import { h, number, seconds, svg, table, visible } from "./dom.js";
import { about, MODES } from "./tokens.js";
import { query, shown } from "./trajectories.js";
import { drawTurns, FORMS, kept } from "./turns.js";

function timing(spans) {
  if (!spans.length) return null;
  const end = Math.max(...spans.map(([, , start, took]) => start + took)) || 1;
  const bars = spans.map(([kind, name, start, took], i) => {
    const bar = svg("rect", {
      class: `span ${kind}`,
      x: (600 * start) / end,
      width: Math.max(1.5, (600 * took) / end),
      y: { model: 2, tool: 18, reward: 34 }[kind] ?? 34,
      height: 12,
    });
    bar.append(
      svg("title", {}, `${i + 1}. ${visible(kind)} ${visible(name)}: ${seconds(took)} from ${seconds(start)}`),
    );
    return bar;
  });
  const sums = Object.entries(Object.groupBy(spans, ([kind]) => kind)).map(([kind, some]) =>
    h(
      "span",
      { class: `entry ${kind}` },
      `${visible(kind)} `,
      h("b", {}, seconds(some.reduce((sum, one) => sum + one[3], 0))),
    ),
  );
  return h(
    "figure",
    { class: "timing" },
    svg("svg", { viewBox: "0 0 600 48", preserveAspectRatio: "none", role: "img", "aria-label": "timing" }, bars),
    h("p", { class: "readout" }, sums, h("span", { class: "entry" }, `total ${seconds(end)}`)),
  );
}

function facts(record, step) {
  const { kind, component, reason } = record.outcome;
  const pairs = {
    step: step + 1,
    reward: record.reward,
    advantage: record.advantage,
    outcome: [kind, component, reason].filter(Boolean).join(" "),
    turns: record.num_turns,
    source: record.data_source,
    agent: record.extra.agent,
    worker: record.extra.worker,
    attempt: record.extra.attempt,
  };
  return h(
    "p",
    { class: "facts" },
    Object.entries(pairs)
      .filter(([, value]) => value !== undefined && value !== "")
      .map(([name, value]) => h("span", { class: "pair" }, `${name} `, h("b", {}, number(value)))),
  );
}

/** A canvas that is drawn when the image's bytes arrive; replaced by the error if they do not. */
function drawPicture(run, name) {
  const canvas = h("canvas", { width: 0, height: 0, title: name });
  bitmap(of(run, "image"), { name })
    .then((found) => {
      [canvas.width, canvas.height] = [found.width, found.height];
      canvas.getContext("2d").drawImage(found, 0, 0);
    })
    .catch((error) => canvas.replaceWith(`unavailable: ${visible(error.message)}`));
  return canvas;
}

export async function trajectory(root, { run, params, go, keys }) {
  const [episode, step] = [params.get("episode") ?? "", params.get("step") ?? "0"];
  const record = await get(of(run, "trajectory"), { episode, step });
  const body = h("div", { class: "turns" }),
    bar = h("div", { class: "choices", role: "toolbar" }),
    readout = h("output", { class: "readout", id: "token" }, "Point at a token to see its logprob and version.");
  let runs = [];
  const picture = (name) => drawPicture(run, name);
  const choices = (all, name) =>
    all.map((one) =>
      h("button", { type: "button", "aria-pressed": String(kept[name] === one), onclick: () => pick(name, one) }, one),
    );
  const draw = () => {
    runs = [];
    bar.replaceChildren(...choices(FORMS, "form"), h("span", { class: "gap" }), ...choices(MODES, "mode"));
    const turns =
      kept.form === "record"
        ? [h("pre", { class: "record" }, visible(JSON.stringify(record, null, 1)))]
        : drawTurns(record, runs, { picture }).flat(2).filter(Boolean);
    body.replaceChildren(...turns);
  };
  const pick = (name, value) => {
    kept[name] = value;
    draw();
  };
  const tell = (event) => {
    const token = event.target.closest?.("[data-token]");
    if (token) readout.textContent = about(runs[token.closest("[data-run]").dataset.run], Number(token.dataset.token));
  };
  body.addEventListener("pointerover", tell);
  body.addEventListener("click", tell);
  const task = episode.slice(0, episode.lastIndexOf("#"));
  root.append(
    h("h2", {}, visible(episode)),
    facts(record, Number(step)),
    h(
      "p",
      { class: "line" },
      h("a", { href: address(run, "group", { task, step }) }, "group side by side (g)"),
      " ",
      h("a", { href: address(run, "trajectories", shown.run === run ? shown.filters : {}) }, "back to the list (Esc)"),
    ),
    timing(record.extra.trace ?? []) ?? "",
    bar,
    readout,
    body,
    h(
      "details",
      {},
      h("summary", {}, "metrics of the episode"),
      table(
        ["metric", "value"],
        Object.entries(record.metrics).map(([name, value]) => [visible(name), number(value)]),
      ),
    ),
  );
  draw();
  const beside = (by) => async () => {
    if (shown.run !== run || shown.index === undefined) return;
    const offset = shown.index + by;
    if (offset < 0 || offset >= shown.total) return;
    const {
      rows: [row],
    } = await get(of(run, "trajectories"), { ...query(shown.filters), offset, limit: 1 });
    if (!row) return;
    shown.index = offset;
    go("trajectory", { episode: row.episode, step: row.step });
  };
  keys({
    m: () => pick("mode", "mask"),
    l: () => pick("mode", "logprob"),
    v: () => pick("mode", "version"),
    r: () => pick("form", FORMS[(FORMS.indexOf(kept.form) + 1) % FORMS.length]),
    j: beside(1),
    k: beside(-1),
    g: () => go("group", { task, step }),
    Escape: () => go("trajectories", shown.run === run ? shown.filters : {}),
  });
}
