// The key that a server may want, kept in this browser for this address only.

const NAME = "mlxd.key";
let held = "";

/** The key to send along; "" = none. */
export function key() {
  return held;
}

/** Use this one from now on; "" forgets it. */
export function setKey(value) {
  held = value.trim();
  try {
    if (held) localStorage.setItem(NAME, held);
    else localStorage.removeItem(NAME);
  } catch {
    // forbidden: it lasts as long as the page
  }
}

/** The one that was kept, or that stands behind the # of the address, which is taken away there. */
export function findKey() {
  const given = new URLSearchParams(location.hash.slice(1)).get("key");
  if (given) {
    history.replaceState(null, "", location.pathname + location.search);
    setKey(given);
    return;
  }
  try {
    held = localStorage.getItem(NAME) ?? "";
  } catch {
    held = "";
  }
}
