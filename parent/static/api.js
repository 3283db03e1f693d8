// The server's HTTP API as the page needs it: one streamed answer, the worker's state, a restart.

import { key } from "/static/key.js";

const AGAIN_MS = 2000;

/** Thrown with one line for a person; `status` is 0 when the server could not be reached. */
export class Fault extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Each SSE frame as {event, data} in a stream of text chunks, however they are cut. Comments are skipped. */
export async function* frames(chunks) {
  let held = "";
  for await (const chunk of chunks) {
    held += chunk;
    let end;
    while ((end = held.search(/\r?\n\r?\n/)) >= 0) {
      const frame = held.slice(0, end);
      held = held.slice(end).replace(/^\r?\n\r?\n/, "");
      const lines = frame.split(/\r?\n/);
      const told = (name) => lines.filter((line) => line.startsWith(name)).map((line) => line.slice(name.length).trimStart());
      const data = told("data:");
      if (data.length) yield { event: told("event:").at(-1) ?? "message", data: data.join("\n") };
    }
  }
}

/** A body as text chunks; UTF-8 cut between chunks comes out whole. */
async function* textChunks(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    yield decoder.decode(value, { stream: true });
  }
}

/** `fetch`, with the key where there is one. */
function ask(path, init = {}) {
  const headers = key() ? { authorization: `Bearer ${key()}` } : {};
  return fetch(path, { ...init, headers: { ...headers, ...init.headers } });
}

/**
 * Ask for an answer and yield {text}, {reasoning} and at last {usage, reason}. Throws Fault; an abort of
 * `signal` throws the browser's AbortError.
 */
export async function* answer(request, signal) {
  const response = await ask("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } }),
    signal,
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Fault("The server does not answer. Is `mlxd serve` still running?");
  });
  if (!response.ok) throw await faultOf(response);
  let finished = false;
  try {
    for await (const { data } of frames(textChunks(response.body))) {
      if (data === "[DONE]") {
        finished = true;
        break;
      }
      const frame = JSON.parse(data);
      if (frame.error) throw new Fault(frame.error.message, 200);
      for (const choice of frame.choices ?? []) {
        const delta = choice.delta ?? {};
        if (delta.reasoning_content) yield { reasoning: delta.reasoning_content };
        if (delta.content) yield { text: delta.content };
        if (choice.finish_reason) yield { reason: choice.finish_reason };
      }
      if (frame.usage) yield { usage: frame.usage };
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof Fault) throw error;
    throw new Fault("The connection to the server was lost.");
  }
  if (!finished) throw new Fault("The answer was cut short: the connection to the server was lost.");
}

async function faultOf(response) {
  try {
    return new Fault((await response.json()).error.message, response.status);
  } catch {
    return new Fault(`The server answered ${response.status}.`, response.status);
  }
}

/**
 * Call `onState` with each snapshot of `/engine`, for as long as the page lives; with null while the server cannot be
 * reached, and with {state: "locked"} while it wants another key.
 */
export async function watchWorker(onState) {
  for (;;) {
    let last = null;
    try {
      const response = await ask("/admin/events");
      if (response.status === 401) last = { state: "locked" };
      if (!response.ok) throw await faultOf(response);
      for await (const { event, data } of frames(textChunks(response.body))) {
        if (event === "snapshot" || event === "state") onState(JSON.parse(data));
      }
    } catch {
      // cut, refused or nobody there: it is asked again
    }
    onState(last);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
}

/** Ask for a fresh worker, also after the restart budget is spent. Throws Fault. */
export async function restartWorker(id) {
  const path = id.split("/").map(encodeURIComponent).join("/");
  const response = await ask(`/admin/workers/${path}/restart`, { method: "POST" });
  if (!response.ok) throw await faultOf(response);
}

/** The ids of all models that can be served. Throws Fault. */
export async function modelIds() {
  const response = await ask("/v1/models").catch(() => {
    throw new Fault("The server does not answer.");
  });
  if (!response.ok) throw await faultOf(response);
  return (await response.json()).data.map(({ id }) => id);
}
