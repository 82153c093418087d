// The conversation that is shown: asking, streaming, stopping, and keeping every step of it at once.

const STARTERS = [
  "Why is the sky blue?",
  "Write a haiku about a tape recorder.",
  "Explain a hash map to a ten-year-old.",
];
const STARTERS_OF_CODE = ["def is_even(number):", "class Stack:", "import logging"];
const SAVE_MS = 400; // how often an answer under way is kept
const LEAVING_MS = 120; // how long a page that is being left may still run

const chat = {
  conversation: new Conversation(),
  last: memory.get("last", null),
  sending: false,
  views: [],
  keep: null, // keeps the answer under way at once
};

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

function addView(index) {
  byId("empty").hidden = true;
  const view = new MessageView(index);
  chat.views.push(view);
  return view;
}

// Draws the whole path anew.
function showConversation() {
  byId("log").replaceChildren(byId("empty"));
  chat.views = [];
  chat.conversation.path().forEach(addView);
  byId("empty").hidden = chat.views.length > 0;
  showUnanswered();
  showTitle();
  followAgain();
}

// A question without an answer (a reload came between) can be asked again.
function showUnanswered() {
  const index = chat.conversation.path().at(-1);
  if (index === undefined || chat.sending || chat.conversation.nodes[index].role !== "user") return;
  const button = element(
    "button",
    { type: "button", class: "quiet boxed unanswered", onclick: () => answerTo(index) },
    "No answer came. Ask again",
  );
  byId("log").append(button);
}

function showTitle() {
  const { conversation } = chat;
  byId("title").textContent = conversation.nodes.length ? conversation.name() : UNTITLED;
  for (const id of ["export-markdown", "export-json"]) byId(id).disabled = !conversation.nodes.length;
  showList();
}

function messagesTo(conversation, index) {
  return conversation.pathTo(index).map((at) => {
    const node = conversation.nodes[at];
    return { role: node.role, content: node.role === "user" ? contentWithFiles(node) : node.content };
  });
}

/* Asks for the answer at `index`, which is there already, empty or begun. `begun` is what it continues. The text
   so far is saved every few moments and when the page is left. Returns the error, if there was one. */
async function stream(conversation, index, messages, extra, begun = "") {
  const node = conversation.nodes[index];
  const own = () => chat.conversation === conversation; // else another one is shown meanwhile
  const view = chat.views.find((found) => found.index === index);
  let latest = null;
  let saved = performance.now();
  chat.keep = () => {
    if (!latest) return;
    Object.assign(node, { content: begun + latest.text, thoughts: latest.thoughts || node.thoughts });
    conversation.save();
    saved = performance.now();
  };
  const draw = perFrame((answer) => {
    if (!own() || answer.endAt != null) return;
    view.show(answer, begun);
    showInstruments(answer);
    follow();
  });
  let failure = null;
  let answer = null;
  view.article.classList.add("live");
  view.foot.remove();
  view.show({ text: "", thoughts: "" }, begun);
  followAgain();
  setSending(true);
  try {
    answer = await ask([...systemMessages(), ...messages], { ...settings(), ...extra }, (so_far) => {
      latest = so_far;
      draw(so_far);
      if (performance.now() - saved > SAVE_MS) chat.keep();
    });
  } catch (error) {
    // A page that goes sees its connection break. It does not live to see this moment pass, and takes nothing back.
    await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
    failure = error;
    answer = error.answer ?? null;
    if (answer) answer.finish = "error";
  }
  chat.keep = null;
  setSending(false);
  if (answer && (answer.text || answer.thoughts)) {
    const thoughts = answer.thoughts || node.thoughts || "";
    Object.assign(node, { content: begun + answer.text, thoughts, summary: summarise(answer) });
    remember(answer);
  }
  return failure;
}

function setFailure(failure) {
  showInstruments(chat.last);
  if (failure) showFailure(failure);
  follow();
}

/* Another answer to the question at `parent`. When nothing comes it is taken back, as far as nothing else was there
   before; gives whether something came. */
