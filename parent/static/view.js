// One message on the page. Text from a model or a person only ever goes into text nodes.

/** An element with a class and text. */
export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** A button that looks like a link. */
export function link(label, onClick) {
  const made = element("button", "quiet", label);
  made.type = "button";
  made.addEventListener("click", onClick);
  return made;
}

/** The view of one message: {root, grow(message), finish(message, actions)}. */
export function messageView(message) {
  const root = element("article", `message ${message.role}`);
  const text = element("div", "text");
  root.append(text);
  const written = document.createTextNode("");
  let reasoning = null;

  function grow() {
    if (message.reasoning) {
      reasoning ??= addReasoning();
      reasoning.lastChild.data = message.reasoning;
    }
    if (!message.text) return;
    if (!written.parentNode) text.append(written);
    // Appending keeps a reader's selection; setting the whole text would drop it at each token.
    if (message.text.startsWith(written.data)) written.appendData(message.text.slice(written.data.length));
    else written.data = message.text;
  }

  function addReasoning() {
    const folded = element("details", "reasoning");
    const body = element("div");
    body.append(document.createTextNode(""));
    folded.append(element("summary", "", "Reasoning"), body);
    root.prepend(folded);
    return body;
  }

  function finish(actions = []) {
    grow();
    root.classList.remove("running");
    for (const old of root.querySelectorAll(".fault, .foot")) old.remove();
    if (message.fault) {
      const fault = element("p", "fault", message.fault);
      fault.setAttribute("role", "alert");
      root.append(fault);
    }
    if (message.role !== "assistant") return;
    const foot = element("div", "foot");
    for (const fact of facts(message)) foot.append(element("span", "", fact));
    foot.append(...actions);
    root.append(foot);
  }

  return { root, grow, finish };
}

/** `19 tokens`, `24.1 tok/s`, `first after 0.21 s`, `stopped`. */
function facts({ stats, reason }) {
  const told = [];
  if (stats?.tokens) told.push(`${stats.tokens} token${stats.tokens === 1 ? "" : "s"}`);
  if (stats?.rate) told.push(`${stats.rate.toFixed(1)} tok/s`);
  if (stats?.first) told.push(`first after ${stats.first.toFixed(2)} s`);
  if (reason === "stopped") told.push("stopped");
  if (reason === "length") told.push("cut at the length limit");
  return told;
}
