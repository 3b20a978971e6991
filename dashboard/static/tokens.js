// Runs of tokens as coloured text, and words for the token under the pointer.

import { h, number, visible } from "./dom.js";

export const MODES = ["mask", "logprob", "version"];
const LEVELS = [-0.05, -0.3, -1, -2.5, -5]; // logprob of a token: sure … surprising

export function level(logprob) {
  const found = LEVELS.findIndex((bound) => logprob >= bound);
  return found < 0 ? LEVELS.length : found;
}

/** [N] version of each token of a sampled run, from its `[version, tokens]` pairs. */
export function versions(run) {
  return (run.versions ?? []).flatMap(([version, count]) => Array(count).fill(version));
}

function colour(run, i, version, mode, oldest) {
  if (!run.mask) return "fed";
  if (mode === "logprob") return `p${level(run.logprobs?.[i] ?? 0)}`;
  if (mode === "version") return `a${Math.max(0, version - oldest) % 8}`;
  return "said";
}

/** One run. Without the texts of its tokens it has one colour, and logprobs are bars behind it. */
export function drawRun(run, mode, oldest) {
  const held = versions(run);
  if (!run.pieces.length) {
    const bars =
      mode === "logprob" && run.mask
        ? h(
            "span",
            { class: "bars" },
            (run.logprobs ?? []).map((one) => h("i", { class: `p${level(one)}`, title: number(one) })),
          )
        : null;
    return h(
      "span",
      { class: "stretch" },
      h("bdi", { class: colour(run, 0, held[0], mode === "logprob" ? "mask" : mode, oldest) }, visible(run.text)),
      bars,
    );
  }
  return h(
    "bdi",
    { class: "stretch" },
    run.pieces.map((piece, i) =>
      h("span", { class: `t ${colour(run, i, held[i], mode, oldest)}`, "data-token": i }, visible(piece)),
    ),
  );
}

/** Words for one token. */
export function about(run, i) {
  if (!run.mask) return `token ${i + 1} of ${run.tokens}: fed, not trained on`;
  return `token ${i + 1} of ${run.tokens}: sampled, logprob ${number(run.logprobs?.[i])} (p ${number(Math.exp(run.logprobs?.[i] ?? 0))}), version ${number(versions(run)[i])}`;
}

export function key(mode, oldest, newest) {
  const entry = (kind, text) => h("span", { class: `t ${kind}` }, text);
  if (mode === "logprob")
    return h(
      "p",
      { class: "key" },
      "logprob ",
      [...LEVELS, "less"].map((bound, i) => entry(`p${i}`, bound === "less" ? "less" : `≥ ${bound}`)),
      entry("fed", "fed"),
    );
  if (mode === "version") {
    const all = Array.from({ length: Math.min(8, newest - oldest + 1) || 0 }, (_, i) => oldest + i);
    return h(
      "p",
      { class: "key" },
      "version ",
      all.map((version, i) => entry(`a${i}`, `v${version}`)),
      entry("fed", "fed"),
    );
  }
  return h(
    "p",
    { class: "key" },
    "mask ",
    entry("said", "1: sampled, trained on"),
    entry("fed", "0: fed by tools and template"),
  );
}
