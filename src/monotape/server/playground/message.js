// One message on the page: its text, what can be done with it, and the strip of figures that stays under an answer.

const ENDINGS = {
  stopped: "stopped",
  length: "ended at its length",
  error: "broken off",
  reload: "interrupted by a reload",
};

function strip({ figures, finish }) {
  const parts = [];
  if (figures.speed) parts.push(`${speedText(figures.speed)} tok/s`);
  if (figures.speed && figures.ceiling)
    parts.push(`${((100 * figures.speed) / figures.ceiling).toFixed(0)} % of light`);
  if (figures.ttft ?? figures.seenTtft)
    parts.push(`first token ${milliseconds(figures.ttft ?? figures.seenTtft)}`);
  if (figures.produced)
    parts.push(
      `${count(figures.produced)} tokens${figures.accepted ? `, ${count(figures.accepted)} from drafts` : ""}`,
    );
  if (figures.prompt != null)
    parts.push(`prompt ${count(figures.prompt)}${figures.cached ? `, ${count(figures.cached)} cached` : ""}`);
  if (ENDINGS[finish]) parts.push(ENDINGS[finish]);
  return parts.join(" · ");
}

function action(label, name, onclick) {
  return element("button", { type: "button", class: `act ${name}`, onclick }, label);
}

// Earlier and later versions of a question or an answer.
function versionPicker(index) {
  const versions = chat.conversation.versions(index);
  if (versions.length < 2) return null;
  const at = versions.indexOf(index);
  const step = (to, label, mark) =>
    element(
      "button",
      {
        type: "button",
        class: "act",
        disabled: versions[to] === undefined,
        "aria-label": label,
        onclick: () => showVersion(versions[to]),
      },
      mark,
    );
  return element(
    "span",
    { class: "versions" },
    step(at - 1, "Earlier version", "‹"),
    `${at + 1} / ${versions.length}`,
    step(at + 1, "Later version", "›"),
  );
}

class MessageView {
  constructor(index) {
    const node = chat.conversation.nodes[index];
    this.index = index;
    this.body = element("div", { class: "text" });
    this.thinking = element(
      "details",
      { class: "thoughts", hidden: true },
      element("summary", {}, "Thinking"),
      element("div"),
    );
    this.foot = element("footer", { class: node.role === "user" ? "acts" : "strip" });
    this.article = element(
      "article",
      {
        class: `message ${node.role}`,
        "aria-label": node.role === "user" ? "You" : "Answer",
        "data-index": index,
      },
      this.thinking,
      this.body,
    );
    this.text = new TextView(this.body);
    if (node.role === "user") this.showQuestion(node);
    else if (node.summary) this.finish();
    else this.show({ text: node.content, thoughts: node.thoughts ?? "", endAt: 0 }); // another tab is at it
    byId("log").append(this.article);
  }

  showQuestion(node) {
    const bubble = element("div", { class: "bubble" });
    if (node.files?.length)
      bubble.append(
        element(
          "div",
          { class: "attached" },
          ...node.files.map((file) =>
            element(
              "details",
              { class: "attachment" },
              element("summary", {}, fileChip(file)),
              element("pre", { tabindex: "0" }, file.text),
            ),
          ),
        ),
      );
    this.body.append(element("p", { class: "plain-text" }, node.content));
    if (!node.content) this.body.hidden = true;
    this.body.replaceWith(bubble);
    bubble.append(this.body);
    this.foot.append(
      ...[
        versionPicker(this.index),
        action("Edit", "edit", () => editQuestion(this)),
        copyButton(() => node.content, "question"),
      ].filter(Boolean),
    );
    this.article.append(this.foot);
  }

  // While it is being made. `begun` is the text that it continues.
  show(answer, begun = "", complete = false) {
    this.text.show(asWritten(begun + answer.text), complete);
    this.thinking.hidden = !answer.thoughts;
    if (answer.thoughts) this.thinking.lastElementChild.textContent = answer.thoughts;
    this.showReading(answer, begun);
  }

