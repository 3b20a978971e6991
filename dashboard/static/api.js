// The server's data. The token travels in a header and stays in this tab: no address and no cookie holds it.

const KEY = "penstock-token";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const token = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

async function ask(path, options) {
  const headers = { Authorization: `Bearer ${token.get() ?? ""}`, ...options.headers };
  const signal = AbortSignal.timeout(30000);
  const answer = await fetch(`/api/${path}`, { ...options, headers, signal, cache: "no-store", redirect: "error" });
  const told = await answer.json();
  if (!answer.ok) throw new Refused(answer.status, told?.error?.message ?? `status ${answer.status}`);
  return told;
}

function query(values) {
  const found = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== null && one !== undefined && one !== "") found.append(name, one);
    }
  }
  return found.size ? `?${found}` : "";
}

export const get = (path, values = {}) => ask(path + query(values), { method: "GET" });

/** An image as a bitmap, to be drawn: the page loads no address that could hold the token. */
export async function bitmap(path, values) {
  const headers = { Authorization: `Bearer ${token.get() ?? ""}` };
  const answer = await fetch(`/api/${path}${query(values)}`, {
    headers,
    signal: AbortSignal.timeout(30000),
    redirect: "error",
  });
  if (!answer.ok) throw new Refused(answer.status, `status ${answer.status}`);
  return createImageBitmap(await answer.blob());
}

export const post = (path, body) =>
  ask(path, { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

/** The path of one run's data. */
export const of = (run, what) => `runs/${encodeURIComponent(run)}/${what}`;
