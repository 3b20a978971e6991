// Where on the page somebody is: `#/RUN/VIEW?name=value`. It holds no token.

export function place() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  const [run, view] = path.split("/").map(decodeURIComponent);
  return { run: run || "", view: view || "overview", params: new URLSearchParams(query ?? "") };
}

export function address(run, view, params = {}) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const query = new URLSearchParams(given);
  return `#/${encodeURIComponent(run)}/${view}${query.size ? `?${query}` : ""}`;
}