  // How far the prompt has been read, until there is something of the answer to see.
  showReading(answer, begun) {
    const wanted = answer.endAt == null && !answer.text && !answer.thoughts;
    if (!wanted) {
      this.reading?.remove();
      this.reading = null;
      return;
    }
    if (!this.reading) {
      this.reading = element(
        "div",
        { class: "reading" },
        element("span"),
        element("div", { class: "bar" }, element("i", { class: "fresh" })),
      );
      this.reading.lastElementChild.setAttribute("role", "progressbar");
      this.reading.lastElementChild.setAttribute("aria-label", "Prompt read");
      this.article.insertBefore(this.reading, begun ? null : this.body);
    }
    const [line, bar] = this.reading.children;
    const { total, cache, processed } = answer.reading ?? {};
    const known = total > 0 && processed > (cache ?? 0);
    line.textContent = readingText(answer.reading);
    bar.hidden = !known;
    if (!known) return;
    bar.setAttribute("aria-valuenow", Math.round((100 * processed) / total));
    width(bar.firstElementChild, processed / total);
  }

  finish() {
    const node = chat.conversation.nodes[this.index];
    this.article.classList.remove("live");
    this.show({ text: node.content, thoughts: node.thoughts ?? "", endAt: 0 }, "", true);
    const cutOff = node.content && node.summary.finish !== "stop";
    const tools = element(
      "span",
      { class: "tools" },
      ...[
        versionPicker(this.index),
        cutOff ? action("Continue", "continue", () => continueAnswer(this)) : null,
        action("Regenerate", "regenerate", () => regenerate(this.index)),
        node.content ? copyButton(() => node.content, "answer") : null,
      ].filter(Boolean),
    );
    this.foot.replaceChildren(element("span", { class: "told" }, strip(node.summary)), tools);
    this.article.append(this.foot);
  }

  remove() {
    this.article.remove();
  }
}

// A model that only completes code writes no Markdown.
function asWritten(text) {
  const language = server.info?.completes;
  return language && text ? `~~~~~~${language}\n${text}\n~~~~~~` : text;
}

function readingText(reading) {
  if (!reading) return "waiting for the server …";
  const { total, cache, processed } = reading;
  const cached = cache ? `, ${count(cache)} of them cached` : "";
  if (processed <= (cache ?? 0)) return `reading the prompt: ${count(total)} tokens${cached} …`;
  const left = (reading.time_ms / 1000) * ((total - processed) / (processed - (cache ?? 0)));
  const about = left < 55 ? `${roundUp(left)} s` : `${Math.ceil(left / 60)} min`;
  const soon = left >= 5 ? `, about ${about} left` : "";
  return `reading the prompt: ${count(processed)} of ${count(total)} tokens${cached}${soon}`;
}

// The question becomes a text field. Sending it adds a version of the question; the former version stays.
function editQuestion(view) {
  if (chat.sending) return;
  const node = chat.conversation.nodes[view.index];
  const area = element("textarea", { "aria-label": "Edit the question", rows: 1, maxlength: 400000 });
  area.value = node.content;
  const close = () => {
    form.replaceWith(view.article);
    view.article.querySelector(".edit")?.focus();
  };
  const form = element(
    "form",
    {
      class: "message editor",
      onsubmit: (event) => {
        event.preventDefault();
        const text = area.value.trim();
        if (!text && !node.files?.length) return area.focus();
        close();
        resend(view.index, text);
      },
    },
    area,
    element(
      "div",
      { class: "actions" },
      element("button", { class: "primary", type: "submit" }, "Send"),
      element("button", { class: "quiet", type: "button", onclick: close }, "Cancel"),
    ),
  );
  area.addEventListener("input", () => resize(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
  view.article.replaceWith(form);
  resize(area);
  area.focus();
}
