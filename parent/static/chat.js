// The chat page: wires the form, the conversation and the worker's state together.

import { answer, modelIds, restartWorker, watchWorker } from "/static/api.js";
import { findKey, key, setKey } from "/static/key.js";
import { load, save } from "/static/store.js";
import { element, link, messageView } from "/static/view.js";
import { describe, forModel, modelId } from "/static/worker.js";

const $ = (id) => document.getElementById(id);
const IDEAS = ["What is the capital of France?", "Explain a mutex in two sentences", "Write a haiku about autumn"];

const chat = load();
let engine;
let running = null; // the AbortController of the answer that is on its way

// ---------------------------------------------------------------- the conversation

function show(message) {
  const view = messageView(message);
  $("messages").append(view.root);
  view.finish(actionsFor(message));
  return view;
}

function actionsFor(message) {
  if (message.role !== "assistant") return [];
  const isLast = chat.messages.at(-1) === message;
  const actions = message.text ? [link("Copy", () => navigator.clipboard.writeText(message.text))] : [];
  if (isLast) actions.push(link(message.fault ? "Try again" : "Ask again", again));
  return actions;
}

function redraw() {
  $("messages").replaceChildren();
  chat.messages.forEach(show);
  $("empty").hidden = chat.messages.length > 0;
  toEnd();
}

const isAtEnd = () => $("scroller").scrollHeight - $("scroller").scrollTop - $("scroller").clientHeight < 60;

function toEnd() {
  $("scroller").scrollTop = $("scroller").scrollHeight;
}

function requestOf(messages) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system.trim() }] : [];
  // A question that got no answer stays on the page, but templates want turns that alternate.
  const unanswered = (next) => next?.role === "assistant" && !next.text;
  const history = messages.filter(({ role, text }, at) => (role === "user" ? !unanswered(messages[at + 1]) : text));
  const request = {
    model: chat.model || modelId(engine),
    messages: [...system, ...history.map(({ role, text }) => ({ role, content: text }))],
  };
  if (chat.temperature !== null) request.temperature = chat.temperature;
  return request;
}

async function ask(text) {
  chat.messages.push({ role: "user", text });
  redraw();
  await reply();
}

function again() {
  if (running) return;
  chat.messages.pop();
  redraw();
  reply();
}

async function reply() {
  const request = requestOf(chat.messages);
  const message = { role: "assistant", text: "", reasoning: "" };
  chat.messages.push(message);
  const view = messageView(message);
  view.root.classList.add("running");
  $("messages").append(view.root);
  toEnd();
  setRunning(new AbortController());
  const asked = performance.now();
  let first = 0;
  let last = 0;
  let usage = null;
  try {
    for await (const piece of answer(request, running.signal)) {
      if (piece.text || piece.reasoning) {
        last = performance.now();
        first ||= last;
        const follow = isAtEnd();
        message.text += piece.text ?? "";
        message.reasoning += piece.reasoning ?? "";
        view.grow();
        if (follow) toEnd();
      }
      usage = piece.usage ?? usage;
      message.reason = piece.reason ?? message.reason;
    }
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped";
    else message.fault = error.message;
  }
  const tokens = usage?.completion_tokens ?? 0;
  const seconds = (last - first) / 1000;
  message.stats = {
    tokens,
    first: first ? (first - asked) / 1000 : 0,
    rate: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : 0,
  };
  setRunning(null);
  const follow = isAtEnd();
  view.finish(actionsFor(message));
  if (follow) toEnd();
  save(chat);
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = Boolean(controller);
  $("stop").hidden = !controller;
  fitInput();
}

// ---------------------------------------------------------------- the form

function fitInput() {
  const input = $("input");
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
  $("send").disabled = !input.value.trim();
}

function submit() {
  const text = $("input").value.trim();
  if (!text || running) return;
  $("input").value = "";
  fitInput();
  ask(text);
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});
$("input").addEventListener("input", fitInput);
$("input").addEventListener("keydown", (event) => {
  // `isComposing`: an Enter that ends the input of a Japanese word must not send the message.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => {
  running?.abort();
  chat.messages = [];
  save(chat);
  redraw();
  $("input").focus();
});
for (const idea of IDEAS) {
  const button = element("button", "", idea);
  button.type = "button";
  button.addEventListener("click", () => running || ask(idea));
  $("ideas").append(button);
}

// ---------------------------------------------------------------- settings

function showSettings() {
  $("choice").value = chat.model;
  $("system").value = chat.system;
  $("key").value = key();
  $("temperature").value = chat.temperature ?? 1;
  $("temperature-shown").textContent = chat.temperature?.toFixed(1) ?? "model's own";
}

/** The models as they are now; one that was chosen and has gone stays, so that the choice is seen. */
async function offerModels() {
  const ids = await modelIds().catch(() => []);
  if (chat.model && !ids.includes(chat.model)) ids.push(chat.model);
  const options = ids.map((id) => new Option(id, id));
  $("choice").replaceChildren(new Option(`the default (${modelId(engine) || "none"})`, ""), ...options);
  $("choice").value = chat.model;
}

function change(values) {
  Object.assign(chat, values);
  save(chat);
  showSettings();
}

$("settings").addEventListener("submit", (event) => event.preventDefault());
$("choice").addEventListener("change", () => {
  change({ model: $("choice").value });
  if (engine) onWorker(engine);
});
$("settings").addEventListener("toggle", (event) => event.newState === "open" && offerModels());
$("key").addEventListener("change", () => setKey($("key").value));
$("system").addEventListener("change", () => change({ system: $("system").value }));
$("temperature").addEventListener("input", () => change({ temperature: Number($("temperature").value) }));
$("temperature-reset").addEventListener("click", () => change({ temperature: null }));

// ---------------------------------------------------------------- the worker

function onWorker(snapshot) {
  const isLocked = snapshot?.state === "locked";
  if (snapshot && !isLocked) engine = snapshot;
  const { label, tone, notice, act } = describe(isLocked ? snapshot : snapshot && forModel(snapshot, chat.model));
  $("worker").dataset.tone = tone;
  $("worker-label").textContent = label;
  const model = chat.model || modelId(engine);
  $("model").textContent = model || "mlxd";
  document.title = model ? `${model} · mlxd` : "mlxd";
  $("notice").hidden = !notice;
  $("notice-text").textContent = notice ?? "";
  $("notice-act").hidden = !act;
  $("worker").dataset.act = act ?? "";
  $("notice-act").textContent = { restart: "Start it again", key: "Enter it" }[act] ?? "";
  $("empty-hint").textContent = hint(tone, model);
}

function hint(tone, model) {
  if (tone === "good") return `${model} runs on this machine; nothing you write leaves it.`;
  if (tone === "rest") return `${model} is loaded when you write.`;
  if (tone === "wait") return "The model is getting ready. You can write already: the answer comes once it is.";
  return "There is nobody to answer right now; see the line above.";
}

$("notice-act").addEventListener("click", () => {
  if ($("worker").dataset.act === "key") {
    $("settings").showPopover();
    $("key").focus();
    return;
  }
  restartWorker(chat.model || modelId(engine)).catch((error) => {
    $("notice-text").textContent = error.message;
  });
});

findKey();
if (chat.model) offerModels();
showSettings();
redraw();
fitInput();
watchWorker(onWorker);
