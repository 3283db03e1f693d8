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

/** The one that was kept. */
export function findKey() {
  try {
    held = localStorage.getItem(NAME) ?? "";
  } catch {
    held = "";
  }
}