async function answerTo(parent) {
  if (chat.sending) return false;
  const { conversation } = chat;
  hideFailure();
  const before = conversation.chosen[parent];
  const index = conversation.add(parent, { role: "assistant", content: "" });
  conversation.save();
  showConversation();
  const failure = await stream(conversation, index, messagesTo(conversation, parent), {});
  const came = Boolean(conversation.nodes[index].summary);
  if (!came) conversation.takeBack(before);
  conversation.save();
  if (chat.conversation === conversation) {
    if (came) chat.views.at(-1).finish();
    else showConversation();
    showTitle();
    setFailure(failure);
  }
  showList();
  return came;
}

/* A question that gets no answer goes back to where it was typed, so that nothing is lost. Where something else is being
   typed already, or where it is another version of a question, it stays and can be asked again. */
async function askQuestion(parent, text, files) {
  const { conversation } = chat;
  const edited = conversation.chosen[parent] !== undefined;
  const node = files.length ? { role: "user", content: text, files } : { role: "user", content: text };
  const index = conversation.add(parent, node);
  if (await answerTo(index)) return;
  const busy = byId("prompt").value || attached.files.length;
  if (edited || busy || chat.conversation !== conversation) return;
  conversation.takeBack();
  if (conversation.nodes.length) conversation.save();
  else forgetConversation(conversation.id);
  showConversation();
  setDraft(text);
  setFiles(files);
}

function regenerate(index) {
  answerTo(chat.conversation.nodes[index].parent);
}

async function resend(index, text) {
  if (chat.sending) return;
  const { parent, files } = chat.conversation.nodes[index];
  await askQuestion(parent, text, files ?? []);
}

// Goes on with an answer that was cut off. Trailing blanks are dropped: templates drop them too.
async function continueAnswer(view) {
  if (chat.sending) return;
  hideFailure();
  const { conversation } = chat;
  const node = conversation.nodes[view.index];
  const begun = node.content.trimEnd();
  const messages = messagesTo(conversation, view.index);
  messages.at(-1).content = begun;
  if (node.thoughts) messages.at(-1).reasoning_content = node.thoughts;
  const extra = { continue_final_message: true, add_generation_prompt: false };
  const failure = await stream(conversation, view.index, messages, extra, begun);
  conversation.save();
  if (chat.conversation !== conversation) return;
  view.finish();
  setFailure(failure);
}

function showVersion(index) {
  if (chat.sending) return;
  chat.conversation.choose(index);
  chat.conversation.save();
  showConversation();
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
  byId("view-chat").classList.toggle("sending", sending);
}

function resize(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
}

function setDraft(text) {
  byId("prompt").value = text;
  lasting.set("draft", text);
  resize(byId("prompt"));
}

// Shows another conversation, or a new one. An answer that is still being written ends, and its text so far is kept.
function openConversation(conversation) {
  chat.keep?.();
  stop();
  hideFailure();
  chat.conversation = conversation;
  memory.set("current", conversation.nodes.length ? conversation.id : null);
  showConversation();
}

function startComposer() {
  const area = byId("prompt");
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.sending) return stop();
    const text = area.value.trim();
    const { files } = attached;
    if (!text && !files.length) return area.focus();
    hideFailure();
    setDraft("");
    setFiles([]);
    memory.set("current", chat.conversation.id);
    askQuestion(chat.conversation.path().at(-1) ?? ROOT, text, files);
  });
  for (const field of [area, byId("race-prompt")]) {
    field.addEventListener("input", () => resize(field));
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!activity.controller) field.form.requestSubmit();
    });
  }
  area.addEventListener("input", () => lasting.set("draft", area.value));
  setDraft(lasting.get("draft", ""));
}

function showStarters() {
  const starters = server.info?.completes ? STARTERS_OF_CODE : STARTERS;
  byId("starters").replaceChildren(
    ...starters.map((text) =>
      element(
        "button",
        {
          type: "button",
          class: "pill",
          onclick: () => {
            setDraft(text);
            byId("composer").requestSubmit();
          },
        },
        text,
      ),
    ),
  );
}

function startChat() {
  startComposer();
  // A phone may end a page that is out of sight without another word.
  addEventListener("pagehide", () => chat.keep?.());
  document.addEventListener("visibilitychange", () => document.hidden && chat.keep?.());
  byId("clear").addEventListener("click", () => {
    openConversation(new Conversation());
    byId("prompt").focus();
  });
  showStarters();
  openConversation(loadConversation(memory.get("current", null)) ?? new Conversation());
}
