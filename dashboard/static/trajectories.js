// The list of a run's recorded trajectories: filters, order, and rows of any number.

import { get, of } from "./api.js";
import { h, number, plural, seconds, visible } from "./dom.js";
import { Rows } from "./rows.js";

const WAIT_MS = 200,
  PENDING_MS = 300,
  NEWS_MS = 5000;
const OUTCOMES = ["", "completed", "truncated", "policy_error"];
const ORDERS = {
  step: "newest",
  reward: "reward",
  advantage: "advantage",
  tokens: "tokens",
  turns: "turns",
  latency_s: "time",
};
const FILTERS = ["text", "outcome", "reward_min", "reward_max", "step", "task", "source", "order", "descending"];

/** Filters and place of the opened row, for `next` and `previous` in a trajectory. */
export const shown = { run: "", list: [], filters: {} };

/** Filters as the server takes them: its steps count from 0, those on the page from 1. */
export const query = (filters) => ({ ...filters, step: filters.step ? filters.step - 1 : "" });

function cells(row) {
  const versions =
    row.oldest === null ? "–" : row.oldest === row.newest ? `v${row.oldest}` : `v${row.oldest}–${row.newest}`;
  return [
    h("span", { class: "step" }, number(row.step + 1)),
    h("span", { class: `reward ${row.reward > 0 ? "good" : ""}` }, number(row.reward)),
    h("span", { class: "outcome" }, visible([row.outcome, row.reason].filter(Boolean).join(" "))),
    h("span", { class: "size" }, `${plural(row.turns, "turn")}, ${number(row.tokens)} tok`),
    h("span", { class: "versions" }, versions),
    h("span", { class: "time" }, seconds(row.latency_s)),
    h("span", { class: "episode" }, visible(row.episode)),
    h("span", { class: "snippet" }, visible(row.snippet)),
  ];
}

const HEADINGS = ["step", "reward", "outcome", "size", "versions", "time", "episode", "snippet"];
const SAID = { size: "turns, tokens", snippet: "last answer" };

function headings() {
  const named = HEADINGS.map((name) => h("span", { class: name, role: "columnheader" }, SAID[name] ?? name));
  return h("div", { class: "headings", role: "row" }, named);
}

function form(params, changed) {
  const field = (name, attributes) =>
    h("input", { name, value: params.get(name) ?? "", oninput: changed, ...attributes });
  const select = (name, options, chosen) => {
    const made = h(
      "select",
      { name, "aria-label": name, onchange: changed },
      options.map(([value, text]) => h("option", { value }, text)),
    );
    made.value = chosen;
    return made;
  };
  return h(
    "form",
    { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    field("text", {
      type: "search",
      placeholder: "search in text and tools (/)",
      "aria-label": "search",
      id: "search",
    }),
    select(
      "outcome",
      OUTCOMES.map((value) => [value, value || "any outcome"]),
      params.get("outcome") ?? "",
    ),
    field("reward_min", { type: "number", step: "any", placeholder: "reward ≥", "aria-label": "reward at least" }),
    field("reward_max", { type: "number", step: "any", placeholder: "reward ≤", "aria-label": "reward at most" }),
    field("step", { type: "number", min: 1, placeholder: "step", "aria-label": "step" }),
    select("order", Object.entries(ORDERS), params.get("order") ?? "step"),
    select(
      "descending",
      [
        ["true", "↓"],
        ["false", "↑"],
      ],
      params.get("descending") ?? "true",
    ),
  );
}

export async function trajectories(root, { run, params, go, keys, repeat, signal }) {
  const state = h("p", { class: "quiet", id: "found", "aria-live": "polite" });
  const more = h(
    "button",
    {
      type: "button",
      hidden: true,
      onclick: () => {
        more.hidden = true;
        rows.reset();
      },
    },
    "show new ones",
  );
  let generation = 0,
    pending = 0;
  let filters = Object.fromEntries(FILTERS.map((name) => [name, params.get(name) ?? ""]));
  const load = async (offset, limit) => {
    const page = await get(of(run, "trajectories"), { ...query(filters), offset, limit });
    [generation, pending] = [page.generation, page.pending];
    const of_all = page.trained ? ` kept of ${number(page.trained)} trained episodes (trainer.save_trajectories)` : "";
    state.textContent = `${number(page.total)} ${page.total === 1 ? "trajectory" : "trajectories"}${of_all}${pending ? `; reading ${number(pending)} more step files …` : ""}`;
    return page;
  };
  const open = (row, index) => {
    Object.assign(shown, { run, filters, index, total: rows.total });
    go("trajectory", { episode: row.episode, step: row.step });
  };
  const rows = new Rows({ load, draw: cells, open, label: "trajectories" });
  let typing;
  const search = form(params, () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      filters = { ...filters, ...Object.fromEntries(new FormData(search)) };
      const given = new URLSearchParams(Object.entries(filters).filter(([, value]) => value !== ""));
      history.replaceState(null, "", `${location.hash.split("?")[0]}?${given}`);
      rows.reset().catch((error) => {
        state.textContent = error.message;
      });
    }, WAIT_MS);
  });
  signal.addEventListener("abort", () => clearTimeout(typing));
  root.append(search, h("div", { class: "line" }, state, more), headings(), rows.box);
  keys({
    ...rows.keys(),
    "/": () => search.elements.text.focus(),
    g: () => {
      const row = rows.row(rows.chosen);
      if (row) go("group", { task: row.task, step: row.step });
    },
  });
  await rows.reset();
  while (pending && !signal.aborted) {
    await new Promise((done) => setTimeout(done, PENDING_MS));
    await rows.reset({ keep: true });
  }
  let first = true;
  await repeat(async () => {
    if (first) return void (first = false);
    const page = await get(of(run, "trajectories"), { ...query(filters), offset: 0, limit: 0 });
    if (page.generation === generation) return;
    if (rows.box.scrollTop === 0 && rows.chosen < 0) await rows.reset({ keep: true });
    else more.hidden = false;
  }, NEWS_MS);
}
