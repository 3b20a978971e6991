// Which view is shown, who is signed in, and what the keys do. The address holds run, view and filters, no token.

import { address, place } from "./address.js";
import { get, Refused, token } from "./api.js";
import { h } from "./dom.js";
import { compare } from "./compare.js";
import { curves } from "./curves.js";
import { group } from "./group.js";
import { letters } from "./letters.js";
import { overview } from "./overview.js";
import { trajectories } from "./trajectories.js";
import { trajectory } from "./trajectory.js";

const TABS = ["overview", "curves", "trajectories", "letters", "compare"];
const TITLES = { letters: "dead letters" };
const VIEWS = { overview, curves, trajectories, trajectory, group, letters, compare };
const KEYS = [
  ["1 – 5", "overview, curves, trajectories, dead letters, compare"],
  ["/", "search"],
  ["j, k or ↓, ↑", "next, previous"],
  ["Enter", "open"],
  ["g", "the group side by side"],
  ["m, l, v", "colour tokens by mask, logprob, version"],
  ["r", "rendered, raw, record"],
  ["Esc", "back"],
  ["?", "list of keys"],
];
const NO_RUNS =
  "This folder has no runs. `penstock run recipes/calculator.yaml` starts one; it appears here as soon as its folder exists.";
const EMPTY_MS = 2000;
const at = (id) => document.getElementById(id);

let leave = new AbortController();
let keys = {};
let session = { scope: "read" };

/** Show an error on top of the page until the next success. */
function trouble(message) {
  at("trouble").textContent = message ?? "";
  at("trouble").hidden = !message;
}

/** Run `work` now and every `every_ms` while the view is shown, one call at a time. */
async function repeat(signal, work, every_ms) {
  while (!signal.aborted) {
    try {
      if (!document.hidden || !every_ms) await work();
      if (!signal.aborted) trouble(null);
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status === 401) return signIn(error.message);
      trouble(error.message);
    }
    if (!every_ms) return;
    await new Promise((done) => setTimeout(done, every_ms));
  }
}

async function show() {
  leave.abort();
  leave = new AbortController();
  const { signal } = leave,
    { run, params, view: asked } = place();
  const view = asked in VIEWS ? asked : "overview";
  keys = {};
  const root = h("div", { class: `view ${view}` });
  at("main").replaceChildren(root);
  document.title = `${TITLES[view] ?? view} · ${run || "Penstock"}`;
  tabs(run, view);
  if (!run) {
    root.append(h("h2", {}, "No runs yet"), h("p", { id: "no-runs" }, NO_RUNS));
    return repeat(signal, runs, EMPTY_MS);
  }
  const context = {
    run,
    params,
    signal,
    session,
    go: (name, values) => {
      location.hash = address(run, name, values);
    },
    keys: (wanted) => {
      keys = wanted;
    },
    repeat: (work, every_ms = 0) => repeat(signal, work, every_ms),
  };
  await repeat(signal, () => VIEWS[view](root, context));
}

function tabs(run, view) {
  const shown = { trajectory: "trajectories", group: "trajectories" }[view] ?? view;
  const links = TABS.map((name) =>
    h("a", { href: address(run, name), "aria-current": name === shown && "page" }, TITLES[name] ?? name),
  );
  at("nav").replaceChildren(...(run ? links : []));
  at("run").parentElement.hidden = !run;
}

async function runs() {
  const found = await get("runs"),
    { run } = place();
  const names = found.map(({ name, steps }) => `${name} (${steps})`);
  if (names.join() !== [...at("run").options].map((one) => one.text).join()) {
    at("run").replaceChildren(...found.map(({ name }, i) => h("option", { value: name }, names[i])));
  }
  if (run) at("run").value = run;
  else if (found.length) location.hash = address(found[0].name, "overview");
}

async function start() {
  if (!token.get()) return signIn("");
  try {
    session = await get("session");
  } catch (error) {
    return signIn(error.message);
  }
  at("scope").textContent = session.scope === "write" ? "may requeue" : "read only";
  await repeat(new AbortController().signal, runs);
  await show();
}

function signIn(message) {
  const box = at("sign-in");
  const field = h("input", { type: "password", id: "token", autocomplete: "off", required: true });
  const form = h(
    "form",
    { method: "dialog" },
    h("h2", {}, "Sign in"),
    h("p", {}, "The token is PENSTOCK_TOKEN of the run (in its connect.env), or what `penstock dashboard` printed."),
    message && h("p", { class: "bad" }, message),
    h("label", { for: "token" }, "token "),
    field,
    h("button", { type: "submit" }, "sign in"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    token.set(field.value.trim());
    box.close();
    start();
  });
  box.replaceChildren(form);
  if (!box.open) box.showModal();
}

function help() {
  const rows = KEYS.flatMap(([key, what]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, what)]);
  const out = h(
    "button",
    {
      type: "button",
      onclick: () => {
        token.forget();
        location.reload();
      },
    },
    "sign out",
  );
  at("help").replaceChildren(
    h("form", { method: "dialog" }, h("h2", {}, "Keys"), h("dl", {}, rows), h("button", {}, "close"), out),
  );
  at("help").showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
  const writing = event.target.matches("input, select, textarea");
  if (writing && event.key !== "Escape") return;
  if (event.key === "Enter" && event.target.matches("a, button, summary")) return;
  const { run } = place();
  if (event.key === "?") help();
  else if (writing) event.target.blur();
  else if (keys[event.key]) keys[event.key](event);
  else if (TABS[event.key - 1]) location.hash = address(run, TABS[event.key - 1]);
  else return;
  event.preventDefault();
});
at("help-button").addEventListener("click", help);
at("run").addEventListener("focus", () => runs().catch((error) => trouble(error.message)));
at("run").addEventListener("change", (event) => {
  location.hash = address(
    event.target.value,
    place().view in { trajectory: 1, group: 1 } ? "trajectories" : place().view,
  );
});
window.addEventListener("hashchange", () => {
  if (place().run) {
    at("run").value = place().run;
    show();
  } else start();
});
start();
