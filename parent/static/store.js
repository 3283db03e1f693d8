// The conversation and the settings, kept in this browser only.

const KEY = "mlxd.chat";
const EMPTY = { messages: [], system: "", temperature: null, model: "" };

/** What was kept, or the beginnings; never throws (storage may be forbidden or damaged). */
export function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(KEY));
    if (!kept || !Array.isArray(kept.messages)) return structuredClone(EMPTY);
    const messages = kept.messages.filter((message) => typeof message?.text === "string" && message.role);
    return { ...structuredClone(EMPTY), ...kept, messages };
  } catch {
    return structuredClone(EMPTY);
  }
}

/** Keep it; a browser that does not allow it costs the memory, not the chat. */
export function save(chat) {
  try {
    localStorage.setItem(KEY, JSON.stringify(chat));
  } catch {
    // full or forbidden
  }
}
