// A conversation as a file: Markdown to read, JSON to work with, and everything at once to move to another browser.

function download(name, type, text) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function fileName(conversation, ending) {
  const words =
    conversation
      .name()
      .toLowerCase()
      .match(/[\p{Letter}\p{Number}]+/gu) ?? [];
  return `${words.join("-").slice(0, 60) || "conversation"}.${ending}`;
}

function asMarkdown(conversation) {
  const parts = [`# ${conversation.name()}`];
  for (const at of conversation.path()) {
    const node = conversation.nodes[at];
    const text = node.role === "user" ? contentWithFiles(node) : node.content;
    parts.push(`## ${node.role === "user" ? "Question" : "Answer"}`, text);
    if (node.summary)
      parts.push(`*${[server.info?.model, strip(node.summary)].filter(Boolean).join(" · ")}*`);
  }
  return `${parts.join("\n\n")}\n`;
}

function asJson(conversation) {
  const messages = conversation.path().map((at) => {
    const { role, content, files, thoughts, summary } = conversation.nodes[at];
    return { role, content, files, reasoning_content: thoughts || undefined, figures: summary?.figures };
  });
  const { title, created, changed } = conversation;
  const about = {
    title: conversation.name() ?? title,
    created: new Date(created),
    changed: new Date(changed),
  };
  return JSON.stringify(
    { ...about, model: server.info?.model, settings: lasting.get("settings", {}), messages },
    null,
    2,
  );
}

const ARCHIVE = "monotape conversations";

function archive() {
  const conversations = listedConversations().map(({ id }) => lasting.get(`conversation.${id}`, null));
  return JSON.stringify({ kind: ARCHIVE, conversations: conversations.filter(Boolean) });
}

// Whether it has the shape of a conversation: a file may come from anywhere.
function isConversation(given) {
  const isText = (value) => value == null || typeof value === "string";
  const nodes = Array.isArray(given?.nodes) ? given.nodes : [];
  const sound = nodes.every(
    (node, index) =>
      (node?.role === "user" || node?.role === "assistant") &&
      typeof node.content === "string" &&
      isText(node.thoughts) &&
      Number.isInteger(node.parent) &&
      node.parent >= ROOT &&
      node.parent < index &&
      Array.isArray(node.files ?? []) &&
      (node.files ?? []).every((file) => typeof file?.name === "string" && typeof file.text === "string"),
  );
  const ways = Object.entries(given?.chosen ?? {});
  return (
    nodes.length > 0 &&
    sound &&
    isText(given.title) &&
    ways.every(([from, to]) => nodes[to]?.parent === Number(from))
  );
}

// The figures of an answer, as far as they are numbers.
function soundSummary(given) {
  if (!given?.figures) return undefined;
  const figures = Object.entries(given.figures).filter(([, value]) => Number.isFinite(value));
  return { figures: Object.fromEntries(figures), finish: String(given.finish) };
}

// Adds the conversations of an archive to those here. Each gets a new name, so that nothing is written over.
async function importArchive(file) {
  let found = null;
  try {
    found = JSON.parse(await file.text());
  } catch {
    // Said below.
  }
  const given = found?.kind === ARCHIVE && Array.isArray(found.conversations) ? found.conversations : [];
  const sound = given.filter(isConversation);
  if (!sound.length)
    return showNotice(
      "Nothing was imported.",
      `${file.name} is not a file that Export all of this page has made.`,
    );
  for (const { title, nodes, chosen, ...rest } of sound) {
    const created = Number.isFinite(rest.created) ? rest.created : Date.now();
    const told = nodes.map((node) => ({ ...node, summary: soundSummary(node.summary) }));
    new Conversation({ title, created, nodes: told, chosen }).save();
  }
  showList();
  showNotice("Imported.", `${count(sound.length)} conversation${sound.length === 1 ? "" : "s"}.`);
}

function startExport() {
  const menu = byId("export");
  document.addEventListener("click", (event) => {
    if (!menu.querySelector("summary").contains(event.target)) menu.open = false;
  });
  byId("export-markdown").addEventListener("click", () =>
    download(fileName(chat.conversation, "md"), "text/markdown", asMarkdown(chat.conversation)),
  );
  byId("export-json").addEventListener("click", () =>
    download(fileName(chat.conversation, "json"), "application/json", asJson(chat.conversation)),
  );
  byId("export-all").addEventListener("click", () =>
    download("monotape-conversations.json", "application/json", archive()),
  );
  const picker = byId("import-picker");
  byId("import").addEventListener("click", () => picker.click());
  picker.addEventListener("change", async () => {
    for (const file of picker.files) await importArchive(file);
    picker.value = "";
  });
}
