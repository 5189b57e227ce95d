// The key that is shown to the API. It is kept in this tab only, unless the user asks for more; it is never in a URL.

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

// "operator", "group" or "reader"; null if no key is shown, so that the API alone knows who calls.
export function callerKind() {
  const found = /^hw_([gor])_/.exec(session.key ?? "");
  return found ? KINDS[found[1]] : null;
}

// The public part of the key, by which the audit trail names it.
export function publicId() {
  const found = /^hw_[gor]_([0-9A-Za-z]{12})_/.exec(session.key ?? "");
  return found ? found[1] : null;
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

// Tell `listener` that the API no longer takes the key.
export function onRefused(listener) {
  session.listeners.add(listener);
  return () => session.listeners.delete(listener);
}

export function refused() {
  for (const listener of session.listeners) listener();
}
