// The conversation: sending, streaming, stopping, and a strip of figures under each answer that stays.

const STARTERS = [
  "Why is the sky blue?",
  "Write a haiku about a tape recorder.",
  "Explain a hash map to a ten-year-old.",
];

const chat = { messages: memory.get("messages", []), last: memory.get("last", null), sending: false };

function settings() {
  const found = {};
  for (const [name, id] of [
    ["temperature", "temperature"],
    ["max_tokens", "max-tokens"],
    ["seed", "seed"],
  ]) {
    if (byId(id).value !== "") found[name] = Number(byId(id).value);
  }
  return found;
}

function strip(summary) {
  const { figures, finish } = summary;
  const parts = [`${speedText(figures.speed)} tok/s`];
  if (figures.speed && figures.ceiling) {
    parts.push(`${((100 * figures.speed) / figures.ceiling).toFixed(0)} % of light`);
  }
  parts.push(
    `first token ${milliseconds(figures.ttft ?? figures.seenTtft)}`,
    `${count(figures.produced)} tokens`,
  );
  if (figures.prompt != null) {
    parts.push(`prompt ${count(figures.prompt)}${figures.cached ? `, ${count(figures.cached)} cached` : ""}`);
  }
  const ending = { stopped: "stopped", length: "ended at its length", error: "broken off" }[finish];
  if (ending) parts.push(ending);
  return parts.join(" · ");
}

function addMessage({ role, content, thoughts, summary }) {
  byId("empty").hidden = true;
  const body = element("div", { class: "text" });
  const message = element("article", {
    class: `message ${role}`,
    "aria-label": role === "user" ? "You" : "Answer",
  });
  const thinking = element(
    "details",
    { class: "thoughts", hidden: true },
    element("summary", {}, "Thinking"),
    element("div"),
  );
  message.append(thinking, body);
  byId("log").append(message);
  const view = { message, body, text: new TextView(body), thinking };
  if (role === "user") body.append(element("p", {}, content));
  else showAnswer(view, { text: content, thoughts: thoughts ?? "" });
  if (summary) finishMessage(view, { content, summary });
  return view;
}

function showAnswer(view, answer) {
  view.text.show(answer.text);
  view.thinking.hidden = !answer.thoughts;
  if (answer.thoughts) view.thinking.lastElementChild.textContent = answer.thoughts;
}

function finishMessage(view, { content, summary }) {
  const line = element("footer", { class: "strip" }, element("span", {}, strip(summary)));
  if (content) line.append(copyButton(() => content, "answer"));
  view.message.append(line);
}

function follow() {
  const log = byId("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < 160) log.scrollTop = log.scrollHeight;
}

// At most one drawing a frame, however fast tokens come.
function perFrame(draw) {
  let asked = false;
  let latest;
  return (value) => {
    latest = value;
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw(latest);
    });
  };
}

function summarise(answer) {
  const figures = figuresOf(answer);
  return { figures: { ...figures, ceiling: ceilingAt(meanContext(figures) ?? 0) }, finish: answer.finish };
}

async function sendMessage(text) {
  const { messages } = chat;
  messages.push({ role: "user", content: text });
  addMessage(messages.at(-1));
  byId("log").scrollTop = byId("log").scrollHeight;
  const view = addMessage({ role: "assistant", content: "" });
  view.message.classList.add("live");
  setSending(true);
  const draw = perFrame((answer) => {
    showAnswer(view, answer);
    showInstruments(answer);
    follow();
  });
  let answer = null;
  let failure = null;
  try {
    const system = byId("system").value.trim();
    const asked = messages.map(({ role, content }) => ({ role, content }));
    answer = await ask(system ? [{ role: "system", content: system }, ...asked] : asked, settings(), draw);
  } catch (error) {
    failure = error;
    answer = error.answer ?? null;
    if (answer) answer.finish = "error";
  }
  view.message.classList.remove("live");
  setSending(false);
  if (chat.messages === messages) settle(view, answer, failure, text); // else it was cleared meanwhile
}

function settle(view, answer, failure, text) {
  const said = answer && (answer.text || answer.thoughts);
  if (said) {
    const summary = summarise(answer);
    chat.messages.push({ role: "assistant", content: answer.text, thoughts: answer.thoughts, summary });
    showAnswer(view, answer);
    finishMessage(view, chat.messages.at(-1).content ? chat.messages.at(-1) : { content: "", summary });
    remember(answer);
  } else {
    view.message.remove();
    chat.messages.pop(); // the question goes back to where it was typed, so that nothing is lost
    byId("log").lastElementChild?.remove();
    if (!byId("prompt").value) byId("prompt").value = text;
    byId("empty").hidden = chat.messages.length > 0;
  }
  memory.set("messages", chat.messages);
  showInstruments(chat.last);
  if (failure) showFailure(failure);
  resize(byId("prompt"));
  follow();
}

// What the other views show, and what survives a reload.
function remember(answer) {
  chat.last = answer;
  memory.set("last", answer);
  addPoint(answer);
  showTimeline();
}

function setSending(sending) {
  chat.sending = sending;
  byId("send").textContent = sending ? "Stop" : "Send";
  byId("log").setAttribute("aria-busy", sending);
}

function resize(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

function startChat() {
  const area = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.sending) return stop();
    const text = area.value.trim();
    if (!text) return area.focus();
    hideFailure();
    area.value = "";
    resize(area);
    sendMessage(text);
  });
  for (const field of [area, byId("race-prompt")]) {
    field.addEventListener("input", () => resize(field));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!activity.controller) field.form.requestSubmit();
    });
  }
  byId("clear").addEventListener("click", clearChat);
  byId("starters").append(
    ...STARTERS.map((text) =>
      element(
        "button",
        {
          type: "button",
          class: "pill",
          onclick: () => {
            area.value = text;
            resize(area);
            byId("composer").requestSubmit();
          },
        },
        text,
      ),
    ),
  );
  chat.messages.forEach(addMessage);
  byId("log").scrollTop = byId("log").scrollHeight;
}

function clearChat() {
  stop();
  hideFailure();
  chat.messages = [];
  memory.set("messages", []);
  byId("log").replaceChildren(byId("empty"));
  byId("empty").hidden = false;
  byId("prompt").focus();
}
