// What the worker's state means to somebody who chats: a word, a tone, and perhaps a thing to do.

const STARTING = ["spawning", "loading"];

/** {label, tone: good|wait|bad, notice?, act?: "restart"} for a snapshot of `/engine`; null = no server. */
export function describe(engine) {
  if (engine === null) {
    return {
      label: "not connected",
      tone: "bad",
      notice: "The server does not answer. Start it with `mlxd serve`; this page connects again by itself.",
    };
  }
  const { state } = engine;
  if (state === "locked") {
    return { label: "locked", tone: "bad", notice: "This server wants a key.", act: "key" };
  }
  if (engine.closing) return { label: "shutting down", tone: "wait" };
  if (state === "draining") return { label: "leaving", tone: "wait" };
  if (state === "ready") return { label: "ready", tone: "good" };
  if (state === "failed") {
    return { label: "cannot run", tone: "bad", notice: `The model cannot be served: ${why(engine)}` };
  }
  if (state === "exhausted") {
    const notice = `The worker died again and again and is not restarted any more: ${why(engine)}`;
    return { label: "stopped", tone: "bad", notice, act: "restart" };
  }
  if (state === "absent") return { label: "not loaded", tone: "rest" };
  if (STARTING.includes(state) && !hasDied(engine)) return { label: loading(engine), tone: "wait" };
  return { label: "restarting", tone: "wait" };
}

function hasDied(engine) {
  return Boolean(engine.last_exit) || engine.restarts > 0;
}

function loading(engine) {
  const { done, total } = engine.progress ?? {};
  return total > 0 ? `loading ${Math.floor((100 * done) / total)} %` : "loading";
}

function why(engine) {
  return engine.reason ?? engine.last_exit?.reason ?? "see `mlxd serve`'s log.";
}

/** The snapshot as that of one model, "" = the default; a model that nobody has asked for yet is absent. */
export function forModel(engine, chosen) {
  if (!engine || !chosen || chosen === modelId(engine)) return engine;
  const row = engine.workers?.find(({ model }) => model === chosen);
  return { state: "absent", ...row, model: chosen, closing: engine.closing };
}

/** The served model's id. */
export function modelId(engine) {
  const { model } = engine ?? {};
  return typeof model === "string" ? model : (model?.id ?? "");
}
