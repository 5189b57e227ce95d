// The key for the API. It is stored for this tab only, unless the user wants to keep it. It is never part of a URL.

const NAME = "halfway.key";
const KINDS = { g: "group", o: "operator", r: "reader" };

const session = { key: read(), listeners: new Set() };

function read() {
  for (const store of stores()) {
    const key = store.getItem(NAME);
    if (key) return key;
  }
  return null;
}

function stores() {
  try {
    return [sessionStorage, localStorage];
  } catch {
    return [];
  }
}

export function currentKey() {
  return session.key;
}

// "operator", "group" or "reader"; null without a key: then only the API knows the caller.
export function callerKind() {
  const match = /^hw_([gor])_/.exec(session.key ?? "");
  return match ? KINDS[match[1]] : null;
}

// The public id of the key, as in the audit trail.
export function publicId() {
  const match = /^hw_[gor]_([0-9A-Za-z]{12})_/.exec(session.key ?? "");
  return match ? match[1] : null;
}

export function signIn(key, { keep }) {
  signOut();
  session.key = key;
  const [tab, browser] = stores();
  (keep ? browser : tab)?.setItem(NAME, key);
}

export function signOut() {
  session.key = null;
  for (const store of stores()) store.removeItem(NAME);
}

// Calls `listener` when the API refuses the key.
export function onRefused(listener) {
  session.listeners.add(listener);
  return () => session.listeners.delete(listener);
}

export function refused() {
  for (const listener of session.listeners) listener();
}
