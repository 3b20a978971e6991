// Episodes that failed for good, with their causes and histories; their groups can be queued again.

import { get, of, post, Refused } from "./api.js";
import { h, number, visible } from "./dom.js";

const PAGE = 100;

function event(one, i) {
  const data = Object.keys(one.data).length ? h("pre", {}, visible(JSON.stringify(one.data, null, 1))) : null;
  return h(
    "article",
    { class: `turn ${one.kind === "sampled" ? "model" : "tools"}` },
    h("h4", {}, `${i + 1}. ${visible(one.kind)}`, h("small", {}, one.tokens ? ` ${number(one.tokens)} tokens` : "")),
    one.text && h("bdi", { class: "prose" }, visible(one.text)),
    data,
  );
}

export async function letters(root, { run, session, keys }) {
  const list = h("div", { id: "letters" }),
    state = h("p", { class: "quiet", role: "status" });
  root.append(h("h2", {}, "Dead letters"), state, list);
  let start = 0,
    chosen = -1,
    items = [];
  const may = session.scope === "write";

  const requeue = async (episode, button) => {
    button.disabled = true;
    try {
      await post(of(run, "dead-letters/requeue"), { episode });
      state.textContent = `${visible(episode)}: its group is queued again`;
      await load(true);
    } catch (error) {
      state.textContent = error.message;
      button.disabled = false;
    }
  };
  const open = async (letter, box) => {
    if (box.childElementCount) return;
    const whole = letter.journal ? letter : await get(of(run, "dead-letter"), { episode: letter.episode });
    box.replaceChildren(
      ...whole.journal.map(event),
      whole.journal.length ? "" : h("p", { class: "quiet" }, "Its journal is no longer stored."),
    );
  };
  const item = (letter) => {
    const journal = h("div", { class: "journal" });
    const button = h(
      "button",
      {
        type: "button",
        disabled: !may || !!letter.journal,
        title: letter.journal
          ? "resume the run first"
          : may
            ? "queue its whole group again"
            : "this token may only read",
        onclick: (e) => {
          e.preventDefault();
          requeue(letter.episode, button);
        },
      },
      "requeue",
    );
    return h(
      "details",
      {
        class: "letter",
        ontoggle: (e) =>
          e.target.open &&
          open(letter, journal).catch((error) => {
            journal.textContent = error.message;
          }),
      },
      h(
        "summary",
        {},
        h("b", {}, visible(letter.episode)),
        " ",
        h("span", { class: "bad" }, visible(`${letter.component}: ${letter.reason}`)),
        h("small", {}, ` ${number(letter.attempts)} attempts, ${number(letter.events)} events `),
        button,
      ),
      journal,
    );
  };
  async function load(quiet = false) {
    const { alive } = await get(of(run, "live"));
    try {
      const { letters: found } = await get(of(run, "dead-letters"), { start, limit: PAGE });
      items = found.map(item);
      const turn = (by, text, there) =>
        h(
          "button",
          {
            type: "button",
            disabled: !there,
            onclick: () => {
              start = Math.max(0, start + by);
              load();
            },
          },
          text,
        );
      list.replaceChildren(
        ...items,
        ...(start || found.length === PAGE
          ? [turn(-PAGE, "older", start > 0), turn(PAGE, "newer", found.length === PAGE)]
          : []),
      );
      const ended = alive ? "" : "The run has ended. These are its oldest dead letters, at most a hundred.";
      if (!quiet) state.textContent = found.length ? ended : "None: no episode failed for good.";
    } catch (error) {
      if (!(error instanceof Refused) || error.status === 401) throw error;
      state.textContent = error.message;
    }
  }
  const step = (by) => () => {
    chosen = Math.max(0, Math.min(items.length - 1, chosen + by));
    items[chosen]?.firstElementChild.focus();
  };
  keys({ j: step(1), k: step(-1), ArrowDown: step(1), ArrowUp: step(-1) });
  await load();
}
