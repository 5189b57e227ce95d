// The view and its filters are in the fragment of the URL: #/transactions?state=parked&group=shop

import { useEffect, useState } from "../vendor/htm-preact.js";

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decode);
  return { view: parts[0] ?? "overview", id: parts.slice(1).join("/") || null, query: Object.fromEntries(new URLSearchParams(query)) };
}

function decode(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export function to(view, id = null, query = {}) {
  const parameters = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(parameters).toString();
  return `#/${view}${id === null ? "" : `/${encodeURIComponent(id)}`}${search ? `?${search}` : ""}`;
}

export function go(address, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", address);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = address;
  }
}

export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const update = () => setHash(location.hash);
    addEventListener("hashchange", update);
    update(); // The hash may have changed between the first render and this effect.
    return () => removeEventListener("hashchange", update);
  }, []);
  return parse(hash);
}
