// Everything on the page is made here. Text becomes text nodes: nothing is ever handed to the HTML parser.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value") element.value = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

/** An HTML element: attributes, `onclick` and the like as listeners, children as nodes or text. */
export function h(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same in SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Text in which ANSI escapes, bidi controls and blanks without width are shown as signs. */
export function visible(text) {
  return String(text).replace(HIDDEN, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

/** A number for people: few digits, no noise; `–` where there is none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return visible(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-3) return value.toExponential(Math.max(0, digits - 1));
  if (size >= 1e3) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(Math.max(digits, Math.ceil(Math.log10(size))))));
}

/** A number with its unit: ``1 turn``, ``2 turns``. */
export function plural(count, unit) {
  return `${number(count)} ${unit}${count === 1 ? "" : "s"}`;
}

export function percent(value) {
  return value === null || value === undefined ? "–" : `${Math.round(100 * value)} %`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${number(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return `${Math.round(1000 * value)} ms`;
  return value < 120 ? `${number(value)} s` : `${number(value / 60)} min`;
}

/** A table from column names and rows of nodes or text. */
export function table(names, rows, attributes = {}) {
  const head = h(
    "tr",
    {},
    names.map((name) => h("th", { scope: "col" }, name)),
  );
  const body = rows.map((row) =>
    h(
      "tr",
      {},
      row.map((cell) => h("td", {}, cell)),
    ),
  );
  return h("div", { class: "scroll" }, h("table", attributes, h("thead", {}, head), h("tbody", {}, body)));
}
