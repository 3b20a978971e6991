// The episodes of one task, side by side.

import { address } from "./address.js";
import { get, of } from "./api.js";
import { h, number, visible } from "./dom.js";
import { drawTurns } from "./turns.js";

const MOST = 32;

export async function group(root, { run, params, go, keys }) {
  const [task, step] = [params.get("task") ?? "", params.get("step") ?? ""];
  const { rows, total } = await get(of(run, "trajectories"), {
    task,
    step,
    order: "step",
    descending: false,
    limit: MOST,
  });
  const records = await Promise.all(
    rows.map((row) => get(of(run, "trajectory"), { episode: row.episode, step: row.step })),
  );
  const rewards = rows.map((row) => row.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
  root.append(
    h("h2", {}, `group ${visible(task)}`),
    h(
      "p",
      { class: "facts" },
      `${number(total)} recorded episodes, mean reward ${number(rewards.length ? mean : null)}. The recorder keeps trainer.save_trajectories of each step.`,
    ),
    h(
      "div",
      { class: "columns" },
      records.map((record, i) =>
        h(
          "section",
          { class: "column" },
          h(
            "h3",
            {},
            h(
              "a",
              { href: address(run, "trajectory", { episode: rows[i].episode, step: rows[i].step }) },
              visible(rows[i].episode.slice(task.length)),
            ),
          ),
          h(
            "p",
            { class: "facts" },
            "reward ",
            h("b", {}, number(record.reward)),
            " advantage ",
            h("b", {}, number(record.advantage)),
            ` ${visible(record.outcome.kind)}, ${number(rows[i].tokens)} tokens`,
          ),
          drawTurns(record, [], { prompt: false }).flat(2).filter(Boolean),
        ),
      ),
    ),
  );
  keys({ Escape: () => go("trajectories", { task, step: Number(step) + 1 }) });
}
