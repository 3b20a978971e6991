// A list of any length, of which only the rows in sight exist. Pages of it are asked for as they come into sight.

import { h } from "./dom.js";

export const ROW = 34; // px, as in style.css
const PAGE = 100,
  SPARE = 8;

/** `load(offset, limit)` gives `{total, rows}`; `draw(row, index)` gives the cells; `open(row)` is called for a chosen one. */
export class Rows {
  constructor({ load, draw, open, label }) {
    Object.assign(this, { load, draw, open });
    this.pages = new Map();
    this.total = 0;
    this.chosen = -1;
    this.space = h("div", { class: "space" });
    this.box = h("div", { class: "rows", tabindex: 0, role: "grid", "aria-label": label }, this.space);
    this.box.addEventListener("scroll", () => this.soon(), { passive: true });
    this.box.addEventListener("click", (event) => {
      const row = event.target.closest("[data-index]");
      if (row) this.choose(Number(row.dataset.index), true);
    });
    new ResizeObserver(() => this.soon()).observe(this.box);
  }

  /** Forget what was loaded; draws again from the first row, or from where it is. */
  async reset({ keep = false } = {}) {
    this.pages.clear();
    if (!keep) [this.box.scrollTop, this.chosen] = [0, -1];
    await this.page(Math.floor(this.first() / PAGE));
    this.drawNow();
  }

  first() {
    return Math.max(0, Math.floor(this.box.scrollTop / ROW) - SPARE);
  }

  soon() {
    this.waiting ??= requestAnimationFrame(() => {
      this.waiting = undefined;
      this.drawNow();
    });
  }

  page(number) {
    if (!this.pages.has(number)) {
      const { pages } = this,
        entry = { rows: null };
      pages.set(number, entry);
      entry.ready = this.load(number * PAGE, PAGE).then(
        ({ total, rows }) => {
          if (pages.get(number) !== entry) return; // asked again since
          entry.rows = rows;
          this.total = total;
          this.soon();
        },
        (error) => {
          pages.delete(number);
          throw error;
        },
      );
    }
    return this.pages.get(number).ready;
  }

  row(index) {
    return this.pages.get(Math.floor(index / PAGE))?.rows?.[index % PAGE];
  }

  drawNow() {
    const first = this.first(),
      last = Math.min(this.total, first + Math.ceil(this.box.clientHeight / ROW) + 2 * SPARE);
    for (let page = Math.floor(first / PAGE); page * PAGE < last; page += 1) this.page(page).catch(() => {});
    this.space.style.height = `${this.total * ROW}px`;
    this.box.setAttribute("aria-rowcount", this.total);
    const drawn = [];
    for (let index = first; index < last; index += 1) drawn.push(this.element(index));
    this.space.replaceChildren(...drawn);
  }

  element(index) {
    const row = this.row(index),
      chosen = index === this.chosen;
    const made = h(
      "div",
      { class: "row", role: "row", "data-index": index, "aria-rowindex": index + 1, "aria-selected": chosen && "true" },
      row ? this.draw(row) : h("span", { class: "quiet" }, "…"),
    );
    made.style.transform = `translateY(${index * ROW}px)`;
    return made;
  }

  choose(index, open = false) {
    if (index < 0 || index >= this.total) return;
    this.chosen = index;
    const top = index * ROW;
    if (top < this.box.scrollTop) this.box.scrollTop = top;
    else if (top + ROW > this.box.scrollTop + this.box.clientHeight)
      this.box.scrollTop = top + ROW - this.box.clientHeight;
    this.drawNow();
    const row = this.row(index);
    if (open && row) this.open(row, index);
  }

  keys() {
    const step = (by) => () => this.choose(Math.max(0, Math.min(this.total - 1, this.chosen + by)));
    const page = Math.max(1, Math.floor(this.box.clientHeight / ROW) - 1);
    return {
      j: step(1),
      ArrowDown: step(1),
      k: step(-1),
      ArrowUp: step(-1),
      PageDown: step(page),
      PageUp: step(-page),
      Home: () => this.choose(0),
      End: () => this.choose(this.total - 1),
      Enter: () => this.choose(this.chosen, true),
    };
  }
}
